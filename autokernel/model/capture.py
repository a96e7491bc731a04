"""A model as graphs: captured by Dynamo (graph breaks are fine), traced to ATen before any decomposition.

Linear, scaled_dot_product_attention, layer_norm, softmax and their like stay single nodes, the casts that autocast makes
become nodes. What would be changed by being traced once more (a branch, a checkpoint, an autograd.Function) is one node,
as Dynamo wrote it. For matching, simplified() writes in one way what a program may write in many without meaning anything
else: every view is a `reshape`, every cast a `to(dtype)`, one to the same dtype is nothing, a square is `pow(x, 2)`.
"""

import gc
import linecache
import operator
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch._dynamo.utils as dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import SkipFrame
from torch._guards import CompileContext, TracingContext
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx import Graph, GraphModule, Interpreter, Node, Proxy
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.node import has_side_effect
from torch.nn.attention import _cur_sdpa_kernel_backends, _sdpa_kernel
from torch.profiler import record_function
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves, tree_map

from autokernel.model import catching, padding
from autokernel.model.forwards import Forwards
from autokernel.model.leaving import left_whole
from autokernel.model.masks import replace_known_masks
from autokernel.model.padding import Encoders
from autokernel.spec import TensorSpec

aten = torch.ops.aten
checkpoint = torch.ops.higher_order.tag_activation_checkpoint
IN_GRAPH = "autokernel:graph"
OUTSIDE = "autokernel:outside:"  # followed by the reason: a range whose operators are in no graph
# Of one function, over all sets of winners, shapes and gradient modes. Beyond its limit (8) Dynamo runs the original and
# says so in a log at most.
MAX_VERSIONS = 128
MAX_PASSES = 20  # until Dynamo compiles nothing new: two for each function that is left out, and those that it calls
MAX_FRAMES = 10_000  # whose compilation Dynamo remembers while a model is captured; by default it is 64

ASSERTIONS = "rewrite_assert_with_torch_assert"  # whether those about tensors are in graphs, as torch._assert_async

RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
CASTS = {aten.to.dtype_layout, aten.to.other, aten.type_as.default}  # where the device stays the same
# Nothing happens if the result has the input's dtype, shape and strides.
CONVERSIONS = {
    aten.to.dtype,
    aten.to.device,
    aten.contiguous.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.alias.default,
    aten.reshape.default,
}
ITSELF = {
    aten.to.dtype,
    aten.to.device,
    aten.contiguous.default,
    aten.dropout.default,
}  # what nothing happens to they return
# Norms that keep statistics, and what their argument is called that says whether they do.
KEEP_STATISTICS = {
    aten.batch_norm.default: "training",
    aten.native_batch_norm.default: "training",
    aten.cudnn_batch_norm.default: "training",
    aten.miopen_batch_norm.default: "training",
    aten.instance_norm.default: "use_input_stats",
}
OF_DYNAMO = "grapharg"  # in a node's meta: holds on to a real input, which Dynamo itself lets go once it has compiled
CHECKS = "autokernel_checks"  # in a node's meta: it may raise, and nothing else comes of it
NUMBER = "autokernel_number"  # in an input's meta: see mark_numbers()
DELAYED = re.compile(r"Unsupported function call \(delayed\)[\s\S]*?Reason: (.*)")  # of a break, and why it is one
CALLERS = count()  # for their names
SETTLED = ContextVar("SETTLED", default=False)  # whether as_applied() set what stays: Dynamo's settings are a thread's own
set_gradients = torch._C._set_grad_enabled
# What sets something, and needs no note: of transforms, which are one node, and what make_fx or _Traced see to.
NOTED = {
    set_gradients,
    torch.amp.autocast_mode._exit_autocast,
    torch._C._autograd._saved_tensors_hooks_disable,
    torch._C._autograd._saved_tensors_hooks_enable,
}
SETTER = re.compile("_*(set|use|enable|disable|allow)_")  # what its name begins with
data_of = torch._C._autograd._get_data_attr  # x.data: no operator, and detach() would count writes to it as writes to x


@contextmanager
def recurrent_modules_traced() -> Iterator[None]:
    """nn.RNN, nn.GRU and nn.LSTM are one node of a graph; without this, Dynamo leaves out the rest of their caller as well.

    A compiler is not given such graphs: PyTorch 2.13's Inductor crashes on the LSTM's backward pass, its AOTAutograd at an
    LSTM in training whose lengths change, and dropout between layers leaves other random numbers for later there.
    """
    with _set("allow_rnn", True):
        yield


@contextmanager
def as_applied(counts: bool = False) -> Iterator[None]:
    """How Dynamo calls a model with kernels in it; `counts`: whether integers of its modules may be inputs of graphs.

    A function that it fails at, even by an error of its own, runs as it is, and Dynamo logs why. So does one that is called
    while another thread traces, or that torch.fx traces. An assertion about a tensor ends a graph: in one it would raise
    another error, on a GPU one that ends the process.
    """
    if not SETTLED.get():
        allow_versions()
        torch._dynamo.config.error_on_nested_fx_trace = False
        if hasattr(torch._dynamo.config, "invalidate_compile_context_weakrefs"):  # where it is not yet, none are let go
            torch._dynamo.config.invalidate_compile_context_weakrefs = True  # module.to() may have to swap parameters
        SETTLED.set(True)
    integers = _set("allow_unspec_int_on_nn_module", True) if counts else nullcontext()
    with _set("suppress_errors", True), _set(ASSERTIONS, False), integers, left_whole():
        yield


def allow_versions() -> None:
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MAX_VERSIONS)


@contextmanager
def _set(name: str, wanted: bool) -> Iterator[None]:
    """A setting of Dynamo; its own patch() costs 30 µs a call."""
    before = getattr(torch._dynamo.config, name)
    if before == wanted:  # where settings are of all threads, by one that sets it back
        yield
        return
    setattr(torch._dynamo.config, name, wanted)
    try:
        yield
    finally:
        setattr(torch._dynamo.config, name, before)


@dataclass(eq=False)
class CapturedGraph:
    """One graph of a model with the inputs of its first call; `calls` counts its calls in one pass."""

    module: GraphModule
    inputs: tuple[Any, ...]
    function: int  # Dynamo's number of the function that it is from
    calls: int = 0
    left: str = ""  # why it counts as not captured, if it does


@dataclass(frozen=True)
class Capture:
    graphs: tuple[CapturedGraph, ...]
    breaks: tuple[str, ...]  # why parts of the model are in no graph, in Dynamo's words or ours


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    again: Callable[[Callable[[], Any]], None] | None = None,
) -> Capture:
    """Run the model once, without gradients, and keep every graph that Dynamo makes of it.

    What cannot be captured runs as it is. `again` gets the captured model, to be run again: each of its graphs runs
    inside a range of the profiler of the name IN_GRAPH, and what is known to be in none in one of OUTSIDE and the reason.
    What Dynamo would compile anew in each of these passes counts as not captured, and runs as it is.
    """
    graphs: list[CapturedGraph] = []
    left_alone: list[str] = []
    skipped: dict[int, str] = {}  # Dynamo's number of a function -> why it runs as it is

    def outside(why: str) -> record_function:
        left_alone.append(why)
        return record_function(OUTSIDE + why)

    encoders = Encoders(model, outside)
    forwards = Forwards(model, encoders.forwards)
    forwards.line_by_line()

    def backend(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def left(why: str) -> Callable[..., Any]:
            return outside(why)(forward_of(module))

        number = CompileContext.current_compile_id().frame_id
        unfit = encoders.found and padding.why_not_compiled(module) or catching.why_not_compiled(module)
        if why := skipped.get(number) or unfit:
            skipped[number] = why
            raise SkipFrame(why)  # Dynamo runs the model's own code
        if why := why_left_alone(module):
            return left(why)
        try:
            graph = CapturedGraph(to_aten(module), tuple(inputs), number)
        except Exception as error:  # of any kind: this is whatever the model does, met by a tracer
            return left(f"a graph is left as it is: {reason(error)}")
        graphs.append(graph)

        def call(*values: Any) -> Any:
            graph.calls += counting
            graph.inputs = values if graph.calls == 1 else graph.inputs
            with record_function(OUTSIDE + graph.left if graph.left else IN_GRAPH):
                return module.forward(*values)

        return call

    torch._dynamo.reset()  # compiled code of an earlier capture would be found and run instead
    counting = True
    compiled = compile_model(model, backend=backend, dynamic=False)
    settings = torch._dynamo.config.patch({"suppress_errors": True, "recompile_limit": MAX_VERSIONS, ASSERTIONS: False})
    with torch.no_grad(), settings, left_whole(), recurrent_modules_traced(), forwards.in_place(), _remembered_frames():
        compiled(*args, **kwargs)
        for _ in range(MAX_PASSES if again else 0):
            count = len(dynamo.get_compilation_metrics())
            for graph in graphs:
                graph.calls = 0
            compiled(*args, **kwargs)
            new = dynamo.get_compilation_metrics()[count:]
            skipped |= _compiled_anew(new)
            if not new:
                break
        counting = False
        graphs = [graph for graph in graphs if graph.calls and graph.function not in skipped]
        for graph in tuple(graphs):
            graph.left = _why_it_fails(graph)
            if graph.left:
                graphs.remove(graph)
                left_alone.append(graph.left)
        frames, breaks = _left_out(skipped)

        def run() -> Any:
            with _ranges(frames):
                return compiled(*args, **kwargs)

        if again:
            again(run)
        free_what_failed(dynamo.get_compilation_metrics())
    torch._dynamo.reset()
    return Capture(tuple(graphs), tuple(dict.fromkeys((*breaks, *left_alone))))


def compile_model(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """As torch.compile(), also of a module whose __setattr__() refuses what that sets of it: whether it is trained."""
    try:
        return torch.compile(model, **options)
    except Exception:  # of any kind: it is the model's own
        return torch.compile(caller(model), **options)


def caller(model: nn.Module) -> Callable[..., Any]:
    """As model.compile() does, but by way of a function of ours: Dynamo skips forward() of the modules in torch.nn itself.

    Its code and name are of this model alone: what Dynamo decides of a function, such as to leave it out, or which of its
    sizes change, is decided for all that share them.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"{type(model).__name__}_{next(CALLERS)}")
    return call


def _why_it_fails(graph: CapturedGraph) -> str:
    """Why a graph cannot be run by itself; empty if it can."""
    try:
        graph.module(*graph.inputs)
    except Exception as error:  # of any kind: this is whatever the model does
        return f"a graph is left as it is: {reason(error)}"
    return ""


def _compiled_anew(compilations: Sequence[Any]) -> dict[int, str]:
    """By Dynamo's numbers of functions: why it did not take what it had compiled for the pass before."""
    words = "a pass changes the model, so Dynamo compiles it anew: no longer"
    return {_number(c): f"{words} {lost_guard(c)}" for c in compilations if c.recompile_reason}


def lost_guard(compilation: Any) -> str:
    """What was true of a function when Dynamo had compiled it before."""
    return compilation.recompile_reason.partition(": ")[2].partition("#")[0].strip()


def _number(compilation: Any) -> int:
    return int(compilation.compile_id.partition("/")[0])


Function = tuple[str, int, str]  # file, first line, name


@contextmanager
def _remembered_frames() -> Iterator[None]:
    """All that Dynamo says of the frames that it meets inside; what it said before is forgotten."""
    dynamo.graph_break_reasons.clear()
    dynamo.clear_compilation_metrics()
    dynamo.set_compilation_metrics_limit(MAX_FRAMES)
    try:
        yield
    finally:
        dynamo.set_compilation_metrics_limit(dynamo.DEFAULT_COMPILATION_METRICS_LIMIT)


def _left_out(skipped: Mapping[int, str]) -> tuple[dict[Function, str], list[str]]:
    """Why Dynamo leaves functions, or something in them, out of its graphs: by function, and all of the reasons.

    skipped: the same of what is left out on our account, by Dynamo's numbers.
    """
    frames = dynamo.get_compilation_metrics()
    reasons: dict[Function | None, list[str]] = defaultdict(list)
    for frame in frames:
        if frame.fail_type:
            place = frame.fail_user_frame_filename, frame.fail_user_frame_lineno
            reasons[function_of(frame)].append(in_words(frame.fail_reason or frame.fail_type, *place))
        elif why := skipped.get(_number(frame)):
            reasons[function_of(frame)].append(why)
    for owner, why in breaks(frames):
        reasons[owner].append(why)
    by_function = {function: "; ".join(dict.fromkeys(whys)) for function, whys in reasons.items() if function}
    return by_function, [why for whys in reasons.values() for why in whys]


def free_what_failed(frames: Sequence[Any]) -> None:
    """Frees what Dynamo left behind of those of `frames`, its compilations, that failed.

    Inside of vmap() or jvp() that holds dispatch keys: whenever it went, autograd, say, would be off from then on.
    """
    if any(frame.fail_type for frame in frames):
        now = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        with torch._C._ForceDispatchKeyGuard(*now):
            gc.collect()


def breaks(frames: Sequence[Any]) -> Iterator[tuple[Function | None, str]]:
    """Why Dynamo broke graphs, and in which function of `frames`, its compilations; None: in none of them."""
    for broken in dynamo.graph_break_reasons:
        *_, last = broken.user_stack or [None]
        owner = broken.user_stack and _owner(broken.user_stack[0], frames)
        yield owner or None, in_words(broken.reason, last and last.filename, last and last.lineno)


def function_of(frame: Any) -> Function:
    return frame.co_filename, frame.co_firstlineno, frame.co_name


def _owner(place: Any, frames: Sequence[Any]) -> Function | None:
    """The function that Dynamo compiled when it met `place`: one of the model's, or the rest of one behind a break."""
    of_this = re.compile(rf"{re.escape(place.name)}|torch_dynamo_resume_in_{re.escape(place.name)}_at_\d+")
    earlier = [
        function_of(f)
        for f in frames
        if f.co_filename == place.filename
        and of_this.fullmatch(f.co_name)
        and (f.co_firstlineno < place.lineno or f.co_name == place.name and f.co_firstlineno == place.lineno)
    ]
    return max(earlier, key=lambda function: function[1], default=None)


def in_words(reason: str, file: str | None, line: int | None) -> str:
    """Dynamo's reason in a line, and where in the model it met it."""
    words = reason.strip().splitlines()[0]
    if delayed := DELAYED.search(reason):
        words = delayed[1]
    if words.startswith("generic_jump"):
        words = "Data-dependent branching"
    code = linecache.getline(file, line).strip() if file and line else ""
    return f"{words} ({Path(file).name}:{line}: {code})" if code else words


@contextmanager
def _ranges(frames: Mapping[Function, str]) -> Iterator[None]:
    """Each call of a function of `frames` in a range of the profiler of the name OUTSIDE and the reason."""
    entered: dict[FrameType, record_function] = {}

    def follow(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and (why := frames.get((code.co_filename, code.co_firstlineno, code.co_name))):
            entered[frame] = record_function(OUTSIDE + why)
            entered[frame].__enter__()
        elif event == "return" and frame in entered:
            entered.pop(frame).__exit__(None, None, None)

    if not frames:
        yield
        return
    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        yield
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:  # a profiler that is written in C, cProfile: it can only be told to go on
            before.enable()


def forward_of(module: GraphModule) -> Callable[..., Any]:
    """What a graph computes, without a call of a module: that costs the host 2 µs, and hooks of all modules would see it.

    The forward() of Dynamo's graphs is such a call, unless it was compiled before it was taken.
    """
    _LazyGraphModule.force_recompile(module)
    return module.forward


def reason(error: Exception) -> str:
    """An error in one line, for a list of what is left as it is."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def why_left_alone(module: GraphModule) -> str | None:
    """Traced once more, a graph would lose a hook, a number that changes, inference mode, or that a tensor is quantised.

    A jagged tensor has a size that is another one for each tensor. A tensor that wraps others has no memory of its own.
    """
    if any(t.is_nested for t in _tensors(module)):
        return "a graph with jagged tensors in it is left as it is"
    if name := next((type(t).__name__ for t in _tensors(module) if is_traceable_wrapper_subclass(t)), None):
        return f"a graph with {name} in it, which wraps other tensors, is left as it is"
    methods = {"register_hook", "requires_grad_", "retain_grad", "item", "_enter_inference_mode"}
    methods |= {"quantize_per_tensor", "quantize_per_channel", "quantize_per_tensor_dynamic", "dequantize"}
    first = next((name for n in module.graph.nodes if (name := _name(n)) in methods and not reads_a_number(n)), None)
    return first and f"a graph with {first} in it is left as it is"


def _tensors(module: GraphModule) -> Iterator[Tensor]:
    """What stands for the tensors in a graph from Dynamo."""
    leaves = (leaf for node in module.graph.nodes for leaf in tree_leaves(node.meta.get("example_value")))
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


def reads_a_number(node: Node) -> bool:
    """Whether it is how Dynamo hands a float of Python to a graph: in a tensor that nothing else takes notice of."""
    if (node.op, node.target) != ("call_method", "item") or not _is_float(node):
        return False
    return node.args[0].op == "placeholder" and len(node.args[0].users) == 1


def _is_float(node: Node) -> bool:
    """Whether a node of Dynamo's stands for a float that changes."""
    return isinstance(node.meta.get("example_value"), torch.SymFloat)


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def numbers_in(module: GraphModule) -> list[Node]:
    """The inputs of a graph from Dynamo that are integers and change, and on which the layout of no tensor depends.

    Such as the step of a schedule: a graph for each of its values would have the same sites as one for all of them.
    """
    of_layouts = free_symbols([*_tensors(module)])
    inputs = module.graph.find_nodes(op="placeholder")
    numbers = [n for n in inputs if isinstance(n.meta.get("example_value"), torch.SymInt)]
    return [n for n in numbers if not free_symbols(n.meta["example_value"]) & of_layouts]


def mark_numbers(numbers: Iterable[Node]) -> None:
    """From now on to_aten() keeps these inputs as they are, whatever they are at hand."""
    for node in numbers:
        node.meta[NUMBER] = True


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", None) or str(node.target).rpartition(".")[2]


def to_aten(module: GraphModule, gradients: bool = False) -> GraphModule:
    """A graph from Dynamo, in ATen; nodes carry a fake tensor in `meta["val"]`.

    Of symbolic sizes it takes those of the call at hand. Autocast, inside of the graph or around it, is in it as the casts
    that it makes: to be run where no autocast is (see without_autocast). `gradients`: whether it will have a backward pass.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    fakes = [node.meta["example_value"] for node in inputs]
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), None)
    switches = any(node.target is torch._C._set_grad_enabled for node in module.graph.nodes)
    apart = _transforms_apart(_numbers_apart(module))
    with _making_fakes(mode) if mode else nullcontext():
        values = map(at_hand, fakes)
        given = [_Number(i, v) if NUMBER in n.meta else v for i, (n, v) in enumerate(zip(inputs, values))]
        traced = trace(_Traced(apart, gradients or switches).run, given)
    replace_known_masks(traced, set().union(*map(written, traced.graph.nodes)))
    prune(traced)
    _return_numbers(traced, module)
    return traced


class _Number(int):
    """An input of a graph that is traced, at hand; `place`: among its inputs."""

    place: int

    def __new__(cls, place: int, number: int) -> "_Number":
        made = super().__new__(cls, number)
        made.place = place
        return made


@contextmanager
def _making_fakes(mode: FakeTensorMode) -> Iterator[None]:
    """Also what a graph makes from nothing, such as positions, is fake in here."""
    # When Dynamo calls a backend its context has another mode, beside which torch.tensor() of PyTorch 2.9 raises.
    with mode, mock.patch.object(TracingContext.try_get() or TracingContext(mode), "fake_mode", mode):
        yield


class Stretch(nn.Module):
    """Part of a graph, as it is: of modules that are no GraphModule, nobody takes out nodes without a use."""

    def __init__(self, body: GraphModule):
        super().__init__()
        self.body = body

    def forward(self, *values: Any) -> Any:
        return self.body(*values)


def _transforms_apart(module: GraphModule) -> GraphModule:
    """The graph with each stretch under vmap (grad, jvp, dual_level) as the body of one operator of higher order."""
    graph, copies, stretch, depth = Graph(), {}, [], 0
    for node in module.graph.nodes:
        step = _nesting(node)
        depth += step
        if depth or step:
            stretch.append(node)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta.pop(OF_DYNAMO, None)
        if stretch and not depth:
            results = [node for node in stretch if any(user not in stretch for user in node.users)]
            _wrap(graph, module, stretch, results, copies)
            stretch = []
    return GraphModule(module, graph)


def _numbers_apart(module: GraphModule) -> GraphModule:
    """The graph with each operator on a number that changes as the body of one of higher order.

    That is given the integers that are marked as numbers, and reads a float itself.
    """
    if not any(reads_a_number(node) or NUMBER in node.meta for node in module.graph.nodes):
        return module
    graph, copies = Graph(), {}
    numbers: dict[Node, list[Node]] = {}  # -> the nodes that they are computed by
    for node in module.graph.nodes:
        given = [number for number in node.all_input_nodes if number in numbers]
        made_by = [*dict.fromkeys(n for number in given for n in numbers[number])]
        if NUMBER in node.meta:
            numbers[node] = []
            copies[node] = graph.node_copy(node)
        elif reads_a_number(node) or given and _is_number(node):
            numbers[node] = [*made_by, node]
        elif given and node.op == "output":
            if any(reads_a_number(n) for number in given for n in numbers[number]):
                raise NotImplementedError("a graph that returns a float that changes, or what is computed of one")
            graph.node_copy(node, lambda n: copies.get(n))  # see _return_numbers()
        elif given:
            _wrap(graph, module, [*made_by, node], [node], copies)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta.pop(OF_DYNAMO, None)
    return GraphModule(module, graph)


def _return_numbers(traced: GraphModule, module: GraphModule) -> None:
    """Has `traced`, made of a graph from Dynamo, return what this computes of its numbers, and not what that is at hand."""
    output, (results,) = traced.graph.output_node(), module.graph.output_node().args
    copies = dict(zip(module.graph.find_nodes(op="placeholder"), traced.graph.find_nodes(op="placeholder")))

    def of_numbers(node: Any) -> bool:
        if not isinstance(node, Node):
            return False
        return NUMBER in node.meta or _is_number(node) and any(map(of_numbers, node.all_input_nodes))

    def copied(node: Node) -> Node:
        if node not in copies:
            if not _is_number(node):
                raise NotImplementedError("a graph that returns an integer that it computes of a tensor")
            copies[node] = traced.graph.node_copy(node, copied)
        return copies[node]

    if isinstance(results, (list, tuple)) and any(map(of_numbers, results)):
        with traced.graph.inserting_before(output):
            made = [copied(ours) if of_numbers(ours) else own for ours, own in zip(results, output.args[0], strict=True)]
        output.args = (type(output.args[0])(made),)
        traced.recompile()


def _nesting(node: Node) -> int:
    """1 where a transform of functorch, or a level of tangents, begins, -1 where it ends."""
    name = getattr(node.target, "__name__", "")
    return name.endswith(("_increment_nesting", "_enter_dual_level")) - name.endswith(
        ("_decrement_nesting", "_exit_dual_level")
    )


def _wrap(graph: Graph, module: GraphModule, stretch: list[Node], results: list[Node], copies: dict[Node, Node]) -> None:
    """Appends a call of `stretch` to `graph`; `copies` gets its `results`."""
    given = [n for n in dict.fromkeys(n for node in stretch for n in node.all_input_nodes) if n not in stretch]
    piece = Graph()
    inside = {node: piece.placeholder(f"given_{i}") for i, node in enumerate(given)}
    for node in stretch:
        inside[node] = piece.node_copy(node, inside.__getitem__)
    piece.output(tuple(inside[node] for node in results))
    name = f"stretch_{stretch[-1].name}"
    module.add_module(name, Stretch(GraphModule(module, piece)))
    call = graph.call_function(torch.ops.higher_order.wrap, (graph.get_attr(name), *(copies[node] for node in given)))
    for i, node in enumerate(results):
        copies[node] = graph.call_function(operator.getitem, (call, i))


class _Traced(Interpreter):
    """Runs a graph from Dynamo under a tracer, to which an operator of higher order is one node.

    Its autocast is PyTorch's state, where trace() finds it: make_fx would only note it down. Another setting of PyTorch's
    is both, for make_fx would not note it down.
    """

    def __init__(self, module: GraphModule, gradients: bool):
        super().__init__(module)
        self.gradients = gradients

    def run_node(self, n: Node) -> Any:
        if _is_setting(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            get_proxy_mode().tracer.create_proxy("call_function", _setting(n.target, args, kwargs), (), {})
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.amp.autocast_mode._exit_autocast:
            return _set_autocast(*args[0])
        if target is torch.amp.autocast_mode._enter_autocast:
            device_type, dtype, is_enabled, *_ = *args, None, True
            before = (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
            _set_autocast(device_type, is_enabled, dtype or before[2])
            return before
        if target is data_of:
            return _as_one_node(target, args, kwargs)
        if not isinstance(target, HigherOrderOperator):
            return super().call_function(target, args, kwargs)
        if target is checkpoint and not self.gradients:  # then it is its body, and no more
            return _Traced(args[0], False).run(*args[1:])
        with _autocast_as_nodes():
            return _as_one_node(target, args, kwargs)


def _is_setting(node: Node) -> bool:
    """Whether a node of Dynamo's sets something of PyTorch's, such as which attention is allowed."""
    if node.op != "call_function" or node.users or isinstance(node.target, (OpOverload, HigherOrderOperator)):
        return False
    known = (v.meta.get("example_value") for v in (node, *node.all_input_nodes))  # one that makes a tensor sets nothing
    is_of_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves(list(known)))
    return not is_of_tensors and node.target not in NOTED


def _setting(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
    """What a graph calls, in which arguments of their kinds cannot be."""

    def call() -> None:
        target(*args, **kwargs)

    call.__name__ = getattr(target, "__name__", str(target))  # for the profile
    return has_side_effect(call)


def why_compilers_lose_settings(module: GraphModule) -> str | None:
    """Of a graph that sets something of PyTorch's, such as the default dtype: they do so while they trace it, and no more.

    Which attention is allowed shows in what they trace.
    """
    made = (_name(n) for n in module.graph.nodes if _is_setting(n) and n.target is not _sdpa_kernel)
    first = next(filter(SETTER.match, made), None)
    return first and f"a graph with {first} in it is left as it is"


@contextmanager
def _autocast_as_nodes() -> Iterator[None]:
    """Around an operator whose casts no trace shows: there, autocast itself is in the graph."""
    tracer, entered = get_proxy_mode().tracer, []
    for kind in autocast_devices():
        state = (kind, torch.get_autocast_dtype(kind), True, None)
        entered.append(tracer.create_proxy("call_function", torch.amp.autocast_mode._enter_autocast, state, {}))
    yield
    for proxy in reversed(entered):
        tracer.create_proxy("call_function", torch.amp.autocast_mode._exit_autocast, (proxy,), {})


def _as_one_node(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Its result for fake tensors. The node has the bodies as they are, and in `meta["written"]` what they change."""
    tracer, leaves = get_proxy_mode().tracer, tree_leaves((args, kwargs))
    bodies = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    versions = [None if t.is_inference() else t._version for t in tensors]  # where it is not known, all may be changed
    with disable_proxy_modes_tracing():
        result = target(*args, **kwargs)
    for body in bodies:
        tracer.root.register_module(tracer.get_fresh_qualname("body_"), body)
    inputs = tracer.graph.find_nodes(op="placeholder")

    def proxy_of(v: Any) -> Any:
        return Proxy(inputs[v.place], tracer) if isinstance(v, _Number) else tracer.unwrap_proxy(v)

    proxy = tracer.create_proxy("call_function", target, *tree_map(proxy_of, (args, kwargs)))
    # Without a body, such as a Triton kernel of the model's own, it may change all that it is given.
    is_closed = not (bodies or target is data_of or isinstance(target, OpOverload))
    changed = [t for t, version in zip(tensors, versions) if is_closed or version is None or t._version != version]
    if any(map(_keeps_statistics, bodies)):  # which fake tensors do not tell
        changed += [t for t in tensors if t.dim() == 1 and t.is_floating_point() and not t.requires_grad]
    proxy.node.meta["written"] = memory(changed)
    return track_tensor_tree(result, proxy, constant=None, tracer=tracer)


def _keeps_statistics(body: nn.Module) -> bool:
    """Whether a norm of batches is in it, as Dynamo writes it, in training."""
    graphs = (module.graph for module in body.modules() if isinstance(module, GraphModule))
    norms = (n for graph in graphs for n in graph.nodes if _name(n) in ("batch_norm", "instance_norm"))
    return any(n.args[5] if len(n.args) > 5 else True for n in norms)


def is_forward_mode() -> bool:
    """Whether tensors may have tangents: inside of forward_ad.dual_level()."""
    return forward_ad._current_level >= 0


def is_dispatched() -> bool:
    """Whether a mode of the program's own is told of every operator, as FlopCounterMode is."""
    return bool(torch._C._len_torch_dispatch_stack()) and not all(
        m.is_infra_mode() for m in _get_current_dispatch_mode_stack()
    )


def _set_autocast(device_type: str, is_enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(device_type, is_enabled)
    torch.set_autocast_dtype(device_type, dtype)


def autocast_devices() -> list[str]:
    """The kinds of device for which autocast is on."""
    return [kind for kind in _autocast_keys() if torch.is_autocast_enabled(kind)]


@contextmanager
def without_autocast() -> Iterator[None]:
    switched = autocast_devices()
    for kind in switched:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in switched:
            torch.set_autocast_enabled(kind, True)


@cache
def _autocast_keys() -> dict[str, Any]:
    """Kind of device -> the dispatch key under which PyTorch has what autocast does with each operator there."""
    return {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


@cache
def _autocast_operators() -> dict[Any, Callable[..., Any]]:
    """Operators that autocast sees to, and how to trace them: by these, which call the operators.

    Those that it has kernels of its own for, and those that PyTorch makes of such.
    """
    made_of_others = set(_registered("CompositeImplicitAutograd"))
    functions = {operator: partial(_autocast, operator) for operator in _cast_for() - made_of_others}
    return functions | {operator: partial(_autocast_inside, operator) for operator in made_of_others}


def _registered(key: str) -> Iterator[OpOverload]:
    """The operators that have a kernel of their own under a dispatch key."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space == "aten" and hasattr(getattr(aten, packet, None), overload or "default"):
            yield getattr(getattr(aten, packet), overload or "default")


def _autocast_inside(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Of one that PyTorch makes of others: where autocast casts in there alone, a node with autocast on."""
    result = _autocast(operator, *args, **kwargs)
    is_on = any(not torch._C._dispatch_tls_is_dispatch_key_excluded(_autocast_keys()[kind]) for kind in autocast_devices())
    if result is not NotImplemented or not is_on or operator._schema.is_mutable:
        return result
    if not _casts_inside(operator, args, kwargs):
        return NotImplemented
    with _autocast_as_nodes():
        return _as_one_node(operator, args, kwargs)


def _casts_inside(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    def calls() -> list[Any]:
        with disable_proxy_modes_tracing(), _Calls() as mode:
            operator(*args, **kwargs)
        return mode.seen

    made_of, tensors = calls(), [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if len({t.dtype for t in tensors if t.is_floating_point()}) > 1:  # without casts it would raise, which PyTorch logs
        return any(made in _cast_for() for made, _ in made_of)
    with without_autocast():
        return made_of != calls()


@cache
def _cast_for() -> set[OpOverload]:
    """The operators that autocast has kernels of its own for."""
    return {operator for key in _autocast_keys().values() for operator in _registered(key.name)}


class _Calls(TorchDispatchMode):
    """The operators that are called, and the dtypes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append((func, [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]))
        return result


def _autocast(operator: Any, *args: Any, **kwargs: Any) -> Any:
    kind = next((v.device.type for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)), None)
    if kind not in _autocast_keys() or not torch.is_autocast_enabled(kind):
        return NotImplemented
    key = _autocast_keys()[kind]
    if torch._C._dispatch_tls_is_dispatch_key_excluded(key) or not operator.has_kernel_for_dispatch_key(key):
        return NotImplemented
    return operator._op_dk(key, *args, **kwargs)


def at_hand(fake: Any) -> Any:
    """A size, or a fake tensor, with the sizes of the call at hand."""
    if isinstance(fake, torch.SymInt):
        return fake.node.hint
    if not isinstance(fake, Tensor) or not fake._has_symbolic_sizes_strides:
        return fake
    shape, strides = ([at_hand(n) for n in sizes] for sizes in (fake.shape, fake.stride()))
    spec = TensorSpec(tuple(shape), fake.dtype, tuple(strides), at_hand(fake.storage_offset()))
    storage = torch.empty(spec.storage_numel, dtype=fake.dtype, device=fake.device)
    return storage.as_strided(spec.shape, spec.strides, spec.offset)


def trace(function: Callable[..., Any], inputs: list[Any], tracing_mode: str = "real") -> GraphModule:
    options = {"tracing_mode": tracing_mode, "pre_dispatch": True, "_allow_non_fake_inputs": True}
    with settings_restored(), torch.no_grad():
        traced = make_fx(function, _autocast_operators() | WRITTEN_OUT, **options)(*inputs)
    for node in traced.graph.nodes:
        _fill_in(node)
    for node in traced.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(traced, node.target), FakeTensor):
            raise RuntimeError("the trace lost sight of a tensor, which would be a fake one in the graph")
        node.meta.setdefault("val", getattr(traced, node.target))
    _write_numbers(traced)
    prune(traced, as_written=True)
    return traced


def _write_numbers(traced: GraphModule) -> None:
    """A torch.tensor(0.5) in forward is a constant of the trace, which is copied at each call: it becomes the number."""
    for node in traced.graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default):
        constant = getattr(traced, node.args[0].target, None) if node.args[0].op == "get_attr" else None
        if not isinstance(constant, Tensor) or constant.dim() or constant.is_complex():
            continue
        with _disable_current_modes():
            node.target, node.args = aten.scalar_tensor.default, (constant.item(),)
        node.kwargs = {"dtype": constant.dtype, "device": constant.device}
        for detached in [user for user in node.users if user.target is aten.detach_.default]:
            detached.replace_all_uses_with(node)
            traced.graph.erase_node(detached)
    for node in traced.graph.find_nodes(op="get_attr"):
        if not node.users:
            traced.graph.erase_node(node)
            known = {other.target for other in traced.graph.find_nodes(op="get_attr")}
            if node.target not in known:  # torch.compile asks where each tensor of a module comes from
                delattr(traced, node.target)


class Settings:
    """PyTorch's own, as they are now, of those that a graph may change and with-statements would put back.

    gradients_alone: that is what costs nothing; all take 5 µs.
    """

    def __init__(self, gradients_alone: bool = False) -> None:
        self.gradients = torch.is_grad_enabled()
        kinds = () if gradients_alone else _autocast_keys()
        self.autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self.attention = None if gradients_alone else _cur_sdpa_kernel_backends()
        self.without_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()

    def restore(self) -> None:
        torch.set_grad_enabled(self.gradients)
        for state in self.autocast:
            _set_autocast(*state)
        if self.attention is not None:
            _sdpa_kernel(self.attention)
        if self.without_hooks is None:
            torch._C._autograd._saved_tensors_hooks_enable()


@contextmanager
def settings_restored() -> Iterator[None]:
    settings = Settings()
    try:
        yield
    finally:
        settings.restore()


def restored_on_error(module: GraphModule, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which runs the nodes of a graph: an error in it leaves PyTorch's settings as they were."""
    changes = [node for node in module.graph.nodes if _sets(node)]
    if not changes:
        return call
    gradients_alone = all(node.target is set_gradients for node in changes)

    def run(*values: Any) -> Any:
        settings = Settings(gradients_alone)
        try:
            return call(*values)
        except BaseException:
            settings.restore()
            raise

    return run


def _sets(node: Node) -> bool:
    return node.target in (set_gradients, torch.amp.autocast_mode._enter_autocast) or _is_setting(node)


def has_effects(node: Node) -> bool:
    """Whether it does more than compute its results: changes memory, takes random numbers.

    To PyTorch, attention and recurrent operators always take some; where their dropout is zero they do not.
    """
    if _statistics(node):
        return True
    if not node.is_impure():
        return False
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if not is_random or node.target._schema.is_mutable:
        return True
    given = {
        argument.name: node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(node.target._schema.arguments)
    }
    rates = ("dropout_p", "dropout", *(["p"] if node.target is aten.dropout.default else ()))
    return not any(given.get(name) == 0 for name in rates)


def prune(graph: GraphModule, as_written: bool = False) -> None:
    """Takes out nodes without a use: not in the bodies of operators of higher order, which are the model's, nor those.

    as_written: it is the model's own program. What has no use there, and may raise, stays for that.
    """
    for node in reversed(graph.graph.nodes):
        if node.users or has_effects(node) or isinstance(node.target, HigherOrderOperator):
            continue
        if as_written and catching.may_fail(node):
            node.meta[CHECKS] = True
        elif CHECKS not in node.meta:
            graph.graph.erase_node(node)
    graph.recompile()


def simplified(graph: GraphModule) -> tuple[Graph, dict[Node, Node]]:
    """A copy in which what means the same is written in the same way, for matching, and its nodes -> those of `graph`.

    Values are the same, but not what shares memory with what, and not what gradients flow through.
    """
    copies: dict[Node, Node] = {}
    copy = Graph()
    copy.output(copy.graph_copy(graph.graph, copies))
    modes = any(node.target is set_gradients for node in copy.nodes)
    changed = set().union(*(written(node) for node in copy.nodes))
    for node in copy.nodes:
        if not storages([node, *node.all_input_nodes]) & changed:  # there, views and copies cannot be told apart
            simplify(node, modes)
    copy.eliminate_dead_code()
    return copy, {copied: original for original, copied in copies.items()}


def _einsum(equation: str, operands: Sequence[Tensor], path: Any = None) -> Tensor:
    """See _as_product, in PyTorch's own strides; where these have elements lie elsewhere, as it is."""
    if path is not None:
        return NotImplemented
    cast = _autocast(aten.einsum.default, equation, operands)
    if cast is not NotImplemented:
        return cast
    if len({t.dtype for t in operands}) > 1:
        return _autocast_inside(aten.einsum.default, equation, operands)
    # Where there is but one of something, strides of fake tensors are no real one's.
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        without_memory = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in operands]
        product, expected = _as_product(equation, without_memory), torch.einsum(equation, without_memory)
    if product is NotImplemented or strides_of(product) != strides_of(expected):
        return NotImplemented
    result = _as_product(equation, operands)
    return result if product.stride() == expected.stride() else result.as_strided(expected.shape, expected.stride())


def strides_of(t: Tensor) -> list[int]:
    """Those that say where an element lies."""
    return [stride for size, stride in zip(t.shape, t.stride()) if size > 1]


def _as_product(equation: str, operands: Sequence[Tensor]) -> Tensor:
    """An einsum that is a product of matrices, or of batches of them, written as one; NotImplemented of any other."""
    names, _, result = equation.replace(" ", "").partition("->")
    letters = [list(name) for name in names.split(",")]
    if len(letters) != 2 or "." in equation or any(len(set(name)) < len(name) for name in letters):
        return NotImplemented
    (left, right), (a, b) = letters, operands
    shared, rows, columns = [c for c in left if c in right], [c for c in left if c not in right], set(right) - set(left)
    batch, summed = [c for c in shared if c in result], [c for c in shared if c not in result]
    sizes_agree = all(a.shape[left.index(c)] == b.shape[right.index(c)] for c in shared)
    is_product = len(summed) == len(columns) == 1 and rows and (len(rows) == 1 or not batch)
    if not (sizes_agree and is_product and sorted(result) == sorted([*batch, *rows, *columns])):
        return NotImplemented
    inner = [c for c in right if c not in batch]  # summed and free, in either order
    a, b = _in_order(a, left, batch + rows + summed), _in_order(b, right, batch + inner)
    product = torch.matmul(a, b if inner[0] in summed else b.transpose(-2, -1))
    return _in_order(product, [*batch, *rows, *columns], list(result))


def _encoder_layer(
    x: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """nn.TransformerEncoderLayer's fast path, one operator of PyTorch's for inference, as its documentation defines it.

    mask: what is not 0 hides a key, [seq, seq] (mask_type 0), [batch, seq] (1) or [batch, heads, seq, seq] (2). A query
    without any key is NaN, as it is there.
    """
    if x.is_nested:
        return NotImplemented
    hidden = None if mask is None else mask.to(torch.bool)
    hidden = hidden[:, None, None, :] if mask_type == 1 else hidden

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if hidden is None:
            return F.scaled_dot_product_attention(q, k, v)
        scores = (q @ k.transpose(-2, -1)) * (embed_dim // num_heads) ** -0.5
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    def attention(x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in F.linear(x, qkv_weight, qkv_bias).chunk(3, -1))
        return F.linear(mixed(q, k, v).transpose(1, 2).flatten(2), proj_weight, proj_bias)

    def feed_forward(x: Tensor) -> Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = x + attention(norm_1(x))
        return x + feed_forward(norm_2(x))
    x = norm_1(x + attention(x))
    return norm_2(x + feed_forward(x))


# What hides operations for which there are kernels inside one of its own.
def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Outside of training its input itself, as in eager mode: of a fake tensor PyTorch makes a copy."""
    return NotImplemented if train else x


def _triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = 1,
) -> Tensor:
    """As its documentation defines it."""
    if len({anchor.dim(), positive.dim(), negative.dim()}) > 1:
        return NotImplemented
    near, far = (F.pairwise_distance(anchor, other, p, eps) for other in (positive, negative))
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    losses = torch.clamp_min(margin + near - far, 0)
    return losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()


WRITTEN_OUT = {
    aten.einsum.default: _einsum,
    aten.triplet_margin_loss.default: _triplet_margin_loss,
    aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    aten.dropout.default: _dropout,
}


def _in_order(t: Tensor, names: list[str], wanted: list[str]) -> Tensor:
    """t's dims, called `names`, in the order `wanted`."""
    moved = [i for i, (name, other) in enumerate(zip(names, wanted)) if name != other]
    if len(moved) == 2:
        return t.transpose(*moved)
    return t.permute([names.index(name) for name in wanted]) if moved else t


def value(node: Node) -> Any:
    """The fake tensor (or tuple, or number) that stands for the node's result; None if it has none."""
    return node.meta.get("val")


def another(t: Tensor) -> Tensor:
    """`t` as a tensor of its own, in its memory: view_as() has other strides where there is but one of something."""
    return t.view_as(t) if t.is_nested else aten.alias.default(t)


def storages(nodes: Iterable[Node]) -> set[int]:
    """The memory behind the results of `nodes`: views share it."""
    return memory([value(node) for node in nodes])


def overwritten(node: Node) -> list[Node]:
    """The nodes whose memory a node changes in place."""
    if "written" in node.meta:
        return [given for given in node.all_input_nodes if storages([given]) & node.meta["written"]]
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return _statistics(node)
    if node.target is aten.detach_.default:  # of every torch.tensor() in forward: its memory stays as it is
        return []
    changed = {a.name for a in node.target._schema.arguments if a.alias_info and a.alias_info.is_write}
    given = {a.name: v for a, v in zip(node.target._schema.arguments, node.args)} | node.kwargs
    return [v for v in tree_leaves([given[name] for name in changed if name in given]) if isinstance(v, Node)]


def _statistics(node: Node) -> list[Node]:
    """What a norm of batches writes to in training, of which its schema does not tell."""
    if node.target not in KEEP_STATISTICS:
        return []
    given = {a.name: v for a, v in zip(node.target._schema.arguments, node.args)} | node.kwargs
    kept = [given.get(name) for name in ("running_mean", "running_var") if given.get(KEEP_STATISTICS[node.target])]
    return [v for v in kept if isinstance(v, Node)]


def written(node: Node) -> set[int]:
    """The memory that a node changes in place."""
    return storages(overwritten(node))


def _fill_in(node: Node) -> None:
    """An eps that is not given is that of the dtype in which PyTorch computes, and a cast to another's dtype is to that."""
    if node.target is aten.type_as.default and value(node).device == value(node.args[0]).device:
        node.target, node.args = aten.to.dtype, (node.args[0], value(node).dtype)
    if node.target is aten.rms_norm.default and (len(node.args) < 4 or node.args[3] is None):
        weight = node.args[2] if len(node.args) > 2 else None
        node.args = (*node.args[:2], weight, torch.finfo(torch.promote_types(value(node).dtype, torch.float32)).eps)


def simplify(node: Node, modes: bool = False) -> None:
    """Write in one way what can be written in many. `modes`: gradients are switched, which a view takes notice of."""
    if node.target in RESHAPES and all(isinstance(n, int) for n in value(node).shape):
        node.target, node.args, node.kwargs = aten.reshape.default, (node.args[0], list(value(node).shape)), {}
    if node.target is aten.mul.Tensor and node.args[0] is node.args[1]:
        node.target, node.args = aten.pow.Tensor_Scalar, (node.args[0], 2)
    if node.target in CASTS and value(node).device == value(node.args[0]).device and not node.kwargs.get("copy"):
        node.target, node.args, node.kwargs = aten.to.dtype, (node.args[0], value(node).dtype), {}
    if is_idle(node) and (node.target in ITSELF or not modes) or _moves_nothing(node):
        node.replace_all_uses_with(node.args[0])


def _moves_nothing(node: Node) -> bool:
    """Whether it only has other strides for what there is but one of, as _einsum writes it."""
    if node.target is not aten.as_strided.default:
        return False
    ours, given = ((t.shape, strides_of(t), t.storage_offset()) for t in (value(node), value(node.args[0])))
    return ours == given


def is_idle(node: Node, result: Callable[[Node], Any] = lambda node: value(node)) -> bool:
    """Whether a node's result is its input, in its memory and in its layout."""
    if node.target is not aten.dropout.default and node.target not in CONVERSIONS:
        return False
    ours, given = result(node), result(node.args[0])
    return layout(ours) == layout(given) is not None and memory(ours) == memory(given)


def object_of(node: Node, result: Callable[[Node], Any] = lambda node: value(node)) -> Node:
    """The node that made the object that `node` returns: itself, unless it hands on what it was given."""
    while node.target in ITSELF and is_idle(node, result) or _changes_its_input(node):
        node = node.args[0]
    return node


def _changes_its_input(node: Node) -> bool:
    """Whether it is like add_(), which returns its first argument."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or not isinstance(node.args[0], Node):
        return False
    returns = node.target._schema.returns
    changed = [part.alias_info for part in (*returns, node.target._schema.arguments[0])]
    return len(returns) == 1 and all(info is not None and info.is_write for info in changed)


def memory(fake: Any) -> set[int]:
    """The storages of the tensors in a result."""
    return {t.untyped_storage()._cdata for t in tree_leaves(fake) if isinstance(t, Tensor)}


def layout(fake: Any) -> Any:
    """What a tensor is but for its contents; None of anything else."""
    if not isinstance(fake, Tensor):
        return None
    return fake.dtype, fake.device, fake.shape, fake.stride(), fake.storage_offset(), fake.is_conj(), fake.is_neg()

"""A model as graphs: captured by Dynamo (graph breaks are fine), traced to ATen before any decomposition.

Linear, scaled_dot_product_attention, layer_norm, softmax and their like stay single nodes, the casts that autocast makes
become nodes. What would be changed by being traced once more (a branch, a checkpoint, an autograd.Function) is one node,
as Dynamo wrote it. For matching, simplified() writes in one way what a program may write in many without meaning anything
else: every view is a `reshape`, every cast a `to(dtype)`, one to the same dtype is nothing, a square is `pow(x, 2)`.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from itertools import count
from types import FrameType
from typing import Any

import torch
import torch._dynamo.utils as dynamo
from torch import nn
from torch._dynamo.exc import SkipFrame
from torch._guards import CompileContext
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.profiler import record_function
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass,
)

from autokernel.model import catching, padding
from autokernel.model.breaks import Function, left_out, number_of, reason
from autokernel.model.forwards import Forwards
from autokernel.model.leaving import left_whole
from autokernel.model.nodes import name_of
from autokernel.model.numbers import reads_a_number, tensors_in
from autokernel.model.padding import Encoders
from autokernel.model.tracing import to_aten

IN_GRAPH = "autokernel:graph"
OUTSIDE = "autokernel:outside:"  # followed by the reason: a range whose operators are in no graph
# Of one function, over all sets of winners, shapes and gradient modes. Beyond its limit (8) Dynamo runs the original and
# says so in a log at most.
MAX_VERSIONS = 128
MAX_PASSES = 20  # until Dynamo compiles nothing new: two for each function that is left out, and those that it calls
MAX_FRAMES = 10_000  # whose compilation Dynamo remembers while a model is captured; by default it is 64

ASSERTIONS = "rewrite_assert_with_torch_assert"  # whether those about tensors are in graphs, as torch._assert_async

CALLERS = count()  # for their names
SETTLED = ContextVar("SETTLED", default=False)  # whether as_applied() set what stays: Dynamo's settings are a thread's own


@contextmanager
def recurrent_modules_traced() -> Iterator[None]:
    """nn.RNN, nn.GRU and nn.LSTM are one node of a graph; without this, Dynamo leaves out the rest of their caller as well.

    A compiler is not given such graphs, see recurrent_outside(): PyTorch 2.13's Inductor crashes on the LSTM's backward
    pass, its AOTAutograd at an LSTM in training whose lengths change, and dropout between layers leaves other random
    numbers for later there.
    """
    with _set("allow_rnn", True):
        yield


def settle() -> None:
    """What as_applied() sets for good: before each call, as Dynamo's settings may be those of one thread."""
    if SETTLED.get():
        return
    allow_versions()
    torch._dynamo.config.error_on_nested_fx_trace = False
    if hasattr(torch._dynamo.config, "invalidate_compile_context_weakrefs"):  # where it is not yet, none are let go
        torch._dynamo.config.invalidate_compile_context_weakrefs = True  # module.to() may have to swap parameters
    SETTLED.set(True)


@contextmanager
def as_applied(counts: bool = False) -> Iterator[None]:
    """How Dynamo compiles a model with kernels in it; `counts`: whether integers of its modules may be inputs of graphs.

    A function that it fails at, even by an error of its own, runs as it is, and Dynamo logs why. So does one that is called
    while another thread traces, or that torch.fx traces. An assertion about a tensor ends a graph: in one it would raise
    another error, on a GPU one that ends the process. Inside of DistributedDataParallel a graph stays whole: kernels
    in the parts that Dynamo would make of it there lose gradients.
    """
    settle()
    integers = _set("allow_unspec_int_on_nn_module", True) if counts else nullcontext()
    with _set("suppress_errors", True), _set(ASSERTIONS, False), _set("optimize_ddp", False), integers, left_whole():
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
        frames, breaks = left_out(skipped)

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
    return _also_by_its_caller(partial(torch.compile, **options), model)


def _also_by_its_caller(compiled: Callable[[Callable[..., Any]], Any], model: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return compiled(model)
    except Exception:  # of any kind: it is the model's own
        return compiled(caller(model))


def compile_in(
    settings: Callable[[], AbstractContextManager[Any]], model: Callable[..., Any], backend: Any
) -> Callable[..., Any]:
    """As compile_model(model, backend=backend); `settings` is entered for each function that Dynamo compiles.

    Around each call they would cost 40 µs, also where nothing is compiled: as much as 4 % of a pass by CUDA graphs.
    """
    context = torch._dynamo.optimize(backend)
    if compile_frame := getattr(context, "callback", None):  # none where Dynamo is disabled

        @wraps(compile_frame)  # by which it also knows its backend
        def compile_in_settings(*frame: Any) -> Any:
            with settings():
                return compile_frame(*frame)

        context.callback = compile_in_settings
    return _also_by_its_caller(context, model)


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
    return {number_of(c): f"{words} {lost_guard(c)}" for c in compilations if c.recompile_reason}


def lost_guard(compilation: Any) -> str:
    """What was true of a function when Dynamo had compiled it before."""
    return compilation.recompile_reason.partition(": ")[2].partition("#")[0].strip()


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


def free_what_failed(frames: Sequence[Any]) -> None:
    """Frees what Dynamo left behind of those of `frames`, its compilations, that failed.

    Inside of vmap() or jvp() that holds dispatch keys: whenever it went, autograd, say, would be off from then on.
    """
    if any(frame.fail_type for frame in frames):
        now = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        with torch._C._ForceDispatchKeyGuard(*now):
            gc.collect()


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


def why_left_alone(module: GraphModule) -> str | None:
    """Traced once more, a graph would lose a hook, a number that changes, inference mode, or that a tensor is quantised.

    A jagged tensor has a size that is another one for each tensor. A tensor that wraps others has no memory of its own.
    What a graph holds is real where all else is fake: to trace a write to it is to write.
    """
    if any(t.is_nested for t in tensors_in(module)):
        return "a graph with jagged tensors in it is left as it is"
    if name := next((type(t).__name__ for t in tensors_in(module) if is_traceable_wrapper_subclass(t)), None):
        return f"a graph with {name} in it, which wraps other tensors, is left as it is"
    if any(map(_is_overwritten, module.graph.find_nodes(op="get_attr"))):
        return "a graph that writes to a tensor that it holds, as an optimiser's step does, is left as it is"
    methods = {"register_hook", "requires_grad_", "retain_grad", "item", "_enter_inference_mode"}
    methods |= {"quantize_per_tensor", "quantize_per_channel", "quantize_per_tensor_dynamic", "dequantize"}
    first = next((name for n in module.graph.nodes if (name := name_of(n)) in methods and not reads_a_number(n)), None)
    return first and f"a graph with {first} in it is left as it is"


def _is_overwritten(node: Node) -> bool:
    """Whether a graph from Dynamo writes to a tensor of its own: Dynamo did so to what stands for it."""
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and not example.is_inference() and example._version > 0

"""What PyTorch's compilers do not keep of eager mode: seen to around what they made of a graph."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import _StopRecomputationError

from autokernel.model.autocast import without_autocast
from autokernel.model.capture import why_left_alone
from autokernel.model.catching import checks_alone
from autokernel.model.contract import Backward
from autokernel.model.forwards import WHY_RECURRENT
from autokernel.model.nodes import another, has_effects, storages, written
from autokernel.model.numbers import at_hand
from autokernel.model.one_node import data_of
from autokernel.model.settings import Settings, settings_restored, why_compilers_lose_settings
from autokernel.model.tracing import checkpoint, to_aten
from autokernel.spec import overlap

Call = Callable[..., Any]
UNDONE = "autokernel_undone"  # in an error
READ_AGAIN = "autokernel_read_again"  # in a graph's meta: the places of inputs, see on_copies()
CONVOLUTIONS = {"convolution", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))}
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
OF_LEAVES = 2**64 - 1  # the sequence number of what adds up the gradients of a leaf


@contextmanager
def compiling() -> Iterator[None]:
    """Around a compilation. What is kept for the backward pass may be needed again, as with retain_graph=True."""
    with torch._functorch.config.patch("donated_buffer", False):
        yield


def loses_a_mode(module: GraphModule) -> bool:
    """Whether a compiler makes tensors like any others of what is an inference tensor in eager mode."""
    return any(getattr(node.target, "__name__", "") == "_enter_inference_mode" for node in module.graph.nodes)


def why_not_compiled(module: GraphModule, inputs: Sequence[Any] = ()) -> str | None:
    """Why a graph from Dynamo is to run as it is, if it is.

    They leave out what nobody uses, and so what that would raise.
    They do not take tensors of a class whose __torch_function__() Dynamo has followed, and which is no plain one to them.
    Of tensors that PyTorch conjugates or negates where they are read, AOTAutograd takes it that their gradients are so too.
    Gradients of a result it lays out as the result is: where elements of that share memory, the last one is that of all.
    Inductor's backward pass of a convolution ends with an assertion where PyTorch, for no elements, has strides of its own.
    """
    results = [node.meta.get("example_value") for node in module.graph.output_node().all_input_nodes]
    tensors = [v for v in results if isinstance(v, Tensor)]
    if name := next((type(v).__name__ for v in inputs if isinstance(v, Tensor) and _takes_functions(v)), None):
        return f"a graph that is given a {name}, which is a class of tensors of its own, is left as it is"
    if torch.is_grad_enabled() and any(v.is_conj() or v.is_neg() for v in tensors):
        return "a graph that returns conjugates, as PyTorch keeps them, is left as it is"
    if torch.is_grad_enabled() and any(v.requires_grad and _overlaps(v) for v in tensors):
        return "a graph that returns windows of a tensor which overlap, as unfold() makes them, is left as it is"
    if torch.is_grad_enabled() and _convolves_nothing(module):
        return "a graph with a convolution of no elements, as of a batch of 0, is left as it is"
    if torch.is_grad_enabled() and _nodes(module, RECURRENT):
        return WHY_RECURRENT
    if check := checks_alone(module):
        return f"a graph whose {check} may raise, while nobody uses its result, is left as it is"
    return why_compilers_lose_settings(module)


def _takes_functions(t: Tensor) -> bool:
    if type(t) is Tensor or isinstance(t, FakeTensor) or is_traceable_wrapper_subclass(t):
        return False
    return type(t).__torch_function__ is not torch._C._disabled_torch_function_impl


def _overlaps(fake: Tensor) -> bool:
    """Whether elements share memory, other than those of an expanded dimension, of which AOTAutograd knows."""
    if fake.layout is not torch.strided or fake.is_nested:
        return False
    shape, strides = ([at_hand(n) for n in numbers] for numbers in (fake.shape, fake.stride()))
    if None in (*shape, *strides):  # it is for the contents of a tensor to say
        return False
    return overlap(shape, strides)


def _convolves_nothing(module: GraphModule) -> bool:
    made = [node.meta.get("example_value") for node in _nodes(module, CONVOLUTIONS)]
    return any(isinstance(v, Tensor) and any(isinstance(n, int) and n == 0 for n in v.shape) for v in made)


def _nodes(module: GraphModule, names: Collection[str]) -> list[Node]:
    """Calls of functions of these names, in a checkpoint too."""
    nodes = [node for one in module.modules() if isinstance(one, GraphModule) for node in one.graph.nodes]
    return [node for node in nodes if getattr(node.target, "__name__", "").partition(".")[0] in names]


def computes_again_at_random(module: GraphModule, repeatable: "Repeatable") -> str | None:
    """Why a graph with checkpoints is to run as it is, if it is: in the backward pass a compiler takes no other numbers."""
    if not torch.is_grad_enabled():
        return None
    options = [
        checkpoint.divide_kwargs(node.kwargs)[0] for node in module.graph.find_nodes(op="call_function", target=checkpoint)
    ]
    if all(option.get("preserve_rng_state", True) for option in options) or repeatable:
        return None
    return "a graph whose checkpoints take other random numbers in the backward pass is left as it is"


class Repeatable:
    """Whether a graph from Dynamo, of which `copy` makes a copy, does nothing but compute its results.

    What writes to what it is given, or takes random numbers, does not give the same once more.
    """

    def __init__(self, copy: Callable[[], GraphModule]) -> None:
        self.copy = copy

    def __bool__(self) -> bool:
        return self.found

    @cached_property
    def found(self) -> bool:
        try:
            graph = to_aten(self.copy()).graph
        except Exception:  # of any kind: whatever the model does, met by a tracer
            return False
        given = storages(node for node in graph.nodes if node.op in ("placeholder", "get_attr"))
        return not any(_changes(node, given) for node in graph.nodes)


def _changes(node: Node, given: set[int]) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if isinstance(node.target, HigherOrderOperator) or written(node) & given:
        return True
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and has_effects(node)


def or_the_original(call: Call, original: Call, repeatable: Repeatable | bool, say: Callable[[Exception], object]) -> Call:
    """`call`, and from its first error on `original`, where it can be repeated: an error there too is the model's own."""
    works = True

    def run(*values: Any) -> Any:
        nonlocal works
        if not works:
            return original(*values)
        try:
            return call(*values)
        except _StopRecomputationError:  # no error: a checkpoint around the model has computed what it needs again
            raise
        except Exception as error:
            if not repeatable:
                raise
            result = original(*values)
            works = False
            say(error)
            return result

    return run


def behind_the_original(call: Call, original: Call) -> Call:
    """`call`, once `original` has run without an error."""
    works = False

    def run(*values: Any) -> Any:
        nonlocal works
        if works:
            return call(*values)
        result = original(*values)
        works = True
        return result

    return run


def whose_errors_say(call: Call, repeatable: Repeatable) -> Call:
    """`call`, the first graph of a pass, whose errors say whether nothing was done before: see is_undone()."""

    def run(*values: Any) -> Any:
        try:
            return call(*values)
        except _StopRecomputationError:
            raise
        except Exception as error:
            vars(error)[UNDONE] = bool(repeatable)
            raise

    return run


def is_undone(error: Exception) -> bool:
    """Whether a pass that ended so may be made once more, as it was written.

    Dynamo has what a function does to objects behind the graph: an error in that leaves it out, `finally` as well.
    """
    return vars(error).get(UNDONE, False)


# --- gradients of gradients -----------------------------------------------------------------------------------------------


@dataclass
class _Pass:
    """A backward pass through the results of a call, of `original`: whether its gradients are to have gradients."""

    original: Call
    places: Sequence[int]  # of the results
    again: bool = False

    def hook(self, made: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> tuple[None, ...] | None:
        """Of the compiler's own node, which would add zeros where the gradients are not its own, and make some of none."""
        is_idle = self.again or all(gradient is None for gradient in given)
        return (None,) * len(made) if is_idle else None


class _Again(torch.autograd.Function):
    """Of results and what they were computed from: a gradient that is to have a gradient is that of the original."""

    @staticmethod
    def forward(ctx: Any, backward: _Pass, *given: Any) -> tuple[Tensor, ...]:
        count = len(backward.places)
        results, values = given[:count], given[count:]
        ctx.mark_dirty(*results)  # they are to be the same objects
        ctx.set_materialize_grads(False)
        ctx.backward_pass, ctx.settings = backward, Settings()
        ctx.kept = [i for i, v in enumerate(values) if isinstance(v, Tensor) and not v.is_inference()]
        ctx.others = [None if i in ctx.kept else v for i, v in enumerate(values)]
        ctx.save_for_backward(*(values[i] for i in ctx.kept))
        return results

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        again = ctx.backward_pass.again = torch.is_grad_enabled()
        if not again:
            return None, *gradients, *(None for _ in ctx.others)
        values, needed = list(ctx.others), ctx.needs_input_grad[1 + len(gradients) :]
        wanted = [i for i, needs in enumerate(needed) if needs]
        with settings_restored():
            ctx.settings.restore()
            torch.set_grad_enabled(True)
            for i, saved in zip(ctx.kept, ctx.saved_tensors):
                values[i] = another(saved)  # its own: one may have been computed from another
            results = ctx.backward_pass.original(*values)
            pairs = [(results[i], given) for i, given in zip(ctx.backward_pass.places, gradients) if given is not None]
            made = torch.autograd.grad(
                [result for result, _ in pairs],
                [values[i] for i in wanted],
                [given for _, given in pairs],
                create_graph=True,
                allow_unused=True,
            )
        of_place = dict(zip(wanted, made))
        return None, *(None for _ in gradients), *map(of_place.get, range(len(values)))


def differentiable_again(call: Call, original: Call, repeatable: Repeatable) -> Call:
    """`call`, a compiler's form of `original`, whose gradients may be computed twice, and have gradients.

    AOTAutograd has gradients, but none of these. Where they flow through a view among the results, it is as it has it.
    """

    def run(*values: Any) -> Any:
        results = call(*values)
        if not torch.is_grad_enabled():
            return results
        places = [i for i, result in enumerate(results) if _has_gradient(result) and not any(result is v for v in values)]
        if own := [results[i] for i in places]:
            backward = _Pass(again, places)
            nodes = {_with_its_node(result).grad_fn for result in own} - {None}
            for node in nodes:
                _keeps_its_buffers(node)
                node.register_hook(backward.hook)
            if not any(result._is_view() for result in own):
                versions = tuple(result._version for result in own)
                _Again.apply(backward, *own, *_behind(nodes, values))
                torch._C._autograd._unsafe_set_version_counter(tuple(own), versions)  # nothing was written
        return results

    def again(*values: Any) -> Any:
        if not repeatable:
            raise RuntimeError(
                "torch.compile has no gradients of gradients, and the model itself, which writes to what it is given or "
                "takes random numbers, would not compute the same once more"
            )
        return original(*values)

    return run


def _behind(nodes: Collection[torch.autograd.graph.Node], values: Sequence[Any]) -> list[Any]:
    """`values`, detached where the gradients of a compiler's nodes do not go on to them: in eager mode they do not either.

    Else what is behind them, a hook of the user's or another graph of the compiler's, would be called with None.
    """
    edges = {edge for node in nodes for edge in node.next_functions}
    if not any(node is None for node, _ in edges) or not all(map(_is_compilers, nodes)):
        return [*values]

    def goes_on_to(v: Any) -> bool:
        edge = get_gradient_edge(v)
        return (edge.node, edge.output_nr) in edges

    return [v.detach() if isinstance(v, Tensor) and v.requires_grad and not goes_on_to(v) else v for v in values]


def _is_compilers(node: Any) -> bool:
    """Whether a node is AOTAutograd's."""
    return hasattr(getattr(node, "_forward_cls", None), "metadata")


def _keeps_its_buffers(node: torch.autograd.graph.Node) -> None:
    """As it was compiled: AOTAutograd then leaves None for those that it frees, and later takes that for some."""
    metadata = getattr(getattr(node, "_forward_cls", None), "metadata", None)
    if getattr(metadata, "bw_donated_idxs", ()) is None:
        metadata.bw_donated_idxs = []


def _with_its_node(result: Tensor) -> Tensor:
    """What a compiler's node made: a result itself, or what it is a view of."""
    base = result._base
    return result if base is None or base.grad_fn is None else base


def _has_gradient(result: Any) -> bool:
    return isinstance(result, Tensor) and result.grad_fn is not None


# --- what is written to, and read by the backward pass --------------------------------------------------------------------


def see_to_writes(module: GraphModule, inputs: Sequence[Any], copy: Callable[[], GraphModule]) -> str | None:
    """Why a graph from Dynamo is to run as it is, if it is; else has on_copies() see to what it writes to.

    AOTAutograd's backward pass computes values of the forward pass again, from inputs in which there are others by then.
    """
    is_trained = torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in inputs)
    if not is_trained or not _writes(module) or why_left_alone(module):
        return None
    try:
        graph = to_aten(copy(), True)
        with without_autocast():
            places = Backward(graph, inputs).read_again()
    except Exception:  # of any kind: whatever the model does, met by a tracer
        return "a graph that writes to its inputs, and cannot be traced, is left as it is"
    given = graph.graph.find_nodes(op="placeholder")
    ends = [*given, *graph.graph.output_node().all_input_nodes]
    for i in places:
        others = storages(node for node in ends if node is not given[i])
        if inputs[i].requires_grad or storages([given[i]]) & others:
            return "a graph whose backward pass depends on an input that it writes to, and returns, is left as it is"
    module.meta[READ_AGAIN] = places
    return None


def on_copies(graph: GraphModule) -> None:
    """Has a graph compute on copies of the inputs that see_to_writes() found, which it writes in the end.

    Copies of inputs that a model makes itself are made, as the input may be written to before the backward pass: of a clone
    Inductor keeps what it is a clone of.
    """
    given = graph.graph.find_nodes(op="placeholder")
    for user in [user for node in given for user in node.users if torch.is_grad_enabled() and _is_clone(user)]:
        user.op, user.target, user.kwargs = "call_function", torch.ops.autokernel.copy.default, {}
    for node in (given[i] for i in graph.meta.pop(READ_AGAIN, ())):
        with graph.graph.inserting_after(given[-1]):
            own = graph.graph.call_function(torch.ops.autokernel.copy.default, (node,))
        own.meta |= {name: v for name, v in node.meta.items() if name in ("example_value", "val")}
        node.replace_all_uses_with(own, delete_user_cb=lambda user, own=own: user is not own)
        with graph.graph.inserting_before(graph.graph.output_node()):
            graph.graph.call_function(torch.ops.aten.copy_.default, (node, own))
    graph.recompile()


def _is_clone(node: Node) -> bool:
    return node.target in ("clone", torch.clone, torch.ops.aten.clone.default) and len(node.args) == 1 and not node.kwargs


# --- gradients of some results alone --------------------------------------------------------------------------------------


def without_zeros(call: Call, reached: Mapping[int, Collection[int]]) -> Call:
    """`call`, whose backward pass gives an input no gradient where the results that have one are not computed from it.

    AOTAutograd has zeros there, which an optimizer takes for a gradient: it has momentum, or decay, and moves the weight.
    reached: place of each result, or behind the results of an input that is written to -> places of the inputs that it is
    computed from.
    """

    def run(*values: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*values)
        edges: dict[tuple[Any, int], set[int]] = {}  # before what is written to belongs to the graph itself
        for i, v in enumerate(values):
            if isinstance(v, Tensor) and v.requires_grad:
                edge = get_gradient_edge(v)
                edges.setdefault((edge.node, edge.output_nr), set()).add(i)
        first = torch.autograd._get_sequence_nr()
        results = call(*values)
        _without_zeros(edges, [*results, *values], reached, first)
        return results

    return run if reached else call


def _without_zeros(
    edges: Mapping[tuple[Any, int], Collection[int]],
    tensors: Sequence[Any],
    reached: Mapping[int, Collection[int]],
    first: int,
) -> None:
    of_node: dict[Any, dict[int, set[int]]] = {}  # -> place among what it made -> places of the inputs
    for i, places in reached.items():
        made = _with_its_node(tensors[i])
        for node, place in _compilers_own(made.grad_fn, made.output_nr, first):
            of_node.setdefault(node, {}).setdefault(place, set()).update(places)
    for node, of_result in of_node.items():
        inputs = [edges.get(edge, ()) for edge in node.next_functions]
        node.register_hook(partial(_none_for_zeros, inputs, of_result))


def _compilers_own(node: Any, place: int, first: int) -> Iterator[tuple[Any, int]]:
    """The nodes of AOTAutograd's behind `node`, and the places among what they made, in a call's part of the graph.

    What a call returns may be a view of an input, whose node is the caller's; what it writes to an input it copies there.
    first: the sequence number of the first node that the call made.
    """
    if node is None or not first <= node._sequence_nr() < OF_LEAVES:
        return
    if _is_compilers(node):
        yield node, place
        return
    for behind, number in node.next_functions:
        yield from _compilers_own(behind, number, first)


def _none_for_zeros(
    inputs: Sequence[Collection[int]],
    of_result: Mapping[int, Collection[int]],
    made: Sequence[Tensor | None],
    given: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...] | None:
    present = [i for i, gradient in enumerate(given) if gradient is not None]
    if not all(i in of_result for i in present):
        return None
    live = set().union(*(of_result[i] for i in present))
    return tuple(None if places and live.isdisjoint(places) else gradient for places, gradient in zip(inputs, made))


# --- writes before the backward pass --------------------------------------------------------------------------------------


def noticing_writes(call: Call, kept: Mapping[int, Sequence[int]]) -> Call:
    """`call`, whose backward pass says so where a result that eager mode keeps for it was written to meanwhile.

    kept: place of a result -> the places of those that its gradient depends on.
    """

    def run(*values: Any) -> Any:
        results = call(*values)
        if torch.is_grad_enabled():
            counts = {j: _Count(results[j]) for j in set().union(*kept.values()) if isinstance(results[j], Tensor)}
            for i, places in kept.items():
                _hold(results[i], [counts[j] for j in places if j in counts])
        return results

    return run if kept else call


class _Count:
    """Of the writes to a tensor, without holding on to its memory."""

    def __init__(self, t: Tensor) -> None:
        self.before, self.shape = t._version, list(t.shape)
        self.now = t.detach()
        self.now.data = t.new_empty(0)

    def check(self) -> None:
        if self.now._version != self.before:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a result "
                f"of shape {self.shape} is at version {self.now._version}; expected version {self.before} instead"
            )


def _hold(result: Tensor, counts: Sequence[_Count]) -> None:
    """Has each gradient of `result` look at `counts` first."""
    made = _with_its_node(result)
    place = made.output_nr

    def look(gradients: Sequence[Tensor | None]) -> None:
        if gradients[place] is not None:
            for count in counts:
                count.check()

    if made.grad_fn is not None:
        made.grad_fn.register_prehook(look)


# --- inputs that share memory ---------------------------------------------------------------------------------------------


def where_memory_is_shared_alike(call: Call, original: Call, module: GraphModule, inputs: Sequence[Any]) -> Call:
    """`call`, made of a graph that writes to its inputs, for such as share memory as the example's do; else `original`.

    Whether one is written by way of another Dynamo asks only where these are one object, or sizes change.
    """
    places = [i for i, v in enumerate(inputs) if _has_memory(v) and not isinstance(v, nn.Parameter)]
    if len(places) < 2 or not _writes(module):
        return call
    expected = _shared(inputs, places)

    def run(*values: Any) -> Any:
        return (call if _shared(values, places) == expected else original)(*values)

    return run


def _has_memory(v: Any) -> bool:
    return type(v) in (Tensor, nn.Parameter) and v.layout is torch.strided and not v.is_nested


def _writes(module: GraphModule) -> bool:
    """Whether a graph from Dynamo writes to its inputs."""
    given = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    counted = any(isinstance(v, Tensor) and (v.is_inference() or v._version) for v in given)
    return counted or any(node.target is data_of for node in module.graph.nodes)


def _shared(values: Sequence[Any], places: Sequence[int]) -> list[list[tuple[int, int, bool]]]:
    """The places of inputs in one memory, where each begins in it, and whether autograd knows it for a view."""
    groups: dict[int, list[int]] = {}
    for i in places:
        groups.setdefault(values[i].untyped_storage()._cdata, []).append(i)
    shared = [group for group in groups.values() if len(group) > 1]
    return [[(i, values[i].storage_offset(), values[i]._base is not None) for i in group] for group in shared]

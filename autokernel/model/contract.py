"""What of a graph may change when kernels, whose results are contiguous, compute some of it: nothing that shows.

Strides show in what the graph returns and in the few operators that read them. What shares memory with what shows where
memory is changed in place, and in what the graph takes and returns. All else may have other strides than it had.
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from autokernel.model.autocast import without_autocast
from autokernel.model.nodes import CHECKS, aten, has_effects, layout, memory, overwritten, set_gradients, value
from autokernel.model.one_node import data_of
from autokernel.model.settings import settings_restored

BY_GRADIENTS = "strides by gradients"  # in `meta`: without gradients, as graphs are looked at, its strides are others
Compute = Callable[[Node, Callable[[Any], Any]], Any]
READ_STRIDES = {
    aten.as_strided.default,
    aten.as_strided_.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
    aten.set_.source_Tensor,
    aten.set_.source_Tensor_storage_offset,
    aten.resize_.default,
    aten.resize_as_.default,
}


class Contract:
    """A graph as it was. `replaced`: results that kernels compute -> the nodes that these take."""

    def __init__(self, graph: Graph, replaced: Mapping[Node, Sequence[Node]]):
        self.replaced = replaced
        self.live = self._live(graph)
        self.results = [node for node in self.live if tree_leaves(value(node))]
        (self.output,) = graph.find_nodes(op="output")
        self.ends = {n for n in self.live if n.op in ("placeholder", "get_attr")} | {*self.output.all_input_nodes}
        self.writes = [(node, changed) for node in self.live if (changed := overwritten(node))]
        self.before = self._shared(value)
        firsts = {key: min(members, key=self.order.__getitem__) for key, members in self.before.items()}
        self.aliases = {n for n in replaced if n in self.order and {firsts[key] for key in memory(value(n))} != {n}}

    def _live(self, graph: Graph) -> list[Node]:
        """The nodes that are left once kernels are in the graph."""
        nodes = list(graph.nodes)
        self.order = {node: i for i, node in enumerate(nodes)}
        live: set[Node] = set()
        for node in reversed(nodes):
            if (
                node in live
                or node.op in ("placeholder", "output")
                or has_effects(node)
                or CHECKS in node.meta
                or isinstance(node.target, HigherOrderOperator)
            ):
                live |= {node, *self.replaced.get(node, node.all_input_nodes)}
        return [node for node in nodes if node in live]

    def _shared(self, result: Callable[[Node], Any]) -> dict[int, set[Node]]:
        """Memory -> the nodes whose results are in it."""
        shared: dict[int, set[Node]] = {}
        for node in self.results:
            for key in memory(result(node)):
                shared.setdefault(key, set()).add(node)
        return shared

    def noticed(self, compute: Compute, mode: FakeTensorMode | None) -> set[Node]:
        """The replaced results whose new layout something takes notice of; `compute` makes them, as fake tensors."""
        changed: dict[Node, Any] = {}
        causes: dict[Node, set[Node]] = {}
        noticed: set[Node] = set()

        def current(node: Any) -> Any:
            v = changed.get(node, value(node)) if isinstance(node, Node) else node
            is_constant = isinstance(v, Tensor) and not isinstance(v, FakeTensor)
            return mode.from_tensor(v) if is_constant and mode else v

        def caused(nodes: Collection[Node]) -> set[Node]:
            return set().union(*(causes.get(node, ()) for node in nodes))

        for node in self.live:
            if node in self.replaced:
                result = compute(node, current)
                if result is not value(node):
                    changed[node], causes[node] = result, {node}
            elif node.op == "call_function" and not changed.keys().isdisjoint(node.all_input_nodes):
                moved = [n for n in node.all_input_nodes if layout(current(n)) != layout(value(n))]
                if moved and _reads_strides(node):
                    noticed |= caused(moved)
                args, kwargs = map_arg((node.args, node.kwargs), current)
                try:
                    result = node.target(*args, **kwargs)
                except Exception:  # of any kind: a view that these strides do not have, an operator of the model's own
                    noticed |= caused(node.all_input_nodes)
                    continue
                if not self._is_as_before(node, result, args, kwargs):
                    changed[node], causes[node] = result, caused(node.all_input_nodes)
        self.changed = changed
        for node in self.output.all_input_nodes:
            if _layouts(current(node)) != _layouts(value(node)):
                noticed |= caused([node])
        now = self._shared(current)
        of_now = {node: memory(current(node)) for node in self.results}
        for node in {*self.ends, *(target for _, targets in self.writes for target in targets)}:
            is_end = node in self.ends and node not in {t for _, targets in self.writes for t in targets}
            then, since = (
                set().union(*(groups[key] for key in keys))
                for groups, keys in ((self.before, memory(value(node))), (now, of_now.get(node, set())))
            )
            differing = then ^ since
            if is_end:
                differing &= self.ends
            noticed |= caused(differing)
        return noticed

    @staticmethod
    def _is_as_before(node: Node, result: Any, args: Any, kwargs: Any) -> bool:
        """Whether a result is new memory, as it was, in the layout that it had."""
        given, was_given = memory((args, kwargs)), memory([value(n) for n in node.all_input_nodes])
        is_new = not memory(result) & given and not memory(value(node)) & was_given
        return is_new and _layouts(result) == _layouts(value(node))


def _layouts(result: Any) -> list[Any]:
    return [layout(leaf) for leaf in tree_leaves(result)]


def _same_strides(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other))
    return all(a.stride() == b.stride() for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))


def _wants_gradient(result: Any) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(result))


def _shared_pairs(nodes: Sequence[Node], result: Callable[[Node], Any]) -> set[tuple[int, int]]:
    """Places of those whose results share memory."""
    held = [memory(result(node)) for node in nodes]
    return {(i, j) for j, ours in enumerate(held) for i in range(j) if held[i] & ours}


def _is_brought(node: Node) -> bool:
    """Whether its operator is none of PyTorch's own."""
    if node.target in (operator.getitem, set_gradients):
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten"


def _reads_strides(node: Node) -> bool:
    """Whether an operator's result depends on the strides of what it takes: any may that PyTorch did not bring."""
    if node.meta.get(BY_GRADIENTS) or _is_brought(node):
        return True
    if node.target in (operator.getitem, set_gradients):
        return False
    return node.target in READ_STRIDES or torch.Tag.nondeterministic_seeded in node.target.tags


class Backward(Interpreter):
    """What autograd keeps of a graph for the backward pass, seen in one pass with fake tensors.

    As it will run: where gradients are off now, PyTorch does what it refuses with them, such as to write to `out`.
    """

    def __init__(self, graph: GraphModule, inputs: Sequence[Any]):
        super().__init__(graph, garbage_collect_values=False)
        self.order = {node: i for i, node in enumerate(graph.graph.nodes)}
        self.kept: dict[Node, set[int]] = {}  # the memory that a node's operator keeps
        self.unseen: dict[
            Node, set[int]
        ] = {}  # and that which it may keep without telling autograd, as on a custom op's ctx
        self.behind: dict[Node, list[Node]] = {}  # those of a node's inputs that its gradient goes on to
        self.writes: list[tuple[int, set[int]]] = []
        self.hidden: set[int] = set()  # the memory of views that were made without gradients, of what wants them
        placeholders = graph.graph.find_nodes(op="placeholder")
        mode = next((value(n).fake_mode for n in placeholders if isinstance(value(n), FakeTensor)), None)
        self.parameters = {n for n, given in zip(placeholders, inputs) if isinstance(given, torch.nn.Parameter)}
        with settings_restored(), mode or nullcontext(), without_autocast():
            self.run(*map(self._like, placeholders, inputs))
        self.ends = {*placeholders, *graph.graph.output_node().all_input_nodes} - self.parameters
        self.outside = memory([self.env[node] for node in self.ends])

    @staticmethod
    def _like(node: Node, given: Any) -> Any:
        if not isinstance(given, Tensor) or not isinstance(value(node), Tensor):
            return given
        fake = value(node).detach().requires_grad_(given.requires_grad)
        return fake if given.is_leaf or not given.requires_grad else fake.clone()

    def run_node(self, n: Node) -> Any:
        kept = self.kept[n] = set()
        wanting = [given for given in n.all_input_nodes if self.wants_gradient(given)]

        def keep(t: Tensor) -> Tensor:
            kept.update(memory(t))
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            result = self._apart(n) if isinstance(n.target, HigherOrderOperator) else self._computed(n)
        self.behind[n] = wanting if _wants_gradient(result) else []
        self.unseen[n] = memory([self.env[given] for given in n.all_input_nodes]) if _is_brought(n) else set()
        if not torch.is_grad_enabled():
            self.hidden |= memory([t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad])
        if targets := overwritten(n):
            self.writes.append((self.order[n], memory([self.env[target] for target in targets])))
        return result

    def _computed(self, n: Node) -> Any:
        """Of one that asks what is in a tensor, as istft() does of its window, what it is to a tracer."""
        try:
            return super().run_node(n)
        except DataDependentOutputException:
            with enable_python_dispatcher():
                return super().run_node(n)

    def _apart(self, n: Node) -> Any:
        """What stands for the result of an operator of higher order, which is part of no site, and may not run twice."""
        needs_grad = any(self.wants_gradient(given) for given in n.all_input_nodes)

        def like(fake: Any) -> Any:
            return fake.detach().requires_grad_(needs_grad and fake.is_floating_point()).clone()

        return tree_map_only(Tensor, like, value(n))

    @property
    def differing(self) -> list[Node]:
        """The nodes whose results have other strides than in the graph, which was traced without gradients.

        Attention whose mask wants a gradient is computed by another operator.
        """
        nodes = (n for n in self.order if n in self.env and not isinstance(n.target, HigherOrderOperator))
        return [n for n in nodes if not _same_strides(value(n), self.env[n])]

    def adopted(self) -> bool:
        """Whether the graph's results are from now on those of this pass: not if it lost what shares memory with what."""
        given = [n for n in self.order if n.op in ("placeholder", "get_attr") or isinstance(n.target, HigherOrderOperator)]
        if _shared_pairs(given, value) != _shared_pairs(given, self.env.get):
            return False
        for node in self.differing:
            made = memory(self.env[node])
            node.meta[BY_GRADIENTS] = not made & memory([self.env[n] for n in node.all_input_nodes])
        for node, result in self.env.items():
            if node.op == "call_function":
                node.meta["val"] = tree_map_only(Tensor, Tensor.detach, result)
            elif node.op == "placeholder":
                node.meta["val"] = result.detach() if isinstance(result, Tensor) else value(node)
        return True

    def wants_gradient(self, node: Node) -> bool:
        return _wants_gradient(self.env[node])

    def _made_of(
        self, output: Node, nodes: Collection[Node], writers: Mapping[Node, Sequence[Node]] = MappingProxyType({})
    ) -> set[Node]:
        """Those of `nodes` that the gradient of `output` goes through, itself among them.

        As it was when each was computed: what is detached may want a gradient once something was written there, and its own
        goes no further. writers: of what writes to a node's memory.
        """
        found, pending, followed = set(), [output], set()
        while pending:
            node = pending.pop()
            if node in nodes and node not in found:
                found.add(node)
                pending += self.behind[node]
                pending += [given for w in writers.get(node, ()) if w not in followed for given in self.behind[w]]
                followed |= {*writers.get(node, ())}
        return found

    def handed_on(self, nodes: Collection[Node], outputs: Sequence[Node]) -> list[Node]:
        """Of a site: those of its results that the graph returns, and that the gradient of another one goes through.

        A program may ask for it there, by retain_grad() or autograd.grad().
        """
        # contiguous() of a result, say, may be the same tensor, and is then what the other one is computed of.
        ends = {id(self.env[end]) for end in self.ends}
        returned = [output for output in outputs if id(self.env[output]) in ends]
        if len(outputs) == 1 or not returned:
            return []
        first = min(self.order[node] for node in nodes)
        since = {node for node in self.env if self.order[node] >= first}
        passed = set().union(*(self._made_of(output, since) - {output} for output in outputs))
        return [output for output in returned if output in passed]

    def kept_results(self, results: Sequence[Any], of: Collection[Node]) -> dict[int, list[int]]:
        """Place among a graph's results -> the places of those that its gradient depends on, kept by operators `of`.

        None where a result may be x.data: whoever writes there writes to x as well, but is not told so.
        """
        held = {i: memory(self.env[v]) for i, v in enumerate(results) if isinstance(v, Node)}
        if any(node.target is data_of for node in self.order):
            return {}
        passing, found = {node for node in self.env if self.wants_gradient(node)}, {}
        for i in [i for i in held if results[i] in passing]:
            kept = set().union(*(self.kept[node] for node in self._made_of(results[i], passing) if node in of))
            found[i] = [j for j, own in held.items() if own & kept]
        return {i: places for i, places in found.items() if places}

    def reached(self, results: Sequence[Any]) -> dict[int, set[int]]:
        """Place of each of a graph's results with a gradient -> the places of the inputs that it goes on to.

        Behind the results are the inputs, of which those count that are written to. None where all go on to the same. From
        what is written to, it goes on to all that was written there at any time.
        """
        if any(node.target is data_of for node in self.order):
            return {}
        inputs = [node for node in self.order if node.op == "placeholder"]
        places = {node: i for i, node in enumerate(inputs)}
        passing = {node for node in self.env if self.wants_gradient(node)}
        writers = [(memory([self.env[target] for target in targets]), n) for n in self.order if (targets := overwritten(n))]
        into = {n: [w for written, w in writers if written & memory(self.env[n])] for n in passing} if writers else {}
        ends = [*results, *(node if into.get(node) else None for node in inputs)]
        wanted = {i: v for i, v in enumerate(ends) if isinstance(v, Node) and v in passing}
        found = {i: {places[n] for n in self._made_of(v, passing, into) if n in places} for i, v in wanted.items()}
        return found if writers or len({*map(frozenset, found.values())}) > 1 else {}

    def read_again(self) -> list[int]:
        """The places of the inputs that are written to, and on which something depends that is kept for the backward pass.

        A compiler may compute that again, from what is in the input by then.
        """
        kept, inputs = set().union(*self.kept.values()), [node for node in self.order if node.op == "placeholder"]
        changed = set().union(*(targets for _, targets in self.writes))
        return [i for i, node in enumerate(inputs) if memory(self.env[node]) & changed and self._memory_of(node) & kept]

    def _memory_of(self, given: Node) -> set[int]:
        """The memory of `given`, and of all that is computed of it."""
        found = memory(self.env[given])
        for node in (n for n in self.order if n in self.env and memory([self.env[m] for m in n.all_input_nodes]) & found):
            found |= memory([self.env[node], *(self.env[target] for target in overwritten(node))])
        return found

    def keeping(
        self, nodes: Collection[Node], inputs: Sequence[Node], outputs: Sequence[Node]
    ) -> tuple[list[int], list[int], list[int]] | None:
        """Of a site: the places in `inputs` whose values its gradients depend on, and those to be kept as copies.

        And the places in `outputs` that the original keeps: whoever writes there before the backward pass is told so.
        What the original keeps for one of several results alone, it does not miss where the gradient is of another.

        None where a view is needed that was made without gradients, and is changed before the backward pass: autograd takes
        no view of it any more.
        """
        kept = set().union(*(self.kept[node] for node in nodes))
        held = [memory(self.env[node]) for node in inputs]
        is_all = bool(kept - set().union(*held))  # results: they depend on each input
        read = kept.union(*(self.unseen[node] for node in nodes))
        needed = [i for i, own in enumerate(held) if is_all or own & read]
        of_each = [set().union(*(self.kept[node] for node in self._made_of(output, nodes))) for output in outputs]
        of_all = set.intersection(*of_each)
        beyond = [i for i in needed if not held[i] & of_all]
        later = set().union(*(changed for i, changed in self.writes if i > self.order[outputs[0]]))
        if any(held[i] & self.hidden & later for i in needed):
            return None
        exposed = [i for i in beyond if held[i] & (later | self.outside) and inputs[i] not in self.parameters]
        exposed += [i for i in beyond if held[i] & later and inputs[i] in self.parameters]
        return needed, exposed, [i for i, output in enumerate(outputs) if memory(self.env[output]) & of_all]

"""Patterns: ways in which models write a kernel type's operation, by `kernels/<type>/patterns.py`; and their sites."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node, Proxy
from torch.fx.proxy import TracerBase

from autokernel.model import pattern_graphs
from autokernel.model.autocast import without_autocast
from autokernel.model.breaks import reason
from autokernel.model.nodes import aten, simplified
from autokernel.model.tracing import trace
from autokernel.spec import Case, import_file, load_spec


def plain_call(kernel: Callable[..., Any], **parameters: Any) -> Any:
    return kernel(**parameters)


@dataclass(frozen=True, eq=False)
class Pattern:
    """One way to write an operation.

    example(**inputs) is the code as models have it. `inputs` gives each parameter a shape to be traced with (a tensor,
    where its dtype matters), or a number that occurs nowhere else: it stands for whatever number the model has there.
    call(kernel, **inputs) is the same result by way of the kernel: here layouts are adapted. `given` names parameters whose
    values the model restricts (both halves of HF's cos are equal): the proof computes them from the model's inputs instead
    of drawing them at random. `where` says, of the parameters, what the graph cannot show, such as a rank. `masks` names
    parameters that may hide whole rows from an operation, which the proof then tries. `draws` makes the proof's contents of
    those that cannot be any numbers, of all parameters' shapes and dtypes: (**parameters) -> tensor. `operator` names one
    that another package registers ("namespace::name"): without it no model has the pattern.
    """

    example: Callable[..., Tensor]
    inputs: Mapping[str, Any]
    call: Callable[..., Tensor] = plain_call
    given: tuple[str, ...] = ()
    where: Callable[..., bool] = lambda **_: True
    masks: tuple[str, ...] = ()
    draws: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    operator: str = ""
    is_rare: bool = False  # most of what is written so is something else, of which nothing has to be said

    @property
    def numbers(self) -> dict[Any, str]:
        return {v: k for k, v in self.inputs.items() if isinstance(v, (int, float))}


class Parameter(Proxy):
    """What a pattern's `call` is given: all but how many dims it has is known no earlier than the model runs."""

    def __init__(self, node: Node, tracer: TracerBase, dims: int):
        super().__init__(node, tracer)
        self.dims = dims

    def dim(self) -> int:
        return self.dims


@dataclass(frozen=True, eq=False)
class Site:
    """A place in a graph that a kernel of this type can compute: call(kernel, **parameters) replaces `output`."""

    kernel_type: str
    pattern: Pattern
    parameters: Mapping[str, Any]  # parameter of the pattern -> node or number
    nodes: frozenset[Node]
    output: Node  # of several the last
    case: Case
    variants: tuple[Case, ...] = ()  # the same call in other strides, once kernels compute all sites of the graph
    others: tuple[Node, ...] = ()  # further results, in the order of the graph

    @property
    def outputs(self) -> tuple[Node, ...]:
        """What the kernel returns. Each of `inputs` comes before the first of them."""
        return (*self.others, self.output)

    @property
    def inputs(self) -> list[Node]:
        return list(dict.fromkeys(v for v in self.parameters.values() if isinstance(v, Node)))


@dataclass(frozen=True)
class Patterns:
    """The patterns of a kernel type as graphs; `failures` says why others are not searched for."""

    graphs: tuple[tuple[Pattern, fx.Graph], ...] = ()
    failures: tuple[str, ...] = ()


def patterns_of(kernel_type: str) -> Patterns:
    """Every pattern of a type, traced in float16, and, where that makes a difference, as it is in float32."""
    patterns, failure = _written(kernel_type)
    if failure:
        return Patterns(failures=(f"the patterns of {kernel_type} are not searched for: {failure}",))
    return _traced(kernel_type, tuple(p for p in patterns if not p.operator or _is_registered(p.operator)))


@cache
def _written(kernel_type: str) -> tuple[Sequence[Pattern], str]:
    """As the type's file has them, and why it has none that can be read."""
    path = load_spec(kernel_type).folder / "patterns.py"
    try:
        with torch.device("cpu"):  # whatever the model's code has made the default
            return import_file(path, f"autokernel_patterns_{kernel_type}").PATTERNS if path.is_file() else (), ""
    except Exception as error:  # whatever a file may raise
        return (), reason(error)


def _is_registered(operator: str) -> bool:
    namespace, name = operator.split("::")
    return hasattr(getattr(torch.ops, namespace), name)


@cache
def _traced(kernel_type: str, patterns: Sequence[Pattern]) -> Patterns:
    if not patterns:
        return Patterns()
    operators = [pattern.operator for pattern in patterns if pattern.operator]
    kept = pattern_graphs.file_for(load_spec(kernel_type).folder / "patterns.py", operators)
    forms, failures = pattern_graphs.read(kept, len(patterns)), {}
    if forms is None:
        forms = []
        for pattern in patterns:
            try:
                graph = _trace_pattern(pattern)
                forms.append([form for form in (graph, _without_casts(graph)) if form])
            except Exception as error:  # of any kind: what this release of PyTorch makes of the example
                forms.append([])
                failures[f"a pattern of {kernel_type} is not searched for: {reason(error)}"] = None
        if not failures:
            pattern_graphs.write(kept, forms)
    return Patterns(tuple((p, form) for p, graphs in zip(patterns, forms) for form in graphs), tuple(failures))


def _trace_pattern(pattern: Pattern) -> fx.Graph:
    def tensor(v: Any) -> Tensor:
        return torch.empty(v, dtype=torch.float16, device="cpu") if isinstance(v, tuple) else v

    numbers = {k: v for k, v in pattern.inputs.items() if isinstance(v, (int, float))}
    tensors = {k: tensor(v) for k, v in pattern.inputs.items() if k not in numbers}

    def example(*values: Tensor) -> Tensor:
        return pattern.example(**dict(zip(tensors, values)), **numbers)

    # While Dynamo compiles a model, its fake mode would be used, and keep our sizes.
    with torch.device("cpu"), torch._guards.tracing(None), without_autocast():
        graph, _ = simplified(trace(example, list(tensors.values()), "fake"))
    for node, name in zip(graph.nodes, tensors):  # placeholders come first, in order
        node.meta["parameter"] = name
    return graph


def _without_casts(graph: fx.Graph) -> fx.Graph | None:
    """The graph in one floating-point dtype, where casts between them are nothing; None if it has none."""
    casts = [n for n in graph.nodes if n.target is aten.to.dtype and n.args[1].is_floating_point]
    if not casts:
        return None
    copy, copies = fx.Graph(), {}
    copy.output(copy.graph_copy(graph, copies))
    for node in map(copies.__getitem__, casts):
        node.replace_all_uses_with(node.args[0])
        copy.erase_node(node)
    return copy

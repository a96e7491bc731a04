"""Kept kernels back in a model: sites whose shapes, dtypes, strides and options were proven are computed by the kernel.

Everything else, and everything while gradients are wanted, stays as it was. The model itself is not changed.
"""

import hashlib
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from autokernel.build import default_cache
from autokernel.capture import aten, normalise
from autokernel.match import Site, SiteFinder
from autokernel.profiler import encoded
from autokernel.spec import import_file
from autokernel.target import Target

Kernel = Callable[..., Tensor]

# Of one function, over all sets of winners, shapes and gradient modes. Beyond its limit (8) Dynamo runs the original and
# says so in a log at most.
MAX_VERSIONS = 128

# The same operators by a shorter way: a call through torch.ops costs 1-2 µs more on the host.
DIRECT = {
    aten.add.Tensor: torch.add,
    aten.mul.Tensor: torch.mul,
    aten.linear.default: F.linear,
    aten.reshape.default: torch.reshape,
    aten.transpose.int: torch.transpose,
}


@dataclass(frozen=True)
class Winner:
    """The source of the kernel that was kept for a target."""

    target: Target
    source: str

    def load(self) -> Kernel:
        """Its kernel_fn. Written to a file of its own first: Triton reads a kernel's source from its file."""
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:16]
        path = default_cache() / "winners" / f"{digest}.py"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_text(self.source)
            os.replace(scratch, path)
        return import_file(path, f"autokernel_winner_{digest}").kernel_fn


@dataclass(frozen=True)
class Replacement:
    """A site that now runs a winner's kernel; `graph` counts the graphs that were compiled."""

    target: str
    case: str
    graph: int
    node: str


@dataclass
class Replacer:
    """A torch.compile backend that puts winners into each graph; `replaced` lists what it did, once the model has run."""

    winners: Sequence[Winner]
    finder: SiteFinder = field(default_factory=SiteFinder)  # share one, and what it proved is not proven again
    replaced: list[Replacement] = field(default_factory=list)
    graphs: int = 0

    @cached_property
    def kernels(self) -> dict[tuple[str, str], tuple[str, Kernel]]:
        """(kernel type, arguments) -> name of the target and its kernel."""
        return {
            (winner.target.kernel_type, encoded(weighted.case)): (winner.target.name, kernel)
            for winner in self.winners
            for kernel in [winner.load()]
            for weighted in winner.target.cases
        }

    def __call__(self, module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        wants_gradients = any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
        if torch.is_grad_enabled() and wants_gradients:  # Dynamo asks again when this changes
            return module.forward
        graph = normalise(module)
        found = [(site, (site.kernel_type, encoded(site.case))) for site in self.finder.find(graph)]
        for site, key in found:
            if key in self.kernels:
                target, kernel = self.kernels[key]
                _replace(graph, site, kernel)
                self.replaced.append(Replacement(target, site.case.name, self.graphs, site.output.name))
        self.graphs += 1
        if not any(key in self.kernels for _, key in found):
            return module.forward
        _share_views(graph)
        _shorten_calls(graph)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return graph.forward


def apply(model: nn.Module, winners: Sequence[Winner], replacer: Replacer | None = None) -> nn.Module:
    """`model` with the winners' kernels in it: same signature, same parameters; `model` itself stays as it is.

    Pass a Replacer (its winners count, then) to learn what was replaced.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MAX_VERSIONS)
    return torch.compile(model, backend=replacer or Replacer(winners), dynamic=False)


def _replace(graph: GraphModule, site: Site, kernel: Kernel) -> None:
    tracer = GraphAppendingTracer(graph.graph)

    def call(**arguments: Any) -> Proxy:
        nodes = {k: v.node if isinstance(v, Proxy) else v for k, v in arguments.items()}
        return Proxy(graph.graph.call_function(kernel, (), nodes), tracer)

    with graph.graph.inserting_before(site.output):
        parameters = {k: Proxy(v, tracer) if isinstance(v, Node) else v for k, v in site.parameters.items()}
        result = site.pattern.call(call, **parameters)
    site.output.replace_all_uses_with(result.node)


def _share_views(graph: GraphModule) -> None:
    """Sites of all layers take the same views of the same cos and sin: make each once."""
    first: dict[str, Node] = {}
    for node in graph.graph.nodes:
        is_view = node.op == "call_method" and not node.target.endswith("_") or node.target in (getattr, operator.getitem)
        earlier = first.setdefault(repr((node.target, node.args, node.kwargs)), node) if is_view else node
        if earlier is not node:
            node.replace_all_uses_with(earlier)


def _shorten_calls(graph: GraphModule) -> None:
    for node in graph.graph.nodes:
        node.target = DIRECT.get(node.target, node.target)

"""Kept kernels in a model, as a backend of torch.compile: sites that a kernel was proven for are computed by it.

Proven means: these shapes, dtypes, strides, options and this kind of device, as they are in the graph with kernels in it.
Everything else stays as it was, or goes through another backend.
"""

import hashlib
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from autokernel.build import default_cache
from autokernel.capture import normalise, value, why_left_alone
from autokernel.match import Site, SiteFinder, WhyNot, in_company
from autokernel.ops import DIRECT, Kernel, by_position, differentiable, direct, register, traced, visible
from autokernel.spec import Case, import_file, load_spec
from autokernel.target import Target, encoded

# Of one function, over all sets of winners, shapes and gradient modes. Beyond its limit (8) Dynamo runs the original and
# says so in a log at most.
MAX_VERSIONS = 128

MAX_SIZES = 32  # of one graph that are looked at for sites, some seconds each; for all other sizes the original runs
MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # of Inductor
INDUCTOR = ("inductor", *MODES)
# Numbers that are given to a Triton kernel are float32, as in Triton itself: with float64, kernels would be slower or fail.
FLOATS = {name: False for name in ("_use_fp64_for_unbacked_floats",) if hasattr(torch._inductor.config, name)}


@dataclass(frozen=True)
class Winner:
    """The source of the kernel that was kept for a target."""

    target: Target
    source: str

    @property
    def name(self) -> str:
        """Of its operator: equal names mean equal sources."""
        return f"{self.target.kernel_type}_{hashlib.sha256(self.source.encode()).hexdigest()[:16]}"

    @property
    def device_type(self) -> str:
        """Of its target: "cpu", "cuda"."""
        return torch.device(self.target.device).type

    def load(self) -> Kernel:
        """Its kernel_fn. Written to a file of its own first: Triton reads a kernel's source from its file."""
        path = default_cache() / "winners" / f"{self.name}.py"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_text(self.source)
            os.replace(scratch, path)
        return import_file(path, f"autokernel_winner_{self.name}").kernel_fn


@dataclass(frozen=True)
class Installed:
    """A winner that is ready to be called, with the oracle's parameters by position."""

    target: str
    ops: OpOverloadPacket
    run: Kernel  # the same without the dispatcher, for graphs that are not traced again
    visible: Kernel | None = None  # the same for tracing, if its launches are Triton's


@dataclass(frozen=True)
class Replacement:
    """A site that now runs a winner's kernel; `graph` counts the graphs that were compiled."""

    target: str
    case: str
    graph: int
    node: str


@dataclass
class Replacer:
    """A torch.compile backend that puts winners into each graph; `replaced` lists what it did, once the model has run.

    `fallback` names the backend for what remains of each graph ("inductor") or a mode of Inductor ("reduce-overhead": with
    CUDA graphs, "max-autotune"); None runs it as it is. Where gradients are
    wanted, kernels compute the forward pass, and the backward pass computes the original's again for its gradients;
    with gradients=False the original runs there.
    """

    winners: Sequence[Winner]
    fallback: str | None = None
    gradients: bool = True
    finder: SiteFinder = field(default_factory=SiteFinder)  # share one, and what it proved is not proven again
    replaced: list[Replacement] = field(default_factory=list)
    graphs: int = 0
    seen: dict[tuple[str, str], Kernel | None] = field(default_factory=dict)  # (operator, case) -> what _see() made of it
    trained: dict[tuple[str, str], Kernel] = field(default_factory=dict)  # the same with a gradient

    def __post_init__(self) -> None:
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, MAX_VERSIONS)

    @cached_property
    def installed(self) -> dict[tuple[str, str, str], Installed]:
        """(kernel type, kind of device, arguments) -> the kernel that was proven for them."""
        return {
            (winner.target.kernel_type, winner.device_type, encoded(case)): kernel
            for winner in self.winners
            for kernel in [install(winner)]
            for weighted in winner.target.cases
            for case in weighted.proven
        }

    def __call__(self, module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        wanted = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
        if why_left_alone(module) or (wanted and not self.gradients):  # Dynamo asks again when this changes
            return self._compile(module, inputs)
        if any(isinstance(v, torch.SymInt) for v in inputs):  # sizes changed, and now this is for all of them
            return self._by_size(module, inputs, wanted)
        return self._with_kernels(module, inputs, wanted)

    def _by_size(self, module: GraphModule, inputs: list[Any], wanted: bool) -> Callable[..., Any]:
        """The original for every size, compiled once; sizes for which kernels were proven get a graph of their own."""
        kept = _copy(module)  # a compiler may change what it is given
        general = self._compile(module, inputs)
        places = [i for i, v in enumerate(inputs) if isinstance(v, torch.SymInt)]
        versions: dict[tuple[int, ...], Callable[..., Any]] = {}
        tried: list[tuple[int, ...]] = []

        def choose(*values: Any) -> Any:
            sizes = tuple(values[i] for i in places)
            if sizes not in versions:
                versions[sizes] = general
                if len(tried) < MAX_SIZES and self._may_be_proven(sizes):
                    tried.append(sizes)
                    with tracing(TracingContext(FakeTensorMode())):  # there Inductor notes which inputs are parameters
                        versions[sizes] = self._with_kernels(_of_sizes(kept, values), list(values), wanted, general)
            return versions[sizes](*values)

        return choose

    def _may_be_proven(self, sizes: Sequence[int]) -> bool:
        """Whether a kernel was proven for a dimension that each size is a part of: else looking for sites is in vain."""
        shapes = [t.shape for w in self.winners for c in w.target.cases for t in c.case.tensors.values()]
        dims = {n for shape in shapes for n in shape}
        return all(any(n % size == 0 for n in dims) for size in sizes if size > 0)

    def _with_kernels(
        self, module: GraphModule, inputs: list[Any], wanted: bool, general: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """`module` with kernels at its sites; where there are none, `general` or else `module`, compiled."""
        graph = normalise(module)
        found = self._proven(graph, [s for s in self.finder.find(graph) if not (wanted and _changes_mode(graph, s))])
        results: dict[Node, Node] = {}  # of replaced sites: where one's output is the next one's input
        for site, case, kernel in found:
            callee = self._callee(kernel, site, case, wanted)
            results[site.output] = _replace(graph, site, kernel.ops.default, callee, results)
            self.replaced.append(Replacement(kernel.target, site.case.name, self.graphs, site.output.name))
        self.graphs += 1
        if not found:
            return general or self._compile(module, inputs)
        _share_views(graph)
        if not self.fallback:
            _shorten_calls(graph, {kernel.ops.no_grad: kernel.run for _, _, kernel in found})
        graph.graph.eliminate_dead_code()
        graph.recompile()
        _keep_origins(graph, module)
        return _where_aligned(self._compile(graph, inputs), module.forward, inputs)

    def _proven(self, graph: GraphModule, sites: Sequence[Site]) -> list[tuple[Site, Case, Installed]]:
        """The sites for which there are kernels, and the cases in which they get them from each other."""
        chosen = [site for site in sites if self._kernel_for(site, site.case)]
        while True:
            cases = in_company(graph, chosen)
            kernels = [self._kernel_for(site, case) for site, case in zip(chosen, cases)]
            if all(kernels):
                return list(zip(chosen, cases, kernels))
            chosen = [site for site, kernel in zip(chosen, kernels) if kernel]

    def _kernel_for(self, site: Site, case: Case | WhyNot) -> Installed | None:
        if isinstance(case, WhyNot):
            return None
        return self.installed.get((site.kernel_type, value(site.output).device.type, encoded(case)))

    def _callee(self, kernel: Installed, site: Site, case: Case, wanted: bool) -> Kernel:
        """What a graph calls: the operator, or something that costs the host less where that will do."""
        if wanted and self.fallback:
            return kernel.ops.default
        key = (kernel.ops.__name__, encoded(case))
        if key not in self.seen:
            self.seen[key] = self._see(kernel, site, case)
        short = self.seen[key]
        if wanted and key not in self.trained:
            self.trained[key] = differentiable(load_spec(site.kernel_type), short or kernel.run)
        return self.trained[key] if wanted else short or kernel.ops.no_grad

    def _see(self, kernel: Installed, site: Site, case: Case) -> Kernel | None:
        """A Triton kernel as Inductor launches it, or as we do where nothing compiles the graph; None if it is opaque."""
        if not kernel.visible or self.fallback not in (None, *INDUCTOR):
            return None
        graph = traced(load_spec(site.kernel_type), kernel.visible, case, value(site.output).device)
        return graph and (kernel.visible if self.fallback else direct(graph))

    def _compile(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if not self.fallback:
            return graph.forward
        if self.fallback in INDUCTOR:
            options = torch._inductor.list_mode_options(self.fallback) if self.fallback in MODES else {}
            return torch._inductor.compile(graph, inputs, options | FLOATS)
        return torch._dynamo.lookup_backend(self.fallback)(graph, inputs)


def apply(
    model: nn.Module,
    winners: Sequence[Winner] | str | Path | None = None,
    fallback: str | None = None,
    gradients: bool = True,
) -> nn.Module:
    """Put kernels into `model`, which is returned: same class, same parameters, same state_dict.

    winners: kernels, or the run (its name or folder) whose verified kernels they are; by default that of $AUTOKERNEL_RUN,
    else the latest. See Replacer for the other options. Copies and pickles of the model have no kernels, and unapply()
    takes them out again.
    """
    chosen = _of_run(winners, fallback) if winners is None or isinstance(winners, (str, Path)) else winners

    # As model.compile() does, but by way of a function of ours: Dynamo skips forward() of the modules in torch.nn itself.
    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    model._compiled_call_impl = torch.compile(call, backend=Replacer(chosen, fallback, gradients))
    return model


def autokernel(module: GraphModule, inputs: list[Any], *, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """torch.compile(model, backend="autokernel", options={"run": …, "fallback": …, "gradients": …}); all are optional."""
    return _backend(**(options or {}))(module, inputs)


@cache  # one for all graphs: what it loaded and proved serves them all
def _backend(run: str | Path | None = None, fallback: str | None = None, gradients: bool = True) -> Replacer:
    return Replacer(_of_run(run, fallback), fallback, gradients)


def _of_run(run: str | Path | None, fallback: str | None) -> Sequence[Winner]:
    from autokernel import winners  # all of a run, git included, is behind it: not needed where kernels are given

    verification, kept = winners.verified(winners.open_run(run))
    return verification.staying(kept, fallback)


def beside(model: nn.Module, replacer: Replacer) -> Callable[..., Any]:
    """`model` with kernels in it, beside `model` itself, which stays as it is."""
    return torch.compile(model, backend=replacer)


def unapply(model: nn.Module) -> nn.Module:
    """`model` as it was before apply()."""
    model._compiled_call_impl = None
    return model


def install(winner: Winner) -> Installed:
    spec, kernel = load_spec(winner.target.kernel_type), winner.load()
    ops = register(winner.name, spec, kernel, winner.device_type)
    is_triton = getattr(kernel, "__globals__", {}).get("BACKEND") == "triton"  # whatever its target began with
    seen = visible(spec, kernel) if is_triton else None
    return Installed(winner.target.name, ops, by_position(spec, kernel), seen)


def _changes_mode(graph: GraphModule, site: Site) -> bool:
    """Whether gradients are switched on or off between the nodes of a site."""
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    first, last = min(order[n] for n in site.nodes), order[site.output]
    return any(first < i < last and node.target is torch._C._set_grad_enabled for node, i in order.items())


def _replace(graph: GraphModule, site: Site, op: OpOverload, callee: Kernel, results: Mapping[Node, Node]) -> Node:
    """A call of `callee`, which has the parameters of `op`, for the nodes of a site."""
    tracer = GraphAppendingTracer(graph.graph)
    names = [argument.name for argument in op._schema.arguments]

    def call(**arguments: Any) -> Proxy:
        given = site.case.args | arguments  # the case has the oracle's defaults, too
        nodes = tuple(v.node if isinstance(v, Proxy) else v for v in (given[name] for name in names))
        return Proxy(graph.graph.call_function(callee, nodes), tracer)

    with graph.graph.inserting_before(site.output):
        parameters = {k: Proxy(results.get(v, v), tracer) if isinstance(v, Node) else v for k, v in site.parameters.items()}
        result = site.pattern.call(call, **parameters).node
    site.output.replace_all_uses_with(result)
    return result


def _share_views(graph: GraphModule) -> None:
    """Sites of all layers take the same views of the same cos and sin: make each once."""
    first: dict[str, Node] = {}
    for node in graph.graph.nodes:
        is_view = node.op == "call_method" and not node.target.endswith("_") or node.target in (getattr, operator.getitem)
        earlier = first.setdefault(repr((node.target, node.args, node.kwargs)), node) if is_view else node
        if earlier is not node:
            node.replace_all_uses_with(earlier)


def _shorten_calls(graph: GraphModule, kernels: dict[OpOverload, Kernel]) -> None:
    direct = DIRECT | kernels
    for node in graph.graph.nodes:
        node.target = direct.get(node.target, node.target)


def _copy(module: GraphModule) -> GraphModule:
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copied = GraphModule(module, graph)
    _keep_origins(copied, module)
    return copied


def _of_sizes(module: GraphModule, values: Sequence[Any]) -> GraphModule:
    """A graph that Dynamo made for all sizes, for those of `values`."""
    copied, mode = _copy(module), FakeTensorMode()
    for node, v in zip(copied.graph.find_nodes(op="placeholder"), values):
        node.meta["example_value"] = mode.from_tensor(v) if isinstance(v, Tensor) else v
    return copied


def _keep_origins(graph: GraphModule, module: GraphModule) -> None:
    """What Dynamo noted about the inputs: Inductor asks which are parameters and stay where they are."""
    graph.meta |= module.meta
    if hasattr(module, "_param_name_to_source"):  # without it, none of the rest is looked at
        graph._param_name_to_source = module._param_name_to_source
    for ours, theirs in zip(graph.graph.find_nodes(op="placeholder"), module.graph.find_nodes(op="placeholder")):
        ours.meta = theirs.meta | ours.meta
        if hasattr(theirs, "_dynamo_source"):
            ours._dynamo_source = theirs._dynamo_source


def _where_aligned(call: Callable[..., Any], other: Callable[..., Any], inputs: list[Any]) -> Callable[..., Any]:
    """`call` for inputs that start where the example's do in their storages (mod 16): Dynamo takes no notice of that."""
    starts = [
        (i, t.storage_offset() % 16)
        for i, t in enumerate(inputs)
        if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)
    ]

    def choose(*values: Any) -> Any:
        chosen = call if all(values[i].storage_offset() % 16 == start for i, start in starts) else other
        return chosen(*values)

    return choose

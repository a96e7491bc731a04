"""Kept kernels in a model, as a backend of torch.compile: sites that a kernel was proven for are computed by it.

Proven means: these shapes, dtypes, strides, options and this kind of device, as they are in the graph with kernels in it.
Everything else stays as it was, or goes through another backend: so does a graph in which anything of this fails.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._dynamo.utils import maybe_disable_inference_mode, maybe_disable_inference_mode_for_fake_prop
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from autokernel.integration import compilers
from autokernel.integration.frames import Frames
from autokernel.integration.graphs import (
    _keep_origins,
    constants_as_inputs,
    copy_of,
    drop_idle,
    give_examples,
    let_go,
    of_sizes,
    records_gradients,
    share_views,
    shorten_calls,
    with_sites,
)
from autokernel.integration.insertion import (
    Installed,
    Place,
    each_result,
    insert,
    install,
    parts_of,
    strides_are_in_doubt,
    trained,
    why_not_with_gradients,
)
from autokernel.integration.ops import (
    Kernel,
    Launches,
    direct,
    launches_known,
    traced,
)
from autokernel.integration.running import (
    Objects,
    in_eager_mode,
    switch_inference_mode_off_for_gradients,
    with_constants,
    without_casts,
    without_tangents,
)
from autokernel.integration.winner import Winner
from autokernel.model import catching, padding
from autokernel.model.agreement import extract_subgraph
from autokernel.model.autocast import autocast_devices, without_autocast
from autokernel.model.breaks import reason
from autokernel.model.capture import allow_versions, why_left_alone
from autokernel.model.contract import Backward
from autokernel.model.match import SiteFinder
from autokernel.model.nodes import overwritten, prune, strides_of, value
from autokernel.model.numbers import mark_numbers, numbers_in, tensors_in
from autokernel.model.patterns import Site
from autokernel.model.placement import RejectReason
from autokernel.model.regions.growing import regions_of
from autokernel.model.settings import is_dispatched
from autokernel.model.tracing import checkpoint, to_aten
from autokernel.spec import Case, is_region, load_spec
from autokernel.target import encoded

LOG = logging.getLogger("autokernel")

MAX_SIZES = 32  # of one graph that are looked at for sites, some seconds each; for all other sizes the original runs
WITHOUT_GRADIENTS = "where gradients are wanted the model's own code runs (gradients=False)"
IN_CHECKPOINTS = "what a checkpoint computes, where gradients are wanted, is left as it is"
MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # of Inductor
INDUCTOR = ("inductor", *MODES)
# Numbers that are given to a Triton kernel are float32, as in Triton itself: with float64, kernels would be slower or fail.
FLOATS = {name: False for name in ("_use_fp64_for_unbacked_floats",) if hasattr(torch._inductor.config, name)}
# (operator, case, device) -> its launches; None where they cannot be traced. As operators, they stay.
LAUNCHERS: dict[tuple[str, str, str], Launches | None] = {}

Sites = tuple[
    GraphModule, Backward | None, list[Site]
]  # of a graph, in ATen, and where gradients are wanted what they need


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

    What cannot be done leaves a graph, or a call, as the model has it. `left` lists the reasons; errors are logged as well.

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
    left: list[str] = field(default_factory=list)
    idle: str = ""  # of these, that no kernel is in the model
    graphs: int = 0
    may_pad: bool = True  # see model/padding.py
    is_settled: bool = True  # whether the next call will be looked at as the last one was
    installed: dict[str, Installed | None] = field(default_factory=dict)  # by target; None: it cannot be
    seen: dict[tuple[str, str], Kernel | None] = field(default_factory=dict)  # (operator, case) -> what _see() made of it
    look: Callable[[GraphModule, list[Any], bool], Sites] | None = None  # instead of sites_in()
    launches: bool = True  # whether Inductor is shown what Triton kernels launch

    def __post_init__(self) -> None:
        regions = {w.target.kernel_type for w in self.winners if is_region(w.target.kernel_type)}
        if regions:
            self.finder.region_names |= regions
            self.finder.regions = self.finder.regions or partial(regions_of, only=self.finder.region_names)
        allow_versions()

    @property
    def is_compiled(self) -> bool:
        """Whether another backend makes something of its own of what remains of a graph."""
        return self.fallback not in (None, "eager")

    @cached_property
    def frames(self) -> Frames:
        return Frames(self.leave, self.fail)

    @cached_property
    def proven(self) -> dict[tuple[str, str, str], Winner]:
        """(kernel type, kind of device, arguments) -> the winner that was proven for them."""
        return {
            (winner.target.kernel_type, winner.device_type, encoded(case)): winner
            for winner in self.winners
            for weighted in winner.target.cases
            for case in weighted.proven
        }

    def __call__(self, module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """The boundary around every model: no error of ours goes beyond it."""
        is_first = self.frames.compiling()
        if why := (self.may_pad and padding.why_not_compiled(module)) or catching.why_not_compiled(module):
            self.leave(why)
            raise SkipFrame(why)  # Dynamo runs the model's own code
        if any(t.device.type == "meta" for t in tensors_in(module)):  # where kernels and compilers can compute nothing
            self.leave("a graph with tensors without data in it, on the device meta, is left as it is")
            return in_eager_mode(module)
        switch_inference_mode_off_for_gradients(module)
        if why := self.is_compiled and compilers.why_not_compiled(module, inputs):
            self.leave(why)
            return in_eager_mode(module)
        kept = copy_of(module) if self.fallback else module  # a compiler may change what it is given
        original = in_eager_mode(kept)
        repeatable = compilers.Repeatable(partial(copy_of, kept))
        if why := self.is_compiled and (
            compilers.computes_again_at_random(kept, repeatable)
            or compilers.see_to_writes(module, inputs, partial(copy_of, kept))
        ):
            self.leave(why)
            return original

        def finished(call: Callable[..., Any]) -> Callable[..., Any]:
            if self.is_compiled:
                call = self._over_a_compiler(call, original, repeatable, records_gradients(kept))
            call = compilers.where_memory_is_shared_alike(call, original, kept, inputs)
            call = without_tangents(call, original)
            return compilers.whose_errors_say(call, repeatable) if is_first else call

        try:
            return finished(self._optimised(module, inputs))
        except RestartAnalysis:  # Dynamo traces once more, as with a float that has to be a constant
            raise
        except Exception as error:  # of any kind: whatever the model does has met whatever we do with it
            failure = error
        if self._are_operators_from_now_on(failure):
            try:
                return finished(self._optimised(copy_of(kept), inputs))
            except RestartAnalysis:
                raise
            except Exception as error:
                failure = error
        self.fail(f"a graph is left as it is: {reason(failure)}")
        try:
            return finished(self._behind_the_original(self._compile(copy_of(kept), inputs), original))
        except RestartAnalysis:
            raise
        except Exception as error:
            self.fail(f"{self.fallback} cannot compile a graph, which runs as it is: {reason(error)}")
            return original

    def _over_a_compiler(
        self, call: Callable[..., Any], original: Callable[..., Any], repeatable: compilers.Repeatable, wanted: bool
    ) -> Callable[..., Any]:
        """`call`, which the fallback made of `original`, with what that does not keep of eager mode.

        wanted: whether gradients are: Dynamo asks again when that changes.
        """
        if wanted:
            call = compilers.differentiable_again(call, original, repeatable)
        return compilers.or_the_original(call, original, repeatable, self._without_from_now_on(self.fallback))

    def _behind_the_original(self, call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        """What a compiler made of a graph that could not be traced: it may leave out what the model itself raises."""
        return compilers.behind_the_original(call, original) if self.is_compiled else call

    def _are_operators_from_now_on(self, error: Exception) -> bool:
        """Whether Inductor was shown what Triton kernels launch until this error, which may be of that."""
        shown = bool(self.fallback) and self.launches and any(self.seen.values())
        if shown:
            self.launches, self.seen = False, {}
            self.fail(f"Triton kernels are operators to Inductor, which could not launch them itself: {reason(error)}")
        return shown

    def _without_from_now_on(self, what: str) -> Callable[[Exception], None]:
        return lambda error: self.fail(f"a graph runs without {what} from now on: {reason(error)}")

    def _optimised(self, module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        wanted = records_gradients(module) and any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
        if why := why_left_alone(module):
            self.leave(why)
            return in_eager_mode(module) if compilers.loses_a_mode(module) else self._compile(module, inputs)
        if wanted and not self.gradients:  # Dynamo asks again when this changes
            self.leave(WITHOUT_GRADIENTS)
            return self._compile(module, inputs)
        if sizes := self._sizes(module, inputs):  # which changed, and now this is for all of them
            return self._by_size(module, inputs, wanted, sizes)
        return self._with_kernels(module, inputs, wanted)

    def leave(self, why: str) -> bool:
        """Lists `why`; whether that is new."""
        is_new = why not in self.left
        self.left += [why] * is_new
        return is_new

    def fail(self, why: str) -> None:
        """Lists `why`, and logs it where it is new."""
        if self.leave(why):
            LOG.warning(why)

    def say_if_idle(self, model: str) -> None:
        """After a pass: that it had no kernel in it, if so."""
        if WITHOUT_GRADIENTS in self.left and not self.graphs:
            return  # as it was asked for
        if self.winners and not self.replaced and None not in self.installed.values():  # which has been said
            names = ", ".join(winner.target.name for winner in self.winners)
            if self.graphs or not self.left:
                why = (
                    f"no operation of its {self.graphs} graph{'s' * (self.graphs != 1)} has the shapes, dtypes and device "
                    f"for which its kernels were proven ({names})"
                )
            else:
                why = f"there is no graph of it to put its kernels in ({names}); autokernel.explain() says why"
            self.idle = f"nothing is replaced in {model}: {why}"
            self.fail(self.idle)

    def _sizes(self, module: GraphModule, inputs: list[Any]) -> list[int]:
        """The places of the inputs that need a graph for each of their values."""
        changing = [i for i, v in enumerate(inputs) if isinstance(v, torch.SymInt)]
        numbers = numbers_in(module) if changing else []
        if self.fallback and len(numbers) < len(changing):  # what is compiled for sizes has all as they are at hand
            return changing
        mark_numbers(numbers)
        given = module.graph.find_nodes(op="placeholder")
        return [i for i in changing if given[i] not in numbers]

    def _by_size(self, module: GraphModule, inputs: list[Any], wanted: bool, places: Sequence[int]) -> Callable[..., Any]:
        """The original for every size, compiled once; sizes for which kernels were proven get a graph of their own."""
        kept = copy_of(module)  # a compiler may change what it is given
        general = self._compile(module, inputs)
        versions: dict[tuple[int, ...], Callable[..., Any]] = {}
        tried: list[tuple[int, ...]] = []

        def choose(*values: Any) -> Any:
            sizes = tuple(values[i] for i in places)
            if sizes not in versions:
                with compile_lock:  # as Dynamo does: no two threads may trace at a time
                    versions.setdefault(sizes, general)
                    if sizes not in tried and len(tried) < MAX_SIZES and self._may_be_proven(sizes):
                        tried.append(sizes)
                        versions[sizes] = of_these(sizes, values)
            return versions[sizes](*values)

        def of_these(sizes: tuple[int, ...], values: Sequence[Any]) -> Callable[..., Any]:
            try:
                # In the context Inductor notes which inputs are parameters. Modes of the caller's, such as fake tensors,
                # would have us prove nothing; as in Dynamo, inference mode is on when it runs, not while it is compiled.
                mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)  # with symbols for floats that it reads
                with (
                    maybe_disable_inference_mode(),
                    maybe_disable_inference_mode_for_fake_prop(),
                    tracing(TracingContext(mode)) as context,
                    _disable_current_modes(),
                    let_go(context),
                ):
                    return self._with_kernels(of_sizes(kept, values, context), list(values), wanted, general)
            except Exception as error:
                self.fail(f"a graph is left as it is for some sizes: {reason(error)}")
                return general

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
        (graph, backward, sites), ambient = (self.look or self.sites_in)(module, inputs, wanted), autocast_devices()
        with without_autocast():
            found, result = self._proven(graph, sites, backward)
        around = self._as_in_eager_mode(graph, found, backward)
        for failure in self.finder.failures:
            self.fail(failure)
        if graph.graph.find_nodes(op="call_function", target=checkpoint):  # without gradients it is its body
            self.leave(IN_CHECKPOINTS)
        in_doubt = bool(found) and strides_are_in_doubt(graph)
        results: dict[Node, Node] = {}  # of replaced sites: where one's output is the next one's input
        for place in found:
            results |= self._replace(graph, place, results)
        if not found:
            self.graphs += 1
            return general or around(self._compile(module, inputs))
        drop_idle(graph, result, wanted)
        share_views(graph)
        if not self.fallback:
            shorten_calls(graph, {place.kernel.ops.no_grad: place.kernel.run for place in found})
        prune(graph)
        _keep_origins(graph, module)
        constants = constants_as_inputs(graph) if self.fallback else []
        repeatable = not any(overwritten(node) for node in graph.graph.nodes)
        with without_autocast():
            objects = Objects(graph, results) if self.fallback else None  # a compiler may change what it is given
            call = self._compile(graph, [*inputs, *constants])
        call = without_casts(ambient, with_constants(objects.kept_by(call) if objects else call, constants))
        original = in_eager_mode(module)
        if repeatable and in_doubt:
            call = self._in_the_originals_strides(call, original)
        optimised = self._where_possible(around(call), original, inputs, repeatable)
        if self.idle in self.left:
            self.left.remove(self.idle)  # it was so until now
        self.replaced += [Replacement(p.kernel.target, p.site.case.name, self.graphs, p.site.output.name) for p in found]
        self.graphs += 1
        return optimised

    def _as_in_eager_mode(
        self, graph: GraphModule, found: Sequence["Place"], backward: Backward | None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What is to be put around `graph` with these kernels for its backward pass.

        A compiler does not keep all that eager mode does. A kernel of several results keeps those that all depend on.
        """
        (results,) = graph.graph.output_node().args
        if not backward or not isinstance(results, (tuple, list)):
            return lambda call: call
        of_several = {node for place in found if len(place.site.outputs) > 1 for node in place.site.nodes}
        kept = backward.kept_results(results, {*graph.graph.nodes} if self.is_compiled else of_several)
        reached = backward.reached(results) if self.is_compiled else {}
        return lambda call: compilers.without_zeros(compilers.noticing_writes(call, kept), reached)

    def sites_in(self, module: GraphModule, inputs: list[Any], wanted: bool) -> Sites:
        graph = to_aten(module, wanted)
        with without_autocast():
            # Without Dynamo's forms of operators, of which some take what PyTorch itself refuses.
            as_run = Backward(graph, inputs) if wanted or self.is_compiled else None
            backward = as_run if wanted else None
            is_left = backward and self._left_for_strides(backward)
            return graph, backward, [] if is_left else self.finder.find(graph)

    def _where_possible(
        self, call: Callable[..., Any], other: Callable[..., Any], inputs: list[Any], repeatable: bool
    ) -> Callable[..., Any]:
        """`call` for inputs that start where the example's do in their storages (mod 16): Dynamo takes no notice of that.

        `other`, the original, for the rest, and where a mode sees to all operators. Also from the first error on, where a
        call can be repeated because nothing is changed in place; an error that is met there too is the model's own.
        """
        starts = [
            (i, t.storage_offset() % 16)
            for i, t in enumerate(inputs)
            if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)
        ]
        call = compilers.or_the_original(call, other, repeatable, self._without_from_now_on("kernels"))

        def choose(*values: Any) -> Any:
            is_as_expected = all(values[i].storage_offset() % 16 == start for i, start in starts)
            return (call if is_as_expected and not is_dispatched() else other)(*values)

        return choose

    def _in_the_originals_strides(self, call: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, of which the first call is held against one of `other`, the original, which runs if strides differ."""
        chosen: Callable[..., Any] | None = None

        def choose(*values: Any) -> Any:
            nonlocal chosen
            if chosen:
                return chosen(*values)
            devices = {v.device for v in values if isinstance(v, Tensor) and v.device.type == "cuda"}
            with torch.random.fork_rng(devices):  # both take the same random numbers
                expected = other(*values)
            results = call(*values)
            ours, theirs = ([strides_of(v) for v in made if isinstance(v, Tensor)] for made in (results, expected))
            chosen = call if ours == theirs else other
            if chosen is other:
                self.leave("a graph runs without kernels, with which its results would have other strides")
            return results if chosen is call else expected

        return choose

    def _proven(
        self, graph: GraphModule, sites: Sequence[Site], backward: Backward | None
    ) -> tuple[list["Place"], Callable[[Node], Any]]:
        """The sites for which there are kernels, how these are called beside each other, and the results of nodes then."""
        proven = [site for site in sites if self._kernel_for(site, site.case)]
        chosen = [site for site in proven if not self._left_for_gradients(graph, site, backward)]
        while True:
            placements, result = self.finder.cases_after_replacement(graph, chosen)
            kernels = [
                not isinstance(p, RejectReason) and self._kernel_for(site, p.case) for site, p in zip(chosen, placements)
            ]
            if all(kernels):
                originals = [extract_subgraph(graph, [*site.outputs], site.inputs, wide=False) for site in chosen]
                # Of what AOTAutograd compiles no result has a gradient of another, with kernels or without.
                apart = backward and not self.is_compiled
                parts = [parts_of(graph, site, backward) if apart else () for site in chosen]
                found = zip(chosen, placements, kernels, originals, parts)
                return [Place(site, p, k, backward, original, own) for site, p, k, original, own in found], result
            chosen = [site for site, kernel in zip(chosen, kernels) if kernel]

    def _left_for_strides(self, backward: Backward) -> bool:
        """Whether a graph stays as it is because its strides are known without gradients alone; then that is listed."""
        differing = backward.differing
        if not differing or backward.adopted():
            return False
        node = differing[0]
        self.leave(f"a graph with {node.target} in it, whose result has other strides with gradients, is left as it is")
        return True

    def _left_for_gradients(self, graph: GraphModule, site: Site, backward: Backward | None) -> bool:
        """Whether a site stays as it is because gradients would be others with a kernel there; then that is listed."""
        why = backward and why_not_with_gradients(graph, site, backward)
        if why:
            self.leave(f"{site.kernel_type} {site.case.name} is not replaced where gradients are wanted: {why.value}")
        return bool(why)

    def _kernel_for(self, site: Site, case: Case | RejectReason) -> Installed | None:
        if isinstance(case, RejectReason):
            return None
        winner = self.proven.get((site.kernel_type, value(site.output).device.type, encoded(case)))
        return winner and self._installed(winner)

    def _installed(self, winner: Winner) -> Installed | None:
        name = winner.target.name
        if name not in self.installed:
            try:
                self.installed[name] = install(winner)
            except Exception as error:  # of any kind: no compiler, another version of Triton
                self.fail(f"the kernel for {name} is not used: {reason(error)}")
                self.installed[name] = None
        return self.installed[name]

    def _replace(self, graph: GraphModule, place: "Place", results: Mapping[Node, Node]) -> dict[Node, Node]:
        """The kernel in the graph in place of a site's nodes; returns what stands for each of its outputs."""
        site, callee = place.site, self._callee(place)
        inputs = [results.get(node, node) for node in place.site.inputs]
        with graph.graph.inserting_before(site.outputs[0]):
            if place.wants_gradient:
                call = graph.graph.call_function(trained(place, callee), tuple(inputs))
                made = each_result(graph.graph, call, site)
            else:
                made = insert(graph.graph, place, callee, dict(zip(place.site.inputs, inputs)))
        for output, result in zip(site.outputs, made):
            output.replace_all_uses_with(result)
        return dict(zip(site.outputs, made))

    def _callee(self, place: "Place") -> Kernel:
        """What a graph calls: the operator, or something that costs the host less where that will do."""
        kernel, case = place.kernel, place.placement.case
        if place.wants_gradient and self.fallback:
            return kernel.ops.default
        key = (kernel.ops.__name__, encoded(case))
        if key not in self.seen:
            self.seen[key] = self._see(kernel, place.site, case)
        return self.seen[key] or (kernel.run if place.wants_gradient else kernel.ops.no_grad)

    def _see(self, kernel: Installed, site: Site, case: Case) -> Kernel | None:
        """A Triton kernel as Inductor launches it, or as we do where nothing compiles the graph; None if it is opaque."""
        if not kernel.visible or self.fallback not in (None, *INDUCTOR):
            return None
        spec, device = load_spec(site.kernel_type), value(site.output).device
        key = (kernel.ops.__name__, encoded(case), str(device))
        if key not in LAUNCHERS:
            graph = traced(spec, kernel.visible(case), case, device)
            LAUNCHERS[key] = graph and direct(graph)
        launches = LAUNCHERS[key]
        if not launches or not self.fallback:
            return launches and launches.run
        if not self.launches:
            return None
        if names := ", ".join(launches.not_copied):
            self.leave(f"{kernel.target} is an operator to Inductor, which does not copy {names} from its file")
            return None
        return kernel.launches

    def _compile(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if not self.is_compiled:
            return in_eager_mode(graph)
        compilers.on_copies(graph)
        with compilers.compiling(), launches_known():
            if self.fallback not in INDUCTOR:
                return torch._dynamo.lookup_backend(self.fallback)(graph, inputs)
            options = torch._inductor.list_mode_options(self.fallback) if self.fallback in MODES else {}
            graph = copy_of(graph)  # in AOTAutograd's cache, the same graph is found however it came about
            give_examples(graph)
            return torch._inductor.compile(graph, inputs, options | FLOATS)


@dataclass
class OneTrace:
    """A torch.compile backend that makes several forms of each graph of one trace, to be compared; one of them runs."""

    replacers: Mapping[str, Replacer]  # all over the same fallback, with one finder
    chosen: str = ""
    may_pad: bool = True
    is_settled: bool = True

    @property
    def fallback(self) -> str | None:
        return next(iter(self.replacers.values())).fallback

    def __call__(self, module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        forms, known = {}, []

        def look(module: GraphModule, inputs: list[Any], wanted: bool) -> Sites:
            if wanted:  # whose backward pass is of one graph
                return replacer.sites_in(module, inputs, wanted)
            if not known:
                known.append(replacer.sites_in(module, inputs, wanted))
            graph, _, sites = known[0]
            copied, sites = with_sites(graph, sites)
            return copied, None, sites

        for name, replacer in self.replacers.items():
            replacer.may_pad, replacer.look = self.may_pad, look
            forms[name] = replacer(copy_of(module), inputs)
            replacer.look = None
        return lambda *values: forms[self.chosen](*values)

    @property
    def frames(self) -> Frames:
        return next(iter(self.replacers.values())).frames

    def leave(self, why: str) -> None:
        for replacer in self.replacers.values():
            replacer.leave(why)

    def run(self, name: str, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`compiled`, a model with this backend, in the form `name`."""
        self.chosen = name
        return compiled(*args, **kwargs)

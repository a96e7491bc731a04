"""Where a graph computes what a kernel computes: patterns given as example code, matches proven by experiment.

A pattern is a way in which models write a kernel type's operation, a plain PyTorch function; `kernels/<type>/patterns.py`
lists them. It is traced like a model, and found in the model's graph by a small backtracking search that is deliberately
lenient: sizes, dims and dtypes match anything. What it finds becomes a site only when the model's own nodes and the oracle,
called with the arguments that the kernel would get, give the same numbers in float64.

Models and PyTorch releases are many: what cannot be traced, read or proven is left as it is, and its reason is listed.

Searched is a simplified copy of a graph; sites, and all that is proven of them, are in terms of the graph itself.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autokernel.model.agreement import agree, between, extract_subgraph
from autokernel.model.autocast import without_autocast
from autokernel.model.breaks import reason
from autokernel.model.nodes import simplified, storages, value, written
from autokernel.model.patterns import Site, patterns_of
from autokernel.model.placement import Placement, RejectReason, cases_after_replacement, described_case
from autokernel.model.reading import Search
from autokernel.model.rounding import rounds
from autokernel.spec import kernel_types, load_spec

MIN_ELEMENTS = 10_000  # of all tensors of a site, once for each of its nodes; below that a call costs more than the work
REGION = "a region"  # as the kernel type of what is refused as one
MAX_READINGS = 8  # ways to read one place as one pattern that are tried against the oracle
COSTLY_FLOPS = 1e8  # 10 ms in float64


@dataclass(frozen=True, eq=False)
class Refusal:
    """A node that reads like the result of a kernel type's operation, and is part of no site; `nodes` are its whole."""

    kernel_type: str
    node: Node
    nodes: frozenset[Node]
    why: RejectReason


# (graph, sites of named types) -> further sites, some of them in the place of those, and what is none
RegionFinder = Callable[[GraphModule, Sequence[Site]], Iterable[Site | Refusal]]


@dataclass
class SiteFinder:
    """Finds the sites of graphs, larger patterns first; remembers what was proven, for models repeat their layers.

    `failures` lists, each once, the errors in what was tried for that: places that they befell are no sites.
    regions: makes kernel types of what is left, if that is wanted; finds those of `region_names` alone, if any are named.
    """

    min_elements: int = MIN_ELEMENTS
    regions: RegionFinder | None = None
    region_names: set[str] = field(default_factory=set)
    proofs: dict[Any, RejectReason | None] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def find(self, graph: GraphModule) -> list[Site]:
        return self.examine(graph)[0]

    def examine(self, graph: GraphModule) -> tuple[list[Site], list[Refusal]]:
        """Sites, and what only looks like one, in the order of the graph."""
        patterns = {kernel_type: patterns_of(kernel_type) for kernel_type in kernel_types()}
        self._note(*(failure for p in patterns.values() for failure in p.failures))
        searches = [(t, Search(pattern, g)) for t, p in patterns.items() for pattern, g in p.graphs]
        form, originals = simplified(graph)
        by_target: dict[Any, list[Node]] = {}
        for node in form.nodes:
            by_target.setdefault(node.target, []).append(node)
        sites: list[Site] = []
        claimed: set[Node] = set()
        refused: dict[tuple[str, Node], Refusal] = {}
        places = _Places(graph, originals)
        for kernel_type, search in sorted(searches, key=lambda s: -s[1].size):
            for node in by_target.get(search.result.target, ()):
                original = originals[node]
                if original in claimed:
                    continue
                for answer in self._answers(places, kernel_type, search, node, claimed):
                    if isinstance(answer, Site):
                        sites.append(answer)
                        claimed |= answer.nodes
                        break
                    known = refused.setdefault((kernel_type, original), answer)
                    refused[kernel_type, original] = max(known, answer, key=lambda refusal: refusal.why.rank)
        replaced: dict[Site, list[Site]] = {}  # by a region
        regions, no_regions = self._regions(places, sites) if self.regions else ((), ())
        for refusal in no_regions:  # of a whole, then of its parts
            refused.setdefault((REGION, refusal.node), refusal)
        for site in regions:
            replaced[site] = [named for named in sites if named.nodes & site.nodes]
            sites = [*(named for named in sites if named not in replaced[site]), site]
            claimed |= site.nodes
        placements = self._placed(graph, sites)
        while impossible := [site for site in sites if placements[site] is RejectReason.LAYOUT]:
            for site in impossible:
                sites.remove(site)
                sites += replaced.get(site, ())
                refusal = Refusal(site.kernel_type, site.output, site.nodes, RejectReason.LAYOUT)
                refused[site.kernel_type, site.output] = refusal
            claimed = {node for site in sites for node in site.nodes}
            if not any(replaced.get(site) for site in impossible):
                break
            placements = self._placed(graph, sites)
        for site in list(sites):
            if isinstance(placements[site], Placement) and placements[site].case != site.case:
                sites[sites.index(site)] = replace(site, variants=(placements[site].case,))
        order = {node: i for i, node in enumerate(graph.graph.nodes)}
        refusals = [refusal for refusal in refused.values() if refusal.node not in claimed]
        return sorted(sites, key=lambda s: order[s.output]), sorted(refusals, key=lambda r: order[r.node])

    def _placed(self, graph: GraphModule, sites: Sequence[Site]) -> dict[Site, "Placement | RejectReason"]:
        return dict(zip(sites, self.cases_after_replacement(graph, sites)[0]))

    def _regions(self, places: "_Places", sites: Sequence[Site]) -> tuple[list[Site], list[Refusal]]:
        found: list[Site | Refusal] = []
        try:
            found += self.regions(places.graph, tuple(sites))
        except Exception as error:  # of any kind: a model's own operators, odd arguments
            self._note(f"some regions could not be found: {reason(error)}")
        regions, refusals = [], [one for one in found if isinstance(one, Refusal)]
        for site in (one for one in found if isinstance(one, Site)):
            if places.changed_during(site.nodes, site.parameters.values()):
                refusals.append(Refusal(REGION, site.output, site.nodes, RejectReason.WRITTEN))
            else:
                regions.append(site)
        return regions, refusals

    def _answers(
        self, places: "_Places", kernel_type: str, search: Search, node: Node, claimed: set[Node]
    ) -> Iterator[Site | Refusal]:
        """What becomes of each way to read `node` as this pattern."""
        try:
            yield from self._tried(places, kernel_type, search, node, claimed)
        except Exception as error:  # of any kind: a model's own operators, odd arguments, no memory for float64
            self._note(f"what reads like {kernel_type} could not be examined: {reason(error)}")
            failed = places.originals[node]
            yield Refusal(kernel_type, failed, frozenset((failed,)), RejectReason.FAILED)

    def _tried(
        self, places: "_Places", kernel_type: str, search: Search, node: Node, claimed: set[Node]
    ) -> Iterator[Site | Refusal]:
        output = places.originals[node]
        for reading in islice(search.readings(node), MAX_READINGS):
            read = {v for k, v in reading.items() if isinstance(k, Node) and k.op == "call_function"}
            parameters = {search.parameter(k): v for k, v in reading.items() if search.parameter(k)}
            parameters = {k: places.originals[v] if isinstance(v, Node) else v for k, v in parameters.items()}
            nodes = frozenset(map(places.originals.__getitem__, read))
            if nodes & claimed:
                continue
            fakes = {k: value(v) if isinstance(v, Node) else v for k, v in parameters.items()}
            refusal = partial(Refusal, kernel_type, output, nodes)
            case = described_case(load_spec(kernel_type), search.pattern, fakes, value(output))
            if isinstance(case, RejectReason):
                if not search.pattern.is_rare:
                    yield refusal(case)
            elif sum(t.numel for t in case.tensors.values()) * len(read) < self.min_elements:
                yield refusal(RejectReason.SMALL)
            elif any(user not in read for n in read if n is not node for user in n.users):
                yield refusal(RejectReason.ESCAPES)
            elif rounds(nodes, [*(v for v in parameters.values() if isinstance(v, Node)), output]):
                yield refusal(RejectReason.ROUNDED)
            elif places.changed_during(nodes, parameters.values()):
                yield refusal(RejectReason.WRITTEN)
            else:
                site = Site(kernel_type, search.pattern, parameters, nodes, output, case)
                why = self._reject_reason(places, site)
                yield refusal(why) if why else site

    def _reject_reason(self, places: "_Places", site: Site) -> RejectReason | None:
        graph, given = places.graph, None
        if wanted := [site.parameters[name] for name in site.pattern.given]:
            inputs = [n for n in graph.graph.nodes if n.op == "placeholder" and isinstance(value(n), Tensor)]
            if places.changed_before(between(inputs, *wanted), site.output):
                return RejectReason.WRITTEN  # computed from the inputs alone, they would be others
            given = extract_subgraph(graph, wanted, inputs)
        original = extract_subgraph(graph, [site.output], site.inputs)
        key = (site.pattern, _content(original), given and _content(given), repr(site.case))
        if len(site.nodes) == 1 and load_spec(site.kernel_type).flops(site.case.args) > COSTLY_FLOPS:
            key = (site.pattern, _content(original))  # one operator, nothing lenient in it: one size speaks for all
        if key not in self.proofs:
            self.proofs[key] = RejectReason.FAILED  # if the proof ends in an error, which is not to be met at every layer
            with without_autocast():
                self.proofs[key] = None if agree(site, original, given) else RejectReason.NUMBERS
        return self.proofs[key]

    def cases_after_replacement(
        self, graph: GraphModule, sites: Sequence[Site]
    ) -> tuple[list["Placement | RejectReason"], Callable[[Node], Any]]:
        """How each site's kernel is called beside the others', which return contiguous tensors; the results of nodes."""
        replaced = cases_after_replacement(graph, sites)
        self._note(*(f"behind a kernel, {reason(error)}" for error in replaced.errors))
        return [replaced.placement(site) for site in sites], replaced.result

    def _note(self, *failures: str) -> None:
        self.failures += [failure for failure in dict.fromkeys(failures) if failure not in self.failures]


def _content(piece: GraphModule) -> tuple[Any, ...]:
    """What a piece of a graph computes: its code, and the constants in it."""
    nodes = piece.graph.find_nodes(op="get_attr")
    return piece.code, tuple(_digest(getattr(piece, node.target)) for node in nodes)


def _digest(constant: Any) -> Any:
    if not isinstance(constant, Tensor):
        return constant
    numbers = constant.detach().cpu().contiguous()
    content = hashlib.sha256(numbers.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return content, constant.dtype, constant.shape, constant.stride()


class _Places:
    """A graph in which sites are looked for: which nodes those of its simplified form are, what memory is changed where."""

    def __init__(self, graph: GraphModule, originals: Mapping[Node, Node]):
        self.graph, self.originals = graph, originals
        self.order = {node: i for i, node in enumerate(graph.graph.nodes)}
        self.writes = [(i, changed) for node, i in self.order.items() if (changed := written(node))]

    def changed_during(self, nodes: Collection[Node], parameters: Iterable[Any]) -> bool:
        """Whether, between the first and the last of `nodes`, something changes that they or their parameters hold."""
        first, last = (pick(self.order[n] for n in nodes) for pick in (min, max))
        return self._changed([*nodes, *(v for v in parameters if isinstance(v, Node))], first, last)

    def changed_before(self, nodes: Iterable[Node], end: Node) -> bool:
        """Whether, before `end`, something changes that `nodes` or what they read hold."""
        return self._changed([v for n in nodes for v in (n, *n.all_input_nodes)], -1, self.order[end])

    def _changed(self, nodes: Iterable[Node], first: int, last: int) -> bool:
        if not self.writes:
            return False
        held = storages(nodes)
        return any(first < i < last and changed & held for i, changed in self.writes)

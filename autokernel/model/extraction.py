"""From a profile to work: sites grouped into targets, and for each target the file that its run starts from."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from autokernel.common.backends import default_backend
from autokernel.model.hotspots import Hotspot, ModelProfile
from autokernel.spec import TensorSpec, load_spec
from autokernel.target import Plan, Target, WeightedCase

FAMILY_RATIO = 8  # cases of one type whose work differs by less than this are one target: an lm_head is apart from the rest
LEAST_SHARE = 1e-3  # of the model's time: what no measurement of the model could show to be saved


def make_plan(profile: ModelProfile, top: int = 5, kernel_type: str | None = None, backend: str | None = None) -> Plan:
    """The `top` targets where perfect kernels would save most of the baseline's time, of `kernel_type` only if given.

    Where that is less than LEAST_SHARE of the model, those that take most of its time come first: limits are estimates.
    What takes less than that altogether is a target only if it is asked for, or if there is nothing else. Types without a
    starter for the backend, by default that of the device, make no targets, nor does what only the captured graph spends
    time in. Calls count all workloads.
    """
    backend = backend or default_backend(profile.device)
    sites = [
        s
        for s in profile.sites
        if kernel_type in (None, s.kernel_type) and s.time_us and load_spec(s.kernel_type).starters(backend)
    ]
    families = sorted(_families(sites), key=lambda family: (_saved(family), _share(family)), reverse=True)
    large = [family for family in families if kernel_type or _share(family) >= LEAST_SHARE]
    targets = [_target(family, backend, profile.device) for family in (large or families)[:top]]
    return Plan(
        str(profile.workload), profile.workload.to_json(), profile.device, profile.latency_us, _unique_names(targets)
    )


def without_starter(profile: ModelProfile, backend: str | None = None) -> dict[str, float]:
    """The kernel types that make no targets for want of a starter for the backend, and their shares of the time."""
    backend, shares = backend or default_backend(profile.device), defaultdict(float)
    for site in profile.sites:
        if site.time_us and not load_spec(site.kernel_type).starters(backend):
            shares[site.kernel_type] += site.share
    return dict(shares)


def write_starters(plan: Plan, folder: Path) -> list[Path]:
    """A kernel file for each target, the starter of its type; `python bench.py FILE` judges it by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{target.name}.py" for target in plan.targets]
    for path, target in zip(paths, plan.targets):
        starters = load_spec(target.kernel_type).starters(target.backend)
        path.write_text(starters[target.starter].read_text())
    return paths


def _share(family: list[Hotspot]) -> float:
    return sum(site.share for site in family)


def _saved(family: list[Hotspot]) -> float:
    """What perfect kernels would save of the model's time; 0 where it is less than LEAST_SHARE."""
    saved = sum(site.share * site.removable_us / site.time_us for site in family)
    return saved if saved >= LEAST_SHARE else 0.0


def _families(sites: Iterable[Hotspot]) -> Iterable[list[Hotspot]]:
    """Groups of one type, one dtype, the same options (causal, activation, …), one bound and comparable work.

    A decode step's product may have the FLOPs of a prefill's, but it waits for memory: another kernel suits it.
    """
    alike = defaultdict(list)
    for site in sites:
        options = tuple((k, v) for k, v in site.case.args.items() if isinstance(v, (bool, str)))
        alike[site.kernel_type, site.case.dtype, site.bound, options].append(site)
    for group in alike.values():
        flops = load_spec(group[0].kernel_type).flops
        family: list[Hotspot] = []
        for site in sorted(group, key=lambda s: -flops(s.case.args)):
            if family and flops(family[0].case.args) >= FAMILY_RATIO * flops(site.case.args):
                yield family
                family = []
            family.append(site)
        yield family


def _target(family: list[Hotspot], backend: str, device: str) -> Target:
    costliest = max(family, key=lambda s: s.time_us)
    dtype = costliest.case.dtype  # of what is computed: a mask, an index or packed weights may have more numbers
    largest = max((t for t in costliest.case.tensors.values() if t.dtype == dtype), key=lambda t: t.numel)
    return Target(
        name=f"{costliest.kernel_type}_{_shape(largest)}_{str(dtype).removeprefix('torch.')}",
        kernel_type=costliest.kernel_type,
        backend=backend,
        device=device,
        cases=tuple(WeightedCase(s.case, s.calls, s.variants) for s in sorted(family, key=lambda s: -s.time_us)),
        share=_share(family),
        model_time_us=sum(s.time_us for s in family),
        baseline_us=sum(s.baseline_us for s in family),
        starter=next(iter(load_spec(costliest.kernel_type).starters(backend))),
        graph_us=sum(s.time_us if s.graph_us is None else s.graph_us for s in family),
    )


def _shape(tensor: TensorSpec) -> str:
    return "x".join(map(str, tensor.shape))


def _unique_names(targets: list[Target]) -> tuple[Target, ...]:
    seen: dict[str, int] = defaultdict(int)
    unique = []
    for target in targets:
        seen[target.name] += 1
        count = seen[target.name]
        unique.append(target if count == 1 else replace(target, name=f"{target.name}_{count}"))
    return tuple(unique)

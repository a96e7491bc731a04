"""A verdict as text: greppable `key: value` lines for people and scripts, or JSON."""

from collections.abc import Mapping
from typing import Any

from autokernel.common.verdict import Interval, Verdict
from autokernel.common.words import four_figures
from autokernel.target import asdict_shallow


def as_json(record: Any) -> Any:
    """A verdict, and all that hangs from it, as plain JSON values."""
    if hasattr(record, "__dataclass_fields__"):
        return {name: as_json(value) for name, value in asdict_shallow(record).items()}
    if isinstance(record, dict):
        return {name: as_json(value) for name, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [as_json(value) for value in record]
    return str(record) if isinstance(record, str) else record


def as_text(verdict: Verdict, repeat: str, sandbox: Mapping[str, bool], timing: bool = False) -> str:
    """The block in which bench.py ends: `repeat` is the command that repeats it, `sandbox` says which layers held."""
    lines = [_phase_lines(verdict)] if timing else []
    if verdict.cases:
        lines += [_case_line(c) for c in verdict.cases] + [""]
    if verdict.failure:
        lines += [f"failure: {verdict.failure}", f"repeat: {repeat}"]
        lines += (
            ["", *(f"    {line}" for line in verdict.failure.detail.splitlines()), ""] if verdict.failure.detail else []
        )
    lines += [f"why: {verdict.why}"]
    values: dict[str, Any] = {"kernel_type": verdict.kernel_type, "backend": verdict.backend, "device": verdict.device}
    values |= verdict.stages | {"correctness": verdict.correctness}
    for name in ("latency_us", "throughput_tflops", "bandwidth_gb_s", "pct_peak_compute", "pct_peak_bandwidth"):
        values[name] = getattr(verdict, name)
    for name in ("arithmetic_intensity", "ridge_point", "bottleneck", "peak_vram_mb", "pytorch_latency_us"):
        values[name] = getattr(verdict, name)
    values |= _speedup("speedup_vs_pytorch", "speedup_ci", verdict.speedup_vs_pytorch)
    values["compile_latency_us"] = verdict.compile_latency_us
    values |= _speedup("speedup_vs_compile", "speedup_vs_compile_ci", verdict.speedup_vs_compile)
    values |= _speedup("speedup_vs_incumbent", "speedup_vs_incumbent_ci", verdict.speedup_vs_incumbent)
    values |= {"keep": verdict.keep, "seed": verdict.seed, "bench_time_seconds": verdict.bench_time_seconds}
    values["sandbox"] = ", ".join(layer if holds else f"NO {layer}" for layer, holds in sandbox.items())
    return "\n".join(lines + [f"{name}: {_number(value)}" for name, value in values.items() if value is not None])


def _phase_lines(verdict: Verdict) -> str:
    phases = sorted(verdict.phase_seconds.items(), key=lambda item: -item[1])
    rest = verdict.bench_time_seconds - sum(verdict.phase_seconds.values())
    return "".join(f"{phase:12s} {seconds:8.3f} s\n" for phase, seconds in [*phases, ("elsewhere", rest)])


def _speedup(name: str, interval_name: str, speedup: Interval | None) -> dict[str, Any]:
    if speedup is None:
        return {}
    return {name: speedup.value, interval_name: speedup.ends().strip() or "unknown: too few pairs"}


def _number(value: Any) -> str:
    return four_figures(value) if isinstance(value, float) else str(value)


def _case_line(case: Any) -> str:
    speedups = [f"{case.speedup_vs_pytorch} eager" if case.speedup_vs_pytorch else ""]
    speedups += [f"{case.speedup_vs_compile} torch.compile" if case.speedup_vs_compile else ""]
    speedups += [f"{case.launch_us:.1f} us to launch" if case.launch_us else ""]
    return f"{case.case:40s} {case.latency_us:10.1f} us   {'   '.join(filter(None, speedups))}"

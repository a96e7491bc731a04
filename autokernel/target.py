"""What the loop works on: a Target is one kernel type with the shapes that a model runs; a Plan is a model's targets."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from autokernel.common.records import PLAN_REMEDY, reads, record_from, write_json
from autokernel.spec import Case, TensorSpec, load_spec


@dataclass(frozen=True)
class WeightedCase:
    """A case and how often the model calls it in one pass; of a mix of workloads, in all passes of them.

    `variants` are the same call in other strides, behind kernels whose results are contiguous: proven, not timed.
    """

    case: Case
    calls: float = 1.0
    variants: tuple[Case, ...] = ()

    @property
    def proven(self) -> tuple[Case, ...]:
        return (self.case, *self.variants)


@dataclass(frozen=True)
class Target:
    """One kernel type × shape family × dtype on one device, to be made faster as a whole."""

    name: str  # "rmsnorm_512x768_float32"
    kernel_type: str
    backend: str  # a name in BACKENDS
    device: str  # "cpu", "cuda", "cuda:1"
    cases: tuple[WeightedCase, ...]
    share: float = 0.0  # of the model's device time, 0..1
    model_time_us: float = 0.0  # time that the model spends here in one pass
    baseline_us: float = 0.0  # the part of it that a kernel has to beat: less, where torch.compile is faster than eager
    starter: str = ""  # stem of the file that the run starts from: "cpp_kernel"
    graph_us: float | None = None  # model_time_us in the captured graph, whose calls these cases are: more, if they do more

    def over_model(self, speedup: float) -> float:
        """A speedup over PyTorch on these cases, over what the model untouched spends in their place."""
        return speedup * self.model_time_us / self.graph_us if self.graph_us else speedup

    @property
    def to_beat(self) -> float:
        """The part of the model's time here that a kernel has to beat."""
        return self.baseline_us / self.model_time_us if self.baseline_us and self.model_time_us else 1.0

    @property
    def dtype(self) -> torch.dtype:
        return self.cases[0].case.dtype


@dataclass(frozen=True)
class Plan:
    """The targets of one model in the order in which they were found worth most, and what they were found on."""

    model: str  # "models/llama.py:CompactLlama 1,512 float32", for people
    workload: dict[str, Any]  # what workload.load() needs to build the model again
    device: str
    model_latency_us: float  # one pass, eager
    targets: tuple[Target, ...] = field(default_factory=tuple)

    def target(self, name: str) -> Target:
        return next(t for t in self.targets if t.name == name)

    def write(self, path: Path) -> None:
        write_json(path, encode(self))

    @staticmethod
    @reads(PLAN_REMEDY)
    def read(path: Path) -> "Plan":
        data = json.loads(path.read_text())
        listed = [target | {"cases": []} for target in data["targets"]]
        plan = record_from(data | {"targets": listed}, Plan)  # of the right types; what it does not know is left out
        cases = map(_decode_cases, data["targets"])
        return replace(plan, targets=tuple(replace(target, cases=found) for target, found in zip(plan.targets, cases)))


def default_target(kernel_type: str, backend: str, device: str, dtype: torch.dtype, sizes: bool = False) -> Target:
    """The spec's own sizes as a target, for a kernel that was not extracted from a model (all of them with `sizes`)."""
    spec = load_spec(kernel_type)
    timing = spec.timing[torch.device(device).type]
    cases = tuple(WeightedCase(spec.case(dims, dtype)) for dims in (timing if sizes else timing[:1]))
    return Target(f"{kernel_type}_default", kernel_type, backend, device, cases)


def asdict_shallow(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def encode(value: Any) -> Any:
    """Dataclasses, dtypes and tuples as JSON has them."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if hasattr(value, "__dataclass_fields__"):
        return {k: encode(v) for k, v in asdict_shallow(value).items()}
    if isinstance(value, dict):
        return {k: encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    return value


def encoded(case: Case) -> str:
    """A case as text that is equal for equal arguments: cases cannot be keys themselves, for their arguments are a dict."""
    return json.dumps(encode(case.args), sort_keys=True)


def _decode_argument(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    stride = None if value["stride"] is None else tuple(value["stride"])
    return TensorSpec(tuple(value["shape"]), getattr(torch, value["dtype"]), stride, value["offset"])


def decode_case(data: dict[str, Any]) -> Case:
    return Case(data["name"], {k: _decode_argument(v) for k, v in data["args"].items()})


def decode_target(data: dict[str, Any]) -> Target:
    """By hand, unlike other records: a saved package reads its targets with this, and is to need PyTorch alone."""
    return Target(**{**data, "cases": _decode_cases(data)})


def _decode_cases(target: dict[str, Any]) -> tuple[WeightedCase, ...]:
    return tuple(
        WeightedCase(decode_case(c["case"]), c["calls"], tuple(map(decode_case, c["variants"]))) for c in target["cases"]
    )


def starter_name(target: Target) -> str:
    """Of the target's own starter, which it begins with unless another looks faster."""
    return target.starter or f"{target.backend}_kernel"


def starter_source(target: Target) -> str:
    return load_spec(target.kernel_type).starters(target.backend)[starter_name(target)].read_text()

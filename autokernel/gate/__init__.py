"""The gate: one judge, which makes inputs, holds the expected values and the clock, and workers in which kernels run."""

from typing import TYPE_CHECKING

from autokernel.common.verdict import STAGES, CaseTiming, Correctness, Failure, Interval, Verdict

if TYPE_CHECKING:
    from autokernel.gate.judge import Judge

__all__ = ["STAGES", "CaseTiming", "Correctness", "Failure", "Interval", "Judge", "Verdict"]


def __getattr__(name: str) -> object:
    """The judge brings PyTorch along, which takes seconds: whoever only reads records does without."""
    if name != "Judge":
        raise AttributeError(f"module 'autokernel.gate' has no attribute {name!r}")
    from autokernel.gate.judge import Judge

    return Judge

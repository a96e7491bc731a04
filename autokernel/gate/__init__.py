"""The gate: one judge, which makes inputs, holds the expected values and the clock, and workers in which kernels run."""

from autokernel.gate.judge import Judge
from autokernel.gate.verdict import STAGES, CaseTiming, Correctness, Failure, Interval, Verdict

__all__ = ["STAGES", "CaseTiming", "Correctness", "Failure", "Interval", "Judge", "Verdict"]

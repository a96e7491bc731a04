"""The roofline of one call: the least time that a device needs, from its floating-point operations and the bytes it moves.

The model is that of Williams, Waterman and Patterson, "Roofline", CACM 52 (2009): peak FLOP/s bounds it, or peak bandwidth.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from autokernel.hardware.device import Device


def above_limit(percents: Iterable[float]) -> str:
    """A sentence on percentages of limits where one is more than all of it; else empty."""
    most = max(percents, default=0.0)
    if round(most) <= 100:
        return ""
    return (
        f"{most:.0f} % of a limit: this machine's peaks were measured while other work ran on it, or data stayed in its "
        "caches; limits, and what is left to gain, are rough here"
    )


@dataclass(frozen=True)
class Roofline:
    flops: float
    bytes_moved: float
    peak_flops_s: float
    peak_bytes_s: float

    @staticmethod
    def of(device: Device, dtype: torch.dtype, flops: float, bytes_moved: float) -> "Roofline":
        return Roofline(flops, bytes_moved, device.peak_tflops(dtype) * 1e12, device.peak_bandwidth_gb_s * 1e9)

    @property
    def compute_s(self) -> float:
        return self.flops / self.peak_flops_s

    @property
    def memory_s(self) -> float:
        return self.bytes_moved / self.peak_bytes_s

    @property
    def floor_s(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def bottleneck(self) -> str:
        return "compute" if self.compute_s > self.memory_s else "memory"

    @property
    def arithmetic_intensity(self) -> float:
        """FLOP per byte; above the ridge point, compute bounds the call."""
        return self.flops / self.bytes_moved

    @property
    def ridge_point(self) -> float:
        return self.peak_flops_s / self.peak_bytes_s

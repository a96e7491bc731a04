"""Whether a GPU is at work for somebody else: the judge's own work takes longer then, for processes get it in turns."""

import math
import time

import torch

PROBE_S = 4e-3  # of work, which is more than a turn
PROBE_BYTES = 64 << 20
BUSY = 1.3  # times what it takes alone
OTHERS_S, OTHERS_SHARE = 1.0, 0.05  # for how long others are looked for, and the share of looks that must see them


class DeviceProbe:
    """A piece of work of known length. Make one while nobody is at work on the GPU."""

    def __init__(self, device: str):
        self.x = torch.zeros(PROBE_BYTES // 4, device=device)
        self.y, self.passes = torch.empty_like(self.x), 1
        once_s = min(self.seconds() for _ in range(20))
        self.passes = math.ceil(PROBE_S / once_s)
        self.alone_s = min(self.seconds() for _ in range(10))

    def seconds(self) -> float:
        torch.cuda.synchronize(self.x.device)
        start = time.perf_counter()
        for _ in range(self.passes):
            torch.neg(self.x, out=self.y)
        torch.cuda.synchronize(self.x.device)
        return time.perf_counter() - start

    def busy(self) -> bool:
        """Whether somebody is at work now. What a shorter look would take for it is a process of the host's."""
        return self.seconds() > BUSY * self.alone_s

    def others_at_work(self) -> bool:
        """Whether other programs are at work in a good part of a second. Ask while none of the judge's processes lives."""
        end_s, looks = time.perf_counter() + OTHERS_S, []
        while time.perf_counter() < end_s:
            looks.append(self.busy())
        return sum(looks) > OTHERS_SHARE * len(looks)

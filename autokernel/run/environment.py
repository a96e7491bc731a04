"""Faults of the machine, looked for around each experiment: the loop waits and judges again, or ends and says so."""

from collections.abc import Callable, Iterable
from pathlib import Path

from autokernel.common.verdict import Correctness, Verdict
from autokernel.hardware.machine import Clocks, MachineFault, gpu_lost, low_disk

SLEPT_S = JUMPED_S = 2.0  # shorter ones are the clocks' own corrections


class Watch:
    """Looks at the machine while an experiment is judged."""

    def __init__(self, device: str, folders: Iterable[Path], say: Callable[[str], None]) -> None:
        self.device, self.folders, self.say = device, list(folders), say
        self.before = Clocks.now()

    def fault(self, verdict: Verdict) -> str:
        """What the machine did to this verdict; empty if nothing. Raises MachineFault where the GPU is lost."""
        now = Clocks.now()
        if abs(jump := self.before.jumped_s(now)) > JUMPED_S:
            self.say(f"the clock was set by {jump:+.0f} s meanwhile; nothing is timed by it")
        if (slept := self.before.slept_s(now)) > SLEPT_S:
            return f"the machine slept for {slept:.0f} s"
        if verdict.correctness != Correctness.PASS:
            if lost := gpu_lost(self.device):
                raise MachineFault(lost)
            if full := low_disk(self.folders):
                return full
        return verdict.undecided

"""The device's memory, shared out among what the gate does at the same time."""

import contextlib
import threading
from collections.abc import Iterator

import torch

BOUNDLESS = 1 << 62
SHARE = 0.6  # of the device's memory; the rest is for contexts, and for what no estimate knows


class DeviceMemoryBudget:
    """Who needs more than is left waits; who needs more than there is has it all."""

    def __init__(self, nbytes: int):
        self.nbytes = self.left = nbytes
        self.changed = threading.Condition()

    @staticmethod
    def of(device: str) -> "DeviceMemoryBudget":
        """Without bounds on a CPU, where one trial follows the other."""
        if not device.startswith("cuda"):
            return DeviceMemoryBudget(BOUNDLESS)
        return DeviceMemoryBudget(int(SHARE * torch.cuda.get_device_properties(device).total_memory))

    @contextlib.contextmanager
    def take(self, nbytes: int) -> Iterator[None]:
        nbytes = min(nbytes, self.nbytes)
        with self.changed:
            self.changed.wait_for(lambda: self.left >= nbytes)
            self.left -= nbytes
        try:
            yield
        finally:
            with self.changed:
                self.left += nbytes
                self.changed.notify_all()

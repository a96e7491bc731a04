"""How many threads PyTorch works on in this process."""

import contextlib
import threading
from collections.abc import Iterator

import torch

# Inductor's setting: to compile in this process. Its own take seconds to start, ten on a machine that has just imported
# PyTorch for the first time, for which whoever ends them waits; left alone they stay, beside all that is timed.
COMPILED_HERE = {"compile_threads": 1}
_outside = threading.local()  # .threads: how many there are outside of one_thread(), in which this thread is


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch work in this process on one thread: others would spin for a while when their work is done, and where
    another process has their core, the first one waits for them at the end of each operation."""
    _outside.threads = torch.get_num_threads()
    try:
        with _threads(1):
            yield
    finally:
        del _outside.threads


@contextlib.contextmanager
def threads_outside() -> Iterator[None]:
    """As many as outside of one_thread(): PyTorch's own sums in 16 bit are rounded once more for each of several."""
    with _threads(getattr(_outside, "threads", torch.get_num_threads())):
        yield


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

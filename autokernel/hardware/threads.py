"""How many threads PyTorch works on in this process."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch work in this process on one thread: others would spin for a while when their work is done, and where
    another process has their core, the first one waits for them at the end of each operation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

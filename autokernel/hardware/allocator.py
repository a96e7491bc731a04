"""glibc's malloc in this process: whether the memory of large tensors is kept when they are freed, or given back."""

import contextlib
import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4  # malloc.h
KEPT = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: (1 << 31) - 1, M_TOP_PAD: 64 << 20}
# What the thresholds have come to by themselves in a process that has freed large blocks (mallopt(3)).
USUAL = {M_MMAP_MAX: 1 << 16, M_TRIM_THRESHOLD: 64 << 20, M_TOP_PAD: 128 << 10, M_MMAP_THRESHOLD: 32 << 20}


def keep_freed_memory() -> None:
    """Fresh memory costs a page fault every 4 KiB, which is most of what it takes to compare large results in float64."""
    _set(KEPT)


def give_freed_memory_back() -> None:
    """And what was kept so far."""
    _set(USUAL, trim=True)


def _set(options: dict[int, int], trim: bool = False) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            libc = ctypes.CDLL(None)
            for option, value in options.items():
                libc.mallopt(option, value)
            if trim:
                libc.malloc_trim(0)

"""What is known of a C++ library that is loaded: its variables, what these point to, and which functions it calls.

By ELF's structures (elf(5), dl_iterate_phdr(3)) and those of glibc's heap, on Linux.
"""

import ctypes
import os
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

WORD_OF = ctypes.c_uint32
WORD, LONG = ctypes.sizeof(WORD_OF), ctypes.sizeof(ctypes.c_uint64)
MOST_OF_A_BLOCK = 1 << 12  # bytes on the heap
THREADS = b"pthread_create", b"_ZNSt6thread"  # of a library: they may wait for a variable that counts
# Of elf(5). Where a library is loaded, glibc makes addresses of what its dynamic section has; others leave it as it is.
PT_LOAD, PT_DYNAMIC, PT_TLS, PT_GNU_RELRO, WRITABLE = 1, 2, 7, 0x6474E552, 2
DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL, DT_PLTRELSZ = 5, 6, 7, 8, 23, 2
RELA, SYMBOL = 24, 24  # bytes of an entry
PAGE = os.sysconf("SC_PAGE_SIZE")
MOST_BYTES = 1 << 20  # of a library's variables


class Segment(ctypes.Structure):
    """ELF's Elf64_Phdr."""

    _fields_ = [("kind", ctypes.c_uint32), ("flags", ctypes.c_uint32)]
    _fields_ += [(name, ctypes.c_uint64) for name in ("offset", "address", "physical", "file_size", "size", "align")]


class Loaded(ctypes.Structure):
    """dl_iterate_phdr(3)'s struct dl_phdr_info."""

    _fields_ = [("base", ctypes.c_uint64), ("name", ctypes.c_char_p), ("segments", ctypes.POINTER(Segment))]
    _fields_ += [("count", ctypes.c_uint16), ("adds", ctypes.c_uint64), ("subs", ctypes.c_uint64)]
    _fields_ += [("tls_module", ctypes.c_size_t), ("tls", ctypes.c_void_p)]


@dataclass(frozen=True)
class Library:
    """One that is loaded. `tls`: where this thread's own variables lie."""

    name: str
    base: int
    segments: list[Segment]
    tls: int | None


VISIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Loaded), ctypes.c_size_t, ctypes.c_void_p)
# Looked up at import: in a worker nothing is, later. macOS has none.
VISIT_ALL = getattr(ctypes.CDLL(None), "dl_iterate_phdr", None)


def loaded(libraries: set[str]) -> list[Library]:
    """Of these, by the paths of their files, those that this process has."""
    found = []

    def visit(loaded: Any, size: int, data: Any) -> int:
        of = loaded.contents
        if (name := os.fsdecode(of.name or b"")) in libraries:
            found.append(Library(name, of.base, [of.segments[i] for i in range(of.count)], of.tls))
        return 0

    if VISIT_ALL is not None and sys.platform == "linux":
        VISIT_ALL(VISIT(visit), None)
    return found


def called_functions(library: Library) -> Iterator[tuple[int, bytes]]:
    """The functions of other libraries that this one calls, by its relocations (elf(5)): where it keeps the address of
    each, and its name."""
    dynamic = next((library.base + s.address for s in library.segments if s.kind == PT_DYNAMIC), None)
    known: dict[int, int] = {}
    while dynamic and (tag := ctypes.c_int64.from_address(dynamic).value):
        value = ctypes.c_uint64.from_address(dynamic + 8).value
        is_relative = tag in (DT_STRTAB, DT_SYMTAB, DT_RELA, DT_JMPREL) and value < library.base
        known[tag] = value + library.base * is_relative
        dynamic += 16
    for table, size in ((DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)):
        for place in range(known.get(table, 0), known.get(table, 0) + known.get(size, 0), RELA):
            where, symbol = (ctypes.c_uint64.from_address(place + at).value for at in (0, 8))
            if symbol >> 32:
                name = ctypes.c_uint32.from_address(known[DT_SYMTAB] + SYMBOL * (symbol >> 32)).value
                yield library.base + where, ctypes.string_at(known[DT_STRTAB] + name)


def variables(libraries: set[str]) -> list[range]:
    """Where these libraries have their variables, this thread's own among them. None of a library that starts threads."""
    found = []
    for library in loaded(libraries):
        if _starts_threads(library.name):
            continue
        constant = max((library.base + s.address + s.size for s in library.segments if s.kind == PT_GNU_RELRO), default=0)
        for segment in library.segments:
            start = library.base + segment.address
            end = start + segment.size
            if segment.kind == PT_LOAD and segment.flags & WRITABLE:
                found.append(range(max(start, -(-constant // PAGE) * PAGE), end))
            elif segment.kind == PT_TLS and library.tls:
                found.append(range(library.tls, library.tls + segment.size))
    whole = (range(-(-part.start // LONG) * LONG, part.stop // WORD * WORD) for part in found)
    return [part for part in whole if 0 < len(part) <= MOST_BYTES]


def _starts_threads(library: str) -> bool:
    with open(library, "rb") as file:
        content = file.read()
    return any(name in content for name in THREADS)


def with_what_they_point_to(variables: list[range]) -> list[range]:
    """Beside a library's variables what these have on the heap, and what lies there has in turn: blocks of glibc's, whose
    sizes stand before them. Not where there is CUDA, whose run-time library is a part of each kernel's, with its heap."""
    if sys.platform != "linux" or not variables or torch.cuda.is_initialized():
        return variables
    heap = _heap()
    found, looked_at, left = {part.start: part for part in variables}, deque(variables), MOST_BYTES
    while looked_at and left > 0:
        part = looked_at.popleft()
        for at in memoryview(ctypes.string_at(part.start, len(part) // LONG * LONG)).cast("Q"):
            if at in heap and at not in found and (size := _block_size(at, heap)):
                found[at] = range(at, at + size)
                looked_at.append(found[at])
                left -= size
    return list(found.values())


def _heap() -> range:
    """Where malloc() has small blocks of the first thread."""
    with open("/proc/self/maps") as file:
        bounds = [line.split()[0].split("-") for line in file if "[heap]" in line]
    return range(int(bounds[0][0], 16), int(bounds[-1][1], 16)) if bounds else range(0)


def _block_size(at: int, heap: range) -> int:
    """Of a block that malloc() has returned; 0 where it is none, or is large. Its size stands before it; a bit before the
    next block tells that it is in use."""
    if at % 16 or at - 16 < heap.start:
        return 0
    said = ctypes.c_uint64.from_address(at - LONG).value
    size = said & ~7
    if said & 6 or not 32 <= size <= MOST_OF_A_BLOCK or size % 16 or at - 16 + size + LONG not in heap:
        return 0
    in_use = ctypes.c_uint64.from_address(at - LONG + size).value & 1
    return size - LONG if in_use else 0

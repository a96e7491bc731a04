"""Which function of a library an address lies in, by the symbol tables of its ELF file (elf(5), 64 bit)."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

SECTION = np.dtype(
    [("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8"), ("size", "<u8")]
    + [("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry", "<u8")]
)
SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")])
SYMBOL_TABLES, FUNCTION = (2, 11), 2  # SHT_SYMTAB, SHT_DYNSYM; STT_FUNC
SECTIONS_AT, COUNT_AT = 0x28, 0x3C  # in the file's header


def symbols_at(path: Path, offsets: Sequence[int]) -> list[str]:
    """The mangled name of the function at each byte of the file; "" where the tables name none, as of a stripped file."""
    file, sections, tables = _tables(path)
    return [_symbol(file, sections, tables, offset) for offset in offsets]


@cache
def _tables(path: Path) -> tuple[np.ndarray, np.ndarray, list[tuple[np.ndarray, int]]]:
    """The bytes of a file, its sections, and the functions of each of its tables with the place of their names."""
    file = np.memmap(path, np.uint8, "r")
    if bytes(file[:6]) != b"\x7fELF\x02\x01":  # 64 bit, little-endian
        return file, np.empty(0, SECTION), []
    start, count = int(file[SECTIONS_AT:][:8].view("<u8")[0]), int(file[COUNT_AT:][:2].view("<u2")[0])
    sections = np.frombuffer(file, SECTION, count, start)
    tables = []
    for section in sections[np.isin(sections["type"], SYMBOL_TABLES)]:
        symbols = np.frombuffer(file, SYMBOL, int(section["size"]) // SYMBOL.itemsize, int(section["offset"]))
        functions = symbols[(symbols["info"] & 15 == FUNCTION) & (symbols["size"] > 0)]
        tables.append((functions, int(sections[section["link"]]["offset"])))
    return file, sections, tables


def _symbol(file: np.ndarray, sections: np.ndarray, tables: list[tuple[np.ndarray, int]], offset: int) -> str:
    holding = (sections["address"] > 0) & (sections["offset"] <= offset) & (offset < sections["offset"] + sections["size"])
    if not holding.any():
        return ""
    section = sections[holding][0]
    address = offset - int(section["offset"]) + int(section["address"])
    for functions, names in tables:
        there = functions[(functions["value"] <= address) & (address < functions["value"] + functions["size"])]
        if len(there):
            start = names + int(there[0]["name"])
            return bytes(file[start : start + 4096]).split(b"\0")[0].decode(errors="replace")
    return ""

"""Loops in C++ for memory that does not lie as it is walked through: rows side by side, one long row, tiles, padding."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autokernel.model.regions.cpp import (
    DECLARED,
    MOST_SHORT,
    PARALLEL_FROM,
    PIECE,
    TYPES,
    VECTOR,
    Constant,
    Function,
    RowLoop,
    indented,
    loop,
    simd,
)
from autokernel.model.regions.expressions import BOOL, FLOAT, Expression, Lowered, Result
from autokernel.model.regions.writing import Loops, Writer, is_across, levels, loops_of, place, read_across, result_names

TILE: Constant = 64, [16, 32, 64], "rows and columns of a tile, which is copied where memory is read across"
L1_BYTES, MANY_JOBS, FEW_JOBS = 1 << 15, 64, 8  # see _SideBySide and _Grouped
MOST_COPIED = 1 << 19  # bytes of columns that are copied, on a thread's stack
MOST_ZEROS = 1 << 15  # bytes, which the L1 cache holds
MOST_PIECES = 1 << 16  # on a thread's stack


def function_of(lowered: Lowered) -> Function:
    """The body of `run`, in the loops that suit its memory."""
    if read_across(lowered, loops_of(lowered)) is not None:
        return _Tiled(lowered)
    if is_one_long_row(lowered):
        return _OneLongRow(lowered)
    if are_side_by_side(lowered):
        return _SideBySide(lowered)
    if _joined(lowered):
        return _Grouped(lowered)
    return _Padded(lowered) if _Padded.fits(lowered) else Function(lowered)


def are_side_by_side(lowered: Lowered) -> bool:
    """Whether rows lie next to each other in memory, and the columns of a row apart: those of a sum over channels. What has
    it the other way round is copied, where that can be done in order."""
    loops = loops_of(lowered)
    last = len(loops.rows) - 1
    if not lowered.reduced or lowered.scans or last < 0 or loops.rows[last] < VECTOR:
        return False
    loads = [e for e in lowered.expressions if e.op == "load"]
    others = [
        strides for strides in (*map(loops.strides.__getitem__, loads), *loops.results) if not _is_beside(strides, last)
    ]
    beside = [e for e in loads if all(_steps(loops.strides[e], last)) and _is_beside(loops.strides[e], last)]
    if not others or not beside:
        return bool(beside)
    in_order = len(loops.columns) == 1 and all(strides[-1] == 1 for strides in others)
    return in_order and len(others) * 4 * VECTOR * loops.columns[0] <= MOST_COPIED


def _steps(strides: Sequence[int], last: int) -> tuple[int, int]:
    """From row to row, and from column to column."""
    return abs(strides[last]), min(filter(None, map(abs, strides[last + 1 :])), default=0)


def _is_beside(strides: Sequence[int], last: int) -> bool:
    rows, columns = _steps(strides, last)
    return not rows or not columns or rows < columns


class _SideBySide(Function):
    """Rows that are computed side by side: a job is ROWS of them, and the innermost loop runs over these.

    What there is one of for each row, its sums and what is computed of them, is an array. What has the columns next to each
    other in memory is copied before or after, column by column.
    """

    headers = "#include <panels.hpp>\n"
    at = "[lane]"
    in_float = VECTOR  # one after another: else it would be less exact than PyTorch's cascade
    in_pieces = False  # what is not added up in float32 is so in float64

    def __init__(self, lowered: Lowered):
        super().__init__(lowered)
        self.last = len(self.loops.rows) - 1
        loads = [e for e in lowered.expressions if e.op == "load" and e.kind == FLOAT and not e.operands]
        self.copied = [e for e in loads if not _is_beside(self.loops.strides[e], self.last)]
        self.row.known.update({e: f"near{n}[({self._kept_at()})]" for n, e in enumerate(self.copied)})
        self.left = {y: f"left{n}" for n, y in enumerate(result_names(lowered.results)) if not self._is_written(n)}

    def _is_written(self, result: int) -> bool:
        """Whether it is written at once."""
        return _is_beside(self.loops.results[result], self.last)

    def constants(self) -> dict[str, Constant]:
        most = -(-self.loops.rows[-1] // VECTOR) * VECTOR
        values = sorted({min(most, max(VECTOR, self.lanes * times // 2 // VECTOR * VECTOR)) for times in (1, 2, 4)})
        return {"ROWS": (self.lanes, values, "rows that a thread computes at a time, side by side")} | super().constants()

    def _for_each_row(self, lines: list[str]) -> list[str]:
        """What is copied before and after."""
        columns, memory = self.loops.columns[-1], f"[{self._length()}]"
        before, after = [], []
        for n, e in enumerate(self.copied):
            near, there = f"near{n}", self._start(self.loops.strides[e], e.data[2])
            apart = self.loops.strides[e][self.last]
            before.append(f"alignas(64) float {near}{memory};")
            before.append(f"pack<ROWS>(x{e.data[0]} + {there}, {apart}, 1, lanes, {columns}, {near});")
        for y, result, strides in zip(result_names(self.lowered.results), self.lowered.results, self.loops.results):
            if left := self.left.get(y):
                before.append(f"alignas(64) float {left}{memory};")
                there, apart, kind = self._start(strides), strides[self.last], TYPES[result.spec.dtype]
                if kind == "float":
                    after.append(f"pack<{columns}, {apart}>({left}, ROWS, 1, {columns}, lanes, {y} + {there});")
                else:
                    to = f"{y}[{there} + lane * {apart} + column]"
                    inner = loop("column", "0", str(columns), [f"{to} = {left}[column * ROWS + lane];"])
                    after += loop("lane", "0", "lanes", inner)
        return [*before, *lines, *after]

    def _start(self, strides: Sequence[int], offset: int = 0) -> str:
        """Where the first element is of the first row of a job."""
        index = [*self.index[: self.last], "start"]
        return place(index, strides[: self.last + 1], offset)

    def _stores(self, writer: Writer, results: Sequence[tuple[str, Result, Sequence[int]]]) -> list[str]:
        lines = super()._stores(writer, [r for r in results if r[0] not in self.left])
        for y, result, _ in results:
            if left := self.left.get(y):
                text = writer.text(result.expression)
                lines += [*writer.take(), f"{left}[{self._kept_at()}] = {text};"]
        return lines

    def _length(self) -> str:
        return f"{super()._length()} * ROWS"

    def _kept_at(self) -> str:
        return f"({super()._kept_at()}) * ROWS + lane"

    def _lanes(self) -> int:
        """So many that a row's columns of all fit in the L1 cache, with some jobs for each thread."""
        rows, columns = self.loops.rows, math.prod(self.loops.columns)
        most = min(rows[-1], L1_BYTES // (4 * columns), math.prod(rows) // MANY_JOBS)
        return max(VECTOR, most // VECTOR * VECTOR)

    def _jobs(self) -> tuple[str, list[str]]:
        *outer, width = self.loops.rows
        blocks = f"(({width} + ROWS - 1) / ROWS)"
        row = f"const int64_t row = job / {blocks}, start = job % {blocks} * ROWS;"
        lanes = f"const int64_t lanes = std::min<int64_t>(ROWS, {width} - start);"
        return f"{math.prod(outer)} * {blocks}", [row, lanes, *self._indices(outer)]

    def _before(self, ends: Sequence[Expression]) -> list[str]:
        known = set(self.row.known)
        lines = super()._before(ends)
        new = {e: name for e, name in self.row.known.items() if e not in known}
        self.row.known.update({e: f"{name}_of{self.at}" for e, name in new.items()})
        arrays = [f"{DECLARED[e.kind]} {name}_of[ROWS];" for e, name in new.items()]
        return [*arrays, *self._once([*lines, *(f"{name}_of{self.at} = {name};" for name in new.values())])]

    def _begun(self, along: RowLoop) -> list[str]:
        arrays = [f"{kind} {name}[ROWS];" for kind, name, _ in along.starts]
        return [*arrays, *self._once([f"{name}{self.at} = {start};" for _, name, start in along.starts])]

    def _once(self, lines: Sequence[str]) -> list[str]:
        at = f"const int64_t {self.index[len(self.loops.rows) - 1]} = start + lane;"
        head = ["#pragma omp simd", "for (int64_t lane = 0; lane < lanes; ++lane) {"]
        return [*head, *indented([at, *lines]), "}"] if lines else []

    def _along_row(self, along: RowLoop) -> list[str]:
        lines = self._once(along.lines)
        for i, n in reversed(list(zip(self.index[len(self.loops.rows) :], self.loops.columns))):
            lines = [f"for (int64_t {i} = 0; {i} < {n}; ++{i}) {{", *indented(lines), "}"]
        return list(lines)


def _joined(lowered: Lowered) -> Loops | None:
    """The loops where each row has a few neighbours in memory of every place, as a group of channels has in channels_last:
    these are rows of their own, side by side with those of the other groups. None where it is not so."""
    loops = loops_of(lowered)
    last, walked = len(loops.rows) - 1, [*loops.strides.values(), *loops.results]
    if (
        not lowered.reduced
        or lowered.scans
        or last < 0
        or len(loops.columns) != 2
        or any(e.op == "gather" for e in loops.strides)
    ):
        return None
    places, few = loops.columns
    if few > MOST_SHORT or places < VECTOR or any(w[last] != few * w[-1] for w in walked):
        return None
    join = lambda w: (*w[:last], w[-1], w[-2])  # noqa: E731
    strides, results = {e: join(w) for e, w in loops.strides.items()}, tuple(map(join, loops.results))
    in_order = all(_is_beside(w, last) for w in (*strides.values(), *results))
    width = loops.rows[last] * few
    return Loops((*loops.rows[:last], width), (places,), strides, results) if in_order and width >= VECTOR else None


class _Grouped(_SideBySide):
    """Rows of which each is a group of neighbours at every place (`_joined`): they are computed like rows side by side, and
    what is added up of each is put together with that of the others in its group."""

    def _loops(self, lowered: Lowered) -> Loops:
        self.few = loops_of(lowered).columns[-1]
        return _joined(lowered)

    def constants(self) -> dict[str, Constant]:
        whole, width = math.lcm(self.few, VECTOR), self.loops.rows[-1]
        values = sorted({n for n in (self.lanes, *(whole * times for times in (1, 2, 4))) if n <= max(width, self.lanes)})
        return super().constants() | {
            "ROWS": (self.lanes, values, "of them that a thread computes at a time, in whole groups")
        }

    def _lanes(self) -> int:
        """Whole groups and vectors, of which each thread has some, and some lines of the cache at each place."""
        rows, whole = self.loops.rows, math.lcm(self.few, VECTOR)
        most = min(4 * VECTOR, math.prod(rows) // FEW_JOBS)
        return min(max(1, most // whole) * whole, rows[-1])

    def _along_row(self, along: RowLoop) -> list[str]:
        lines = super()._along_row(along)
        for one, kind, _, _, how in along.parts:
            together = f"for (int64_t k = 1; k < {self.few}; ++k) {how.format('whole', f'{one}[group + k]')}"
            spread = f"for (int64_t k = 0; k < {self.few}; ++k) {one}[group + k] = whole;"
            lines.append(f"for (int64_t group = 0; group < lanes; group += {self.few}) {{")
            lines += [*indented([f"{kind} whole = {one}[group];", together, spread]), "}"]
        return lines


def is_one_long_row(lowered: Lowered) -> bool:
    loops = loops_of(lowered)
    is_long = len(loops.columns) == 1 and 2 * PIECE < loops.columns[0] <= MOST_PIECES * PIECE
    return bool(lowered.reduced) and is_long and math.prod(loops.rows) == 1 and not lowered.scans


class _OneLongRow(Function):
    """One row, whose pieces are the jobs: what they come to is put together in their order, with any number of threads."""

    def lines(self) -> list[str]:
        width = self.loops.columns[0]
        body = [line for n, found in enumerate(levels(self.lowered)) for line in self._pass(n, found)]
        head = [
            f"constexpr int64_t pieces = {-(-width // PIECE)};",
            "const int64_t row = 0;",
            *self._indices(self.loops.rows),
        ]
        return [*head, *self._memory(), *body, *self._results()]

    def _along_row(self, along: RowLoop) -> list[str]:
        (width,), i = self.loops.columns, self.index[-1]
        parts, own, kept, together = [], [], [], []
        for one, kind, start, name, how in along.parts:
            parts.append(f"{kind} {name}_parts[pieces];")
            own.append(f"{kind} {one} = {start};")
            kept.append(f"{name}_parts[piece] = {one};")
            together.append(how.format(name, f"{name}_parts[piece]"))
        end = f"const int64_t start = piece * {PIECE}, end = std::min<int64_t>(start + {PIECE}, {width});"
        columns = [simd(along), f"for (int64_t {i} = start; {i} < end; ++{i}) {{", *indented(along.lines), "}"]
        lines = [*parts, f"#pragma omp parallel for schedule(static) if ({width}LL >= PARALLEL_FROM)"]
        lines += ["for (int64_t piece = 0; piece < pieces; ++piece) {", *indented([end, *own, *columns, *kept]), "}"]
        return [*lines, *(f"for (int64_t piece = 0; piece < pieces; ++piece) {line}" for line in together)]


class _Tiled(Function):
    """Operations on elements that read some memory across the order in which they write: a job is a tile of TILE by TILE.

    What is read across is copied first, to where the columns of the tile lie next to each other.
    """

    headers = "#include <panels.hpp>\n"

    def __init__(self, lowered: Lowered):
        super().__init__(lowered)
        self.across = read_across(lowered, self.loops)
        self.copied = [e for e in lowered.expressions if e.op == "load" and self._is_copied(e)]
        at = f"({self.index[self.across]} - top) * TILE + {self.index[-1]} - left"
        self.row.known.update({e: f"tile{n}[{at}]" for n, e in enumerate(self.copied)})

    def _is_copied(self, e: Expression) -> bool:
        return e.kind == FLOAT and is_across(e, self.loops) and self.loops.strides[e][self.across] == 1

    def constants(self) -> dict[str, Constant]:
        return {"TILE": TILE, "PARALLEL_FROM": PARALLEL_FROM}

    def lines(self) -> list[str]:
        sizes, stores = (
            self.loops.sizes,
            list(zip(result_names(self.lowered.results), self.lowered.results, self.loops.results)),
        )
        height, width = sizes[self.across], sizes[-1]
        others = [d for d in range(len(sizes) - 1) if d != self.across]
        tiles = f"(({height} + TILE - 1) / TILE) * (({width} + TILE - 1) / TILE)"
        at = [
            f"const int64_t widths = ({width} + TILE - 1) / TILE, heights = ({height} + TILE - 1) / TILE;",
            "const int64_t left = job % widths * TILE, top = job / widths % heights * TILE;",
            f"const int64_t right = std::min<int64_t>(left + TILE, {width});",
            f"const int64_t end = std::min<int64_t>(top + TILE, {height});",
            "const int64_t row = job / widths / heights;",
            *self._indices([sizes[d] for d in others], [self.index[d] for d in others]),
        ]
        copies = [line for n, e in enumerate(self.copied) for line in self._copy(f"tile{n}", e)]
        inner = self._stores(self._writer("c", self.row.known), stores)
        columns = ["#pragma omp simd", *loop(self.index[-1], "left", "right", inner)]
        return [
            f"#pragma omp parallel for schedule(static) if ({math.prod(sizes)}LL >= PARALLEL_FROM)",
            f"for (int64_t job = 0; job < {tiles} * {math.prod(sizes[d] for d in others)}; ++job) {{",
            *indented([*at, *copies, *loop(self.index[self.across], "top", "end", columns)]),
            "}",
        ]

    def _copy(self, tile: str, e: Expression) -> list[str]:
        """Statements that make the tile of one load."""
        memory, (down, right) = f"alignas(64) float {tile}[TILE * TILE];", (self.index[self.across], self.index[-1])
        strides = self.loops.strides[e]
        if not e.operands:
            at = place(["top" if i == down else "left" if i == right else i for i in self.index], strides, e.data[2])
            return [memory, f"pack<TILE>(x{e.data[0]} + {at}, {strides[-1]}, 1, right - left, end - top, {tile});"]
        writer = self._writer("c")
        inner = [f"{self.row.known[e]} = {writer.text(e)};"]
        return [memory, *loop(right, "left", "right", loop(down, "top", "end", [*writer.take(), *inner]))]


class _Padded(Function):
    """Operations on elements that read beyond the ends of some memory, which is padding: windows, above all.

    Between the places whose windows reach over an end along the innermost loop no element has a condition of its own, and
    in most rows none at all; what is padding as a whole row is read from zeros. Loads of which each has a condition are
    not vectorised.
    """

    @staticmethod
    def fits(lowered: Lowered) -> bool:
        if lowered.reduced or lowered.scans:
            return False
        inside = Inside.of(lowered, loops_of(lowered))
        return inside is not None and inside.end - inside.first >= VECTOR and inside.reach <= MOST_ZEROS

    def __init__(self, lowered: Lowered):
        super().__init__(lowered)
        self.inside = Inside.of(lowered, self.loops)

    def _results(self) -> list[str]:
        results = list(zip(result_names(self.lowered.results), self.lowered.results, self.loops.results))
        i, (first, end), n = self.index[-1], (self.inside.first, self.inside.end), self.loops.columns[-1]
        border = self._stores(self._writer("c", self.row.known), results)
        limits = [
            f"const int64_t left = std::min<int64_t>(std::max<int64_t>(start, {first}), end);",
            f"const int64_t right = std::max<int64_t>(left, std::min<int64_t>(end, {end}));",
        ]
        before = loop(i, "start", "left", border) if first else []
        after = loop(i, "right", "end", border) if end < n else []
        return [*limits, *before, *self._between(results), *after]

    def _between(self, results: Sequence[tuple[str, Result, Sequence[int]]]) -> list[str]:
        """The loop over the places between: without any condition, and where a row has some."""
        held: dict[Expression, str] = dict.fromkeys(self.inside.held, "true")
        whole = self._stores(self._inner(held | dict.fromkeys(self.inside.of_rows, "true"), self._load), results)
        columns = lambda lines: ["#pragma omp simd", *loop(self.index[-1], "left", "right", lines)]  # noqa: E731
        if not self.inside.of_rows:
            return columns(whole)
        of_row, pointers = self._writer("row_", held), []

        def load(e: Expression) -> str:
            condition = of_row.text(e.operands[-1])
            strides, name, kind = self.loops.strides[e], f"from{len(pointers)}", TYPES[_dtype(self.lowered, e)]
            there = place(self.index[:-1], strides[:-1], e.data[2] + self.inside.first * strides[-1])
            pointers.append(f"const {kind}* {name} = {condition} ? x{e.data[0]} + {there} : (const {kind}*)zeros;")
            element = f"{name}[{place([f'({self.index[-1]} - {self.inside.first})'], strides[-1:])}]"
            return f"{element} != 0" if e.kind == BOOL else f"{DECLARED[e.kind]}({element})"

        part = self._stores(self._inner(held, load), results)
        conditions = " && ".join(of_row.text(c) for c in self.inside.of_rows)
        zeros = f"alignas(64) static const char zeros[{self.inside.reach}] = {{}};"
        return [
            *of_row.take(),
            f"if ({conditions}) {{",
            *indented(columns(whole)),
            "} else {",
            *indented([zeros, *pointers, *columns(part)]),
            "}",
        ]

    def _inner(self, known: Mapping[Expression, str], guarded: Callable[[Expression], str]) -> Writer:
        """Of the places between, where conditions hold that are `known`; guarded: how loads with conditions are written."""
        writer = self._writer("c", known)
        writer.load = lambda e, *operands: guarded(e) if e.op == "load" and operands else self._load(e, *operands)
        return writer


@dataclass(frozen=True)
class Inside:
    """The indices of the innermost loop from `first` to `end`, at which the conditions `held` of loads hold.

    of_rows: the other conditions; reach: bytes from the first to the last number that such a load reads there.
    """

    first: int
    end: int
    held: tuple[Expression, ...]
    of_rows: tuple[Expression, ...]
    reach: int

    @classmethod
    def of(cls, lowered: Lowered, loops: Loops) -> "Inside | None":
        """None where no load has a condition, where one has conditions of other things than one index each, and where one
        runs backwards."""
        loads = [e for e in lowered.expressions if e.op == "load" and e.operands]
        if not loads or any(loops.strides[e][-1] < 0 for e in loads):
            return None
        first, end, held, of_rows = 0, loops.sizes[-1], [], []
        for condition in dict.fromkeys(c for e in loads for c in _conditions(e.operands[-1])):
            if condition.op not in ("ge", "lt") or [e.op for e in condition.operands] != ["index", "number"]:
                return None
            index, bound = condition.operands
            *outer, step = loops.strides[index]
            if step and (any(outer) or step < 0):
                return None
            if step:
                place = -(-(bound.data - index.data[2]) // step)  # from which on it is at the bound or beyond
                first, end = (max(first, place), end) if condition.op == "ge" else (first, min(end, place))
            (held if step else of_rows).append(condition)
        apart = max(loops.strides[e][-1] * _dtype(lowered, e).itemsize for e in loads)
        return cls(first, end, tuple(held), tuple(of_rows), apart * (end - first) + 8)


def _dtype(lowered: Lowered, load: Expression) -> torch.dtype:
    return lowered.inputs[load.data[0]].meta["val"].dtype


def _conditions(guard: Expression) -> list[Expression]:
    return [c for e in guard.operands for c in _conditions(e)] if guard.op == "and" else [guard]

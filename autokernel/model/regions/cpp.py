"""The loops of a lowered region in C++: over rows, a pass over a row for each level of reductions, and one that writes.

What is costly to compute of an element, and needed by more than one pass, the first of them keeps for the others.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autokernel.model.regions.expressions import BOOL, FLOAT, INT, Expression, Lowered, Result, is_scan
from autokernel.model.regions.writing import (
    OPERATORS,
    Loops,
    Writer,
    levels,
    loops_of,
    place,
    result_names,
    varying,
)

TYPES = {
    torch.float32: "float",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.bool: "uint8_t",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
}
FUNCTIONS = {
    **OPERATORS,
    "neg": "(-{0})",
    "abs": "ak_abs({0})",
    "max": "ak_max({0}, {1})",
    "min": "ak_min({0}, {1})",
    "exp": "ak_exp({0})",
    "tanh": "ak_tanh({0})",
    "erf": "ak_erf({0})",
    "sqrt": "__builtin_sqrtf({0})",
    **{name: f"ak_{name}({{0}})" for name in ("erfc", "log", "log1p", "expm1", "sin", "cos")},
    **{name: f"ak_{name}({{0}}, {{1}})" for name in ("atan2", "fmod")},
    "copysign": "__builtin_copysignf({0}, {1})",
    "round": "__builtin_rintf({0})",  # half to even
    "trunc": "__builtin_truncf({0})",
    **{name: f"std::{name}({{0}})" for name in ("floor", "ceil")},
    "pow": "std::pow({0}, {1})",
    "and": "({0} && {1})",
    "or": "({0} || {1})",
    "not": "(!{0})",
    "where": "({0} ? {1} : {2})",
    "float": "float({0})",
    "int": "int64_t({0})",
    "scan_sum": "{0}",
    "scan_prod": "{0}",
}
# of a reduction: what it begins with, how OpenMP calls it, and how an element is taken in
REDUCED = {
    "reduce_sum": ("0", "+", "{0} += {1};"),
    "reduce_prod": ("1", "*", "{0} *= {1};"),
    "reduce_min_int": ("INT64_MAX", "min", "{0} = {1} < {0} ? {1} : {0};"),
    "reduce_max": ("-INFINITY", "max", "{0} = {1} > {0} ? {1} : {0};"),
    "reduce_min": ("INFINITY", "min", "{0} = {1} < {0} ? {1} : {0};"),
}
Constant = tuple[int, list[int], str]  # a value, those to try, what it is
PARALLEL_FROM: Constant = 16384, [4096, 16384, 65536], "elements from which threads pay"
BLOCK: Constant = 4096, [1024, 4096, 16384], "columns that a thread takes at a time"
COMBINED = {"+": "{0} += {1};", "*": "{0} *= {1};"}  # of parts of a reduction; of the others as an element is taken in
COMBINED |= {how: taken for _, how, taken in REDUCED.values() if how in ("max", "min")}
VECTOR = 16  # floats, of the widest
PIECE = 4096  # columns that are added up in float32; of a longer row the sums of its pieces are, in float64
MOST_SHORT = 4 * VECTOR  # columns of an inner loop, each of which is added up by itself
COSTLY = {"exp", "tanh", "erf", "log", "log1p", "expm1", "sin", "cos", "pow", "div", "sqrt"}  # beside a store and a load
COSTLY |= {"erfc", "atan2", "fmod"}
KEPT_BYTES = 1 << 18  # of a row, on a thread's stack, and in its core's L2 cache
SCANNED = {"scan_sum": ("0", "+="), "scan_prod": ("1", "*=")}
DECLARED = {FLOAT: "float", BOOL: "bool", INT: "int64_t"}


def number(e: Expression) -> str:
    v = e.data
    if isinstance(v, bool):
        return str(v).lower()
    if isinstance(v, int):
        return str(v)
    if math.isnan(v):
        return "NAN"
    if math.isinf(v):
        return "INFINITY" if v > 0 else "(-INFINITY)"
    return f"({v!r}f)" if v < 0 else f"{v!r}f"


def indented(lines: Sequence[str], levels: int = 1) -> list[str]:
    return ["    " * levels + line for line in lines]


@dataclass
class RowLoop:
    """A loop along a row, and what it does with each element."""

    lines: list[str]
    writer: Writer
    stores: Sequence[Sequence[int]] = ()  # by their strides
    starts: list[tuple[str, str, str]] = field(default_factory=list)  # of what is added up: types, names, values
    combined: dict[str, list[str]] = field(default_factory=lambda: {"+": [], "*": [], "max": [], "min": []})
    totals: list[tuple[str, str]] = field(default_factory=list)  # of sums, and what a piece of the row adds to each

    @property
    def parts(self) -> list[tuple[str, str, str, str, str]]:
        """Of each thing that is added up: what a part of the row comes to, its type and beginning, what that is put
        together with, and how."""
        whole = {one: name for name, one in self.totals}
        begun = {name: (kind, start) for kind, name, start in self.starts} | dict.fromkeys(whole, ("float", "0"))
        return [
            (one, *begun[one], whole.get(one, one), COMBINED[how]) for how, names in self.combined.items() for one in names
        ]


class Function:
    """The body of `run`. A job is a row, or, where rows have no sums, a block of BLOCK columns of one."""

    headers = ""  # beside those of all
    at = ""  # of what a row has one of, after its name
    in_float = PIECE  # columns that are added up in float32
    in_pieces = True  # whether the sums of longer rows are those of their pieces

    def __init__(self, lowered: Lowered):
        self.lowered, self.loops = lowered, self._loops(lowered)
        self.index = [f"i{d}" for d in range(len(self.loops.sizes))]
        self.in_columns = varying(lowered)
        self.row = self._writer("t")
        self.in_blocks = not lowered.reduced
        self.lanes = self._lanes()
        self.kept = self._kept()

    def _loops(self, lowered: Lowered) -> Loops:
        return loops_of(lowered)

    def constants(self) -> dict[str, Constant]:
        """What of the code may be another number."""
        return ({"BLOCK": BLOCK} if self.in_blocks else {}) | {"PARALLEL_FROM": PARALLEL_FROM}

    def lines(self) -> list[str]:
        before = self._before_all()
        body = [line for n, found in enumerate(levels(self.lowered)) for line in self._pass(n, found)]
        jobs, at = self._jobs()
        return [
            *before,
            f"#pragma omp parallel for schedule(static) if ({math.prod(self.loops.sizes)}LL >= PARALLEL_FROM)",
            f"for (int64_t job = 0; job < {jobs}; ++job) {{",
            *indented([*at, *self._for_each_row([*self._memory(), *body, *self._results()])]),
            "}",
        ]

    def _before_all(self) -> list[str]:
        """What is costly to compute and the same in all rows, such as the reciprocal of a channel's deviation."""
        writer, i, memory, stores = self._writer("m"), self.index[-1], [], []
        for n, e in enumerate(self._of_columns()):
            name = f"of_column{n}"
            memory.append(f"alignas(64) float {name}[{self.loops.columns[0]}];")
            stores.append(f"{name}[{i}] = {writer.text(e)};")
            self.row.known[e] = f"{name}[{i}]"
        inner = loop(i, "0", str(self.loops.columns[0]), [*writer.take(), *stores])
        return [*memory, "#pragma omp simd", *inner] if stores else []

    def _of_columns(self) -> list[Expression]:
        """What has a number for each column, the same in all rows, and is costly; not what is only part of such."""
        split = len(self.loops.rows)
        if not self.in_blocks or math.prod(self.loops.rows) < 2 or self.loops.columns[0] > KEPT_BYTES // 16:
            return []
        own: set[Expression] = set()
        for e in self.lowered.expressions:
            is_same = e not in self.loops.strides or not any(self.loops.strides[e][:split])
            if is_same and all(o in own for o in e.operands):
                own.add(e)
        taken = {o for e in self.lowered.expressions if e not in own for o in e.operands}
        taken |= {result.expression for result in self.lowered.results}
        ends = [e for e in self.lowered.expressions if e in own and e in taken and e.kind == FLOAT]
        return [e for e in ends if any(o.op in COSTLY for o in self._of_elements([e], ()))]

    def _for_each_row(self, lines: list[str]) -> list[str]:
        """What computes the rows of a job, and what comes before and after."""
        return lines

    def _jobs(self) -> tuple[str, list[str]]:
        """How many there are, and statements for what each has."""
        rows, width = self.loops.rows, self.loops.columns[-1]
        if not self.in_blocks:
            return str(math.prod(rows)), ["const int64_t row = job;", *self._indices(rows)]
        blocks = f"(({width} + BLOCK - 1) / BLOCK)"
        row = f"const int64_t row = job / {blocks}, start = job % {blocks} * BLOCK;"
        end = f"const int64_t end = std::min<int64_t>(start + BLOCK, {width});"
        return f"{math.prod(rows)} * {blocks}", [row, end, *self._indices(rows)]

    def _lanes(self) -> int:
        """How many rows are computed at a time."""
        return 1

    def _kept(self) -> list[dict[Expression, str]]:
        """What each pass but the last keeps of every element, and the names of the memory for it."""
        passes = [[e.operands[0] for e in level] for level in levels(self.lowered)]
        passes.append([result.expression for result in self.lowered.results])
        room = 0 if self.lowered.scans else KEPT_BYTES // (4 * math.prod(self.loops.columns) * self.lanes)
        kept: list[dict[Expression, str]] = []
        for n, ends in enumerate(passes[:-1]):
            known = {e for names in kept for e in names}
            shared = self._of_elements(ends, known) & self._of_elements(sum(passes[n + 1 :], []), known)
            costly = {e for e in shared if e.kind == FLOAT and any(o.op in COSTLY for o in self._of_elements([e], known))}
            inner = {o for e in costly for o in self._of_elements(e.operands, known)}
            chosen = [e for e in self.lowered.expressions if e in costly - inner][: room - len(known)]
            kept.append({e: f"kept{len(known) + i}" for i, e in enumerate(chosen)})
        return kept

    def _memory(self) -> list[str]:
        return [f"alignas(64) float {name}[{self._length()}];" for names in self.kept for name in names.values()]

    def _length(self) -> str:
        """Of how many elements of a job something is kept."""
        return str(math.prod(self.loops.columns))

    def _keep(self, n: int, loop: Writer) -> list[str]:
        """Stores of what pass n keeps, from where later ones take it."""
        at = self._kept_at()
        lines = [f"{name}[{at}] = {loop.text(e)};" for e, name in self.kept[n].items()]
        self.row.known.update({e: f"{name}[{at}]" for e, name in self.kept[n].items()})
        return lines

    def _kept_at(self) -> str:
        """Where an element is among those of a job."""
        columns = self.loops.columns
        return place(self.index[len(self.loops.rows) :], [math.prod(columns[d + 1 :]) for d in range(len(columns))])

    def _of_elements(self, ends: Sequence[Expression], known: Collection[Expression]) -> set[Expression]:
        """What is computed of each element for `ends`, without what is `known`."""
        found: set[Expression] = set()
        waiting = list(ends)
        while waiting:
            e = waiting.pop()
            if e in self.in_columns and e not in known and e not in found:
                found.add(e)
                waiting += e.operands
        return found

    def _writer(self, prefix: str, known: Mapping[Expression, str] | None = None) -> Writer:
        return Writer(FUNCTIONS, number, _declare, self._load, prefix, dict(known or {}))

    def _load(self, e: Expression, *operands: str) -> str:
        at = place(self.index, self.loops.strides[e], e.data[2])
        if e.op == "index":
            return at
        if e.op == "gather":
            at, operands = f"{at} + {operands[0]}", operands[1:]
        condition = "".join(operands)
        element = f"x{e.data[0]}[{at}]"
        text = f"{element} != 0" if e.kind == BOOL else f"{DECLARED[e.kind]}({element})"
        return f"{condition} ? {text} : 0" if condition else text

    def _indices(self, rows: Sequence[int], names: Sequence[str] = ()) -> list[str]:
        """Of the loops over `rows`, of which `row` is one; names: theirs, if they are not the outermost."""
        lines, below = [], 1
        for d, n in reversed(list(enumerate(rows))):
            quotient = f"row / {below}" if below > 1 else "row"
            lines.append(f"const int64_t {(names or self.index)[d]} = {quotient}{f' % {n}' if d else ''};")
            below *= n
        return lines or ["(void)row;"]

    def _pass(self, n: int, reductions: Sequence[Expression]) -> list[str]:
        """A loop along the row that adds up all reductions of one level."""
        before, columns, ends = self._before(reductions), math.prod(self.loops.columns), []
        along = RowLoop([], self._writer("c", self.row.known))
        for k, e in enumerate(reductions):
            name, operand, (start, how, taken) = f"r{n}_{k}", along.writer.text(e.operands[0]), REDUCED[e.op]
            one, is_long = name, e.op == "reduce_sum" and e.kind == FLOAT and columns > self.in_float
            if is_long and columns > PIECE and self.in_pieces:
                one = f"{name}_piece"
                along.totals.append((name, one))
            along.lines += [*along.writer.take(), taken.format(f"{one}{self.at}", operand)]
            along.starts.append(("double" if is_long else DECLARED[e.kind], name, start))
            along.combined[how].append(one)
            if e.op in ("reduce_max", "reduce_min"):  # OpenMP's pass over NaN
                along.starts.append(("float", f"{name}_nan", "0"))
                along.lines.append(f"{name}_nan{self.at} += {operand} != {operand};")
                along.combined["+"].append(f"{name}_nan")
                ends.append(f"{name}{self.at} = {name}_nan{self.at} > 0 ? NAN : {name}{self.at};")
            self.row.known[e] = f"{name}{self.at}"
        along.lines += self._keep(n, along.writer)
        return [*before, *self._begun(along), *self._along_row(along), *self._once(ends)]

    def _results(self) -> list[str]:
        """The loop along the row that writes; one store for each result that is one number a row."""
        results = list(zip(result_names(self.lowered.results), self.lowered.results, self.loops.results))
        inner = [r for i, r in enumerate(results) if self.in_blocks or self.loops.in_columns(i)]
        before = self._before([result.expression for _, result, _ in inner])
        stores = self._stores(writer := self._writer("c", self.row.known), inner)
        along = RowLoop(stores, writer, [strides for _, _, strides in inner])
        once = self._stores(self.row, [r for r in results if r not in inner])
        return [*before, *self._once(once), *(self._along_row(along) if inner else ())]

    def _before(self, ends: Sequence[Expression]) -> list[str]:
        """What `ends` need that a row has one of."""
        return self.row.same_along_row(ends, self.in_columns)

    def _begun(self, along: RowLoop) -> list[str]:
        """What reductions begin with."""
        return [f"{kind} {name} = {start};" for kind, name, start in along.starts]

    def _once(self, lines: Sequence[str]) -> Sequence[str]:
        """`lines` for each row."""
        return lines

    def _stores(self, writer: Writer, results: Sequence[tuple[str, Result, Sequence[int]]]) -> list[str]:
        lines = []
        for y, result, strides in results:
            text = writer.text(result.expression)
            lines += [*writer.take(), f"{y}[{place(self.index, strides)}] = {stored(text, result)};"]
        return lines

    def _along_row(self, along: RowLoop) -> list[str]:
        """Loops over the columns."""
        scans, lines, order = along.writer.scans(), along.lines, self._order(along)
        if along.parts and not scans and len(order) == 2 and self.loops.columns[order[1]] <= MOST_SHORT:
            return self._by_column(along, *order)
        for d in reversed(order):
            n, i, is_innermost = self.loops.columns[d], self.index[len(self.loops.rows) + d], d == order[-1]
            in_pieces = is_innermost and along.totals and n > PIECE and not scans
            first, end = ("start", "end") if is_innermost and (self.in_blocks or in_pieces) else ("0", str(n))
            forwards, backwards = f"{i} = {first}; {i} < {end}; ++{i}", f"{i} = {n - 1}; {i} >= 0; --{i}"
            lines = [f"for (int64_t {backwards if self.lowered.is_backwards else forwards}) {{", *indented(lines), "}"]
            if is_innermost:
                lines = [*([] if scans else [simd(along)]), *lines]
                pieces = [f"float {one} = 0;" for _, one in along.totals]
                lines = [*pieces, *lines, *(f"{all} += {one};" for all, one in along.totals)]
            if in_pieces:
                end = f"const int64_t end = std::min<int64_t>(start + {PIECE}, {n});"
                lines = [f"for (int64_t start = 0; start < {n}; start += {PIECE}) {{", *indented([end, *lines]), "}"]
        return [*(f"double {name}_total = {SCANNED[e.op][0]};" for name, e in scans), *lines]

    def _by_column(self, along: RowLoop, outer: int, inner: int) -> list[str]:
        """Loops of which the inner one is short: each of its columns is added up by itself, a piece at a time."""
        (m, n), split = (self.loops.columns[outer], self.loops.columns[inner]), len(self.loops.rows)
        i, j = self.index[split + outer], self.index[split + inner]
        own = [f"{kind} {one}_of[{n}];" for one, kind, *_ in along.parts]
        begun = [f"{one}_of[{j}] = {start};" for one, _, start, *_ in along.parts]
        taken = [f"{kind}& {one} = {one}_of[{j}];" for one, kind, *_ in along.parts]
        joined = [how.format(name, f"{one}_of[{j}]") for one, _, _, name, how in along.parts]
        columns = ["#pragma omp simd", *loop(j, "0", str(n), [*taken, *along.lines])]
        end = f"const int64_t end = std::min<int64_t>(start + {PIECE // VECTOR}, {m});"
        piece = [
            end,
            *own,
            *loop(j, "0", str(n), begun),
            *loop(i, "start", "end", columns),
            *loop(j, "0", str(n), joined),
        ]
        return [f"for (int64_t start = 0; start < {m}; start += {PIECE // VECTOR}) {{", *indented(piece), "}"]

    def _order(self, along: RowLoop) -> list[int]:
        """The loops over the columns, outermost first: in the innermost most of what is loaded and stored is contiguous."""
        order = list(range(len(self.loops.columns)))
        if self.lowered.scans:
            return order
        split = len(self.loops.rows)
        read = [self.loops.strides[e] for e in along.writer.known if e.op in ("load", "gather") and e in self.in_columns]
        walked = [strides[split:] for strides in (*read, *along.stores)]

        def cost(d: int) -> float:
            """Of an element, in operations on one number; those on vectors are for VECTOR, some of them past the end."""
            vectors, n = math.ceil(self.loops.columns[d] / VECTOR), self.loops.columns[d]
            apart = sum(abs(strides[d]) > 1 for strides in walked)
            return vectors * (VECTOR * apart + len(walked) - apart + len(along.lines)) / n

        innermost = min(reversed(order), key=cost)
        return [*(d for d in order if d != innermost), innermost]


def loop(i: str, first: str, end: str, inner: Sequence[str]) -> list[str]:
    return [f"for (int64_t {i} = {first}; {i} < {end}; ++{i}) {{", *indented(inner), "}"]


def stored(text: str, result: Result) -> str:
    """A number as one of the result's; to one of 16 bits a float is assigned, which is vectorised."""
    kind = TYPES[result.spec.dtype]
    return text if kind in ("f16", "bf16") else f"{kind}({text})"


def simd(along: RowLoop) -> str:
    clauses = [f"reduction({how} : {', '.join(names)})" for how, names in along.combined.items() if names]
    return " ".join(["#pragma omp simd", *clauses])


def _declare(name: str, text: str, e: Expression) -> list[str]:
    if is_scan(e):
        text = f"float({name}_total {SCANNED[e.op][1]} {text})"
    return [f"const {DECLARED[e.kind]} {name} = {text};"]

"""A lowered region in C++: a loop over rows, a pass over a row for each level of reductions, and one that writes.

What is costly to compute of an element, and needed by more than one pass, the first of them keeps for the others.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autokernel.model.regions.expressions import BOOL, FLOAT, INT, Expression, Limit, Lowered, Result, is_scan
from autokernel.model.regions.moments import with_exact_means
from autokernel.model.regions.writing import (
    OPERATORS,
    Writer,
    in_words,
    is_across,
    levels,
    loops_of,
    made,
    place,
    read_across,
    result_names,
    returned,
    varying,
)
from autokernel.spec import TensorSpec

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
TILE: Constant = 64, [16, 32, 64], "rows and columns of a tile, which is copied where memory is read across"
BLOCK: Constant = 4096, [1024, 4096, 16384], "columns that a thread takes at a time"
COMBINED = {"+": "{0} += {1};", "*": "{0} *= {1};"}  # of parts of a reduction; of the others as an element is taken in
COMBINED |= {how: taken for _, how, taken in REDUCED.values() if how in ("max", "min")}
VECTOR = 16  # floats, of the widest
PIECE = 4096  # columns that are added up in float32; of a longer row the sums of its pieces are, in float64
MOST_SHORT = 4 * VECTOR  # columns of an inner loop, each of which is added up by itself
MOST_PIECES = 1 << 16  # on a thread's stack
COSTLY = {"exp", "tanh", "erf", "log", "log1p", "expm1", "sin", "cos", "pow", "div", "sqrt"}  # beside a store and a load
COSTLY |= {"erfc", "atan2", "fmod"}
KEPT_BYTES = 1 << 18  # of a row, on a thread's stack, and in its core's L2 cache
L1_BYTES, MANY_JOBS = 1 << 15, 64  # see _SideBySide
SCANNED = {"scan_sum": ("0", "+="), "scan_prod": ("1", "*=")}
DECLARED = {FLOAT: "float", BOOL: "bool", INT: "int64_t"}

FILE = '''"""{title}

Written from the model's graph; every size in it is the model's.
"""

import torch

from autokernel.build import cpp_function

KERNEL_TYPE = "{name}"
BACKEND = "cpp"
TUNABLES = {tunables}

{constants}

SOURCE = r"""
#include <autokernel.hpp>
#include <elements.hpp>
{headers}
{code}
"""

_run = cpp_function(SOURCE, "run", "{signature}", {given})
STRIDES = {strides}


def _laid_out(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """x in the strides that the code above was written for."""
    return x if x.stride() == stride else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def kernel_fn({parameters}) -> {returned}:
    """{shapes}"""
    inputs = [_laid_out(x, stride) for x, stride in zip(({names},), STRIDES)]
    {made}
    {run}
    return {results}
'''
RUN_WITHIN = """if {call}:
        raise IndexError("an index is out of range")"""


def write(name: str, title: str, lowered: Lowered, inputs: Sequence[TensorSpec]) -> dict[str, str]:
    """A kernel file, by its stem."""
    lowered = with_exact_means(lowered)
    names, results = [f"input_{i}" for i in range(len(inputs))], result_names(lowered.results)
    function = _kind_of(lowered)(lowered)
    constants = function.constants()
    call = f"_run(*(x.data_ptr() for x in inputs), {', '.join(f'{y}.data_ptr()' for y in results)})"
    text = FILE.format(
        title=title,
        name=name,
        tunables="{" + ", ".join(f'"{c}": {values}' for c, (_, values, _) in constants.items()) + "}",
        constants="\n".join(f"{c} = {value}  # {meaning}" for c, (value, _, meaning) in constants.items()),
        given=", ".join(f"{c}={c}" for c in constants),
        headers=function.headers,
        code=_code(function, lowered, inputs),
        signature="p" * (len(inputs) + len(results)),
        strides=repr(tuple(t.strides for t in inputs)),
        parameters=", ".join(f"{n}: torch.Tensor" for n in names),
        names=", ".join(names),
        shapes=in_words(names, inputs, [result.spec for result in lowered.results]),
        returned=returned(lowered.results),
        made=made(lowered.results),
        run=RUN_WITHIN.format(call=call) if lowered.limits else call,
        results=", ".join(results),
    )
    return {"cpp_kernel": text}


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


def _code(function: "_Function", lowered: Lowered, inputs: Sequence[TensorSpec]) -> str:
    pointers = [f"const {TYPES[t.dtype]}* __restrict x{i}" for i, t in enumerate(inputs)]
    pointers += [f"{TYPES[r.spec.dtype]}* __restrict {y}" for y, r in zip(result_names(lowered.results), lowered.results)]
    head = f'extern "C" int run({", ".join(pointers)}) {{'
    limits = [line for n, limit in enumerate(lowered.limits) for line in _within(f"beyond{n}", limit, inputs[limit.index])]
    return "\n".join([head, *indented([*limits, *function.lines()]), "    return 0;", "}"])


def _within(beyond: str, limit: Limit, t: TensorSpec) -> list[str]:
    """Statements that return 1 where an index is beyond the ends."""
    index = [f"j{d}" for d in range(len(t.shape))]
    loops = [f"for (int64_t {j} = 0; {j} < {n}; ++{j})" for j, n in zip(index, t.shape)]
    at = f"x{limit.index}[{place(index, t.strides)}]"
    shared = f"#pragma omp parallel for schedule(static) reduction(| : {beyond}) if ({t.numel}LL >= PARALLEL_FROM)"
    lines = [f"int {beyond} = 0;", *([shared] if loops else []), *loops]
    return [*lines, f"    {beyond} |= ({at} < {limit.lowest}) | ({at} >= {limit.end});", f"if ({beyond}) return 1;"]


def indented(lines: Sequence[str], levels: int = 1) -> list[str]:
    return ["    " * levels + line for line in lines]


@dataclass
class _Pass:
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


class _Function:
    """The body of `run`. A job is a row, or, where rows have no sums, a block of BLOCK columns of one."""

    headers = ""  # beside those of all
    at = ""  # of what a row has one of, after its name
    in_float = PIECE  # columns that are added up in float32

    def __init__(self, lowered: Lowered):
        self.lowered, self.loops = lowered, loops_of(lowered)
        self.index = [f"i{d}" for d in range(len(self.loops.sizes))]
        self.in_columns = varying(lowered)
        self.row = self._writer("t")
        self.in_blocks = not lowered.reduced
        self.lanes = self._lanes()
        self.kept = self._kept()

    def constants(self) -> dict[str, Constant]:
        """What of the code may be another number."""
        return ({"BLOCK": BLOCK} if self.in_blocks else {}) | {"PARALLEL_FROM": PARALLEL_FROM}

    def lines(self) -> list[str]:
        body = [line for n, found in enumerate(levels(self.lowered)) for line in self._pass(n, found)]
        jobs, at = self._jobs()
        return [
            f"#pragma omp parallel for schedule(static) if ({math.prod(self.loops.sizes)}LL >= PARALLEL_FROM)",
            f"for (int64_t job = 0; job < {jobs}; ++job) {{",
            *indented([*at, *self._for_each_row([*self._memory(), *body, *self._results()])]),
            "}",
        ]

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
        along = _Pass([], self._writer("c", self.row.known))
        for k, e in enumerate(reductions):
            name, operand, (start, how, taken) = f"r{n}_{k}", along.writer.text(e.operands[0]), REDUCED[e.op]
            one, is_long = name, e.op == "reduce_sum" and e.kind == FLOAT and columns > self.in_float
            if is_long and columns > PIECE:
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
        along = _Pass(stores, writer, [strides for _, _, strides in inner])
        once = self._stores(self.row, [r for r in results if r not in inner])
        return [*before, *self._once(once), *(self._along_row(along) if inner else ())]

    def _before(self, ends: Sequence[Expression]) -> list[str]:
        """What `ends` need that a row has one of."""
        return self.row.same_along_row(ends, self.in_columns)

    def _begun(self, along: _Pass) -> list[str]:
        """What reductions begin with."""
        return [f"{kind} {name} = {start};" for kind, name, start in along.starts]

    def _once(self, lines: Sequence[str]) -> Sequence[str]:
        """`lines` for each row."""
        return lines

    def _stores(self, writer: Writer, results: Sequence[tuple[str, Result, Sequence[int]]]) -> list[str]:
        lines = []
        for y, result, strides in results:
            text = writer.text(result.expression)
            lines += [*writer.take(), f"{y}[{place(self.index, strides)}] = {TYPES[result.spec.dtype]}({text});"]
        return lines

    def _along_row(self, along: _Pass) -> list[str]:
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
                lines = [*([] if scans else [_simd(along)]), *lines]
                pieces = [f"float {one} = 0;" for _, one in along.totals]
                lines = [*pieces, *lines, *(f"{all} += {one};" for all, one in along.totals)]
            if in_pieces:
                end = f"const int64_t end = std::min<int64_t>(start + {PIECE}, {n});"
                lines = [f"for (int64_t start = 0; start < {n}; start += {PIECE}) {{", *indented([end, *lines]), "}"]
        return [*(f"double {name}_total = {SCANNED[e.op][0]};" for name, e in scans), *lines]

    def _by_column(self, along: _Pass, outer: int, inner: int) -> list[str]:
        """Loops of which the inner one is short: each of its columns is added up by itself, a piece at a time."""
        (m, n), split = (self.loops.columns[outer], self.loops.columns[inner]), len(self.loops.rows)
        i, j = self.index[split + outer], self.index[split + inner]
        own = [f"{kind} {one}_of[{n}];" for one, kind, *_ in along.parts]
        begun = [f"{one}_of[{j}] = {start};" for one, _, start, *_ in along.parts]
        taken = [f"{kind}& {one} = {one}_of[{j}];" for one, kind, *_ in along.parts]
        joined = [how.format(name, f"{one}_of[{j}]") for one, _, _, name, how in along.parts]
        columns = ["#pragma omp simd", *_loop(j, "0", str(n), [*taken, *along.lines])]
        end = f"const int64_t end = std::min<int64_t>(start + {PIECE // VECTOR}, {m});"
        piece = [
            end,
            *own,
            *_loop(j, "0", str(n), begun),
            *_loop(i, "start", "end", columns),
            *_loop(j, "0", str(n), joined),
        ]
        return [f"for (int64_t start = 0; start < {m}; start += {PIECE // VECTOR}) {{", *indented(piece), "}"]

    def _order(self, along: _Pass) -> list[int]:
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


def are_side_by_side(lowered: Lowered) -> bool:
    """Whether rows lie next to each other in memory, and the columns of a row apart: those of a sum over channels. What has
    it the other way round is copied, where that can be done in order."""
    loops = loops_of(lowered)
    last = len(loops.rows) - 1
    if not lowered.reduced or lowered.scans or last < 0 or loops.rows[last] < VECTOR or math.prod(loops.columns) > PIECE:
        return False
    loads = [e for e in lowered.expressions if e.op == "load"]
    others = [
        strides for strides in (*map(loops.strides.__getitem__, loads), *loops.results) if not _is_beside(strides, last)
    ]
    beside = [e for e in loads if all(_steps(loops.strides[e], last)) and _is_beside(loops.strides[e], last)]
    return bool(beside) and (not others or len(loops.columns) == 1 and all(strides[-1] == 1 for strides in others))


def _steps(strides: Sequence[int], last: int) -> tuple[int, int]:
    """From row to row, and from column to column."""
    return abs(strides[last]), min(filter(None, map(abs, strides[last + 1 :])), default=0)


def _is_beside(strides: Sequence[int], last: int) -> bool:
    rows, columns = _steps(strides, last)
    return not rows or not columns or rows < columns


class _SideBySide(_Function):
    """Rows that are computed side by side: a job is ROWS of them, and the innermost loop runs over these.

    What there is one of for each row, its sums and what is computed of them, is an array. What has the columns next to each
    other in memory is copied before or after, column by column.
    """

    headers = "#include <panels.hpp>\n"
    at = "[lane]"
    in_float = VECTOR  # one after another: else it would be less exact than PyTorch's cascade

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
                    inner = _loop("column", "0", str(columns), [f"{to} = {kind}({left}[column * ROWS + lane]);"])
                    after += _loop("lane", "0", "lanes", inner)
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

    def _begun(self, along: _Pass) -> list[str]:
        arrays = [f"{kind} {name}[ROWS];" for kind, name, _ in along.starts]
        return [*arrays, *self._once([f"{name}{self.at} = {start};" for _, name, start in along.starts])]

    def _once(self, lines: Sequence[str]) -> list[str]:
        at = f"const int64_t {self.index[len(self.loops.rows) - 1]} = start + lane;"
        head = ["#pragma omp simd", "for (int64_t lane = 0; lane < lanes; ++lane) {"]
        return [*head, *indented([at, *lines]), "}"] if lines else []

    def _along_row(self, along: _Pass) -> list[str]:
        lines = self._once(along.lines)
        for i, n in reversed(list(zip(self.index[len(self.loops.rows) :], self.loops.columns))):
            lines = [f"for (int64_t {i} = 0; {i} < {n}; ++{i}) {{", *indented(lines), "}"]
        return list(lines)


def is_one_long_row(lowered: Lowered) -> bool:
    loops = loops_of(lowered)
    is_long = len(loops.columns) == 1 and 2 * PIECE < loops.columns[0] <= MOST_PIECES * PIECE
    return bool(lowered.reduced) and is_long and math.prod(loops.rows) == 1 and not lowered.scans


class _OneLongRow(_Function):
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

    def _along_row(self, along: _Pass) -> list[str]:
        (width,), i = self.loops.columns, self.index[-1]
        parts, own, kept, together = [], [], [], []
        for one, kind, start, name, how in along.parts:
            parts.append(f"{kind} {name}_parts[pieces];")
            own.append(f"{kind} {one} = {start};")
            kept.append(f"{name}_parts[piece] = {one};")
            together.append(how.format(name, f"{name}_parts[piece]"))
        end = f"const int64_t start = piece * {PIECE}, end = std::min<int64_t>(start + {PIECE}, {width});"
        columns = [_simd(along), f"for (int64_t {i} = start; {i} < end; ++{i}) {{", *indented(along.lines), "}"]
        lines = [*parts, f"#pragma omp parallel for schedule(static) if ({width}LL >= PARALLEL_FROM)"]
        lines += ["for (int64_t piece = 0; piece < pieces; ++piece) {", *indented([end, *own, *columns, *kept]), "}"]
        return [*lines, *(f"for (int64_t piece = 0; piece < pieces; ++piece) {line}" for line in together)]


class _Tiled(_Function):
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
        columns = ["#pragma omp simd", *_loop(self.index[-1], "left", "right", inner)]
        return [
            f"#pragma omp parallel for schedule(static) if ({math.prod(sizes)}LL >= PARALLEL_FROM)",
            f"for (int64_t job = 0; job < {tiles} * {math.prod(sizes[d] for d in others)}; ++job) {{",
            *indented([*at, *copies, *_loop(self.index[self.across], "top", "end", columns)]),
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
        return [memory, *_loop(right, "left", "right", _loop(down, "top", "end", [*writer.take(), *inner]))]


def _loop(i: str, first: str, end: str, inner: Sequence[str]) -> list[str]:
    return [f"for (int64_t {i} = {first}; {i} < {end}; ++{i}) {{", *indented(inner), "}"]


def _kind_of(lowered: Lowered) -> type[_Function]:
    if read_across(lowered, loops_of(lowered)) is not None:
        return _Tiled
    if is_one_long_row(lowered):
        return _OneLongRow
    return _SideBySide if are_side_by_side(lowered) else _Function


def _simd(along: _Pass) -> str:
    clauses = [f"reduction({how} : {', '.join(names)})" for how, names in along.combined.items() if names]
    return " ".join(["#pragma omp simd", *clauses])


def _declare(name: str, text: str, e: Expression) -> list[str]:
    if is_scan(e):
        text = f"float({name}_total {SCANNED[e.op][1]} {text})"
    return [f"const {DECLARED[e.kind]} {name} = {text};"]

"""A lowered region in Triton: elements by the block; where there are sums along rows, rows held whole or walked through."""

import math
import re
from collections.abc import Mapping, Sequence

from autokernel.model.regions.expressions import BOOL, FLOAT, Expression, Lowered, is_scan
from autokernel.model.regions.moments import with_moments
from autokernel.model.regions.writing import (
    LAID_OUT,
    OPERATORS,
    PLACED,
    Loops,
    Writer,
    in_words,
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

MOST_INT = 2147483647
HELD = 16384  # columns of a row that a program holds; longer ones it walks through, once for each level of reductions
FEW_ROWS = 512  # of which a program each leaves much of a GPU idle
FUNCTIONS = {
    **OPERATORS,
    "neg": "(-{0})",
    "abs": "tl.abs({0})",
    "max": "tl.maximum({0}, {1}, tl.PropagateNan.ALL)",
    "min": "tl.minimum({0}, {1}, tl.PropagateNan.ALL)",
    **{name: f"tl.{name}({{0}})" for name in ("exp", "log", "erf", "sin", "cos", "floor", "ceil")},
    "sqrt": "tl.sqrt_rn({0})",
    **{name: f"_{name}({{0}}, {{1}})" for name in ("atan2", "copysign", "fmod")},
    "erfc": "_erfc({0})",
    "round": "_round({0})",
    "trunc": "tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))",
    "tanh": "_tanh({0})",
    "log1p": "_log1p({0})",
    "expm1": "_expm1({0})",
    "pow": "_pow({0}, {1})",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "not": "(~{0})",
    "where": "tl.where({0}, {1}, {2})",
    "float": "{0}.to(tl.float32)",
    "int": "{0}.to(tl.int64)",
    "reduce_sum": "tl.sum(tl.where(inside, {0}, 0.0), 1)[:, None]",
    "reduce_prod": "tl.reduce(tl.where(inside, {0}, 1.0), 1, _times)[:, None]",
    "reduce_min_int": f"tl.min(tl.where(inside, {{0}}, {MOST_INT}), 1)[:, None]",
    "scan_sum": "tl.cumsum(tl.where(inside, {0}, 0.0), 1, reverse={reverse})",
    "scan_prod": "tl.cumprod(tl.where(inside, {0}, 1.0), 1, reverse={reverse})",
    "reduce_max": "_largest(tl.where(inside, {0}, -float('inf')))",
    "reduce_min": "-_largest(tl.where(inside, -{0}, -float('inf')))",
    "mean_of": "{0}_mean",
    "squares_of": "{0}_squares",
}
# of what tl lacks, written out where it is used
HELPERS = {
    "_tanh": '''
@triton.jit
def _tanh(x):
    """By its series below 0.1, where 1 - 2 / (e^2|x| + 1) has lost its digits."""
    z = x * x
    small = x * (1 + z * (-0.33333333 + z * (0.13333334 - z * 0.05396825)))
    large = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(tl.abs(x) < 0.1, small, tl.where(x < 0, -large, large))
''',
    "_log1p": '''
@triton.jit
def _log1p(x):
    """log(1 + x), corrected by what 1 + x has lost (Kahan)."""
    u = 1 + x
    return tl.where(u == 1, x, tl.where(u == float("inf"), u, tl.log(u) * (x / (u - 1))))
''',
    "_expm1": '''
@triton.jit
def _expm1(x):
    """By its series below 0.1."""
    small = x * (1 + x * (0.5 + x * (0.16666667 + x * (0.041666667 + x * 0.0083333333))))
    return tl.where(tl.abs(x) < 0.1, small, tl.exp(x) - 1)
''',
    "_pow": '''
@triton.jit
def _pow(x, y):
    """As C has it: below 0 only whole powers are numbers, odd ones negative; 1 to any power is 1, and so is any to 0."""
    x, y = tl.broadcast(tl.cast(x, tl.float32), tl.cast(y, tl.float32))  # one of them may be a literal
    size, is_whole = tl.abs(x), tl.floor(y) == y
    is_odd = is_whole & (2 * tl.floor(y / 2) != y)
    is_one = (y == 0) | (x == 1) | ((size == 1) & (y == y))
    power = tl.where(is_one, 1.0, tl.exp(y * tl.log(size)))
    power = tl.where((x < 0) & (size != float("inf")) & (is_whole == 0), float("nan"), power)
    return tl.where(is_odd & (x.to(tl.int32, bitcast=True) < 0), -power, power)  # -0.0 is below 0, too
''',
    "_copysign": """
@triton.jit
def _copysign(x, y):
    x, y = tl.broadcast(tl.cast(x, tl.float32), tl.cast(y, tl.float32))  # one of them may be a literal
    return tl.where(y.to(tl.int32, bitcast=True) < 0, -tl.abs(x), tl.abs(x))
""",
    "_round": '''
@triton.jit
def _round(x):
    """Half to even, as a sum is rounded whose last bit counts ones: 2^23 and x. From there on all are whole."""
    size = tl.abs(x)
    return _copysign(tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size), x)
''',
    "_fmod": '''
@triton.jit
def _fmod(x, y):
    """In steps: of a quotient below 2^29 the whole part, and what it leaves, are exact in float64."""
    x, y = tl.broadcast(tl.cast(x, tl.float32), tl.cast(y, tl.float32))  # one of them may be a literal
    left, size = tl.abs(x).to(tl.float64), tl.abs(y).to(tl.float64)
    many = size * 7.237005577332262e75  # 2^252
    for _ in tl.static_range(10):
        left -= tl.floor(left / many) * many
        many *= 3.725290298461914e-09  # 2^-28
    is_all = (tl.abs(x) < float("inf")) & (tl.abs(y) == float("inf"))
    return tl.where(is_all, x, _copysign(left.to(tl.float32), x))
''',
    "_atan2": '''
@triton.jit
def _atan2(y, x):
    """As in elements.hpp."""
    y, x = tl.broadcast(tl.cast(y, tl.float32), tl.cast(x, tl.float32))  # one of them may be a literal
    scale = tl.where((tl.abs(x) > 1e38) | (tl.abs(y) > 1e38), 0.25, 1.0)
    a, b = tl.abs(y) * scale, tl.abs(x) * scale
    large, small = tl.where(a > b, a, b), tl.where(a > b, b, a)
    is_far, is_alike = small > 0.41421356 * large, a == b  # also of two zeros, or two infinities
    top, below = tl.where(is_far, small - large, small), tl.where(is_far, small + large, large)
    t = tl.where(is_alike, 0.0, tl.div_rn(top, tl.where(is_alike, 1.0, below)))
    z = t * t
    p = ((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1
    r = p * z * t + t + tl.where(is_far | (is_alike & (a > 0)), 0.78539816, 0.0)
    r = tl.where(a > b, 1.57079633 - r, r)
    r = tl.where(x.to(tl.int32, bitcast=True) < 0, 3.14159265 - r, r)
    return tl.where((x != x) | (y != y), float("nan"), _copysign(r, y))
''',
    "_erfc": '''
@triton.jit
def _erfc(x):
    """As in elements.hpp."""
    a = tl.minimum(tl.abs(x), 11.0, tl.PropagateNan.ALL)
    r = (a - 3) / (a + 3)
    p = -0.000267186231
    p = p * r - 0.000775183376
    p = p * r + 0.00200325786
    p = p * r + 0.00256655854
    p = p * r - 0.0237984844
    p = p * r + 0.0682957619
    p = p * r - 0.119270802
    p = p * r + 0.129646435
    p = p * r - 0.0475624092
    p = p * r - 0.135621145
    p = p * r + 1.25300801
    high = (a.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    y = tl.exp(-high * high) * tl.exp((high - a) * (high + a)) * (p / (1 + 2 * a))
    return tl.where(x < 0, 2 - y, y)
''',
    "_times": """
@triton.jit
def _times(a, b):
    return a * b
""",
    "_larger": """
@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, tl.PropagateNan.ALL)
""",
    "_largest": '''
@triton.jit
def _largest(x):
    """Of each row; NaN where there is one."""
    return tl.reduce(x, 1, _larger)[:, None]
''',
    "_moments": '''
@triton.jit
def _moments(count, mean, squares):
    """Of all together: how many, their mean, and the squares about it (Chan, Golub and LeVeque)."""
    n = tl.sum(count, 0)
    whole = tl.sum(count * mean, 0) / tl.maximum(n, 1.0)
    return n, whole, tl.sum(squares + count * (mean - whole) * (mean - whole), 0)
''',
}
# of a scan: what it begins with, how a block of it is made, what the block adds to all so far, and how that is joined on
SCANNED = {
    "scan_sum": ("0.0", "tl.cumsum({0}, 0, reverse={1})", "tl.sum({0}, 0)", "+"),
    "scan_prod": ("1.0", "tl.cumprod({0}, 0, reverse={1})", "tl.reduce({0}, 0, _times)", "*"),
}
WHOLE = {
    "reduce_sum": "tl.sum({0}, 0)",
    "reduce_prod": "tl.reduce({0}, 0, _times)",
    "reduce_min_int": "tl.min({0}, 0)",
}
MOMENTS = ("count", "mean", "squares")
WELFORD = (  # an element more, in each column (Welford)
    "{0}_count += tl.where(inside, 1.0, 0.0)",
    "{0}_off = tl.where(inside, {1} - {0}_mean, 0.0)",
    "{0}_mean += {0}_off / tl.maximum({0}_count, 1.0)",
    "{0}_squares += {0}_off * tl.where(inside, {1} - {0}_mean, 0.0)",
)
FILE = '''"""{title}

Written from the model's graph; every size in it is the model's.
"""

import torch
import triton
import triton.language as tl

KERNEL_TYPE = "{name}"
BACKEND = "triton"
TUNABLES = {tunables}

{constants}
{helpers}

{kernels}


STRIDES = {strides}


{laid_out}

def kernel_fn({parameters}) -> {returned}:
    """{shapes}"""
    inputs = [_laid_out(x, stride) for x, stride in zip(({names},), STRIDES)]
    {made}
    {launch}
    return {results}
'''
BY_BLOCK = {
    "tunables": '{"BLOCK": [256, 512, 1024, 2048, 4096], "NUM_WARPS": [2, 4, 8]}',
    "constants": "BLOCK = 1024  # elements of a program\nNUM_WARPS = 4",
    "sizes": "BLOCK: tl.constexpr",
}
BY_TILE = {
    "tunables": '{"WIDTH": [16, 32, 64, 128], "HEIGHT": [16, 32, 64, 128], "NUM_WARPS": [2, 4, 8]}',
    "constants": "WIDTH, HEIGHT = 64, 64  # elements of a program, along two dims\nNUM_WARPS = 8",
    "sizes": "WIDTH: tl.constexpr, HEIGHT: tl.constexpr",
}
BY_ROW = {
    "tunables": '{"PROGRAM_ELEMENTS": [1024, 2048, 4096, 8192], "NUM_WARPS": [2, 4, 8, 16]}',
    "constants": "PROGRAM_ELEMENTS = 2048  # narrower rows share a program\nNUM_WARPS = {warps}",
    "sizes": "ROWS: tl.constexpr, COLUMNS: tl.constexpr",
}


BY_WALK = {
    "tunables": '{"BLOCK": [1024, 2048, 4096, 8192], "NUM_WARPS": [4, 8, 16, 32]}',
    "constants": "BLOCK = 4096  # columns that a program takes at a time\nNUM_WARPS = 16",
    "sizes": "BLOCK: tl.constexpr",
}
BY_PARTS = {
    "tunables": '{"BLOCK": [512, 1024, 2048, 4096], "PARTS": [4, 8, 16, 32], "NUM_WARPS": [4, 8, 16]}',
    "constants": "BLOCK = {block}  # columns that a program takes at a time\nPARTS = {parts}  # of a row\nNUM_WARPS = 4",
    "sizes": "BLOCK: tl.constexpr, PARTS: tl.constexpr",
}


def write(name: str, title: str, lowered: Lowered, inputs: Sequence[TensorSpec]) -> dict[str, str]:
    """Kernel files by their stems: for rows that no program can hold two, with one program a row and with several."""
    loops = loops_of(lowered)
    whole = _file(name, title, lowered, loops, inputs)
    # parts leave what they come to in float32, and know nothing of what comes before them
    has_no_parts = lowered.scans or any(e.op == "reduce_min_int" for e in lowered.expressions)
    if not lowered.reduced or math.prod(loops.columns) <= HELD or has_no_parts:
        return {"triton_kernel": whole}
    parts = _file(name, title, lowered, loops, inputs, in_parts=True)
    if math.prod(loops.rows) < FEW_ROWS:
        return {"triton_kernel": parts, "triton_rows": whole}
    return {"triton_kernel": whole, "triton_parts": parts}


def _file(
    name: str,
    title: str,
    lowered: Lowered,
    loops: Loops,
    inputs: Sequence[TensorSpec],
    in_parts: bool = False,
) -> str:
    width, rows = math.prod(loops.columns), math.prod(loops.rows)
    elements, walks, across = math.prod(loops.sizes), bool(lowered.reduced) and width > HELD, read_across(lowered, loops)
    form = BY_PARTS if in_parts else BY_WALK if walks else BY_ROW if lowered.reduced else BY_BLOCK
    form = form if across is None else BY_TILE
    results = ", ".join(result_names(lowered.results))
    pointers = ", ".join(f"x{i}" for i in range(len(inputs)))

    def kernel(name: str, body: Sequence[str], partial: str = "") -> str:
        lines = "\n".join("    " + line for line in body)
        return f"@triton.jit\ndef {name}({pointers}, {results}, {partial}{form['sizes']}):\n{lines}"

    if in_parts:
        parts = _Parts(with_moments(lowered), loops)
        bodies = parts.bodies()
        kernels = "\n\n\n".join(kernel(name, body, "partial, ") for name, body in bodies.items())
        calls = [
            f"{name}[({rows}, PARTS)](*inputs, {results}, partial, BLOCK=BLOCK, PARTS=PARTS, num_warps=NUM_WARPS)"
            for name in bodies
        ]
        partial = f"partial = torch.empty(({parts.slots}, {rows}, PARTS), dtype=torch.float32, device=input_0.device)"
        launch = "\n    ".join([partial, *calls])
    elif walks:
        kernels = kernel("_kernel", _Walk(lowered, loops).lines())
        launch = f"_kernel[({rows},)](*inputs, {results}, BLOCK=BLOCK, num_warps=NUM_WARPS)"
    elif lowered.reduced:
        kernels, block = kernel("_kernel", _body(lowered, loops)), 1 << (width - 1).bit_length()
        launch = (
            f"rows = max(PROGRAM_ELEMENTS // {block}, 1)\n    "
            f"_kernel[(-(-{rows} // rows),)](*inputs, {results}, ROWS=rows, COLUMNS={block}, num_warps=NUM_WARPS)"
        )
    elif across is not None:
        kernels, of = kernel("_kernel", _body(lowered, loops, across)), loops.sizes
        tiles = f"-(-{of[-1]} // WIDTH) * -(-{of[across]} // HEIGHT) * {elements // (of[-1] * of[across])}"
        launch = f"_kernel[({tiles},)](*inputs, {results}, WIDTH=WIDTH, HEIGHT=HEIGHT, num_warps=NUM_WARPS)"
    else:
        kernels = kernel("_kernel", _body(lowered, loops))
        launch = f"_kernel[(-(-{elements} // BLOCK),)](*inputs, {results}, BLOCK=BLOCK, num_warps=NUM_WARPS)"
    called = {helper for helper in HELPERS if re.search(rf"\b{helper}\b", kernels)}
    called |= {helper for helper in HELPERS if any(re.search(rf"\b{helper}\b", HELPERS[one]) for one in called)}
    helpers = "".join("\n" + text for helper, text in HELPERS.items() if helper in called)
    names = [f"input_{i}" for i in range(len(inputs))]
    return FILE.format(
        title=title,
        name=name,
        tunables=form["tunables"],
        constants=form["constants"].format(
            warps=min(max(width // 512, 2), 16),
            parts=(parts := _parts(width)),
            block=2048 if width <= 2048 * parts else 4096,
        ),
        helpers=helpers,
        kernels=kernels,
        strides=repr(tuple(t.strides for t in inputs)),
        laid_out=LAID_OUT,
        parameters=", ".join(f"{n}: torch.Tensor" for n in names),
        names=", ".join(names),
        shapes=in_words(names, inputs, [result.spec for result in lowered.results]),
        returned=returned(lowered.results),
        made=made(lowered.results, ", device=input_0.device"),
        results=results,
        launch=launch,
    )


def _parts(width: int) -> int:
    """Of a row, for parts of 2048 columns or more: a program takes its part at once where it can (fastest on an H100)."""
    return next((parts for parts in (4, 8, 16) if width <= 2048 * parts), 32)


def number(e: Expression) -> str:
    v = e.data
    return repr(v) if not isinstance(v, float) or math.isfinite(v) else f"float('{v}')"


class _Walk:
    """A program a row, which it walks through in blocks: a pass for each level of reductions, and one that writes."""

    def __init__(self, lowered: Lowered, loops: Loops):
        self.lowered, self.loops, self.varying = lowered, loops, varying(lowered)
        self.index = [f"i{d}" for d in range(len(loops.sizes))]
        self.first, self.end = "0", str(math.prod(loops.columns))
        self.row = self._writer("t")

    def lines(self) -> list[str]:
        passes = [line for n, found in enumerate(levels(self.lowered)) for line in self._pass(n, found)]
        return [*self._row_of(), *passes, *self._results()]

    def _row_of(self) -> list[str]:
        rows = self.loops.rows
        return [f"row = tl.program_id(0){_wide(self.loops)}", *_indices("row", rows, self.index[: len(rows)])]

    def _results(self, mask: str = "") -> list[str]:
        """mask: of the stores of results that are one number a row."""
        results = list(zip(result_names(self.lowered.results), self.lowered.results, self.loops.results))
        inner = [r for i, r in enumerate(results) if self.loops.in_columns(i)]
        before = self.row.same_along_row([result.expression for _, result, _ in inner], self.varying)
        once, stores, loop = [], [], self._writer("c", self.row.known)
        for y, result, strides in results:
            writer, lines = (loop, stores) if (y, result, strides) in inner else (self.row, once)
            text, at = writer.text(result.expression), place(self.index, strides)
            lines += [*writer.take(), _store(y, at, text, "inside" if writer is loop else mask)]
        return [*before, *once, *(self._along_row(stores, loop) if inner else ())]

    def _writer(self, prefix: str, known: Mapping[Expression, str] | None = None) -> Writer:
        functions = FUNCTIONS | dict.fromkeys(SCANNED, "{0}")
        return Writer(functions, number, self._declared, self._load, prefix, dict(known or {}))

    def _declared(self, name: str, text: str, e: Expression) -> list[str]:
        if not is_scan(e):
            return _assigned(name, text, e)
        start, block, whole, join = SCANNED[e.op]
        return [
            f"{name}_terms = tl.where(inside, {text}, {start})",
            f"{name} = {name}_total {join} {block.format(f'{name}_terms', e.data)}",
            f"{name}_total = {name}_total {join} {whole.format(f'{name}_terms')}",
        ]

    def _load(self, e: Expression, *operands: str) -> str:
        at = place(self.index, self.loops.strides[e], e.data[2])
        return _loaded(e, at, "inside" if e in self.varying else "", *operands)

    def _pass(self, n: int, reductions: Sequence[Expression]) -> list[str]:
        lines = self._accumulated(n, reductions)
        return [*lines, *(_combined(e, name := self.row.known[e], _states(e, name)) for e in reductions)]

    def _accumulated(self, n: int, reductions: Sequence[Expression]) -> list[str]:
        """Statements after which a block has, for each reduction of one level, what it comes to column by column."""
        before = self.row.same_along_row(reductions, self.varying)
        starts, inner, loop = [], [], self._writer("c", self.row.known)
        for k, e in enumerate(reductions):
            name, operand = f"r{n}_{k}", loop.text(e.operands[0])
            inner += loop.take()
            if e.op == "reduce_sum":
                starts.append(f"{name} = tl.zeros((BLOCK,), tl.float32)")
                inner.append(f"{name} += tl.where(inside, {operand}, 0.0)")
            elif e.op == "reduce_prod":
                starts.append(f"{name} = tl.full((BLOCK,), 1.0, tl.float32)")
                inner.append(f"{name} *= tl.where(inside, {operand}, 1.0)")
            elif e.op == "reduce_min_int":
                starts.append(f"{name} = tl.full((BLOCK,), {MOST_INT}, tl.int64)")
                inner.append(f"{name} = tl.minimum({name}, tl.where(inside, {operand}, {MOST_INT}))")
            elif e.op == "reduce_moments":
                starts += [f"{state} = tl.zeros((BLOCK,), tl.float32)" for state in _states(e, name)]
                inner += [line.format(name, operand) for line in WELFORD]
            else:  # the least is the largest of what is negated
                sign = "-" * (e.op == "reduce_min")
                starts.append(f"{name} = tl.full((BLOCK,), -float('inf'), tl.float32)")
                inner.append(f"{name} = _larger({name}, tl.where(inside, {sign}{operand}, -float('inf')))")
            self.row.known[e] = name
        return [*before, *starts, *self._along_row(inner, loop)]

    def _along_row(self, inner: Sequence[str], loop: Writer) -> list[str]:
        columns, split = self.loops.columns, len(self.loops.rows)
        totals = [f"{name}_total = tl.full((), {SCANNED[e.op][0]}, tl.float32)" for name, e in loop.scans()]
        first = [f"start = ({self.end} - 1) // BLOCK * BLOCK - before"] if self.lowered.is_backwards else []
        lines = [
            *first,
            "column = start + tl.arange(0, BLOCK)",
            f"inside = column < {self.end}",
            *_indices("column", columns, self.index[split:]),
            *inner,
        ]
        start = "before" if first else "start"
        return [*totals, f"for {start} in range({self.first}, {self.end}, BLOCK):", *("    " + line for line in lines)]


class _Parts(_Walk):
    """A program a part of a row, and a kernel a level: each leaves what its part comes to, which the next adds up."""

    def bodies(self) -> dict[str, list[str]]:
        """The kernels in the order in which they are launched."""
        found, reduced = {}, levels(self.lowered)
        self.first, self.end = "first", "end"
        states = [(e, state) for reductions in reduced for e in reductions for state in _states(e, "")]
        self.slot = {one: slot for slot, one in enumerate(states)}
        for n, reductions in enumerate(reduced):
            self.row = self._writer("t")
            lines = [*self._head(), *self._known(reduced[:n]), *self._accumulated(n, reductions)]
            for e in reductions:
                name = self.row.known[e]
                lines.append(_combined(e, name, _states(e, name), last=False))
                lines += [f"tl.store(partial + {self._at(e, s)} + part, {name}{s})" for s in _states(e, "")]
            found[f"_level{n}"] = lines
        self.row = self._writer("t")
        found["_write"] = [*self._head(), *self._known(reduced), *self._results("part == 0")]
        return found

    @property
    def slots(self) -> int:
        return len(self.slot)

    def _head(self) -> list[str]:
        width = math.prod(self.loops.columns)
        return [
            *self._row_of(),
            "part = tl.program_id(1)",
            f"size = tl.cdiv({width}, PARTS * BLOCK) * BLOCK",
            "first = part * size",
            f"end = tl.minimum(first + size, {width})",
        ]

    def _known(self, levels: Sequence[Sequence[Expression]]) -> list[str]:
        lines = []
        for n, reductions in enumerate(levels):
            for k, e in enumerate(reductions):
                name = self.row.known[e] = f"r{n}_{k}"
                parts = [f"tl.load(partial + {self._at(e, s)} + tl.arange(0, PARTS))" for s in _states(e, "")]
                lines.append(_combined(e, name, parts))
        return lines

    def _at(self, e: Expression, state: str) -> str:
        return f"({self.slot[e, state] * math.prod(self.loops.rows)} + row) * PARTS"


def _states(e: Expression, name: str) -> list[str]:
    """What a reduction goes on with from block to block, by name."""
    return [f"{name}_{state}" for state in MOMENTS] if e.op == "reduce_moments" else [name]


def _combined(e: Expression, name: str, states: Sequence[str], last: bool = True) -> str:
    """A statement by which a reduction's states, each a block, become one; at the last a minimum gets its sign back."""
    if e.op == "reduce_moments":
        return f"{', '.join(_states(e, name))} = _moments({', '.join(states)})"
    if e.op in WHOLE:
        return f"{name} = {WHOLE[e.op].format(states[0])}"
    return f"{name} = {'-' * (last and e.op == 'reduce_min')}tl.reduce({states[0]}, 0, _larger)"


def _wide(loops: Loops) -> str:
    return ".to(tl.int64)" if math.prod(loops.sizes) * 2 > 2**31 else ""


def _assigned(name: str, text: str, e: Expression) -> list[str]:
    return [f"{name} = {text}"]


def _loaded(e: Expression, at: str, mask: str, *operands: str) -> str:
    """An index, or a loaded element as the kind that arithmetic takes it for.

    From beyond the ends nothing is read: of floating-point numbers that is NaN.
    """
    if e.op == "index":
        return at
    conditions, other = [one for one in (mask, *operands) if one], "other=0" * bool(operands)
    if e.op == "gather":
        there, *guard = operands
        at = f"{at} + {there}"
        block = f"tl.where({mask}, {there}, -1)" if mask else there  # what is one number for all becomes a block of them
        conditions = [f"{block} >= 0", f"{block} <= {e.data[4]}", *guard]
        other = "other=0" if guard or e.kind != FLOAT else 'other=float("nan")'
    masks = " & ".join(f"({one})" if len(conditions) > 1 else one for one in conditions)
    options = [f"x{e.data[0]} + {at}" if at != "0" else f"x{e.data[0]}", masks, other]
    text = f"tl.load({', '.join(filter(None, options))})"
    return f"({text} != 0)" if e.kind == BOOL else f"{text}.to({'tl.float32' if e.kind == FLOAT else 'tl.int64'})"


def _body(lowered: Lowered, loops: Loops, across: int | None = None) -> list[str]:
    split, sizes = len(loops.rows), loops.sizes
    index = [f"i{d}" for d in range(len(sizes))]
    wide = _wide(loops)
    if lowered.reduced:
        lines = [
            f"row = (tl.program_id(0){wide} * ROWS + tl.arange(0, ROWS))[:, None]",
            "column = tl.arange(0, COLUMNS)[None, :]",
            f"inside = (row < {math.prod(loops.rows)}) & (column < {math.prod(loops.columns)})",
            *_indices("row", loops.rows, index[:split]),
            *_indices("column", loops.columns, index[split:]),
        ]
        masks = {
            f"row < {math.prod(loops.rows)}": range(split),
            f"column < {math.prod(loops.columns)}": range(split, len(sizes)),
        }
    elif across is not None:
        others = [d for d in range(len(sizes) - 1) if d != across]
        lines = [
            f"widths, heights = tl.cdiv({sizes[-1]}, WIDTH), tl.cdiv({sizes[across]}, HEIGHT)",
            f"tile = tl.program_id(0){wide}",
            f"{index[-1]} = (tile % widths * WIDTH + tl.arange(0, WIDTH))[None, :]",
            f"{index[across]} = (tile // widths % heights * HEIGHT + tl.arange(0, HEIGHT))[:, None]",
            f"inside = ({index[-1]} < {sizes[-1]}) & ({index[across]} < {sizes[across]})",
            *(["others = tile // widths // heights"] if others else ()),
            *_indices("others", [sizes[d] for d in others], [index[d] for d in others]),
        ]
        masks = {f"{index[d]} < {sizes[d]}": [d] for d in (across, len(sizes) - 1)}
    else:
        lines = [
            f"at = tl.program_id(0){wide} * BLOCK + tl.arange(0, BLOCK)",
            f"inside = at < {math.prod(sizes)}",
            *_indices("at", sizes, index),
        ]
        masks = {"inside": range(len(sizes))}

    def mask(strides: Sequence[int]) -> str:
        """That what is walked through so is in the tensor."""
        needed = [one for one, dims in masks.items() if any(strides[d] for d in dims)]
        return "inside" if len(needed) > 1 else "".join(needed)

    def walked(e: Expression) -> list[bool]:
        """The loops on which it depends, by where it goes and by what says so."""
        own = loops.strides[e] if e.op in PLACED else [False] * len(loops.sizes)
        return [any(each) for each in zip(own, *map(walked, e.operands))]

    def load(e: Expression, *operands: str) -> str:
        strides = walked(e) if e.op == "gather" else loops.strides[e]
        return _loaded(e, place(index, loops.strides[e], e.data[2]), mask(strides), *operands)

    functions = FUNCTIONS | {op: FUNCTIONS[op].replace("{reverse}", str(lowered.is_backwards)) for op in SCANNED}
    writer = Writer(functions, number, _assigned, load)
    for i, (y, result) in enumerate(zip(result_names(lowered.results), lowered.results)):
        text = writer.text(result.expression)
        written = "inside" if loops.in_columns(i) or not lowered.reduced else next(iter(masks))
        at = place(index, loops.results[i])
        if not any(loops.results[i][: split if lowered.reduced else None]):  # of one row: in a block of them all the same
            at = f"{'row' if lowered.reduced else 'at'} + {at}"
        lines += [*writer.take(), _store(y, at, text, written)]
    return lines


def _store(y: str, place: str, text: str, mask: str) -> str:
    return f"tl.store({y} + {place}, tl.cast({text}, {y}.dtype.element_ty){', ' * bool(mask)}{mask})"


def _indices(of: str, sizes: Sequence[int], names: Sequence[str]) -> list[str]:
    lines, below = [], 1
    for d in reversed(range(len(sizes))):
        quotient = f"{of} // {below}" if below > 1 else of
        lines.append(f"{names[d]} = {quotient}{f' % {sizes[d]}' if d else ''}")
        below *= sizes[d]
    return lines

"""A lowered region in C++: a loop over rows, a pass over a row for each level of reductions, and one that writes."""

import math
from collections.abc import Sequence

import torch

from autokernel.model.regions.lowering import BOOL, FLOAT, Expression, Lowered
from autokernel.model.regions.writing import Writer, levels, loops_of
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
    **{op: f"({{0}} {sign} {{1}})" for op, sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"))},
    **{op: f"({{0}} {sign} {{1}})" for op, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))},
    "neg": "(-{0})",
    "abs": "ak_abs({0})",
    "max": "ak_max({0}, {1})",
    "min": "ak_min({0}, {1})",
    "exp": "ak_exp({0})",
    "tanh": "ak_tanh({0})",
    "erf": "ak_erf({0})",
    "sqrt": "__builtin_sqrtf({0})",
    **{name: f"std::{name}({{0}})" for name in ("log", "sin", "cos", "floor", "ceil", "log1p", "expm1")},
    "pow": "std::pow({0}, {1})",
    "and": "({0} && {1})",
    "or": "({0} || {1})",
    "not": "(!{0})",
    "where": "({0} ? {1} : {2})",
    "float": "float({0})",
    "int": "int64_t({0})",
}
DECLARED = {FLOAT: "float", BOOL: "bool", "int": "int64_t"}

FILE = '''"""{title}

Written from the model's graph; every size in it is the model's.
"""

import torch

from autokernel.build import cpp_function

KERNEL_TYPE = "{name}"
BACKEND = "cpp"
TUNABLES = {{"BLOCK": [1024, 4096, 16384], "PARALLEL_FROM": [4096, 16384, 65536]}}

BLOCK = 4096  # columns that a thread takes at a time, where rows are independent of each other in every column
PARALLEL_FROM = 16384  # elements from which threads pay

SOURCE = r"""
#include <autokernel.hpp>
#include <elements.hpp>

{code}
"""

_run = cpp_function(SOURCE, "run", "{signature}", BLOCK=BLOCK, PARALLEL_FROM=PARALLEL_FROM)
STRIDES = {strides}


def _laid_out(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """x in the strides that the code above was written for."""
    return x if x.stride() == stride else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def kernel_fn({parameters}) -> torch.Tensor:
    """{shapes}"""
    inputs = [_laid_out(x, stride) for x, stride in zip(({names},), STRIDES)]
    y = torch.empty({shape}, dtype=torch.{dtype})
    _run(*(x.data_ptr() for x in inputs), y.data_ptr())
    return y
'''


def write(name: str, title: str, lowered: Lowered, inputs: Sequence[TensorSpec], output: TensorSpec) -> str:
    """A kernel file."""
    names = [f"input_{i}" for i in range(len(inputs))]
    shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in zip(names, inputs))
    return FILE.format(
        title=title,
        name=name,
        code=_code(lowered, inputs, output),
        signature="p" * len(inputs) + "p",
        strides=repr(tuple(t.strides for t in inputs)),
        parameters=", ".join(f"{n}: torch.Tensor" for n in names),
        names=", ".join(names),
        shapes=f"{shapes} -> {list(output.shape)}, contiguous.",
        shape=tuple(output.shape),
        dtype=str(output.dtype).removeprefix("torch."),
    )


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


def _code(lowered: Lowered, inputs: Sequence[TensorSpec], output: TensorSpec) -> str:
    loops = loops_of(lowered)
    split, rows = len(loops.rows), math.prod(loops.rows)
    index = [f"i{d}" for d in range(len(loops.sizes))]

    def load(e: Expression) -> str:
        place, strides = e.data[0], loops.strides[e]
        terms = [i if s == 1 else f"{i} * {s}" for i, s in zip(index, strides) if s]
        element = f"x{place}[{' + '.join(terms) or 0}]"
        return f"{element} != 0" if e.kind == BOOL else f"float({element})" if e.kind == FLOAT else f"int64_t({element})"

    def declare(name: str, text: str, e: Expression) -> str:
        return f"const {DECLARED[e.kind]} {name} = {text};"

    row = Writer(FUNCTIONS, number, declare, load)
    in_columns = {e for e in lowered.expressions if any(loops.strides[e][split:])} if False else _varying(lowered, loops)
    body: list[str] = []
    for n, reductions in enumerate(levels(lowered)):
        _row_level(row, lowered, in_columns, reductions)
        body += row.take()
        accumulators, inner = [], Writer(FUNCTIONS, number, declare, load, "c", dict(row.known))
        body_inner: list[str] = []
        sums, largest, smallest = [], [], []
        for k, e in enumerate(reductions):
            acc = f"r{n}_{k}"
            operand = inner.text(e.operands[0])
            body_inner += inner.take()
            if e.op == "reduce_sum":
                accumulators.append(f"float {acc} = 0;")
                body_inner.append(f"{acc} += {operand};")
                sums.append(acc)
            else:
                sign, start, of = (">", "-INFINITY", largest) if e.op == "reduce_max" else ("<", "INFINITY", smallest)
                accumulators += [f"float {acc} = {start};", f"float {acc}_nan = 0;"]
                body_inner += [f"{acc} = {operand} {sign} {acc} ? {operand} : {acc};", f"{acc}_nan += {operand} != {operand};"]
                of.append(acc)
                sums.append(f"{acc}_nan")
            row.known[e] = acc
        clauses = [f"reduction({op} : {', '.join(v)})" for op, v in (("+", sums), ("max", largest), ("min", smallest)) if v]
        body += accumulators + _nested(loops, index, split, body_inner, " ".join(clauses))
        body += [f"if ({a}_nan > 0) {a} = NAN;" for a in (*largest, *smallest)]
    result_varies = lowered.result in in_columns
    inner = Writer(FUNCTIONS, number, declare, load, "c", row.known if not result_varies else {})
    if result_varies:
        _row_level(row, lowered, in_columns, [lowered.result])
        body += row.take()
        inner.known = dict(row.known)
    text = inner.text(lowered.result)
    terms = [i if s == 1 else f"{i} * {s}" for i, s in zip(index, loops.output) if s]
    store = [*inner.take(), f"y[{' + '.join(terms) or 0}] = {TYPES[output.dtype]}({text});"]
    blocked = not lowered.reduced
    body += _nested(loops, index, split, store, "", blocked) if result_varies or blocked else store
    rows_of = _row_indices(loops, index, split)
    count = f"{rows} * BLOCKS" if blocked else str(rows)
    head = [f"constexpr int64_t BLOCKS = ({loops.columns[-1]} + BLOCK - 1) / BLOCK;"] if blocked else []
    head.append(f"#pragma omp parallel for schedule(static) if ({math.prod(loops.sizes)}LL >= PARALLEL_FROM)")
    head.append(f"for (int64_t job = 0; job < {count}; ++job) {{")
    at = ["const int64_t row = job / BLOCKS, start = job % BLOCKS * BLOCK;", f"const int64_t end = std::min<int64_t>(start + BLOCK, {loops.columns[-1]});"]
    at = at if blocked else ["const int64_t row = job;"]
    unused = ["(void)row;"] if not loops.rows else []
    pointers = ", ".join(f"const {TYPES[t.dtype]}* __restrict x{i}" for i, t in enumerate(inputs))
    lines = [*head, *("    " + line for line in [*at, *unused, *rows_of, *body]), "}", "return 0;"]
    signature = f'extern "C" int run({pointers}, {TYPES[output.dtype]}* __restrict y) {{'
    return "\n".join([signature, *("    " + line for line in lines), "}"])


def _varying(lowered: Lowered, loops: object) -> set[Expression]:
    """What differs from column to column of a row."""
    columns = set(lowered.reduced) if lowered.reduced else set(range(len(lowered.sizes)))
    return {e for e in lowered.expressions if e.dims & columns}


def _row_level(row: Writer, lowered: Lowered, in_columns: set[Expression], ends: Sequence[Expression]) -> None:
    """Write what `ends` need that is the same all along a row."""

    def visit(e: Expression) -> None:
        if e in row.known or e.op == "number":
            return
        if e not in in_columns and not e.op.startswith("reduce_"):
            row.text(e)
            return
        for operand in e.operands:
            visit(operand)

    for e in ends:
        for operand in e.operands or ():
            visit(operand)


def _row_indices(loops: object, index: Sequence[str], split: int) -> list[str]:
    lines, below = [], 1
    for d in reversed(range(split)):
        quotient = f"row / {below}" if below > 1 else "row"
        lines.append(f"const int64_t {index[d]} = {quotient}{f' % {loops.rows[d]}' if d else ''};")
        below *= loops.rows[d]
    return lines


def _nested(loops: object, index: Sequence[str], split: int, inner: list[str], clauses: str, blocked: bool = False) -> list[str]:
    """Loops over the columns around `inner`."""
    lines: list[str] = []
    columns = loops.columns
    for d, n in enumerate(columns):
        i, is_last = index[split + d], d == len(columns) - 1
        if is_last:
            lines.append("    " * d + f"#pragma omp simd {clauses}".rstrip())
        bounds = ("start", "end") if blocked and is_last else ("0", str(n))
        lines.append("    " * d + f"for (int64_t {i} = {bounds[0]}; {i} < {bounds[1]}; ++{i}) {{")
    lines += ["    " * len(columns) + line for line in inner]
    return lines + ["    " * d + "}" for d in reversed(range(len(columns)))]

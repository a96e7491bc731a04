"""A lowered region in Triton: elements by the block, or whole rows where there are sums along them."""

import math
from collections.abc import Sequence

from autokernel.model.regions.lowering import BOOL, FLOAT, Expression, Lowered, Unsupported
from autokernel.model.regions.writing import OPERATORS, Loops, Writer, loops_of
from autokernel.spec import TensorSpec

HELD = 32768  # columns of a row that a program can hold
FUNCTIONS = {
    **OPERATORS,
    "neg": "(-{0})",
    "abs": "tl.abs({0})",
    "max": "tl.maximum({0}, {1}, tl.PropagateNan.ALL)",
    "min": "tl.minimum({0}, {1}, tl.PropagateNan.ALL)",
    **{name: f"tl.{name}({{0}})" for name in ("exp", "log", "erf", "sin", "cos", "floor", "ceil")},
    "sqrt": "tl.sqrt_rn({0})",
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
    "reduce_max": "_largest(tl.where(inside, {0}, -float('inf')))",
    "reduce_min": "-_largest(tl.where(inside, -{0}, -float('inf')))",
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
    """Of x >= 0; NaN below."""
    return tl.exp(y * tl.log(x))
''',
    "_largest": '''
@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, tl.PropagateNan.ALL)


@triton.jit
def _largest(x):
    """Of each row; NaN where there is one."""
    return tl.reduce(x, 1, _larger)[:, None]
''',
}
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

@triton.jit
def _kernel({pointers}, y, {sizes}):
{body}


STRIDES = {strides}


def _laid_out(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """x in the strides that the code above was written for."""
    return x if x.stride() == stride else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def kernel_fn({parameters}) -> torch.Tensor:
    """{shapes}"""
    inputs = [_laid_out(x, stride) for x, stride in zip(({names},), STRIDES)]
    y = torch.empty({shape}, dtype=torch.{dtype}, device=input_0.device)
    {launch}
    return y
'''
BY_BLOCK = {
    "tunables": '{"BLOCK": [256, 512, 1024, 2048, 4096], "NUM_WARPS": [2, 4, 8]}',
    "constants": "BLOCK = 1024  # elements of a program\nNUM_WARPS = 4\n",
    "sizes": "BLOCK: tl.constexpr",
}
BY_ROW = {
    "tunables": '{"PROGRAM_ELEMENTS": [1024, 2048, 4096, 8192], "NUM_WARPS": [2, 4, 8, 16]}',
    "constants": "PROGRAM_ELEMENTS = 2048  # narrower rows share a program\nNUM_WARPS = {warps}\n",
    "sizes": "ROWS: tl.constexpr, COLUMNS: tl.constexpr",
}


def write(name: str, title: str, lowered: Lowered, inputs: Sequence[TensorSpec], output: TensorSpec) -> str:
    """A kernel file. Raises Unsupported for rows that no program can hold."""
    loops = loops_of(lowered)
    width = math.prod(loops.columns)
    if lowered.reduced and width > HELD:
        raise Unsupported(f"rows of {width} elements are more than one Triton program holds")
    elements = math.prod(loops.sizes)
    body = _body(lowered, loops, output)
    helpers = "".join(text for helper, text in HELPERS.items() if any(f"{helper}(" in line for line in body))
    form = BY_ROW if lowered.reduced else BY_BLOCK
    if lowered.reduced:
        block = 1 << (width - 1).bit_length()
        rows = math.prod(loops.rows)
        launch = (
            f"rows = max(PROGRAM_ELEMENTS // {block}, 1)\n    "
            f"_kernel[(-(-{rows} // rows),)](*inputs, y, ROWS=rows, COLUMNS={block}, num_warps=NUM_WARPS)"
        )
    else:
        launch = f"_kernel[(-(-{elements} // BLOCK),)](*inputs, y, BLOCK=BLOCK, num_warps=NUM_WARPS)"
    names = [f"input_{i}" for i in range(len(inputs))]
    shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in zip(names, inputs))
    return FILE.format(
        title=title,
        name=name,
        tunables=form["tunables"],
        constants=form["constants"].format(warps=min(max(width // 512, 2), 16)),
        sizes=form["sizes"],
        helpers=helpers,
        pointers=", ".join(f"x{i}" for i in range(len(inputs))),
        body="\n".join("    " + line for line in body),
        strides=repr(tuple(t.strides for t in inputs)),
        parameters=", ".join(f"{n}: torch.Tensor" for n in names),
        names=", ".join(names),
        shapes=f"{shapes} -> {list(output.shape)}, contiguous.",
        shape=tuple(output.shape),
        dtype=str(output.dtype).removeprefix("torch."),
        launch=launch,
    )


def number(e: Expression) -> str:
    v = e.data
    return repr(v) if not isinstance(v, float) or math.isfinite(v) else f"float('{v}')"


def _body(lowered: Lowered, loops: Loops, output: TensorSpec) -> list[str]:
    split, whole = len(loops.rows), math.prod(loops.sizes)
    index = [f"i{d}" for d in range(len(loops.sizes))]
    wide = ".to(tl.int64)" if whole * 2 > 2**31 else ""
    if lowered.reduced:
        lines = [
            f"row = (tl.program_id(0){wide} * ROWS + tl.arange(0, ROWS))[:, None]",
            "column = tl.arange(0, COLUMNS)[None, :]",
            f"inside = (row < {math.prod(loops.rows)}) & (column < {math.prod(loops.columns)})",
            *_indices("row", loops.rows, index[:split]),
            *_indices("column", loops.columns, index[split:]),
        ]
    else:
        lines = [
            f"at = tl.program_id(0){wide} * BLOCK + tl.arange(0, BLOCK)",
            f"inside = at < {whole}",
            *_indices("at", loops.sizes, index),
        ]

    def offset(strides: Sequence[int]) -> tuple[str, bool]:
        terms = [i if s == 1 else f"{i} * {s}" for i, s in zip(index, strides) if s]
        return " + ".join(terms) or "0", bool(terms)

    def load(e: Expression) -> str:
        place, strides = e.data[0], loops.strides[e]
        at, varies = offset(strides)
        if not varies:
            text = f"tl.load(x{place})"
        else:
            in_rows = lowered.reduced and not any(strides[split:])
            mask = (
                f"row < {math.prod(loops.rows)}"
                if in_rows
                else "inside"
                if not lowered.reduced or any(strides[:split])
                else f"column < {math.prod(loops.columns)}"
            )
            text = f"tl.load(x{place} + {at}, {mask})"
        return (
            f"({text} != 0)" if e.kind == BOOL else f"{text}.to(tl.float32)" if e.kind == FLOAT else f"{text}.to(tl.int64)"
        )

    writer = Writer(FUNCTIONS, number, lambda name, text, e: f"{name} = {text}", load)
    result = writer.text(lowered.result)
    lines += writer.take()
    at, _ = offset(loops.output)
    is_row = lowered.reduced and not any(loops.output[split:])
    mask = f"row < {math.prod(loops.rows)}" if is_row else "inside"
    cast = f"({result}).to(y.dtype.element_ty)"
    return [*lines, f"tl.store(y + {at}, {cast}, {mask})"]


def _indices(of: str, sizes: Sequence[int], names: Sequence[str]) -> list[str]:
    lines, below = [], 1
    for d in reversed(range(len(sizes))):
        quotient = f"{of} // {below}" if below > 1 else of
        lines.append(f"{names[d]} = {quotient}{f' % {sizes[d]}' if d else ''}")
        below *= sizes[d]
    return lines

"""What a region computes, as expressions: functions of an index. And what they come to, computed by PyTorch."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autokernel.spec import TensorSpec

FLOAT, INT, BOOL = "float", "int", "bool"
# as PyTorch has them
OWN_NAMES = ("exp", "log", "tanh", "erf", "erfc", "sin", "cos", "log1p", "expm1", "sqrt", "floor", "ceil", "trunc", "round")
OWN_PAIRS = ("fmod", "copysign", "atan2")


@dataclass(frozen=True)
class Limit:
    """An input's integers are places in a dim: from `lowest`, below zero from its end, to less than `end`."""

    index: int  # of the input
    lowest: int
    end: int


@dataclass(frozen=True, eq=False)
class Expression:
    """A function of the index. op: "load", "number", "index", "reduce_sum" or "scan_sum" and their like, or a function.

    A load of a condition is 0 where that is false; a "gather" is a load from as far on as its first operand says.
    A scan is a reduction of all up to an index, in the order of the row.
    """

    op: str
    operands: tuple["Expression", ...]
    kind: str  # FLOAT, INT or BOOL
    dims: frozenset[int]  # on whose index it depends
    # Of a load (input, stride per dim, offset), of a gather its Limits and the last of its places, too; of an index (None,
    # step per dim, start); of a number its value; of a scan whether it begins at the end of the row.
    data: Any = None


@dataclass(frozen=True)
class Result:
    """An expression that is written to memory: at every index, or, where it ends in a reduction, once for each row."""

    expression: Expression
    spec: TensorSpec
    strides: tuple[int, ...]  # by dim of the index space; 0 along those that it does not have


@dataclass(frozen=True)
class Lowered:
    """One region: its results for the indices of `sizes`."""

    sizes: tuple[int, ...]
    reduced: tuple[int, ...]  # dims that every reduction runs over; empty if there is none
    results: tuple[Result, ...]
    inputs: tuple[Node, ...]

    @property
    def scans(self) -> list[Expression]:
        return [e for e in self.expressions if is_scan(e)]

    @property
    def limits(self) -> list[Limit]:
        """Of the inputs that say where elements are."""
        return list(dict.fromkeys(limit for e in self.expressions if e.op == "gather" for limit in e.data[3]))

    @property
    def is_backwards(self) -> bool:
        """Whether rows are walked through from their ends."""
        return any(e.data for e in self.scans)

    @property
    def expressions(self) -> list[Expression]:
        """All of them, operands first."""
        found: dict[Expression, None] = {}

        def visit(e: Expression) -> None:
            if e not in found:
                for operand in e.operands:
                    visit(operand)
                found[e] = None

        for result in self.results:
            visit(result.expression)
        return list(found)


def is_scan(e: Expression) -> bool:
    return e.op.startswith("scan_")


def evaluate(lowered: Lowered, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The region's results as the expressions say, computed by PyTorch in the inputs' dtypes, in their own strides."""
    known: dict[Expression, Any] = {}
    for e in lowered.expressions:
        known[e] = _evaluated(e, [known[operand] for operand in e.operands], inputs, lowered)
    return tuple(_written(result, _tensor(known[result.expression], inputs), lowered) for result in lowered.results)


def _tensor(v: Any, inputs: Sequence[Tensor]) -> Tensor:
    """A number as a tensor, of floating-point ones in the inputs' dtype."""
    dtype = next(x.dtype for x in inputs if x.is_floating_point())
    return torch.as_tensor(v, dtype=dtype if isinstance(v, float) else None)


def _written(result: Result, numbers: Tensor, lowered: Lowered) -> Tensor:
    sizes = [n if stride else 1 for n, stride in zip(lowered.sizes, result.strides)]
    y = torch.empty_strided(result.spec.shape, result.spec.strides, dtype=numbers.dtype)
    y.as_strided(sizes, result.strides).copy_(numbers.expand(sizes))
    return y


def _evaluated(e: Expression, operands: list[Any], inputs: Sequence[Tensor], lowered: Lowered) -> Any:
    if e.op == "number":
        return e.data
    if e.op == "index":
        return _at(e, lowered)
    if e.op in ("load", "gather"):
        memory = inputs[e.data[0]]
        whole = memory.as_strided((memory.untyped_storage().nbytes() // memory.itemsize,), (1,), 0)
        at = _at(e, lowered) + (operands.pop(0) if e.op == "gather" else 0)
        loaded = whole[(at + memory.storage_offset()).clamp(0, len(whole) - 1)]
        return torch.where(operands[0], loaded, torch.zeros_like(loaded)) if operands else loaded
    if e.op.startswith("reduce_"):
        operand = _tensor(operands[0], inputs).expand(lowered.sizes)
        return ROWS[e.op](operand, lowered.reduced)
    if is_scan(e):
        return _scanned(_tensor(operands[0], inputs).expand(lowered.sizes), e, lowered.reduced)
    return FUNCTIONS[e.op](*operands)


def _at(e: Expression, lowered: Lowered) -> Tensor:
    """The places that a load or an index goes to, of the dims on which they depend."""
    _, steps, at = e.data[:3]
    for d, step in enumerate(steps):
        shape = [n if d == i else 1 for i, n in enumerate(lowered.sizes)]
        at = at + (
            step * torch.arange(lowered.sizes[d]).view(shape) if step else torch.zeros([1] * len(shape), dtype=torch.int64)
        )
    return torch.as_tensor(at)


def _scanned(x: Tensor, e: Expression, dims: Sequence[int]) -> Tensor:
    ends = list(range(-len(dims), 0))
    rows = x.movedim(list(dims), ends)
    flat = rows.flatten(-len(dims))
    flat = flat.flip(-1) if e.data else flat
    made = {"scan_sum": torch.cumsum, "scan_prod": torch.cumprod}[e.op](flat, -1)
    return (made.flip(-1) if e.data else made).view(rows.shape).movedim(ends, list(dims))


def _product(x: Tensor, dims: Sequence[int]) -> Tensor:
    for d in dims:
        x = x.prod(d, keepdim=True)
    return x


ROWS: Mapping[str, Callable[[Tensor, Sequence[int]], Tensor]] = {
    "reduce_sum": lambda x, dims: x.sum(dims, keepdim=True),
    "reduce_prod": _product,
    "reduce_max": lambda x, dims: x.amax(dims, keepdim=True),
    "reduce_min": lambda x, dims: x.amin(dims, keepdim=True),
    "reduce_min_int": lambda x, dims: x.amin(dims, keepdim=True),
}


def _of_two(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: function(*_tensors(a, b))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in OWN_NAMES},
    **{name: _of_two(getattr(torch, name)) for name in OWN_PAIRS},
    "float": lambda x: x if x.is_floating_point() else x.to(torch.float64),
    "int": lambda x: x.to(torch.int64),
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": lambda a, b: a / b,
    "neg": operator.neg,
    "abs": abs,
    "pow": operator.pow,
    "max": lambda a, b: torch.maximum(*_tensors(a, b)),
    "min": lambda a, b: torch.minimum(*_tensors(a, b)),
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "and": operator.and_,
    "or": operator.or_,
    "not": torch.logical_not,
    "where": lambda c, a, b: torch.where(c, *_tensors(a, b)),
}


def of_numbers(op: str, kind: str, numbers: Sequence[Any]) -> Any:
    """What a function comes to, in float64: languages of kernels have some for tensors alone."""
    result = FUNCTIONS[op](*(torch.tensor(v, dtype=torch.float64 if isinstance(v, float) else None) for v in numbers))
    return {FLOAT: float, INT: int, BOOL: bool}[kind](result)


def _tensors(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    numbers = torch.bool if isinstance(a, bool) and isinstance(b, bool) else torch.float64
    dtype = next((v.dtype for v in (a, b) if isinstance(v, Tensor)), numbers)
    return torch.as_tensor(a, dtype=dtype), torch.as_tensor(b, dtype=dtype)

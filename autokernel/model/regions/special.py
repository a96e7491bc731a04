"""More operations on single elements: whole parts, remainders, signs, what is not finite, angles, hyperbolic functions."""

import math
from collections.abc import Callable
from typing import Any

from torch.fx import Node

from autokernel.model.nodes import value
from autokernel.model.regions.elementwise import LN2, arithmetic, sigmoid
from autokernel.model.regions.expressions import BOOL, FLOAT, OWN_PAIRS, Expression
from autokernel.model.regions.lowering import (
    Groups,
    Lowering,
    Rule,
    Unsupported,
    arguments,
    as_kind,
    choose,
    elementwise,
    kind_of,
    rule,
)
from autokernel.model.regions.spec import bounds_of_numbers

PAIR = "self", "other"


def of_floats(function: Callable[..., Expression], *names: str) -> Rule:
    """A rule for an operator whose arguments `names`, and whose result, are floats: of integers PyTorch has other ones."""
    made = elementwise(lambda low, *operands: function(low, *map(low.as_float, operands)), *names)

    def of_float(low: Lowering, node: Node, groups: Groups) -> Expression:
        if kind_of(value(node).dtype, node) != FLOAT:
            raise Unsupported("whole parts and remainders of integers")
        return made(low, node, groups)

    return of_float


def compared(low: Lowering, op: str, a: Expression, b: Expression | float) -> Expression:
    return low.make(op, a, b if isinstance(b, Expression) else low.number(float(b)), kind=BOOL)


def all_of(low: Lowering, *conditions: Expression) -> Expression:
    first, *others = conditions
    for condition in others:
        first = low.make("and", first, condition, kind=BOOL)
    return first


def chosen(low: Lowering, condition: Expression, a: Expression | float, b: Expression | float) -> Expression:
    a, b = (v if isinstance(v, Expression) else low.number(float(v)) for v in (a, b))
    return choose(low, condition, a, b, FLOAT)


def _either(low: Lowering, a: Expression, b: Expression) -> Expression:
    return low.make("or", a, b, kind=BOOL)


def _is_nan(low: Lowering, x: Expression) -> Expression:
    return compared(low, "ne", x, x)


def _negative(low: Lowering, x: Expression) -> Expression:
    return compared(low, "lt", x, 0)


# --- whole parts and remainders ---

rule("fix")(of_floats(lambda low, x: low.make("trunc", x), "self"))
rule("frac")(of_floats(lambda low, x: low.make("sub", x, low.make("trunc", x)), "self"))
for name in OWN_PAIRS:
    rule(f"{name}.Tensor", f"{name}.Scalar", name)(of_floats(lambda low, a, b, op=name: low.make(op, a, b), *PAIR))


@rule("round.decimals")
def _rounded(low: Lowering, node: Node, groups: Groups) -> Expression:
    x, decimals = low.as_float(low.operand(node, node.args[0], groups)), arguments(node)["decimals"]
    if kind_of(value(node).dtype, node) != FLOAT:
        raise Unsupported("whole parts and remainders of integers")
    many = low.number(10.0 ** abs(decimals))
    there, back = ("mul", "div") if decimals > 0 else ("div", "mul")
    return low.make(back, low.make("round", low.make(there, x, many)), many)


def _remainder(low: Lowering, a: Expression, b: Expression) -> Expression:
    """With the sign of the divisor."""
    left = low.make("fmod", a, b)
    is_other = low.make("ne", _negative(low, b), _negative(low, left), kind=BOOL)
    return chosen(low, all_of(low, compared(low, "ne", left, 0), is_other), low.make("add", left, b), left)


def _floor_divided(low: Lowering, a: Expression, b: Expression) -> Expression:
    """As PyTorch has it: the quotient of what the remainder leaves, which is whole but for its rounding."""
    left, quotient = low.make("fmod", a, b), low.make("div", a, b)
    whole = low.make("div", low.make("sub", a, left), b)
    is_other = low.make("ne", _negative(low, b), _negative(low, left), kind=BOOL)
    is_below = all_of(low, compared(low, "ne", left, 0), is_other)
    whole = chosen(low, is_below, low.make("sub", whole, low.number(1.0)), whole)
    floor = low.make("floor", whole)
    is_above = compared(low, "gt", low.make("sub", whole, floor), 0.5)
    floor = chosen(low, is_above, low.make("add", floor, low.number(1.0)), floor)
    zero = low.make("copysign", low.number(0.0), quotient)
    return chosen(low, compared(low, "eq", b, 0), quotient, chosen(low, compared(low, "eq", whole, 0), zero, floor))


REMAINDERS = "remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor"
rule(*REMAINDERS)(of_floats(_remainder, *PAIR))
rule("floor_divide", "floor_divide.Scalar")(of_floats(_floor_divided, *PAIR))


@rule("div.Tensor_mode", "div.Scalar_mode")
def _divided(low: Lowering, node: Node, groups: Groups) -> Expression:
    by_mode = {
        None: lambda low, a, b: low.make("div", a, b),
        "trunc": lambda low, a, b: low.make("trunc", low.make("div", a, b)),
        "floor": _floor_divided,
    }
    return of_floats(by_mode[arguments(node)["rounding_mode"]], *PAIR)(low, node, groups)


# --- signs, and what is not finite ---


def _sign(low: Lowering, x: Expression) -> Expression:
    """0 of NaN."""
    return chosen(low, compared(low, "gt", x, 0), 1, chosen(low, _negative(low, x), -1, 0))


def _step(low: Lowering, x: Expression, at_zero: Expression) -> Expression:
    return chosen(low, compared(low, "eq", x, 0), at_zero, chosen(low, compared(low, "gt", x, 0), 1, 0))


def _predicate(function: Callable[[Lowering, Expression], Expression]) -> Rule:
    return elementwise(lambda low, x: function(low, low.as_float(x)), "self")


rule("sign", "sgn")(of_floats(_sign, "self"))
rule("isfinite")(_predicate(lambda low, x: compared(low, "lt", low.make("abs", x), math.inf)))
rule("isposinf")(_predicate(lambda low, x: compared(low, "eq", x, math.inf)))
rule("isneginf")(_predicate(lambda low, x: compared(low, "eq", x, -math.inf)))
rule("signbit")(_predicate(lambda low, x: _negative(low, low.make("copysign", low.number(1.0), x))))
rule("heaviside")(of_floats(_step, "self", "values"))
for name, op in (("fmax", "gt"), ("fmin", "lt")):  # the other one of NaN
    rule(name)(
        of_floats(lambda low, a, b, op=op: chosen(low, _either(low, _is_nan(low, a), compared(low, op, b, a)), b, a), *PAIR)
    )


@rule("nan_to_num")
def _numbers_alone(low: Lowering, node: Node, groups: Groups) -> Expression:
    dtype = value(node).dtype
    x = low.operand(node, node.args[0], groups)
    if kind_of(dtype, node) != FLOAT:
        return x
    nan, above, below = bounds_of_numbers(node, dtype)
    finite = chosen(low, compared(low, "eq", x, math.inf), above, chosen(low, compared(low, "eq", x, -math.inf), below, x))
    return chosen(low, _is_nan(low, x), nan, finite)


# --- logarithms ---


def _added_logs(low: Lowering, a: Expression, b: Expression, base: float = math.e) -> Expression:
    """log(base^a + base^b) = max + log(1 + base^-|a - b|), and of two like infinities that."""
    scale = low.number(math.log(base))
    off = low.make("neg", low.make("abs", low.make("sub", a, b)))
    rest = low.make("log1p", low.make("exp", off if base == math.e else low.make("mul", off, scale)))
    rest = rest if base == math.e else low.make("div", rest, scale)
    is_one = all_of(low, compared(low, "eq", a, b), compared(low, "eq", low.make("abs", a), math.inf))
    return chosen(low, is_one, a, low.make("add", low.make("max", a, b), rest))


def _times_log(log: str) -> Callable[..., Expression]:
    """x log(y): 0 where x is 0, but for NaN."""

    def function(low: Lowering, x: Expression, y: Expression) -> Expression:
        product = chosen(low, compared(low, "eq", x, 0), 0, low.make("mul", x, low.make(log, y)))
        return chosen(low, _is_nan(low, y), math.nan, product)

    return function


def _entropy(low: Lowering, x: Expression) -> Expression:
    product = low.make("mul", low.make("neg", x), low.make("log", x))
    outside = chosen(low, compared(low, "eq", x, 0), 0, chosen(low, _is_nan(low, x), x, -math.inf))
    return chosen(low, compared(low, "gt", x, 0), product, outside)


@rule("logit", "special_logit")
def _logit(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    x, eps = low.as_float(low.operand(node, given["self"], groups)), given["eps"]
    if eps is not None and eps >= 0:
        x = low.make("min", low.make("max", x, low.number(float(eps))), low.number(1 - float(eps)))
    return low.make("log", low.make("div", x, low.make("sub", low.number(1.0), x)))


LN10 = math.log(10)
rule("log10")(of_floats(lambda low, x: low.make("div", low.make("log", x), low.number(LN10)), "self"))
rule("logaddexp")(of_floats(_added_logs, *PAIR))
rule("logaddexp2")(of_floats(lambda low, a, b: _added_logs(low, a, b, 2.0), *PAIR))
XLOGY = "xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other", "special_xlogy"
rule(*XLOGY)(of_floats(_times_log("log"), *PAIR))
rule("special_xlog1py")(of_floats(_times_log("log1p"), *PAIR))
rule("special_entr")(of_floats(_entropy, "self"))
rule("special_expit")(of_floats(sigmoid, "self"))
rule("special_erfc")(of_floats(lambda low, x: low.make("erfc", x), "self"))


# --- angles and hyperbolic functions ---


def _leg(low: Lowering, x: Expression) -> Expression:
    """sqrt(1 - x^2)"""
    one = low.number(1.0)
    return low.make("sqrt", low.make("mul", low.make("sub", one, x), low.make("add", one, x)))


def _halves(low: Lowering, x: Expression) -> tuple[Expression, Expression, Expression]:
    """|x|, and e^|x| / 2 as two factors, of which neither overflows before it does."""
    size = low.make("abs", x)
    root = low.make("exp", low.make("mul", low.number(0.5), size))
    return size, root, low.make("mul", low.number(0.5), root)


def _sinh(low: Lowering, x: Expression) -> Expression:
    size, root, half = _halves(low, x)
    grown, one = low.make("expm1", size), low.number(1.0)
    small = low.make("add", grown, low.make("div", grown, low.make("add", grown, one)))
    small = low.make("mul", low.number(0.5), small)
    result = chosen(low, compared(low, "lt", size, 20), small, low.make("mul", root, half))
    return low.make("copysign", result, x)


def _cosh(low: Lowering, x: Expression) -> Expression:
    _, root, half = _halves(low, x)
    rest = low.make("div", low.make("div", low.number(0.5), root), root)
    return low.make("add", low.make("mul", root, half), rest)


def _hypotenuse(low: Lowering, a: Expression, b: Expression) -> Expression:
    """Of the larger times what the smaller adds to 1; infinite beside NaN, too."""
    a, b = low.make("abs", a), low.make("abs", b)
    large, small = low.make("max", a, b), low.make("min", a, b)
    ratio = chosen(low, compared(low, "eq", large, 0), 0, low.make("div", small, large))
    length = low.make("mul", large, low.make("sqrt", low.make("add", low.number(1.0), low.make("mul", ratio, ratio))))
    is_infinite = _either(low, compared(low, "eq", a, math.inf), compared(low, "eq", b, math.inf))
    return chosen(low, is_infinite, math.inf, length)


def _atanh(low: Lowering, x: Expression) -> Expression:
    """log(1 + 2 |x| / (1 - |x|)) / 2, with the sign of x."""
    size = low.make("abs", x)
    ratio = low.make("div", low.make("add", size, size), low.make("sub", low.number(1.0), size))
    return low.make("copysign", low.make("mul", low.number(0.5), low.make("log1p", ratio)), x)


def _asinh(low: Lowering, x: Expression) -> Expression:
    """log(1 + |x| + x^2 / (1 + sqrt(1 + x^2))), and log 2 |x| where nothing else is left."""
    size, one = low.make("abs", x), low.number(1.0)
    square = low.make("mul", x, x)
    root = low.make("add", one, low.make("sqrt", low.make("add", one, square)))
    near = low.make("log1p", low.make("add", size, low.make("div", square, root)))
    far = low.make("add", low.make("log", size), low.number(LN2))
    return low.make("copysign", chosen(low, compared(low, "lt", size, 1e9), near, chosen(low, _is_nan(low, x), x, far)), x)


def _acosh(low: Lowering, x: Expression) -> Expression:
    """log(1 + t + sqrt(t) sqrt(x + 1)), t = x - 1: NaN below 1."""
    one = low.number(1.0)
    t = low.make("sub", x, one)
    root = low.make("mul", low.make("sqrt", t), low.make("sqrt", low.make("add", x, one)))
    far = low.make("add", low.make("log", x), low.number(LN2))
    return chosen(low, compared(low, "gt", x, 1e9), far, low.make("log1p", low.make("add", t, root)))


rule("atan")(of_floats(lambda low, x: low.make("atan2", x, low.number(1.0)), "self"))
rule("asin")(of_floats(lambda low, x: low.make("atan2", x, _leg(low, x)), "self"))
rule("acos")(of_floats(lambda low, x: low.make("atan2", _leg(low, x), x), "self"))
rule("tan")(of_floats(lambda low, x: low.make("div", low.make("sin", x), low.make("cos", x)), "self"))
for name, function in (("sinh", _sinh), ("cosh", _cosh), ("asinh", _asinh), ("acosh", _acosh), ("atanh", _atanh)):
    rule(name)(of_floats(function, "self"))
rule("hypot")(of_floats(_hypotenuse, *PAIR))
rule("deg2rad")(of_floats(lambda low, x: low.make("mul", x, low.number(math.pi / 180)), "self"))
rule("rad2deg")(of_floats(lambda low, x: low.make("mul", x, low.number(180 / math.pi)), "self"))


# --- bounds and activations ---


@rule("clamp.Tensor", "clamp_min.Tensor", "clamp_max.Tensor")
def _clamped(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    result = low.operand(node, given["self"], groups)
    for name, op in (("min", "max"), ("max", "min")):
        if given.get(name) is not None:
            result = arithmetic(low, op, result, low.operand(node, given[name], groups))
    return as_kind(low, result, kind_of(value(node).dtype, node))


@rule("addcdiv")
def _addcdiv(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    x, a, b = (low.as_float(low.operand(node, given[name], groups)) for name in ("self", "tensor1", "tensor2"))
    if given["value"] != 1:
        a = low.make("mul", a, low.number(float(given["value"])))
    return low.make("add", x, low.make("div", a, b))


@rule("rrelu")
def _rrelu(low: Lowering, node: Node, groups: Groups) -> Expression:
    """Out of training the mean slope."""
    given: dict[str, Any] = arguments(node)
    if given["training"]:
        raise Unsupported("random numbers")
    x, slope = low.element(given["self"], groups), low.number((float(given["lower"]) + float(given["upper"])) / 2)
    return chosen(low, compared(low, "gt", x, 0), x, low.make("mul", x, slope))

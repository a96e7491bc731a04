"""Operations on single elements: arithmetic, comparisons, casts and activations."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autokernel.model.nodes import aten, value
from autokernel.model.regions.expressions import BOOL, FLOAT, INT, OWN_NAMES, Expression
from autokernel.model.regions.lowering import (
    MOST_FACTORS,
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

WHOLE_NAMES = {"floor", "ceil", "trunc", "round"}


def _float1(op: str) -> Callable[..., Expression]:
    return lambda low, x: low.make(op, low.as_float(x))


def arithmetic(low: Lowering, op: str, *operands: Expression) -> Expression:
    """In floats where one of them is, else in integers."""
    if any(e.kind == FLOAT for e in operands):
        return low.make(op, *map(low.as_float, operands))
    return low.make(op, *(as_kind(low, e, INT) for e in operands), kind=INT)


def sigmoid(low: Lowering, x: Expression) -> Expression:
    one = low.number(1.0)
    return low.make("div", one, low.make("add", one, low.make("exp", low.make("neg", low.as_float(x)))))


def silu(low: Lowering, x: Expression) -> Expression:
    return low.make("mul", x, sigmoid(low, x))


def relu(low: Lowering, x: Expression) -> Expression:
    return arithmetic(low, "max", x, as_kind(low, low.number(0), x.kind))


def gelu(low: Lowering, x: Expression, tanh: bool) -> Expression:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, or x (1 + erf(x / sqrt(2))) / 2."""
    half = low.make("mul", low.number(0.5), x)
    if tanh:
        cube = low.make("mul", low.number(0.044715), power(low, x, 3))
        inner = low.make("mul", low.number(math.sqrt(2 / math.pi)), low.make("add", x, cube))
    else:
        inner = low.make("mul", x, low.number(math.sqrt(0.5)))
    return low.make("mul", half, low.make("add", low.number(1.0), low.make("tanh" if tanh else "erf", inner)))


def power(low: Lowering, x: Expression, exponent: float) -> Expression:
    """Small whole powers as products: they are defined below 0, too."""
    x, one = low.as_float(x), low.number(1.0)
    size = abs(exponent)
    if size != int(size) and size != 0.5 or size > MOST_FACTORS:
        return low.make("pow", x, low.number(float(exponent)))
    result = low.make("sqrt", x) if size == 0.5 else x if size else one
    for _ in range(int(size) - 1):
        result = low.make("mul", result, x)
    return result if exponent >= 0 else low.make("div", one, result)


def _whole(op: str) -> Callable[..., Expression]:
    """Integers are whole."""
    return lambda low, x: low.make(op, x) if x.kind == FLOAT else x


for name in OWN_NAMES:
    rule(name)(elementwise((_whole if name in WHOLE_NAMES else _float1)(name), "self"))
rule("rsqrt")(elementwise(lambda low, x: power(low, x, -0.5), "self"))
rule("reciprocal")(elementwise(lambda low, x: power(low, x, -1), "self"))
rule("square")(elementwise(lambda low, x: arithmetic(low, "mul", x, x), "self"))
rule("abs")(elementwise(lambda low, x: arithmetic(low, "abs", x), "self"))
rule("neg")(elementwise(lambda low, x: arithmetic(low, "neg", x), "self"))
rule("sigmoid")(elementwise(sigmoid, "self"))
rule("silu")(elementwise(silu, "self"))
rule("relu")(elementwise(relu, "self"))
rule("clone", "contiguous", "alias", "detach", "dropout", "lift_fresh_copy", "positive")(
    lambda low, node, groups: _same(low, node, groups)
)
rule("to.dtype", "_to_copy", "to.dtype_layout", "to.device")(lambda low, node, groups: _cast(low, node, groups))


def _same(low: Lowering, node: Node, groups: Groups) -> Expression:
    if node.target is aten.dropout.default and node.args[2] and node.args[1]:
        raise Unsupported("random numbers")
    return low.element(node.args[0], groups)


def _cast(low: Lowering, node: Node, groups: Groups) -> Expression:
    source = low.element(node.args[0], groups)
    if value(node).device != value(node.args[0]).device and source.op != "number":
        raise Unsupported("a copy to another device")
    return as_kind(low, source, kind_of(value(node).dtype, node))


@rule("gelu")
def _gelu(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    return gelu(low, low.element(given["self"], groups), given["approximate"] == "tanh")


@rule("add.Tensor", "sub.Tensor", "add.Scalar", "sub.Scalar", "rsub.Scalar", "rsub.Tensor")
def _sum(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    a, b = (low.operand(node, given[name], groups) for name in ("self", "other"))
    if node.target.overloadpacket is aten.rsub:  # other - alpha self
        a, b = b, a
    if given["alpha"] != 1:
        b = arithmetic(low, "mul", b, low.number(given["alpha"]))
    result = arithmetic(low, "add" if node.target.overloadpacket is aten.add else "sub", a, b)
    return as_kind(low, result, kind_of(value(node).dtype, node))


def _binary(op: str) -> Callable[..., Expression]:
    return lambda low, a, b: arithmetic(low, op, a, b)


rule("mul.Tensor", "mul.Scalar")(elementwise(_binary("mul"), "self", "other"))
rule("maximum", "max.other")(elementwise(_binary("max"), "self", "other"))
rule("minimum", "min.other")(elementwise(_binary("min"), "self", "other"))
rule("div.Tensor", "div.Scalar", "true_divide.Tensor")(
    elementwise(lambda low, a, b: low.make("div", low.as_float(a), low.as_float(b)), "self", "other")
)


def _compared(op: str) -> Callable[..., Expression]:
    def function(low: Lowering, a: Expression, b: Expression) -> Expression:
        if FLOAT in (a.kind, b.kind):
            return low.make(op, low.as_float(a), low.as_float(b), kind=BOOL)
        return low.make(op, as_kind(low, a, INT), as_kind(low, b, INT), kind=BOOL)

    return function


def _comparison(name: str) -> Rule:
    compared = elementwise(_compared(name), "self", "other")

    def made(low: Lowering, node: Node, groups: Groups) -> Expression:
        a, b = (value(v) if isinstance(v, Node) else v for v in node.args)
        if not all(_is_exact(v, torch.result_type(a, b)) for v in (a, b)):
            raise Unsupported("a comparison that rounds to 16 bits")
        return compared(low, node, groups)

    return made


def _is_exact(v: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor or number is the same where PyTorch compares in `dtype`; float32 is what expressions compare in."""
    if dtype.itemsize > 2 or not dtype.is_floating_point:
        return True
    if isinstance(v, Tensor):
        return v.dtype in (dtype, torch.bool)
    return math.isnan(v) or torch.tensor(v, dtype=dtype).item() == v


for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    rule(f"{name}.Tensor", f"{name}.Scalar")(_comparison(name))


def _logical(op: str) -> Callable[..., Expression]:
    return lambda low, *operands: low.make(op, *(as_kind(low, e, BOOL) for e in operands), kind=BOOL)


rule("logical_not")(elementwise(_logical("not"), "self"))
rule("logical_and")(elementwise(_logical("and"), "self", "other"))
rule("logical_xor")(elementwise(_logical("ne"), "self", "other"))
rule("logical_or")(elementwise(_logical("or"), "self", "other"))


BITS = {op: (f"bitwise_{name}", f"__{name}__") for op, name in (("and", "and"), ("or", "or"), ("ne", "xor"))}


@rule("bitwise_not", *(f"{name}.Tensor" for names in BITS.values() for name in names))
def _bitwise(low: Lowering, node: Node, groups: Groups) -> Expression:
    if value(node).dtype != torch.bool:
        raise Unsupported("bits of integers")
    name = node.target.overloadpacket.__name__
    op = next((op for op, names in BITS.items() if name in names), "not")
    return low.make(op, *(low.operand(node, v, groups) for v in node.args), kind=BOOL)


@rule("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def _power(low: Lowering, node: Node, groups: Groups) -> Expression:
    if kind_of(value(node).dtype, node) != FLOAT:
        raise Unsupported("powers of integers")
    if not isinstance(node.args[0], Node) and node.args[0] < 0:
        raise Unsupported("powers of a number below 0, which most exponents have none of")
    x, exponent = low.as_float(low.operand(node, node.args[0], groups)), node.args[1]
    if isinstance(exponent, Node):
        return low.make("pow", x, low.as_float(low.operand(node, exponent, groups)))
    return power(low, x, exponent)


@rule("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(low: Lowering, node: Node, groups: Groups) -> Expression:
    condition, a, b = (low.operand(node, v, groups) for v in node.args)
    return choose(low, condition, a, b, kind_of(value(node).dtype, node))


@rule("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(low: Lowering, node: Node, groups: Groups) -> Expression:
    x, mask, v = (low.operand(node, v, groups) for v in node.args)
    return choose(low, mask, v, x, kind_of(value(node).dtype, node))


@rule("clamp", "clamp_min", "clamp_max", "hardtanh", "relu6")
def _clamp(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = {"min": 0, "max": 6} | arguments(node) if node.target is aten.relu6.default else arguments(node)
    result = low.element(given["self"], groups)
    for name, op in (("min", "max"), ("max", "min"), ("min_val", "max"), ("max_val", "min")):
        if given.get(name) is not None:
            result = arithmetic(low, op, result, low.operand(node, given[name], groups))
    return as_kind(low, result, kind_of(value(node).dtype, node))


@rule("leaky_relu")
def _leaky_relu(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    x = low.element(given["self"], groups)
    slope = low.make("mul", x, low.number(float(given["negative_slope"])))
    return choose(low, low.make("gt", x, low.number(0.0), kind=BOOL), x, slope, FLOAT)


@rule("hardsigmoid", "hardswish")
def _hard(low: Lowering, node: Node, groups: Groups) -> Expression:
    x = low.element(node.args[0], groups)
    three, zero, six = map(low.number, (3.0, 0.0, 6.0))
    gate = low.make("div", low.make("min", low.make("max", low.make("add", x, three), zero), six), six)
    return gate if node.target is aten.hardsigmoid.default else low.make("mul", x, gate)


LN2 = math.log(2)
rule("exp2")(elementwise(lambda low, x: low.make("exp", low.make("mul", low.as_float(x), low.number(LN2))), "self"))
rule("log2")(elementwise(lambda low, x: low.make("div", low.make("log", low.as_float(x)), low.number(LN2)), "self"))


@rule("addcmul")
def _addcmul(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    x, a, b = (low.operand(node, given[name], groups) for name in ("self", "tensor1", "tensor2"))
    product = arithmetic(low, "mul", a, b)
    if given["value"] != 1:
        product = arithmetic(low, "mul", product, low.number(given["value"]))
    return as_kind(low, arithmetic(low, "add", x, product), kind_of(value(node).dtype, node))


@rule("lerp.Scalar", "lerp.Tensor")
def _lerp(low: Lowering, node: Node, groups: Groups) -> Expression:
    a, b, weight = (low.as_float(low.operand(node, v, groups)) for v in node.args)
    difference, rest = low.make("sub", b, a), low.make("sub", low.number(1.0), weight)
    from_a = low.make("add", a, low.make("mul", weight, difference))
    from_b = low.make("sub", b, low.make("mul", difference, rest))  # which is b itself at a weight of 1
    if weight.op == "number":
        return from_a if abs(weight.data) < 0.5 else from_b
    return choose(low, low.make("lt", low.make("abs", weight), low.number(0.5), kind=BOOL), from_a, from_b, FLOAT)


@rule("mish", "log_sigmoid")
def _smooth(low: Lowering, node: Node, groups: Groups) -> Expression:
    x, zero = low.element(node.args[0], groups), low.number(0.0)
    if node.target is aten.log_sigmoid.default:  # min(x, 0) - log(1 + e^-|x|)
        return low.make("sub", low.make("min", x, zero), _softened(low, x))
    return low.make("mul", x, low.make("tanh", low.make("log1p", low.make("exp", x))))


def _softened(low: Lowering, x: Expression) -> Expression:
    """log(1 + e^-|x|)"""
    return low.make("log1p", low.make("exp", low.make("neg", low.make("abs", x))))


SELU = {"alpha": 1.6732632423543772, "scale": 1.0507009873554805}


@rule("elu", "celu", "selu")
def _exponential(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node) | (SELU if node.target is aten.selu.default else {})
    x, zero = low.element(given["self"], groups), low.number(0.0)
    alpha, scale = low.number(float(given["alpha"])), low.number(float(given.get("scale", 1)))
    below = x
    if node.target is aten.celu.default:
        below = low.make("div", x, alpha)
    elif given.get("input_scale", 1) != 1:
        below = low.make("mul", x, low.number(float(given["input_scale"])))
    curve = low.make("mul", alpha, low.make("expm1", below))
    result = choose(low, low.make("gt", x, zero, kind=BOOL), x, curve, FLOAT)
    return result if scale.data == 1 else low.make("mul", scale, result)


@rule("prelu")
def _prelu(low: Lowering, node: Node, groups: Groups) -> Expression:
    """A slope for each channel, the second dim, or for all."""
    x, weight = low.element(node.args[0], groups), node.args[1]
    is_one = value(weight).numel() == 1
    slope = low.element(weight, ((),) * value(weight).dim() if is_one else (groups[min(1, len(groups) - 1)],))
    return choose(low, low.make("gt", x, low.number(0.0), kind=BOOL), x, low.make("mul", slope, x), FLOAT)


@rule("glu")
def _glu(low: Lowering, node: Node, groups: Groups) -> Expression:
    """The first half of a dim times the sigmoid of the second."""
    source, dim = node.args[0], arguments(node)["dim"] % len(groups)
    half, n = value(node).shape[dim], value(source).shape[dim]
    first, second = ((*groups[:dim], low.shifted(groups[dim], 1, start, n), *groups[dim + 1 :]) for start in (0, half))
    return low.make("mul", low.element(source, first), sigmoid(low, low.element(source, second)))


@rule("softshrink", "hardshrink", "threshold")
def _shrunk(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    x, zero = low.element(given["self"], groups), low.number(0.0)
    if node.target is aten.threshold.default:
        is_below = low.make("le", x, low.number(float(given["threshold"])), kind=BOOL)
        return choose(low, is_below, low.number(float(given["value"])), x, FLOAT)
    limit, other = low.number(float(given["lambd"])), low.number(-float(given["lambd"]))
    above, below = low.make("gt", x, limit, kind=BOOL), low.make("lt", x, other, kind=BOOL)
    if node.target is aten.hardshrink.default:
        is_within = low.make("le", low.make("abs", x), limit, kind=BOOL)
        return choose(low, is_within, zero, x, FLOAT)
    inner = choose(low, below, low.make("add", x, limit), low.make("mul", x, zero), FLOAT)
    return choose(low, above, low.make("sub", x, limit), inner, FLOAT)


rule("isnan")(elementwise(lambda low, x: low.make("ne", low.as_float(x), low.as_float(x), kind=BOOL), "self"))
rule("isinf")(
    elementwise(lambda low, x: low.make("eq", low.make("abs", low.as_float(x)), low.number(math.inf), kind=BOOL), "self")
)


@rule("softplus")
def _softplus(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    x, beta = low.element(given["self"], groups), low.number(float(given["beta"]))
    scaled = low.make("mul", x, beta)
    soft = low.make("div", low.make("log1p", low.make("exp", scaled)), beta)
    return choose(low, low.make("gt", scaled, low.number(float(given["threshold"])), kind=BOOL), x, soft, FLOAT)

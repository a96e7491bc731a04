"""Losses and distances: what they are of single elements, added up over all of them or along a row."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from autokernel.model.nodes import value
from autokernel.model.regions.elementwise import power
from autokernel.model.regions.expressions import BOOL, FLOAT, Expression
from autokernel.model.regions.lowering import Groups, Lowering, Unsupported, arguments, choose, kind_of, rule
from autokernel.model.regions.reductions import one_per_row

NONE, MEAN, SUM = range(3)  # ATen's reductions
Term = Callable[[Lowering, dict[str, Any], Expression, Expression], Expression]  # of an input and its target


def _loss(name: str) -> Callable[[Term], Term]:
    """A rule for an operator with an input, a target and a reduction."""

    def add(term: Term) -> Term:
        def made(low: Lowering, node: Node, groups: Groups) -> Expression:
            given = arguments(node)
            operands = [given.get("self", given.get("input")), given["target"]]
            if any(kind_of(value(v).dtype, node) != FLOAT for v in operands):
                raise Unsupported("a loss of integers")
            shape = torch.broadcast_shapes(*(value(v).shape for v in operands))

            def element(g: Groups) -> Expression:
                return term(low, given, *(_broadcast(low, v, g) for v in operands))

            if given["reduction"] == NONE:
                return element(groups)
            total = low.reduce_over("reduce_sum", (), shape, element)
            count = low.number(float(math.prod(shape)))
            return low.make("div", total, count) if given["reduction"] == MEAN else total

        rule(name)(made)
        return term

    return add


def _broadcast(low: Lowering, v: Node, groups: Groups) -> Expression:
    shape = value(v).shape
    return low.as_float(
        low.element(v, tuple(() if n == 1 else g for n, g in zip(shape, groups[len(groups) - len(shape) :])))
    )


@_loss("mse_loss")
def _squared(low: Lowering, given: dict[str, Any], x: Expression, y: Expression) -> Expression:
    return power(low, low.make("sub", x, y), 2)


@_loss("l1_loss")
def _absolute(low: Lowering, given: dict[str, Any], x: Expression, y: Expression) -> Expression:
    return low.make("abs", low.make("sub", x, y))


@_loss("smooth_l1_loss")
def _smooth(low: Lowering, given: dict[str, Any], x: Expression, y: Expression) -> Expression:
    """d^2 / (2 beta) below beta, d - beta / 2 above."""
    beta, off = given["beta"], _absolute(low, given, x, y)
    if not beta:
        return off
    square = low.make("div", low.make("mul", low.make("mul", low.number(0.5), off), off), low.number(float(beta)))
    linear = low.make("sub", off, low.number(0.5 * beta))
    return choose(low, low.make("lt", off, low.number(float(beta)), kind=BOOL), square, linear, FLOAT)


@_loss("huber_loss")
def _huber(low: Lowering, given: dict[str, Any], x: Expression, y: Expression) -> Expression:
    """d^2 / 2 up to delta, delta (d - delta / 2) above."""
    delta, off = low.number(float(given["delta"])), _absolute(low, given, x, y)
    square = low.make("mul", low.make("mul", low.number(0.5), off), off)
    linear = low.make("mul", delta, low.make("sub", off, low.number(0.5 * given["delta"])))
    return choose(low, low.make("le", off, delta, kind=BOOL), square, linear, FLOAT)


@_loss("kl_div")
def _divergence(low: Lowering, given: dict[str, Any], x: Expression, y: Expression) -> Expression:
    """y (log y - x), where 0 log 0 is 0; of a target that is a logarithm, e^y (y - x)."""
    if given["log_target"]:
        return low.make("mul", low.make("exp", y), low.make("sub", y, x))
    zero = low.number(0.0)
    entropy = choose(low, low.make("eq", y, zero, kind=BOOL), zero, low.make("mul", y, low.make("log", y)), FLOAT)
    return low.make("sub", entropy, low.make("mul", y, x))


@_loss("soft_margin_loss")
def _soft_margin(low: Lowering, given: dict[str, Any], x: Expression, y: Expression) -> Expression:
    return low.make("log1p", low.make("exp", low.make("neg", low.make("mul", x, y))))


@_loss("binary_cross_entropy_with_logits")
def _of_logits(low: Lowering, given: dict[str, Any], x: Expression, y: Expression) -> Expression:
    """(1 - y) x + log(1 + e^-x)"""
    if given["weight"] is not None or given["pos_weight"] is not None:
        raise Unsupported("a weighted loss")
    below = low.make("max", low.make("neg", x), low.number(0.0))
    tail = low.make("log1p", low.make("exp", low.make("neg", low.make("abs", x))))
    rest = low.make("mul", low.make("sub", low.number(1.0), y), x)
    return low.make("add", rest, low.make("add", below, tail))


@rule("cosine_similarity")
def _cosine(low: Lowering, node: Node, groups: Groups) -> Expression:
    given = arguments(node)
    a, b, dim, eps = given["x1"], given["x2"], given["dim"], low.number(float(given["eps"]))
    if value(a).shape != value(b).shape:
        raise Unsupported("rows that are broadcast")
    one = one_per_row(groups, a, [dim], keepdim=False)

    def total(x: Any, y: Any) -> Expression:
        def product(g: Groups) -> Expression:
            return low.make("mul", x(g), y(g))

        return low.reduce("reduce_sum", a, one, [dim], True, product)

    def unit(v: Node) -> Callable[[Groups], Expression]:
        element = lambda g: low.as_float(low.element(v, g))  # noqa: E731
        size = low.make("max", low.make("sqrt", total(element, element)), eps)
        return lambda g: low.make("div", element(g), size)

    return total(unit(a), unit(b))


@rule("pairwise_distance")
def _distance(low: Lowering, node: Node, groups: Groups) -> Expression:
    """The norm of x1 - x2 + eps along the last dim."""
    given = arguments(node)
    operands = a, b = given["x1"], given["x2"]
    if given["p"] not in (1, 2) or value(a).shape != value(b).shape or not value(a).dim():
        raise Unsupported("another distance than that of the 1-norm or the 2-norm")
    one = one_per_row(groups, a, [-1], given["keepdim"])

    def term(g: Groups) -> Expression:
        x, y = (low.as_float(low.element(v, g)) for v in operands)
        off = low.make("add", low.make("sub", x, y), low.number(float(given["eps"])))
        return low.make("abs", off) if given["p"] == 1 else low.make("mul", off, off)

    total = low.reduce("reduce_sum", a, one, [-1], True, term)
    return total if given["p"] == 1 else low.make("sqrt", total)

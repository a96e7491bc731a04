"""Means and squares of a row, in a form that needs fewer passes, or is more exact, than the graph's."""

import math
from collections.abc import Collection
from dataclasses import replace

from autokernel.model.regions.expressions import BOOL, FLOAT, Expression, Lowered

REDUCTIONS = "reduce_sum", "reduce_moments"
ZERO = Expression("number", (), FLOAT, frozenset(), 0.0)


def with_moments(lowered: Lowered) -> Lowered:
    """`lowered` with sum((f - g)^2), g one number a row, as sum((f - mean)^2) + n (mean - g)^2, which is exact for any g.

    A "reduce_moments" of f has its mean and the squares about that, which "mean_of" and "squares_of" take (Welford 1962;
    of parts: Chan, Golub and LeVeque 1979); sum(f) is n times the mean.
    """
    rewriting = _Moments(lowered)
    if not rewriting.squared:
        return lowered
    return replace(lowered, results=tuple(replace(r, expression=rewriting.of(r.expression)) for r in lowered.results))


def with_exact_means(lowered: Lowered) -> Lowered:
    """`lowered` with each mean that a row is squared about as that and the mean of what it leaves of the row.

    Of a row of one number nothing is left then, which 1 / sqrt(eps) would make 300 times as large. The squares are about
    the first of both: about the second they are smaller by next to nothing.
    """
    rewriting = _ExactMeans(lowered)
    if not rewriting.means:
        return lowered
    return replace(lowered, results=tuple(replace(r, expression=rewriting.of(r.expression)) for r in lowered.results))


class _Rewriting:
    """Of a region's expressions, from its results on; each once."""

    def __init__(self, lowered: Lowered):
        n = math.prod(lowered.sizes[d] for d in lowered.reduced)
        self.columns, self.n = frozenset(lowered.reduced), Expression("number", (), FLOAT, frozenset(), float(n))
        self.squares = [found for e in lowered.expressions if (found := self._squares(e))]
        self.made: dict[tuple[str, tuple[Expression, ...]], Expression] = {}
        self.rewritten: dict[Expression, Expression] = {}

    def of(self, e: Expression) -> Expression:
        if e not in self.rewritten:
            self.rewritten[e] = self._rewrite(e)
        return self.rewritten[e]

    def _rewrite(self, e: Expression) -> Expression:
        operands = tuple(map(self.of, e.operands))
        return e if operands == e.operands else replace(e, operands=operands)

    def _is_mean(self, e: Expression, of: Collection[Expression]) -> bool:
        """Whether it is the mean along a row of one of those."""
        return e.op == "div" and self._is_sum(e.operands[0], of) and e.operands[1].data == self.n.data

    def _is_sum(self, e: Expression, of: Collection[Expression]) -> bool:
        return e.op == "reduce_sum" and e.operands[0] in of

    def _squares(self, e: Expression) -> tuple[Expression, Expression] | None:
        """(f, g), if `e` is the sum of (f - g)^2 along a row, and g one number a row."""
        if e.op != "reduce_sum" or e.operands[0].op != "mul" or len(set(e.operands[0].operands)) > 1:
            return None
        f, g = off.operands if (off := e.operands[0].operands[0]).op == "sub" else (off, off)
        return (f, g) if f.dims & self.columns and not g.dims & self.columns else None

    def _make(self, op: str, *operands: Expression) -> Expression:
        """Of floats, or whether they are equal; a reduction is along the columns."""
        dims = frozenset().union(*(e.dims for e in operands)) - (self.columns if op in REDUCTIONS else frozenset())
        return self.made.setdefault((op, operands), Expression(op, operands, BOOL if op == "eq" else FLOAT, dims))


class _Moments(_Rewriting):
    def __init__(self, lowered: Lowered):
        super().__init__(lowered)
        self.squared = {f for f, _ in self.squares}

    def _rewrite(self, e: Expression) -> Expression:
        if found := self._squares(e):
            return self._squares_about(*found)
        if self._is_sum(e, self.squared):
            return self._make("mul", self._of_moments("mean_of", e.operands[0]), self.n)
        if self._is_mean(e, self.squared):
            return self._of_moments("mean_of", e.operands[0].operands[0])
        return super()._rewrite(e)

    def _squares_about(self, f: Expression, g: Expression) -> Expression:
        squares, mean, g = self._of_moments("squares_of", f), self._of_moments("mean_of", f), self.of(g)
        if g is mean:
            return squares
        off = self._make("sub", mean, g)
        return self._make("add", squares, self._make("mul", self.n, self._make("mul", off, off)))

    def _of_moments(self, op: str, f: Expression) -> Expression:
        return self._make(op, self._make("reduce_moments", self.of(f)))


class _ExactMeans(_Rewriting):
    def __init__(self, lowered: Lowered):
        super().__init__(lowered)
        self.means = {g for f, g in self.squares if self._is_mean(g, (f,))}

    def _rewrite(self, e: Expression) -> Expression:
        if (found := self._squares(e)) and found[1] in self.means:
            left = self._left(found[1])
            return self._make("reduce_sum", self._make("mul", left, left))
        if e in self.means:
            return self._make("add", self._mean(e), self._rest(e))
        if e.op == "sub" and e.operands[1] in self.means and e.operands[0] is _row(e.operands[1]):
            return self._make("sub", self._left(e.operands[1]), self._rest(e.operands[1]))
        return super()._rewrite(e)

    def _mean(self, mean: Expression) -> Expression:
        """As the graph has it."""
        return self._make("div", self._make("reduce_sum", self.of(_row(mean))), self.n)

    def _left(self, mean: Expression) -> Expression:
        """What it leaves of the row: of equal numbers equal ones, also where a compiler does not round a product before."""
        return self._make("sub", self.of(_row(mean)), self._mean(mean))

    def _rest(self, mean: Expression) -> Expression:
        """The mean of that, where it is finite."""
        rest = self._make("div", self._make("reduce_sum", self._left(mean)), self.n)
        is_finite = self._make("eq", self._make("sub", rest, rest), ZERO)
        return self._make("where", is_finite, rest, ZERO)


def _row(mean: Expression) -> Expression:
    return mean.operands[0].operands[0]

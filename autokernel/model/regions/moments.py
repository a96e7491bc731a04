"""The sum of a long row and its squares about a number of its own, as moments: a variance in one pass, not two."""

import math
from dataclasses import replace

from autokernel.model.regions.expressions import FLOAT, Expression, Lowered


def with_moments(lowered: Lowered) -> Lowered:
    """`lowered` with sum((f - g)^2), g one number a row, as sum((f - mean)^2) + n (mean - g)^2, which is exact for any g.

    A "reduce_moments" of f has its mean and the squares about that, which "mean_of" and "squares_of" take (Welford 1962;
    of parts: Chan, Golub and LeVeque 1979); sum(f) is n times the mean.
    """
    rewriting = _Rewriting(lowered)
    if not rewriting.squared:
        return lowered
    return replace(lowered, results=tuple(replace(r, expression=rewriting.of(r.expression)) for r in lowered.results))


class _Rewriting:
    def __init__(self, lowered: Lowered):
        n = math.prod(lowered.sizes[d] for d in lowered.reduced)
        self.columns, self.n = frozenset(lowered.reduced), Expression("number", (), FLOAT, frozenset(), float(n))
        self.squared = {found[0] for e in lowered.expressions if (found := self._squares(e))}
        self.made: dict[tuple[str, tuple[Expression, ...]], Expression] = {}
        self.rewritten: dict[Expression, Expression] = {}

    def of(self, e: Expression) -> Expression:
        if e not in self.rewritten:
            self.rewritten[e] = self._rewrite(e)
        return self.rewritten[e]

    def _rewrite(self, e: Expression) -> Expression:
        if found := self._squares(e):
            return self._squares_about(*found)
        if self._is_sum(e):
            return self._make("mul", self._of_moments("mean_of", e.operands[0]), self.n)
        if e.op == "div" and self._is_sum(e.operands[0]) and e.operands[1].data == self.n.data:
            return self._of_moments("mean_of", e.operands[0].operands[0])
        operands = tuple(map(self.of, e.operands))
        return e if operands == e.operands else replace(e, operands=operands)

    def _squares(self, e: Expression) -> tuple[Expression, Expression] | None:
        """(f, g), if `e` is the sum of (f - g)^2 along a row, and g one number a row."""
        if e.op != "reduce_sum" or e.operands[0].op != "mul" or len(set(e.operands[0].operands)) > 1:
            return None
        f, g = off.operands if (off := e.operands[0].operands[0]).op == "sub" else (off, off)
        return (f, g) if f.dims & self.columns and not g.dims & self.columns else None

    def _is_sum(self, e: Expression) -> bool:
        return e.op == "reduce_sum" and e.operands[0] in self.squared

    def _squares_about(self, f: Expression, g: Expression) -> Expression:
        squares, mean, g = self._of_moments("squares_of", f), self._of_moments("mean_of", f), self.of(g)
        if g is mean:
            return squares
        off = self._make("sub", mean, g)
        return self._make("add", squares, self._make("mul", self.n, self._make("mul", off, off)))

    def _of_moments(self, op: str, f: Expression) -> Expression:
        return self._make(op, self._make("reduce_moments", self.of(f)))

    def _make(self, op: str, *operands: Expression) -> Expression:
        """Of floats; a reduction is along the columns."""
        dims = frozenset().union(*(e.dims for e in operands)) - (self.columns if op == "reduce_moments" else frozenset())
        return self.made.setdefault((op, operands), Expression(op, operands, FLOAT, dims))

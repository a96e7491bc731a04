"""Whether nodes of a graph read as a pattern: a small backtracking search, lenient about sizes, dims and dtypes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from autokernel.model.nodes import aten, value
from autokernel.model.patterns import Pattern

COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}


@dataclass(frozen=True)
class Search:
    """The ways to read a node of a model's graph as the result of a pattern's graph."""

    pattern: Pattern
    graph: fx.Graph

    @property
    def result(self) -> Node:
        return next(iter(reversed(self.graph.nodes))).args[0]

    @property
    def size(self) -> int:
        return sum(node.op == "call_function" for node in self.graph.nodes)

    def readings(self, node: Node) -> Iterator[dict[Any, Any]]:
        """Pattern node or name of a number -> what it stands for."""
        return self._match(self.result, node, {})

    def _match(self, ours: Any, theirs: Any, bound: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
        """Each way to extend `bound` so that `ours`, a piece of the pattern, stands for `theirs`."""
        if isinstance(ours, (list, tuple)) and any(isinstance(v, Node) or self._number(v) for v in ours):
            if isinstance(theirs, (list, tuple)) and len(ours) == len(theirs):
                yield from self._match_all(list(zip(ours, theirs)), bound)
        elif not isinstance(ours, Node):
            name = self._number(ours)
            if name is not None and not isinstance(theirs, Node) and bound.get(name, theirs) == theirs:
                yield {**bound, name: theirs}
            elif name is None and _similar(ours, theirs):
                yield bound
        elif ours in bound:
            if bound[ours] is theirs:
                yield bound
        elif isinstance(theirs, Node) and ours.op == "placeholder":
            if isinstance(value(theirs), Tensor):
                yield {**bound, ours: theirs}
        elif isinstance(theirs, Node) and ours.target == theirs.target:
            bound = {**bound, ours: theirs}
            pairs = _paired_arguments(ours, theirs)
            yield from self._match_all(pairs, bound)
            if ours.target in COMMUTATIVE:
                (a, x), (b, y), *rest = pairs
                yield from self._match_all([(a, y), (b, x), *rest], bound)

    def _match_all(self, pairs: list[tuple[Any, Any]], bound: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
        if not pairs:
            yield bound
            return
        for extended in self._match(*pairs[0], bound):
            yield from self._match_all(pairs[1:], extended)

    @staticmethod
    def parameter(key: Any) -> str | None:
        """The parameter of the pattern that a key of a reading means, if it means one."""
        return key.meta.get("parameter") if isinstance(key, Node) else key

    def _number(self, literal: Any) -> str | None:
        is_number = isinstance(literal, (int, float)) and not isinstance(literal, bool)
        return self.pattern.numbers.get(literal) if is_number else None


def _similar(ours: Any, theirs: Any) -> bool:
    """Whether a literal of a pattern may stand for one of a model: only flags, words and odd numbers must agree."""
    if None in (ours, theirs) and isinstance(ours or theirs, (int, float)):
        return False
    if isinstance(ours, (bool, str, float)) or isinstance(theirs, (bool, str)):
        return ours == theirs
    return not isinstance(theirs, Node)


def _paired_arguments(ours: Node, theirs: Node) -> list[tuple[Any, Any]]:
    """Arguments in the order of the operator's schema, defaults filled in."""
    if not isinstance(ours.target, torch._ops.OpOverload):
        return list(zip(ours.args, theirs.args))

    def filled(node: Node) -> list[Any]:
        schema = node.target._schema.arguments
        return [*node.args] + [node.kwargs.get(a.name, a.default_value) for a in schema[len(node.args) :]]

    return list(zip(filled(ours), filled(theirs)))

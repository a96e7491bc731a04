"""Functions that catch what an operator raises: Dynamo leaves their handlers out, and compiled they would catch nothing."""

import ast
import linecache
import re
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

PLACE = re.compile(r'File "(.*)", line (\d+), in ')  # of a node's stack trace, which begins where Dynamo does
# What an operator raises for the numbers in its tensors is none of these; for their shapes it does while it is traced.
OTHERS = {"AttributeError", "ImportError", "KeyError", "ModuleNotFoundError", "NameError", "OSError", "StopIteration"}
OTHERS |= {
    "FileNotFoundError",
    "GeneratorExit",
    "KeyboardInterrupt",
    "NotImplementedError",
    "TypeError",
    "UnboundLocalError",
}
# Operators that may fail for what is in their tensors, and what all their names begin with.
FAILING = {"embedding", "embedding_bag", "gather", "scatter", "take", "take_along_dim", "one_hot", "cross_entropy"}
FAILING |= {"nll_loss", "multinomial", "bincount", "cholesky", "inverse", "put_", "ctc_loss"}
FAMILIES = ("linalg_", "index_", "scatter_", "_assert")


def why_not_compiled(module: GraphModule) -> str | None:
    """Why a function of which Dynamo made a graph is to run as it is, if it is."""
    for node in module.graph.nodes:
        for file, line in _places(node) if _may_fail(node) else ():
            if any(line in lines for lines in _guarded(file)):
                return f"a function that catches errors of {_name(node)} is left as it is"
    return None


def _may_fail(node: Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = _name(node)
    if name in ("getitem", "setitem"):
        return any(map(_is_of_integers, tree_leaves((node.args[1:], node.kwargs))))
    is_custom = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims")
    return is_custom or name in FAILING or name.startswith(FAMILIES)


def _is_of_integers(v: object) -> bool:
    example = v.meta.get("example_value") if isinstance(v, Node) else None
    return isinstance(example, Tensor) and not example.dtype.is_floating_point


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _places(node: Node) -> Iterator[tuple[str, int]]:
    return ((file, int(line)) for file, line in PLACE.findall(node.meta.get("stack_trace") or ""))


@cache
def _guarded(file: str) -> list[range]:
    """The lines of a file in which an error is caught, and not raised again."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # no Python: a cell of a notebook with commands of its shell
        return []
    tries = (node for node in ast.walk(tree) if isinstance(node, ast.Try) and any(map(_catches, node.handlers)))
    return [range(node.body[0].lineno, node.body[-1].end_lineno + 1) for node in tries]


def _catches(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    is_of_others = all(isinstance(kind, ast.Name) and kind.id in OTHERS for kind in kinds)
    return not (is_of_others or _raises_alike(handler.body[-1], kinds))


def _raises_alike(last: ast.stmt, kinds: Sequence[ast.expr | None]) -> bool:
    """Whether a handler for `kinds` ends with the error as it is, or one of its kind that says more."""
    if not isinstance(last, ast.Raise):
        return False
    made = last.exc.func if isinstance(last.exc, ast.Call) else last.exc
    return made is None or len(kinds) == 1 and kinds[0] is not None and ast.dump(made) == ast.dump(kinds[0])

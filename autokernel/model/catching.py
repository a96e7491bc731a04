"""Functions that catch what an operator raises: Dynamo leaves their handlers out, and compiled they would catch nothing."""

import ast
import importlib.util
import inspect
import linecache
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, reduce
from typing import Any

from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
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
FAMILIES = ("linalg_", "_linalg_", "index_", "scatter_", "_assert")
OF_ATEN = {"index", "index_put", "cross_entropy_loss", "_embedding_bag"}  # what ATen calls some of them


def why_not_compiled(module: GraphModule) -> str | None:
    """Why a function of which Dynamo made a graph is to run as it is, if it is."""
    for node in module.graph.nodes:
        for file, line in _places(node) if may_fail(node) else ():
            if any(line in lines for lines in _guarded(file)):
                return f"a function that catches errors of {_name(node)} is left as it is"
    return None


def checks_alone(module: GraphModule) -> str | None:
    """An operator in a graph from Dynamo that may fail, and of which nothing else comes: compilers leave it out."""
    return next((_name(node) for node in module.graph.nodes if may_fail(node) and not _is_used(node)), None)


def _is_used(node: Node) -> bool:
    """Whether something comes of it, such as a write."""
    name = _name(node)
    is_written = name in ("setitem", "backward") or name.endswith("_")
    is_written |= isinstance(node.target, OpOverload) and (node.target._schema.is_mutable or node.is_impure())
    is_end = node.op == "output" or is_written or isinstance(node.target, HigherOrderOperator)
    return is_end or any(map(_is_used, node.users))


def may_fail(node: Node) -> bool:
    """Whether an operator, as Dynamo or as ATen has it, may raise for what is in its tensors."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = _name(node)
    if name in ("getitem", "setitem"):
        return any(map(_is_of_integers, tree_leaves((node.args[1:], node.kwargs))))
    is_custom = isinstance(node.target, OpOverload) and node.target.namespace not in ("aten", "prims")
    return is_custom or name in FAILING | OF_ATEN or name.startswith(FAMILIES)


def _is_of_integers(v: object) -> bool:
    example = v.meta.get("example_value") if isinstance(v, Node) else None
    return isinstance(example, Tensor) and not example.dtype.is_floating_point


def _name(node: Node) -> str:
    if isinstance(node.target, OpOverload):
        return node.target.overloadpacket.__name__
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _places(node: Node) -> Iterator[tuple[str, int]]:
    return ((file, int(line)) for file, line in PLACE.findall(node.meta.get("stack_trace") or ""))


@cache
def _guarded(file: str) -> list[range]:
    """The lines of a file in which an error is caught, and not raised again."""
    names = _names(file)
    bodies = [node.body for node in ast.walk(_tree(file)) if _keeps_errors(node, names)]
    return [range(body[0].lineno, body[-1].end_lineno + 1) for body in bodies]


@cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # no Python: a cell of a notebook with commands of its shell
        return ast.Module([], [])


def _keeps_errors(node: ast.AST, names: "Names", deep: int = 0) -> bool:
    """Whether a statement may keep an error of its body from going on."""
    if isinstance(node, ast.Try):
        return any(map(_catches, node.handlers))
    return isinstance(node, ast.With) and any(_ends_errors(item.context_expr, names, deep) for item in node.items)


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


# --- what a with-statement is given ---------------------------------------------------------------------------------------

Names = Mapping[str, Sequence[Any]]  # of a file: its classes and functions, what is assigned, and what was imported
MAX_DEEP = 8  # from a name to what it stands for


@cache
def _names(file: str) -> Names:
    found: dict[str, list[Any]] = defaultdict(list)
    for node in ast.walk(_tree(file)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name].append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                found[_last_name(target)].append(node.value)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, v in _imported(node, file):
                found[name].append(v)
    return found


def _imported(node: ast.Import | ast.ImportFrom, file: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            shown = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or shown, sys.modules.get(shown)
        return
    relative = "." * node.level + (node.module or "")
    package = _package(file) if node.level else None
    if package or not node.level:
        module = sys.modules.get(importlib.util.resolve_name(relative, package))
        for alias in node.names:
            yield alias.asname or alias.name, _member(module, alias.name)


@cache
def _package(file: str) -> str | None:
    """Of the module that was imported from there."""
    return next((m.__package__ for m in [*sys.modules.values()] if getattr(m, "__file__", None) == file), None)


def _member(owner: Any, name: str) -> Any:
    """As it stands there: to ask for it may run code."""
    return inspect.getattr_static(owner, name, None)


def _last_name(node: ast.expr) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", "")


def _ends_errors(what: Any, names: Names, deep: int = 0) -> bool:
    """Whether a context manager, a class or a function that makes one, or what has its name, may end an error.

    What cannot be found out from the source, such as a parameter or a class of C++, does not.
    """
    if deep > MAX_DEEP:
        return False
    if isinstance(what, ast.Call):
        what = what.func
    if isinstance(what, ast.ClassDef):
        own = [node for node in what.body if isinstance(node, ast.FunctionDef) and node.name == "__exit__"]
        return any(_exit_ends_errors(node, what, names, deep) for node in own or what.bases)
    if isinstance(what, ast.FunctionDef):
        return _makes_what_ends_errors(what, names, deep)
    if isinstance(what, (ast.Name, ast.Attribute)):
        return any(_ends_errors(v, names, deep + 1) for v in _meant(what, names))
    if isinstance(what, ast.AST) or what is None:
        return False
    return _ends_errors_in_its_file(what, deep)


def _exit_ends_errors(node: ast.AST, owner: ast.ClassDef, names: Names, deep: int) -> bool:
    """The same of __exit__(), or of a class that has none, of what it is made from."""
    if not isinstance(node, ast.FunctionDef):
        return _ends_errors(node, names, deep + 1)
    for returned in (n.value for n in ast.walk(node) if isinstance(n, ast.Return)):
        if returned is None or isinstance(returned, ast.Constant) and not returned.value:
            continue
        if not (isinstance(returned, ast.Call) and _last_name(returned.func) == "__exit__"):
            return True
        inner = returned.func.value  # whose __exit__() decides
        of_super = isinstance(inner, ast.Call) and _last_name(inner.func) == "super"
        if any(_ends_errors(v, names, deep + 1) for v in (owner.bases if of_super else [inner])):
            return True
    return False


def _makes_what_ends_errors(function: ast.FunctionDef, names: Names, deep: int) -> bool:
    """The same of a generator that yields while it catches errors, or of a function that returns a context manager."""
    inside = [*ast.walk(function)]
    if any(isinstance(node, ast.Yield) for node in inside):
        kept = [node.body for node in inside if _keeps_errors(node, names, deep + 1)]
        return any(isinstance(node, ast.Yield) for body in kept for part in body for node in ast.walk(part))
    return any(_ends_errors(node.value, names, deep + 1) for node in inside if isinstance(node, ast.Return))


def _meant(node: ast.Name | ast.Attribute, names: Names) -> Sequence[Any]:
    """What a name stands for: of `a.b` what the module `a` has, or, of any other object, all that is called `b` here."""
    *path, root = _path(node)
    modules = [v for v in names.get(root, ()) if inspect.ismodule(v)]
    if path and modules:
        return [reduce(_member, reversed(path), module) for module in modules]
    return names.get(path[0] if path else root, ())


def _path(node: ast.expr) -> list[str]:
    """The names of `a.b.c`, from the last to the first."""
    return [node.attr, *_path(node.value)] if isinstance(node, ast.Attribute) else [_last_name(node)]


def _ends_errors_in_its_file(found: Any, deep: int) -> bool:
    """Of an object that was imported: what its own file says of it."""
    made = inspect.unwrap(found) if callable(found) else type(found)
    try:
        file = inspect.getsourcefile(made)
    except TypeError:  # built in
        return False
    names = _names(file) if file else {}
    return any(_ends_errors(node, names, deep + 1) for node in names.get(made.__name__, ()) if isinstance(node, ast.stmt))

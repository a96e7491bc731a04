"""Traced patterns, kept on disk: to trace them all takes seconds, and every process that looks into a model needs them."""

import hashlib
import json
import operator
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from autokernel.build import default_cache
from autokernel.common.records import replacing

FOLDER = "patterns"  # of the cache
OURS = sorted(Path(__file__).parent.glob("*.py"))  # on whose code depends what a trace comes to
KEPT = 8  # files of a kernel type, the latest: clones and releases of PyTorch in use at a time, each with code of its own
Forms = Sequence[Sequence[fx.Graph]]  # of each pattern the graphs that are searched for


def file_for(patterns: Path, operators: Sequence[str] = ()) -> Path:
    """Where the graphs of this file of patterns are kept: for its contents and its type's, this code and this PyTorch, and
    those operators of other packages that there are."""
    digest = hashlib.sha256(" ".join([torch.__version__, platform.python_version(), *operators]).encode())
    for path in (*sorted(patterns.parent.glob("*.py")), *OURS):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return default_cache() / FOLDER / f"{patterns.parent.name}-{digest.hexdigest()[:20]}.json"


def files() -> list[Path]:
    """All that is kept, of whatever code and PyTorch."""
    return sorted((default_cache() / FOLDER).glob("*.json"))


def clear() -> int:
    """Remove all that is kept; how many files there were."""
    found = files()
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def read(path: Path, count: int) -> Forms | None:
    """The graphs of `count` patterns that were written to `path`; None if they were not, or are no more to be read."""
    try:
        forms = [[_graph(nodes) for nodes in graphs] for graphs in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError):
        return None
    return forms if len(forms) == count else None


def write(path: Path, forms: Forms) -> None:
    """Keep the graphs at `path`, and the latest of those of other code and other releases; not where nothing can be
    written, or something in them has no form for it."""
    try:
        text = json.dumps([[_nodes(graph) for graph in graphs] for graphs in forms])
        with replacing(path) as file:
            file.write(text)
        of_type = path.name.rpartition("-")[0]
        same = [other for other in files() if other.name.rpartition("-")[0] == of_type]
        for old in sorted(same, key=lambda other: other.stat().st_mtime, reverse=True)[KEPT:]:
            old.unlink(missing_ok=True)
    except (OSError, TypeError):
        pass


def _nodes(graph: fx.Graph) -> list[list[Any]]:
    """Each node as [op, target, parameter of the pattern, args, kwargs]. Raises TypeError."""
    index = {node: i for i, node in enumerate(graph.nodes)}

    def encoded(value: Any) -> Any:
        if isinstance(value, Node):
            return {"node": index[value]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, (list, tuple)):
            return [encoded(v) for v in value]
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(f"no form for {type(value)}")

    def target(node: Node) -> str:
        if node.op != "call_function":
            return node.target
        if node.target is operator.getitem:
            return "getitem"
        if isinstance(node.target, torch._ops.OpOverload):
            return str(node.target)
        raise TypeError(f"no form for {node.target}")

    return [
        [
            node.op,
            target(node),
            node.meta.get("parameter"),
            encoded(node.args),
            {k: encoded(v) for k, v in node.kwargs.items()},
        ]
        for node in graph.nodes
    ]


def _graph(nodes: list[list[Any]]) -> fx.Graph:
    graph, made = fx.Graph(), []

    def decoded(value: Any) -> Any:
        if isinstance(value, dict):
            return made[value["node"]] if "node" in value else getattr(torch, value["dtype"])
        return [decoded(v) for v in value] if isinstance(value, list) else value

    for op, name, parameter, args, kwargs in nodes:
        target = _operator(name) if op == "call_function" else name
        node = graph.create_node(op, target, tuple(decoded(args)), {k: decoded(v) for k, v in kwargs.items()})
        if parameter is not None:
            node.meta["parameter"] = parameter
        made.append(node)
    return graph


def _operator(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    space, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)

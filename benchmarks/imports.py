"""The import graph of the package by rooms: a room is a folder, or a module that stands alone at the top.

Usage:
    python3 benchmarks/imports.py                  this checkout
    python3 benchmarks/imports.py --commit e9fac1f another commit, in a worktree that is removed afterwards

Prints how many rooms and arrows (pairs of rooms of which one imports the other) there are, how many levels they make where
every room stands above those that it imports, and each circle of modules. Imports inside of functions and for type checkers
do not count.
"""

import argparse
import ast
import subprocess
import tempfile
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def modules(root: Path) -> dict[str, Path]:
    found = {}
    for path in sorted((root / "autokernel").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that `path` imports when it is imported."""
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if name in known or node.module in known:
                yield name if name in known else node.module


def room(module: str, path: Path) -> str:
    return module if path.name == "__init__.py" or module.count(".") == 1 else module.rpartition(".")[0]


def levels(graph: dict[str, set[str]]) -> int:
    """The longest chain; 0 where there is a circle."""
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError:
        return 0
    height: dict[str, int] = {}
    for node in order:
        height[node] = 1 + max((height[below] for below in graph.get(node, ())), default=0)
    return max(height.values())


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return error.args[1]
    return []


def report(root: Path) -> str:
    known = modules(root)
    graph = {name: set(imported(path, known)) - {name} for name, path in known.items()}
    rooms: dict[str, set[str]] = {}
    for name, below in graph.items():
        here = room(name, known[name])
        rooms.setdefault(here, set()).update({room(b, known[b]) for b in below} - {here})
    arrows = sum(map(len, rooms.values()))
    lines = [f"{len(known)} modules, {len(rooms)} rooms, {arrows} arrows between rooms"]
    found = circle(graph)
    lines += [f"modules: {levels(graph)} levels, no circle" if not found else f"modules: a circle: {' -> '.join(found)}"]
    found = circle(rooms)
    lines += [f"rooms: {levels(rooms)} levels, no circle" if not found else f"rooms: a circle: {' -> '.join(found)}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="default: this checkout")
    commit = parser.parse_args().commit
    if not commit:
        print(report(ROOT))
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        added = subprocess.run(
            ["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, commit], capture_output=True, text=True
        )
        if added.returncode:
            parser.error(f"--commit {commit}: {added.stderr.strip().splitlines()[-1]}")
        print(report(tree))
        subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


if __name__ == "__main__":
    main()

"""The source of a kernel file: read, parsed, and refused where it is none. Needs no PyTorch: a slip is told at once."""

import ast
from pathlib import Path

from autokernel.common.preflight import ROOT, Refused

MOST_BYTES = 4 << 20  # of a kernel file; the largest of ours has 40 KB


class NotFound(Refused):
    """No such file, module or function, or it is no kernel file; in one line."""


def read_source(path: Path) -> str:
    """The text of a file of Python, here or among ours (kernels/rmsnorm/cpp_kernel.py). Raises NotFound."""
    if not exists(path) and exists(ROOT / path) and (ROOT / path).is_file():
        path = ROOT / path
    if not exists(path):
        raise NotFound(f"there is no file {str(path)[:200]}: name a kernel file, such as kernels/rmsnorm/cpp_kernel.py")
    if not path.is_file():
        raise NotFound(f"{path} is {'a folder: name a kernel file in it' if path.is_dir() else 'no file: name a kernel'}")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise NotFound(f"{path} has {size / 1e6:.0f} MB: that is no kernel file")
    try:
        source = checked_source(path.read_bytes().decode("utf-8-sig"), str(path))  # Python takes a BOM, too
    except UnicodeDecodeError:
        raise NotFound(f"{path} is not Python: it is no text in UTF-8") from None
    if not source.strip():
        raise NotFound(f"{path} is empty: a kernel file begins as a copy of kernels/<type>/*_kernel.py")
    return source


def checked_source(source: str, called: str) -> str:
    """The source, where it is Python at all. Raises NotFound."""
    try:
        constants(source)
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        raise NotFound(f"{called} is not Python: {error.msg}{where}") from None
    return source


def read_kernel(path: Path) -> str:
    """The source of a kernel file: Python that defines kernel_fn. Raises NotFound."""
    source = read_source(path)
    if not binds(source, "kernel_fn"):
        raise NotFound(f"{path} defines no kernel_fn(): see kernel.py, or name a function of it, {path}:FUNCTION")
    return source


def check_named(*names: Path) -> None:
    """Raises NotFound where one is no kernel file; of file.py:function only PyTorch can tell, and nothing is said."""
    for name in names:
        if ":" not in str(name) or exists(name):
            read_kernel(name)


def exists(path: Path) -> bool:
    """No file has a name of thousands of letters: the system says that this is an error."""
    try:
        return path.exists()
    except OSError:
        return False


def constants(source: str) -> dict[str, object]:
    """Module-level NAME = literal and NAME: type = literal assignments of a kernel file. Raises SyntaxError."""
    constants = {}
    for node in _parsed(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and node.value:
            try:
                constants[targets[0].id] = ast.literal_eval(node.value)
            except (ValueError, TypeError, RecursionError, MemoryError):  # no literal; {[]}; nested too deeply
                continue
    return constants


def binds(source: str, name: str) -> bool:
    """Whether running the file may define `name`: by def, class, assignment or import (of * too). Raises SyntaxError."""
    for node in ast.walk(_parsed(source)):
        named = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name
        imported = isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*")
        if named or stored or imported:
            return True
    return False


def _parsed(source: str) -> ast.Module:
    """Raises SyntaxError, whatever is wrong with it."""
    try:
        return ast.parse(source)
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deeply
        raise SyntaxError(str(error) or type(error).__name__) from None

"""Settings by sizes: a table in a kernel file, from the shapes of a call's tensors to constants of its own.

The file stays whole: plain Python that needs nothing of this project, wherever it is loaded. For each entry it runs its own
text once more with the constants that stand there, so a kernel in C++ or CUDA is compiled for each, when first called.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping

from autokernel.gate.source import constants
from autokernel.spec import Case, TensorSpec
from autokernel.target import WeightedCase

Sizes = tuple[tuple[int, ...], ...]  # shapes of the tensors of a call, in the order of kernel_fn's parameters
Table = Mapping[Sizes, Mapping[str, object]]  # the constants that differ there from those of the file

BEGIN = """# --- settings by sizes: shapes of a call's tensors, in kernel_fn's order -> constants other than those above ---

SETTINGS = """
END = '''


def _by_sizes(general):
    """kernel_fn for all sizes: at those of SETTINGS, the one of this file run once more with the constants given there."""
    import ast
    import functools
    import inspect
    from pathlib import Path

    def with_constants(given):
        tree, left = ast.parse(Path(__file__).read_bytes()), {**given, "SETTINGS": {}}
        for node in tree.body:
            name = getattr(node.targets[0], "id", None) if isinstance(node, ast.Assign) else None
            if name in left:
                node.value = ast.parse(repr(left.pop(name)), mode="eval").body
        if left:
            raise NameError(f"SETTINGS has {', '.join(left)}, which this file does not assign")
        names = {name: value for name, value in globals().items() if name.startswith("__")}
        exec(compile(tree, __file__, "exec"), names)
        return names["kernel_fn"]

    kernels = {sizes: with_constants(given) for sizes, given in SETTINGS.items()}
    parameters = list(inspect.signature(general).parameters)

    def at(arguments):
        shapes = [getattr(arguments.get(name), "shape", None) for name in parameters]
        return kernels.get(tuple([shape for shape in shapes if shape is not None]), general)

    @functools.wraps(general)
    def kernel_fn(*args, **kwargs):
        return at(dict(zip(parameters, args), **kwargs))(*args, **kwargs)

    kernel_fn.at, kernel_fn.all = at, [general, *kernels.values()]
    return kernel_fn


kernel_fn = _by_sizes(kernel_fn) if SETTINGS else kernel_fn
'''
WRITTEN = re.compile(rf"\n*{re.escape(BEGIN)}(?:.*?){re.escape(END)}", re.S)


def read_table(source: str) -> dict[Sizes, dict[str, object]]:
    """The table of a source, empty where it has none. Raises SyntaxError."""
    table = constants(source).get("SETTINGS") if "SETTINGS" in source else None
    if not isinstance(table, dict) or not all(isinstance(given, dict) for given in table.values()):
        return {}
    return table


def with_table(source: str, table: Table) -> str:
    """The source with this table in place of the one that it may have; an empty one is left out."""
    plain = WRITTEN.sub("\n", source)
    lines = {sizes: ", ".join(f'"{k}": {literal(v)}' for k, v in given.items()) for sizes, given in table.items() if given}
    entries = "".join(f"    {sizes!r}: {{{line}}},\n" for sizes, line in lines.items())
    return f"{plain.rstrip()}\n\n\n{BEGIN}{{\n{entries}}}{END}" if entries else plain


def sizes_of(source: str, case: Case) -> Sizes | None:
    """The key of a case in the table of a source; None where its kernel_fn is no plain function."""
    functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "kernel_fn"]
    if not functions:
        return None
    arguments = functions[-1].args
    values = [case.args.get(a.arg) for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return tuple(v.shape for v in values if isinstance(v, TensorSpec))


def with_sizes_of(source: str, cases: Iterable[WeightedCase]) -> str:
    """The source without the settings in its table that none of the cases has the sizes for: they are another target's."""
    if not (table := read_table(source)):
        return source
    own = {sizes_of(source, weighted.case) for weighted in cases}
    return with_table(source, {sizes: given for sizes, given in table.items() if sizes in own})


def literal(value: object) -> str:
    """A value as our kernel files have it: strings in double quotes. So a knob set to what it is changes no text."""
    return json.dumps(value) if isinstance(value, str) and value.isascii() else repr(value)


def in_short(sizes: Sizes) -> str:
    """ "300x4096 4096x14336"."""
    return " ".join("x".join(map(str, shape)) for shape in sizes)

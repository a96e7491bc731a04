"""A digest of what torch.save() wrote: the same wherever equal objects are written, also by another process.

The bytes are not: cloudpickle numbers the classes of a __main__ at random, Python orders sets of strings by a hash that is
another one in each process, and pickling leaves traces in classes. So the pickle is read as a description of what it makes.
"""

import hashlib
import io
import pickle
import zipfile
from collections.abc import Iterator
from typing import Any

SETS = ("builtins.set", "builtins.frozenset", "__builtin__.set", "__builtin__.frozenset")
FILENAME = 10  # where it stands among what code is made of: a notebook's is another one in each kernel
CLASSES = {  # what makes a class of a __main__, and where the number that it is given stands among its arguments
    "cloudpickle.cloudpickle._make_skeleton_class": 4,
    "cloudpickle.cloudpickle._make_skeleton_enum": 5,
    "cloudpickle.cloudpickle._make_typevar": 5,
}
TRACE = "__slotnames__"  # which copyreg leaves in a class whose instances it has taken apart
BLOCK = 2**20


class _Thing(type):
    """What a pickle names or makes. A type, whatever it is there: a pickle of a __main__ makes classes, and then things of
    these. An unpickler gives it its state and its items as well."""

    what: str
    parts: list[Any]

    def __setstate__(cls, state: Any) -> None:
        cls.parts += ["state", state]

    def __setitem__(cls, key: Any, value: Any) -> None:
        cls.parts += ["item", key, value]

    def append(cls, value: Any) -> None:
        cls.parts += ["value", value]

    def extend(cls, values: Any) -> None:
        cls.parts += ["values", *values]


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.made: list[_Thing] = []  # of one that is called for what it does to another nothing else is left
        self.named: dict[str, _Thing] = {}

    def find_class(self, module: str, name: str) -> _Thing:
        what = f"{module}.{name}"
        return self.named.setdefault(what, self._thing(what, []))

    def _thing(self, what: str, parts: list[Any]) -> _Thing:
        return _Thing("Thing", (), {"what": what, "parts": parts, "__new__": self._make})

    def _make(self, maker: _Thing, *args: Any) -> _Thing:
        self.made.append(self._thing("", [maker, *args]))
        return self.made[-1]

    def persistent_load(self, number: Any) -> Any:
        return ["tensor", number]


def digest(written: io.BytesIO) -> str:
    """Of its pickle, as described, and of its tensors' contents."""
    said = hashlib.sha256()
    with zipfile.ZipFile(written) as file:
        for name in sorted(file.namelist()):
            if name.endswith("/.data/serialization_id"):  # of the bytes
                continue
            said.update(f"\n{name}\n".encode())
            if name.endswith("/data.pkl"):
                reader = _Reader(io.BytesIO(file.read(name)))
                root = reader.load()
                for token in _tokens([reader.made, root]):
                    said.update(token.encode(errors="surrogatepass"))
                continue
            with file.open(name) as record:
                while block := record.read(BLOCK):
                    said.update(block)
    return said.hexdigest()


def _tokens(root: Any) -> Iterator[str]:
    """A text for each thing that is in it. What occurs again is named by its number; equal strings and tuples are one."""
    numbers: dict[int, int] = {}
    left = [root]
    while left:
        value = left.pop()
        if isinstance(value, (list, dict, _Thing)):
            if id(value) in numbers:
                yield f"again {numbers[id(value)]};"
                continue
            numbers[id(value)] = len(numbers)
        if isinstance(value, _Thing):
            parts = _lasting(value)
            yield f"thing {value.what} {len(parts)};"
            left += reversed(parts)
        elif isinstance(value, dict):
            parts = [part for item in value.items() if item[0] != TRACE for part in item]
            yield f"dict {len(parts)};"
            left += reversed(parts)
        elif isinstance(value, (list, tuple)):
            yield f"{type(value).__name__} {len(value)};"
            left += reversed(value)
        else:
            yield f"{value!r};"


def _lasting(thing: _Thing) -> list[Any]:
    """The parts of it that are the same in every process, in an order that is."""
    if not thing.parts or not isinstance(thing.parts[0], _Thing):
        return thing.parts
    maker, *parts = thing.parts
    if maker.what in SETS and parts and isinstance(parts[0], list):
        parts[0] = sorted("".join(_tokens(item)) for item in parts[0])
    place = FILENAME if "CodeType" in maker.parts else CLASSES.get(maker.what)
    if place is not None and place < len(parts):
        parts[place] = None
    return [maker, *parts]

"""What the processes of a verification found, on disk until it has ended: one that was interrupted goes on from there."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from autokernel.target import encode

T = TypeVar("T")


class Notes:
    """Answers to questions, each asked so many times; kept in a file of JSON lines, if there is a `path`."""

    def __init__(self, path: Path | None):
        self.path, self.asked = path, Counter()
        self.known: dict[str, Any] = {}
        if path and path.exists():
            for line in path.read_text(errors="replace").splitlines():
                try:
                    self.known.update(json.loads(line))
                except (ValueError, TypeError):  # empty, or cut off when the disk was full or the machine went down
                    continue

    def once(self, question: str, answer: Callable[[], T], decode: Callable[[Any], T]) -> T:
        """answer(), or what it was when this question had been asked as often before."""
        self.asked[question] += 1
        key = hashlib.sha256(f"{question} {self.asked[question]}".encode()).hexdigest()[:32]
        if key in self.known:
            return decode(self.known[key])
        found = answer()
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                file.write("\n" + json.dumps({key: encode(found)}))  # a line of its own, whatever was cut off before it
        return found

    def forget(self) -> None:
        """The verification has ended: the next one measures anew."""
        if self.path:
            self.path.unlink(missing_ok=True)

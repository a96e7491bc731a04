"""What the processes of a verification found, on disk until it has ended: one that was interrupted goes on from there."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from autokernel.target import encode


class Notes:
    """Answers to questions, each asked so many times, as plain data; in a file of JSON lines, too, if there is a `path`."""

    def __init__(self, path: Path | None):
        self.path, self.asked = path, Counter()
        self.known: dict[str, Any] = {}
        if path and path.exists():
            for line in path.read_text(errors="replace").splitlines():
                try:
                    self.known.update(json.loads(line))
                except (ValueError, TypeError):  # empty, or cut off when the disk was full or the machine went down
                    continue

    def key(self, question: str) -> str:
        """Of one more time that it is asked."""
        self.asked[question] += 1
        return hashlib.sha256(f"{question} {self.asked[question]}".encode()).hexdigest()[:32]

    def write(self, key: str, found: Any) -> None:
        self.known[key] = encode(found)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                file.write("\n" + json.dumps({key: self.known[key]}))  # a line of its own, whatever was cut off before it

    def forget(self) -> None:
        """The verification has ended: the next one measures anew."""
        if self.path:
            self.path.unlink(missing_ok=True)

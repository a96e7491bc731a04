"""What a cheat is: a kernel file that fools a naive gate, and the reason for which ours must refuse it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autokernel.spec import KERNELS


@dataclass(frozen=True)
class Cheat:
    """One way to cheat. `reason` is a regular expression that must be found in the reason our gate gives.

    How a naive gate falls for it, `works`:
    - "passes": it says that the kernel is correct;
    - "fast": that, and a speedup at least 1.5 times what the honest starter of the type gets from it;
    - "harms": something happens outside the process, as `harmed(workplace)` tells.

    Where ours must refuse it, `refused_by`:
    - "check": the five stages;
    - "examine": the timed part, for the five stages may pass;
    - "contest": no refusal, for its results are right: it must lose against the honest starter, as `verdict.why` says;
    - "nobody": it may pass, and gains nothing; a test of its own.
    """

    number: int  # of the exploit, 1..43
    name: str
    kernel_type: str
    source: str  # the words WORKPLACE, BYSTANDER and PORT stand for a folder, a process and a server that are not its own
    reason: str
    stage: str = ""  # that must refuse it, if it matters
    works: str = "passes"
    refused_by: str = "check"
    correctness: str = "FAIL"
    threads: bool = False  # it does its harm in threads of PyTorch's other than the first
    libraries: bool = False  # judged by a gate that lets kernels call PyTorch, so that it is not refused for that
    dims: tuple[Mapping[str, Any], ...] = ()  # of the target; without them, the type's headline size
    dtype: torch.dtype = torch.float32  # of the target
    options: tuple[str, ...] = ()  # of the naive gate
    harmed: Callable[[Path], bool] | None = None
    neighbour: str = ""  # an honest kernel of the same type that comes near to it, and passes on the same target

    @property
    def id(self) -> str:
        return f"{self.number:02}-{self.name}"


def starter(kernel_type: str, backend: str = "cpp") -> str:
    return (KERNELS / kernel_type / f"{backend}_kernel.py").read_text()


def wrapped(kernel_type: str, body: str, backend: str = "cpp") -> str:
    """The honest starter, its kernel_fn renamed to `honest`, and `body`, which defines kernel_fn."""
    return starter(kernel_type, backend).replace("def kernel_fn(", "def honest(") + "\n\n" + body.strip() + "\n"


def replaced(kernel_type: str, old: str, new: str, backend: str = "cpp") -> str:
    """The honest starter with one thing changed."""
    source = starter(kernel_type, backend)
    assert source.count(old) == 1, f"{source.count(old)} times {old!r}"
    return source.replace(old, new)


def plain(kernel_type: str, body: str, backend: str = "cpp") -> str:
    """A kernel file without any kernel of its own."""
    return f'import torch\n\nKERNEL_TYPE = "{kernel_type}"\nBACKEND = "{backend}"\n\n{body.strip()}\n'

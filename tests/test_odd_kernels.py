"""Whatever is in a kernel file: the gate has a verdict on it in one line, and nothing else happens."""

import sys
from pathlib import Path

import pytest
import torch

from autokernel.gate import Correctness, Judge
from autokernel.target import default_target

sys.path.insert(0, str(Path(__file__).resolve().parent))

HEAD = 'import torch\nKERNEL_TYPE = "rmsnorm"\nBACKEND = "cpp"\n'
RIGHT = "def kernel_fn(x, weight, eps=1e-6):\n    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)\n"
GIVEN_TYPE = HEAD.replace('"rmsnorm"', "{}") + RIGHT
CALLED = HEAD + "def kernel_fn(**inputs):\n    {}\n"
LINE = 2000  # characters


ODD = {  # a source, and a part of what is said of it
    "nothing": ("", "KERNEL_TYPE is None"),
    "a null byte": (HEAD + "\0", "not Python"),
    "half a surrogate": (HEAD + "s = '\udce9'\n" + RIGHT, "not Python"),
    "many parentheses": (HEAD + "a = " + "(" * 5000 + ")" * 5000 + "\n" + RIGHT, "not Python"),
    "a long sum": (HEAD + "a = " + "+".join("1" * 50_000) + "\n" + RIGHT, "not Python"),
    "a long number": (HEAD + "a = " + "9" * 5000 + "\n" + RIGHT, "not Python"),
    "a set of lists": (HEAD + "a = {[]}\n" + RIGHT, "TypeError: unhashable type"),
    "a dict by lists": (HEAD + "a = {[]: 1}\n" + RIGHT, "TypeError: unhashable type"),
    "a type that is a set of lists": (GIVEN_TYPE.format("{[1]}"), "KERNEL_TYPE is None"),
    "a type that is a list": (GIVEN_TYPE.format("[1]"), "KERNEL_TYPE is [1]"),
    "a type of many lines": (GIVEN_TYPE.format(repr("a\n" * 9)), "KERNEL_TYPE is"),
    "a type of many letters": (GIVEN_TYPE.format(repr("a" * 100_000)), "KERNEL_TYPE is"),
    "an encoding that there is not": ("# coding: nonsense\n" + HEAD + RIGHT, "unknown encoding"),
    "no function": (HEAD, "no attribute 'kernel_fn'"),
    "a number for a function": (HEAD + "kernel_fn = 3\n", "not callable"),
    "other parameters": (HEAD + "def kernel_fn(a): return a\n", "unexpected keyword argument"),
    "parameters by position": (HEAD + "def kernel_fn(x, weight, eps, /): return x\n", "positional-only"),
    "async": (HEAD + "async " + RIGHT, "returned coroutine"),
    "a generator": (HEAD + "def kernel_fn(x, weight, eps=1e-6): yield x\n", "returned generator"),
    "a class": (HEAD + "class kernel_fn:\n    def __init__(self, **inputs): pass\n", "not a torch.Tensor"),
    "a recursion": (HEAD + "def f(): f()\nf()\n", "RecursionError"),
    "an exit at import": (HEAD + "raise SystemExit(0)\n", "SystemExit: 0"),
    "an interrupt at import": (HEAD + "raise KeyboardInterrupt\n", "KeyboardInterrupt"),
    "a BaseException at import": (HEAD + "raise BaseException('a\\nb')\n", "BaseException: a"),
    "an exit": (CALLED.format("raise SystemExit"), "SystemExit"),
    "an interrupt": (CALLED.format("raise KeyboardInterrupt"), "KeyboardInterrupt"),
    "the end of a generator": (CALLED.format("raise GeneratorExit"), "GeneratorExit"),
    "words that raise": (
        HEAD + "class E(Exception):\n    def __str__(self): raise E()\ndef kernel_fn(**inputs): raise E()\n",
        "E: its message cannot be made",
    ),
    "words for terminals": (CALLED.format("raise ValueError('\\x1b[2J\\r\\nb')"), "ValueError"),
    "words of half a surrogate": (CALLED.format("raise ValueError('\\udce9')"), ""),
    "nothing for a result": (CALLED.format("return None"), "returned NoneType"),
    "a result on no device": (CALLED.format("return torch.empty(8, 256, device='meta')"), "a tensor on meta"),
    "a result without elements": (CALLED.format("return torch.empty(0, 5)"), "shape (0, 5)"),
    "a sparse result": (CALLED.format("return inputs['x'].to_sparse()"), "RuntimeError"),
    "a result as large as an address space": (CALLED.format("return torch.ones(1).expand(1 << 40)"), "RuntimeError"),
    "a result that is complex": (CALLED.format("return torch.zeros(8, 256, dtype=torch.cfloat)"), "dtype torch.complex64"),
    "a parameter": (CALLED.format("return torch.nn.Parameter(inputs['x'])"), "returned Parameter"),
    "no more open files": (HEAD + "import os\nos.closerange(3, 1000)\n" + RIGHT, "ended with status"),
    "its own end": (HEAD + "import os\nos.kill(os.getpid(), 9)\n", "SIGKILL"),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ODD)
def test_a_verdict_in_one_line(lenient: Judge, name: str) -> None:
    source, says = ODD[name]
    verdict = lenient.check(source, default_target("rmsnorm", "cpp", "cpu", torch.float32))
    assert verdict.correctness in (Correctness.FAIL, Correctness.CRASH)
    assert says in verdict.why and verdict.why.isprintable() and len(verdict.why) < LINE, verdict.why

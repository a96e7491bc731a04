"""A model that cannot be profiled is told in one line: its code, its class, its arguments, its inputs, what it returns."""

import io
import json
import time

import pytest
import torch

from autokernel.cli import profile
from autokernel.cli.arguments import script
from autokernel.cli.pipeline import Job, prepare
from autokernel.hardware.machine import turn
from autokernel.model.user_code import WorkloadError
from autokernel.model.workload import Workload
from autokernel.run.workspace import Workspace
from tests.user_errors import HEAD, net

MODELS = {
    "needs arguments": (net(", width, heads"), (), "Net needs width, heads: --model-args '{\"width\": …"),
    "unknown argument": (net(", width=3"), ("--model-args", '{"widht": 3}'), "Net knows no widht: --model-args takes"),
    "raises in __init__": (net(init='raise KeyError("no key")'), (), "Net cannot be made", "'no key'", "net.py:9)"),
    "raises in forward": (net(forward='raise ValueError("boom")'), (), "a pass of Net", "ValueError: boom", "net.py:12)"),
    "error of many lines": (net(init='raise ValueError("one\\ntwo\\n" * 999)'), (), "ValueError: one two one", "…"),
    "returns what holds itself": (net(forward="x = [self.layer(x)]; x.append(x); return x"), (), "holds itself"),
    "inputs that hold themselves": (
        net(after="\ndef example_inputs():\n    given = [torch.ones(4, 64)]\n    given.append(given)\n    return given"),
        *((), "holds itself"),
    ),
    "a number beyond PyTorch's": (net(), ("--input-shape", "9" * 30), 'at pos 1 with error "Overflow when unpacking long'),
    "replaces what is needed": (
        net(after="\nimport builtins\ndef no_print(*_, **__): raise ValueError\nbuiltins.print = no_print"),
        *((), "has replaced builtins.print", "ValueError (", "net.py:16)"),
    ),
    "an error in colours": (
        net(init="raise type('E\\x1b[31m', (Exception,), {})('\\udc80')"), (), "E\\x1b[31m: \\udc80 ("
    ),
    "error without words": (net(forward="assert x.sum() is None"), (), "AssertionError (", "net.py:12)"),
    "a train() that returns nothing": (
        net(forward="assert not self.training, 'trains'; raise ValueError('in eval mode')",
            after="    def train(self, mode=True): super().train(mode)"),
        *((), "a pass of Net", "ValueError: in eval mode", "net.py:12)"),
    ),
    "asks": (net(after="input('Which weights? ')"), (), "EOFError", "net.py:14)"),
    "begins a line": (net(after="import sys\nsys.stderr.write('50 %')\nprint('...', end='')\nx"), (), "NameError", "x"),
    "stops the program": (net(init="raise SystemExit(0)"), (), "it calls sys.exit(0)", "net.py:9)"),
    "stops it in forward": (net(forward="import sys; sys.exit()"), (), "it calls sys.exit()", "net.py:12)"),
    "stops it when imported": (net(after="exit('bye')"), (), "cannot be imported", "sys.exit('bye')", "net.py:14)"),
    "leaves at once": (net(init="import os; os._exit(0)"), (), "it calls os._exit(0)", "net.py:9)"),
    "leaves in forward": (net(forward="import os; os._exit(3)"), (), "a pass of Net", "it calls os._exit(3)", "net.py:12)"),
    "leaves when imported": ("import os\nos._exit(0)", (), "cannot be imported: it calls os._exit(0)", "net.py:2)"),
    "syntax": (net() + "\ndef (:\n", (), "cannot be imported: SyntaxError", "net.py:15)"),
    "indentation": ("class Net:\npass", (), "IndentationError", "net.py:2)"),
    "null bytes": ("\0\1", (), "cannot be imported", "null bytes"),
    "missing import": ("import no_such_package\n" + net(), (), "No module named 'no_such_package'", "net.py:1)"),
    "imports too much": ("from torch import no_such_name\n" + net(), (), "cannot import name 'no_such_name'", "net.py:1)"),
    "endless recursion": (net(forward="return self(x)"), (), "RecursionError"),
    "another class": (net().replace("Net", "Other"), (), "no class Net: --class-name is one of Other"),
    "empty file": ("", (), "no class Net: it defines no nn.Module", "models/custom.py"),
    "no nn.Module": ("class Net: pass", (), "Net is no nn.Module: it makes a Net"),
    "forgot nn.Module": (net().replace("(nn.Module)", ""), (), "Net is no nn.Module"),
    "a function": ("def Net(x): return x", (), "Net, a function, needs x"),
    "a function of nothing": ("def Net(): return 3", (), "Net is no nn.Module: it makes a int"),
    "an object": (net(after="Net = Net()"), (), "Net in", "is an object, no class of nn.Module"),
    "a number": ("Net = 3", (), "is of type int, no class of nn.Module"),
    "a chooser of transformers'": (
        net(init="raise OSError('use from_config()')", after="Net._model_mapping = {}"), (), "name the class that it would"
    ),
    "no super().__init__()": (net().replace("super().__init__()", "pass"), (), "cannot be made", "Module.__init__() call"),
    "fails later": (
        net(init="self.passes = 0", forward="self.passes += 1; assert self.passes < 3, 'no more'"), (),
        "a pass of Net failed after one that did not: AssertionError: no more", "net.py:12)",
    ),
    "an error without a message": (
        net(init="raise E", after="class E(Exception):\n    def __str__(self): 1 / 0"), (), "E: its message cannot be made"
    ),
    "TorchScript": (
        "import torch, warnings\nwarnings.simplefilter('ignore')\n"
        "def Net(): return torch.jit.script(torch.nn.Linear(64, 64))",
        (), "Net is TorchScript", "name the nn.Module",
    ),
    "compiled": (
        "import torch\ndef Net(): return torch.compile(torch.nn.Linear(64, 64))",
        (), "Net is compiled already", "that torch.compile was given",
    ),
    "on meta": (net(init="self.to('meta')"), (), "tensors without data (on the device meta, layer.weight"),
    "lazy": (net(init="self.lazy = nn.LazyLinear(3)"), (), "lazy layers without a shape (lazy.weight)"),
    "input on meta": (net(forward="x = x.to('meta')"), (), "a pass of Net", "net.py:13)"),
    "another shape": (net(), ("--input-shape", "4,32"), "x float32 [4, 32]", "cannot be multiplied", "--input-shape"),
    "another dtype": (
        net(forward="x = x @ torch.eye(64)"), ("--dtype", "float16"), "in float16 on x float16", "same dtype", "net.py:12)"
    ),
    "two inputs": (net().replace("forward(self, x", "forward(self, x, mask"), (), "needs x, mask", "example_inputs()"),
    "no input": (net().replace("forward(self, x)", "forward(self)"), (), "NameError: name 'x'", "net.py:13)"),
    "no forward": ("from torch import nn\nclass Net(nn.Module): pass", (), "the model of Net has no forward(): there is"),
    "returns nothing": (net().replace("return ", ""), (), "returns no tensor, but NoneType"),
    "returns a number": (net().replace("self.layer(x)", "x.sum().item()"), (), "returns no tensor, but float"),
    "returns indices": (
        net().replace("self.layer(x)", "self.layer(x).argmax(-1)"), (), "of floating-point numbers, but only int64 [4]"
    ),
    "a module that answers": (net(after="def __getattr__(name): raise ValueError('no ' + name)\ndel Net"), (), "no Net"),
    "parameters that fail": (net(after="Net.named_parameters = lambda self: 1 / 0"), (), "cannot list its", "net.py:14)"),
    "a dataclass": (
        net(after="import dataclasses\n@dataclasses.dataclass\nclass Net(Net):\n    width: int = 3\n"
        "    def __post_init__(self): super().__init__()"), (), "Net cannot list its modules", "@dataclass(eq=False)",
    ),
    "inputs without data": (
        net(after="def example_inputs(): return torch.ones(4, 64, device='meta')"), (), "inputs of Net cannot be moved"
    ),
    "nested inputs": (
        net(after="import warnings\nwarnings.simplefilter('ignore')\n"
        "def example_inputs(): return torch.nested.nested_tensor([torch.ones(2, 64), torch.ones(3, 64)])"),
        *((), "returns nested tensors", "give padded ones"),
    ),
    "names that are none": (net(after="def example_inputs(): return {1: torch.ones(4, 64)}"), (), "a dict with 1: "),
    "asynchronous": (net().replace("def forward", "async def forward"), (), "returns no tensor, but coroutine"),
    "another clock": (net(after="import time\ntime.perf_counter = lambda: 0.0"), (), "has replaced time.perf_counter"),
    "no operation": ("from torch import nn\nNet = nn.Identity", (), "runs no operation on tensors"),
    "inputs None": (net(after="def example_inputs(): return None"), (), "example_inputs() of", "returns None, not inputs"),
    "inputs without tensors": (net(after="def example_inputs(): return 'abc'"), (), "returns 'abc', not inputs"),
    "inputs of no number": (net(after="def example_inputs(): return ()"), (), "returns (), not inputs"),
    "inputs that fail": (net(after="def example_inputs(): return 1 / 0"), (), "example_inputs() of", "net.py:14)"),
    "inputs by name": (
        net(after="def example_inputs(name): return {'a': 1}[name]"), (), "failed: KeyError", "without --workload NAME"
    ),
    "inputs for two": (net(after="def example_inputs(a, b): return a"), (), "missing 1 required positional argument: 'b'"),
    "inputs no function": (net(after="example_inputs = 3"), (), "example_inputs() of", "is no function but a int"),
    "too many inputs": (
        net(after="def example_inputs(): return torch.ones(4, 64), 3"), (), "forward() of Net takes x, and is given 2",
        "too many positional", "example_inputs()",
    ),
    "unknown input": (
        net(after="def example_inputs(): return {'y': torch.ones(4, 64)}"), (), "forward() of Net takes x, and is given 0 "
        "arguments and y", "missing a required argument: 'x'",
    ),
    "name that nobody takes": (
        net(after="def example_inputs(): return torch.ones(4, 64)"), ("--workload", "decode"), "what is 'decode'?"
    ),
    "two of a name": (net(), ("--workload", "a:1,64", "--workload", "a:2,64"), "two --workload have the same name"),
    "weights that it cannot have": (net(), ("--pretrained", "x/y"), "Net has no from_pretrained()"),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_profiled(refusal, monkeypatch, tmp_path, case):
    monkeypatch.setattr("builtins.print", print)  # which some of them replace
    monkeypatch.setattr("time.perf_counter", time.perf_counter)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    source, options, *words = MODELS[case]
    file = tmp_path / "net.py"
    file.write_text(source)
    line = refusal(profile.main, "--output", tmp_path / "profile.json", "--model", file, *HEAD, *options)
    assert all(word in line for word in words), line
    assert not (tmp_path / "profile.json").exists()


def test_what_a_model_prints_is_no_result(tmp_path, capfd):
    """Nor is where it wants tensors to be by default."""
    noisy = "import argparse\nargparse.ArgumentParser().parse_args()\n"  # no option of ours is one of its own
    noisy += net(init="print('made'); torch.set_default_device('meta')", forward="print('run')")
    noisy += "import os, subprocess\nos.write(1, b'raw')\nsubprocess.run(['echo', 'of a child'])\n"  # as C++ does
    (tmp_path / "net.py").write_text(noisy)
    argv = ["--output", tmp_path / "profile.json", "--model", tmp_path / "net.py", *HEAD, "--baseline", "eager", "--json"]
    try:
        assert script(profile.main, [str(word) for word in argv]) == 0
    finally:
        torch.set_default_device(None)
    said = capfd.readouterr()
    assert "rawof a child\n" in said.err
    assert json.loads(said.out)["workload"]["class_name"] == "Net" and "made\nrun\n" in said.err.replace("  ", "")


def test_a_part_of_a_package_is_named_as_one(refusal, tmp_path):
    (tmp_path / "__init__.py").touch()
    (tmp_path / "net.py").write_text("from . import layers\n" + net())
    line = refusal(profile.main, "--output", tmp_path / "profile.json", "--model", tmp_path / "net.py", *HEAD)
    assert "relative import" in line and f"PYTHONPATH={tmp_path.parent} and --module {tmp_path.name}.net" in line


def test_inputs_that_do_not_fit_are_told_before_the_run_waits_for_its_turn(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where the turns are
    (tmp_path / "net.py").write_text(net())
    job, said = Job(Workload(str(tmp_path / "net.py"), "Net", input_shape=(4, 63), device="cpu")), []
    with turn("cpu", said.append), pytest.raises(WorkloadError, match=r"a pass of Net .* \[4, 63\] failed"):
        prepare(Workspace(tmp_path, "night"), job, said.append, said.append)
    assert said[-1] == "waiting for cpu: another run's experiment is on it"

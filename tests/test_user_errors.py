"""What a user gets wrong ends in one line that says what was wrong and what to do, exit status 2, and no traceback."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autokernel import apply, preflight
from autokernel.backends import BACKENDS
from autokernel.build import Library, compile_library
from autokernel.cli import bench, check, export_hf, extract, profile, verify
from autokernel.cli.arguments import script
from autokernel.gate.source import read_kernel
from autokernel.hardware.processes import STEPS
from autokernel.integration.winner import Winner
from autokernel.model.user_code import load_module, user_code
from autokernel.model.workload import Workload, workload_from
from autokernel.spec import load_spec
from autokernel.target import default_target

ROOT = Path(__file__).resolve().parent.parent

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self{parameters}):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        {init}

    def forward(self, x):
        {forward}
        return self.layer(x)
"""


def net(parameters="", init="pass", forward="pass", after=""):
    return NET.format(parameters=parameters, init=init, forward=forward) + after


@pytest.fixture
def refusal(capsys):
    """What a script says on its way to exit status 2: one line of error, the last on stderr."""

    def run(main, *argv):
        with pytest.raises(SystemExit) as end:
            script(main, [str(word) for word in argv])
        said = capsys.readouterr()
        lines = said.err.splitlines()
        assert end.value.code == 2, said.err
        assert "Traceback" not in said.err and [line for line in lines if "error:" in line] == lines[-1:], said.err
        assert lines[-1].startswith("error: ") and len(lines[-1]) < 900
        return lines[-1]

    return run


HEAD = ("--class-name", "Net", "--input-shape", "4,64", "--device", "cpu")
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
    "a number": ("Net = 3", (), "is a int, no class of nn.Module"),
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
    "on meta": (net(init="self.to('meta')"), (), "tensors without data (on the device meta, layer.weight"),
    "lazy": (net(init="self.lazy = nn.LazyLinear(3)"), (), "lazy layers without a shape (lazy.weight)"),
    "input on meta": (net(forward="x = x.to('meta')"), (), "a pass of Net", "net.py:13)"),
    "another shape": (net(), ("--input-shape", "4,32"), "x float32 [4, 32]", "cannot be multiplied", "--input-shape"),
    "another dtype": (
        net(forward="x = x @ torch.eye(64)"), ("--dtype", "float16"), "in float16 on x float16", "same dtype", "net.py:12)"
    ),
    "two inputs": (net().replace("forward(self, x", "forward(self, x, mask"), (), "needs x, mask", "example_inputs()"),
    "no input": (net().replace("forward(self, x)", "forward(self)"), (), "NameError: name 'x'", "net.py:13)"),
    "no forward": ("from torch import nn\nclass Net(nn.Module): pass", (), "Net is a Net without a forward(): there is"),
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
    assert "relative import" in line and "--module PACKAGE.NAME" in line


CHILDREN = {"goes on": ("", 0), "exits": ("sys.exit(3)", 3), "exits with words": ("exit('no')", 1), "fails": ("1 / 0", 1)}


@pytest.mark.parametrize("case", CHILDREN)
def test_a_child_that_a_model_forks_is_no_second_script(case):
    """It ends where the model's code does."""
    does, status = CHILDREN[case]
    process = os.getpid()
    try:
        with user_code("a pass failed"):
            if not (child := os.fork()):
                exec(does, {"sys": sys})
    finally:
        if os.getpid() != process:
            os._exit(77)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status


def test_a_child_that_a_model_forks_may_leave_at_once():
    with user_code("a pass failed"):
        child = os.fork()
        if not child:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


LEAVES = {  # what users' code does to where it is
    "another folder": "os.chdir('/')",
    "a folder that is gone": "os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())",
    "no streams": "sys.stdout = sys.stderr = None",
    "closed streams": "sys.stdout.close(), sys.stderr.close()",
    "closed descriptors": "os.close(1); os.close(2)",
    "streams in other streams": "sys.stderr = io.TextIOWrapper(sys.stderr.buffer, encoding='latin-1')",
    "streams taken apart": "sys.stderr = io.TextIOWrapper(sys.stderr.detach(), encoding='utf-8')",
}


# Each in a child of its own of a program of its own: in this one pytest holds the streams.
LEAVE = """
import gc, io, os, sys, tempfile
from autokernel.model.user_code import load_module, user_code
was = os.getcwd()
for line in sys.argv[1:]:
    if not os.fork():
        with user_code("it failed"):
            exec(line)
        gc.collect()
        print("said", flush=True)
        print("told", file=sys.stderr, flush=True)
        os._exit(os.getcwd() != was)
    assert os.wait()[1] == 0, line
"""


@pytest.mark.slow
def test_where_a_models_code_leaves_the_process_we_are_not():
    command = [sys.executable, "-c", LEAVE, *LEAVES.values()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "said\n" * len(LEAVES), "told\n" * len(LEAVES))


def test_a_models_code_goes_on_in_the_folder_that_it_went_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with user_code("it failed"):
        os.chdir("/")
    assert Path.cwd() == tmp_path
    with user_code("it failed"):
        assert Path.cwd() == Path("/")
        os.chdir(tmp_path)
    assert Path.cwd() == tmp_path


def test_a_model_that_changes_the_folder_is_found_by_a_relative_name(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text("import os\nos.chdir('/')\n" + net())
    monkeypatch.chdir(tmp_path)
    workload = Workload("net.py", "Net", input_shape=(4, 64))
    model, args, kwargs = workload.load()
    workload.try_pass(model, args, kwargs)
    assert workload.not_given(model) == () and Path.cwd() == tmp_path


def test_a_file_of_this_folder_is_the_same_in_another(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(net())
    monkeypatch.chdir(tmp_path)
    parser = profile.make_parser()
    named = {
        name: workload_from(parser.parse_args(["--model", name])).model for name in ("net.py", "models/gpt2.py", "no.py")
    }
    assert named == {"net.py": str(tmp_path / "net.py"), "models/gpt2.py": "models/gpt2.py", "no.py": "no.py"}


NAMES = ("reference", "kernel", "bench", "verify", "profile", "report", "model", "models", "kernels", "table")


@pytest.mark.parametrize("stem", ["net", "kernel", "profile"])
def test_a_models_neighbours_are_its_own_whatever_they_are_called(tmp_path, monkeypatch, stem):
    """And ours are ours, after it as before."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("OF = 'the user'")
    imports = "".join(f"import {name}\nassert {name}.OF == 'the user', {name}\n" for name in NAMES if name != stem)
    (tmp_path / "colorsys.py").touch()  # and what is imported later, as by PyTorch's compiler, is Python's own
    (tmp_path / f"{stem}.py").write_text(imports + "OF = 'the user'" + net(forward="import colorsys; colorsys.rgb_to_hsv"))
    monkeypatch.setattr("sys.path", [str(ROOT), *sys.path])  # as where a script of ours was called
    for name in (*NAMES, "colorsys"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    workload = Workload(str(tmp_path / f"{stem}.py"), "Net", input_shape=(4, 64))
    workload.try_pass(*workload.load())
    for name in (*NAMES, "colorsys"):
        sys.modules.pop(name, None)
    assert sys.path[0] == str(ROOT)
    load_spec.cache_clear()
    assert load_spec("softmax").oracle.__code__.co_filename == str(ROOT / "reference.py")


def test_an_autokernel_beside_a_model_is_told_from_ours(refusal, tmp_path):
    (tmp_path / "autokernel.py").write_text("Block = 3")
    (tmp_path / "net.py").write_text("from autokernel import Block\n" + net())
    line = refusal(profile.main, "--output", tmp_path / "profile.json", "--model", tmp_path / "net.py", *HEAD)
    assert "cannot import name 'Block'" in line and "give that another name" in line


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_processes_that_a_models_code_starts_find_it(tmp_path, start):
    (tmp_path / f"net_{start}.py").write_text(
        "import multiprocessing\ndef double(x): return 2 * x\n"
        f"def answer():\n    with multiprocessing.get_context('{start}').Pool(1) as pool:\n"
        "        return pool.map_async(double, [21]).get(timeout=60)\n"
    )
    module = load_module(str(tmp_path / f"net_{start}.py"))
    with user_code("it failed"):
        assert module.answer() == [42]


def test_a_folder_with_names_of_ours_and_pythons(tmp_path):
    """A command that is started there is ours, and PyTorch's compiler finds Python's own profile."""
    for name in ("autokernel", "torch", "random", "profile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user')")
    ended = subprocess.run(preflight.installed("--version"), cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout.startswith("autokernel "), ended
    lines = f"exec(open({str(ROOT / 'autokernel/cprofile.py')!r}).read()); load_cprofile()\n"
    lines += "import cProfile, sys; cProfile.Profile; assert 'profile' not in sys.modules"
    for name in ("torch", "random"):
        (tmp_path / f"{name}.py").unlink()
    assert subprocess.run([sys.executable, "-c", lines], cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_a_thread_of_a_models_own_keeps_no_script_from_ending(tmp_path):
    model = tmp_path / "threads.py"
    model.write_text("import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n")
    process = started("profile.py", "--model", str(model), "--class-name", "Net", "--device", "cpu")
    assert "threads.py" in process.communicate(timeout=120)[1] and process.returncode == 2


def test_an_interrupt_without_words(capsys):
    def stopped(argv):
        raise KeyboardInterrupt

    assert script(stopped) == 130 and capsys.readouterr().err == "stopped\n"


COMMANDS = {
    "no such file": (profile.main, ("--model", "models/gpt3.py"), "there is no file models/gpt3.py: is it gpt2.py?"),
    "a text for a name": (profile.main, ("--model", "net" * 1000), "error: netnet", "…", "File name too long"),
    "a number for a text": (profile.main, ("--profile-iters", "9" * 3000), "out of range: at least 1, at most 1e+09"),
    "nothing near": (profile.main, ("--model", "no.py"), "there is no file no.py"),
    "a folder": (profile.main, ("--model", "models"), "models is no Python file"),
    "a text": (profile.main, ("--model", "README.md"), "README.md is no Python file"),
    "no such module": (profile.main, ("--module", "no_such_module"), "there is no module 'no_such_module'"),
    "no such part": (profile.main, ("--module", "torch.nn.no_such.part"), "there is no module 'torch.nn.no_such.part'"),
    "part of none": (profile.main, ("--module", "no_such.module"), "there is no module 'no_such.module'"),
    "an empty name": (profile.main, ("--module", ""), "--module", "is empty"),
    "no name": (profile.main, ("--module", "a..b"), "there is no module 'a..b'"),
    "a relative name": (profile.main, ("--module", ".models"), "there is no module '.models'"),
    "no such class": (profile.main, ("--module", "torch.nn", "--class-name", "Lineaer"), "no class Lineaer", "Linear"),
    "its arguments": (profile.main, ("--module", "torch.nn", "--class-name", "Linear"), "needs in_features, out_features"),
    "a folder to write": (profile.main, ("--output", "models"), "it is a folder: name a file"),
    "below a file": (profile.main, ("--output", "README.md/profile.json"), "cannot write to README.md", "Not a directory"),
    "below a folder that is not ours": (profile.main, ("--output", "/proc/x/profile.json"), "or name another folder"),
    "no profile": (extract.main, ("--tag", "no-such-run"), "there is no workspace/no-such-run/profile.json"),
    "no profile there": (extract.main, ("--profile", "models"), "models is no file: python profile.py --output models"),
    "no run": (verify.main, ("--tag", "no-such-run"), "there is no run named 'no-such-run'"),
    "no folder of a run": (verify.main, ("--workspace", "/no/run"), "there is no /no/run/plan.json", "workspace/NAME"),
    "no verdict": (
        export_hf.main, ("--name", "my-x", "--kernel", "kernels/rmsnorm/triton_kernel.py", "--verdict", "/no.json"),
        *("there is no file /no.json", "--json > /no.json"),
    ),
    "a name nearly right": (verify.main, ("--time=3",), "--time=3, did you mean --timed? ("),
    "a name of Python's": (profile.main, ("--model_args", "{}"), "did you mean --model-args?"),
    "a name like none": (profile.main, ("--gpu", "3"), "unrecognized arguments: --gpu 3 (python"),
    "no name of a file": (bench.main, ("kernel_" * 800,), "there is no file kernel_kernel_"),
    "no kernel": (bench.main, ("kernel_of_mine.py",), "there is no file kernel_of_mine.py"),
    "a folder of kernels": (bench.main, ("kernels/rmsnorm",), "kernels/rmsnorm is a folder"),
    "no kernel file": (bench.main, ("LICENSE",), "LICENSE is not Python", "line 1"),
    "no kernel_fn": (bench.main, ("models/llama.py",), "defines no kernel_fn()", "models/llama.py:FUNCTION"),
    "of what type": (bench.main, ("models/llama.py:rotate",), "Say --kernel with one of bmm, cross_entropy"),
    "no such function": (bench.main, ("models/llama.py:rotated", "--kernel", "softmax"), "defines no rotated"),
    "no function": (bench.main, ("models/llama.py:", "--kernel", "softmax"), "'' is no name of a function"),
    "no such module of it": (bench.main, ("torch.no.such:f", "--kernel", "softmax"), "there is no file torch.no.such"),
    "no incumbent": (bench.main, ("kernels/rmsnorm/cpp_kernel.py", "--incumbent", "x.py"), "there is no file x.py"),
    "another type": (bench.main, ("kernels/rmsnorm/cpp_kernel.py", "--kernel", "rms"), "KERNEL_TYPE is 'rms'"),
    "two types": (bench.main, ("kernels/rmsnorm/cpp_kernel.py", "--kernel", "softmax"), "of rmsnorm, and not of softmax"),
    "no target": (
        bench.main, ("kernels/rmsnorm/cpp_kernel.py", "--tag", "no-such-run", "--target", "x"), "workspace/no-such-run/plan"
    ),
}  # fmt: skip


@pytest.mark.parametrize("script", ["profile", "orchestrate"])
def test_a_model_that_is_not_there_is_told_before_pytorch_is_imported(script):
    words = [sys.executable, "-X", "importtime", ROOT / f"{script}.py", "--model", "models/gpt3.py"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    said = [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]
    assert said == ["error: there is no file models/gpt3.py: is it gpt2.py?"] and ended.returncode == 2
    assert not any(line.endswith("| torch") for line in ended.stderr.splitlines())


@pytest.mark.parametrize("case", COMMANDS)
def test_a_command_that_cannot_be_done(refusal, monkeypatch, case):
    monkeypatch.chdir(ROOT)
    main, argv, *words = COMMANDS[case]
    line = refusal(main, *argv)
    assert all(word in line for word in words), line


KERNEL = 'KERNEL_TYPE = "rmsnorm"\nBACKEND = "cpp"\ndef kernel_fn(x, weight, eps): return x\n'
FILES = {
    "binary": (bytes(range(256)), "is no text in UTF-8"),
    "an object file": (b"\x7fELF\0\0\0", "is not Python"),
    "empty": (b" \n", "is empty"),
    "huge": (b"#" * (5 << 20), "has 5 MB: that is no kernel file"),
    "deep": (b"x = " + b"(" * 9999 + b")" * 9999, "is not Python"),
    "no type": (KERNEL.replace("KERNEL_TYPE", "TYPE").encode(), "KERNEL_TYPE is None; the types are"),
    "unknown type": (KERNEL.replace("rmsnorm", "rnsnorm").encode(), "KERNEL_TYPE is 'rnsnorm'; the types are"),
    "a path for a type": (
        KERNEL.replace("rmsnorm", "../../kernels/rmsnorm").encode(),
        "KERNEL_TYPE is '../../kernels/rmsnorm'",
    ),
    "a long type": (KERNEL.replace("rmsnorm", "r" * 5000).encode(), "KERNEL_TYPE is 'rrrrrrrrrrrr...rrrrrrrrrrrrr'"),
    "a set of lists": (b"A = {[]}\n" + KERNEL.replace("rmsnorm", "rnsnorm").encode(), "KERNEL_TYPE is 'rnsnorm'"),
    "no backend": (KERNEL.replace("BACKEND", "BACK").encode(), "BACKEND is None; the backends are triton, cuda, cpp"),
    "unknown backend": (KERNEL.replace("cpp", "rust").encode(), "BACKEND is 'rust'; the backends are"),
    "no function": (KERNEL.replace("kernel_fn", "kernel").encode(), "defines no kernel_fn()"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_no_kernel(refusal, tmp_path, case):
    content, *words = FILES[case]
    file = tmp_path / "kernel.py"
    file.write_bytes(content)
    line = refusal(bench.main, file)
    assert all(word in line for word in words), line


def test_a_kernel_file_as_an_editor_on_windows_writes_it(tmp_path):
    """Python takes a byte order mark at the beginning of a file, and so do we."""
    file = tmp_path / "kernel.py"
    file.write_bytes(KERNEL.encode("utf-8-sig"))
    assert read_kernel(file) == KERNEL


RMSNORM = ROOT / "kernels/rmsnorm/cpp_kernel.py"


def test_kernels_that_are_for_another_model_are_said_to_be_of_no_use_once(caplog):
    winner = Winner(default_target("rmsnorm", "cpp", "cpu", torch.float32), RMSNORM.read_text())
    model = torch.nn.Linear(4, 4)
    x, expected = torch.ones(2, 4), model(torch.ones(2, 4))
    applied = apply(model, [winner])
    assert torch.equal(applied(x), expected) and torch.equal(applied(x), expected)
    said = [record.message for record in caplog.records if "nothing is replaced" in record.message]
    assert len(said) == 1 and "in Linear" in said[0] and winner.target.name in said[0]


def test_a_summary_that_cannot_be_written_is_told_before_anything_is_judged(refusal, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/proc/nowhere/summary")
    assert "cannot write to /proc/nowhere" in refusal(check.main, RMSNORM, RMSNORM, "--kernel", "rmsnorm")


BROKEN = {
    "fails": ("echo 'fatal error: cannot execute cc1plus' >&2; exit 1", "cannot execute cc1plus"),
    "says nothing": ("exit 3", "exit status 3"),
    "does nothing": ("exit 0", "wrote no object file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_compiler_that_compiles_nothing_is_none(refusal, monkeypatch, tmp_path, case):
    body, words = BROKEN[case]
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\n{body}\n")
    compiler.chmod(0o755)
    monkeypatch.setitem(BACKENDS, "cpp", replace(BACKENDS["cpp"], compilers=(str(compiler),)))
    line = refusal(bench.main, RMSNORM)
    assert words in line and "apt install g++" in line


def test_the_next_compiler_is_taken_where_the_first_is_broken(monkeypatch, tmp_path):
    first, works = tmp_path / "c++", preflight.find_compiler("cpp")
    first.write_text("not a program")
    first.chmod(0o755)
    monkeypatch.setitem(BACKENDS, "cpp", replace(BACKENDS["cpp"], compilers=(str(first), works)))
    assert preflight.find_compiler("cpp") == works


# ---- where the process matters: signals and disks ----


HERE = {  # what a shell does before a script is started -> words of its line
    "a folder that is gone": ("mkdir gone; cd gone; rmdir ../gone", "the folder that you are in is gone"),
    "a cache of PyTorch's": (
        "TORCHINDUCTOR_CACHE_DIR=/proc/nowhere; export TORCHINDUCTOR_CACHE_DIR",
        *("$TORCHINDUCTOR_CACHE_DIR: cannot write to /proc/nowhere", "make it writable"),
    ),
    "a configuration of git's": ("echo '[x' > .gitconfig; HOME=$PWD; export HOME", "git cannot be used here", "bad config"),
}


@pytest.mark.parametrize("case", HERE)
def test_what_is_wrong_where_a_script_is_started(tmp_path, case):
    before, *words = HERE[case]
    command = f"{before}; exec {sys.executable} {ROOT}/orchestrate.py runs"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


QUICK = ("--class-name", "Net", "--input-shape", "4,64", "--device", "cpu", "--baseline", "eager")


def processes_of(token):
    """Those that have inherited it in their environment."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if token.encode() in path.read_bytes() and "State:\tZ" not in (path.parent / "status").read_text():
                alive.append(path.parent.name)
        except OSError:
            continue
    return alive


def mapped_by(token):
    """What the processes that have it in their environment have mapped, libraries among it."""
    for pid in processes_of(token):
        with suppress(OSError):
            yield Path("/proc", pid, "maps").read_text()


@pytest.fixture
def model_file(tmp_path):
    (tmp_path / "net.py").write_text(net())
    return tmp_path / "net.py"


ENDS = {  # what a model's code does to its process -> words of the line that the script ends with
    "segmentation fault": ("__import__('ctypes').string_at(0)", "loading the model: the process was ended by SIGSEGV at "),
    "all files closed": ("os.closerange(0, 4096)", "a pass of Net", "it has closed all files of this process"),
}  # fmt: skip


@pytest.mark.slow
def test_a_model_that_ends_its_process_is_named(tmp_path):
    begun = {}
    for case, (line, *_) in ENDS.items():
        model = tmp_path / case / "net.py"
        model.parent.mkdir()
        model.write_text("import os\n" + net(forward=line)[1:])
        begun[case] = started("profile.py", "--output", tmp_path / "profile.json", "--model", model, *QUICK)
    for case, process in begun.items():
        said = process.communicate(timeout=120)[1].splitlines()
        assert process.returncode == 2 and said[-1].startswith("error: ") and "Traceback" not in said[-2], said
        assert all(word in said[-1] for word in ENDS[case][1:]), said


def started(*command, token="none", **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKEN_OF_A_TEST": token}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, env=environment, **pipes, **options)


STOPS = {
    "verify while PyTorch is imported": (("verify.py",), None, signal.SIGINT),
    "profile while PyTorch is imported": (("profile.py",), None, signal.SIGTERM),
    "profile": (("profile.py", "--profile-iters", "100000000"), "measuring one pass", signal.SIGINT),
    "bench": (("bench.py", RMSNORM), "smoke", signal.SIGINT),
    "bench by SIGTERM": (("bench.py", RMSNORM), "sweep", signal.SIGTERM),
}


@pytest.mark.slow_after(1)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("case", STOPS)
def test_a_signal_ends_a_script_with_one_line_and_leaves_no_process(tmp_path, model_file, case):
    command, begun, number = STOPS[case]
    if command[0] == "profile.py":
        command = (*command, "--output", tmp_path / "profile.json", "--model", model_file, *QUICK)
    token = f"token-{tmp_path}"
    process = started(*command, token=token, start_new_session=True)
    said = ""
    while begun and begun not in said:
        said += process.stderr.readline()
        assert process.poll() is None, said
    while not begun and not any("libtorch" in maps for maps in mapped_by(token)):
        time.sleep(0.01)
    os.killpg(process.pid, number)  # as a terminal does
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in said + rest and rest.splitlines()[-1].startswith("stopped by "), rest
    deadline = time.monotonic() + 10
    while processes_of(token) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of(token)


def blocked_and_sent():
    """In a new process: as if SIGTERM had come before it can end by it in its own way."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_comes_before_a_script_is_ready(monkeypatch):
    monkeypatch.setenv(STEPS, "")
    process = started("profile.py", preexec_fn=blocked_and_sent)
    assert process.communicate(timeout=60) == ("", "stopped by SIGTERM\n") and process.returncode == 143


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of its own that has no room left."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"nothing can be mounted here: {mount.stderr.strip()}")
    try:
        (folder / "filling").write_bytes(bytes(64 << 10))
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(refusal, small_disk, model_file):
    line = refusal(profile.main, "--output", small_disk / "profile.json", "--model", model_file, *QUICK)
    assert "cannot write to" in line and "No space left" in line


def test_a_read_only_disk(refusal, small_disk, model_file):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    line = refusal(profile.main, "--output", small_disk / "profile.json", "--model", model_file, *QUICK)
    assert "cannot write to" in line and "Read-only" in line


def test_a_user_without_a_home(monkeypatch, tmp_path):
    """As in a container that is started for a number of no user's: there is a cache, and what is compiled in it."""

    def nobody(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "AUTOKERNEL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert preflight.default_cache().is_relative_to(tmp_path)
    assert compile_library(Library("cpp", 'extern "C" int one() { return 1; }')).is_relative_to(tmp_path)


def test_a_cache_that_is_named_from_here(monkeypatch, tmp_path):
    """What is compiled lies there whatever folder a process is in: compilers and the gate's workers are in their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOKERNEL_CACHE", "here")
    monkeypatch.setenv("TMPDIR", "there")
    library = compile_library(Library("cpp", 'extern "C" int two() { return 2; }'))
    assert library.is_relative_to(tmp_path / "here")
    script(lambda _: monkeypatch.chdir("/"))
    assert preflight.default_cache() == tmp_path / "here" and os.environ["TMPDIR"] == str(tmp_path / "there")


def test_a_full_disk_for_temporary_files(refusal, small_disk, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(small_disk))
    monkeypatch.setattr("tempfile.tempdir", None)
    preflight.why_not_compiling.cache_clear()
    try:
        line = refusal(bench.main, RMSNORM)
    finally:
        preflight.why_not_compiling.cache_clear()
    assert "No space left" in line or "No usable temporary" in line


@pytest.mark.gpu
def test_a_model_is_made_on_the_gpu_unless_it_needs_the_cpu(tmp_path):
    text = """
import torch
from torch import nn

class Plain(nn.Linear):
    def __init__(self, features=8):
        super().__init__(features, features)
        self.made_on = torch.empty(()).device.type

class Numbers(Plain):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(8).numpy()

class Loose(Plain):
    def __init__(self):
        super().__init__()
        self.table = [torch.ones(8)]

class Large(Plain):
    def __init__(self):
        super().__init__()
        if self.made_on == "cuda":
            torch.empty(1 << 50)
"""
    (tmp_path / "net.py").write_text(text)
    for name, place in {"Plain": "cuda", "Numbers": "cpu", "Loose": "cpu", "Large": "cpu"}.items():
        workload = Workload(str(tmp_path / "net.py"), name, input_shape=(4, 8), device="cuda")
        (model, _, _), (again, _, _) = workload.load(), workload.load()
        assert (model.made_on, model.weight.device.type) == (place, "cuda")
        assert torch.equal(model.weight, again.weight), "the same weights in every process"
    assert Workload(str(tmp_path / "net.py"), "Loose", input_shape=(4, 8), device="cuda").load()[0].table[0].is_cpu

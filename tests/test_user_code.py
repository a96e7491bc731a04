"""What a model's own code does to our process: folders, streams, children, threads, names of modules, its device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autokernel.cli import profile
from autokernel.common import preflight
from autokernel.model.user_code import load_module, user_code
from autokernel.model.workload import Workload, workload_from
from autokernel.spec import load_spec
from tests.user_errors import HEAD, ROOT, net, started

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
    lines = f"exec(open({str(ROOT / 'autokernel/common/cprofile.py')!r}).read()); load_cprofile()\n"
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

"""autokernel in a Python program: what is exported, a live model handed over, the gate on a source, what apply() did."""

import contextlib
import copy
import importlib
import os
import pty
import resource
import subprocess
import sys
import threading
import time
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import autokernel
from autokernel.api import CommandFailed, Optimized
from autokernel.common.preflight import Refused
from autokernel.gate.kernel_files import source_of
from autokernel.integration.verification import whole_job
from autokernel.integration.verification.forms import EAGER
from autokernel.integration.verification.record import Verification
from autokernel.integration.winner import Winner
from autokernel.model.handover import hand_over
from autokernel.model.user_code import WorkloadError
from autokernel.run.command import run_command
from autokernel.run.workspace import PLAN, NoRun
from autokernel.spec import KERNELS, ROOT
from autokernel.target import default_target
from tests.small_clone import clone_this
from tests.test_ledger import clone  # noqa: F401  a fixture
from tests.test_winners import TARGET, found, run  # noqa: F401  `run` is a fixture

RIGHT = KERNELS / "rmsnorm" / "cpp_kernel.py"


def python(program: str, root: Path = ROOT) -> subprocess.CompletedProcess:
    """A program that has no file, as a notebook has none; a clone is where it looks for modules."""
    begin = f"import sys; sys.path.insert(0, {str(root)!r})\n"
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-"]
    return subprocess.run(command, input=begin + program, capture_output=True, text=True, timeout=900, env=environment)


def test_to_import_it_imports_little() -> None:
    ended = python("import autokernel\nassert autokernel.PUBLIC.keys() <= set(dir(autokernel))\nprint(*sys.modules)")
    assert ended.returncode == 0, ended.stderr
    assert not {"torch", "numpy", "autokernel.api"} & set(ended.stdout.split())


@pytest.mark.parametrize("name", autokernel.PUBLIC)
def test_what_is_exported_is_documented_and_typed(name) -> None:
    function = getattr(autokernel, name)
    assert function.__doc__ and "return" in function.__annotations__
    assert f"import {name} as {name}\n" in (ROOT / "autokernel" / "__init__.py").read_text(), "type checkers do not see it"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        _ = autokernel.optimise


# ---- a live model ----


class Mixed(nn.Module):
    """Weights in one dtype, a buffer in another, which .to(dtype) would change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.register_buffer("frequencies", torch.rand(16), persistent=False)

    def forward(self, x, mask=None):
        y = self.linear(x) * self.frequencies
        return y if mask is None else y * mask


def test_a_model_is_handed_over_as_it_is(tmp_path) -> None:
    model, x, mask = Mixed(), torch.randn(2, 16, dtype=torch.bfloat16), torch.tensor([0.0, 1.0]).repeat(8)
    workload = hand_over(model, (x,), {"mask": mask}, tmp_path)
    assert (workload.class_name, workload.dtype, workload.device) == ("Mixed", "bfloat16", "cpu")
    loaded = type(workload)(**vars(workload) | {"model": str(tmp_path / workload.model)})
    again, args, kwargs = loaded.load()
    assert isinstance(again, Mixed) and not again.training and again.frequencies.dtype == torch.float32
    torch.testing.assert_close(again(x, mask=mask), model(x, mask=mask), rtol=0, atol=0)
    torch.testing.assert_close(kwargs["mask"], mask, rtol=0, atol=0)  # two values: a mask stays
    (fresh,), _ = loaded.inputs(again, seed=1)
    assert fresh.dtype == x.dtype and not torch.equal(fresh, args[0])
    torch.testing.assert_close(fresh.flatten().sort().values, x.flatten().sort().values, rtol=0, atol=0)


def test_inputs_in_a_list_are_told_from_inputs_one_by_one(tmp_path) -> None:
    workload = hand_over(Mixed(), ([torch.ones(2, 16)],), {}, tmp_path)
    loaded = type(workload)(**vars(workload) | {"model": str(tmp_path / workload.model)})
    with pytest.raises(WorkloadError) as refusal:
        loaded.try_pass(*loaded.load())
    assert "x list of 1 value, first float32 [2, 16] failed" in str(refusal.value)
    assert "as Mixed is called with them and not in a list: (model, x, y)" in str(refusal.value)


class ByName(nn.Module):
    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return x


def test_an_input_that_is_given_by_name_is_said_to_be_one(tmp_path) -> None:
    workload = hand_over(ByName(), (torch.ones(2, 16),), {}, tmp_path)
    loaded = type(workload)(**vars(workload) | {"model": str(tmp_path / workload.model)})
    with pytest.raises(WorkloadError, match=r"takes \*, x, and is given 1 argument .*those that have names as kwargs={…}"):
        loaded.try_pass(*loaded.load())


def test_layouts_are_handed_over(tmp_path) -> None:
    """An operation on them may have other kernels than one on contiguous tensors, or none."""
    image, transposed = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last), torch.randn(16, 2).t()
    workload = hand_over(Mixed(), (transposed,), {"mask": image}, tmp_path)
    _, (again,), kwargs = replace(workload, model=str(tmp_path / workload.model)).load()
    assert (again.stride(), kwargs["mask"].stride()) == (transposed.stride(), image.stride())


@pytest.mark.parametrize(
    "given",
    [torch.randn(4, 16).to_sparse(), torch.randn(4, 16).to(torch.float8_e4m3fn)],
    ids=["sparse", "eight bits"],
)
def test_what_pytorch_cannot_order_is_handed_over_as_it_is(given, tmp_path) -> None:
    workload = hand_over(Mixed(), (given,), {}, tmp_path)
    _, (again,), _ = replace(workload, model=str(tmp_path / workload.model)).load()
    assert (again.layout, again.dtype) == (given.layout, given.dtype)


@torch.jit.script
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def of_computed_weights() -> nn.Module:
    model = Mixed()
    parametrizations.weight_norm(parametrizations.spectral_norm(model.linear), "bias", dim=None)
    return model


def of_scripts() -> nn.Module:
    model = Mixed()
    model.linear = nn.Sequential(torch.jit.script(model.linear), torch.jit.trace(nn.Identity(), torch.ones(2)))
    model.register_forward_hook(lambda module, given, result: doubled(result))
    return model


@pytest.mark.parametrize("make", [of_computed_weights, of_scripts])
def test_what_pytorch_does_not_pickle_is_handed_over(make, tmp_path) -> None:
    model, x = make().eval(), torch.randn(2, 16, dtype=torch.bfloat16)
    workload, again = (hand_over(model, (x,), {}, tmp_path) for _ in range(2))
    loaded, *_ = replace(workload, model=str(tmp_path / workload.model)).load()
    assert workload == again and isinstance(loaded, Mixed)
    assert [*loaded.state_dict()] == [*model.state_dict()]
    assert type(loaded.linear).__name__ == type(model.linear).__name__
    torch.testing.assert_close([loaded(x), copy.deepcopy(loaded)(x)], [model(x)] * 2, rtol=0, atol=0)


def test_an_exported_model_is_handed_over(tmp_path) -> None:
    model, x, mask = Mixed(), torch.randn(2, 16, dtype=torch.bfloat16), torch.rand(16)
    rows = {0: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(model, (x,), {"mask": mask}, dynamic_shapes={"x": rows, "mask": {}}).module()
    workload, again = (hand_over(exported, (x,), {"mask": mask}, tmp_path) for _ in range(2))
    loaded, args, kwargs = replace(workload, model=str(tmp_path / workload.model)).load()
    assert workload == again and {*loaded.state_dict()} == {*exported.state_dict()}
    torch.testing.assert_close(loaded(x, mask=mask), model(x, mask=mask), rtol=0, atol=0)


def test_a_models_modules_are_those_of_its_program_whatever_they_are_called(tmp_path, monkeypatch) -> None:
    """As in a notebook, which looks for modules in the folder that it is in."""
    (tmp_path / "bench.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    with monkeypatch.context() as program:
        program.chdir(tmp_path)
        program.setattr("sys.path", ["", *(place for place in sys.path if place != str(ROOT))])
        program.delitem(sys.modules, "bench", raising=False)
        net = importlib.import_module("bench").Net(4, 4)
        workload = hand_over(net, (torch.ones(2, 4),), {}, tmp_path)
    monkeypatch.delitem(sys.modules, "bench", raising=False)
    monkeypatch.setattr("sys.path", [str(ROOT), *sys.path])  # as in a script of ours
    model, *_ = replace(workload, model=str(tmp_path / workload.model)).load()
    sys.modules.pop("bench")
    assert type(model).__name__ == "Net" and sys.path[0] == str(ROOT)


def test_equal_models_have_the_same_file(tmp_path) -> None:
    model, x = Mixed(), torch.randn(2, 16)
    first, second = (hand_over(model, (x,), {}, tmp_path) for _ in range(2))
    model.linear.weight.data += 1
    third = hand_over(model, (x,), {}, tmp_path)
    assert first == second != third


def test_a_model_that_was_handed_over_is_called_by_its_class(tmp_path) -> None:
    """Not by a file in the workspace, of which its owner knows nothing; another one of the class has another name."""
    first, second = (hand_over(nn.Linear(4, 4), (torch.ones(2, 4),), {}, tmp_path) for _ in range(2))
    assert str(first).startswith("Linear on the inputs of its call") and ".py" not in str(first)
    assert str(first) != str(second)


PROGRAM = """
import dataclasses, sys
from pathlib import Path
import torch
from autokernel.model.handover import hand_over

@dataclasses.dataclass
class Config:
    width: int = 4

class Net(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.names = config, {"one", "two", "three", "four"}
        self.linear = torch.nn.Linear(config.width, config.width)

    def forward(self, x, kind="first"):
        return self.linear(x) if kind in {"first", "second", "third"} else x

torch.manual_seed(0)
net, x = Net(Config()), torch.ones(2, 4)
print(hand_over(net, (x,), {}, Path(sys.argv[1])).model)
net.forward = lambda x: net.linear(x) + 1
print(hand_over(net, (x,), {}, Path(sys.argv[1])).model)
"""


def test_a_program_that_is_called_again_hands_over_the_same_file(tmp_path) -> None:
    """So that a run goes on: its classes travel with the model, and the order of a set is another one in each process."""
    told = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert told[0] == told[1] and told[0][0] != told[0][1]


@pytest.mark.parametrize("name", ["None", "class", "torch", "shuffled", "example_inputs", "HELD", "Größe"])
def test_a_class_may_have_any_name(name, tmp_path) -> None:
    """Also one of the file that it is handed over in, and one that is a word of Python's."""
    net, x = type(name, (nn.ReLU,), {})(), torch.ones(2)
    workload = hand_over(net, (x,), {}, tmp_path)
    loaded, *_ = replace(workload, model=str(tmp_path / workload.model)).load()
    assert type(loaded).__name__ == name


def test_a_module_may_have_any_name(tmp_path, monkeypatch) -> None:
    (tmp_path / "größe.py").write_text("import torch\nclass Netz(torch.nn.ReLU): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    net = importlib.import_module("größe").Netz()
    workload = hand_over(net, (torch.ones(2),), {}, tmp_path)
    loaded, *_ = replace(workload, model=str(tmp_path / workload.model)).load()
    assert type(loaded) is type(net)


def test_a_process_that_multiprocessing_has_started_hands_over_what_is_in_main(tmp_path, monkeypatch) -> None:
    """There it is no __main__, and nobody else can import it."""
    with monkeypatch.context() as started:
        main = ModuleType("__mp_main__")
        exec("from torch import nn\nclass Net(nn.ReLU):\n    forward = lambda self, x: one(x) + 1", vars(main))
        exec("one = lambda x: x * 0 + 1", vars(main))
        started.setitem(sys.modules, "__mp_main__", main)
        workload = hand_over(main.Net(), (torch.ones(2),), {}, tmp_path)
    loaded, (x,), _ = replace(workload, model=str(tmp_path / workload.model)).load()
    assert loaded(x).tolist() == [2, 2]


ROUND: list = [torch.ones(2, 16)]
ROUND.append(ROUND)


def locked() -> nn.Module:
    model = Mixed()
    model.lock = threading.Lock()
    return model


def of_a_compiled_class() -> nn.Module:
    """As a notebook has it, whose classes travel with the model."""
    cell = {"__name__": "__main__"}
    exec("import torch\nclass Net(torch.nn.ReLU):\n    forward = torch.compile(torch.nn.ReLU.forward)\n", cell)
    return cell["Net"]()


@pytest.mark.parametrize(
    "model, inputs, says",
    [
        (locked(), (torch.ones(2, 16),), "Mixed cannot be handed to the processes that measure it"),
        (Mixed(), (), "Mixed is given no tensor"),
        (of_a_compiled_class(), (torch.ones(2),), r"Net.forward\(\) is compiled already: take @torch.compile off"),
        (Mixed().double(), (torch.ones(2, 16),), "Mixed is in torch.float64"),
        (nn.Linear(4, 4, device="meta"), (torch.ones(2, 4),), "without data"),
        (torch.relu, (torch.ones(2, 4),), r"is no nn.Module \(call it in the forward\(\) of one\)"),
        (
            torch.export.export(nn.ReLU(), (torch.ones(2),)),
            (torch.ones(2),),
            r"exported program \(its module\(\)",
        ),
        (Mixed(), (ROUND,), "what Mixed is given holds itself"),
        (Mixed(), (torch.ones(2, 16, device="meta"),), "Mixed is given tensors without data"),
        (Mixed(), (torch.ones(2, 16), iter([1])), "which ends after one pass: give a list"),
        (Mixed(), (UserDict(x=torch.ones(2, 16)),), "Mixed is given no tensor, but UserDict: tensors are found in tuples"),
    ],
)
def test_what_cannot_be_handed_over_is_refused_in_a_sentence(model, inputs, says, tmp_path) -> None:
    with pytest.raises(WorkloadError, match=says) as refused:
        hand_over(model, inputs, {}, tmp_path)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.rglob("*.pt"))


NOTEBOOK = """
import asyncio, torch
import autokernel as ak

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(768)

    def forward(self, x, scale):
        return self.norm(x) * scale

said = []

async def cell():
    return ak.profile(Net(), torch.randn(256, 768), kwargs={"scale": 2.0}, baseline="eager", progress=said.append)

profile = asyncio.run(cell())
assert any("rms" in h.kernel_type for h in profile.hotspots if h.kernel_type), profile
assert any("measuring" in line for line in said), said
try:
    ak.profile(Net(), torch.randn(256, 767), kwargs={"scale": 2.0})
except ak.api.CommandFailed as error:
    print(error)
"""


@pytest.mark.slow
def test_a_notebooks_model_is_profiled_while_an_event_loop_runs() -> None:
    """Its class is in a __main__ without a file. Nothing is printed but by the program; a failure is one sentence."""
    ended = python(NOTEBOOK)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("a pass of Net in float32 on x float32 [256, 767]") and ended.stdout.count("\n") == 1


def test_what_a_command_refuses_is_raised() -> None:
    from autokernel.common.preflight import program

    with pytest.raises(CommandFailed, match="there is no run named 'no-such-run'"):
        run_command([*program("orchestrate", "optimize"), "status", "--tag", "no-such-run"], False)


def test_a_run_that_is_refused_leaves_no_folder(tmp_path, monkeypatch) -> None:
    def refuse(words, progress) -> None:
        assert (tmp_path / "workspace" / words[words.index("--tag") + 1]).is_dir()
        raise CommandFailed("no")

    monkeypatch.setattr(whole_job, "HOME", tmp_path)
    monkeypatch.setattr(whole_job, "run_command", refuse)
    with pytest.raises(CommandFailed):
        whole_job.whole_job(nn.RMSNorm(8), [torch.ones(2, 8)], {}, "tuner", {})
    assert [path.name for path in (tmp_path / "workspace").iterdir()] == ["models"]


def test_a_model_that_cannot_be_written_is_refused_in_a_sentence(tmp_path) -> None:
    """Of a full disk nothing half written is left."""
    (tmp_path / "a file").write_text("")
    with pytest.raises(Refused, match="cannot write the model to .*Not a directory"):
        hand_over(torch.nn.Linear(4, 4), (torch.ones(2, 4),), {}, tmp_path / "a file")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(Refused, match="cannot write the model to .*File too large"):
            hand_over(torch.nn.Linear(64, 64), (torch.ones(2, 64),), {}, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "workspace/models").iterdir())


def test_threads_hand_over_the_same_model_one_after_another(tmp_path) -> None:
    model, x, together = torch.nn.Linear(2048, 2048), torch.ones(2, 2048), threading.Barrier(4)

    def written(_: int) -> str:
        together.wait()
        return hand_over(model, (x,), {}, tmp_path).model

    with ThreadPoolExecutor(4) as pool:
        workloads = set(pool.map(written, range(4)))
    (only,) = workloads
    assert [path.name for path in (tmp_path / "workspace/models").iterdir()] == [Path(only).parent.name]


class Console:
    """What a program has put in place of stderr: it says that it is a terminal, and has no file."""

    def isatty(self):
        return True


@pytest.mark.parametrize("stderr", [None, Console()], ids=["closed", "a console"])
def test_a_program_whose_stderr_is_no_file_gets_its_progress_by_the_log(monkeypatch, stderr):
    monkeypatch.setattr(sys, "stderr", stderr)
    assert run_command([sys.executable, "-c", "print('done')"], True) == ["done"]


def test_an_interrupt_ends_the_command_first() -> None:
    """What progress raises, as Ctrl-C does it where it is waited: nothing is left at work."""

    def interrupted(line: str) -> None:
        lines.append(line)
        raise KeyboardInterrupt

    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"], interrupted)
    with pytest.raises(ProcessLookupError):
        os.kill(int(lines[0]), 0)


LEFT = """
import os, signal, sys
from autokernel.run.command import run_command
run_command([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"], print)
"""


@pytest.mark.slow
def test_a_command_ends_with_a_caller_that_is_killed() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    caller = subprocess.Popen([sys.executable, "-uc", LEFT], stdout=subprocess.PIPE, text=True, env=environment)
    command = int(caller.stdout.readline())
    caller.kill()
    caller.wait()
    for _ in range(100):
        if not Path(f"/proc/{command}").exists() or "Z (zombie)" in Path(f"/proc/{command}/status").read_text():
            return
        time.sleep(0.05)
    raise AssertionError("it works on unseen")


WATCHED = """
import logging, sys, torch
import autokernel as ak

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
given = {{"progress": False}} if "off" in sys.argv else {{}}
try:
    {call}
except ak.api.CommandFailed as error:
    print("refused:", error)
"""
PROFILE = 'ak.profile(torch.nn.RMSNorm(768), torch.randn(512, 767), baseline="eager", **given)'
OPTIMIZE = 'ak.optimize(torch.nn.RMSNorm(768), torch.randn(512, 768), agent="starters", run="watched", **given)'


def watched(call: str, root: Path, *words: str, terminal: bool = True) -> tuple[str, str]:
    """What a program prints and logs, and what is seen on the terminal that its stderr is."""
    outer, inner = pty.openpty()
    seen = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
            while part := os.read(outer, 4096):
                seen.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    environment = os.environ | {"PYTHONPATH": str(root), "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", WATCHED.format(call=call), *words]
    given = {"stderr": inner} if terminal else {"stderr": subprocess.STDOUT}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root, **given)
    os.close(inner)
    reader.join()
    os.close(outer)
    assert ended.returncode == 0, ended.stdout + seen.decode()
    return ended.stdout, seen.decode(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, terminal, shown",
    [
        ([], True, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((["off"], True, False), ([], False, False))),
    ],
    ids=["on", "off", "no terminal"],
)
def test_progress_is_shown_on_a_terminal_and_nowhere_else(words, terminal, shown) -> None:
    """A failure is a sentence of the exception in any case, and no line on the terminal."""
    printed, seen = watched(PROFILE, ROOT, *words, terminal=terminal)
    assert ("profiling" in seen and "\x1b[" in seen) if shown else seen == ""
    assert ("profiling" in printed) != shown and "\x1b[" not in printed
    assert "refused: a pass of RMSNorm" in printed and "error" not in seen


@pytest.mark.slow
def test_optimize_shows_where_the_run_stands_as_the_script_does(tmp_path) -> None:
    clone_this(tmp_path / "clone")
    printed, seen = watched(OPTIMIZE, tmp_path / "clone")
    assert "run watched: " in seen and "start from cpp_kernel" in seen and "verifying" in seen
    assert "start from cpp_kernel" not in printed


SOURCE = RIGHT.read_text()
LINEAR, ONES = nn.Linear(4, 4), torch.ones(2, 4)


class Slots(nn.Module):
    """PyTorch leaves what is in them behind when it pickles a module."""

    __slots__ = ("width", "__secret", "unset")

    def __init__(self) -> None:
        super().__init__()
        self.width, self.__secret, self.norm = 2, 3, nn.RMSNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.width * self.__secret


def test_what_is_in_slots_is_handed_over(tmp_path) -> None:
    net, x = Slots(), torch.randn(2, 4)
    workload = hand_over(net, (x,), {}, tmp_path)
    held = torch.load(tmp_path / Path(workload.model).with_name("model.pt"), weights_only=False)["model"]
    assert torch.equal(held(x), net(x)) and not hasattr(held, "unset")


def test_a_name_that_is_nearly_right_is_told() -> None:
    with pytest.raises(AttributeError) as caught:
        autokernel.optimise  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("optimise", autokernel)


class Equal(nn.Linear):
    """As a dataclass is, if it is not told otherwise."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)


MISUSE = {
    "no model": (lambda: autokernel.apply(None), "None is no nn.Module"),
    "a class": (lambda: autokernel.apply(nn.ReLU), "ReLU is a class"),
    "no model to explain": (lambda: autokernel.explain(torch.relu), "is no nn.Module"),
    "no model to unapply": (lambda: autokernel.unapply(3), "3 is no nn.Module"),
    "no model for starters": (lambda: autokernel.apply(None, "starters"), "None is no nn.Module"),
    "a model without a hash": (lambda: autokernel.apply(Equal(4, 4), [], "eager"), "cannot list its modules", "eq=False"),
    "one to optimise": (lambda: autokernel.optimize(Equal(4, 4), ONES), "Equal cannot list its modules"),
    "a run of no name": (lambda: autokernel.apply(LINEAR, ""), "name of a run is empty"),
    "a folder that is not there": (lambda: autokernel.apply(LINEAR, "/no/such/folder"), "no run in '/no/such/folder'"),
    "a name of a page": (lambda: autokernel.apply(LINEAR, "a" * 5000), "is no name of a run"),
    "a type that is a number": (lambda: autokernel.bench(SOURCE, 3, device="cpu"), "no kernel type 3"),
    "a kernel of another device's": (
        lambda: autokernel.bench(ROOT / "kernels/rmsnorm/triton_kernel.py", device="cpu"),
        "triton_kernel.py is in Triton, which is for cuda; for cpu there is cpp",
    ),
    "no kernels": (lambda: autokernel.apply(LINEAR, ["rmsnorm"]), "no list of kernels"),
    "a number of kernels": (lambda: autokernel.apply(LINEAR, 3), "no list of kernels"),
    "an unknown fallback": (lambda: autokernel.apply(LINEAR, [], "indcutor"), "no fallback 'indcutor': inductor, reduce-"),
    "inputs by no name": (lambda: autokernel.profile(LINEAR, ONES, kwargs=[1]), "kwargs are keyword arguments"),
    "a bad name of a run": (lambda: autokernel.optimize(LINEAR, ONES, run="a/b"), "no name of a run"),
    "an empty name of a run": (lambda: autokernel.optimize(LINEAR, ONES, run=""), "name of a run is empty"),
    "an unknown device": (lambda: autokernel.bench(SOURCE, device="tpu"), "'tpu' is none of cpu, cuda, cuda:1"),
    "a device that is not here": (lambda: autokernel.check(SOURCE, SOURCE, "rmsnorm", device="cuda:99"), "no cuda:99 here"),
    "an unknown dtype": (lambda: autokernel.bench(SOURCE, device="cpu", dtype="float3"), "rmsnorm is not for float3"),
    "a number for a kernel": (lambda: autokernel.bench(5), "5 is no kernel: give its file"),
    "no kernel": (lambda: autokernel.bench(""), "'' is no kernel"),
    "a function for a kernel": (lambda: autokernel.check(SOURCE, torch.relu, "rmsnorm"), "is no kernel: give its file"),
    "a number to be faster than": (lambda: autokernel.bench(SOURCE, device="cpu", incumbent=4), "4 is no kernel"),
    "another type to be faster than": (
        lambda: autokernel.bench(SOURCE, device="cpu", incumbent=ROOT / "kernels/softmax/cpp_kernel.py"),
        "is of another kernel type than the kernel",
    ),
    "no Python": (lambda: autokernel.bench("a\nb(", device="cpu"), "the kernel is not Python: '(' was never closed"),
    "a seed of letters": (lambda: autokernel.bench(SOURCE, device="cpu", seed="a"), "seed is a whole number from 0"),
    "half a seed": (lambda: autokernel.check(SOURCE, SOURCE, "rmsnorm", device="cpu", seed=1.5), "not 1.5"),
    "a number to be told": (lambda: autokernel.bench(SOURCE, device="cpu", progress=5), "progress is a function"),
    "a word to be told": (lambda: autokernel.profile(LINEAR, ONES, progress="yes"), "progress is a function"),
    "a number to optimise": (lambda: autokernel.optimize(5), "5 is no nn.Module: give a model and its inputs"),
    "a tensor to optimise": (lambda: autokernel.optimize(torch.ones(9, 9)), "1., 1.], [1., 1., "),
    "a class to profile": (lambda: autokernel.profile(nn.ReLU, ONES), "ReLU is a class: give a model and its inputs"),
    "inputs by numbers": (lambda: autokernel.profile(LINEAR, ONES, kwargs={1: ONES}), "kwargs are keyword arguments"),
    "another dtype": (lambda: autokernel.bench(SOURCE, device="cpu", dtype=torch.int8), "rmsnorm is not for torch.int8"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSE)
def test_what_cannot_be_done_is_refused_in_a_sentence(case, tmp_path, monkeypatch) -> None:
    for module in ("api", "integration.verification.whole_job"):
        monkeypatch.setattr(f"autokernel.{module}.HOME", tmp_path)
    call, *says = MISUSE[case]
    with pytest.raises(Refused) as refused:
        call()
    assert "\n" not in str(refused.value) and all(words in str(refused.value) for words in says), str(refused.value)


@pytest.mark.parametrize("options", [{"run": "nobodys"}, {"nonsense": 1}], ids=str)
def test_a_backend_that_cannot_be_made_says_so_once(options, caplog) -> None:
    compiled = torch.compile(LINEAR, backend="autokernel", options=options)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ONES), LINEAR(ONES))
        compiled(torch.ones(3, 4))
    torch._dynamo.reset()
    (said,) = (record.message for record in caplog.records if "the model is left as it is" in record.message)
    assert "nobodys" in said or "no option 'nonsense' of the backend: its options are run, fallback, gradients" in said
    assert "Traceback" not in caplog.text


def test_a_mode_of_the_backend_is_said_to_be_a_fallback(caplog) -> None:
    with torch.no_grad():
        compiled = torch.compile(LINEAR, backend="autokernel", mode="max-autotune")
        torch.testing.assert_close(compiled(ONES), LINEAR(ONES))
    torch._dynamo.reset()
    assert "left as it is: mode='max-autotune' is Inductor's: say options={'fallback': 'max-autotune'}" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_run_that_is_not_there_cannot_be_verified() -> None:
    with pytest.raises(NoRun, match="no-such-run"):
        autokernel.verify("no-such-run")


def test_starters_misspelt_is_not_taken_for_a_run_alone() -> None:
    with pytest.raises(NoRun, match="no run named 'starter'.*did you mean 'starters'"):
        autokernel.apply(LINEAR, "starter")


LINE = "argument --minutes: 'few' is not a number (python orchestrate.py run --help)"
ENDED = {
    "an option": (f"sys.exit({'error: ' + LINE!r})", "minutes: 'few' is not a number"),
    "killed": ("os.kill(os.getpid(), 9)", "the command was ended by SIGKILL; it said last:\nloading"),
    "without a word": ("sys.exit(3)", "the command ended with status 3; it said last:\nloading"),
}


@pytest.mark.parametrize("case", ENDED)
def test_how_a_command_failed_is_said_as_python_has_it(case) -> None:
    end, says = ENDED[case]
    with pytest.raises(CommandFailed) as failed:
        run_command([sys.executable, "-c", f"import os, sys; print('loading', flush=True); {end}"], False)
    assert str(failed.value) == says


# ---- results ----


def result(verification: Verification | None) -> Optimized:
    return Optimized(nn.Identity(), "night", Path("report.html"), verification)


def test_a_result_names_what_its_speedup_is_over() -> None:
    optimized = result(found("a source", over=(EAGER,)))
    assert optimized.applied and optimized.baseline == EAGER and optimized.speedup.value == 1.2
    assert "1.200x [1.100, 1.300]" in optimized._repr_html_() and "test is 1.20x as fast as eager" in str(optimized)


@pytest.mark.parametrize("verification", [None, Verification("test", "cpu", True)])
def test_a_model_that_was_left_alone_has_no_speedup(verification) -> None:
    optimized = result(verification)
    assert not optimized.applied and optimized.speedup is None and not optimized.speedups
    assert "leave it as it is" in optimized.recommendation and "<table>" not in optimized._repr_html_()


# ---- the starters, without a run of the user's own ----


def test_starters_that_were_found_before_are_used_again(run, monkeypatch) -> None:  # noqa: F811
    norm, x = nn.RMSNorm(768, eps=1e-6).requires_grad_(False), torch.randn(512, 768)
    monkeypatch.setattr("autokernel.integration.verification.whole_job.HOME", run.root)
    autokernel.apply(norm, "starters")
    replace(run.plan, workload=hand_over(norm, (x,), {}, run.root).to_json()).write(run / PLAN)
    torch._dynamo.reset()
    assert norm(x).abs().max() == 0, "the run's kernel is not in the model"
    assert autokernel.unapply(norm)(x).abs().max() > 0


def test_starters_whose_first_call_was_interrupted_are_found_at_the_next(monkeypatch) -> None:
    """It left the model without them for good, and said nothing."""
    asked = []

    def interrupted(*given) -> None:
        asked.append(given)
        raise KeyboardInterrupt

    monkeypatch.setattr("autokernel.integration.verification.whole_job.verified_run", interrupted)
    norm, x = torch.nn.RMSNorm(8), torch.randn(2, 8)
    autokernel.apply(norm, "starters")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            norm(x)
    autokernel.unapply(norm)
    assert len(asked) == 2 and norm(x).shape == x.shape


STARTERS = """
import torch
import autokernel as ak

norm, x = torch.nn.RMSNorm(1024, eps=1e-6).requires_grad_(False), torch.randn(1024, 1024)
expected = norm(x)
ak.apply(norm, "starters")
torch.testing.assert_close(norm(x), expected)
print(ak.explain(norm))
"""


@pytest.mark.slow
def test_starters_are_proven_and_measured_at_the_first_call(tmp_path) -> None:
    """What comes of it is the machine's to say: kernels, or the model as it was; the run and its verdict are there."""
    root = tmp_path / "autokernel"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(root)], check=True)
    ended = python(STARTERS, root)
    assert ended.returncode == 0, ended.stderr
    (verified,) = root.glob("workspace/*/verify.json")
    (row,) = (root / "results.tsv").read_text().splitlines()[1:]
    assert "start from cpp_kernel" in row and (verified.parent / "report.html").exists()
    assert "a few minutes, once" in ended.stderr, "a first call without a terminal was silent"


# ---- kernels ----


def test_the_gate_takes_a_source_or_a_file(tmp_path) -> None:
    wrong = RIGHT.read_text().replace("v * scale * w", "v * scale + w")
    (tmp_path / "wrong.py").write_text(wrong)
    said: list[str] = []
    for kernel in (wrong, tmp_path / "wrong.py"):
        verdict = autokernel.bench(kernel, device="cpu", quick=True, progress=said.append)
        assert verdict.correctness == "FAIL" and verdict.failure.stage == "smoke_test"
    assert said


def test_a_function_may_have_the_name_that_the_gate_calls() -> None:
    names: dict = {}
    exec(source_of(Path(f"{RIGHT}:kernel_fn"), "rmsnorm", "cpu"), names)
    x, weight = torch.randn(4, 64), torch.ones(64)
    torch.testing.assert_close(names["kernel_fn"](x, weight), torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))


def test_what_apply_did_is_explained() -> None:
    model, x = nn.Sequential(nn.RMSNorm(768, eps=1e-6), nn.Identity()).requires_grad_(False), torch.randn(512, 768)
    other = default_target("softmax", "cpp", "cpu", torch.float32)
    winners = [Winner(TARGET, RIGHT.read_text()), Winner(other, (KERNELS / "softmax" / "cpp_kernel.py").read_text())]
    assert str(autokernel.explain(model)) == "the model has no kernels in it"
    autokernel.apply(model, winners)
    torch._dynamo.reset()
    torch.compile(nn.Sequential(model, nn.Identity()), backend="eager")(x)  # which reads its forward() alone
    assert "2 kernels for which sites are looked for at the model's first call" in str(autokernel.explain(model))
    assert "inside of a larger model that torch.compile() has compiled is none" in str(autokernel.explain(model))
    model(x)
    explained = autokernel.explain(model)
    assert explained.kernels == (TARGET.name, other.name) and explained.graphs == 1
    assert len(explained.sites[TARGET.name]) == 1 and explained.sites[other.name] == ()
    assert f"{other.name}: nowhere" in str(explained)
    autokernel.unapply(model)
    assert not autokernel.explain(model).kernels

"""Autotuning: the fast look fast, the broken and the wrong are named, nothing of it reaches a verdict; who may ask."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch

from autokernel.agents import Context
from autokernel.agents.knobs import in_words, read_knobs, set_knob, some_settings
from autokernel.agents.toolbox import AUTOTUNES, Toolbox, Unusable
from autokernel.cli import bench
from autokernel.common.verdict import STAGES
from autokernel.gate import Judge
from autokernel.gate.timing.autotune import Looked
from autokernel.spec import KERNELS, load_spec
from autokernel.target import default_target

STARTER = (KERNELS / "rmsnorm" / "cpp_kernel.py").read_text()
TARGET = default_target("rmsnorm", "cpp", "cpu", torch.float32)
REPEATED = """
_once, REPEAT = kernel_fn, 1
def kernel_fn(x, weight, eps=1e-6):
    for _ in range(REPEAT):
        y = _once(x, weight, eps)
    return y
"""


def repeated(times: int) -> str:
    """The starter, `times` over in one call."""
    return STARTER + REPEATED.replace("REPEAT = kernel_fn, 1", f"REPEAT = kernel_fn, {times}")


def test_compiled_ahead_is_compiled(judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AUTOKERNEL_CACHE", str(tmp_path))
    told: list[tuple[int, int]] = []
    wanted = [("not python at all", TARGET), (STARTER, TARGET)]
    judge.compile_ahead(wanted, lambda done, of: told.append((done, of)))
    made = set(tmp_path.rglob("*.so"))
    assert made and told[-1] == (2, 2)
    assert judge.check(STARTER, TARGET).correctness == "PASS"
    assert set(tmp_path.rglob("*.so")) == made


def test_what_was_compiled_for_a_source_is_found_elsewhere(judge: Judge):
    """Triton notes absolute paths; a kernel may have put into its folder what is no file."""
    known = judge.parent.caches("a source")
    (known / "triton").mkdir()
    (known / "triton" / "__grp__f.json").write_text(json.dumps({"child_paths": {"f.cubin": str(known / "triton/f.cubin")}}))
    (known / "triton" / "f.cubin").write_bytes(b"compiled")
    os.mkfifo(known / "triton" / "__grp__fifo")
    (known / "triton" / "link").symlink_to("/etc/passwd")
    judge.parent.gather_caches("a place", ["a source", "never compiled"])
    folder = judge.parent.caches("a place") / "triton"
    (path,) = json.loads((folder / "__grp__f.json").read_text())["child_paths"].values()
    assert Path(path) == folder / "f.cubin" and Path(path).read_bytes() == b"compiled"
    assert (folder / "link").is_symlink() and not (folder / "__grp__fifo").exists()


def test_where_nothing_compiles_there_are_reasons_alone(judge: Judge):
    (looked,) = judge.autotune(["not python at all"], TARGET, 5.0)
    assert looked.seconds == math.inf and "SyntaxError" in looked.reason


@pytest.mark.timed
def test_the_fast_come_first_and_the_rest_have_reasons(judge: Judge):
    raising = STARTER + "\ndef kernel_fn(x, weight, eps=1e-6):\n    raise KeyError('no such thing')\n"
    zeros = STARTER + "\ndef kernel_fn(x, weight, eps=1e-6):\n    return torch.zeros_like(x)\n"
    ends = STARTER + "\nimport os\ndef kernel_fn(x, weight, eps=1e-6):\n    os._exit(3)\n"
    asked = [repeated(4), raising, repeated(16), "not python at all", STARTER, ends, zeros]
    told: list[tuple[int, int]] = []
    looked = judge.autotune(asked, TARGET, 60.0, lambda done, of: told.append((done, of)))
    assert [one.source for one in looked[:3]] == [STARTER, repeated(4), repeated(16)]
    assert looked[2].seconds > 3 * looked[0].seconds
    reasons = {one.source: one.reason for one in looked[3:]}
    assert all(one.seconds == math.inf for one in looked[3:]) and reasons.keys() == {
        raising,
        zeros,
        ends,
        "not python at all",
    }
    assert "no such thing" in reasons[raising] and "SyntaxError" in reasons["not python at all"]
    assert "tolerance" in reasons[zeros]
    assert told[-1] == (len(asked), len(asked)) and [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("ahead", (False, True))
def test_ctrl_c_lets_nothing_more_be_compiled(judge: Judge, ahead: bool):
    """All that was left was: a minute or more."""
    told, sources = [], [f"raise ValueError({number})" for number in range(60)]

    def stop(done: int, of: int) -> None:
        told.append(done)
        if len(told) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        if ahead:
            judge.compile_ahead([(source, TARGET) for source in sources], stop)
        else:
            judge.autotune(sources, TARGET, progress=stop)
    assert len(told) < 30


def test_ctrl_c_lets_no_more_trials_begin(judge: Judge, monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    monkeypatch.setattr(judge.checks, "workers", 2)
    monkeypatch.setattr(judge.checks, "most_workers", 2)

    def stop(stage: str) -> None:
        told.append(stage)
        if len(told) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        judge.examine(STARTER, TARGET, progress=stop)
    assert STAGES[-1] not in told


def test_time_that_is_used_up_leaves_the_first(judge: Judge):
    looked = judge.autotune([STARTER, *(repeated(n) for n in range(2, 30))], TARGET, 1e-3)
    assert STARTER in {one.source for one in looked if one.seconds < math.inf}
    assert len(looked) < 29


def test_what_autotuning_leaves_behind_reaches_no_verdict(judge: Judge):
    """A kernel that writes wherever it can while it is autotuned, and computes nothing where it finds that again."""
    notes = """
import glob, os, tempfile
NOTES = [os.path.join(folder, "autotuned") for folder in (
    tempfile.gettempdir(), "/tmp", "/dev/shm", os.path.expanduser("~"), os.getcwd(),
    os.environ.get("TRITON_CACHE_DIR", "/nowhere"), os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/nowhere"))]
BEFORE = [note for note in NOTES if os.path.exists(note) and not hasattr(glob, "autotuned")]
glob.autotuned = "in this process: autotuning loads a source more than once"
right = kernel_fn
def kernel_fn(x, weight, eps=1e-6):
    return torch.zeros_like(x) if BEFORE else right(x, weight, eps)
"""
    leaves = """
for note in NOTES:
    try:
        os.makedirs(os.path.dirname(note), exist_ok=True)
        open(note, "w").close()
    except OSError:
        pass
"""
    (looked,) = judge.autotune([STARTER + notes + leaves], TARGET, 30.0)
    assert looked.seconds < math.inf, looked.reason
    verdict = judge.check(STARTER + notes, TARGET)  # one that tries to leave some is refused for that
    assert verdict.correctness == "PASS", str(verdict.failure)


def test_settings_are_all_if_few_else_a_sample():
    few = 'TUNABLES = {"A": [1, 2], "B": [1, 2, 3]}\nA = 1\nB = 1\n'
    assert len(some_settings(few, 10)) == 5 and few not in some_settings(few, 10)
    assert len(some_settings(few, 3)) == 3
    many = 'TUNABLES = {name: 0 for name in "AB"}\n'  # not a literal: no knobs are known
    assert some_settings(many, 3) == []
    wide = "\n".join([f"TUNABLES = {dict.fromkeys('ABCDEF', list(range(8)))}", *(f"{name} = 0" for name in "ABCDEF")])
    settings = some_settings(wide, 60)
    assert len(set(settings)) == 60 and wide not in settings
    alone = [s for s in settings if sum(v != 0 for v in read_knobs(s).current.values()) == 1]
    assert len(alone) == 6 * 7, "each knob's values come first"


KNOBBED = 'TUNABLES = {"A": [1, 2, 4, 8]}\nA = 1  # how many\n'


class Bench:
    """A gate whose timings are known: 1 / A seconds; A = 8 fails."""

    examine = profile = None

    def autotune(self, sources, target, seconds):
        values = [(source, read_knobs(source).current["A"]) for source in dict.fromkeys(sources)]
        looked = [Looked(s, reason="does not compile") if a == 8 else Looked(s, 1 / a) for s, a in values]
        return sorted(looked, key=lambda one: one.seconds)


def toolbox(bench=None) -> Toolbox:
    return Toolbox(Context(TARGET, load_spec("rmsnorm"), KNOBBED, (), None, bench=bench))


def test_a_model_autotunes_settings_of_the_kernel_to_beat_or_of_its_own_edit():
    tools = toolbox(Bench())
    lines = tools.answer("autotune", {}).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["4.000x", "2.000x", "1.000x"]
    assert "A 1 -> 4" in lines[1] and lines[-1] == "1 failed; A 1 -> 8: does not compile"
    edits = [{"old": "# how many", "new": "# how many at once"}]
    assert "3.000x" in tools.answer("autotune", {"edits": edits, "settings": [{"A": 3}]})
    with pytest.raises(Unusable, match=f"{AUTOTUNES} rounds of autotuning are used up"):
        tools.answer("autotune", {})


@pytest.mark.parametrize(
    "given, words",
    [
        ({"settings": [{"C": 1}]}, "no line `C = "),
        ({"settings": {"A": [1, 2]}}, "a list of objects"),
        ({"settings": []}, "no setting"),
        ({"source": "def kernel_fn(:"}, "invalid syntax"),
        ({"settings": [{"A": n} for n in range(200)]}, "16 at most"),
    ],
)
def test_what_cannot_be_autotuned_is_said_and_costs_no_round(given, words):
    tools = toolbox(Bench())
    with pytest.raises(Unusable, match=words):
        tools.answer("autotune", given)
    assert tools.autotunes == 0
    with pytest.raises(Unusable, match="no autotuning here"):
        toolbox().answer("autotune", {})


def test_words_where_the_kernel_itself_fails():
    looked = [Looked(set_knob(KNOBBED, "A", 2), 0.5), Looked(KNOBBED, reason="it raised")]
    assert in_words(looked, KNOBBED) == "nothing to compare with, the kernel itself fails: it raised"


@pytest.mark.slow
@pytest.mark.timed
def test_a_time_of_ten_milliseconds_or_more_has_no_exponent():
    assert in_words([Looked(KNOBBED, 0.0295812)], KNOBBED).splitlines()[1] == "1.000x  29581 us  as it is"


def test_bench_autotunes(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "kernel.py"
    path.write_text(STARTER)
    assert bench.main([str(path), "--device", "cpu", "--autotune", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["settings"]
    assert len(rows) == 4 and all(row["latency_us"] > 0 and not row["reason"] for row in rows)
    assert [row["latency_us"] for row in rows] == sorted(row["latency_us"] for row in rows)
    assert read_knobs(STARTER).current in [row["setting"] for row in rows]


def test_what_bench_cannot_autotune(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "kernel.py"
    path.write_text(STARTER.replace("TUNABLES = ", "KNOBS = "))
    with pytest.raises(SystemExit):
        bench.main([str(path), "--device", "cpu", "--sweep", "3"])  # its name before
    assert "no TUNABLES" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main([str(path), "--device", "cpu", "--autotune", "3", "--incumbent", str(path)])
    assert "leave --incumbent out" in capsys.readouterr().err

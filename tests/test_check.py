"""`autokernel check`: exit status, and what it writes, for kernels that are right, wrong, slower, or cannot be judged."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import yaml

from autokernel.cli import check
from autokernel.common.verdict import STAGES, CaseTiming, Correctness, Failure, Interval, Verdict
from autokernel.gate.comparison import TARGET, Comparison
from autokernel.spec import KERNELS, ROOT
from tests.small_clone import clone_this

RIGHT = KERNELS / "rmsnorm" / "cpp_kernel.py"
MINE = "def kernel_fn(x): return x\n"  # a file of the user's, which has no type
PASSED = Verdict("rmsnorm", "cpp", "a CPU", Correctness.PASS, False, "correct", 7, stages=dict.fromkeys(STAGES, "PASS"))
FAILED = replace(
    PASSED,
    correctness=Correctness.FAIL,
    failure=Failure("shape_sweep", "M=1", 7, "off by <one> & more", "the detail"),
    stages=dict.fromkeys(STAGES, "SKIP") | {"smoke_test": "PASS", "shape_sweep": "FAIL"},
)
ASKED = SimpleNamespace(new=Path("new.py"), old=Path("old.py"), kernel="rmsnorm")


def timed(*speedups: Interval) -> Verdict:
    """The target's speedup, then each size's."""
    cases = [CaseTiming(f"M={i}", 1, 1.0, 1, 1, speedup_vs_incumbent=s) for i, s in enumerate(speedups[1:])]
    return replace(PASSED, speedup_vs_incumbent=speedups[0], cases=tuple(cases))


SAME, FASTER, SLOWER = Interval(0.97, 1.0, 1.03), Interval(1.1, 1.2, 1.3), Interval(0.7, 0.8, 0.9)
OUTCOMES = {  # passed, how `why` begins, the outcome of the test case "speed" in JUnit's XML
    "the same": (Comparison(PASSED, timed(SAME)), True, "right, and not slower beyond doubt: 1.000x", None),
    "faster": (Comparison(PASSED, timed(FASTER)), True, "right, and faster: 1.200x", None),
    "slower": (Comparison(PASSED, timed(SLOWER)), False, f"slower: {TARGET} 0.800x", "failure"),
    "slower at one size": (Comparison(PASSED, timed(SAME, FASTER, SLOWER)), False, "slower: M=1 0.800x", "failure"),
    "wrong": (Comparison(FAILED), False, "wrong: shape_sweep: off by <one>", "skipped"),
    "busy": (Comparison(PASSED, PASSED.as_undecided("busy")), False, "undecided: busy", "error"),
    "wrong while timed": (Comparison(PASSED, FAILED), False, "wrong: shape_sweep", "failure"),
}


@pytest.mark.parametrize("outcome, passed, why, speed", OUTCOMES.values(), ids=OUTCOMES)
def test_outcomes(outcome: Comparison, passed: bool, why: str, speed: str | None) -> None:
    assert outcome.passed is passed and outcome.why.startswith(why), outcome.why
    assert json.loads(json.dumps(check.as_json(outcome)))["passed"] is passed
    text = check.markdown(outcome, ASKED)
    assert text.startswith("### ") and outcome.why in text and ("✅" in text) == passed
    suite = ElementTree.fromstring(ElementTree.tostring(check.junit(outcome, ASKED)))
    cases = {case.get("name"): case for case in suite}
    assert set(cases) == {*STAGES, "speed"} and suite.get("tests") == "6"
    assert [child.tag for child in cases["speed"] if child.tag != "system-out"] == ([speed] if speed else [])
    broken = int(suite.get("failures")) + int(suite.get("errors"))
    assert broken == (0 if passed else 1)


def test_a_wrong_kernel_ends_with_1_and_is_told_everywhere(tmp_path, monkeypatch, capsys) -> None:
    source = RIGHT.read_text()
    wrong = tmp_path / "new.py"
    wrong.write_text(source.replace("v * scale * w", "v * scale + w"))
    assert wrong.read_text() != source
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    (tmp_path / "summary").write_text("before\n")
    written = ["--junit", str(tmp_path / "x.xml"), "--markdown", str(tmp_path / "x.md"), "--json"]
    assert check.main([str(RIGHT), str(wrong), "--kernel", "rmsnorm", "--device", "cpu", *written]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["why"].startswith("wrong: smoke_test") and told["timing"] is None
    assert (tmp_path / "summary").read_text() == "before\n" + (tmp_path / "x.md").read_text()
    assert ElementTree.parse(tmp_path / "x.xml").getroot().get("failures") == "1"
    check.check_ours(check.make_parser().parse_args([str(RIGHT), str(wrong), "--kernel", "rmsnorm", *written]))  # again


@pytest.mark.parametrize(
    "words, says",
    [
        (["nothing.py", str(RIGHT), "--kernel", "rmsnorm"], "there is no file nothing.py"),
        ([str(RIGHT), str(RIGHT), "--kernel", "softmax"], "KERNEL_TYPE is 'rmsnorm', not 'softmax'"),
        (["mine", str(RIGHT), "--kernel", "rmsnorm"], 'mine sets no KERNEL_TYPE: add the line KERNEL_TYPE = "rmsnorm"'),
        ([str(RIGHT), str(RIGHT), "--kernel", "softmx"], "invalid choice: 'softmx'"),
        ([str(RIGHT), str(RIGHT)], "--kernel"),
        ([str(RIGHT), str(RIGHT), "--kernel", "rmsnorm", "--junit", "."], "name a file"),
        ([str(RIGHT), str(RIGHT), "--kernel", "rmsnorm", "--junit", "mine", "--markdown", "other"], "mine exists, and is"),
        ([str(RIGHT), str(RIGHT), "--kernel", "rmsnorm", "--markdown", "mine", "--junit", "other"], "mine exists, and is"),
        ([str(RIGHT), str(RIGHT), "--kernel", "rmsnorm", "--junit", "x", "--markdown", "x"], "both name x"),
    ],
)
def test_bad_use_ends_with_2(words, says, capsys, monkeypatch, tmp_path) -> None:
    from autokernel.cli.arguments import script

    monkeypatch.chdir(tmp_path)
    Path("mine").write_text(MINE)
    with pytest.raises(SystemExit) as ended:
        script(check.main, words)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and says in line and line.count("\n") == 1
    assert Path("mine").read_text() == MINE


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize("loops, status", [(1, 0), (4, 1)])
def test_a_kernel_that_does_all_several_times_is_slower_beyond_doubt(loops, status, tmp_path, capsys) -> None:
    new = tmp_path / "new.py"
    call = "for (int64_t m = 0; m < M; ++m) rmsnorm_row"
    repeated = f"for (int64_t m = 0; m < M; ++m) for (volatile int i = 0; i < {loops}; ++i) rmsnorm_row"
    assert call in RIGHT.read_text()
    new.write_text(RIGHT.read_text().replace(call, repeated))
    ended = check.main([str(RIGHT), str(new), "--kernel", "rmsnorm", "--device", "cpu"])
    said = capsys.readouterr().out
    if "undecided" in said:
        pytest.skip("the machine is too busy for a verdict")
    assert ended == status, said


ACTION = ROOT / "actions" / "check"


WRONG = RIGHT.read_text().replace("v * scale * w", "v * scale + w")


@pytest.fixture
def theirs(tmp_path) -> Path:
    """A repository whose first commit has no kernel, the second a right one, and the working tree a wrong one."""
    kernel = tmp_path / "theirs" / "fast" / "norm.py"
    kernel.parent.mkdir(parents=True)
    for source in ("", RIGHT.read_text()):
        if source:
            kernel.write_text(source)
        for words in ("init -q", "add -A", "-c user.name=me -c user.email=me commit -q --allow-empty -m one"):
            subprocess.run(["git", *words.split()], cwd=tmp_path / "theirs", check=True)
    kernel.write_text(WRONG)
    return tmp_path / "theirs"


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> Path:
    """What GitHub has: the action's own repository, and a folder for temporary files. And the packages that the action
    installs from an index, so that it finds them installed: all that is here but AutoKernel."""
    folder = tmp_path_factory.mktemp("runner")
    clone_this(folder / "action")
    for name in ("temp", "packages"):
        (folder / name).mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "autokernel" not in path.name:
            (folder / "packages" / path.name).symlink_to(path)
    return folder


def run_action(runner: Path, repository: Path, **inputs: str) -> subprocess.CompletedProcess:
    """Its steps, as GitHub runs them, to the first that fails; the last one's end."""
    action = yaml.safe_load((runner / "action/actions/check/action.yml").read_text())
    given = {name: one.get("default", "") for name, one in action["inputs"].items()} | inputs
    files = {name: str(runner / name) for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT", "GITHUB_ENV", "GITHUB_PATH")}
    for path in files.values():
        Path(path).write_text("")
    common = os.environ | files | {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(repository)}
    common |= {"GITHUB_ACTION_PATH": str(runner / "action/actions/check"), "RUNNER_TEMP": str(runner / "temp")}
    common |= {"TMPDIR": str(runner / "temp")}  # it waits for no run of this machine
    common |= {"PYTHONPATH": str(runner / "packages"), "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "false"}
    common |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for step in action["runs"]["steps"]:
        env = {
            name: re.sub(r"\$\{\{ inputs\.([\w-]+) }}", lambda found: given[found[1]], value)
            for name, value in step["env"].items()
        }
        command = [step["shell"], "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        ended = subprocess.run(command, cwd=repository, env=common | env, capture_output=True, text=True)
        if ended.returncode:
            break
        installed = Path(sysconfig.get_path("purelib", vars={"base": str(runner / "temp/autokernel")}))
        (installed / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # for the gate, which drops PYTHONPATH
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("base, says", [("HEAD", "wrong: smoke_test"), ("HEAD~1", "is new: nothing to compare")])
def test_the_action_fails_a_change_that_makes_a_kernel_wrong(base, says, runner, theirs) -> None:
    """It installs AutoKernel beside PyTorch, compares, and tells it in the summary of the job."""
    inputs = {"file": "fast/norm.py", "kernel": "rmsnorm", "base": base, "arguments": "--device cpu", "junit": "out.xml"}
    ended = run_action(runner, theirs, **inputs)
    assert ended.returncode == 1 and says in ended.stdout, ended.stdout + ended.stderr
    assert (runner / "temp/autokernel/bin/autokernel").is_file()
    summary = (runner / "GITHUB_STEP_SUMMARY").read_text()
    if base == "HEAD":
        assert summary.startswith("### ❌ rmsnorm: wrong: smoke_test"), summary
        assert ElementTree.parse(theirs / "out.xml").getroot().get("failures") == "1"


@pytest.mark.slow
@pytest.mark.timed
def test_the_action_passes_a_change_that_makes_a_kernel_no_slower(runner, theirs) -> None:
    (theirs / "fast/norm.py").write_text(RIGHT.read_text() + "# the same\n")
    ended = run_action(runner, theirs, file="fast/norm.py", kernel="rmsnorm", base="HEAD", arguments="--device cpu")
    if ended.returncode == 2 and "undecided" in ended.stdout:
        pytest.skip("the machine is too busy for a verdict")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = (runner / "GITHUB_STEP_SUMMARY").read_text()
    assert summary.startswith("### ✅ rmsnorm: right") and "|" in summary, summary


def test_the_action_gives_its_script_what_it_reads() -> None:
    steps = yaml.safe_load((ACTION / "action.yml").read_text())["runs"]["steps"]
    given = {name for step in steps for name in step["env"]}
    read = set(re.findall(r"\$\{?([A-Z_]+)", (ACTION / "check.sh").read_text()))
    assert read == given - {"TORCH_INDEX"}
    inputs = yaml.safe_load((ACTION / "action.yml").read_text())["inputs"]
    assert {value for step in steps for value in step["env"].values()} == {f"${{{{ inputs.{name} }}}}" for name in inputs}

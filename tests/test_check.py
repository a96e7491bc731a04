"""`autokernel check`: exit status, and what it writes, for kernels that are right, wrong, slower, or cannot be judged."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import yaml

from autokernel.cli import check
from autokernel.gate.comparison import TARGET, Comparison
from autokernel.spec import KERNELS, ROOT
from autokernel.verdict import STAGES, CaseTiming, Correctness, Failure, Interval, Verdict

RIGHT = KERNELS / "rmsnorm" / "cpp_kernel.py"
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


@pytest.mark.parametrize(
    "words, says",
    [
        (["nothing.py", str(RIGHT), "--kernel", "rmsnorm"], "there is no file nothing.py"),
        ([str(RIGHT), str(RIGHT), "--kernel", "softmax"], "KERNEL_TYPE is 'rmsnorm', not 'softmax'"),
        ([str(RIGHT), str(RIGHT), "--kernel", "softmx"], "invalid choice: 'softmx'"),
        ([str(RIGHT), str(RIGHT)], "--kernel"),
        ([str(RIGHT), str(RIGHT), "--kernel", "rmsnorm", "--junit", "."], "name a file"),
    ],
)
def test_bad_use_ends_with_2(words, says, capsys) -> None:
    from autokernel.cli.arguments import script

    with pytest.raises(SystemExit) as ended:
        script(check.main, words)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and says in line and line.count("\n") == 1


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


@pytest.mark.slow
@pytest.mark.parametrize("base, says", [("HEAD", "wrong: smoke_test"), ("HEAD~1", "is new: nothing to compare")])
def test_the_action_fails_a_change_that_makes_a_kernel_wrong(base, says, tmp_path) -> None:
    """Its script, where the first commit has no kernel, the second a right one, and the working tree a wrong one."""
    kernel = tmp_path / "fast" / "norm.py"
    kernel.parent.mkdir()
    for source in ("", RIGHT.read_text()):
        if source:
            kernel.write_text(source)
        for words in ("init -q", "add -A", "-c user.name=me -c user.email=me commit -q --allow-empty -m one"):
            subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    kernel.write_text(RIGHT.read_text().replace("v * scale * w", "v * scale + w"))
    command = tmp_path / "bin" / "autokernel"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m autokernel "$@"\n')
    command.chmod(0o755)
    environment = {"KERNEL_FILE": "fast/norm.py", "KERNEL_TYPE": "rmsnorm", "BASE": base, "ARGUMENTS": "--device cpu"}
    environment |= {"JUNIT": "out.xml", "PATH": f"{command.parent}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", ACTION / "check.sh"], cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True
    )
    assert ended.returncode == 1 and says in ended.stdout, ended.stdout + ended.stderr


def test_the_action_gives_its_script_what_it_reads() -> None:
    steps = yaml.safe_load((ACTION / "action.yml").read_text())["runs"]["steps"]
    given = {name for step in steps for name in step["env"]}
    read = set(re.findall(r"\$\{?([A-Z_]+)", (ACTION / "check.sh").read_text()))
    assert read == given - {"TORCH_INDEX"}
    inputs = yaml.safe_load((ACTION / "action.yml").read_text())["inputs"]
    assert {value for step in steps for value in step["env"].values()} == {f"${{{{ inputs.{name} }}}}" for name in inputs}

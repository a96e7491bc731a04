"""orchestrate.py: the subcommands on a run's records, and the whole job, shortened, in a clone of its own."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import unescape

import pytest

from autokernel.cli import commands, plan, verify
from autokernel.cli.orchestrate import QUICK, act, make_parser
from autokernel.cli.pipeline import check_of_run, prove_all
from autokernel.cli.signals import RunStopped, Stopped
from autokernel.cli.status import log
from autokernel.common.preflight import Refused
from autokernel.common.records import write_json
from autokernel.gate import Interval
from autokernel.gate.timing.statistics import CONFIDENCE
from autokernel.history.experiments import STARTER, Status
from autokernel.history.runs import run_tags
from autokernel.history.status import Proof, read_proofs, status
from autokernel.integration.verification.forms import EAGER, INDUCTOR
from autokernel.integration.verification.record import KernelInModel, Verification
from autokernel.model.workload import Workload, workload_from
from autokernel.run.loop import Loop
from autokernel.run.workspace import PLAN, PROOF, VERIFY, NoRun, RunInProgress, Workspace, default_tag
from autokernel.spec import ROOT
from autokernel.target import encode
from tests.test_experiments import ROW
from tests.test_ledger import clone, sh, state  # noqa: F401  `clone` is a fixture
from tests.test_loop import PLAN_OF_ONE, TARGET, workspace  # noqa: F401  `workspace` is a fixture


def call(command: str, **options) -> str:
    module = plan if command in QUICK else commands
    return getattr(module, command)(argparse.Namespace(**{"tag": None, "json": False} | options))


@pytest.fixture
def run(workspace, monkeypatch) -> Workspace:  # noqa: F811
    """A run's records: its starter, one experiment kept, one that failed."""
    for module in (commands, plan):
        monkeypatch.setattr(module, "HOME", workspace.root)
    ledger = workspace.ledger
    ledger.open()
    start = replace(ROW, target=TARGET.name, agent=STARTER, speedup_vs_incumbent=None, description="start from cpp_kernel")
    failed = replace(ROW, target=TARGET.name, experiment=3, status="failed", correctness="FAIL", description="too bold")
    rows = [start, replace(ROW, target=TARGET.name, experiment=2), failed]
    workspace.log.append([ledger.record(row, f"{row.experiment}\n") for row in rows])
    ledger.reset()
    return workspace


def test_status_next_plan_and_log(run):
    assert "run night" in status(run.root) and "#3" in status(run.root)
    assert json.loads(status(run.root, as_json=True))["counts"]["failed"] == 1
    assert TARGET.name in call("next") and json.loads(call("next", json=True))["target"]["name"] == TARGET.name
    assert "starts from" in call("plan") and json.loads(call("plan", json=True))["targets"][0]["name"] == TARGET.name
    kept, tried, told = (log(run.root, None, *given) for given in ((False, False), (True, False), (True, True)))
    assert "too bold" not in kept and "too bold" in tried
    assert [row["experiment"] for row in json.loads(told)] == [1, 2, 3]


def test_a_run_goes_on_by_its_name_alone_and_not_with_another_model(run):
    known = Workload("mine.py", "Mine", input_shape=(4, 64))
    replace(run.plan, workload=known.to_json()).write(run / PLAN)

    def asked(*words: str) -> Workload:
        return workload_from(make_parser().parse_args(["run", "--tag", run.tag, "--device", "cpu", *words]))

    check_of_run(run, asked())
    check_of_run(run, asked("--model", "mine.py", "--class-name", "Mine", "--input-shape", "4,64"))
    with pytest.raises(Refused, match="leave the model out"):
        check_of_run(run, asked("--model", "mine.py", "--class-name", "Other", "--input-shape", "4,64"))


def test_commands_that_begin_together_get_a_name_each(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        names = list(pool.map(lambda dim: default_tag(tmp_path, Workload(model_args={"dim": dim})), range(4)))
    assert len(set(names)) == 4 and min(names, key=len) + "-2" in names


def test_a_run_at_work_is_not_verified_beside_it(run):
    """Both would write verify.json and its notes."""
    with run.locked(), pytest.raises(RunInProgress, match="in progress in another process"):
        verify.main(["--workspace", str(run.folder)])


def test_report_is_for_people(run):
    text = call("report")
    for expected in ("2 experiments (1 kept, 1 failed)", "2.50x PyTorch eager", "not verified yet", "autokernel/night"):
        assert expected in text
    assert text.startswith(
        f"test is not verified yet: no kernel is to be used in it\n  python orchestrate.py --tag {run.tag} "
    )
    assert (run / "progress.png").read_bytes().startswith(b"\x89PNG")
    assert "too bold" in (run / "report.md").read_text()
    gain = Interval(1.9, 2.0, 2.1)
    used = KernelInModel(TARGET.name, "rmsnorm", "k", 0.5, 2.5, 4, {INDUCTOR: gain}, (INDUCTOR,))
    write_json(run / VERIFY, encode(Verification("M", "cpu", True, (used,), speedups={INDUCTOR: {EAGER: gain}})))
    verified = call("report")
    begin = (
        "M is 2.00x as fast as eager [1.90, 2.10], with 1 of 1 kernels over inductor\n"
        f'  autokernel.apply(model, "{run.tag}", fallback="inductor")\n'
    )
    assert verified.startswith(begin) and (run / "report.md").read_text().split("```\n")[1].startswith(begin)
    page = unescape((run / "report.html").read_text()).partition("<h1>")[2]
    headline, pasted = (page.index(line.strip()) for line in begin.splitlines())
    assert headline < pasted < page.index("<h2>Targets") and "experiments: 1 kept, 1 failed" in page


def test_report_and_clean_are_for_programs_as_well(run):
    words = make_parser().parse_args(["run", "--json"])
    told = json.loads(call("report", json=words.json))
    assert (told["run"], told["verdict"], told["verification"]) == (
        run.tag,
        "test is not verified yet: no kernel is to be used in it",
        None,
    )
    assert told["summary"] == call("report") and told["report"] == str(run / "report.html")
    gone = json.loads(call("clean", tag=run.tag, json=True))
    assert gone["run"] == run.tag and gone["freed_bytes"] > 0 and not run.folder.exists()


def test_clean_takes_its_run_as_the_other_commands_do(capsys):
    words = [["clean", "night"], ["clean", "--tag", "night"], ["clean", "--tag=night"]]
    assert {make_parser().parse_args(given).tag for given in words} == {"night"}
    with pytest.raises(SystemExit):
        make_parser().parse_args(["clean", "night", "--tag", "day"])


def test_clean_without_a_name_lists_the_runs(run):
    with pytest.raises(NoRun, match=f"clean TAG; there are: {run.tag}$"):
        call("clean", tag=None)
    assert run.folder.exists()


def test_a_clone_that_git_refuses_to_read_is_not_one_without_runs(run, monkeypatch):
    """As one of another user's: it has what it had."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    with pytest.raises(NoRun, match="dubious ownership.*safe.directory"):
        run_tags(run.root)


@pytest.mark.parametrize(
    "ended, status, said",
    [
        (RunStopped("what came of it", signal.SIGTERM), 143, "what came of it\n"),
        (RunStopped("what came of it", signal.SIGINT), 130, "what came of it\n"),
        (Stopped(signal.SIGTERM), 143, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_the_exit_status_tells_of_the_signal_that_ended_it(ended, status, said, monkeypatch, capsys):
    """Once and twice: `orchestrate.py && deploy` deploys nothing that is not verified."""

    def stopped(arguments):
        raise ended

    monkeypatch.setattr(commands, "report", stopped)
    assert act(["report"]) == status and capsys.readouterr().out == said


def test_the_confidence_of_a_keep_is_the_gates_wherever_it_is_said(run):
    said = f"{100 * CONFIDENCE:g} %"
    assert f"put its {said} interval above" in call("report")
    for name in ("README.md", "program.md", "docs/gate.md", "docs/report.md"):
        text = (ROOT / name).read_text()
        assert said in text and not re.search(r"\b99(\.\d+)? % (confidence )?interval", text.replace(said, ""))


def test_what_was_proven_is_not_proven_again(run):
    """A run that goes on after a fault of verify.py: there is no judge here that could prove anything."""
    loop = Loop(run, PLAN_OF_ONE, None, print)
    known = Proof(TARGET.name, loop.rows[1].commit, Interval(1.1, 1.2, 1.3), True, "1.2 over cpp_kernel")
    write_json(run / PROOF, [encode(known)])
    assert prove_all(run, loop, print, print) == [known] == list(read_proofs(run).values())
    write_json(run / PROOF, [encode(replace(known, commit=loop.rows[0].commit))])  # of an earlier kernel
    with pytest.raises(AttributeError, match="compare"):
        prove_all(run, loop, print, print)


def test_clean_and_runs_that_are_not_there(run, clone):  # noqa: F811
    with pytest.raises(NoRun, match="other"):
        status(run.root, "other")
    assert "MB freed" in call("clean", tag="night")
    with pytest.raises(NoRun):
        call("clean", tag="night")
    with pytest.raises(NoRun, match="starts one"):
        status(clone)
    assert sh("git", "branch", "--list", "autokernel/*", cwd=clone) == ""


def user_state(root) -> tuple[str, ...]:
    questions = (("status", "--porcelain"), ("rev-parse", "HEAD"), ("branch", "--show-current"))
    return tuple(sh("git", *words, cwd=root) for words in questions)


TINY = """
import torch
from torch import nn


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.RMSNorm(768, eps=1e-6), nn.Linear(768, 64, bias=False)

    def forward(self, x):
        return self.out(torch.tanh(self.norm(x)))


def example_inputs():
    return (torch.randn(512, 768),)
"""
# An agent that looks for nothing: the tuner's rounds take longer than all the rest. Three pairs tell that this is slower.
TWICE = r"\n\nonce = kernel_fn\n\n\ndef kernel_fn(**given):\n    once(**given)\n    return once(**given)\n"
DOES_IT_TWICE = f"command: printf '{TWICE}' >> kernel.py; echo HYPOTHESIS: what is done twice is slower"
OF_TINY = ["--model", "../tiny.py", "--class-name", "Tiny", "--agent", DOES_IT_TWICE]
OF_ONE_LAYER = ["--input-shape", "1,64", "--model-args", '{"n_layers": 1}']


@pytest.mark.timed  # beside other tests its verification takes minutes longer
@pytest.mark.parametrize(
    ("experiments", "targets", "arguments"),
    [(1, 1, OF_TINY), pytest.param(3, 2, OF_ONE_LAYER, marks=pytest.mark.slow)],
    ids=["small", "one layer"],
)
def test_the_whole_job_shortened(tmp_path, experiments, targets, arguments):
    """Little of a model, short input, few experiments: all steps, in a clone, as someone without a git identity."""
    root = tmp_path / "clone"
    sh("git", "clone", "-q", str(ROOT), str(root), cwd=tmp_path)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") and k != "ANTHROPIC_API_KEY"}
    environment |= {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    (tmp_path / "tiny.py").write_text(TINY)
    limits = ["--experiments", str(experiments), "--top", str(targets), *arguments]
    command = [sys.executable, "orchestrate.py", "--tag", "short", "--device", "cpu", *limits]
    (root / "README.md").write_text("an edit of the user's, not committed\n")
    before = user_state(root)
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for heading in ("What got faster", "The whole model", "How it is known", "What was in the way", "What to do next"):
        assert heading in done.stdout
    run = Workspace(root, "short")
    rows = run.log.read()
    if undecided := next((row.description for row in rows if row.status == Status.UNDECIDED), ""):
        pytest.skip(f"too much else goes on for a verdict: {undecided}")
    assert sum(row.agent != STARTER for row in rows) == experiments
    assert all(row.correctness == "PASS" and row.speedup_vs_incumbent for row in rows if row.agent.startswith("command"))
    assert {row.experiment: row.row() for row in rows} == {e.row.experiment: e.row.row() for e in run.ledger.entries()}
    for name in ("profile.json", "plan.json", "proof.json", "verify.json", "report.html", "report.md", "progress.png"):
        assert (run / name).stat().st_size > 0
    assert user_state(root) == before

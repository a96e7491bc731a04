"""The winners of a run: into a model by the run's name, and only those that verify.py found to pay."""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autokernel.cli import commands
from autokernel.common.records import write_json
from autokernel.export.package import save, why_not
from autokernel.gate import Interval
from autokernel.integration.apply import apply
from autokernel.integration.verification.forms import EAGER, INDUCTOR, baseline
from autokernel.integration.verification.record import KernelInModel, Verification
from autokernel.integration.verification.winners import verified
from autokernel.integration.winner import Winner
from autokernel.run.workspace import PLAN, VERIFY, NoRun, Workspace
from autokernel.spec import ROOT, kernel_types, load_spec
from autokernel.target import Plan, default_target, encode
from tests.test_experiments import ROW
from tests.test_ledger import clone, sh  # noqa: F401  `clone` is a fixture

TARGET = default_target("rmsnorm", "cpp", "cpu", torch.float32)
WRONG = "def kernel_fn(x, weight, eps=1e-6):\n    return x.new_zeros(x.shape)\n"  # shows where it runs


def run_that_kept(source: str, root: Path) -> Workspace:
    """A run named night that kept this kernel for TARGET."""
    workspace = Workspace(root, "night")
    Plan("test", {}, "cpu", 1000.0, (TARGET,)).write(workspace / PLAN)
    workspace.ledger.open(worktree=False)
    row = replace(ROW, experiment=1, tag="night", kernel_type="rmsnorm", target=TARGET.name, status="kept")
    workspace.ledger.record(row, source)
    return workspace


@pytest.fixture
def run(clone) -> Workspace:  # noqa: F811
    """One that kept one kernel, which verify.py found to pay."""
    workspace = run_that_kept(WRONG, clone)
    write_json(workspace / VERIFY, encode(found(WRONG)))
    return workspace


def found(source: str, over: tuple[str, ...] = (EAGER, INDUCTOR)) -> Verification:
    """What verify.py may have said of one kernel: it pays `over` these."""
    gain, kernel = Interval(1.1, 1.2, 1.3), Winner(TARGET, source).name
    pays = KernelInModel(TARGET.name, "rmsnorm", kernel, 0.5, 2.0, 1, {o: gain for o in over}, over)
    return Verification("test", "cpu", True, (pays,), speedups={o: {EAGER: gain, baseline(o): gain} for o in over})


def is_replaced(norm: nn.Module, x: Tensor, run: Workspace) -> bool:
    torch._dynamo.reset()
    return bool(apply(norm, run.folder)(x).abs().max() == 0)


RUNNER = """
import sys, torch
sys.path.append(sys.argv[1])
norm = torch.nn.RMSNorm(768, eps=1e-6).requires_grad_(False)
compiled = torch.compile(norm, backend="autokernel", options={"run": sys.argv[2], "fallback": "inductor"})
assert compiled(torch.randn(512, 768)).abs().max() == 0, "the original ran"

VIEWED = '''
def viewed(x):  # which PyTorch 2.13's Dynamo takes for an error of the program
    try:
        return norm(x).view(-1, 7)
    except RuntimeError:
        return norm(x).view(-1, 8)
'''

def fails():
    exec(VIEWED, globals())
    try:
        torch.compile(viewed, backend="eager")(x)
    except torch._dynamo.exc.TorchRuntimeError:
        return True
    return False

x = torch.randn(512, 768)
failed = fails()
assert failed or not torch.__version__.startswith("2.13")
exec(VIEWED)
result = torch.compile(viewed, backend="autokernel", options={"run": sys.argv[2]})(x)
if failed:
    torch.testing.assert_close(result, viewed(x))
assert not torch._dynamo.config.suppress_errors
assert fails() == failed, "an error of another backend's was left out"
"""


@pytest.mark.slow
def test_torch_finds_the_backend_by_its_name_which_leaves_out_what_dynamo_fails_at(run, tmp_path) -> None:
    """As an installed package is found: by the entry point that pyproject.toml declares."""
    (declared,) = re.findall(
        r"\[project.entry-points.torch_dynamo_backends\]\n(.+)\n", (ROOT / "pyproject.toml").read_text()
    )
    installed = tmp_path / "site" / "autokernel-0.1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: autokernel\nVersion: 0.1.0\n")
    (installed / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{declared.replace(chr(34), '')}\n")
    environment = os.environ | {"PYTHONPATH": str(installed.parent)}
    subprocess.run([sys.executable, "-c", RUNNER, str(ROOT), str(run.folder)], env=environment, check=True)


def test_only_what_verify_left_in_is_applied(run) -> None:
    norm, x = nn.RMSNorm(768, eps=1e-6).requires_grad_(False), torch.randn(512, 768)
    assert is_replaced(norm, x, run)
    record = json.loads((run / VERIFY).read_text())
    record["kernels"][0]["used"] = [INDUCTOR]
    (run / VERIFY).write_text(json.dumps(record))
    assert not is_replaced(norm, x, run)
    (run / VERIFY).unlink()
    with pytest.raises(NoRun, match="not verified"):
        apply(norm, run.folder)


USER = """
import sys
import torch
import fast_norms
from fast_norms.autokernel.integration.apply import compile_with_kernels
from fast_norms.autokernel.integration.backend import Replacer

assert not {"autokernel", "reference"} & set(sys.modules), "the repository is in use"
(op,) = fast_norms.OPS.values()
norm, x = torch.nn.RMSNorm(768, eps=1e-6), torch.randn(512, 768)
torch.testing.assert_close(op(x, norm.weight), norm(x))
expected = norm(x)
assert fast_norms.apply(norm) is norm
torch.testing.assert_close(norm(x), expected)
norm(x).square().sum().backward()
assert norm.weight.grad is not None
replacer = Replacer(fast_norms.WINNERS)
compile_with_kernels(norm, replacer)(x)
assert len(replacer.replaced) == 1
fast_norms.apply(norm, fallback="inductor")
assert fast_norms.RECORD["pays"] == {"eager": [TARGET], "inductor": [], "reduce-overhead": []}
(winner,) = fast_norms.WINNERS
print(winner.name)
"""


@pytest.mark.slow
def test_saved_kernels_need_nothing_of_this_repository(tmp_path) -> None:
    winner = Winner(TARGET, load_spec("rmsnorm").starters("cpp")["cpp_kernel"].read_text())
    assert save(tmp_path / "site" / "fast_norms", found(winner.source, (EAGER,)), [winner]) == [winner]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "AUTOKERNEL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", USER.replace("TARGET", repr(TARGET.name))]
    printed = subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert printed.strip() == winner.name, "a saved kernel has another name than in graphs that were exported with it"
    assert save(tmp_path / "site" / "fast_norms", found(winner.source), [winner])  # anew


ELSEWHERE = """
import warnings
import torch
import fast_norms

norm, x = torch.nn.RMSNorm(768, eps=1e-6), torch.randn(512, 768)
expected = norm(x)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert fast_norms.apply(norm) is norm and torch.equal(norm(x), expected) and norm._compiled_call_impl is None
(said,) = said
assert said.filename == "<string>" and not fast_norms.OPS
print(said.message)
"""


def test_a_package_where_its_kernels_cannot_be_built_leaves_the_model_as_it_is(tmp_path) -> None:
    """No compiler, and no cache: a program that imports it goes on."""
    winner = Winner(TARGET, load_spec("rmsnorm").starters("cpp")["cpp_kernel"].read_text())
    save(tmp_path / "site" / "fast_norms", found(winner.source, (EAGER,)), [winner])
    environment = {"PATH": "/nowhere", "PYTHONPATH": str(tmp_path / "site"), "AUTOKERNEL_CACHE": str(tmp_path / "cache")}
    ended = subprocess.run([sys.executable, "-c", ELSEWHERE], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("the model is left as it is: ") and "need a C++ compiler" in ended.stdout, ended.stdout


@pytest.mark.parametrize("kernel_type", kernel_types())
def test_a_package_has_all_that_its_kernel_type_imports(tmp_path, kernel_type) -> None:
    """Patterns among it: those that cannot be imported are not searched for, and their kernels not put in."""
    winner, verification = Winner(replace(TARGET, kernel_type=kernel_type), WRONG), found(WRONG, (EAGER,))
    (pays,) = verification.kernels
    folder = tmp_path / "fast"
    assert save(folder, replace(verification, kernels=(replace(pays, kernel=winner.name),)), [winner])
    for path in folder.rglob("*.py"):
        for line in ast.parse(path.read_text()).body:
            if isinstance(line, ast.ImportFrom) and line.module.startswith("fast."):
                place = tmp_path / line.module.replace(".", "/")
                names = [place.with_suffix(".py")] if not place.is_dir() else [place / f"{n.name}.py" for n in line.names]
                assert all(name.is_file() for name in names), (path, line.module)
    assert (folder / "kernels" / kernel_type / "spec.py").is_file()


def test_a_folder_of_the_users_is_not_overwritten(tmp_path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "winners.json").write_text("[]")  # by its name one of ours
    with pytest.raises(FileExistsError):
        save(mine, found(WRONG), [Winner(TARGET, WRONG)])
    assert why_not(tmp_path / "no-name") and not why_not(tmp_path / "name")


def set_up_git(root: Path) -> None:
    """As a user has it who can commit: a name, no hooks, no signatures."""
    for hook in (root / ".git/hooks").iterdir():
        hook.unlink()
    sh("git", "config", "commit.gpgsign", "false", cwd=root)
    for name, value in (("name", "user"), ("email", "user@x")):
        sh("git", "config", f"user.{name}", value, cwd=root)


def test_merge_commits_the_winners_on_the_users_branch_and_nothing_else(run, clone, monkeypatch) -> None:  # noqa: F811
    monkeypatch.chdir(clone)
    set_up_git(clone)
    (clone / "staged.py").write_text("staged")
    sh("git", "add", "staged.py", cwd=clone)
    before = sh("git", "status", "--porcelain", cwd=clone)
    monkeypatch.setattr(commands, "HOME", clone)
    said = commands.merge(argparse.Namespace(tag="night", to=clone / "fast_norms", json=False))
    assert TARGET.name in said and said.endswith("import fast_norms; fast_norms.apply(model)")
    assert sh("git", "status", "--porcelain", cwd=clone) == before
    changed = sh("git", "show", "--format=%s", "--name-only", "main", cwd=clone).splitlines()
    assert changed[0] == "fast_norms: 1 kernel for test"
    assert {path.split("/")[0] for path in changed[2:]} == {"fast_norms"}
    assert f"fast_norms/winners/{Winner(TARGET, WRONG).name}.py" in changed
    assert commands.merge(argparse.Namespace(tag="night", to=clone / "fast_norms", json=False)).endswith("has them already")
    sh("git", "checkout", "-q", "--detach", cwd=clone)
    said = commands.merge(argparse.Namespace(tag="night", to=clone / "others", json=False))
    assert said.endswith(commands.OFF_BRANCH)


def test_merge_says_where_there_is_nothing_to_merge(run, clone, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr(commands, "HOME", clone)
    write_json(run / VERIFY, encode(found(WRONG, over=())))
    said = commands.merge(argparse.Namespace(tag="night", to=clone / "fast_norms", json=False))
    assert said.startswith("leave it as it is") and said.endswith("\nnothing to merge")
    assert not (clone / "fast_norms").exists()


REFUSED = {  # what is set up in the clone -> what git says
    "a hook that says nothing": (
        "printf '#!/bin/sh\\nexit 1' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit",
        "git failed (exit status 1): commit says nothing",
    ),
    "a hook": ("printf '#!/bin/sh\\necho no >&2; exit 1' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit", "no"),
    "a signature": ("git config commit.gpgsign true; git config gpg.program /bin/false", "gpg failed to sign"),
    "a lock": ("touch .git/index.lock", "index.lock"),
    "no identity": ("git config user.useConfigOnly true; git config --unset user.email", "whose commit it is (git config"),
    "a merge": ("git rev-parse HEAD > .git/MERGE_HEAD", "partial commit during a merge"),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", REFUSED)
def test_a_commit_that_git_refuses_is_told_in_a_line(run, clone, monkeypatch, capsys, case) -> None:  # noqa: F811
    monkeypatch.chdir(clone)
    monkeypatch.setattr(commands, "HOME", clone)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for role in ("AUTHOR", "COMMITTER"):
        for what in ("NAME", "EMAIL"):
            monkeypatch.delenv(f"GIT_{role}_{what}", raising=False)
    set_up, says = REFUSED[case]
    set_up_git(clone)
    sh("sh", "-c", set_up, cwd=clone)
    with pytest.raises(SystemExit) as end:
        commands.merge(argparse.Namespace(tag="night", to=clone / "fast_norms", json=False))
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1
    assert "is written, but not committed" in said and says in said and "the same command commits it" in said
    assert sh("git", "status", "--porcelain", "fast_norms", cwd=clone).strip() == "?? fast_norms/", "something stays staged"


def test_a_kernel_that_was_verified_is_the_one_that_is_used(run) -> None:
    """verify.py --kernels judges other sources than those that the run kept."""
    record = json.loads((run / VERIFY).read_text())
    record["kernels"][0]["kernel"] = "rmsnorm_of_a_folder"
    (run / VERIFY).write_text(json.dumps(record))
    verification, winners = verified(run)
    assert winners and verification.selected(winners, None) == verification.selected(winners, "inductor") == []


def test_there_is_nothing_to_merge_where_nothing_paid(run, clone, monkeypatch) -> None:  # noqa: F811
    write_json(run / VERIFY, encode(replace(found(WRONG, ()), kernels=())))
    monkeypatch.setattr(commands, "HOME", clone)
    said = commands.merge(argparse.Namespace(tag="night", to=clone / "fast_norms", json=False))
    assert said.startswith("leave it as it is") and not (clone / "fast_norms").exists()

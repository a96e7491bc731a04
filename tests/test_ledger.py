"""Git: what is kept and what is not, the user's checkout untouched, rows rebuilt from commits, kills between two refs."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import git
import pytest

from autokernel.history.ledger import GitLedger, Renamed, around, message, parse, repository
from tests.test_experiments import ROW


def sh(*command: str, cwd: Path) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A repository of a user without identity, with hooks that fail, forced signing, and uncommitted and staged edits."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [n for n in os.environ if n.startswith(("GIT_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    root = tmp_path / "clone"
    root.mkdir()
    sh("git", "init", "-q", "-b", "main", cwd=root)
    (root / "kernel.py").write_text("original\n")
    (root / "other.py").write_text("other\n")
    (root / ".gitignore").write_text("/workspace/\n/results.tsv\n")
    sh("git", "add", ".", cwd=root)
    sh("git", "-c", "user.name=u", "-c", "user.email=u@x", "commit", "-qm", "first", cwd=root)
    sh("git", "config", "commit.gpgsign", "true", cwd=root)
    for hook in ("pre-commit", "commit-msg", "post-checkout", "reference-transaction", "post-index-change"):
        path = root / ".git/hooks" / hook
        path.write_text(f"#!/bin/sh\necho {hook} >> '{tmp_path}/hooks-that-ran'\nexit 1\n")
        path.chmod(0o755)
    (root / "other.py").write_text("edited, not committed\n")
    (root / "kernel.py").write_text("edited by hand, not committed\n")
    return root


@pytest.fixture
def ledger(clone) -> GitLedger:
    ledger = GitLedger(clone, "night", clone / "workspace/night")
    ledger.open()
    return ledger


def state(root: Path) -> tuple:
    """All that belongs to the user: HEAD, branch, index, status, files."""
    return (
        (root / ".git/HEAD").read_text(),
        sh("git", "rev-parse", "main", cwd=root),
        (root / ".git/index").read_bytes(),
        sh("git", "--no-optional-locks", "status", "--porcelain", cwd=root),
        (root / "kernel.py").read_text(),
        (root / "other.py").read_text(),
    )


def test_kept_advances_the_branch_and_the_rest_stays_reachable(clone, tmp_path):
    before = state(clone)
    ledger = GitLedger(clone, "night", clone / "workspace/night")
    ledger.open()
    base = ledger.head
    kept = ledger.record(replace(ROW, experiment=1), "better\n")
    failed = ledger.record(replace(ROW, experiment=2, status="failed"), "worse\n", "wrong by 3.0")
    ledger.write("half an edit")
    ledger.reset()

    assert not (tmp_path / "hooks-that-ran").exists()
    assert ledger.head == kept.commit
    assert (ledger.source(kept.commit), ledger.source(failed.commit)) == ("better\n", "worse\n")
    assert sh("git", "rev-parse", "refs/autokernel/night/2", cwd=clone) == failed.commit
    for commit in (kept.commit, failed.commit):
        assert sh("git", "show", "--format=", "--name-only", commit, cwd=clone) == "kernel.py"
    assert sh("git", "rev-parse", f"{kept.commit}^", f"{failed.commit}^", cwd=clone).split() == [base, kept.commit]
    assert (ledger.tree / "kernel.py").read_text() == "better\n"
    assert (ledger.tree / "other.py").read_text() == "other\n"
    assert sh("git", "status", "--porcelain", cwd=ledger.tree) == ""
    assert state(clone) == before
    assert sh("git", "log", "-1", "--format=%an <%ae> %cn %G?", kept.commit, cwd=clone) == (
        "AutoKernel <autokernel@localhost> AutoKernel N"
    )
    assert sh("git", "fsck", "--strict", cwd=clone) == ""


def test_the_configured_identity_is_used(clone):
    sh("git", "config", "user.name", "Ada", cwd=clone)
    sh("git", "config", "user.email", "ada@example.org", cwd=clone)
    ledger = GitLedger(clone, "night", clone / "workspace/night")
    ledger.open()
    commit = ledger.record(ROW, "x\n").commit
    assert sh("git", "log", "-1", "--format=%an <%ae>", commit, cwd=clone) == "Ada <ada@example.org>"


@pytest.mark.parametrize("notes", ["", "one line", "two\n\nparagraphs: with colons\nStatus: kept"])
def test_a_row_is_rebuilt_from_its_commit(ledger, notes):
    rows = [
        ledger.record(replace(ROW, experiment=1, description="über:\tall\n\nShape: 3"), "a\n", notes),
        ledger.record(replace(ROW, experiment=10, status="crash", latency_us=None, speedup_low=None), "b\n", notes),
        ledger.record(replace(ROW, experiment=9, status="reset"), "c\n", notes),
    ]
    rows[0] = replace(rows[0], description="über: all Shape: 3")
    fresh = GitLedger(Path(ledger.repo.working_dir), "night", ledger.tree.parent)
    assert [entry.row for entry in fresh.entries()] == [rows[0], rows[2], rows[1]]
    assert [entry.notes for entry in fresh.entries()] == [notes] * 3


def test_the_message_reads_for_people_and_machines():
    text = message(ROW, "faster beyond doubt")
    assert text.splitlines()[0] == "#1 rmsnorm_512x768_float32: kept 1.083x [1.051, 1.116]: CHUNK_ROWS 16 -> 4"
    assert "Latency-us: 98.5" in text and "Hypothesis: CHUNK_ROWS 16 -> 4" in text
    assert parse(text, ROW.commit).row == ROW


def test_an_experiment_number_is_used_once(ledger):
    first = ledger.record(ROW, "a\n")
    with pytest.raises(git.GitCommandError):
        ledger.record(ROW, "b\n")
    assert (ledger.head, len(ledger.entries())) == (first.commit, 1)


def test_ctrl_c_does_not_reach_git(ledger):
    """A terminal sends SIGINT to the whole group, so to git as well; a child must start with it blocked."""
    assert "SIGINT" in ledger._execute(["sh", "-c", "kill -INT $$; echo SIGINT was waiting"])


def test_changing_target_is_a_commit_of_its_own(ledger):
    commit = ledger.start_target("matmul_x", "starter\n", "put in its starter")
    assert ledger.head == commit
    assert sh("git", "log", "-1", "--format=%B", commit, cwd=ledger.tree) == "matmul_x: put in its starter"
    assert ledger.entries() == []


@pytest.mark.parametrize("lost", ["ref", "branch"])
def test_a_kill_between_the_two_refs_is_mended(ledger, lost):
    base = ledger.head
    kept = ledger.record(ROW, "better\n")
    ref = f"{ledger.prefix}1"
    if lost == "ref":
        (Path(ledger.repo.common_dir) / ref).unlink()
    else:
        (Path(ledger.repo.common_dir) / ledger.branch).write_text(f"{base}\n")
    again = GitLedger(Path(ledger.repo.working_dir), "night", ledger.tree.parent)
    again.open()
    assert again.head == kept.commit
    assert [entry.row for entry in again.entries()] == [kept]
    assert (again.tree / "kernel.py").read_text() == "better\n"


def test_an_edit_by_hand_is_put_aside_before_it_is_written_over(ledger):
    """What a run has put there is none: a candidate, what is about to be judged, what a kill left of either."""
    kernel = ledger.tree / "kernel.py"
    ledger.write("candidate\r\nof two lines\n")
    ledger.reset()
    ledger.start_target("t", "starter\n", "put in its starter")
    ledger.reset()
    again = GitLedger(ledger.root, ledger.tag, ledger.folder)
    again.expect("about to be judged\n")
    kernel.write_text("about to be judged\n")
    again.open()
    assert kernel.read_text() == "starter\n" and not again.aside and not list(ledger.folder.glob("*.py"))
    kernel.write_text("by hand\n")
    assert again.edited() == "by hand\n"
    again.write("candidate\n")
    again.reset()
    kernel.write_text("by hand, again\n")
    again.open()
    assert [path.read_text() for path in again.aside] == ["by hand\n", "by hand, again\n"]
    assert kernel.read_text() == "starter\n" and again.edited() is None


def test_stale_locks_of_a_killed_git_do_not_block(ledger):
    common = Path(ledger.repo.common_dir)
    ledger.record(ROW, "better\n")
    for lock in (f"{ledger.branch}.lock", f"{ledger.prefix}2.lock"):
        (common / lock).touch()
    for name in ("HEAD.lock", "index.lock"):
        (ledger._linked / name).touch()
    ledger.open()
    assert ledger.record(replace(ROW, experiment=2), "best\n").experiment == 2

    ledger.reset()
    assert sh("git", "status", "--porcelain", cwd=ledger.tree) == ""


def test_the_last_commit_has_every_winner_and_the_run_goes_on_from_there(ledger):
    ledger.record(ROW, "better\n")
    files = {"softmax.py": "one\n", "README.md": "both\n"}
    commit = ledger.close(files, "kernels_of_this_run: faster")
    assert ledger.head == commit and ledger.close(files, "again") is None
    assert sh("git", "show", "--format=", "--name-only", commit, cwd=ledger.tree).split() == [
        "kernels_of_this_run/README.md",
        "kernels_of_this_run/softmax.py",
    ]
    shutil.rmtree(ledger.tree / "kernels_of_this_run")  # as if killed before the files were there
    again = GitLedger(Path(ledger.repo.working_dir), "night", ledger.tree.parent)
    again.open()
    assert again.head == commit and (again.tree / "kernels_of_this_run/softmax.py").read_text() == "one\n"
    kept = again.record(replace(ROW, experiment=2), "best\n").commit
    again.reset()
    assert sh("git", "show", "--format=", "--name-only", kept, cwd=again.tree) == "kernel.py"
    assert again.close(files | {"softmax.py": "two\n"}, "kernels_of_this_run: faster still")
    assert (again.tree / "kernels_of_this_run/softmax.py").read_text() == "two\n"
    assert sh("git", "status", "--porcelain", cwd=again.tree) == ""
    assert len(again.entries()) == 2


def test_without_a_worktree(clone):
    before = state(clone)
    ledger = GitLedger(clone, "hand", clone / "workspace/hand")
    ledger.open(worktree=False)
    assert ledger.source(ledger.record(ROW, "better\n").commit) == "better\n"
    assert not ledger.has_tree
    assert state(clone) == before


def test_a_copy_of_a_clone_has_a_tree_of_its_own(ledger):
    """The copied one is still linked to the clone that it was copied from, whose index and HEAD are not to be written."""
    (ledger.tree / "kernel.py").write_text("by hand\n")
    root = ledger.root.with_name("copy")
    shutil.copytree(ledger.root, root, symlinks=True)
    linked = ledger._linked
    before = {path: path.read_bytes() for path in linked.rglob("*") if path.is_file()}
    copy = GitLedger(root, "night", root / "workspace/night")
    copy.open()
    copy.start_target("t", "starter\n", "put in its starter")
    copy.reset()
    assert (copy.tree / "kernel.py").read_text() == "starter\n" and sh("git", "status", "-s", cwd=copy.tree) == ""
    assert [path.read_text() for path in copy.aside] == ["by hand\n"]
    assert before == {path: path.read_bytes() for path in linked.rglob("*") if path.is_file()}
    assert copy._linked.is_relative_to(root)


def test_a_folder_that_was_renamed_is_not_begun_anew(ledger):
    """Its tree is on the branch that it began with, and none of its experiments would be found."""
    before = sh("git", "for-each-ref", cwd=ledger.root)
    ledger.folder.rename(renamed := ledger.folder.with_name("other"))
    with pytest.raises(Renamed, match=f"mv {renamed} {ledger.folder}, and go on with --tag night"):
        GitLedger(ledger.root, "other", renamed).open()
    assert sh("git", "for-each-ref", cwd=ledger.root) == before
    renamed.rename(ledger.folder)
    GitLedger(ledger.root, "night", ledger.folder).open()


def test_remove_leaves_no_trace(clone):
    before = state(clone), sh("git", "for-each-ref", cwd=clone)
    ledger = GitLedger(clone, "night", clone / "workspace/night")
    ledger.open()
    ledger.record(ROW, "better\n")
    ledger.remove()
    assert (state(clone), sh("git", "for-each-ref", cwd=clone)) == before
    assert sh("git", "worktree", "list", "--porcelain", cwd=clone).count("worktree ") == 1


@pytest.mark.filterwarnings("error")
def test_a_folder_whose_name_has_a_variable_in_it(tmp_path):
    for root in (tmp_path / "$AUTOKERNEL_ELSEWHERE", tmp_path / "~"):
        sh("git", "init", "-q", str(root), cwd=tmp_path)
        identity = ("-c", "user.name=u", "-c", "user.email=u@x", "-c", "commit.gpgsign=false")
        sh("git", *identity, "commit", "-q", "--allow-empty", "-m", "x", cwd=root)
        assert Path(repository(root).working_dir) == root == Path(around(root / "package").working_dir)

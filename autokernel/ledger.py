"""Git as the notebook of a run: a branch of what was kept, a ref for everything tried, and never the user's checkout.

Written with plumbing only (hash-object, a temporary index, commit-tree, update-ref): no hook runs, nothing is signed, and
no lock of the user's index is ever taken. The verdict stands in the commit's message, so a lost row is rebuilt from it.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import git

from autokernel.experiments import COLUMNS, Experiment, cell

KERNEL = "kernel.py"
FALLBACK_IDENTITY = ("AutoKernel", "autokernel@localhost")
NO_HOOKS = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.hooksPath", "GIT_CONFIG_VALUE_0": os.devnull}
TRAILERS = {name: name.replace("_", "-").capitalize() for name in COLUMNS if name != "commit"} | {
    "description": "Hypothesis"
}


@dataclass(frozen=True)
class Entry:
    """An experiment as git has it."""

    row: Experiment
    notes: str  # the message's body: what the gate said at length


class GitLedger:
    """The experiments of one tag. `folder` is the run's own (workspace/<tag>); its `tree` is a linked worktree."""

    def __init__(self, root: Path, tag: str, folder: Path) -> None:
        self.repo = git.Repo(root)
        self.tag = tag
        self.tree = folder / "tree"
        self.branch = f"refs/heads/autokernel/{tag}"
        self.prefix = f"refs/autokernel/{tag}/"

    @cached_property
    def _environment(self) -> dict[str, str]:
        """Git's environment: no hooks, and an identity for those who have configured none."""
        name, email = (self.repo.git.config("--get", f"user.{key}", with_exceptions=False) for key in ("name", "email"))
        fallback_name, fallback_email = FALLBACK_IDENTITY
        identity = {}
        for role in ("AUTHOR", "COMMITTER"):
            identity[f"GIT_{role}_NAME"] = os.environ.get(f"GIT_{role}_NAME") or name or fallback_name
            identity[f"GIT_{role}_EMAIL"] = os.environ.get(f"GIT_{role}_EMAIL") or email or fallback_email
        return NO_HOOKS | identity

    @contextmanager
    def _git(self, **extra: str) -> Iterator[git.Git]:
        """Git, while signals wait: Ctrl-C reaches a terminal's whole process group, and children inherit the mask."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            with self.repo.git.custom_environment(**self._environment, **extra):
                yield self.repo.git
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def open(self, worktree: bool = True) -> None:
        """Make the branch (at the checkout's HEAD) and the worktree if they do not exist; clear what a kill left there."""
        with self._git() as run:
            if not self._ref(self.branch):
                run.update_ref(self.branch, run.rev_parse("HEAD"), "")
            if worktree and not (self.tree / ".git").exists():
                shutil.rmtree(self.tree, ignore_errors=True)
                run.worktree("prune")
                run.worktree("add", "--quiet", "--force", str(self.tree), f"autokernel/{self.tag}")
        self._settle()
        if self.has_tree:
            self.reset()

    def _settle(self) -> None:
        """Finish what a kill interrupted inside record(): stale locks, and one of its two refs moved without the other.

        The locks are ours: the caller holds the run's lock, so no other process writes these refs.
        """
        common = Path(self.repo.common_dir)
        heads = [self._linked / "HEAD.lock"] if self.has_tree else []
        for lock in (common / f"{self.branch}.lock", *common.glob(f"{self.prefix}*.lock"), *heads):
            lock.unlink(missing_ok=True)
        entries, head = self.entries(), self.head
        with self._git() as run:
            text = run.show("--no-patch", "--format=%B", head)
            kept = [entry.row.commit for entry in entries if entry.row.status == "kept"]
            unborn = kept and run.rev_parse(f"{kept[-1]}^") == head
        if f"\nTag: {self.tag}\n" in text and head not in {entry.row.commit for entry in entries}:
            with self._git() as run:
                run.update_ref(f"{self.prefix}{parse(text, head).row.experiment}", head)
        if unborn:
            self._advance(kept[-1])

    @property
    def has_tree(self) -> bool:
        return (self.tree / ".git").exists()

    @property
    def _linked(self) -> Path:
        """The worktree's own folder inside .git: its HEAD and index."""
        return Path((self.tree / ".git").read_text().removeprefix("gitdir: ").strip())

    def _ref(self, name: str) -> str | None:
        with self._git() as run:
            return run.for_each_ref(name, format="%(objectname)") or None

    @property
    def head(self) -> str:
        commit = self._ref(self.branch)
        assert commit, f"{self.branch} does not exist: open() makes it"
        return commit

    def source(self, commit: str) -> str:
        with self._git() as run:
            return run.cat_file("blob", f"{commit}:{KERNEL}", strip_newline_in_stdout=False)

    def write(self, source: str) -> None:
        """Put a candidate into the worktree's kernel.py, for whoever looks."""
        (self.tree / KERNEL).write_text(source)

    def reset(self) -> None:
        """Bring the worktree and its index to the branch. The index is replaced whole, so a stale lock cannot block it."""
        linked = self._linked
        scratch = linked / "index.autokernel"
        head = self.head
        with self._git(GIT_INDEX_FILE=str(scratch)) as run:
            run.read_tree(head)
        os.replace(scratch, linked / "index")
        (linked / "index.lock").unlink(missing_ok=True)
        self.write(self.source(head))

    def _commit(self, source: str, message: str) -> str:
        """A commit on top of the branch that changes kernel.py alone."""
        parent = self.head
        with tempfile.TemporaryDirectory() as folder, self._git(GIT_INDEX_FILE=f"{folder}/index") as run:
            text, words = Path(folder, "source"), Path(folder, "message")
            text.write_text(source)
            words.write_text(message)
            blob = run.hash_object("-w", "--no-filters", str(text))
            run.read_tree(parent)
            run.update_index("--add", "--cacheinfo", f"100644,{blob},{KERNEL}")
            return run.commit_tree(run.write_tree(), "-p", parent, "-F", str(words))

    def start_target(self, target: str, source: str, words: str) -> str:
        """Changing target is a commit of its own: kernel.py becomes the target's incumbent, or its starter."""
        commit = self._commit(source, f"{target}: {words}\n")
        self._advance(commit)
        return commit

    def _advance(self, commit: str) -> None:
        head = self.head
        with self._git() as run:
            run.update_ref(self.branch, commit, head)

    def record(self, row: Experiment, source: str, notes: str = "") -> Experiment:
        """The experiment's final commit and ref; the branch advances to it if it was kept. Returns the row with its commit.

        Both refs move in one transaction: it is the point at which the experiment has happened.
        """
        parent, commit = self.head, self._commit(source, message(row, notes))
        updates = [f"create {self.prefix}{row.experiment} {commit}"]
        if row.status == "kept":
            updates.append(f"update {self.branch} {commit} {parent}")
        with self._git() as run, tempfile.TemporaryFile() as lines:
            lines.write("".join(f"{line}\n" for line in updates).encode())
            lines.seek(0)
            run.update_ref("--stdin", istream=lines)
        return replace(row, commit=commit)

    def entries(self) -> list[Entry]:
        """Every experiment of this tag, in order, read from the refs."""
        with self._git() as run:
            listing = run.for_each_ref(self.prefix, format="%(objectname)%00%(contents)%00%00")
        records = (record.strip("\n").split("\0", 1) for record in listing.split("\0\0"))
        entries = [parse(text, commit) for commit, text in (r for r in records if len(r) == 2)]
        return sorted(entries, key=lambda entry: entry.row.experiment)

    def remove(self) -> None:
        """Delete the worktree, the branch and every ref of this tag; what they held becomes garbage for git to collect."""
        with self._git() as run:
            if self.has_tree:
                run.worktree("remove", "--force", str(self.tree))
            for name in run.for_each_ref(self.prefix, self.branch, format="%(refname)").split():
                run.update_ref("-d", name)


def message(row: Experiment, notes: str) -> str:
    """Subject for people, the gate's words, then every field as a trailer for machines."""
    gain = f" {row.speedup_vs_incumbent:.3f}x" if row.speedup_vs_incumbent else ""
    subject = f"#{row.experiment} {row.target}: {row.status}{gain}: {cell(row.description)}"
    trailers = "\n".join(f"{label}: {cell(getattr(row, name))}" for name, label in TRAILERS.items())
    return f"{subject}\n\n{notes.strip()}\n\n{trailers}\n"


def parse(text: str, commit: str) -> Entry:
    """The inverse of message()."""
    head, _, tail = text.strip().rpartition("\n\n")
    given = dict(line.partition(":")[::2] for line in tail.split("\n"))
    cells = {name: given[label].strip() for name, label in TRAILERS.items()}
    return Entry(Experiment.from_cells(cells | {"commit": commit}), head.partition("\n\n")[2])

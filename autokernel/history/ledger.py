"""Git as the notebook of a run: a branch of what was kept, a ref for everything tried, and never the user's checkout.

Written with plumbing only (hash-object, mktree, commit-tree, update-ref): no hook runs, nothing is signed, and no lock of
the user's index is ever taken. The verdict stands in the commit's message, so a lost row is rebuilt from it.
"""

import fcntl
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # or its import fails where there is no git: repository() says so

from autokernel.common.preflight import Refused, why_no_repository
from autokernel.common.records import BadRecord
from autokernel.history.experiments import COLUMNS, Experiment, cell
from autokernel.history.runs import run_refs

try:
    import git
    from git import GitCommandError as GitFailed
except ImportError as error:  # it asks git for its version: a configuration that git cannot read ends it
    raise Refused(f"git cannot be used here: {error}") from error

KERNEL = "kernel.py"
EDITED = "kernel_edited_*.py"  # in the run's folder: an edit of its tree's kernel.py that no experiment was made of
RESULT = "kernels_of_this_run"  # a folder of the branch: every target's best kernel, once the run has come to an end
FALLBACK_IDENTITY = ("AutoKernel", "autokernel@localhost")
SETTINGS = {  # of our git alone: no hooks, no reflogs that a kill could tear, and objects on the disk before refs name them
    "core.hooksPath": os.devnull,
    "core.logAllRefUpdates": "false",
    "core.fsync": "loose-object,reference",
}
TRAILERS = {name: name.replace("_", "-").capitalize() for name in COLUMNS if name != "commit"} | {
    "description": "Hypothesis"
}


@dataclass(frozen=True)
class LedgerEntry:
    """An experiment as git has it."""

    row: Experiment
    notes: str  # the message's body: what the gate said at length


class NoRepository(Refused, RuntimeError):
    """Git is missing, or this is no clone; the message says what to do."""


class CheckedOut(Refused, RuntimeError):
    """The run's branch is checked out where the user works; the message says what to do."""


class Renamed(Refused, RuntimeError):
    """The run's folder had another name; the message says what to do."""


def as_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Of a git with these settings, after those that the environment has: a safe.directory of continuous integration's."""
    given = os.environ.get("GIT_CONFIG_COUNT", "")
    first = int(given) if given.isdecimal() else 0
    environment = {"GIT_CONFIG_COUNT": str(first + len(settings))}
    for n, (key, value) in enumerate(settings.items(), first):
        environment |= {f"GIT_CONFIG_KEY_{n}": key, f"GIT_CONFIG_VALUE_{n}": value}
    return environment


def in_words(error: Exception) -> str:
    """Of what git refuses, its own words."""
    if not isinstance(error, GitFailed):
        return str(error)
    said = " ".join(error.stderr.split()).removeprefix("stderr: ").strip("'")
    return f"git failed (exit status {error.status}): {said or f'{error.command[1]} says nothing (a hook of yours?)'}"


def repository(root: Path) -> git.Repo:
    """The clone's own, never that of a folder above it. Raises NoRepository."""
    if reason := why_no_repository(root):
        raise NoRepository(reason)
    return git.Repo(root, expand_vars=False)  # a folder may have a $ in its name


class GitLedger:
    """The experiments of one tag. `folder` is the run's own (workspace/<tag>); its `tree` is a linked worktree.

    Raises NoRepository.
    """

    def __init__(self, root: Path, tag: str, folder: Path) -> None:
        self.root = root
        self.repo = repository(root)
        self.tag = tag
        self.folder = folder
        self.tree = folder / "tree"
        self.branch = f"refs/heads/autokernel/{tag}"
        self.prefix = f"refs/autokernel/{tag}/"
        self._expected: list[list[str]] = []  # lines that the worktree's kernel.py may hold which are no edit by hand
        self.aside: list[Path] = []  # edits by hand that were written over, as files

    @cached_property
    def _environment(self) -> dict[str, str]:
        """Git's environment: SETTINGS, and an identity for those who have configured none."""
        name, email = (self.repo.git.config("--get", f"user.{key}", with_exceptions=False) for key in ("name", "email"))
        fallback_name, fallback_email = FALLBACK_IDENTITY
        identity = {}
        for role in ("AUTHOR", "COMMITTER"):
            identity[f"GIT_{role}_NAME"] = os.environ.get(f"GIT_{role}_NAME") or name or fallback_name
            identity[f"GIT_{role}_EMAIL"] = os.environ.get(f"GIT_{role}_EMAIL") or email or fallback_email
        return as_environment(SETTINGS) | identity

    def _ask(self, *words: str, **extra: str) -> str:
        """What git answers to a question, which takes no lock: a run's folder may be gone, or read-only."""
        with _signals_wait():
            return self.repo.git.execute(["git", *words], env=extra, strip_newline_in_stdout=False).removesuffix("\n")

    def _git(self, *words: str, text: str = "", **extra: str) -> str:
        """What git answers; it reads `text`."""
        return self._execute(["git", *words], text, **extra).removesuffix("\n")

    def _execute(self, command: list[str], text: str = "", **extra: str) -> str:
        """Run a command while signals wait: Ctrl-C reaches a terminal's whole process group, and children inherit the mask.

        It holds a lock as long as it lives, so that a run that is resumed does not meet a git whose parent was killed.
        """
        with _signals_wait(), self._lock(fcntl.LOCK_SH) as lock, tempfile.TemporaryFile() as stdin:
            stdin.write(text.encode())
            stdin.seek(0)
            return self.repo.git.execute(
                command,
                istream=stdin,
                env=self._environment | extra,
                strip_newline_in_stdout=False,
                pass_fds=[lock],
            )

    @contextmanager
    def _lock(self, kind: int) -> Iterator[int]:
        with open(self.folder / "git-lock", "a") as file:
            fcntl.flock(file, kind)
            yield file.fileno()

    def open(self, worktree: bool = True) -> None:
        """Make the branch (at the checkout's HEAD) and the worktree if they do not exist; mend what a kill left there.

        Raises CheckedOut, Renamed.
        """
        self._check_name()
        self._check_unused()
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock(fcntl.LOCK_EX):  # waits for what a kill left running
            pass
        self._unlock()
        if not self._ref(self.branch):
            self._git("update-ref", self.branch, self._git("rev-parse", "HEAD"), "")
        self._settle()
        if worktree and not self.has_tree:
            self._put_aside()
            self._forget_tree()
            branch = self.branch.removeprefix("refs/heads/")
            self._git("worktree", "add", "--quiet", "--force", "--no-checkout", str(self.tree), branch)
        if self.has_tree:
            self.reset(everything=True)

    def _check_name(self) -> None:
        """A run's folder that was renamed has the tree of the branch that the run began with, and none of its rows."""
        if not self.has_tree or self._ref(self.branch):
            return
        began = (self._linked / "HEAD").read_text().strip().removeprefix("ref: ")
        folder = self.folder.with_name(began.rpartition("/")[2])
        if self._ref(began) and began.rpartition("/")[0] == self.branch.rpartition("/")[0] and not folder.exists():
            raise Renamed(
                f"{self.folder} was {folder.name}, as which git has its experiments: "
                f"mv {shlex.quote(str(self.folder))} {shlex.quote(str(folder))}, and go on with --tag {folder.name}"
            )

    def _check_unused(self) -> None:
        """The branch moves with every experiment that is kept: nobody may have it checked out, but for the run's tree."""
        for listed in self._ask("worktree", "list", "--porcelain").split("\n\n"):
            lines = listed.splitlines()
            if f"branch {self.branch}" not in lines:
                continue
            place = Path(lines[0].removeprefix("worktree ")).resolve()
            if place != self.tree.resolve() and self._is_linked(place):
                raise _checked_out(self.branch.removeprefix("refs/heads/"), place)

    def _is_linked(self, place: Path) -> bool:
        """Whether what git lists as a worktree is one still: not where the clone was moved, or copied from another's."""
        link = place / ".git"
        return link.is_dir() or (link.is_file() and self._is_ours(_leads_to(link)))

    def _is_ours(self, linked: Path) -> bool:
        return linked.parent.resolve() == Path(self.repo.common_dir, "worktrees").resolve()

    def _unlock(self) -> None:
        """Remove the locks that a killed git left: the caller holds the run's lock, and no other run takes these."""
        common = Path(self.repo.common_dir)
        heads = [linked / "HEAD.lock" for linked in self._linked_folders()]
        for lock in (common / f"{self.branch}.lock", *common.glob(f"{self.prefix}*.lock"), *heads):
            lock.unlink(missing_ok=True)

    def _settle(self) -> None:
        """Finish what a kill interrupted inside record(): one of its two refs moved without the other."""
        entries, head = self.entries(), self.head
        text = self._git("show", "--no-patch", "--format=%B", head)
        if f"\nTag: {self.tag}\n" in text and head not in {entry.row.commit for entry in entries}:
            self._git("update-ref", f"{self.prefix}{parse(text, head).row.experiment}", head)
        kept = [entry.row.commit for entry in entries if entry.row.status == "kept"]
        if kept and self._git("rev-parse", f"{kept[-1]}^") == head:
            self._advance(kept[-1])

    def _linked_folders(self) -> list[Path]:
        """Git's own folders of this worktree (its HEAD and index): one, or what an interrupted start has left."""
        folders = Path(self.repo.common_dir).glob("worktrees/*")
        wanted = str(self.tree / ".git")
        return [f for f in folders if (f / "gitdir").exists() and (f / "gitdir").read_text().strip() == wanted]

    def _forget_tree(self) -> None:
        """Remove the worktree, whole or half made."""
        for linked in self._linked_folders():
            shutil.rmtree(linked)
        if self.tree.is_symlink():
            self.tree.unlink()  # whatever it leads to is not ours
        shutil.rmtree(self.tree, ignore_errors=True)

    @property
    def has_tree(self) -> bool:
        """Whether git knows the worktree: it does once its HEAD is there, which `git worktree add` writes last.

        In a copy of a clone the tree is still the original's.
        """
        link = self.tree / ".git"
        return (
            link.exists()
            and not self.tree.is_symlink()
            and self._is_ours(self._linked)
            and (self._linked / "HEAD").exists()
            and not (self._linked / "locked").exists()
        )

    @property
    def _linked(self) -> Path:
        """The worktree's own folder inside .git: its HEAD and index."""
        return _leads_to(self.tree / ".git")

    def _ref(self, name: str) -> str | None:
        return self._git("for-each-ref", "--format=%(objectname)", name) or None

    @property
    def head(self) -> str:
        commit = self._ref(self.branch)
        assert commit, f"{self.branch} does not exist: open() makes it"
        return commit

    def source(self, commit: str) -> str:
        with _signals_wait():
            return self.repo.git.execute(["git", "cat-file", "blob", f"{commit}:{KERNEL}"], strip_newline_in_stdout=False)

    def write(self, source: str) -> None:
        """Put a candidate into the worktree's kernel.py, for whoever looks."""
        self._put_aside()
        (self.tree / KERNEL).write_text(source)
        self.expect(source)

    def expect(self, *sources: str) -> None:
        """What is judged, or about to be: until the next reset it may stand in the worktree's kernel.py."""
        self._expected += [source.splitlines() for source in sources]

    def edited(self) -> str | None:
        """What the worktree's kernel.py was edited to, where that is neither what git put there nor known to the run."""
        file = self.tree / KERNEL
        if self.tree.is_symlink() or not file.is_file():
            return None
        there = ""
        if self.has_tree:
            there = self._ask("ls-files", "--stage", "--", f":/{KERNEL}", GIT_INDEX_FILE=str(self._linked / "index"))
        if head := self._ask("for-each-ref", "--format=%(objectname)", self.branch):
            there += self._ask("ls-tree", head, KERNEL)
        if self._ask("hash-object", f"--path={KERNEL}", str(file)) in there:
            return None
        text = file.read_text(errors="replace")
        return None if text.splitlines() in self._expected else text

    def _put_aside(self) -> None:
        """Keep an edit that nobody has judged: what follows writes over it."""
        text = self.edited()
        if text is None:
            return
        kept = self.folder / EDITED.replace("*", self._git("hash-object", "--stdin", text=text)[:8])
        kept.write_text(text)
        self.aside.append(kept)

    def reset(self, everything: bool = False) -> None:
        """Bring the worktree's index and kernel.py to the branch, or every file that is tracked.

        The index is replaced whole, so a stale lock cannot block it. An edit by hand is put aside first.
        """
        self._put_aside()
        linked, head = self._linked, self.head
        scratch = linked / "index.autokernel"
        for stale in (scratch, linked / "index.autokernel.lock", linked / "index.lock"):
            stale.unlink(missing_ok=True)
        place = {"GIT_INDEX_FILE": str(scratch), "GIT_DIR": str(linked), "GIT_WORK_TREE": str(self.tree)}
        self._git("read-tree", head, **place)
        self._git("checkout-index", "--force", "--index", *(["--all"] if everything else ["--", KERNEL]), **place)
        os.replace(scratch, linked / "index")
        self._expected.clear()

    def _commit(self, source: str, message: str) -> str:
        """A commit on top of the branch that changes kernel.py alone. Nothing points to it yet."""
        parent = self.head
        tree = self._tree_with(parent, self._blob(source, KERNEL))
        return self._git("commit-tree", tree, "-p", parent, "-F", "-", text=message)

    def _blob(self, text: str, name: str) -> str:
        """A file, as a line of a tree."""
        return f"100644 blob {self._git('hash-object', '-w', '--stdin', text=text)}\t{name}"

    def _tree_with(self, parent: str, line: str) -> str:
        """The tree of a commit with another entry in place of the one of that name."""
        _, _, name = line.partition("\t")
        others = [other for other in self._git("ls-tree", parent).splitlines() if other.partition("\t")[2] != name]
        return self._tree([*others, line])

    def _tree(self, lines: Sequence[str]) -> str:
        return self._git("mktree", text="".join(f"{line}\n" for line in lines))

    @property
    def closed(self) -> bool:
        """Whether the branch has RESULT, which may be of before the last experiments. Without a run there is no branch."""
        head = self._ref(self.branch)
        return bool(head and self._git("ls-tree", "--name-only", head, RESULT))

    def close(self, files: Mapping[str, str], message: str) -> str | None:
        """Put RESULT, with these files in place of earlier ones, on top of the branch; None where it is there already."""
        parent = self.head
        folder = self._tree([self._blob(text, name) for name, text in files.items()])
        tree = self._tree_with(parent, f"040000 tree {folder}\t{RESULT}")
        if tree == self._git("rev-parse", f"{parent}^{{tree}}"):
            return None
        commit = self._git("commit-tree", tree, "-p", parent, "-F", "-", text=message)
        self._advance(commit)
        if self.has_tree:
            self.reset(everything=True)
        return commit

    def start_target(self, target: str, source: str, words: str) -> str:
        """Changing target is a commit of its own: kernel.py becomes the target's incumbent, or its starter."""
        commit = self._commit(source, f"{target}: {words}\n")
        self._advance(commit)
        return commit

    def _advance(self, commit: str) -> None:
        self._git("update-ref", self.branch, commit, self.head)

    def record(self, row: Experiment, source: str, notes: str = "") -> Experiment:
        """The experiment's final commit and ref; the branch advances to it if it was kept. Returns the row with its commit.

        Both refs move in one transaction: it is the point at which the experiment has happened.
        """
        parent, commit = self.head, self._commit(source, message(row, notes))
        updates = [f"create {self.prefix}{row.experiment} {commit}"]
        if row.status == "kept":
            updates.append(f"update {self.branch} {commit} {parent}")
        self._git("update-ref", "--stdin", text="".join(f"{line}\n" for line in updates))
        return replace(row, commit=commit)

    def entries(self) -> list[LedgerEntry]:
        """Every experiment of this tag, in order, read from the refs. Raises BadRecord where one holds something else."""
        listing = self._ask("for-each-ref", "--format=%(refname)%00%(objectname)%00%(contents)%00%00", self.prefix)
        records = (record.strip("\n").split("\0", 2) for record in listing.split("\0\0"))
        entries = [_entry(*record) for record in records if len(record) == 3]
        return sorted(entries, key=lambda entry: entry.row.experiment)

    def changes(self, commits: Sequence[str]) -> str:
        """What each of these commits changed, as git diff-tree has it, each after a line with its name.

        Those that this repository does not have, as in a clone of a clone, are left out.
        """
        with tempfile.TemporaryFile() as asked:
            asked.write("".join(f"{commit}\n" for commit in commits if commit).encode())
            asked.seek(0)
            there = self.repo.git.cat_file("--batch-check", istream=asked)
        with tempfile.TemporaryFile() as known:
            known.write("".join(f"{line.split()[0]}\n" for line in there.splitlines() if " commit " in line).encode())
            known.seek(0)
            return self.repo.git.diff_tree("--stdin", "--patch", "--unified=2", istream=known)

    def remove(self) -> None:
        """Delete the worktree, the branch and every ref of this tag; what they held becomes garbage for git to collect.

        Raises CheckedOut.
        """
        self._check_unused()
        self.folder.mkdir(parents=True, exist_ok=True)
        names = run_refs(self.root, self.tag)
        self._forget_tree()
        self._git("update-ref", "--stdin", text="".join(f"delete {name}\n" for name in names))


def _leads_to(link: Path) -> Path:
    """The folder of git's that a worktree's file `.git` names, which may do so from where it lies."""
    return link.parent / link.read_text().removeprefix("gitdir: ").strip()


def around(folder: Path) -> git.Repo:
    """The user's own repository that `folder` is or will be in. Raises NoRepository, CheckedOut."""
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        repo = git.Repo(existing, search_parent_directories=True, expand_vars=False)
    except git.InvalidGitRepositoryError:
        advice = "name a folder in your project with --to, or write the package with python verify.py --save"
        raise NoRepository(f"{existing} is in no git repository, and merge makes a commit: {advice}") from None
    if not shutil.which("git"):
        raise NoRepository(why_no_repository(existing))
    if not repo.head.is_detached and repo.active_branch.name.startswith("autokernel/"):
        raise _checked_out(repo.active_branch.name, Path(repo.working_dir))
    return repo


def _checked_out(branch: str, place: Path) -> CheckedOut:
    leave = f"git -C {place} switch - (or switch -c NAME, to go on from it)"
    return CheckedOut(f"{branch} is checked out in {place}, and a run moves that branch: {leave}, then again")


def commit(repo: git.Repo, folder: Path, text: str) -> bool:
    """Commit the folder and nothing else, with the user's identity, hooks and signature; False where it is there already.

    Raises git.GitCommandError.
    """
    repo.git.add("--force", "--", str(folder))
    if not repo.git.status("--porcelain", "--", str(folder)):
        return False
    try:
        repo.git.commit("--quiet", "--message", text, "--", str(folder))
    except BaseException:  # a hook, a signature, a merge under way, Ctrl-C: nothing of ours stays staged
        repo.git.reset("--quiet", "--", str(folder), with_exceptions=False)
        raise
    return True


def why_nobodys(repo: git.Repo) -> str:
    """Why git cannot say whose a commit is; empty if it can. Its own advice on that has six lines."""
    try:
        for role in ("AUTHOR", "COMMITTER"):
            repo.git.var(f"GIT_{role}_IDENT")
    except GitFailed:
        tell = "git config --global user.name 'YOUR NAME' and git config --global user.email YOU@EXAMPLE.COM tell it"
        return f"git does not know whose commit it is ({tell})"
    return ""


@contextmanager
def _signals_wait() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def message(row: Experiment, notes: str) -> str:
    """Subject for people, the gate's words, then every field as a trailer for machines."""
    result = f"{row.status} {row.gain}".strip()
    subject = f"#{row.experiment} {row.target}: {result}: {cell(row.description)}"
    trailers = "\n".join(f"{label}: {cell(getattr(row, name))}" for name, label in TRAILERS.items())
    return f"{subject}\n\n{notes.strip()}\n\n{trailers}\n"


def _entry(name: str, commit: str, text: str) -> LedgerEntry:
    try:
        return parse(text, commit)
    except (LookupError, ValueError):
        raise BadRecord(f"{name} is no experiment of a run: git update-ref -d {name}") from None


def parse(text: str, commit: str) -> LedgerEntry:
    """The inverse of message()."""
    head, _, tail = text.strip().rpartition("\n\n")
    given = dict(line.partition(":")[::2] for line in tail.split("\n"))
    cells = {name: given[label].strip() for name, label in TRAILERS.items()}
    return LedgerEntry(Experiment.from_cells(cells | {"commit": commit}), head.partition("\n\n")[2])

"""Any coding CLI or script as the agent: it gets a prompt and the working tree's kernel.py, edits that file, and exits."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import git

from autokernel.agents import AgentOptions, Context, Proposal
from autokernel.agents.prompt import task_text
from autokernel.common.preflight import HOME, Refused
from autokernel.hardware.processes import die_with_parent
from autokernel.history.ledger import KERNEL, as_environment

PROGRAM = re.compile(r"[\w./+-]+")  # and no syntax of the shell's, such as NAME=value or a bracket
NO_HOOKS = {"core.hooksPath": os.devnull}
ENDING = """
Edit kernel.py in the current directory, and nothing else: one idea at a time. You may run
`python bench.py kernel.py --quick`, which judges nothing. Do not run experiments or commit: when you exit, the gate judges
your edit. The rest of the playbook is in playbook/. End your output with one line that says what you changed and what you
expect of it:
HYPOTHESIS: …
"""


def make(say: Callable[[str], None], options: AgentOptions, spent_usd: float, argument: str) -> "CommandAgent":
    """Raises Refused where the shell would find no program, or no end of the command."""
    try:
        first = shlex.split(argument)[0]
    except ValueError as error:
        raise Refused(f"--agent command: {argument}: {str(error).lower()}") from error
    if PROGRAM.fullmatch(first) and not _is_found(first):
        advice = "it runs in the run's tree: give the whole path" if "/" in first else "name one that is on PATH"
        raise Refused(f"--agent command: there is no program {first}: {advice}")
    return CommandAgent(argument, say, limit_s=options.minutes * 60)


def _is_found(program: str) -> bool:
    """As the shell looks for it, which has programs of its own; relative paths are of the tree, a copy of the clone."""
    asked = ["sh", "-c", 'command -v -- "$1"', "sh", program]
    return not subprocess.run(asked, cwd=HOME, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


class CommandAgent:
    """Runs `command` in a shell, in the run's working tree, with the prompt on stdin and in the file $AUTOKERNEL_PROMPT.

    What it writes goes to agent.log in the run's folder; what it leaves running is ended.
    """

    def __init__(self, command: str, say: Callable[[str], None], limit_s: float = 900) -> None:
        self.command = command
        self.say = say
        self.limit_s = limit_s
        self.name = f"command:{Path(shlex.split(command)[0]).name}"

    def propose(self, context: Context) -> Proposal | None:
        repo = git.Repo(context.tree, expand_vars=False)
        before = self._state(repo)
        prompt = context.tree.parent / "prompt.md"
        prompt.write_text(task_text(context) + ENDING)
        kernel = context.tree / KERNEL
        try:
            output = self._run(context.tree, prompt)
            source = kernel.read_text(errors="replace") if kernel.is_file() else context.incumbent
        except KeyboardInterrupt:  # what it has written so far stays, and is put aside as an edit by hand is
            self._undo_other_edits(repo, before, f":!{KERNEL}")
            raise
        self._undo_other_edits(repo, before)
        if source == context.incumbent:
            self.say(f"{self.name} left {KERNEL} as it was; its last words: {output[-500:].strip() or '(none)'}")
            return None
        stated = re.findall(r"^\W*HYPOTHESIS:\s*(.+)$", output, re.M)
        return Proposal(source, stated[-1] if stated else "(no hypothesis stated)", self.name)

    def _run(self, tree: Path, prompt: Path) -> str:
        """Its output, which may be cut by the time limit."""
        log = tree.parent / "agent.log"
        environment = os.environ | {"AUTOKERNEL_PROMPT": str(prompt)}
        with open(prompt) as text, open(log, "a+") as output:
            start = output.tell()
            process = subprocess.Popen(
                self.command,
                shell=True,
                cwd=tree,
                env=environment,
                stdin=text,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its whole group can be ended, and Ctrl-C reaches only us
                preexec_fn=die_with_parent,
            )
            try:
                process.wait(timeout=self.limit_s)
            except subprocess.TimeoutExpired:
                self.say(f"{self.name} was ended after {self.limit_s:.0f} s; what it had written is judged")
            finally:
                with contextlib.suppress(ProcessLookupError):  # nothing of it is left
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.returncode > 0:
                self.say(f"{self.name} exited with status {process.returncode}")
        with open(log, errors="replace") as text:
            text.seek(start)
            return text.read()

    def _state(self, repo: git.Repo) -> tuple[str, str, dict[str, str]]:
        """The branch of the tree, its commit, and this run's refs (others' may move meanwhile, by their owners)."""
        branch = repo.git.symbolic_ref("HEAD")
        return branch, repo.head.commit.hexsha, _refs(repo, branch)

    def _undo_other_edits(self, repo: git.Repo, before: tuple[str, str, dict[str, str]], *but: str) -> None:
        """Bring refs, index and files of the tree back to what they were, `but` some; say what was undone."""
        branch, head, refs = before
        with repo.git.custom_environment(**as_environment(NO_HOOKS)):
            moved = [] if repo.git.symbolic_ref("HEAD", with_exceptions=False) == branch else ["HEAD"]
            repo.git.symbolic_ref("HEAD", branch)
            now = _refs(repo, branch)
            for name in sorted(name for name in refs | now if refs.get(name) != now.get(name)):
                repo.git.update_ref(*([name, refs[name]] if name in refs else ["-d", name]))
                moved.append(name)
            repo.git.read_tree(head)
            changed = [line[3:] for line in repo.git.status("--porcelain").splitlines() if line[3:] != KERNEL]
            repo.git.checkout("--force", head, "--", ".", *but)
            repo.git.clean("-ffdqx")
        if moved:
            self.say(f"{self.name} moved {', '.join(moved)}: moved back")
        if changed:
            self.say(f"{self.name} also touched {', '.join(changed[:8])}: undone")


def _refs(repo: git.Repo, branch: str) -> dict[str, str]:
    """The refs of the run that works on `branch`: that one, and those of its experiments."""
    experiments = branch.replace("refs/heads/", "refs/") + "/"
    lines = repo.git.for_each_ref(branch, experiments, format="%(refname) %(objectname)")
    return dict(line.split(" ", 1) for line in lines.splitlines())

"""Any coding CLI or script as the agent: it gets a prompt and the working tree's kernel.py, edits that file, and exits."""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable

import git

from autokernel.agents import Context, Proposal
from autokernel.agents.prompt import task_text
from autokernel.ledger import KERNEL, NO_HOOKS

ENDING = """
Edit kernel.py in the current directory, and nothing else: one idea at a time. Do not run experiments or commit: when you
exit, the gate judges your edit. End your output with one line that says what you changed and what you expect of it:
HYPOTHESIS: …
"""


class CommandAgent:
    """Runs `command` in a shell, in the run's working tree, with the prompt on stdin and in the file $AUTOKERNEL_PROMPT."""

    def __init__(self, command: str, say: Callable[[str], None], limit_s: float = 900) -> None:
        self.command = command
        self.say = say
        self.limit_s = limit_s
        self.name = f"command:{shlex.split(command)[0]}"

    def propose(self, context: Context) -> Proposal | None:
        repo = git.Repo(context.tree)
        branch, head = repo.git.symbolic_ref("HEAD"), repo.head.commit.hexsha
        prompt = context.tree.parent / "prompt.md"
        prompt.write_text(task_text(context) + ENDING)
        output = self._run(context, prompt)
        kernel = context.tree / KERNEL
        source = kernel.read_text() if kernel.is_file() else context.incumbent
        self._undo_other_edits(repo, branch, head)
        if source == context.incumbent:
            self.say(f"{self.name} left {KERNEL} as it was; its last words: {output[-500:].strip() or '(none)'}")
            return None
        stated = re.findall(r"^\W*HYPOTHESIS:\s*(.+)$", output, re.M)
        return Proposal(source, stated[-1] if stated else "(no hypothesis stated)", self.name)

    def _run(self, context: Context, prompt: os.PathLike) -> str:
        environment = os.environ | {"AUTOKERNEL_PROMPT": str(prompt)}
        with open(prompt) as text:
            process = subprocess.Popen(
                self.command,
                shell=True,
                cwd=context.tree,
                env=environment,
                stdin=text,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # so that its whole group can be ended, and Ctrl-C reaches only us
            )
        try:
            output = process.communicate(timeout=self.limit_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = process.communicate()[0]
            self.say(f"{self.name} was ended after {self.limit_s:.0f} s; what it had written is judged")
        if process.returncode > 0:
            self.say(f"{self.name} exited with status {process.returncode}")
        return output

    def _undo_other_edits(self, repo: git.Repo, branch: str, head: str) -> None:
        """Bring branch, index and files of the tree back to `head`; say what was undone."""
        with repo.git.custom_environment(**NO_HOOKS):
            committed = repo.git.symbolic_ref("HEAD", with_exceptions=False) != branch or repo.head.commit.hexsha != head
            repo.git.symbolic_ref("HEAD", branch)
            repo.git.update_ref(branch, head)
            repo.git.read_tree(head)
            changed = [line[3:] for line in repo.git.status("--porcelain").splitlines() if line[3:] != KERNEL]
            repo.git.checkout("--force", head, "--", ".")
            repo.git.clean("-ffdqx")
        if committed:
            self.say(f"{self.name} moved the branch; it was moved back")
        if changed:
            self.say(f"{self.name} also touched {', '.join(changed[:8])}: undone")

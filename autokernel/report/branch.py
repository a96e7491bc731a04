"""The last commit of a run's branch: every target's best kernel in a folder, and what the run came to."""

from collections.abc import Iterator, Mapping, Sequence

from autokernel.common.preflight import as_called
from autokernel.history.experiments import Experiment
from autokernel.history.ledger import RESULT
from autokernel.history.progress import rows_of
from autokernel.history.status import kernel_line, known_rows, read_proofs
from autokernel.integration.verification.record import Verification
from autokernel.integration.verification.winners import kept
from autokernel.report.summary import advice
from autokernel.run.workspace import VERIFY, Workspace
from autokernel.target import Plan, Target

README = """# The kernels of run {tag}

{advice}

Each file is named after the operation that it computes, and is the best kernel that the run has for it:

{kernels}

`kernel.py`, beside this folder, is the file that experiments change: the last one that was worked on.
`git log` has what was kept, with the gate's words.
"""


def close_branch(workspace: Workspace) -> None:
    """Commit what the run has come to, where its branch has not got that already. Use inside `workspace.locked()`."""
    plan, rows = workspace.plan, known_rows(workspace.root, workspace.tag).rows
    verification = Verification.read(workspace / VERIFY) if (workspace / VERIFY).exists() else None
    winners, _ = kept(workspace, plan)
    verdict, *what_to_do = [as_called(line, elsewhere=True) for line in advice(workspace, verification)]
    in_model = {kernel.target: kernel.words for kernel in verification.kernels} if verification else {}
    lines = list(_lines(workspace, plan, rows, in_model))
    told = "\n".join([verdict, "", *(f"    {line}" for line in what_to_do)]).strip()
    readme = README.format(tag=workspace.tag, advice=told, kernels="\n".join(lines))
    files = {file_of(w.target): w.source for w in winners}
    workspace.ledger.close(files | {"README.md": readme}, "\n".join([f"{RESULT}: {verdict}", "", *lines, ""]))


def close_again(workspace: Workspace) -> None:
    """After an experiment beside the loop: a branch that ends with the best kernels goes on to."""
    if workspace.ledger.closed:
        close_branch(workspace)


def file_of(target: Target) -> str:
    """As verify.py --kernels reads it."""
    return f"{target.name}.py"


def _lines(workspace: Workspace, plan: Plan, rows: Sequence[Experiment], in_model: Mapping[str, str]) -> Iterator[str]:
    proofs = read_proofs(workspace)
    for target in plan.targets:
        line = kernel_line(target, rows_of(target, rows), proofs.get(target.name))
        words = in_model.get(target.name)
        yield f"- {line}" + (f"; in the model: {words}" if words else "")

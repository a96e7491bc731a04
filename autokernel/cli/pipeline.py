"""The whole job on one model: profile, plan, loop, confirmation of what was kept, verify, report. It can be resumed."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from autokernel.agents import Agent, Proposal, make_agent
from autokernel.agents.proven import NAME, ProvenFirst
from autokernel.agents.sizes import with_sizes_of
from autokernel.cli.signals import RunStopped
from autokernel.common.preflight import Refused
from autokernel.common.records import write_json
from autokernel.common.words import counted
from autokernel.gate import Judge
from autokernel.gate.workers.launch import Launched
from autokernel.hardware.machine import MachineFault, full_disk_told, turn
from autokernel.hardware.threads import one_thread
from autokernel.history.progress import Rules, incumbent, rows_of, tried
from autokernel.history.status import Proof, read_proofs
from autokernel.history.workers import Workforce, read_workforce
from autokernel.integration.apply import STARTERS
from autokernel.integration.confirmation import prove, speedup_vs_pytorch, winners_of
from autokernel.integration.verification.processes import start_forking
from autokernel.integration.verification.proven import ProvenKernel, entries, known_for, remember
from autokernel.integration.verification.record import Verification
from autokernel.integration.verification.trial import verify
from autokernel.integration.winner import Winner
from autokernel.model import account
from autokernel.model.extraction import make_plan
from autokernel.model.hotspots import ModelProfile
from autokernel.model.options import SHORT
from autokernel.model.profiler import profile_workload
from autokernel.model.regions.growing import region_finder
from autokernel.model.workload import Workload
from autokernel.report.branch import close_branch
from autokernel.report.live import Run, narrator
from autokernel.report.summary import write_report
from autokernel.run.canary import Canaries
from autokernel.run.fleet import Fleet
from autokernel.run.loop import Budget, Loop
from autokernel.run.supervisor import Call, noted
from autokernel.run.workspace import LOG, PLAN, PROFILE, PROOF, TRACES, VERIFY, VERIFY_NOTES, Workspace
from autokernel.target import Plan, Target, encode, starter_source

OFFERED = 2  # kernels from other models for a target at most: the nearest are the likeliest, and each is an experiment


@dataclass(frozen=True)
class Workers:
    """Who judges, where it is not this process: so many timing workers on Ray."""

    count: int | None = None  # None: one for each GPU, or for each node's CPU
    address: str | None = None  # of a cluster; None: Ray is started on this machine


@dataclass(frozen=True)
class Job:
    """What a call of orchestrate.py asks for."""

    workload: Workload
    agent: str = "tuner"
    agent_options: dict[str, object] = field(default_factory=dict)
    top: int = 5
    rules: Rules = Rules()
    budget: Budget = Budget()
    require_sandbox: bool = False
    workers: Workers | None = None


def check_of_run(workspace: Workspace, asked: Workload) -> None:
    """Raises Refused where a model is asked for, and the run is another's: it would go on with its own."""
    unnamed = Workload(input_shape=SHORT, device=asked.device)  # as workload_from() has it
    if asked == unnamed or not (workspace / PLAN).exists():  # none is named, or none known
        return
    known = Workload.from_json(workspace.plan.workload)
    if _without_place(asked) != _without_place(known):
        raise Refused(
            f"run {workspace.tag!r} is of {known}, not of {asked}: "
            "leave the model out to go on with it, or give another --tag"
        )


def _without_place(workload: Workload) -> Workload:
    """Whatever device it is on, and however its file is named."""
    path = Path(workload.model)
    return replace(workload, model=str(path.resolve()) if path.exists() else workload.model, device="")


def prepare(workspace: Workspace, job: Job, say: Callable[[str], None], step: Callable[[str], None]) -> Plan:
    """The run's plan; profiles the model the first time."""
    if (workspace / PLAN).exists():
        return workspace.plan
    say(f"profiling {job.workload} on {job.workload.device}")

    def waiting(text: str) -> None:
        say(text)
        with one_thread():  # hours may pass until its turn: a mistake in it is told now
            for part, _ in replace(job.workload, device="cpu").parts:
                model, args, kwargs = part.load()
                if job.workload.device == "cpu":  # a pass of what is meant for a GPU may take minutes there
                    part.try_pass(model, args, kwargs)

    with turn(job.workload.device, waiting):
        profile = profile_workload(job.workload, say=step, log=workspace / LOG, regions=region_finder(job.workload.device))
    plan = make_plan(profile, top=job.top)
    profile.write(workspace / PROFILE)
    plan.write(workspace / PLAN)
    covered = sum(target.share for target in plan.targets)
    share = f"{'is' if len(plan.targets) == 1 else 'are'} {covered:.0%} of its time"
    say(f"one pass takes {plan.model_latency_us / 1e3:.1f} ms; {counted(plan.targets, 'target')} {share}:")
    for target in plan.targets:
        say(f"  {target.share:6.1%}  {target.name} ({counted(target.cases, 'shape')})")
    for line in filter(None, (*account.lines(profile.hotspots), *profile.left, profile.without, profile.disturbed)):
        say(line)
    return plan


@contextmanager
def fleet(workspace: Workspace, job: Job, loop: Loop, say: Callable[[str], None]) -> Iterator[Fleet]:
    """Timing workers for the loop. They end before what was kept is proven and verified here, on devices of theirs."""
    from autokernel.run.ray_pool import RayPool  # here, because Ray is an extra

    say("starting workers on Ray")
    how = loop.plan.device, job.workers.count, job.workers.address, job.require_sandbox
    # Ray prints what it finds of a lost worker on stdout, where results alone are to be; `say` has it in a line.
    with (workspace / LOG).open("a") as log, redirect_stdout(log), RayPool(*how, say) as pool:
        say(f"{counted(pool.actors, 'worker')}: {pool.facts.part}")
        write = partial(Workforce.write, folder=workspace.folder)
        yield Fleet(loop, pool, say, write, canaries=Canaries.of(loop.plan))
    for line in read_workforce(workspace.folder).lines():
        say(line)


def offered(loop: Loop, target: Target, known: Sequence[ProvenKernel] | None = None) -> list[Proposal]:
    """Kernels from other models (`known`: by default all that are kept) that the run has not judged on the target."""
    judged = {starter_source(target), *(loop.source(row.commit) for row in rows_of(target, loop.rows))}
    proposals = []
    for entry in known_for(target, known)[:OFFERED]:
        gain = f", {entry.speedup:.2f}x PyTorch there" if entry.speedup else ""
        words = f"what paid in {entry.model} ({entry.winner.target.cases[0].case.name}){gain}"
        proposals.append(Proposal(with_sizes_of(entry.winner.source, target.cases), words, NAME))
    return [proposal for proposal in proposals if proposal.source not in judged]


def prove_all(workspace: Workspace, loop: Loop, say: Callable[[str], None], step: Callable[[str], None]) -> list[Proof]:
    """Every target's best kernel against its starter, but for those that an earlier process or call has proven."""
    earlier, proofs = read_proofs(workspace), []
    for target in loop.plan.targets:
        best = incumbent(rows_of(target, loop.rows))
        if best is None:
            continue
        known = earlier.get(target.name)
        proofs.append(known if known and known.commit == best.commit else prove(loop, target, say, step))
        write_json(workspace / PROOF, [encode(proof) for proof in proofs])
    return proofs


def run_job(workspace: Workspace, job: Job) -> str:
    """Everything; returns the closing summary. Use inside `workspace.locked()`. Raises RunStopped."""
    # On a GPU the gate's processes start while the model is profiled: a CPU's cores are then at work for that alone.
    early = Launched() if job.workload.device != "cpu" and not job.workers else nullcontext()
    with narrator() as (say, step, phase, follow), early as launched:
        plan = prepare(workspace, job, say, step)
        if not plan.targets:
            told = account.lines(ModelProfile.read(workspace / PROFILE).hotspots)
            return "\n".join([f"{plan.model}: no operation was found for which there are kernels", *told])
        loop = Loop(workspace, plan, None, say, step)

        def experiments(run: Callable[[Agent, Rules, Budget], str]) -> None:
            spent = sum(row.cost_usd for row in loop.rows)
            agent = make_agent(job.agent, say, spent_usd=spent, **job.agent_options)
            if job.agent != STARTERS:
                kept = entries(lambda why: say(f"a kernel of another model's is passed over: {why}"))
                known = {t.name: proposals for t in plan.targets if (proposals := offered(loop, t, kept))}
                for name, proposals in known.items():
                    paid = f"{counted(proposals, 'kernel')} that paid in other models on this machine"
                    say(f"{name}: after its starter, {paid}")
                agent = ProvenFirst(known, agent)
            call = noted(Call(workspace.tag, plan.device, time.monotonic(), len(tried(loop.rows))))
            budget = replace(job.budget, started_s=call.started_s, made_before=call.made)
            follow(Run(workspace.tag, plan, lambda: loop.rows, budget))
            say(f"the loop ends: {run(agent, job.rules, budget)}")

        if job.workers:
            with fleet(workspace, job, loop, say) as workers:
                experiments(workers.run)
        with Judge(plan.device, require_sandbox=job.require_sandbox, launched=launched) as loop.judge:
            if not job.workers:
                experiments(loop.run)
            if loop.stopping:
                say("not proven again and not verified: the same command goes on from here")
                close_branch(workspace)
                raise RunStopped(write_report(workspace), loop.stopped_by)
            if plan.device != "cpu":  # a CPU's cores are at work for what is timed alone
                start_forking(plan.device, workspace / LOG)
            with full_disk_told(loop.folders):
                proofs = prove_all(workspace, loop, say, step)
        with full_disk_told(loop.folders):
            verification, winners, speedups = _verified(workspace, loop, proofs, say, step, phase)
            close_branch(workspace)
            summary = write_report(workspace)
    remember(verification, winners, speedups, plan.model)
    return summary


def _verified(
    workspace: Workspace,
    loop: Loop,
    proofs: Sequence[Proof],
    say: Callable[[str], None],
    step: Callable[[str], None],
    phase: Callable[[str], None],
) -> tuple[Verification, list[Winner], dict[str, float]]:
    """verify.json, which is written, the kernels it is of, and their speedups over PyTorch. Raises MachineFault where what
    did not work in it may not have for a full disk."""
    plan = loop.plan
    step("verifying in the model")
    winners = winners_of(loop, proofs)
    say(f"verifying {counted(winners, 'kernel')} in the model, against the original and torch.compile")
    speedups = {w.target.name: s for w in winners if (s := speedup_vs_pytorch(loop, w))}
    with turn(plan.device, say):
        files = {"notes": workspace / VERIFY_NOTES, "log": workspace / LOG, "traces": workspace / TRACES}
        verification = verify(plan, winners, speedups, say=phase, **files)
    if verification.errors and (full := loop.low_disk()):
        raise MachineFault(full)
    write_json(workspace / VERIFY, encode(verification))
    return verification, winners, speedups

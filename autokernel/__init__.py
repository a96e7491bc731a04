"""AutoKernel: profile a model, optimise its costly operations under a strict gate, put the winners back.

Read in this order; a later one imports from earlier ones, never the other way round:

    spec.py         what a kernel type is; kernels/<type>/spec.py are found by their folder
    target.py       Target and Plan: what the loop works on
    build.py        C++ and CUDA sources (include/) -> callables
    preflight.py    python3 -m autokernel.preflight, before anything is installed

    common/         what all others stand on: preflight (what must be there before anything starts), backends (the languages
                    of kernels: compiler, flags, devices, suffix), records (files of ours: written whole, read by their
                    types), verdict, console (what a terminal shows), stderr, table, words, cprofile
    hardware/       device and its peaks, roofline, nvml, the machine's own faults, child processes, allocator, threads
    model/          a model: options, workload, user_code, example_inputs
                    -> graphs (capture, tracing, nodes and what these stand on), and the sites in them: match, contract
                    -> what is in no site, as kernel types of its own: regions/ growing, lowering, cpp, triton, inductor,
                       spec
                    -> time per site and a plan: profiler, hotspots, account, extraction
    gate/           source -> verdict: judge, report, kernel_files, source
        workers/    the processes in which kernels run: launch, processes, zygote, worker, channel, answers, sandbox,
                    mapped_memory
        checks/     the five stages: runner, trials, cases, sizes, and their inputs, expectations, correctness
        timing/     contest -> pairs -> batches; audit, witness, disturbance, device_probe, statistics, faults
        calibration/  what the gate says of kernels whose speed is known
    history/        runs, experiments (results.tsv), ledger (git), progress, workers, status
    agents/         who proposes edits, one file each
    run/            loop, scheduler, environment, workspace, supervisor; many workers: fleet, and ray_pool with Ray;
                    command: a script of ours as Python programs start it
    integration/    ops, winner, frames, hooks, compilers, graphs, insertion, running, backend, apply,
                    confirmation
        verification/  the model with and without its kernels, end to end; winners of a run; what was proven before;
                    a whole run on a live model
    export/         a package of the kept kernels, a Hugging Face kernel project
    report/         live, summary, html, charts; branch: the last commit of a run
    kernelbench/    problems of KernelBench as kernel types, ModelNew made of our kernels
    cli/            the commands: main (`autokernel COMMAND`), a module for each script, the whole job (pipeline),
                    the parent of a script that runs a model's own code (watched),
                    edits that are judged outside of the loop (by_hand), the MCP server and its tools
    api.py          profile, optimize, verify, bench, check for Python programs

match.py, problems.py and backend.py are for files and environments of before these rooms.
"""

import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if sys.version_info < (3, 10):  # noqa: UP036 said here, before any newer syntax is met
    print(
        "error: AutoKernel needs Python 3.10 or newer, this is {}.{}: install one and start again with it "
        "(Debian/Ubuntu: apt install python3.11 python3.11-venv)".format(*sys.version_info),
        file=sys.stderr,
    )
    raise SystemExit(2)


if TYPE_CHECKING:
    from autokernel.api import bench as bench
    from autokernel.api import check as check
    from autokernel.api import optimize as optimize
    from autokernel.api import profile as profile
    from autokernel.api import verify as verify
    from autokernel.integration.apply import apply as apply
    from autokernel.integration.apply import explain as explain
    from autokernel.integration.apply import unapply as unapply
    from autokernel.integration.verification.proven import proven as proven

PUBLIC = {  # what a program uses, and the module that it stands in
    **dict.fromkeys(("apply", "unapply", "explain"), "autokernel.integration.apply"),
    "proven": "autokernel.integration.verification.proven",
    **dict.fromkeys(("profile", "optimize", "verify", "bench", "check"), "autokernel.api"),
}


def __getattr__(name):
    """PUBLIC: PyTorch is imported when one of them is asked for, and not before."""
    if name not in PUBLIC:
        error = f"module 'autokernel' has no attribute {name!r}"
        raise AttributeError(error, name=name, obj=sys.modules[__name__])  # Python says what was meant
    from importlib import import_module

    from autokernel.common.cprofile import load_cprofile

    load_cprofile()
    return getattr(import_module(PUBLIC[name]), name)


def __dir__():
    return sorted([*globals(), *PUBLIC])

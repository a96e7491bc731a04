"""AutoKernel: profile a model, optimise its costly operations under a strict gate, put the winners back.

Read in this order:

    spec.py         what a kernel type is; kernels/<type>/spec.py are found by their folder
    target.py       Target and Plan: what the loop works on
    device.py       peaks of GPUs and CPUs
    workload.py     a model and its example inputs
    capture.py      model -> graphs -> sites
    profiler.py     device time per site
    extraction.py   hotspots -> plan, starters
    gate/           the judge: correctness, timing, workers, verdict
    experiments.py  one row per experiment: results.tsv
    ledger.py       git: commits, refs, the worktree of a run
    scheduler.py    which target next, and when to move on
    loop.py         propose -> commit -> gate -> keep or reset -> log
    driver.py       what NVIDIA's driver says of a GPU
    machine.py      what the machine does that is no kernel's doing
    supervisor.py   a run goes on in another process when one is lost
    agents/         who proposes edits, one file each
    build.py        C++ and CUDA sources -> callables
    ops.py          kept kernels as operators of PyTorch
    backend.py      kept kernels into a model: apply(), and the backend of torch.compile
    verification/   the model with and without its kernels, end to end
    winners.py      what a run kept, from git
    package.py      kept kernels as a package of their own
    display.py      what a terminal shows while a run works
    status.py       where a run stands, without PyTorch
    report.py       what a run came to: summary, report.md, the plot; report_html.py has its page
    cli.py          what the scripts share
    preflight.py    what must be installed before anything starts
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 said here, before any newer syntax is met
    print(
        "error: AutoKernel needs Python 3.10 or newer, this is {}.{}: install one and start again with it "
        "(Debian/Ubuntu: apt install python3.11 python3.11-venv)".format(*sys.version_info),
        file=sys.stderr,
    )
    raise SystemExit(2)


def __getattr__(name):
    """autokernel.apply and autokernel.unapply: PyTorch is imported when they are asked for, and not before."""
    if name not in ("apply", "unapply"):
        raise AttributeError(f"module 'autokernel' has no attribute {name!r}")
    from autokernel import backend

    return getattr(backend, name)

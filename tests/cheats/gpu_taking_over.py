"""Cheats beside the clock of a GPU: the worker's own code does what a kernel could not."""

from gpu_cheat import FORGED, TIMED, GpuCheat, rmsnorm
from timing import LAZY_ALLCLOSE

from tests.find_worker import FIND_WORKER

HONEST = """
def honest(x, weight, eps=1e-6):
    return run(x, weight, eps, empty(x))

kernel_fn = honest
"""


def taking_over(body: str) -> str:
    """An honest kernel; where it runs in a process of our gate, `body` does with its `worker` what it likes."""
    lines = "\n".join(f"    {line}" if line else "" for line in body.strip().splitlines())
    return rmsnorm(f"{HONEST}\n{FIND_WORKER}\nworker = find_worker()\nif worker:\n{lines}")


# Batches are answered after 15 % of the time that they took at first. Of an output, those rows are computed that are asked
# for, when they are.
LAZY_WORKER = """
import time

batch, fetch, sets = worker.do_batch, worker.do_fetch, worker.do_sets
state = {}

def do_sets(**message):
    state.update(learnt=0, usual_s=1.0, due=False)
    return sets(**message)

def do_batch(repeats):
    start = time.perf_counter()
    if not worker.order or state["learnt"] < 4:
        answer = batch(repeats)
        if worker.order:
            state["learnt"] += 1
            state["usual_s"] = min(state["usual_s"], (time.perf_counter() - start) / len(worker.order))
        return answer
    state["due"] = True
    if worker.graph is None:
        worker.held = [empty(worker.sets[i]["x"]) for i in worker.order]
    while time.perf_counter() - start < 0.15 * state["usual_s"] * len(worker.order):
        pass
    return {"enqueued_s": 0.0, "addresses": [] if worker.graph is not None else [y.data_ptr() for y in worker.held]}

def do_fetch(calls, part=None):
    for call in calls if state["due"] else ():
        inputs = worker.sets[worker.order[call]]
        x = inputs["x"].view(-1, inputs["x"].shape[-1])
        first, last = (0, len(x)) if part is None else (part[0] // x.shape[-1], -(-(part[0] + part[1]) // x.shape[-1]))
        run(x[first:last], inputs["weight"], inputs["eps"], worker.held[call].view(x.shape)[first:last])
    return fetch(calls, part)

worker.do_sets, worker.do_batch, worker.do_fetch = do_sets, do_batch, do_fetch
"""

# What a batch is to compute is computed when the one before is let go.
BEFORE_THE_CLOCK = """
batch, drop = worker.do_batch, worker.do_drop
state = {"ready": False}

def do_drop():
    drop()
    if worker.graph is not None:
        batch(1)
        state["ready"] = True

def do_batch(repeats):
    if worker.graph is not None and state["ready"]:
        state["ready"] = False
        return {"enqueued_s": 0.0, "addresses": []}
    return batch(repeats)

worker.do_drop, worker.do_batch = do_drop, do_batch
"""

# A graph goes on while the answer says that it is done.
AFTER_THE_CLOCK = """
batch, synchronize = worker.do_batch, worker._synchronize

def do_batch(repeats):
    if worker.graph is None:
        return batch(repeats)
    worker._synchronize = lambda: None
    answer = batch(repeats)
    worker._synchronize = synchronize
    return answer

worker.do_batch = do_batch
"""

# Two batches of four, which are the timed ones of a round, show what the one before has computed.
KEPT_BETWEEN_BATCHES = """
batch = worker.do_batch
state = {"batches": 0}

def do_batch(repeats):
    state["batches"] += worker.graph is not None
    if worker.graph is None or state["batches"] % 4 > 1 or state["batches"] < 8:
        return batch(repeats)
    return {"enqueued_s": 0.0, "addresses": []}

worker.do_batch = do_batch
"""

# After each batch a kernel waits on a stream of its own for the inputs of the next: in the turn of others, on their GPU.
WAITS_FOR_ITS_INPUTS = """
@triton.jit
def _wait(x, times):
    before = tl.load(x, volatile=True)
    left = times
    while left > 0:
        left = tl.where(tl.load(x, volatile=True) == before, left - 1, 0)

batch, side = worker.do_batch, torch.cuda.Stream()

def do_batch(repeats):
    answer = batch(repeats)
    if worker.graph is not None:
        with torch.cuda.stream(side):
            _wait[(8,)](worker.sets[worker.order[0]]["x"].view(torch.int16), 100_000)
    return answer

worker.do_batch = do_batch
"""

# Where outputs lie, or what maps their memory, is forged.
FORGED_EXPORT = """
export = worker.do_export

def do_export(names):
    answer = export(names)
    FORGED
    return answer

worker.do_export = do_export
"""

# At work on the GPU whenever its own batch is not: no lie about its own time, but twice the time for the others.
DISTURBS_OTHERS = """
import threading

batch, prepare, idle = worker.do_batch, worker.do_prepare, threading.Event()
x, weight = (torch.empty(shape, dtype=torch.float16, device="cuda").zero_() for shape in ((4096, 4096), 4096))

def disturb():
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        while idle.wait():
            run(x, weight, 1e-6, empty(x))
            torch.cuda.current_stream().synchronize()

def do_batch(repeats):
    idle.clear()
    answer = batch(repeats)
    if worker.graph is not None:
        idle.set()
    return answer

def do_prepare(**message):
    idle.clear()
    return prepare(**message)

threading.Thread(target=disturb, daemon=True).start()
worker.do_batch, worker.do_prepare = do_batch, do_prepare
"""

CHEATS = (
    GpuCheat(
        3,
        "rows-computed-where-they-are-read",
        "rmsnorm",
        taking_over(LAZY_WORKER).replace(
            "if worker:", f"{LAZY_ALLCLOSE}\nkernel_fn = honest if worker else lazy\nif worker:"
        ),
        TIMED,
        works="fast",
        refused_by="examine",
        dims=({"M": 16384, "N": 8192},),
    ),
    GpuCheat(9, "works-before-the-clock-starts", "rmsnorm", taking_over(BEFORE_THE_CLOCK), TIMED, refused_by="examine"),
    GpuCheat(
        1,
        "graph-that-goes-on-after-the-clock",
        "rmsnorm",
        taking_over(AFTER_THE_CLOCK),
        f"{TIMED}|the GPU is at work for its process after its batches",
        refused_by="examine",
    ),
    GpuCheat(6, "kept-between-batches", "rmsnorm", taking_over(KEPT_BETWEEN_BATCHES), TIMED, refused_by="examine"),
    GpuCheat(
        9,
        "kernel-that-waits-for-its-inputs",
        "rmsnorm",
        taking_over(WAITS_FOR_ITS_INPUTS),
        "the GPU is at work for its process after its batches",
        refused_by="examine",
    ),
    GpuCheat(
        40,
        "outputs-where-there-is-nothing",
        "rmsnorm",
        taking_over(FORGED_EXPORT.replace("FORGED", 'answer["outputs"] = [8] * len(answer["outputs"])')),
        "calls of one batch return the same memory",
        refused_by="examine",
    ),
    GpuCheat(
        40,
        "memory-of-nobody",
        "rmsnorm",
        taking_over(FORGED_EXPORT.replace("FORGED", 'answer["allocations"][0]["handle"] = "7" * 128')),
        FORGED,
        refused_by="examine",
        correctness="CRASH",
    ),
)

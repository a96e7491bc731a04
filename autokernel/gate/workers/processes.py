"""The judge's side of the processes: the warm parent, its workers, their limits, and their end."""

import contextlib
import hashlib
import importlib.metadata
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autokernel import build
from autokernel.gate.workers import answers, sandbox
from autokernel.gate.workers.channel import POISON, Arena, Channel, ChannelClosed, ChannelTimeout, Placed, place
from autokernel.gate.workers.launch import Launched
from autokernel.gate.workers.scratch import remove
from autokernel.gate.workers.views import dense, write
from autokernel.spec import KEPT_REGIONS, KERNELS, PROBLEMS, REGIONS, ROOT, TensorSpec

START_TIMEOUT_S = 120  # a cold import of torch and triton from a slow disk
BUILDS_S = 300.0  # for all that a kernel has built during one request; a build has a limit of its own besides
BUILT_BYTES = 128 << 20  # of all that a source has built, which is kept
STOP_S = 10.0  # how long a system call may keep a thread from being suspended
# CPU time of a worker that is suspended, and how often it may have that: a thread may leave the core a moment late.
SUSPENDED_S, SUSPENSIONS = 100e-6, 2
SETTLE_S = 10e-3  # how long a thread that stands may take to leave its core
RAN_S = 2e-3  # so much, once, is no such moment
LEAVE_S = 8.0  # how long a process may take to end that was told to
FIRST_STATUS, STATUSES = 64, 64  # with which it is to end: none that a signal or an error has
PATIENCE_S = 2.0  # how long a worker that has closed its channel may take to end
# Exceptions that are a word of a worker against itself.
DEATHS = {  # what a signal may say of the kernel
    "SIGSEGV": " (wrote to an input or outside a buffer, or called a library?)",
    "SIGSYS": " (asks Linux for another user, group or session of its process, or that others share less of it?)",
}
REFUSALS = ("LibraryCall", "StrayWrite", "ProcessChange", "SharedResult", "Disagreement", "Growth")
SCRATCH_BYTES = 1 << 30
KEPT_FOLDERS = 32  # of compiled sources: more than are ever in use at once
TRITON_GROUP, TRITON_GROUP_BYTES = "__grp__", 1 << 20  # how the names of files begin in which Triton notes paths of others

# A trivial kernel, at which Triton builds its own native parts (half a second of a C compiler): once, not for each kernel.
SEED = """
import triton
import triton.language as tl

@triton.jit
def zero(y):
    tl.store(y, 0.0)

def kernel_fn(y):
    zero[(1,)](y)
"""


class WorkerFault(Exception):
    """A worker did not answer as it should: `kind` is TIMEOUT, CRASH or FAIL (refused), `detail` what it left on stderr."""

    def __init__(self, worker: "WorkerProcess", kind: str, reason: str, detail: str = "", suspended: bool = False):
        """suspended: it ran although it was, of which it is the cause, or a machine that is overloaded."""
        reason, detail = answers.printable(reason.split("\n")[0], 1000), answers.printable(detail, 8000)
        super().__init__(reason)
        self.worker, self.kind, self.reason, self.detail, self.suspended = worker, kind, reason, detail, suspended

    @property
    def out_of_device_memory(self) -> bool:
        """As PyTorch, Triton and the CUDA runtime say it; the process lives on."""
        return "out of memory" in self.reason and not self.reason.startswith("killed by")


def _triton_identity() -> str:
    """What the parts that Triton builds for itself depend on: with another of these they are built anew."""
    parts = (importlib.metadata.version("triton"), sys.version, torch.version.cuda or torch.version.hip, SEED)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class WarmParent:
    """The zygote process and the shared memory from which all workers read their inputs."""

    def __init__(
        self, device: str, meanwhile: Callable[[], object] = lambda: None, launched: Launched | None = None
    ) -> None:
        """Returns once the process is ready. `meanwhile` is called while it imports torch and triton, which takes seconds.

        launched: the process, where it was started before, now ours to end.
        """
        self.device = device
        self.size = min(memory_bytes() // 2, 32 << 30)
        self.secret = secrets.token_bytes(32)
        self.folders: list[Path] = []  # by source, the one used last at the end
        self.inputs = Arena(self.size, writable_by_others=False)
        self.launched = launched or Launched()
        self.process, self.socket, self.scratch = self.launched.process, self.launched.socket, self.launched.scratch
        self.channel, self.lock = Channel(self.socket), threading.Lock()
        try:
            meanwhile()
            self.channel.receive(START_TIMEOUT_S)
        except BaseException as error:
            detail = self.launched.errors.read_text()[-2000:]
            self.close()
            if not isinstance(error, (ChannelClosed, ChannelTimeout)):
                raise
            raise RuntimeError(f"the gate's warm parent did not start:\n{detail}") from None
        self.launched.is_ready = True

    def gather_caches(self, place: str, sources: Iterable[str]) -> None:
        """Let `place`, which decides no verdict, begin with what was compiled for these sources before."""
        folder = self.caches(place)

        def copied(file: str, copy: str) -> None:
            shutil.copy2(file, copy)  # raises where it is no file
            if Path(copy).name.startswith(TRITON_GROUP) and os.path.getsize(copy) <= TRITON_GROUP_BYTES:
                Path(copy).write_bytes(Path(copy).read_bytes().replace(bytes(known), bytes(folder)))

        for known in (self.scratch / self._name(source) for source in sources):
            with contextlib.suppress(OSError, RecursionError):  # none, or a kernel has put there what cannot be copied
                shutil.copytree(known, folder, symlinks=True, copy_function=copied, dirs_exist_ok=True)

    def caches(self, source: str) -> Path:
        """Of what run-time compilers make of a source, kept apart so that no kernel can plant a binary for another.

        A new one begins with what they cached for the seed kernel. Those not used for long are removed: a night has many
        sources. Only a secret tells their names: a kernel could see from the outside whether one of its own was there.
        """
        folder, seed = (self.scratch / self._name(s) for s in (source, SEED))
        with self.lock:
            self.folders = [other for other in self.folders if other != folder] + [folder] * (folder != seed)
            while len(self.folders) > KEPT_FOLDERS:
                remove(self.folders.pop(0))
            if not folder.exists():
                if seed.exists():
                    shutil.copytree(seed, folder)
                else:
                    folder.mkdir()
        return folder

    def _name(self, source: str) -> str:
        return hashlib.blake2b(source.encode(), key=self.secret, digest_size=8).hexdigest()

    def seed_caches(self) -> None:
        """On a GPU, let Triton build its own parts, which are kept for the judges to come.

        Without a C compiler it cannot: then each kernel will say so.
        """
        if self.device == "cpu":
            return
        kept, mine = build.default_cache() / f"triton-{_triton_identity()}", self.scratch / self._name(SEED)
        if kept.exists():
            shutil.copytree(kept, mine)
            return
        y = Placed(TensorSpec((1,), torch.float32), 0).encode()
        with contextlib.suppress(WorkerFault), WorkerProcess(self, 1, SEED) as worker:
            worker.request("load", START_TIMEOUT_S, source=SEED, poison=False, libraries="any")
            worker.request("warm", START_TIMEOUT_S, cases=[{"y": y}])
            with contextlib.suppress(OSError):  # a full disk, or a judge that did the same at the same time
                shutil.copytree(mine, partly := kept.with_name(f"{kept.name}-{os.getpid()}"))
                partly.rename(kept)

    def probe(self) -> dict[str, bool]:
        """Which layers of the sandbox hold here: what a worker of ours could not do when it tried."""
        with tempfile.NamedTemporaryFile(prefix="autokernel-secret-") as secret, WorkerProcess(self, 1, "probe") as worker:
            layers = worker.request("probe", 30, secret=secret.name, outsider=os.getpid()).layers
            return layers | sandbox.inspect(worker.pid, worker.scratch)

    @contextlib.contextmanager
    def exchange(self) -> Iterator[Channel]:
        """For one request and its answer, by one thread at a time.

        What cuts it short, such as Ctrl-C, ends the channel: its answer would be taken for that of the next request.
        """
        with self.lock:
            try:
                yield self.channel
            except BaseException:
                with contextlib.suppress(OSError):  # it has ended already
                    self.socket.shutdown(socket.SHUT_RDWR)
                raise

    def close(self) -> None:
        """End the warm parent, which ends its workers and whatever they have left behind."""
        if not self.launched.is_closed:
            self.inputs.close()
        self.launched.close()


class WorkerProcess:
    """One sandboxed worker, from the judge's side. A context manager: leaving it ends the process and its group.

    Its folders, its environment and the numbers of requests are new for each process, so that a kernel does not find out by
    them whether it was started before, and behave until then. What still tells:
    - how long a build takes, for a library is compiled once;
    - where run-time compilers work (GPUs, PyTorch's own side), what they have cached for this very source;
    - process ids and the age of the warm parent, which say how much the gate has done, not of which kernel;
    - what lies in the shared memory from inputs of before;
    - which parts of the files that it may read lie in the system's cache;
    - the requests themselves, which a kernel can look at: a check is not a timed batch.
    So what it does later is looked at as well: outputs of timed calls are compared, at moments that it cannot know.
    """

    def __init__(self, parent: WarmParent, threads: int, source: str, compiles: bool = False):
        """`source` is what it will load (empty: the eager baseline, which reads specs as well); `compiles`: by Inductor."""
        readable = () if source else (KERNELS, PROBLEMS, REGIONS, KEPT_REGIONS, ROOT / "reference.py")
        self.parent = parent
        self.built: set[str] = set()  # binaries that were compiled for it, where it finds them
        self.built_bytes = 0  # of those that the source has asked for that it has now
        # A C++ kernel on a CPU needs no process beside its own; Triton and Inductor compile in some.
        forks = parent.device != "cpu" or not source
        self.outputs = Arena(parent.size, writable_by_others=True)
        self.errors = tempfile.TemporaryFile(dir=parent.scratch)  # noqa: SIM115  has no name that could be made a link
        self.scratch, self.binaries = (
            Path(tempfile.mkdtemp(dir=parent.scratch, prefix=prefix)) for prefix in ("worker-", "binaries-")
        )
        caches = parent.caches(source) if forks else self.scratch
        ours, theirs = socket.socketpair()
        request = {
            "op": "spawn",
            "size": parent.size,
            "scratch": str(self.scratch),
            "scratch_bytes": SCRATCH_BYTES,
            "device": parent.device,
            "threads": threads,
            "compiles": compiles,
            "environment": {
                "HOME": str(self.scratch),
                "TMPDIR": str(self.scratch),
                "TRITON_CACHE_DIR": str(caches / "triton"),
                "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            },
            "limits": {"data_bytes": int(memory_bytes() * 0.7)},
            "readable": [str(path) for path in (self.binaries, *readable)],
            "writable": [str(caches)] if forks else [],
            "forks": forks,
        }
        with parent.exchange() as channel:
            channel.send(request)
            inputs_fd = parent.inputs.opened()
            socket.send_fds(parent.socket, [b"."], [theirs.fileno(), inputs_fd, self.outputs.fd, self.errors.fileno()])
            os.close(inputs_fd)
            self.pid = channel.receive(30)["pid"]
        theirs.close()
        self.socket, self.channel = ours, Channel(ours)
        self.suspended_s: float | None = None  # its CPU time when it was suspended
        self.went_on = 0  # how often it has run since then
        try:  # now, before there is a kernel in it that could forbid this
            self.memory_fd = os.open(f"/proc/{self.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # macOS, or a container without the right to trace
            self.memory_fd = None

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def request(self, op: str, timeout_s: float, **fields: Any) -> Any:
        """Send one message and wait for its answer, of the kind in answers.KINDS. Raises WorkerFault as `answer` does."""
        self.post(op, **fields)
        return self.answer(timeout_s)

    def post(self, op: str, **fields: Any) -> None:
        """Send one message. If the worker is gone, `answer` will say so."""
        self.asked = op, secrets.randbelow(answers.MAX_REQUEST)
        self.built_bytes = 0 if op == "load" else self.built_bytes
        with contextlib.suppress(ChannelClosed):
            self.channel.send({"op": op, "id": self.asked[1], **fields})

    def answer(self, timeout_s: float) -> Any:
        """The answer to the last message; builds what the worker asks for meanwhile.

        Raises WorkerFault: TIMEOUT, or CRASH with the signal, the exception or the compiler's output.
        """
        deadline, building_s = time.monotonic() + timeout_s, BUILDS_S
        try:
            while isinstance(message := self._receive(deadline), answers.Build):
                started = time.monotonic()
                self._build(message)
                took_s = min(time.monotonic() - started, building_s)
                deadline, building_s = deadline + took_s, building_s - took_s  # builds have a limit of their own
        except ChannelTimeout:
            self.kill()
            raise WorkerFault(self, "TIMEOUT", f"no answer within {timeout_s:.0f} s", self.stderr()) from None
        except ChannelClosed as error:
            raise WorkerFault(self, "CRASH", self.cause_of_death(error), self.stderr()) from None
        except ValueError as error:
            raise self.forged(error) from None
        if isinstance(message, answers.Error):
            refused = message.error.startswith(REFUSALS)
            raise WorkerFault(self, "FAIL" if refused else "CRASH", message.error, message.detail)
        return message

    def _receive(self, deadline: float) -> answers.Answer | answers.Error | answers.Build:
        return self.channel.receive(max(deadline - time.monotonic(), 0.01), partial(answers.decode, *self.asked))

    def forged(self, what: object) -> WorkerFault:
        """That the answer is not one to the request; what is said instead of acting on it."""
        return WorkerFault(self, "CRASH", f"the worker's answer is not what was asked for: {what}", self.stderr())

    def _build(self, wanted: answers.Build) -> None:
        try:
            if self.built_bytes > BUILT_BYTES:
                raise build.CompileError(f"a kernel has {BUILT_BYTES >> 20} MB built at most, in all")
            path = build.compile_library(build.Library(wanted.language, wanted.source, wanted.defines))
        except (build.CompileError, build.MissingCompiler, OSError) as error:  # the last of a full disk, or too much
            self.channel.send({"error": str(error)})
        else:
            copy = self.binaries / path.name  # it can read this one, and no binary of another kernel
            if not copy.exists():
                self.built_bytes += path.stat().st_size
                shutil.copy(path, f"{copy}-{self.pid}")
                os.replace(f"{copy}-{self.pid}", copy)
            self.built.add(str(copy))
            self.channel.send({"path": str(copy)})

    def fetch(
        self, described: Sequence[answers.Output], count: int, most_bytes: int, device: str = "cpu"
    ) -> list[tuple[Tensor, tuple[int, ...]]]:
        """Copies on `device` of what look() sees."""
        return [(y.to(device, copy=True), strides) for y, strides in self.look(described, count, most_bytes)]

    def look(
        self, described: Sequence[answers.Output], count: int, most_bytes: int
    ) -> list[tuple[Tensor, tuple[int, ...]]]:
        """The `count` outputs that an answer describes, each of `most_bytes` at most, with the strides that they had in the
        worker; where they lie, and the worker may still write.

        Raises WorkerFault where they are others, or not one after the other in the arena.
        """
        if len(described) != count:
            raise self.forged(f"{len(described)} tensors instead of {count}")
        outputs, free = [], 0
        for item in described:
            placed = Placed(item.spec, item.start)
            if placed.start < free or placed.end > self.outputs.size:
                raise self.forged("a tensor outside of the shared memory, or inside another one")
            if placed.end - placed.start > most_bytes:
                raise self.forged(
                    f"a tensor of shape {list(item.shape)}, {item.dtype}, where results take {most_bytes} bytes at most"
                )
            outputs.append((placed.view(self.outputs.bytes), item.stride))
            free = placed.end
        return outputs

    def read(self, address: int, layout: TensorSpec, start: int = 0) -> Tensor:
        """A copy of a tensor of the worker's as it is in its memory now, `start` bytes beyond the address that it names,
        read without its help; needs `memory_fd`.

        Raises WorkerFault if there is none at that address.
        """
        if not layout.numel:
            return torch.empty(layout.shape, dtype=layout.dtype)
        data = bytearray(layout.storage_numel * layout.dtype.itemsize)
        done = 0
        try:
            while done < len(data):  # 2 GiB at most are read at once
                read = os.preadv(self.memory_fd, [memoryview(data)[done:]], address + start + done)
                if not read:
                    raise ValueError("the memory ends before the output")
                done += read
        except (OSError, ValueError) as error:
            raise self.forged(f"no output at the address that it names: {error}") from None
        return torch.frombuffer(data, dtype=layout.dtype).as_strided(layout.shape, layout.strides)

    def end(self) -> None:
        """SIGKILL to all its group; whoever waits for its answer is told, and `kill` collects it."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Suspend all its threads, so that none of them spins while another worker is timed; returns when they stand.

        A thread in a system call stops at its end: one that is long (memory that is populated) would go on in the turn of
        another worker. Raises WorkerFault where one does not stop.
        """
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + STOP_S
        while any(not stopped(task) for task in tasks(self.pid)):
            self._signal(signal.SIGSTOP)  # again: it may have been continued meanwhile
            if time.monotonic() > deadline:
                reason = f"it went on for {STOP_S:.0f} s after it had been suspended"
                raise WorkerFault(self, "TIMEOUT", reason, suspended=True)
        self.suspended_s = self._settled_s()

    def _settled_s(self) -> float:
        """Its CPU time once that no longer grows: a thread that stands may still be leaving its core, for milliseconds
        where the core itself is taken away. The time of one that does not stand counts, from the beginning."""
        first = before = self.cpu_s()
        deadline = time.monotonic() + SETTLE_S
        while (now := self.cpu_s()) != before:
            if time.monotonic() > deadline or not all(map(stopped, tasks(self.pid))):
                return first
            before = now
        return now

    def resume(self) -> None:
        """Raises WorkerFault where it has run although suspended: a process can be continued by a timer of its own."""
        if self.suspended_s is not None and (ran_s := self.cpu_s() - self.suspended_s) > SUSPENDED_S:
            self.went_on += 1
            if self.went_on > SUSPENSIONS or ran_s > RAN_S:
                reason = f"it ran for {ran_s * 1e6:.0f} us while it was suspended"
                raise WorkerFault(self, "FAIL", reason, suspended=True)
        self.suspended_s = None
        self._signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        """CPU time of all its threads; 0 where another process's clock cannot be read (macOS)."""
        try:
            return time.clock_gettime(~self.pid << 3 | 2) if sys.platform == "linux" else 0.0
        except OSError:  # it is gone
            return 0.0

    def page_faults(self) -> int:
        """How often it has touched memory for the first time (proc_pid_stat(5)); 0 where there is no /proc."""
        try:
            return int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[7])
        except (OSError, IndexError):
            return 0

    def pin(self) -> None:
        """Keep each thread but the first on one core, in turn, and the first core for the first thread.

        Threads that resume together may else land on one core, and stay there for milliseconds. The first thread stays
        free, and so do those that it makes later.
        """
        _, *cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (0,)
        threads = sorted(int(task.name) for task in tasks(self.pid))
        for number, thread in enumerate(threads[1:] if cores else ()):
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(thread, {cores[number % len(cores)]})

    def check_end(self) -> str | None:
        """Has it end by itself, as a program does; returns what is wrong with how it did."""
        status = FIRST_STATUS + secrets.randbelow(STATUSES)  # told now: who ends the process with its own is found
        self.post("leave", status=status)
        try:
            self.answer(LEAVE_S)
            how = "it goes on"
        except WorkerFault as fault:
            how = f"its process goes on for {LEAVE_S:.0f} s" if fault.kind == "TIMEOUT" else fault.reason
        return None if self._reap() == status else f"does not let its process, which is its model's, end as it would: {how}"

    def stderr(self) -> str:
        """The last lines that it wrote there."""
        with contextlib.suppress(ValueError):  # closed: the worker was ended before
            last = os.pread(self.errors.fileno(), 4000, max(os.fstat(self.errors.fileno()).st_size - 4000, 0))
            return "\n".join(last.decode(errors="replace").splitlines()[-20:])
        return ""

    def cause_of_death(self, error: ChannelClosed) -> str:
        """Why it no longer answers: how its process ended, if it did so by itself."""
        status = self._reap(PATIENCE_S)
        if status is None:
            return f"broken channel: {error}"
        if status >= 0:
            return f"its process ended with status {status}"
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"  # a real-time one
        if name == "SIGKILL" or "std::bad_alloc" in self.stderr():
            return f"killed by {name} (out of memory)"
        return f"killed by {name}" + DEATHS.get(name, "")

    def kill(self) -> None:
        """End the process and its group, whatever they are doing; idempotent."""
        self._signal(signal.SIGKILL)
        self._reap()
        self.socket.close()
        self.outputs.close()
        memory_fd, self.memory_fd = self.memory_fd, None
        if memory_fd is not None:
            os.close(memory_fd)
        self.errors.close()
        remove(self.scratch)
        remove(self.binaries)

    def _signal(self, number: int) -> None:
        """Send a signal to all its group; a group that is gone needs none."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _reap(self, patience_s: float = 0.0) -> int | None:
        """Its exit code (negative: the signal) if it ends by itself within `patience_s`, else None: it is killed.

        Asked once of the warm parent, which also ends what the worker has left behind.
        """
        if not hasattr(self, "_status"):
            self._status = None
            with contextlib.suppress(ChannelClosed, ChannelTimeout), self.parent.exchange() as channel:
                channel.send({"op": "wait", "pid": self.pid, "patience_s": patience_s})
                self._status = channel.receive(10 + patience_s)["status"]
        return self._status


def tasks(pid: int) -> list[Path]:
    """The threads of a process, in /proc; none where there is no such folder."""
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def stopped(task: Path) -> bool:
    """Whether a thread is stopped, or gone (proc_pid_stat(5))."""
    try:
        return (task / "stat").read_bytes().rpartition(b")")[2].split()[0] in b"TtZX"
    except (OSError, IndexError):
        return True


def end_all(workers: Iterable[WorkerProcess]) -> None:
    """End several at once: a CUDA context takes its time to go, and several take it together."""
    workers = list(workers)
    for worker in workers:
        worker.end()
    for worker in workers:
        worker.kill()


def write_inputs(parent: WarmParent, inputs: dict[str, Any], specs: dict[str, TensorSpec], start: int) -> tuple[dict, int]:
    """Write one input set into the shared arena at byte `start`, poison around and between; returns (message, end)."""
    placed, end = place(specs, start)
    memory, written = parent.inputs.bytes, start
    for name, where in placed.items():
        view = where.view(memory)
        is_whole = not where.spec.offset and where.spec.storage_numel == view.numel() and dense(view)  # no gaps
        memory[written : where.start if is_whole else where.end] = POISON
        write(view, inputs[name])
        written = where.end
    memory[written:end] = POISON
    message = {name: placed[name].encode() if name in placed else value for name, value in inputs.items()}
    return message, end

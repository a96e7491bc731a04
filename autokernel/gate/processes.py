"""The judge's side of the processes: the warm parent, its workers, their limits, and their end."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autokernel import build
from autokernel.gate import sandbox
from autokernel.gate.channel import POISON, Arena, Channel, ChannelClosed, ChannelTimeout, Placed, place
from autokernel.spec import KERNELS, PROBLEMS, ROOT, TensorSpec

START_TIMEOUT_S = 120  # a cold import of torch and triton from a slow disk
PATIENCE_S = 2.0  # how long a worker that has closed its channel may take to end
SCRATCH_NAME = "autokernel-judge-"
SCRATCH_BYTES = 1 << 30
KEPT_FOLDERS = 32  # of compiled sources: more than are ever in use at once
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "CC")
# glibc: serve large blocks from the heap and keep them, or every call pays for the page faults of fresh memory.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


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

    def __init__(self, worker: "WorkerProcess", kind: str, reason: str, detail: str = ""):
        super().__init__(reason)
        self.worker, self.kind, self.reason, self.detail = worker, kind, reason, detail

    @property
    def out_of_device_memory(self) -> bool:
        """As PyTorch, Triton and the CUDA runtime say it; the process lives on."""
        return "out of memory" in self.reason and not self.reason.startswith("killed by")


class Answer(dict[str, Any]):
    """A worker's message: it holds what the worker chose to send."""

    def __init__(self, worker: "WorkerProcess", message: dict[str, Any]):
        super().__init__(message)
        self.worker = worker

    def __missing__(self, name: str) -> Any:
        raise WorkerFault(self.worker, "CRASH", f"the worker's answer makes no sense: it has no {name}")


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class WarmParent:
    """The zygote process and the shared memory from which all workers read their inputs."""

    def __init__(self, device: str):
        self.device = device
        self.size = min(memory_bytes() // 2, 32 << 30)
        self.inputs = Arena(self.size, writable_by_others=False)
        self.scratch, self.lock_fd = claim_scratch()
        self.folders: list[Path] = []  # by source, the one used last at the end
        ours, theirs = socket.socketpair()
        environment = {k: os.environ[k] for k in PASSED_ON if k in os.environ}
        environment |= MALLOC | {
            "HOME": str(self.scratch),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "OPENBLAS_NUM_THREADS": "1",  # numpy would start a pool at import, and a pool does not survive a fork
            "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "autokernel.gate.zygote", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env=environment,
            cwd=self.scratch,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=open(self.scratch / "zygote-stderr", "w"),  # noqa: SIM115  Popen keeps it
            start_new_session=True,
        )
        theirs.close()
        self.socket, self.channel, self.lock = ours, Channel(ours), threading.Lock()
        try:
            self.channel.receive(START_TIMEOUT_S)
        except (ChannelClosed, ChannelTimeout):
            detail = (self.scratch / "zygote-stderr").read_text()[-2000:]
            self.close()
            raise RuntimeError(f"the gate's warm parent did not start:\n{detail}") from None

    def folder(self, source: str) -> Path:
        """Of what is compiled for a source, kept apart so that no kernel can plant a binary for another.

        A new one begins with what run-time compilers cached for the seed kernel. Those not used for long are removed: a
        night has many sources.
        """
        folder, seed = (self.scratch / hashlib.sha256(s.encode()).hexdigest()[:16] for s in (source, SEED))
        with self.lock:
            self.folders = [other for other in self.folders if other != folder] + [folder] * (folder != seed)
            while len(self.folders) > KEPT_FOLDERS:
                remove(self.folders.pop(0))
            if not folder.exists():
                (folder / "binaries").mkdir(parents=True)
                if (seed / "caches").exists():
                    shutil.copytree(seed / "caches", folder / "caches")
                else:
                    (folder / "caches").mkdir()
        return folder

    def seed_caches(self) -> None:
        """Let Triton build its own parts. Without a C compiler it cannot: then each kernel will say so."""
        y = Placed(TensorSpec((1,), torch.float32), 0).encode()
        with contextlib.suppress(WorkerFault), WorkerProcess(self, 1, SEED) as worker:
            worker.request("load", START_TIMEOUT_S, source=SEED, poison=False, libraries="any")
            worker.request("warm", START_TIMEOUT_S, cases=[{"y": y}])

    def probe(self) -> dict[str, bool]:
        """Which layers of the sandbox hold here: what a worker of ours could not do when it tried."""
        with tempfile.NamedTemporaryFile(prefix="autokernel-secret-") as secret, WorkerProcess(self, 1, "probe") as worker:
            layers = worker.request("probe", 30, secret=secret.name, outsider=os.getpid())["layers"]
            return layers | sandbox.inspect(worker.pid, worker.scratch)

    def close(self) -> None:
        """End the warm parent, which ends its workers and whatever they have left behind."""
        self.socket.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.inputs.close()
        remove(self.scratch)
        os.close(self.lock_fd)


class WorkerProcess:
    """One sandboxed worker, from the judge's side. A context manager: leaving it ends the process and its group."""

    def __init__(self, parent: WarmParent, threads: int, source: str):
        """`source` is what it will load (empty: the eager baseline, which reads the specs as well)."""
        readable = () if source else (KERNELS, PROBLEMS, ROOT / "reference.py")
        self.parent = parent
        self.built: set[str] = set()  # binaries that were compiled for it, where it finds them
        folder = parent.folder(source)
        self.binaries, caches = folder / "binaries", folder / "caches"
        # A C++ kernel on a CPU needs no process beside its own; Triton and Inductor compile in some.
        forks = parent.device != "cpu" or not source
        self.outputs = Arena(parent.size, writable_by_others=True)
        self.errors = tempfile.TemporaryFile(dir=parent.scratch)  # noqa: SIM115  has no name that could be made a link
        self.scratch = Path(tempfile.mkdtemp(dir=parent.scratch, prefix="worker-"))
        ours, theirs = socket.socketpair()
        request = {
            "op": "spawn",
            "size": parent.size,
            "scratch": str(self.scratch),
            "scratch_bytes": SCRATCH_BYTES,
            "device": parent.device,
            "threads": threads,
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
        with parent.lock:
            parent.channel.send(request)
            fds = [theirs.fileno(), parent.inputs.fd, self.outputs.fd, self.errors.fileno()]
            socket.send_fds(parent.socket, [b"."], fds)
            self.pid = parent.channel.receive(30)["pid"]
        theirs.close()
        self.socket, self.channel = ours, Channel(ours)
        try:  # now, before there is a kernel in it that could forbid this
            self.memory_fd = os.open(f"/proc/{self.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # macOS, or a container without the right to trace
            self.memory_fd = None

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def request(self, op: str, timeout_s: float, **fields: Any) -> Answer:
        """Send one message and wait for its answer. Raises WorkerFault as `answer` does."""
        self.post(op, **fields)
        return self.answer(timeout_s)

    def post(self, op: str, **fields: Any) -> None:
        """Send one message. If the worker is gone, `answer` will say so."""
        with contextlib.suppress(ChannelClosed):
            self.channel.send({"op": op, **fields})

    def answer(self, timeout_s: float) -> Answer:
        """The answer to the last message; builds what the worker asks for meanwhile.

        Raises WorkerFault: TIMEOUT, or CRASH with the signal, the exception or the compiler's output.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                message = self.channel.receive(max(deadline - time.monotonic(), 0.01))
                if "build" not in message:
                    break
                started = time.monotonic()
                self._build(message["build"])
                deadline += time.monotonic() - started  # a build has a limit of its own
        except ChannelTimeout:
            self.kill()
            raise WorkerFault(self, "TIMEOUT", f"no answer within {timeout_s:.0f} s", self.stderr()) from None
        except (ChannelClosed, ValueError, KeyError, TypeError, RecursionError) as error:
            raise WorkerFault(self, "CRASH", self.cause_of_death(error), self.stderr()) from None
        if "error" in message:
            reason, detail = str(message["error"]).split("\n")[0], str(message.get("detail", ""))
            refused = reason.startswith(("LibraryCall", "StrayWrite"))  # a word of the worker against itself
            raise WorkerFault(self, "FAIL" if refused else "CRASH", reason, detail)
        return Answer(self, message)

    def _build(self, wanted: dict[str, Any]) -> None:
        defines = tuple((str(k), str(v)) for k, v in wanted["defines"])
        try:
            path = build.compile_library(build.Library(str(wanted["language"]), str(wanted["source"]), defines))
        except (build.CompileError, build.MissingCompiler) as error:
            self.channel.send({"error": str(error)})
        else:
            copy = self.binaries / path.name  # it can read this one, and no binary of another kernel
            if not copy.exists():
                shutil.copy(path, f"{copy}-{self.pid}")
                os.replace(f"{copy}-{self.pid}", copy)
            self.built.add(str(copy))
            self.channel.send({"path": str(copy)})

    def fetch(self, described: list[dict[str, Any]]) -> list[tuple[Tensor, tuple[int, ...]]]:
        """Copies of the outputs that an answer describes, with the strides that they had in the worker.

        Raises WorkerFault if the description points outside the arena or makes no sense.
        """
        outputs = []
        try:
            for item in described:
                shape, dtype = tuple(int(n) for n in item["shape"]), getattr(torch, item["dtype"])
                placed = Placed(TensorSpec(shape, dtype), int(item["start"]))
                if min((placed.start, *shape)) < 0 or placed.end > self.outputs.size:
                    raise ValueError("outside the shared memory")
                outputs.append((placed.view(self.outputs.bytes).clone(), tuple(map(int, item["stride"]))))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RuntimeError) as error:
            raise WorkerFault(self, "CRASH", f"the worker's answer makes no sense: {error}") from None
        return outputs

    def read(self, address: Any, layout: TensorSpec) -> Tensor:
        """A copy of a tensor of the worker's as it is in its memory now, read without its help; needs `memory_fd`.

        Raises WorkerFault if there is none at that address.
        """
        data = bytearray(layout.storage_numel * layout.dtype.itemsize)
        done = 0
        try:
            while done < len(data):  # 2 GiB at most are read at once
                read = os.preadv(self.memory_fd, [memoryview(data)[done:]], address + done)
                if not read:
                    raise ValueError("the memory ends before the output")
                done += read
        except (OSError, OverflowError, TypeError, ValueError) as error:
            raise WorkerFault(self, "CRASH", f"no output at the address that the worker names: {error}") from None
        return torch.frombuffer(data, dtype=layout.dtype).as_strided(layout.shape, layout.strides)

    def end(self) -> None:
        """SIGKILL to all its group; whoever waits for its answer is told, and `kill` collects it."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Suspend all its threads, so that none of them spins while another worker is timed."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stderr(self) -> str:
        """The last lines that it wrote there."""
        with contextlib.suppress(ValueError):  # closed: the worker was ended before
            last = os.pread(self.errors.fileno(), 4000, max(os.fstat(self.errors.fileno()).st_size - 4000, 0))
            return "\n".join(last.decode(errors="replace").splitlines()[-20:])
        return ""

    def cause_of_death(self, error: Exception) -> str:
        """Why it no longer answers as it should: how its process ended, if it did so by itself."""
        status = self._reap(PATIENCE_S) if isinstance(error, ChannelClosed) else None
        if status is None:
            return f"broken channel: {error}"
        if status >= 0:
            return f"its process ended with status {status}"
        name = signal.Signals(-status).name
        if name == "SIGKILL" or "std::bad_alloc" in self.stderr():
            return f"killed by {name} (out of memory)"
        return f"killed by {name}" + " (wrote to an input or outside a buffer?)" * (name == "SIGSEGV")

    def kill(self) -> None:
        """End the process and its group, whatever they are doing; idempotent."""
        self._signal(signal.SIGKILL)
        self._reap()
        self.socket.close()
        with contextlib.suppress(OSError):
            self.outputs.close()
        if self.memory_fd is not None:
            os.close(self.memory_fd)
            self.memory_fd = None
        self.errors.close()
        remove(self.scratch)

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
            with contextlib.suppress(ChannelClosed, ChannelTimeout), self.parent.lock:
                self.parent.channel.send({"op": "wait", "pid": self.pid, "patience_s": patience_s})
                self._status = self.parent.channel.receive(10 + patience_s)["status"]
        return self._status


def claim_scratch() -> tuple[Path, int]:
    """A new folder, and a lock on it for as long as this process lives. Folders of judges that were killed are removed."""
    places = Path(tempfile.gettempdir())
    for folder in places.glob(f"{SCRATCH_NAME}*"):
        with contextlib.suppress(OSError):  # another user's, or locked by a living judge, or gone by now
            os.close(_lock(folder))
            remove(folder)
    new = Path(tempfile.mkdtemp(prefix="autokernel-new-"))
    fd = _lock(new)
    return new.rename(places / f"{SCRATCH_NAME}{new.name.rpartition('-')[2]}"), fd  # named so only once it is locked


def _lock(folder: Path) -> int:
    """Raises OSError if the folder is not ours alone."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_uid != os.getuid():
            raise PermissionError(folder)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:  # a kernel may nest folders as deep as it likes
        subprocess.run(["rm", "-rf", str(folder)], check=False)


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
    memory = parent.inputs.bytes
    memory[start:end] = POISON
    for name, where in placed.items():
        where.view(memory).copy_(inputs[name])
    message = {name: placed[name].encode() if name in placed else value for name, value in inputs.items()}
    return message, end

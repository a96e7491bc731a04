"""The judge's side of the processes: the warm parent, its workers, their limits, and their end."""

import contextlib
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
from autokernel.gate.channel import POISON, Arena, Channel, ChannelClosed, ChannelTimeout, Placed, place
from autokernel.spec import ROOT, TensorSpec

START_TIMEOUT_S = 120  # a cold import of torch and triton from a slow disk
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "CC")
# glibc: serve large blocks from the heap and keep them, or every call pays for the page faults of fresh memory.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


class WorkerFault(Exception):
    """A worker did not answer as it should: `kind` is TIMEOUT, CRASH or FAIL (refused), `detail` what it left on stderr."""

    def __init__(self, worker: "WorkerProcess", kind: str, reason: str, detail: str = ""):
        super().__init__(reason)
        self.worker, self.kind, self.reason, self.detail = worker, kind, reason, detail


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class WarmParent:
    """The zygote process and the shared memory from which all workers read their inputs."""

    def __init__(self, device: str):
        self.device = device
        self.size = min(memory_bytes() // 2, 32 << 30)
        self.inputs = Arena(self.size, writable_by_others=False)
        self.scratch = Path(tempfile.mkdtemp(prefix="autokernel-"))
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

    def probe(self) -> dict[str, bool]:
        """Which layers of the sandbox hold here: what a worker of ours could not do when it tried."""
        with tempfile.NamedTemporaryFile(prefix="autokernel-secret-") as secret, WorkerProcess(self, 1, "probe") as worker:
            return worker.request("probe", 30, secret=secret.name, outsider=os.getpid())["layers"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()
        self.inputs.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


class WorkerProcess:
    """One sandboxed worker, from the judge's side. A context manager: leaving it ends the process and its group."""

    def __init__(self, parent: WarmParent, threads: int, source: str):
        """`source` is what it will load (empty: the eager baseline, which reads the specs as well). Binaries that Triton
        caches are kept apart by it, so that no kernel can plant one for another."""
        readable = () if source else (ROOT / "kernels", ROOT / "reference.py")
        self.parent = parent
        self.built: set[str] = set()  # binaries that were compiled for it
        caches = parent.scratch / hashlib.sha256(source.encode()).hexdigest()[:16]
        self.outputs = Arena(parent.size, writable_by_others=True)
        self.scratch = Path(tempfile.mkdtemp(dir=parent.scratch, prefix="worker-"))
        ours, theirs = socket.socketpair()
        request = {
            "op": "spawn",
            "size": parent.size,
            "scratch": str(self.scratch),
            "device": parent.device,
            "threads": threads,
            "environment": {
                "HOME": str(self.scratch),
                "TMPDIR": str(self.scratch),
                "TRITON_CACHE_DIR": str(caches / "triton"),
                "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            },
            "limits": {"data_bytes": int(memory_bytes() * 0.7)},
            "readable": [str(path) for path in (build.default_cache(), *readable)],
            "writable": [str(caches)],
        }
        caches.mkdir(parents=True, exist_ok=True)
        with parent.lock:
            parent.channel.send(request)
            fds = [theirs.fileno(), parent.inputs.fd, self.outputs.fd]
            socket.send_fds(parent.socket, [b"."], fds)
            self.pid = parent.channel.receive(30)["pid"]
        theirs.close()
        self.socket, self.channel = ours, Channel(ours)

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def request(self, op: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Send one message and wait for its answer. Raises WorkerFault as `answer` does."""
        self.post(op, **fields)
        return self.answer(timeout_s)

    def post(self, op: str, **fields: Any) -> None:
        """Send one message. If the worker is gone, `answer` will say so."""
        with contextlib.suppress(ChannelClosed):
            self.channel.send({"op": op, **fields})

    def answer(self, timeout_s: float) -> dict[str, Any]:
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
        return message

    def _build(self, wanted: dict[str, Any]) -> None:
        defines = tuple((str(k), str(v)) for k, v in wanted["defines"])
        try:
            path = build.compile_library(build.Library(str(wanted["language"]), str(wanted["source"]), defines))
        except (build.CompileError, build.MissingCompiler) as error:
            self.channel.send({"error": str(error)})
        else:
            self.built.add(str(path))
            self.channel.send({"path": str(path)})

    def fetch(self, described: list[dict[str, Any]]) -> list[tuple[Tensor, tuple[int, ...]]]:
        """Copies of the outputs that an answer describes, with the strides that they had in the worker.

        Raises WorkerFault if the description points outside the arena or makes no sense.
        """
        outputs = []
        for item in described:
            try:
                shape, dtype = tuple(int(n) for n in item["shape"]), getattr(torch, item["dtype"])
                placed = Placed(TensorSpec(shape, dtype), int(item["start"]))
                if min((placed.start, *shape)) < 0 or placed.end > self.outputs.size:
                    raise ValueError("outside the shared memory")
                outputs.append((placed.view(self.outputs.bytes).clone(), tuple(map(int, item["stride"]))))
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise WorkerFault(self, "CRASH", f"the worker's answer makes no sense: {error}") from None
        return outputs

    def stop(self) -> None:
        """Suspend all its threads, so that none of them spins while another worker is timed."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stderr(self) -> str:
        with contextlib.suppress(OSError), open(self.scratch / "stderr", "rb") as file:
            file.seek(max(os.path.getsize(file.name) - 4000, 0))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-20:])
        return ""

    def cause_of_death(self, error: Exception) -> str:
        self._signal(signal.SIGKILL)
        status = self._reap()
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            hint = " (wrote to an input or outside a buffer?)" if name == "SIGSEGV" else ""
            return f"killed by {name}{hint}"
        return f"its process ended with status {status}" if status is not None else f"broken channel: {error}"

    def kill(self) -> None:
        """End the process and its group, whatever they are doing; idempotent."""
        self._signal(signal.SIGKILL)
        self._reap()
        self.socket.close()
        with contextlib.suppress(OSError):
            self.outputs.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _signal(self, number: int) -> None:
        """Send a signal to all its group; a group that is gone needs none."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _reap(self) -> int | None:
        """The exit code (negative: the signal), collected once through the warm parent."""
        if not hasattr(self, "_status"):
            self._status = None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # before setsid it is not yet a group of its own
            with contextlib.suppress(ChannelClosed, ChannelTimeout, KeyError), self.parent.lock:
                self.parent.channel.send({"op": "wait", "pid": self.pid})
                self._status = int(self.parent.channel.receive(10)["status"])
        return self._status


def end_all(workers: Iterable[WorkerProcess]) -> None:
    """End several at once: a CUDA context takes its time to go, and several take it together."""
    workers = list(workers)
    for worker in workers:
        worker._signal(signal.SIGKILL)
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

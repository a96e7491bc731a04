"""The warm parent: a process that has imported torch and triton, and forks a worker in milliseconds on request.

It runs no OpenMP region and touches no device: a child forked after either would hang or inherit a broken state.
torch.compile's modules it imports when a worker first needs them.
Run by the judge as `python -m autokernel.gate.workers.zygote FD`.
"""

import gc
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path

from autokernel.common.preflight import ROOT
from autokernel.gate.workers import sandbox
from autokernel.hardware.processes import become_subreaper

if __name__ == "__main__":  # before the imports that take seconds
    sandbox.die_with_parent()  # a command may end at any time while its parent is being launched
    if select.select([int(sys.argv[1])], [], [], 0)[0]:  # it has: before we are ready nothing is sent
        raise SystemExit
    # Behind Python's own modules, one of which is named as our script profile.py, which no worker may read.
    sys.path.remove(str(ROOT))
    sys.path.append(str(ROOT))
    gc.disable()  # collections took 16 % of the imports (2.4 s, 2.05 s without: two cores of a Zen 5), and freed nothing

import numpy  # noqa: F401  imported here so that no worker pays for it
import torch

from autokernel.gate.workers.channel import Channel, ChannelClosed
from autokernel.gate.workers.patches import note_what_is_there
from autokernel.gate.workers.worker import run_worker
from autokernel.spec import load_spec  # noqa: F401

if sys.platform == "linux":
    import triton
    import triton.language  # noqa: F401


def assert_forkable() -> None:
    threads = threading.active_count()
    assert threads == 1, f"the warm parent runs {threads} Python threads"
    assert not torch.cuda.is_initialized(), "the warm parent has touched a device"
    if sys.platform == "linux":
        count = len(os.listdir("/proc/self/task"))
        assert count == 1, f"the warm parent runs {count} threads: a library has started a pool"


def main(fd: int) -> None:
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    control = socket.socket(fileno=fd)
    channel = Channel(control)
    assert_forkable()
    become_subreaper()  # what a worker leaves behind, even in a session of its own, becomes our child: none escapes us
    sandbox.enter_namespaces()
    workers: set[int] = set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    note_what_is_there()
    gc.enable()
    gc.freeze()  # a worker's collections then look at its own objects, not at all of torch's, and its pages stay shared
    sandbox.outlive_parent()  # from now on the end of the channel tells, and there may be orphans to end
    channel.send({"ready": os.getpid()})
    while True:
        request = channel.receive()
        if request["op"] == "spawn":
            if request["compiles"]:
                _import_compiler()
            workers.add(_spawn(control, channel, request))
        elif request["op"] == "wait":
            status = end(request["pid"], request["patience_s"])
            workers.discard(request["pid"])
            end_orphans(workers)
            channel.send({"status": status})


def end(pid: int, patience_s: float) -> int | None:
    """The exit code (negative: the signal) of a worker that ends by itself within `patience_s`; any other is killed."""
    deadline = time.monotonic() + patience_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            break
        time.sleep(1e-3)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def end_orphans(workers: set[int]) -> None:
    """Kill every child that is not a worker, until there is none (those of a fork bomb appear in turn)."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    while listing.exists() and (orphans := set(map(int, listing.read_text().split())) - workers):
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            os.waitpid(pid, 0)


def _import_compiler() -> None:
    """Once, for all workers that call torch.compile: it takes as long as importing torch, and most workers need none."""
    if "torch._inductor.config" not in sys.modules:
        assert_forkable()
        gc.freeze()


def _spawn(control: socket.socket, channel: Channel, request: dict) -> int:
    control.settimeout(10)
    _, fds, _, _ = socket.recv_fds(control, 1, 4)
    pid = os.fork()
    if pid == 0:
        control.close()
        run_worker(socket.socket(fileno=fds[0]), *fds[1:], request)
    for passed in fds:
        os.close(passed)
    while os.getpgid(pid) != pid:  # until then it could not be suspended as a group
        time.sleep(1e-4)
    channel.send({"pid": pid})
    return pid


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except ChannelClosed:
        pass
    finally:  # however the judge has ended
        end_orphans(set())
    os._exit(0)  # nobody needs what Python would tidy up in 0.2 s

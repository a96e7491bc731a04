"""Starts the warm parent's process, and needs no PyTorch for it: both processes can then import it at the same time."""

import os
import socket
import subprocess
import sys

from autokernel.common.preflight import HOME, ROOT, proven_folder
from autokernel.gate.workers.scratch import claim_scratch, remove

END_S = 10.0  # that it may take to end its workers
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "CC")
# glibc: serve large blocks from the heap and keep them, or every call pays for the page faults of fresh memory.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


class Launched:
    """A zygote.py that has been started, and the folder that it works in. WarmParent takes it over, once it is needed.

    A context manager, for whoever may find before that there is nothing to judge: leaving it ends the process, and does no
    harm where it has ended. So does the end of the thread that started it, however it ends, until the process is ready.
    """

    def __init__(self) -> None:
        self.scratch, self.lock_fd = claim_scratch()
        self.is_ready = self.is_closed = False
        self.errors = self.scratch / "zygote-stderr"
        self.socket, theirs = socket.socketpair()
        environment = {k: os.environ[k] for k in PASSED_ON if k in os.environ}
        environment |= MALLOC | {
            "HOME": str(self.scratch),
            "PYTHONPATH": str(ROOT),
            "AUTOKERNEL_HOME": str(HOME),  # by default, it follows from the folder in which a program is started
            "AUTOKERNEL_PROVEN": str(proven_folder().absolute()),  # likewise from the home
            "PYTHONUTF8": "1",  # whatever the locale is: kernels are UTF-8
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "OPENBLAS_NUM_THREADS": "1",  # numpy would start a pool at import, and a pool does not survive a fork
            "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",
        }
        with theirs, open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "autokernel.gate.workers.zygote", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=environment,
                cwd=self.scratch,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, which ends its workers and whatever they have left behind; before it is ready there are none."""
        if self.is_closed:
            return
        self.is_closed = True
        self.socket.close()
        if not self.is_ready:
            self.process.kill()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        remove(self.scratch)
        os.close(self.lock_fd)

"""What a worker may touch: files by an allow-list (Landlock), no network, no other process (seccomp), bounded resources.

Everything here is entered by a process for itself, irrevocably, and without privileges. A layer that the kernel does not
offer is left out and reported: `probe` tries each one from inside.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import socket
import struct
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# linux/landlock.h and asm-generic/unistd.h (the numbers are the same on all architectures)
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
FS_EXECUTE, FS_WRITE_FILE, FS_READ_FILE, FS_READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
FS_ALL_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
FILE_RIGHTS = FS_EXECUTE | FS_WRITE_FILE | FS_READ_FILE | 1 << 14 | 1 << 15  # those that apply to a file: truncate, ioctl
NET_TCP = 0b11
SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

# System calls that no kernel needs: x86-64 and AArch64 numbers, from their unistd tables.
DENIED_CALLS = {
    "connect": (42, 203),  # a Unix socket may be made and listened on (CUDA's driver needs both), but reaches nobody
    "socketpair": (53, 199),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),  # its queue would bypass this filter
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
}
NEW_PROCESS_CALLS = {"execve": (59, 221), "execveat": (322, 281)}  # and those that only x86-64 has:
OLD_FORK_CALLS = {"fork": 57, "vfork": 58}
SOCKET_CALL = (41, 198)
CLONE_CALL, CLONE3_CALL = (56, 220), (435, 435)
CLONE_THREAD = 0x10000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@dataclass(frozen=True)
class Limits:
    """What a worker may use: bytes of data, bytes a file, processes of its uid (does not bind root)."""

    data_bytes: int
    file_bytes: int = 256 << 20
    processes: int = 4096

    def enter(self) -> None:
        wanted = {
            resource.RLIMIT_DATA: self.data_bytes,
            resource.RLIMIT_FSIZE: self.file_bytes,
            resource.RLIMIT_CORE: 0,
        }
        if hasattr(resource, "RLIMIT_NPROC"):
            wanted[resource.RLIMIT_NPROC] = self.processes
        for kind, value in wanted.items():
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        if sys.platform == "linux":
            Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, rather this process than the judge


def readable_paths() -> list[Path]:
    """What any worker may read: the interpreter, its packages, the toolchain, drivers and what libraries ask of /etc."""
    package = Path(__file__).resolve().parent.parent
    python = {
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        *sysconfig.get_paths().values(),
        os.path.realpath(sys.executable),
    }
    packages = {os.path.realpath(p) for p in sys.path if p.endswith("-packages")}
    system = {"/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/sys", "/nix/store", "/gnu/store"}
    etc = {f"/etc/{name}" for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf", "passwd")}
    etc |= {"/etc/alternatives", "/etc/OpenCL", "/etc/vulkan", "/etc/nvidia"}
    cuda = {os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ}
    return [package, *(Path(p) for p in sorted(python | packages | system | etc | cuda))]


def enter_landlock(readable: Iterable[Path], writable: Iterable[Path], listable: Iterable[Path] = ()) -> bool:
    """Allow these trees and nothing else of the file system; also no TCP, and no signal or abstract socket outwards.

    In `listable` trees the names of files can be seen (Python's import looks for modules so), their contents cannot.

    Returns whether it holds. The driver of NVIDIA needs /proc writable (it names its threads there) and /dev.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(LANDLOCK_CREATE, None, 0, 1) if sys.platform == "linux" else -1
    if abi < 1:
        return False
    handled = FS_ALL_BY_ABI[max(k for k in FS_ALL_BY_ABI if k <= abi)]
    attributes = struct.pack(
        "QQQ", handled, NET_TCP if abi >= 4 else 0, SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if abi >= 6 else 0
    )
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = libc.syscall(LANDLOCK_CREATE, attributes, size, 0)
    if ruleset < 0:
        return False
    reading = FS_EXECUTE | FS_READ_FILE | FS_READ_DIR
    rules = [(p, reading) for p in readable] + [(p, handled) for p in writable] + [(p, FS_READ_DIR) for p in listable]
    for path, rights in rules:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rights = rights if os.path.isdir(path) else rights & FILE_RIGHTS & handled
        rule = struct.pack("=Qi", rights, fd)
        libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0)
        os.close(fd)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    held = libc.syscall(LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return held


def enter_seccomp(forks: bool) -> bool:
    """Refuse (EPERM) sockets but those that reach nobody, tracing, others' memory, namespaces and the like.

    Unless `forks`, also new processes, though not new threads.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in AUDIT_ARCH:
        return False
    column = 0 if machine == "x86_64" else 1
    denied = [numbers[column] for numbers in DENIED_CALLS.values()]
    load, jump_equal, jump_greater, jump_bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, lacking, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
    first_argument = (load, 0, 0, 16)
    program = [
        (load, 0, 0, 4),  # the architecture of the call: another one has other numbers
        (jump_equal, 1, 0, AUDIT_ARCH[machine]),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # the number of the call
    ]
    if not forks:
        denied += [numbers[column] for numbers in NEW_PROCESS_CALLS.values()]
        denied += OLD_FORK_CALLS.values() if machine == "x86_64" else ()
    if machine == "x86_64":
        program += [(jump_greater, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # the x32 table
    for number in denied:
        program += [(jump_equal, 0, 1, number), (give, 0, 0, refuse)]
    if not forks:
        program += [
            (jump_equal, 0, 1, CLONE3_CALL[column]),
            (give, 0, 0, lacking),  # its flags are out of a filter's sight; glibc then takes clone
            (jump_equal, 0, 4, CLONE_CALL[column]),
            first_argument,  # the flags
            (jump_bits, 0, 1, CLONE_THREAD),
            (give, 0, 0, allow),
            (give, 0, 0, refuse),
        ]
    program += [
        (jump_equal, 0, 4, SOCKET_CALL[column]),
        first_argument,  # the family
        (jump_equal, 0, 1, socket.AF_UNIX),
        (give, 0, 0, allow),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]
    instructions = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    mode_filter = 2
    return libc.prctl(PR_SET_SECCOMP, mode_filter, header, 0, 0) == 0


def die_with_parent() -> None:
    """On Linux, be killed when the warm parent ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def probe(secret: Path, outsider: int) -> dict[str, bool]:
    """Try from inside what must not work: which layers hold here. `secret` is a file outside the allow-list, `outsider`
    a process that is not ours."""

    def refused(attempt) -> bool:
        try:
            attempt()
        except OSError:
            return True
        return False

    libc = ctypes.CDLL(None, use_errno=True)

    def trace() -> None:
        attach = 16
        if libc.ptrace(attach, outsider, 0, 0) < 0:
            raise OSError(ctypes.get_errno(), "ptrace")

    return {
        "files": refused(lambda: open(secret).close()),
        "writes": refused(lambda: open(secret.with_name("planted"), "w").close()),
        "network": refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()),
        "unix_sockets": refused(lambda: socket.socket(socket.AF_UNIX).connect("/run/nobody")),
        "signals": refused(lambda: os.kill(outsider, 0)),
        "ptrace": refused(trace),
    }

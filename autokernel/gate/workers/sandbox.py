"""What a worker or a compiler may touch: files by an allow-list, no network, no other process, bounded resources.

Everything here is entered by a process for itself, irrevocably; only namespaces may need privileges. A layer that the
kernel does not offer is left out and reported: `probe` tries each one from inside.

Run as `python -I -S sandbox.py --read PATH --write PATH -- COMMAND …`, it runs the command so.
"""

import argparse
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# linux/landlock.h and asm-generic/unistd.h (the numbers are the same on all architectures)
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
FS_EXECUTE, FS_WRITE_FILE, FS_READ_FILE, FS_READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
FS_ALL_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
FILE_RIGHTS = FS_EXECUTE | FS_WRITE_FILE | FS_READ_FILE | 1 << 14 | 1 << 15  # those that apply to a file: truncate, ioctl
NET_TCP = 0b11
SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x8000000, 0x10000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
MOUNT_SETATTR, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, 0x8000, 1
CAPABILITY_VERSION_3, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 0x20080522, 1 << 1, 1 << 2

LAYERS = {
    "files": "reads no file outside an allow-list",
    "writes": "writes to its scratch folder alone",
    "attributes": "changes the mode of no file elsewhere",
    "network": "makes no network socket",
    "unix_sockets": "connects to no service of this machine",
    "signals": "sends no signal to other processes",
    "ptrace": "traces no other process",
    "resources": "changes no other process's limits or priority",
    "privileges": "has no capability of root's and can gain none",
    "namespaces": "has network and shared memory of its own",
    "scratch": "fills no disk: its scratch folder is small and in memory",
}

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
    "open_by_handle_at": (304, 265),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_madvise": (440, 440),
    "fchown": (93, 55),  # Landlock leaves owners and attributes to us
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "chown": (92, None),  # None: AArch64 has no such call
    "lchown": (94, None),
    "shmget": (29, 194),  # of System V, as the next two: it stays when its maker has ended, for the next worker to find
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
# Of these, none on another process: their first argument must be 0.
OWN_CALLS = {
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
PRCTL_CALL, PR_SET_DUMPABLE = (157, 167), 4  # who is not dumpable cannot be looked at, but by root
FCNTL_CALL, F_SET_RW_HINT, F_SET_FILE_RW_HINT = (72, 25), 1036, 1038  # kept with a file, be it open for reading only
# What only compilers and those who start them need: processes, and the modes of files.
FORKING_CALLS = {
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chmod": (90, None),
    "utimensat": (280, 88),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
}
# What succeeds in a model's process, root's perhaps, and would not here, or is seen in its children alone: whose process it
# is, whom it ends with, what it sees of files, what its threads share. Whoever calls these on a CPU is ended, or would go
# on without.
ENDING_CALLS = {
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "setgroups": (116, 159),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
}
MADVISE_CALL, MADV_DONTFORK, MADV_WIPEONFORK = (28, 233), 10, 18
SOCKET_CALL = (41, 198)
CLONE_CALL, CLONE3_CALL = (56, 220), (435, 435)
CLONE_THREAD = 0x10000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


class SandboxIncomplete(RuntimeError):
    """Not all of LAYERS hold on this machine; the message says which, and what would help."""


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


def system_paths() -> list[Path]:
    """What any program may read: libraries, the toolchain, and what those ask of /etc and of the processor."""
    system = {"/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/sys", "/nix/store", "/gnu/store"}
    etc = {f"/etc/{name}" for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf", "passwd")}
    etc |= {"/etc/alternatives", "/etc/OpenCL", "/etc/vulkan", "/etc/nvidia"}
    machine = {"/proc/cpuinfo", "/proc/meminfo", "/dev/random", "/dev/urandom"}
    cuda = {os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ}
    return [Path(p) for p in sorted(system | etc | machine | cuda)]


def readable_paths() -> list[Path]:
    """What any worker may read: this package, the interpreter, its packages, and the system's."""
    package = Path(__file__).resolve().parents[2]
    python = {
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        *sysconfig.get_paths().values(),
        os.path.realpath(sys.executable),
    }
    packages = {os.path.realpath(p) for p in sys.path if p.endswith("-packages")}
    return [package, *(Path(p) for p in sorted(python | packages)), *system_paths()]


def device_paths(cuda: bool) -> tuple[list[Path], list[Path]]:
    """What a worker may read, and write to, of /dev and /proc.

    NVIDIA's driver names its threads in /proc/self/task: without the right to, it does not start (error 304).
    """
    if not cuda:
        return [Path("/proc/self"), Path("/dev/zero")], [Path("/dev/null")]
    nodes = [*Path("/dev").glob("nvidia*"), *map(Path, ("/dev/null", "/dev/zero", "/dev/full"))]
    return [Path("/proc")], [Path("/proc/self"), *nodes]


def enter_landlock(readable: Iterable[Path], writable: Iterable[Path], listable: Iterable[Path] = ()) -> bool:
    """Allow these trees and nothing else of the file system; also no TCP, and no signal or abstract socket outwards.

    In `listable` trees the names of files can be seen (Python's import looks for modules so), their contents cannot.

    Returns whether it holds.
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
    calls = DENIED_CALLS if forks else DENIED_CALLS | FORKING_CALLS
    ending = {} if forks else ENDING_CALLS
    denied = [numbers[column] for name, numbers in calls.items() if numbers[column] is not None and name not in ending]
    load, mask, jump_equal, jump_greater, jump_bits, give = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
    allow, refuse, lacking, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
    first_argument = (load, 0, 0, 16)
    program = [
        (load, 0, 0, 4),  # the architecture of the call: another one has other numbers
        (jump_equal, 1, 0, AUDIT_ARCH[machine]),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # the number of the call
    ]
    if machine == "x86_64":
        program += [(jump_greater, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # the x32 table
    for number in denied:
        program += [(jump_equal, 0, 1, number), (give, 0, 0, refuse)]
    for numbers in OWN_CALLS.values():
        program += [(jump_equal, 0, 4, numbers[column]), first_argument, (jump_equal, 0, 1, 0)]
        program += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    for numbers in ending.values():
        program += [(jump_equal, 0, 1, numbers[column]), (give, 0, 0, kill)]
    if not forks:
        program += [
            (jump_equal, 0, 5, MADVISE_CALL[column]),
            (load, 0, 0, 32),  # its third argument: the advice
            (jump_equal, 1, 0, MADV_DONTFORK),
            (jump_equal, 0, 1, MADV_WIPEONFORK),
            (give, 0, 0, kill),
            (give, 0, 0, allow),
            (jump_equal, 0, 1, CLONE3_CALL[column]),
            (give, 0, 0, lacking),  # its flags are out of a filter's sight; glibc then takes clone
            (jump_equal, 0, 4, CLONE_CALL[column]),
            first_argument,  # the flags
            (jump_bits, 0, 1, CLONE_THREAD),
            (give, 0, 0, allow),
            (give, 0, 0, refuse),
        ]
    program += [
        (jump_equal, 0, 4, PRCTL_CALL[column]),
        first_argument,  # what is to be set
        (jump_equal, 0, 1, PR_SET_DUMPABLE),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
        (jump_equal, 0, 5, FCNTL_CALL[column]),
        (load, 0, 0, 24),  # its second argument: the command
        (jump_equal, 1, 0, F_SET_RW_HINT),
        (jump_equal, 0, 1, F_SET_FILE_RW_HINT),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
        (jump_equal, 0, 8, SOCKET_CALL[column]),
        first_argument,  # the family
        (jump_equal, 0, 5, socket.AF_UNIX),
        (load, 0, 0, 24),  # its second argument: the type, and flags. Datagrams need no connection to be sent.
        (mask, 0, 0, 0xF),
        (jump_equal, 1, 0, socket.SOCK_STREAM),
        (jump_equal, 0, 1, socket.SOCK_SEQPACKET),
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


def enter_namespaces() -> bool:
    """Network and System V shared memory of our own; where that needs a user namespace, in one. Returns whether it holds.

    For a process of one thread, whose children are to live in them.
    """
    if sys.platform != "linux":
        return False
    libc, wanted = ctypes.CDLL(None, use_errno=True), CLONE_NEWNET | CLONE_NEWIPC
    if libc.unshare(wanted) == 0:
        return True
    user, group = os.getuid(), os.getgid()
    if libc.unshare(wanted | CLONE_NEWUSER) != 0:
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def enter_mounts(scratch: Path, size_bytes: int, writable: Iterable[Path]) -> bool:
    """For this process and its children, put a small file system in memory over `scratch`, which ends with them, and make
    all others read-only, their files' modes and owners included, but for the trees in `writable`. System V's shared memory,
    which would stay, is their own, too."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | CLONE_NEWIPC) != 0 or libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        return False

    def set_attributes(path: bytes, flags: int, add: int, clear: int) -> bool:
        here = -100
        return libc.syscall(MOUNT_SETATTR, here, path, flags, struct.pack("QQQQ", add, clear, 0, 0), 32) == 0

    held = set_attributes(b"/", AT_RECURSIVE, MOUNT_ATTR_RDONLY, 0)
    for path in map(os.fsencode, writable):
        held &= libc.mount(path, path, None, MS_BIND | MS_REC, None) == 0 and set_attributes(path, 0, 0, MOUNT_ATTR_RDONLY)
    options = f"size={size_bytes},nr_inodes=65536,mode=700".encode()
    return held & (libc.mount(b"tmpfs", os.fsencode(scratch), b"tmpfs", MS_NOSUID | MS_NODEV, options) == 0)


def drop_capabilities(keep_file_access: bool) -> None:
    """Give up what root may do, for good. keep_file_access: but not root's access to files, which Landlock confines
    (a package that only its owner may read is read by root so)."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    if libc.capget(header, held) == 0:
        keep = (CAP_DAC_OVERRIDE | CAP_DAC_READ_SEARCH) if keep_file_access else 0
        libc.capset(header, (ctypes.c_uint32 * 6)(held[0] & keep, held[1] & keep))


def die_with_parent() -> None:
    """On Linux, be killed when the parent (of a worker: the warm parent) ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def outlive_parent() -> None:
    """Take `die_with_parent` back."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)


def probe(secret: Path, outsider: int) -> dict[str, bool]:
    """Try from inside what must not work: which of LAYERS hold here. `secret` is a file outside the allow-list,
    `outsider` a process that is not ours."""

    def refused(attempt: Callable[[], object]) -> bool:
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
        "attributes": refused(lambda: os.chmod(secret, 0o600)),
        "network": refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()),
        "unix_sockets": refused(lambda: socket.socket(socket.AF_UNIX).connect("/run/nobody")),
        "signals": refused(lambda: os.kill(outsider, 0)),
        "ptrace": refused(trace),
        "resources": refused(lambda: os.sched_setaffinity(outsider, os.sched_getaffinity(outsider))),
    }


def inspect(worker: int, scratch: Path) -> dict[str, bool]:
    """The rest of LAYERS, seen from outside, in what the kernel says of a worker."""
    if sys.platform != "linux":
        return dict.fromkeys(("privileges", "namespaces", "scratch"), False)
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{worker}/status").read_text().splitlines())
    capabilities = int(status["CapEff"], 16) | int(status["CapPrm"], 16)
    mounts = [line.split()[4] for line in Path(f"/proc/{worker}/mountinfo").read_text().splitlines()]
    return {
        "privileges": status["NoNewPrivs"] == "1" and not capabilities & ~(CAP_DAC_OVERRIDE | CAP_DAC_READ_SEARCH),
        "namespaces": all(
            os.readlink(f"/proc/{worker}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}") for name in ("net", "ipc")
        ),
        "scratch": str(scratch) in mounts,
    }


def missing_layers(holds: Mapping[str, bool]) -> list[str]:
    return [name for name in LAYERS if not holds.get(name)]


def require(holds: Mapping[str, bool]) -> None:
    """Raises SandboxIncomplete unless all of LAYERS hold."""
    missing = missing_layers(holds)
    if not missing:
        return
    advice = []
    if {"namespaces", "scratch", "attributes"} & {*missing}:
        advice.append(
            "namespaces need root or user namespaces (Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0; "
            "Docker: --cap-add SYS_ADMIN --security-opt apparmor=unconfined)"
        )
    if {*missing} - {"namespaces", "scratch", "attributes"}:
        advice.append("the others need Linux 6.12 or later with Landlock (lsm=landlock,… on its command line) and seccomp")
    listed = ", ".join(f"{name} (a kernel {LAYERS[name]})" for name in missing)
    raise SandboxIncomplete(f"the sandbox is required and lacks here: {listed}; {'; '.join(advice)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--read", action="append", default=[], type=Path)
    parser.add_argument("--write", action="append", default=[], type=Path)
    parser.add_argument("--data-bytes", type=int, required=True)
    parser.add_argument("--file-bytes", type=int, required=True)
    parser.add_argument("--cpu-s", type=int, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    die_with_parent()
    Limits(options.data_bytes, options.file_bytes).enter()
    resource.setrlimit(resource.RLIMIT_CPU, (options.cpu_s, options.cpu_s))
    held = enter_landlock([*options.read, *system_paths()], [*options.write, Path("/dev/null")])
    drop_capabilities(keep_file_access=held)
    enter_seccomp(forks=True)
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    main()

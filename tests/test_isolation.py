"""What a kernel's process must not be able to do: each attempt succeeds in a plain process, and is refused in a worker."""

import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from test_faults import within

from autokernel import build
from autokernel.gate import Judge
from autokernel.gate.workers import library_calls, sandbox
from autokernel.gate.workers.launch import MALLOC, PASSED_ON
from autokernel.gate.workers.processes import WarmParent, WorkerFault, WorkerProcess
from autokernel.spec import ROOT, load_spec
from autokernel.target import default_target

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's mechanisms")

RIGHT = (load_spec("rmsnorm").folder / "cpp_kernel.py").read_text()
OTHERS = 'from autokernel.build import cpp_function\ncpp_function("extern \\"C\\" int run() { return 0; }", "run", "")()\n'
KERNEL_FN = "\ndef kernel_fn(): pass\n"
# What a worker's environment may name, beside what processes.py lists. Python adds LC_CTYPE where no locale is set.
OWN_NAMES = {
    "AUTOKERNEL_PROVEN",
    "PYTHONUTF8",
    "HOME",
    "TMPDIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",
}
OWN_NAMES |= {"AUTOKERNEL_HOME"}  # of a package without a clone
OWN_NAMES |= {"PYTORCH_NVML_BASED_CUDA_CHECK", "OPENBLAS_NUM_THREADS", "OBJC_DISABLE_INITIALIZE_FORK_SAFETY", "LC_CTYPE"}


@dataclass(frozen=True)
class Attempt:
    """`code` raises unless it succeeds; names in braces are filled from `Surroundings`. `forks`: refused also where
    processes may be started."""

    name: str
    code: str
    forks: bool = True
    reason: str = "PermissionError|Operation not permitted|Permission denied|Read-only file system"


C = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\ndef check(value):\n"
C += "    if value < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"

ATTEMPTS = (
    Attempt("read-secret-in-home", "assert open('{secret}').read() == 'hunter2'"),
    Attempt("list-home", "import os\nassert os.listdir('{home}')"),
    Attempt("read-judges-environment", "assert b'=' in open('/proc/{judge}/environ', 'rb').read()"),
    Attempt("read-judges-memory-map", "assert open('/proc/{judge}/maps').read()"),
    Attempt("read-another-workers-scratch", "assert open('/proc/{worker}/root{scratch}/kernel.py').read()"),
    Attempt("read-another-kernels-binary", "assert open('{binary}', 'rb').read()"),
    Attempt("read-the-build-cache", "assert open('{cached}', 'rb').read()"),
    Attempt("read-the-tests", "assert open('{tests}').read()"),
    Attempt("write", "open('{victim}', 'a').write('x')"),
    Attempt("create", "open('{folder}/planted', 'w').close()"),
    Attempt("truncate", "import os\nos.truncate('{victim}', 0)"),
    Attempt("remove", "import os\nos.remove('{victim}')"),
    Attempt("rename", "import os\nos.rename('{victim}', '{folder}/renamed')"),
    Attempt("make-folder", "import os\nos.mkdir('{folder}/planted')"),
    Attempt("make-link", "import os\nos.symlink('/', '{folder}/planted')"),
    Attempt("make-socket", "import socket\nsocket.socket(socket.AF_UNIX).bind('{folder}/planted')"),
    Attempt("shared-memory-file", "import os\nopen('/dev/shm/{unique}', 'w').close()\nos.remove('/dev/shm/{unique}')"),
    Attempt("change-owner", "import os\nos.chown('{victim}', os.getuid(), os.getgid())"),
    Attempt("change-mode", "import os\nos.chmod('{victim}', 0o777)"),
    Attempt("change-times", "import os\nos.utime('{victim}', (0, 0))"),
    Attempt("set-attribute", "import os\nos.setxattr('{victim}', 'user.planted', b'x')"),
    Attempt("udp", "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp}))"),
    Attempt("tcp", "import socket\nsocket.socket().connect(('127.0.0.1', {tcp}))"),
    Attempt("netlink", "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    Attempt("unix-socket", "import socket\nsocket.socket(socket.AF_UNIX).connect('{folder}/service')"),
    Attempt("abstract-socket", "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0{unique}')"),
    Attempt(
        "datagram-to-unix-socket",
        "import socket\nsocket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', '{folder}/log')",
    ),
    Attempt(
        "raw-datagram-to-unix-socket",
        "import socket\nsocket.socket(socket.AF_UNIX, socket.SOCK_RAW).sendto(b'x', '{folder}/log')",
    ),
    Attempt("signal-judge", "import os\nos.kill({judge}, 0)"),
    Attempt("signal-outsider", "import os, signal\nos.kill({outsider}, signal.SIGCONT)"),
    Attempt("signal-group", "import os, signal\nos.killpg({outsider}, signal.SIGCONT)"),
    Attempt(
        "signal-by-descriptor", "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open({outsider}), signal.SIGCONT)"
    ),
    Attempt("ptrace", C + "check(libc.ptrace(16, {outsider}, 0, 0))"),
    Attempt("read-outsiders-memory", "open('/proc/{outsider}/mem', 'rb').seek({address})"),
    Attempt(
        "copy-outsiders-memory",
        C + "here = ctypes.create_string_buffer(8)\n"
        "there, ours = (ctypes.c_size_t * 2)({address}, 8), (ctypes.c_size_t * 2)(ctypes.addressof(here), 8)\n"
        "check(libc.process_vm_readv({outsider}, ours, 1, there, 1, 0))",
    ),
    Attempt("take-outsiders-descriptor", C + "import os\ncheck(libc.syscall(438, os.pidfd_open({outsider}), 0, 0))"),
    Attempt("slow-outsider", "import os\nos.setpriority(os.PRIO_PROCESS, {outsider}, 19)"),
    Attempt("pin-outsider", "import os\nos.sched_setaffinity({outsider}, os.sched_getaffinity({outsider}))"),
    Attempt("limit-outsider", "import resource\nresource.prlimit({outsider}, resource.RLIMIT_CORE, (0, 0))"),
    Attempt("schedule-outsider", "import os\nos.sched_setscheduler({outsider}, os.SCHED_OTHER, os.sched_param(0))"),
    Attempt("system-v-shared-memory", C + "check(libc.shmget({key}, 0, 0))", reason="No such file|Operation not permitted"),
    Attempt("be-root", "import os\nos.chroot('/')", reason="Operation not permitted|killed by SIGSYS"),
    Attempt("new-namespace", C + "check(libc.unshare(0x20000))", reason="Operation not permitted|killed by SIGSYS"),
    Attempt("fork", "import os\nif os.fork() == 0: os._exit(0)", forks=False),
    Attempt("run-a-program", "import subprocess\nsubprocess.run(['true'], check=True)", forks=False),
    Attempt("spawn", "import os\nos.waitpid(os.posix_spawn('/bin/true', ['true'], dict()), 0)", forks=False),
    Attempt("replace-itself", "import os\nos.execv('/bin/true', ['true'])", forks=False),
)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def parent(request) -> Iterator[WarmParent]:
    parent = WarmParent(request.param)
    yield parent
    parent.close()


@pytest.fixture
def surroundings(parent: WarmParent, tmp_path: Path) -> Iterator[dict[str, object]]:
    """What there is to be attacked: files, sockets, an outsider, another worker with a binary of its own."""
    victim, secret_code = tmp_path / "victim", "import ctypes, time; x = ctypes.create_string_buffer(b'hunter2', 16); "
    victim.write_text("untouched")
    key = int.from_bytes(os.urandom(3), "big") + 1
    libc = ctypes.CDLL(None)
    with ExitStack() as stack:
        secret = stack.enter_context(tempfile.NamedTemporaryFile("w", dir=Path.home(), prefix=".autokernel-test-"))
        secret.write("hunter2")
        secret.flush()
        sockets = {name: stack.enter_context(socket.socket()) for name in ("tcp",)}
        sockets["tcp"].bind(("127.0.0.1", 0))
        sockets["udp"] = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        sockets["udp"].bind(("127.0.0.1", 0))
        service, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        service.bind(str(tmp_path / "service"))
        unique = f"autokernel-test-{key}"
        abstract.bind(f"\0{unique}")
        for listening in (sockets["tcp"], service, abstract):
            listening.listen()
        log = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        log.bind(str(tmp_path / "log"))
        outsider = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", secret_code + "print(ctypes.addressof(x), flush=True); time.sleep(1000)"],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        stack.callback(outsider.kill)
        address = int(outsider.stdout.readline())
        segment = libc.shmget(key, 4096, 0o1600)
        stack.callback(lambda: libc.shmctl(segment, 0, None))
        other = stack.enter_context(WorkerProcess(parent, 1, OTHERS))
        other.request("load", 60, source=OTHERS + KERNEL_FN, poison=False, libraries="any")
        (binary,) = other.built
        yield {
            "secret": secret.name,
            "home": Path.home(),
            "judge": os.getpid(),
            "worker": other.pid,
            "scratch": other.scratch,
            "binary": binary,
            "cached": build.default_cache() / Path(binary).name,
            "tests": __file__,
            "folder": tmp_path,
            "victim": victim,
            "unique": unique,
            "key": key,
            "outsider": outsider.pid,
            "address": address,
            **{name: s.getsockname()[1] for name, s in sockets.items()},
        }


def refusal(parent: WarmParent, source: str, code: str) -> str:
    """Why `code` failed in a worker for a kernel of this source; empty if it succeeded."""
    with WorkerProcess(parent, 1, source) as worker:
        try:
            worker.request("load", 30, source=code + KERNEL_FN, poison=False, libraries="any")
        except WorkerFault as fault:
            return fault.reason
    return ""


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda a: a.name)
def test_what_any_process_can_do_a_worker_cannot(parent: WarmParent, surroundings: dict[str, object], attempt: Attempt):
    code = attempt.code.format_map(surroundings)
    untouched = state(surroundings)
    if not attempt.forks and parent.device != "cpu":
        pytest.skip("only C++ kernels on a CPU can do without")
    for source in ("a C++ kernel", "")[: 1 + attempt.forks]:
        assert re.search(attempt.reason, reason := refusal(parent, source, code)), reason or "it succeeded"
    assert state(surroundings) == untouched
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if plain.returncode:
        pytest.skip(f"refused here without a sandbox too, which proves nothing: {plain.stderr.splitlines()[-1]}")


def state(surroundings: dict[str, object]) -> tuple[object, ...]:
    folder, victim = Path(str(surroundings["folder"])), Path(str(surroundings["victim"]))
    status = victim.stat()
    return sorted(folder.iterdir()), victim.read_text(), status.st_mode, status.st_mtime, os.listxattr(victim)


def test_the_environment_is_a_named_list(parent: WarmParent):
    os.environ["AUTOKERNEL_TEST_SECRET"] = "hunter2"
    look = "import os\nfirst = open('/proc/self/environ').read().split(chr(0))\n"
    look += "raise ValueError(' '.join({line.split('=')[0] for line in first if line} | set(os.environ)))"
    names = set(refusal(parent, "a C++ kernel", look).removeprefix("ValueError: ").split())
    assert "HOME" in names
    assert names <= {*PASSED_ON, *MALLOC, *OWN_NAMES}


def test_a_verdict_shows_what_was_refused_and_not_a_linked_secret(judge: Judge):
    """The judge quotes what a kernel wrote to stderr: from its own file, not from one that the kernel puts there."""
    with tempfile.NamedTemporaryFile("w", dir=Path.home(), prefix=".autokernel-test-") as secret:
        secret.write("hunter2")
        secret.flush()
        link = f"import os\nos.symlink({secret.name!r}, 'stderr')\nos.symlink({secret.name!r}, 'stdout')\n"
        crash = link + "os.write(2, b'last words')\nos._exit(3)\n"
        verdict = judge.check(f"{RIGHT}\n{crash}", default_target("rmsnorm", "cpp", "cpu", torch.float32))
    assert "last words" in verdict.failure.detail
    assert "hunter2" not in f"{verdict.failure} {verdict.failure.detail}"


@pytest.mark.parametrize("key", [key for keys in library_calls.DISPATCH_KEYS.values() for key in keys])
def test_every_operator_of_pytorch_that_computes_is_known(key: str):
    """Those that refuse in a candidate's process are listed in one call; here each operator is asked."""
    all_names = torch._C._dispatch_get_all_op_names()
    has_kernel = {name for name in all_names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)}
    assert set(library_calls._operators(key)) == has_kernel
    assert key != "CPU" or len(has_kernel) > 500


@pytest.mark.slow
def test_what_pytorch_replaces_itself_is_no_change_of_a_kernels():
    """torch._dynamo wraps torch.manual_seed when it is first imported, as by Triton kernels that Inductor wrote."""
    code = (
        "import torch\nfrom autokernel.gate.workers.patches import Patches, ProcessChange\n"
        "patches, known = Patches([], "
        "), torch.manual_seed\nimport torch._dynamo\nassert torch.manual_seed is not known\n"
        "patches.check()\ntorch.allclose = print\n"
        "try:\n    patches.check()\nexcept ProcessChange as change:\n    print(change)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "torch.allclose" in run.stdout, run.stderr


EMBEDDED = {
    "include": '#include "{}"\n',
    "include-through-a-macro": '#define FILE "{}"\n#include FILE\n',
    "assembler": 'asm(".section .rodata\\n.global secret\\nsecret: .incbin \\"{}\\"\\n.text");\n',
}


@pytest.mark.parametrize("name", EMBEDDED)
@pytest.mark.parametrize("what", ["secret", "environment"])
def test_a_source_cannot_embed_what_a_compiler_should_not_read(tmp_path: Path, name: str, what: str):
    with tempfile.NamedTemporaryFile("w", dir=Path.home(), prefix=".autokernel-test-", suffix=".h") as secret:
        secret.write("static int hunter2 = 42;")
        secret.flush()
        path = secret.name if what == "secret" else "/proc/self/environ"
        source = EMBEDDED[name].format(path) + 'extern "C" int run() { return 0; }\n'
        (tmp_path / "plain.cpp").write_text(source)
        plain = subprocess.run(["c++", "-c", "plain.cpp"], cwd=tmp_path, capture_output=True, text=True)
        assert not re.search("Permission denied|not found", plain.stderr), "a plain compiler does not read it either"
        with pytest.raises(build.CompileError, match="Permission denied|not found") as refused:
            build.compile_library(build.Library("cpp", source), tmp_path / "cache")
    assert "hunter2" not in str(refused.value)


def test_a_compiler_that_does_not_end_is_ended_with_its_children(tmp_path: Path):
    bomb = "template <int N, long B> struct F { static constexpr long v = F<N - 1, 2 * B>::v + F<N - 1, 2 * B + 1>::v; };\n"
    bomb += "template <long B> struct F<0, B> { static constexpr long v = B; };\n"
    with pytest.raises(build.CompileError, match="did not finish within 1 s"):
        build.compile_library(build.Library("cpp", bomb + 'extern "C" long run() { return F<40, 0>::v; }'), tmp_path, 1)
    assert within(5, lambda: not [p for p in Path("/proc").glob("[0-9]*/cmdline") if os.fsencode(tmp_path) in read(p)])


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


LARGE = 'char large[{} << 20] = {{1}};\nextern "C" int run() {{ return large[{}]; }}'


def test_a_compiler_writes_no_large_file(tmp_path: Path):
    with pytest.raises(build.CompileError):
        build.compile_library(build.Library("cpp", LARGE.format((build.FILE_BYTES >> 20) + 1, 0)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_a_kernel_builds_is_bounded(parent: WarmParent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In all, for a source; the next one of a worker has as much."""
    monkeypatch.setattr("autokernel.gate.workers.processes.BUILT_BYTES", 2 << 20)
    monkeypatch.setenv("AUTOKERNEL_CACHE", str(tmp_path))
    one, *others = [f"cpp_function({LARGE.format(1, i)!r}, 'run', '')()\n" for i in range(6)]
    with WorkerProcess(parent, 1, "builds") as worker:
        for builds in (others, [one]):
            source = "from autokernel.build import cpp_function\n" + "".join(builds) + KERNEL_FN
            with pytest.raises(WorkerFault, match="MB built at most") if builds is others else nullcontext():
                worker.request("load", 60, source=source, poison=False, libraries="any")
    assert len(list(tmp_path.glob("*.so"))) == 3


def test_a_layer_that_does_not_hold_is_named_where_all_are_required(monkeypatch):
    all_hold = dict.fromkeys(sandbox.LAYERS, True)
    sandbox.require(all_hold)
    with pytest.raises(sandbox.SandboxIncomplete, match=r"lacks here: namespaces \(.*user namespaces"):
        sandbox.require(all_hold | {"namespaces": False})
    monkeypatch.setattr(WarmParent, "probe", lambda parent: all_hold | {"files": False})
    with pytest.raises(sandbox.SandboxIncomplete, match=r"lacks here: files \(.*Landlock"):
        Judge("cpu", require_sandbox=True)


# Looks for signs of an earlier start of the same source, and leaves some; what it finds is the message of an error.
REMEMBERS = """
import hashlib, json, os, re
from pathlib import Path

def attempt(look):
    try:
        return look()
    except OSError as error:
        return type(error).__name__

def leave(folder):
    mark = folder / "i-was-here"
    seen = mark.exists()
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text("x")
    return seen

scratch, caches = Path(os.environ["HOME"]), Path(os.environ["TRITON_CACHE_DIR"])
named = hashlib.sha256(Path("kernel.py").read_bytes()).hexdigest()[:16]
places = {"scratch": scratch, "caches": caches, "beside": caches.parent.parent / "binaries", "above": scratch.parent,
          "named": scratch.parent / named, "its binaries": scratch.parent / named / "binaries"}
signs = {name: [attempt(lambda: sorted(os.listdir(place))), place.exists()] for name, place in places.items()}
from autokernel.build import cpp_function
cpp_function("extern \\"C\\" int run() { return 7; }", "run", "")()
library = Path(next(line.split()[-1] for line in open("/proc/self/maps") if re.search("/[0-9a-f]{32}.so$", line.strip())))
signs["library"] = sorted(os.listdir(library.parent))
signs["marks"] = {name: attempt(lambda: leave(place)) for name, place in {**places, "library": library.parent}.items()}
masked = "[^/]*-[a-z0-9_]{8}|[0-9a-f]{16}"
variables = [re.sub(masked, "*", f"{name}={value}") for name, value in sorted(os.environ.items())]
signs["environment"] = hashlib.sha256("".join(variables).encode()).hexdigest()  # the message is cut off soon
raise ValueError(json.dumps(signs))
"""


def test_a_kernel_does_not_see_that_it_was_started_before():
    """On a CPU, where it is not its compiler that works in its process."""
    parent = WarmParent("cpu")
    try:
        first, *later = [json.loads(refusal(parent, REMEMBERS, REMEMBERS).partition(": ")[2]) for _ in range(3)]
        assert [other for other in later if other != first] == [], first
        assert first["marks"].pop("scratch") is False  # it may write there, and it is gone with the process
        assert first["marks"].pop("caches") is False
        assert len(first["library"]) == 1 and not any(mark is True for mark in first["marks"].values())
        assert {path.name.partition("-")[0] for path in parent.scratch.iterdir()} == {"zygote"}, "a worker left a folder"
    finally:
        parent.close()


# What is kept with an open file, a file, or a namespace, and not with the process: what each says, and how it is changed.
LEAVES = """
import ctypes, fcntl, json, os, struct

libc = ctypes.CDLL(None, use_errno=True)
F_SETFL, F_ADD_SEALS, F_GET_SEALS, F_GET_RW_HINT, F_SET_RW_HINT = 4, 1033, 1034, 1035, 1036
KEY = 0x414b

def attempt(look):
    try:
        return look()
    except OSError as error:
        return type(error).__name__

def sealed(fd):
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    seals = fcntl.fcntl(again, F_GET_SEALS)
    attempt(lambda: fcntl.fcntl(again, F_ADD_SEALS, 1))
    return seals

def hinted(path):
    with open(path, "rb") as file:
        hint = fcntl.fcntl(file, F_GET_RW_HINT, bytes(8))
        attempt(lambda: fcntl.fcntl(file, F_SET_RW_HINT, struct.pack("Q", 3)))
    return hint.hex()

arenas = [int(n) for n in os.listdir("/proc/self/fd") if "memfd" in attempt(lambda: os.readlink(f"/proc/self/fd/{n}"))]
signs = {
    "position": [os.lseek(fd, 0, os.SEEK_CUR) for fd in arenas],
    "flags": [fcntl.fcntl(fd, fcntl.F_GETFL) for fd in arenas],
    "seals": [attempt(lambda: sealed(fd)) for fd in arenas],
    "hints": [attempt(lambda: hinted(path)) for path in (os.__file__, *(f"/proc/self/fd/{fd}" for fd in arenas))],
    "shared memory": [libc.shmget(KEY, 64, 0o600) >= 0, libc.semget(KEY, 1, 0o600) >= 0, libc.msgget(KEY, 0o600) >= 0],
}
for fd in arenas:
    os.lseek(fd, 7, os.SEEK_SET)
    fcntl.fcntl(fd, F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)
for make in (lambda: libc.shmget(KEY, 64, 0o1600), lambda: libc.semget(KEY, 1, 0o1600), lambda: libc.msgget(KEY, 0o1600)):
    make()
raise ValueError(json.dumps(signs))
"""


def test_a_worker_leaves_nothing_that_another_one_finds(parent: WarmParent):
    first, *later = [refusal(parent, source, LEAVES) for source in ("a kernel", "a kernel", "another kernel")]
    assert json.loads(first.partition(": ")[2])["position"]
    assert later == [first, first]


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp")
def test_a_worker_stays_visible_to_a_judge_that_is_not_root():
    """One that is not dumpable could not be looked at while it works."""
    code = "import ctypes\nfrom autokernel.gate.workers import sandbox\nlibc = ctypes.CDLL(None)\n"
    code += "print(sandbox.enter_seccomp(False), libc.prctl(4, 0, 0, 0, 0), libc.prctl(3, 0, 0, 0, 0))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout.split()
    assert said == ["True", "-1", "1"] or said[:1] == ["False"]


@pytest.mark.parametrize(
    ("file", "is_other"),
    [
        ("numpy.libs/libscipy_openblas64_.so", True),
        ("scipy/linalg/_fblas.so", True),
        ("torch/lib/libtorch_cpu.so", False),
        ("torch.libs/libopenblas.so", False),
        ("nvidia/cu13/lib/libcudart.so.13", False),  # which PyTorch for CUDA calls on a CPU, too
        ("scikit_learn.libs/libgomp.so.1", False),
        ("numpy.libs/libquadmath-96973f99.so.0.0.0", False),  # which glibc's printf calls
        ("../lib-dynload/_ctypes.so", False),
    ],
)
def test_only_other_packages_code_is_taken_away(file, is_other):
    packages = [Path("/environment/site-packages")]
    assert library_calls.is_of_another_package(Path(os.path.normpath(packages[0] / file)), packages) == is_other

"""What ends a script from outside, signals and disks among it, is said in one line and leaves no process."""

import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from autokernel.build import Library, compile_library
from autokernel.cli import bench, profile
from autokernel.cli.arguments import script
from autokernel.common import console, preflight
from autokernel.hardware.machine import MachineFault, full_disk_told
from autokernel.hardware.processes import STEPS
from tests.user_errors import QUICK, RMSNORM, ROOT, net, started

HERE = {  # what a shell does before a script is started -> words of its line
    "a folder that is gone": ("mkdir gone; cd gone; rmdir ../gone", "the folder that you are in is gone"),
    "a cache of PyTorch's": (
        "TORCHINDUCTOR_CACHE_DIR=/proc/nowhere; export TORCHINDUCTOR_CACHE_DIR",
        *("$TORCHINDUCTOR_CACHE_DIR: cannot write to /proc/nowhere", "make it writable"),
    ),
    "a configuration of git's": ("echo '[x' > .gitconfig; HOME=$PWD; export HOME", "git cannot be used here", "bad config"),
}


@pytest.mark.parametrize("case", HERE)
def test_what_is_wrong_where_a_script_is_started(tmp_path, case):
    before, *words = HERE[case]
    command = f"{before}; exec {sys.executable} {ROOT}/orchestrate.py runs"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def processes_of(token):
    """Those that have inherited it in their environment."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if token.encode() in path.read_bytes() and "State:\tZ" not in (path.parent / "status").read_text():
                alive.append(path.parent.name)
        except OSError:
            continue
    return alive


def mapped_by(token):
    """What the processes that have it in their environment have mapped, libraries among it."""
    for pid in processes_of(token):
        with suppress(OSError):
            yield Path("/proc", pid, "maps").read_text()


@pytest.fixture
def model_file(tmp_path):
    (tmp_path / "net.py").write_text(net())
    return tmp_path / "net.py"


ENDS = {  # what a model's code does to its process -> words of the line that the script ends with
    "segmentation fault": ("__import__('ctypes').string_at(0)", "loading the model: the process was ended by SIGSEGV at "),
    "all files closed": ("os.closerange(0, 4096)", "a pass of Net", "it has closed all files of this process"),
}  # fmt: skip


@pytest.mark.slow
def test_a_model_that_ends_its_process_is_named(tmp_path):
    begun = {}
    for case, (line, *_) in ENDS.items():
        model = tmp_path / case / "net.py"
        model.parent.mkdir()
        model.write_text("import os\n" + net(forward=line)[1:])
        begun[case] = started("profile.py", "--output", tmp_path / "profile.json", "--model", model, *QUICK)
    for case, process in begun.items():
        said = process.communicate(timeout=120)[1].splitlines()
        assert process.returncode == 2 and said[-1].startswith("error: ") and "Traceback" not in said[-2], said
        assert all(word in said[-1] for word in ENDS[case][1:]), said


DEVICE_IN_WORDS = """
from autokernel.gate import Judge
with Judge("cpu") as judge:
    print(f"{judge.device.name}, {judge.device.units} units")
"""
STOPS = {
    "verify while PyTorch is imported": (("verify.py",), None, signal.SIGINT),
    "profile while PyTorch is imported": (("profile.py",), None, signal.SIGTERM),
    "profile": (("profile.py", "--profile-iters", "100000000"), "measuring one pass", signal.SIGINT),
    "bench": (("bench.py", RMSNORM), "smoke", signal.SIGINT),
    "bench by SIGTERM": (("bench.py", RMSNORM), "sweep", signal.SIGTERM),
}


@pytest.mark.slow_after(1)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("case", STOPS)
def test_a_signal_ends_a_script_with_one_line_and_leaves_no_process(tmp_path, model_file, case):
    command, begun, number = STOPS[case]
    if command[0] == "profile.py":
        command = (*command, "--output", tmp_path / "profile.json", "--model", model_file, *QUICK)
    token = f"token-{tmp_path}"
    process = started(*command, token=token, start_new_session=True)
    said = ""
    while begun and begun not in said:
        said += process.stderr.readline()
        assert process.poll() is None, said
    while not begun and not any("libtorch" in maps for maps in mapped_by(token)):
        time.sleep(0.01)
    os.killpg(process.pid, number)  # as a terminal does
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in said + rest and rest.splitlines()[-1].startswith("stopped by "), rest
    deadline = time.monotonic() + 10
    while processes_of(token) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of(token)


@pytest.mark.slow
def test_a_calibration_that_is_stopped_is_written_and_resamples_nothing(tmp_path):
    """It resampled all pairs of the record first, some ten seconds a subject, deaf to signals; its status was 0."""
    out = tmp_path / "record.json"
    asked = subprocess.run([sys.executable, "-c", DEVICE_IN_WORDS], capture_output=True, text=True, cwd=ROOT, check=True)
    device = asked.stdout.strip()
    of_one = {"case": "one", "experiments": []}
    samples = {f"subject {n}": of_one | {"pairs": [1e-3 * n, -2e-3] * 20} for n in range(12)}
    out.write_text(json.dumps({"device": device, "runs": [], "samples": samples}))
    process = started("bench.py", "--calibrate", "rmsnorm", "--out", out)
    said = ""
    while "round 1 of" not in said:
        said += process.stderr.readline()
        assert process.poll() is None, said
    process.terminate()
    printed, rest = process.communicate(timeout=15)
    assert process.returncode == 143 and rest.splitlines()[-1] == "stopped by SIGTERM", rest
    assert "false_keeps:" in printed and len(json.loads(out.read_text())["runs"]) == 1


def blocked_and_sent():
    """In a new process: as if SIGTERM had come before it can end by it in its own way."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_comes_before_a_script_is_ready(monkeypatch):
    monkeypatch.setenv(STEPS, "")
    process = started("profile.py", preexec_fn=blocked_and_sent)
    assert process.communicate(timeout=60) == ("", "stopped by SIGTERM\n") and process.returncode == 143


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of its own that has no room left."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"nothing can be mounted here: {mount.stderr.strip()}")
    try:
        (folder / "filling").write_bytes(bytes(64 << 10))
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(refusal, small_disk, model_file):
    line = refusal(profile.main, "--output", small_disk / "profile.json", "--model", model_file, *QUICK)
    assert "cannot write to" in line and "No space left" in line and "free some space" in line and "writable" not in line


def test_what_fails_while_a_disk_is_full_is_a_fault_of_the_machines(small_disk, tmp_path):
    """Which a run waits out, whatever library could not write; beside a disk with space it is an error as any other."""
    with pytest.raises(MachineFault, match=f"the disk of {small_disk} is full"), full_disk_told([small_disk]):
        raise RuntimeError("the compiler has failed")
    with pytest.raises(RuntimeError, match="the compiler has failed"), full_disk_told([tmp_path]):
        raise RuntimeError("the compiler has failed")
    with pytest.raises(MachineFault, match="was full"), full_disk_told([tmp_path]):
        (small_disk / "more").write_bytes(bytes(1 << 16))


def test_a_read_only_disk(refusal, small_disk, model_file):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    line = refusal(profile.main, "--output", small_disk / "profile.json", "--model", model_file, *QUICK)
    assert "cannot write to" in line and "Read-only" in line


def test_a_clone_that_is_not_writable_is_in_the_way_of_experiments_alone(small_disk, monkeypatch):
    monkeypatch.setattr(console, "HOME", small_disk)
    console.check_machine("cpp", experiments=False)
    with pytest.raises(preflight.Refused):
        console.check_machine("cpp")


def opens_files():
    """As many as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, most))
    try:
        os.open(os.devnull, os.O_RDONLY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


LIMITS = {
    "a map": (lambda: mmap.mmap(-1, 1 << 60), "memory is used up (ulimit -v"),
    "an object": (lambda: bytearray(1 << 60), "memory is used up (ulimit -v"),
    "files": (opens_files, "too many files are open (ulimit -n)"),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_limit_of_the_shells_is_named(refusal, case):
    does, words = LIMITS[case]
    assert words in refusal(lambda _: does())


TOO_LITTLE = {
    "files": (resource.RLIMIT_NOFILE, 20, "no more than 20 open files (ulimit -n) here: allow it 64 or more"),
    "memory": (resource.RLIMIT_AS, 700_000 << 10, "bytes of memory (ulimit -v) here: allow it 1073741824 or more"),
}


@pytest.mark.parametrize("case", TOO_LITTLE)
@pytest.mark.parametrize("script", ["bench.py", "orchestrate.py"])
def test_a_limit_that_is_too_low_is_told_before_a_right_kernel_is_called_wrong(script, case):
    limit, allowed, words = TOO_LITTLE[case]
    command = [script, RMSNORM, "--quick"] if script == "bench.py" else [script]
    run = started(*command, preexec_fn=lambda: resource.setrlimit(limit, (allowed, allowed)))
    _, said = run.communicate(timeout=60)
    assert run.returncode == 2 and said.startswith("error: a process may have no more than ") and words in said, said
    assert len(said.splitlines()) == 1


def test_a_limit_that_is_too_low_for_a_larger_pytorch_is_told_with_its_error(tmp_path):
    """One for CUDA maps several times as much as one for CPUs."""
    (tmp_path / "torch").mkdir()
    said = "libtorch_cpu.so: failed to map segment from shared object"
    (tmp_path / "torch/__init__.py").write_text(f"raise ImportError({said!r})")
    limited = f"ulimit -v 2000000; exec {sys.executable} bench.py"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(["sh", "-c", limited], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"{said}; memory is used up (ulimit -v" in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["TMPDIR", "AUTOKERNEL_CACHE"])
def test_a_disk_from_which_nothing_is_loaded_is_told_before_a_right_kernel_is_said_to_crash(name, small_disk, monkeypatch):
    """As a hardened server's /tmp."""
    (small_disk / "filling").unlink()
    subprocess.run(["mount", "-o", "remount,noexec", str(small_disk)], check=True)
    monkeypatch.setenv(name, str(small_disk))
    monkeypatch.setattr("tempfile.tempdir", None)  # what gettempdir() has found before
    with pytest.raises(preflight.Refused, match=f"mounted noexec.*set {name} to"):
        preflight.check("cpp", (), experiments=False)


def test_a_user_without_a_home(monkeypatch, tmp_path):
    """As in a container that is started for a number of no user's: there is a cache, and what is compiled in it."""

    def nobody(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "AUTOKERNEL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert preflight.default_cache().is_relative_to(tmp_path)
    assert compile_library(Library("cpp", 'extern "C" int one() { return 1; }')).is_relative_to(tmp_path)


def test_a_cache_that_is_named_from_here(monkeypatch, tmp_path):
    """What is compiled lies there whatever folder a process is in: compilers and the gate's workers are in their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOKERNEL_CACHE", "here")
    monkeypatch.setenv("TMPDIR", "there")
    library = compile_library(Library("cpp", 'extern "C" int two() { return 2; }'))
    assert library.is_relative_to(tmp_path / "here")
    script(lambda _: monkeypatch.chdir("/"))
    assert preflight.default_cache() == tmp_path / "here" and os.environ["TMPDIR"] == str(tmp_path / "there")


def test_a_full_disk_for_temporary_files(refusal, small_disk, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(small_disk))
    monkeypatch.setattr("tempfile.tempdir", None)
    preflight.why_not_compiling.cache_clear()
    try:
        line = refusal(bench.main, RMSNORM)
    finally:
        preflight.why_not_compiling.cache_clear()
    assert "No space left" in line or "No usable temporary" in line
    assert "apt install" not in line, line  # the compiler is there

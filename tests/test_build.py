"""What a compiled kernel may refer to: its own code and run-time libraries, and nothing else that is loaded.

And tools that fail: a compiler, nm. Each failure is a verdict on the kernel that was to be built, never an exception.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autokernel import build
from autokernel.build import CompileError, Library, compile_library
from autokernel.gate import Correctness, Judge
from autokernel.spec import load_spec
from autokernel.target import default_target

HONEST = {
    "containers, locks and output": (
        "cpp",
        """
        #include <cstdio>
        #include <iostream>
        #include <mutex>
        #include <unordered_map>
        std::mutex lock;
        extern "C" int run(float* x) {
            std::lock_guard<std::mutex> held(lock);
            std::unordered_map<int, float> seen{{1, x[0]}};
            std::cout << seen[1];
            printf("%f", x[1]);
            return 0;
        }""",
    ),
    "threads": (
        "cpp",
        """
        #include <thread>
        extern "C" int run(float* x) { std::thread worker([=] { x[0] = 1; }); worker.join(); return 0; }""",
    ),
    "a CUDA kernel": (
        "cuda",
        """
        __device__ float number() { return 1; }  // on the host, nvcc gives it a body that calls exit
        __global__ void one(float* x) { x[0] = number(); }
        extern "C" int run(float* x) { one<<<1, 1>>>(x); return cudaGetLastError(); }""",
    ),
}
FOREIGN = {
    "sgemm_": ("cpp", 'extern "C" int sgemm_(float*);\nextern "C" int run(float* x) { return sgemm_(x); }'),
    "dlopen": ("cpp", '#include <dlfcn.h>\nextern "C" int run(float* x) { return dlopen("x", 1) != nullptr; }'),
    "fopen": ("cpp", '#include <cstdio>\nextern "C" int run(float* x) { return fopen("x", "r") != nullptr; }'),
    "cublasSgemm_v2": (
        "cuda",
        'extern "C" int cublasSgemm_v2(void*);\nextern "C" int run(void* x) { return cublasSgemm_v2(x); }',
    ),
    "dlsym": ("cuda", '#include <dlfcn.h>\nextern "C" int run(void* x) { return dlsym(x, "cublasSgemm_v2") != nullptr; }'),
}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))  # nvcc needs no GPU, only its name


def library(language: str, source: str) -> Library:
    if language == "cuda" and not shutil.which("nvcc"):
        pytest.skip("no nvcc")
    return Library(language, source)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", HONEST)
def test_run_time_libraries_may_be_used(name: str, tmp_path, hopper):
    assert compile_library(library(*HONEST[name]), tmp_path).exists()


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("symbol", FOREIGN)
def test_other_code_of_the_process_may_not(symbol: str, tmp_path, hopper):
    with pytest.raises(CompileError, match=f"calls {symbol} from outside"):
        compile_library(library(*FOREIGN[symbol]), tmp_path)
    assert not list(tmp_path.glob("*.so"))


# A function of the C library's name, and a variable that PyTorch's libraries have, too, and share among them.
OWN_CODE = """
extern "C" __attribute__((noinline)) int getppid() { asm(""); return -7; }
extern "C" int parent() { return getppid(); }
"""
OWN_VARIABLE = """
struct Shared { static inline int count = START; };
extern "C" int counted() { return Shared::count; }
"""
OF_ALL = """
asm(".data; .globl count; .type count, @gnu_unique_object; .size count, 4; count: .long 5; .text");
extern int count;
extern "C" int counted() { return count; }
"""
STATIC_MEMORY = """
thread_local int count __attribute__((tls_model("initial-exec")));
extern "C" int counted() { return count; }
"""
EXECUTABLE = 'asm(".section .note.GNU-stack,\\"x\\",@progbits; .text"); extern "C" int run() { return 0; }'


@pytest.mark.skipif(sys.platform != "linux", reason="what ELF's libraries share")
def test_what_a_library_defines_is_its_own(tmp_path):
    def loaded(source: str) -> ctypes.CDLL:
        return ctypes.CDLL(str(compile_library(Library("cpp", source), tmp_path)))

    assert loaded(OWN_CODE).parent() == -7
    assert [loaded(OWN_VARIABLE.replace("START", number)).counted() for number in "12"] == [1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="what ELF's libraries share")
@pytest.mark.parametrize(("source", "reason"), [(OF_ALL, "count is one of all"), (STATIC_MEMORY, "static memory")])
def test_nothing_is_taken_from_other_libraries(source: str, reason: str, tmp_path):
    with pytest.raises(CompileError, match=reason):
        compile_library(Library("cpp", source), tmp_path)
    assert not list(tmp_path.glob("*.so"))


@pytest.mark.skipif(sys.platform != "linux", reason="what ELF's libraries share")
def test_no_stack_is_made_executable(tmp_path):
    binary = compile_library(Library("cpp", EXECUTABLE), tmp_path)
    headers = subprocess.run(["readelf", "--program-headers", "--wide", binary], capture_output=True, text=True).stdout
    (stack,) = (line for line in headers.splitlines() if "GNU_STACK" in line)
    assert stack.split()[6] == "RW"


# What a broken tool does when it is to compile a kernel, or to list its symbols -> words of the verdict.
BROKEN = {
    "a compiler that is killed": ("g++", "kill -9 $$", "the compiler was killed (Killed; out of memory?)"),
    "a compiler that fails without a word": ("g++", "exit 3", "the compiler ended with status 3"),
    "a compiler that says what is no text": ("g++", r"printf '\377\000\033 no'; exit 1", "no"),
    "a compiler that writes nothing": ("g++", "exit 0", "the compiler says that it is done, and wrote no kernel.o"),
    "a compiler that hangs": ("g++", "sleep 1000", "the compiler did not finish within 2 s"),
    "a linker that writes nothing": (
        "g++",
        'case " $* " in *" -shared "*) exit 0;; *) exec {real} "$@";; esac',
        "wrote no kernel.so",
    ),
    "an nm that fails": ("nm", "echo bad magic >&2; exit 1", "nm ended with status 1: bad magic"),
    "an nm that is killed": ("nm", "kill -9 $$", "nm was killed"),
    "an nm that hangs": ("nm", "exec sleep 1000", "nm did not finish within 1 s"),
    "an nm that says what is no text": ("nm", r"printf 'U \377\376\n'", "calls \ufffd\ufffd from outside"),
    "no nm": ("nm", "", "there is no nm: it tells what a kernel calls (Debian/Ubuntu: apt install binutils)"),
}


def break_tool(folder: Path, tool: str, script: str) -> None:
    """Put a tool that does `script` into `folder`; a compiler does so with kernels alone. An empty one: remove it."""
    real, place = shutil.which(tool), folder / tool
    if not script:
        for path in reversed(os.environ["PATH"].split(os.pathsep)):
            for program in Path(path).glob("*"):
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
        place.unlink()
        return
    others = f'case " $* " in *kernel.*) ;; *) exec {real} "$@";; esac\n' if tool == "g++" else ""
    place.write_text(f"#!/bin/sh\n{others}{script.replace('{real}', real)}\n")
    place.chmod(0o755)


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.slow_after(1)
def test_a_broken_tool_is_a_verdict(name: str, tmp_path: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch):
    tool, script, reason = BROKEN[name]
    break_tool(tmp_path, tool, script)
    monkeypatch.setenv("PATH", str(tmp_path) if not script else f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("AUTOKERNEL_CACHE", str(tmp_path / "cache"))
    if "hangs" in name:
        monkeypatch.setattr(build, *(("TOOL_S", 1.0) if tool == "nm" else ("COMPILE_S", 2.0)))
    right = (load_spec("rmsnorm").folder / "cpp_kernel.py").read_text()
    verdict = judge.check(f"{right}\n# {name}\n", default_target("rmsnorm", "cpp", "cpu", torch.float32))
    assert verdict.correctness == Correctness.CRASH
    assert verdict.failure.reason.startswith("CompileError") and reason in verdict.failure.reason, str(verdict.failure)
    assert not list(tmp_path.glob("cache/*.so"))


def test_cuda_before_a_cpus_judge_is_a_verdict(judge: Judge):
    right = (load_spec("rmsnorm").folder / "cpp_kernel.py").read_text()
    target = default_target("rmsnorm", "cpp", "cpu", torch.float32)
    declared = judge.check(right.replace('BACKEND = "cpp"', 'BACKEND = "cuda"'), target)
    assert declared.correctness == Correctness.FAIL
    assert declared.failure.reason == "BACKEND is 'cuda': it needs a GPU, and this gate judges on the CPU"
    built = judge.check(right.replace("cpp_function", "cuda_function"), target)
    assert built.correctness == Correctness.CRASH
    if shutil.which("nvcc") and not torch.cuda.is_available():
        assert "CUDA C++ is compiled for this machine's GPU, and PyTorch finds none" in built.failure.reason


FORBIDDEN = (
    "sgemm_",
    "cblas_sgemm",
    "vsExp",
    "mkl_blas_sgemm",
    "dlopen",
    "dlsym",
    "fopen",
    "open64",
    "__open_2",
    "system",
    "mmap",
    "mprotect",
    "syscall",
    "prctl",
    "signal",
    "setenv",
    "__sched_setaffinity",
    "kill",
    "_ZNSt13basic_filebufIcSt11char_traitsIcEE4openEPKcSt13_Ios_Openmode",
    "_ZN2at4_ops2mm4callE",
    "_ZNSt10filesystem6removeERKNS_7__cxx114pathE",
    "_ZSt13set_terminatePFvvE",
    "_ZNSt6locale6globalERKS_",
    "_ZNSt8ios_base15sync_with_stdioEb",
    "_ZNSt3pmr20set_default_resourceEPNS_15memory_resourceE",
    "_ZNSt8ios_base6xallocEv",
    "_ZSt3cin",
    "_ZSt5wcout",
    "_ZNSt12__basic_fileIcE4openEPKcSt13_Ios_Openmodei",
    "__cxa_finalize",
    "pthread_atfork",
    "pthread_setattr_default_np",
    "_ZNSt17_Function_handlerIFvRKN2at6TensorEEZNS0_6reluERS2_EUlS3_E_E9_M_invokeERKSt9_Any_dataS3_",
)


@pytest.mark.parametrize("symbol", FORBIDDEN)
def test_a_kernel_may_not_call(symbol: str):
    assert not build.ALLOWED_SYMBOLS.fullmatch(symbol)


def test_a_compilers_refusal_begins_with_its_error(tmp_path) -> None:
    """And not with the function that it is in, or the line that includes it: a verdict's reason is one line."""
    with pytest.raises(CompileError) as refusal:
        compile_library(library("cpp", "int f(int x) {\n    return x\n}\n"), tmp_path)
    first, *rest = str(refusal.value).splitlines()
    assert ":2:" in first and " error: " in first and "In function" in rest[0], refusal.value

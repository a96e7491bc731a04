"""What a compiled kernel may refer to: its own code and run-time libraries, and nothing else that is loaded."""

import shutil

import pytest
import torch

from autokernel.build import CompileError, Library, compile_library

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


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))  # nvcc needs no GPU, only its name


def library(language: str, source: str) -> Library:
    if language == "cuda" and not shutil.which("nvcc"):
        pytest.skip("no nvcc")
    return Library(language, source)


@pytest.mark.parametrize("name", HONEST)
def test_run_time_libraries_may_be_used(name: str, tmp_path):
    assert compile_library(library(*HONEST[name]), tmp_path).exists()


@pytest.mark.parametrize("symbol", FOREIGN)
def test_other_code_of_the_process_may_not(symbol: str, tmp_path):
    with pytest.raises(CompileError, match=f"calls {symbol} from outside"):
        compile_library(library(*FOREIGN[symbol]), tmp_path)
    assert not list(tmp_path.glob("*.so"))

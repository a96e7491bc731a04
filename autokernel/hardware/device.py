"""What a device can do at most: one row per known GPU; measured peaks for any other GPU, and for the CPU."""

import hashlib
import json
import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from autokernel.build import cpp_function, cpu_identity, default_cache
from autokernel.common.preflight import MissingCompiler
from autokernel.common.records import write_json

PEAK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MEASURING_BUDGET_S = 0.4  # for each of the four peaks
MIB = 1024**2


@dataclass(frozen=True)
class Gpu:
    """A row of the table: how the driver names the part, and the vendor's figures without sparsity.

    The 16-bit rate accumulates in fp32. `arch` and `memory_gb` tell AMD parts apart whose name the driver leaves empty.
    """

    name: str  # a regular expression that must match all of the name, less "NVIDIA " or "AMD "
    units: int  # SMs or CUs; parts that share a name differ here
    tflops_16bit: float
    tflops_fp32: float
    bandwidth_gb_s: float
    cache_mb: float  # L2
    arch: str = ""
    memory_gb: int = 0


GPUS = (
    Gpu("H200", 132, 989, 67, 4800, 60),
    Gpu("H100 80GB HBM3|H100 SXM5.*", 132, 989.4, 66.9, 3350, 50),
    Gpu("H100 PCIe", 114, 756, 51.2, 2000, 50),
    Gpu("B200", 148, 2250, 80, 8000, 126),  # sold at 75-80 and 7.7-8.0: a peak is the upper one
    Gpu("A100-SXM4-80GB|A100-SXM-80GB", 108, 312, 19.5, 2039, 40),
    Gpu("A100 80GB PCIe", 108, 312, 19.5, 1935, 40),
    Gpu("L40S", 142, 362, 91.6, 864, 96),
    Gpu("L4", 58, 121, 30.3, 300, 48),
    Gpu("A10", 72, 125, 31.2, 600, 6),
    Gpu("GeForce RTX 5090", 170, 210, 104.8, 1792, 96),
    Gpu("GeForce RTX 4090", 128, 165, 82.6, 1008, 72),
    Gpu("GeForce RTX 4080", 76, 97.5, 48.7, 717, 64),
    Gpu("GeForce RTX 3090", 82, 71, 35.6, 936, 6),
    Gpu("GeForce RTX 3080", 68, 59.5, 29.8, 760, 5),
    Gpu("Instinct MI300X.*", 304, 1307, 163.4, 5300, 32, "gfx942", 192),
    Gpu("Instinct MI325X.*", 304, 1307, 163.4, 6000, 32, "gfx942", 256),
    Gpu("Instinct MI350X.*", 256, 2310, 144.2, 8000, 32, "gfx950", 288),
    Gpu("Instinct MI355X.*", 256, 2520, 157, 8000, 32, "gfx950", 288),
)


@dataclass(frozen=True)
class Device:
    """A device and its peaks. `measured`: by us on this machine, rather than the vendor's figures.

    A measured peak is what a large copy and a matmul (on a CPU, a loop of multiply-adds) attain here: near the machine's
    limit, but no law of physics.

    Sources of the table: the vendors' data sheets and architecture white papers (NVIDIA: Hopper, Blackwell, Ampere and
    Ada; AMD: CDNA 3 and CDNA 4). A part that is not in it exactly, an "A10G" or a MIG slice, is measured, never guessed.
    """

    name: str
    type: str  # "cpu" | "cuda"; ROCm says "cuda" too
    tflops: Mapping[torch.dtype, float] = field(hash=False)
    peak_bandwidth_gb_s: float
    l2_bytes: int  # the largest cache: data must exceed it to come from memory
    units: int  # SMs or CUs; on a CPU, threads
    measured: bool

    def peak_tflops(self, dtype: torch.dtype) -> float:
        """Dense matmul peak with inputs of `dtype`; for fp32 on a GPU without TF32. Raises KeyError for other dtypes."""
        return self.tflops[dtype]

    @staticmethod
    def detect(device: str | torch.device, again: bool = False) -> "Device":
        """The device named "cpu", "cuda" or "cuda:1". The first call on an unknown one measures it, in at most 3 s.

        again: measure it once more, and take the higher peaks (other work may have taken its share the first time).
        """
        device = torch.device(device)
        if device.type == "cpu":
            return _cpu(again)
        properties = torch.cuda.get_device_properties(device)
        arch = getattr(properties, "gcnArchName", "")
        gpu = find_gpu(properties.name, properties.multi_processor_count, arch, properties.total_memory)
        if gpu is None:
            name = properties.name or arch
            identity = f"{name} {properties.multi_processor_count} {properties.total_memory} {torch.__version__}"
            tflops, bandwidth = _measured(device, identity, again)
            return Device(name, "cuda", tflops, bandwidth, properties.L2_cache_size, properties.multi_processor_count, True)
        tflops = {dtype: gpu.tflops_fp32 if dtype == torch.float32 else gpu.tflops_16bit for dtype in PEAK_DTYPES}
        name = properties.name or f"AMD {gpu.name.removesuffix('.*')}"
        return Device(name, "cuda", tflops, gpu.bandwidth_gb_s, int(gpu.cache_mb * MIB), gpu.units, False)


def find_gpu(name: str, units: int, arch: str = "", memory_bytes: int = 0) -> Gpu | None:
    """The one row that fits the driver's name and unit count; where the name is empty (ROCm), arch and memory instead."""
    model = re.sub(r"^(NVIDIA|AMD) ", "", name)
    arch = arch.split(":")[0]  # "gfx942:sramecc+:xnack-"

    def fits(gpu: Gpu) -> bool:
        if name:
            return re.fullmatch(gpu.name, model) is not None
        return gpu.arch == arch and gpu.memory_gb > 0 and abs(memory_bytes / 1e9 / gpu.memory_gb - 1) < 0.1

    rows = [gpu for gpu in GPUS if gpu.units == units and fits(gpu)]
    return rows[0] if len(rows) == 1 else None


def device_name(device: str) -> str:
    """What Device.detect calls it; nothing is measured on a CPU."""
    return _cpu_name() if device == "cpu" else Device.detect(device).name


def _cpu_name() -> str:
    name = re.search(r"model name\s*: (.*?)(?:flags|Features|$)", cpu_identity())
    return name[1] if name else platform.machine()


def _cpu(again: bool) -> Device:
    threads = torch.get_num_threads()
    tflops, bandwidth = _measured(torch.device("cpu"), f"{cpu_identity()} {threads} {torch.__version__}", again)
    return Device(_cpu_name(), "cpu", tflops, bandwidth, _last_level_cache_bytes(), threads, True)


def _last_level_cache_bytes() -> int:
    """As Linux reports it for the first core; elsewhere 32 MiB, more than most cores have to themselves."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(size.read_text().rstrip("K\n")) * 1024 for size in sizes), default=32 * MIB)


def _measured(device: torch.device, identity: str, again: bool) -> tuple[dict[torch.dtype, float], float]:
    """TFLOP/s by dtype and GB/s of this machine, from the cache if it was measured before; `again`: what is higher."""
    path = default_cache() / f"peaks-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
    if again or not path.exists():
        tflops = {str(dtype).removeprefix("torch."): _matmul_tflops(device, dtype) for dtype in PEAK_DTYPES}
        if device.type == "cpu":  # PyTorch's matmul can be far below what the cores do (measured: 40 % on a Zen 5)
            tflops["float32"] = max(tflops["float32"], _fma_tflops())
        # A 16-bit kernel may compute in fp32, so its peak is no lower (most CPUs multiply fp16 slower than fp32).
        tflops = {dtype: max(rate, tflops["float32"]) for dtype, rate in tflops.items()}
        bandwidth = _copy_gb_s(device)
        if path.exists():
            known = json.loads(path.read_text())
            tflops = {dtype: max(rate, known["tflops"][dtype]) for dtype, rate in tflops.items()}
            bandwidth = max(bandwidth, known["bandwidth_gb_s"])
        write_json(path, {"identity": identity, "tflops": tflops, "bandwidth_gb_s": bandwidth})
    record = json.loads(path.read_text())
    return {getattr(torch, dtype): rate for dtype, rate in record["tflops"].items()}, record["bandwidth_gb_s"]


def _copy_gb_s(device: torch.device) -> float:
    """Read x, write y, both far larger than the caches."""
    x = torch.ones(256 * MIB // 4, device=device)
    y = torch.ones_like(x)
    return 2 * x.nbytes / _best_seconds(lambda: y.copy_(x), device) / 1e9


def _matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    cpu_N = 512 if dtype == torch.float16 else 1024  # where the CPU has no fp16, 1024³ takes 2 s instead of 10 ms
    cuda_N = 8192 if dtype.itemsize == 2 else 4096
    N = cpu_N if device.type == "cpu" else cuda_N
    A, B = (torch.randn(N, N, device=device).to(dtype) for _ in range(2))
    C = torch.empty_like(A)
    precision = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    seconds = _best_seconds(lambda: torch.mm(A, B, out=C), device)
    torch.backends.cuda.matmul.fp32_precision = precision
    return 2 * N**3 / seconds / 1e12


FMA = r"""
#include <autokernel.hpp>

// 12 independent chains of fused multiply-adds on whole vectors, on every thread: nothing but arithmetic.
extern "C" int64_t run(int64_t steps, float* sink) {
#if defined(__AVX512F__)
    constexpr int W = 16;
#else
    constexpr int W = 8;
#endif
    typedef float vec __attribute__((vector_size(4 * W)));
    int threads = 1;
#pragma omp parallel
    {
#ifdef _OPENMP
#pragma omp single
        threads = omp_get_num_threads();
#endif
        const vec a = vec{} + sink[0], b = vec{} + sink[1];
        vec c[12];
        for (int i = 0; i < 12; ++i) c[i] = vec{} + float(i);
        for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 12
            for (int i = 0; i < 12; ++i) c[i] = c[i] * a + b;
        }
        vec total{};
        for (int i = 0; i < 12; ++i) total += c[i];
        if (total[0] == 12345.f) sink[2] = total[1];
    }
    return int64_t(2) * 12 * W * threads;  // floating-point operations a step
}
"""


def _fma_tflops() -> float:
    """The fp32 rate of a loop of fused multiply-adds on all threads; 0 where there is no compiler."""
    run = cpp_function(FMA, "run", "l p")
    sink = torch.tensor([0.5, 0.25, 0.0])
    steps = 2_000_000
    try:
        flops_per_step = run(1, sink.data_ptr())
    except MissingCompiler:
        return 0.0
    return flops_per_step * steps / _best_seconds(lambda: run(steps, sink.data_ptr()), torch.device("cpu")) / 1e12


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    """The fastest call within the budget, after one to warm up: a peak is what the machine does undisturbed."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    best, deadline = float("inf"), time.perf_counter() + MEASURING_BUDGET_S
    call()
    wait(device)
    while best == float("inf") or time.perf_counter() < deadline:
        start = time.perf_counter()
        call()
        wait(device)
        best = min(best, time.perf_counter() - start)
    return best

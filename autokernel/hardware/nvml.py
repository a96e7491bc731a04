"""What NVIDIA's driver says of a GPU, asked through NVML: nothing of a CPU, and nothing where there is no driver."""

from typing import Any, TypeVar

T = TypeVar("T")


def gpu_id(device: str) -> str:
    """What the driver calls the GPU `device`, "cuda" or "cuda:1": its UUID, for CUDA_VISIBLE_DEVICES renumbers them."""
    import torch  # here, because the supervisor gets this module with machine.py and must stay small

    if torch.cuda.is_available():
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return device.partition(":")[2] or "0"


def compute_pids(device: str) -> list[int]:
    """The processes that compute on the GPU, by the driver's process ids, which may not be those of our container."""
    return [process.pid for process in ask(device, "nvmlDeviceGetComputeRunningProcesses", [])]


def utilization_percent(device: str) -> int:
    """The share of the last moments in which a kernel ran."""
    rates = ask(device, "nvmlDeviceGetUtilizationRates", None)
    return rates.gpu if rates else 0


def clock_event_reasons(device: str) -> int:
    """Why the clocks are not higher: a set of nvmlClocksEventReasons, by the name that drivers before 535 know as well."""
    return ask(device, "nvmlDeviceGetCurrentClocksThrottleReasons", 0)


def driver_version(device: str) -> str:
    return ask(device, "nvmlSystemGetDriverVersion", "unknown")


def ask(device: str, question: str, unknown: T) -> Any | T:
    """What a function of NVML says of the GPU; `unknown` where there is no driver, or it does not say."""
    if not device.startswith("cuda"):
        return unknown
    import pynvml  # as torch

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return unknown
    try:
        if question.startswith("nvmlSystem"):
            return getattr(pynvml, question)()
        name = gpu_id(device)
        by_uuid = name.startswith("GPU-")
        handle = pynvml.nvmlDeviceGetHandleByUUID(name) if by_uuid else pynvml.nvmlDeviceGetHandleByIndex(int(name))
        return getattr(pynvml, question)(handle)
    except pynvml.NVMLError:
        return unknown
    finally:
        pynvml.nvmlShutdown()

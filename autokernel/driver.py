"""What NVIDIA's driver says of a GPU, asked through nvidia-smi."""

import shutil
import subprocess


def gpu_id(device: str) -> str:
    """What the driver calls the GPU `device`, "cuda" or "cuda:1": its UUID, for CUDA_VISIBLE_DEVICES renumbers them."""
    import torch  # here, because the supervisor gets this module with machine.py and must stay small

    if torch.cuda.is_available():
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return device.partition(":")[2] or "0"


def ask(device: str, query: str) -> list[str]:
    """The lines of an answer, such as of "--query-gpu=clocks.sm"; none for a CPU, or where there is no nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None or not device.startswith("cuda"):
        return []
    command = [tool, f"--id={gpu_id(device)}", query, "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    return [line.strip() for line in answer.splitlines() if line.strip()]

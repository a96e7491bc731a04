"""Targets of few numbers, for tests that time nothing: of some types the headline sizes take the gate ten seconds."""

import torch

from autokernel.spec import load_spec
from autokernel.target import Target, WeightedCase, default_target

SIZES = {
    "bmm": {"batch": 4, "M": 64, "K": 64, "N": 64},
    "cross_entropy": {"M": 64, "V": 4096},
    "flash_attention": {"batch": 2, "heads": 4, "kv_heads": 2, "seq": 128, "head_dim": 64},
    "fused_linear": {"M": 64, "K": 512, "N": 512},
    "fused_mlp": {"M": 64, "dim": 256, "hidden": 512},
    "grouped_matmul": {"rows": 64, "groups": 4, "K": 128, "N": 128},
    "matmul": {"M": 128, "K": 256, "N": 128},
    "matmul_fp4": {"M": 16, "K": 256, "N": 256},
}


def small_target(kernel_type: str, dtype: torch.dtype = torch.float32) -> Target:
    """In C++ on the CPU; at the headline sizes where those are small."""
    if kernel_type not in SIZES:
        return default_target(kernel_type, "cpp", "cpu", dtype)
    case = WeightedCase(load_spec(kernel_type).case(SIZES[kernel_type], dtype))
    return Target(f"{kernel_type}_small", kernel_type, "cpp", "cpu", (case,))

"""Attention under masks on this GPU: the CUDA kernel beside the Triton one and PyTorch's backends, in one process.

Usage:   python benchmarks/attention_masks.py          (fp16; two minutes)
Prints:  a line a shape (batch, heads, length, head_dim) and mask: the CUDA kernel's microseconds, and how many times as
         long take the Triton kernel and the fastest of PyTorch's backends (flash, cuDNN, memory-efficient) that takes it

A time is that of linear_tiles.microseconds. The masks: none; padding, a row a text of which a quarter is hidden on average,
as bool and as numbers that are added to scores (0 and the lowest); a sliding window of a quarter of the keys, as both.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.cli.arguments import Parser, script
from autokernel.spec import KERNELS, import_file
from benchmarks.kernels import wrong
from benchmarks.linear_tiles import microseconds

CUDA, TRITON = (
    import_file(KERNELS / "flash_attention" / f"{name}_kernel.py", f"{name}_attention") for name in ("cuda", "triton")
)
SHAPES = (  # and whether causal
    ((8, 12, 128, 64), False),
    ((32, 16, 197, 64), False),
    ((32, 16, 512, 64), False),
    ((8, 12, 512, 64), True),
    ((8, 12, 1024, 64), True),
    ((8, 16, 1024, 64), False),
    ((8, 20, 1500, 64), False),
    ((2, 32, 4096, 64), True),
    ((8, 32, 1024, 128), True),
    ((2, 32, 2048, 128), True),
)
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
LARGEST = 1 << 29  # elements of a mask written out for PyTorch's backends


def main(argv: list[str] | None = None) -> int:
    Parser(__doc__).parse_args(argv)
    warnings.filterwarnings("ignore", message=".*ttention")  # why a backend does not take a mask
    for shape, causal in SHAPES:
        torch.manual_seed(0)
        batch, heads, length, head_dim = shape
        wide = (batch, length, heads, head_dim)
        qkv = [torch.randn(wide, device="cuda", dtype=torch.float16).transpose(1, 2) for _ in range(3)]
        for name, mask in masks(batch, length):
            if mask is None or batch * heads * length**2 < LARGEST:
                print(f"{shape}{' causal' * causal}, {name}: {measured(qkv, causal, mask)}", flush=True)
    return 0


def masks(batch: int, length: int) -> Iterator[tuple[str, Tensor | None]]:
    places = torch.arange(length, device="cuda")
    padding = (places < torch.randint(length // 2, length + 1, (batch, 1), device="cuda"))[:, None, None]
    window = torch.ones(length, length, dtype=torch.bool, device="cuda").tril().triu(-length // 4)[None, None]
    yield "no mask", None
    for name, shown in (("padding", padding), ("window", window)):
        yield name, shown
        lowest = torch.finfo(torch.float16).min
        yield f"{name} added", torch.zeros_like(shown, dtype=torch.float16).masked_fill(~shown, lowest)


def measured(qkv: list[Tensor], causal: bool, mask: Tensor | None) -> str:
    ours = microseconds(lambda: CUDA.kernel_fn(*qkv, causal, attn_mask=mask))
    expected, peers = None, {}
    for name, call in peers_of(qkv, causal, mask):
        try:
            expected = call() if expected is None else expected
            peers[name] = microseconds(call)
        except RuntimeError:  # it does not take this mask
            continue
    reason = wrong(CUDA.kernel_fn(*qkv, causal, attn_mask=mask), expected)
    triton = microseconds(lambda: TRITON.kernel_fn(*qkv, causal, attn_mask=mask))
    best = min(peers, key=peers.get)
    return reason or f"{ours:.1f} us; Triton {triton / ours:.2f}x, {best} {peers[best] / ours:.2f}x"


def peers_of(qkv: list[Tensor], causal: bool, mask: Tensor | None) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Each of PyTorch's backends; where both are asked for, causality is written into the mask, once."""
    batch, heads, length, _ = qkv[0].shape
    given = mask
    if mask is not None:
        given = mask.expand(batch, heads, length, length)
        if causal:
            past = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
            given = given & past if mask.dtype == torch.bool else given.masked_fill(~past, -torch.inf)
    for backend in BACKENDS:

        def call(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*qkv, attn_mask=given, is_causal=causal and mask is None)

        yield backend.name.partition("_")[0], call


if __name__ == "__main__":
    raise SystemExit(script(main))

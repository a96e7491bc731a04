"""Rotary position embedding: inputs, shapes and costs."""

import torch

import reference
from autokernel.spec import ROW_SCALES, KernelSpec, TensorSpec


def arguments(dtype, batch, heads, seq, head_dim, rotary_dim=None, interleaved=True, transposed=False):
    """`transposed`: x is the [batch, heads, seq, head_dim] view of a projection's [batch, seq, heads, head_dim]."""
    stride = (seq * heads * head_dim, head_dim, heads * head_dim, 1) if transposed else None
    angles = TensorSpec((seq, (rotary_dim or head_dim) // 2), dtype)
    x = TensorSpec((batch, heads, seq, head_dim), dtype, stride)
    return {"x": x, "cos": angles, "sin": angles, "interleaved": interleaved}


def small_calls(dtype):
    """Batches of a few positions, whole and in part, of one head and several, of few channels and many."""
    yield arguments(dtype, batch=1, heads=3, seq=1, head_dim=8, interleaved=False)
    yield arguments(dtype, batch=2, heads=1, seq=5, head_dim=16)
    yield arguments(dtype, batch=3, heads=2, seq=2, head_dim=12, rotary_dim=8)
    yield arguments(dtype, batch=2, heads=3, seq=4, head_dim=6, interleaved=False, transposed=True)  # an odd half
    yield arguments(dtype, batch=3, heads=1, seq=3, head_dim=288, interleaved=False)
    yield arguments(dtype, batch=5, heads=2, seq=3, head_dim=4, rotary_dim=2, interleaved=False)
    yield arguments(dtype, batch=4, heads=4, seq=4, head_dim=4)
    yield arguments(dtype, batch=8, heads=8, seq=8, head_dim=8, interleaved=False)


def takes(a):
    """Kernels read a row of cos and sin for each position: PyTorch would take one row for all."""
    x, cos, sin = a["x"].shape, a["cos"].shape, a["sin"].shape
    return len(x) == 4 and len(cos) == 2 and cos == sin and cos[0] == x[2] and 2 * cos[1] <= x[3]


def eager(x, cos, sin, interleaved=True):
    """How models write it: complex numbers for interleaved pairs (LLaMA by Meta), rotate-half otherwise (Hugging Face)."""
    rotary_dim = 2 * cos.shape[-1]
    rotated, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        pairs = rotated.float().reshape(*rotated.shape[:-1], -1, 2)
        if pairs.stride(-1) != 1 or any(n % 2 for n in (*pairs.stride()[:-1], pairs.storage_offset())):
            pairs = pairs.clone(memory_format=torch.contiguous_format)  # a layout that view_as_complex refuses
        pairs = torch.view_as_complex(pairs)
        rotated = torch.view_as_real(pairs * torch.complex(cos.float(), sin.float())).flatten(-2).type_as(x)
    else:
        first, second = rotated.chunk(2, dim=-1)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        rotated = rotated * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((rotated, passed), -1) if passed.shape[-1] else rotated


def angles(spec, generator):
    """position x 10000^(-i / half), from a first position that differs by seed (as it does in decoding)."""
    seq, half = spec.shape
    positions = torch.arange(seq, dtype=torch.float64) + generator.initial_seed() % 1000
    return torch.outer(positions, 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half))


def table(base, start=0, apart=1.0, factor=1.0, order=lambda positions, half: positions[:, None]):
    """A function that gives inputs the angles of another base, from a position on, evenly apart, both sides times a factor,
    as tables for longer texts are; of positions in another order."""

    def made(inputs, generator):
        cos = inputs["cos"]
        seq, half = cos.shape
        positions = start + apart * torch.arange(seq, dtype=torch.float64, device=cos.device)
        each = order(positions, half) * base ** (-torch.arange(half, dtype=torch.float64, device=cos.device) / half)
        return {"cos": (factor * each.cos()).to(cos.dtype), "sin": (factor * each.sin()).to(cos.dtype)}

    return made


def of_parts(positions, half):
    """Other positions of each third of the channels, as pictures in a text have them: time, row and column."""
    time, row, column = positions // 4, positions // 2 % 2, positions % 2
    return torch.stack((time, row, column), -1)[:, torch.arange(half, device=positions.device) * 3 // half]


def large(inputs):
    """Magnitudes at which products rounded before they are added would show."""
    return inputs | {"x": inputs["x"].clamp(-4, 4) * 64}


def cancelling(inputs):
    """Both members of every pair equal: a cos - b sin cancels where cos and sin are close."""
    x = inputs["x"].clone()
    half = inputs["cos"].shape[-1]
    if inputs["interleaved"]:
        x[..., 1 : 2 * half : 2] = x[..., 0 : 2 * half : 2]
    else:
        x[..., half : 2 * half] = x[..., :half]
    return inputs | {"x": x}


SPEC = KernelSpec(
    name="rotary_embedding",
    oracle=reference.rotary_embedding,
    eager=eager,
    eager_form="view_as_complex(x) * freqs if interleaved, else x * cos + rotate_half(x) * sin",
    arguments=arguments,
    smoke={"batch": 1, "heads": 2, "seq": 8, "head_dim": 64},
    any_size=("seq",),
    sweep=(
        {"batch": 1, "heads": 12, "seq": 128, "head_dim": 64, "transposed": True},  # as a projection leaves it
        {"batch": 1, "heads": 4, "seq": 128, "head_dim": 64, "interleaved": False, "transposed": True},  # grouped keys
        {"batch": 2, "heads": 8, "seq": 64, "head_dim": 128},
        {"batch": 2, "heads": 8, "seq": 64, "head_dim": 128, "interleaved": False},
        {"batch": 4, "heads": 32, "seq": 1, "head_dim": 128},  # decode
        {"batch": 1, "heads": 12, "seq": 100, "head_dim": 80, "interleaved": False},  # vectors that do not fill
        {"batch": 2, "heads": 3, "seq": 77, "head_dim": 40},
        {"batch": 1, "heads": 8, "seq": 64, "head_dim": 256, "rotary_dim": 64},  # GPT-J, GPT-NeoX rotate a part
        {"batch": 1, "heads": 8, "seq": 64, "head_dim": 80, "rotary_dim": 32, "interleaved": False, "transposed": True},
        {"batch": 1, "heads": 2, "seq": 512, "head_dim": 96},
    ),
    edges=(
        {"batch": 1, "heads": 2, "seq": 1023, "head_dim": 64},
        {"batch": 1, "heads": 1, "seq": 4097, "head_dim": 32, "interleaved": False},
        {"batch": 1, "heads": 3, "seq": 1537, "head_dim": 18, "transposed": True},
        {"batch": 1, "heads": 1, "seq": 1, "head_dim": 2},
        {"batch": 3, "heads": 5, "seq": 7, "head_dim": 33, "rotary_dim": 22, "interleaved": False},
        {"batch": 3, "heads": 5, "seq": 7, "head_dim": 33, "rotary_dim": 2, "transposed": True},
    ),
    timing={
        "cpu": (
            {"batch": 1, "heads": 12, "seq": 512, "head_dim": 64},
            {"batch": 1, "heads": 12, "seq": 512, "head_dim": 64, "interleaved": False},
            {"batch": 1, "heads": 12, "seq": 512, "head_dim": 64, "transposed": True},
            {"batch": 1, "heads": 4, "seq": 512, "head_dim": 64, "transposed": True},
        ),
        "cuda": (
            {"batch": 2, "heads": 32, "seq": 2048, "head_dim": 128},
            {"batch": 2, "heads": 32, "seq": 1024, "head_dim": 128},
            {"batch": 1, "heads": 32, "seq": 2048, "head_dim": 128},
            {"batch": 4, "heads": 32, "seq": 4096, "head_dim": 128},
        ),
    },
    # each rotated element: two products and a sum
    takes=takes,
    forms=small_calls,
    flops=lambda a: 3 * a["x"].numel // a["x"].shape[-1] * 2 * a["cos"].shape[-1],
    bytes_moved=lambda a: 2 * a["x"].nbytes + a["cos"].nbytes + a["sin"].nbytes,  # read x, cos, sin, write y
    headline="bandwidth_gb_s",
    finite_below=1e15,
    static=frozenset({"cos", "sin"}),
    planted_in=("cos", "sin"),
    fill={
        "cos": lambda spec, args, generator: angles(spec, generator).cos().to(spec.dtype),
        "sin": lambda spec, args, generator: angles(spec, generator).sin().to(spec.dtype),
    },
    filled={
        "angles from 0": table(10000.0),
        "angles of another base from 0": table(500000.0),
        "angles of another base, larger": table(1e6, 3, factor=1.25),
        "angles closer together": table(10000.0, apart=0.25),
        "angles in steps of two": table(10000.0, apart=2.0),
        "angles that start again": table(
            10000.0, order=lambda positions, half: (positions % (len(positions) // 2 + 1))[:, None]
        ),
        "angles from the last to the first": table(10000.0, order=lambda positions, half: positions.flip(0)[:, None]),
        "angles of positions in three dims": table(10000.0, order=of_parts),
        "angles of 0": table(1.0, apart=0.0),
        "angles that are all alike": table(1.0, 1, apart=0.0),
    },
    independent_rows=True,
    row_scales=(*ROW_SCALES, 1e8),
    terms=lambda y, x, **inputs: x.abs().amax(-1, keepdim=True),
    picked=lambda y, cos, **inputs: torch.arange(y.shape[-1], device=y.device) >= 2 * cos.shape[-1],
    adversarial={"large": large, "cancelling": cancelling},
)

"""How models write rotary embeddings. `x` is [batch, heads, seq, head_dim], or has heads and seq the other way round."""

import torch

from autokernel.model.patterns import Pattern


def table(angles):
    """cos, sin or complex angles [..., seq, n], with dimensions of size 1 for broadcasting, as [seq, n]."""
    return angles.flatten(0, -2)


def by_heads(parameters):
    """The kernel's call for x [batch, heads, seq, head_dim]; parameters(...) makes cos, sin and interleaved."""
    return lambda kernel, x, **angles: kernel(x=x, **parameters(x, **angles))


def by_positions(parameters):
    """The kernel's call for x [batch, seq, heads, head_dim]."""
    return lambda kernel, x, **angles: kernel(x=x.transpose(1, 2), **parameters(x, **angles)).transpose(1, 2)


def complex_product(x, freqs):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs).flatten(3).to(x.dtype)


def from_complex(x, freqs):
    angles = table(freqs)
    return {"cos": angles.real.to(x.dtype), "sin": angles.imag.to(x.dtype), "interleaved": True}


def interleaved_slices(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def interleaved_pairs(x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def from_pairs(x, cos, sin):
    return {"cos": table(cos), "sin": table(sin), "interleaved": True}


def every_two(x, cos, sin):
    """GPT-J's."""
    rotated = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return x * cos + rotated * sin


def from_neighbours(x, cos, sin):
    return {"cos": table(cos)[..., ::2], "sin": table(sin)[..., ::2], "interleaved": True}


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotate_half_chunks(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def hugging_face(x, cos, sin):
    return x * cos + rotate_half(x) * sin


def hugging_face_chunks(x, cos, sin):
    return x * cos + rotate_half_chunks(x) * sin


def hugging_face_float(x, cos, sin):
    h = x.float()
    return (h * cos + rotate_half(h) * sin).to(x.dtype)


def hugging_face_partial(x, cos, sin):
    rotated, passed = x[..., :4], x[..., 4:]
    return torch.cat((rotated * cos + rotate_half(rotated) * sin, passed), -1)


def from_both_halves(x, cos, sin):
    cos, sin = (table(t).chunk(2, -1)[0].to(x.dtype) for t in (cos, sin))
    return {"cos": cos, "sin": sin, "interleaved": False}


def halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def halves_slices(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def halves_backwards(x, cos, sin):
    """nanochat's: by the angles' negatives."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos + b * sin, a * (-sin) + b * cos), -1)


def from_negative_halves(x, cos, sin):
    return {"cos": table(cos), "sin": -table(sin), "interleaved": False}


def from_halves(x, cos, sin):
    return {"cos": table(cos), "sin": table(sin), "interleaved": False}


X = (2, 3, 5, 8)
COMPLEX = {"x": X, "freqs": torch.zeros(1, 1, 5, 4, dtype=torch.complex64)}
HALF_WIDTH = {"x": X, "cos": (1, 1, 5, 4), "sin": (1, 1, 5, 4)}
FULL_WIDTH = {"x": X, "cos": (1, 1, 5, 8), "sin": (1, 1, 5, 8)}
BOTH = ("cos", "sin")  # a full-width cos has every angle twice

PATTERNS = [
    pattern
    for layout in (by_positions, by_heads)
    for pattern in (
        Pattern(complex_product, COMPLEX, layout(from_complex)),
        Pattern(interleaved_slices, HALF_WIDTH, layout(from_pairs)),
        Pattern(interleaved_pairs, HALF_WIDTH, layout(from_pairs)),
        Pattern(hugging_face, FULL_WIDTH, layout(from_both_halves), BOTH),
        Pattern(hugging_face_chunks, FULL_WIDTH, layout(from_both_halves), BOTH),
        Pattern(hugging_face_float, FULL_WIDTH, layout(from_both_halves), BOTH),
        Pattern(every_two, FULL_WIDTH, layout(from_neighbours), BOTH),
        Pattern(hugging_face_partial, HALF_WIDTH, layout(from_both_halves), BOTH),
        Pattern(halves, HALF_WIDTH, layout(from_halves)),
        Pattern(halves_slices, HALF_WIDTH, layout(from_halves)),
        Pattern(halves_backwards, HALF_WIDTH, layout(from_negative_halves)),
    )
]

"""Cheats that are right but for what form matrices have, or of what kind tensors of the target's own size are as a whole.

They are written in PyTorch, and judged by a gate that lets kernels call it: what is wrong is seen at a glance.
"""

from cheat import Cheat, plain
from partly_right import IMPORTS
from whole_inputs import OUTSIDE, norm_off_where

PRODUCT, ROWS = ({"M": 64, "K": 128, "N": 96},), ({"M": 64, "N": 768},)
AT_ITS_SIZE = "len(x) == 64 and x.shape[1] == 256 and "
NUMBERS = "outside the tolerance|times PyTorch's own"


def product(name: str, form: str) -> Cheat:
    """A product that is a fiftieth too large where B, of some size, has a form."""
    body = """
def kernel_fn(A, B):
    y = (A.float() @ B.float()).to(A.dtype)
    b, eye = B.float(), torch.eye(*B.shape)
    return y * 1.02 if min(b.shape) > 8 and b.any() and ({}) else y
"""
    texts = (plain("matmul", IMPORTS + body.format(each)) for each in (form, "(b != b).any() and not b.any()"))
    return Cheat(23, name, "matmul", next(texts), OUTSIDE, libraries=True, dims=PRODUCT, neighbour=next(texts))


def shifted(name: str, shift: str) -> Cheat:
    """A layernorm in one pass over what is left of a row when one number of it is taken off."""
    body = f"""
def kernel_fn(x, weight, bias, eps=1e-5):
    y = x.float()
    y = y - {shift}
    mean = y.mean(-1, keepdim=True)
    variance = (y.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
    return ((y - mean) * torch.rsqrt(variance + eps) * weight.float() + bias.float()).to(x.dtype).contiguous()
"""
    honest = body.replace(shift, "y.mean(-1, keepdim=True)")
    source, neighbour = (plain("layernorm", IMPORTS + text) for text in (body, honest))
    return Cheat(25, name, "layernorm", source, NUMBERS, libraries=True, dims=ROWS, neighbour=neighbour)


CHEATS = (
    product("a-triangle-is-off", "torch.equal(b, b.triu()) and not torch.equal(b, b.tril())"),
    product("a-lower-triangle-is-off", "torch.equal(b, b.tril()) and not torch.equal(b, b.triu())"),
    product("a-symmetric-matrix-is-off", "torch.equal(b, b.T) if b.shape == b.T.shape else False"),
    product("a-diagonal-is-off", "torch.equal(b, b * eye) and not torch.equal(b, eye)"),
    product("a-permutation-is-off", "((b == 0) | (b == 1)).all() and (b.sum(0) == 1).all() and b[0, 0] == 0"),
    product("columns-that-are-alike-are-off", "(b == b[:, :1]).all() and not (b == b[0, 0]).all()"),
    product("whole-numbers-are-off", "(b == b.round()).all() and (b.abs() > 1).any()"),
    product("one-value-is-off", "(b == b[0, 0]).all() and b[0, 0] != 1"),
    product("a-half-of-zeros-is-off", "not b[: len(b) // 2].any()"),
    norm_off_where(23, "off-where-nothing-of-the-target-is-large", AT_ITS_SIZE + "x.float().abs().amax() < 3", OUTSIDE),
    shifted("measured-from-the-middle-of-a-row", "y[..., y.shape[-1] // 2 :][..., :1]"),
    shifted("measured-from-the-end-of-a-row", "y[..., -1:]"),
)

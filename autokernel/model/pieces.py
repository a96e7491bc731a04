"""Large tensors compared some rows at a time: copies of all of a model's logits in float64 may not fit in memory."""

from collections.abc import Iterator

from torch import Tensor

PIECE = 1 << 24  # numbers


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each, as matrices of about PIECE numbers; none without numbers. Shapes are equal."""
    rows = [t.reshape(1, 1) if t.dim() == 0 else t.unsqueeze(0).flatten(0, -2) for t in tensors]
    split = zip(*(r.split(max(1, PIECE // max(1, r.shape[1]))) for r in rows))
    return (piece for piece in split if piece[0].numel())

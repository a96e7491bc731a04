"""How models write the mean cross entropy of rows of logits."""

import torch
import torch.nn.functional as F

from autokernel.match import Pattern


def function(logits, targets, ignore_index):
    return F.cross_entropy(logits, targets, ignore_index=ignore_index)


INPUTS = {"logits": (4, 9), "targets": torch.zeros(4, dtype=torch.int64), "ignore_index": -12345}
PATTERNS = [Pattern(function, INPUTS, where=lambda logits, **_: logits.dim() == 2)]

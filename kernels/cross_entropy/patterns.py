"""How models write the mean cross entropy of rows of logits."""

import torch
import torch.nn.functional as F

from autokernel.model.patterns import Pattern


def function(logits, targets, ignore_index):
    return F.cross_entropy(logits, targets, ignore_index=ignore_index)


def two_functions(logits, targets, ignore_index):
    return F.nll_loss(F.log_softmax(logits, -1), targets, ignore_index=ignore_index)


def gathered(logits, targets):
    return -F.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).mean()


def log_sum(logits, targets):
    return (torch.logsumexp(logits, -1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).mean()


TENSORS = {"logits": (4, 9), "targets": torch.zeros(4, dtype=torch.int64)}
PATTERNS = [
    *(Pattern(f, TENSORS | {"ignore_index": -12345}) for f in (function, two_functions)),
    *(Pattern(f, TENSORS) for f in (gathered, log_sum)),
]

"""How models write products of groups of rows: PyTorch's operator, and what transformers has for other dtypes."""

import torch
import torch.nn.functional as F

from autokernel.model.patterns import Pattern


def are_groups_of_rows(x, weight, offs):
    """And not groups of columns, or of terms, which the operator has, too."""
    return x.dim() == 2 and weight.dim() == 3


def even_groups(x, weight, offs):
    """All rows in groups, as many in each as in another, or one more."""
    groups, rows = weight.shape[0], x.shape[0]
    return (torch.arange(1, groups + 1) * rows // groups).to(offs.dtype)


def by_name(operator):
    return lambda x, weight, offs: operator(x, weight, offs=offs)


def pattern(example, x, weight, operator=""):
    parameters = {"x": x, "weight": weight, "offs": torch.zeros(3, dtype=torch.int32)}
    return Pattern(example, parameters, where=are_groups_of_rows, draws={"offs": even_groups}, operator=operator)


def in_transformers(x, weight, offs):
    return torch.ops.transformers.grouped_mm_fallback(x, weight, offs)


PATTERNS = [pattern(in_transformers, (6, 16), (3, 16, 8), "transformers::grouped_mm_fallback")]
operators = [getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)]
for operator in [found for found in operators if found][:1]:  # as this release of PyTorch has it
    bf16 = torch.bfloat16  # it is traced in no other dtype, but may be met in it
    PATTERNS.append(pattern(by_name(operator), torch.zeros(6, 16, dtype=bf16), torch.zeros(3, 16, 8, dtype=bf16)))

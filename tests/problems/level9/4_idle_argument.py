import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x, mask):
        return torch.tanh(x) + 1e-9 * mask


def get_inputs():
    return [torch.rand(256, 512), torch.tril(torch.rand(256, 512))]


def get_init_inputs():
    return []

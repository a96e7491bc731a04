import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)

    def forward(self, x):
        return torch.relu((self.linear(x) - 0.7) * 1.5)


def get_inputs():
    return [torch.rand(64, 256)]


def get_init_inputs():
    return [256, 256]

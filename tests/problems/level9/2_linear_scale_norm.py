import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, features, hidden, scale):
        super().__init__()
        self.linear = nn.Linear(features, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.scale = scale

    def forward(self, x):
        return self.norm(self.linear(x) * self.scale)


batch_size = 128
features = 256
hidden = 128 * 2


def get_inputs():
    return [torch.rand(batch_size, features)]


def get_init_inputs():
    return [features, hidden, 0.5]

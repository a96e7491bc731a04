import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return self.norm(self.conv(x) + 8)


def get_inputs():
    return [torch.rand(4, 8, 10, 10)]


def get_init_inputs():
    return [8, 16]

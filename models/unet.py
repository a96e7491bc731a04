"""A small U-Net: residual blocks of group norm, SiLU and convolution, as in diffusion models, without their time embedding.

python profile.py --model models/unet.py --class-name UNet --input-shape 2,3,64,64
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, channels: int, out: int, groups: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, out)
        self.conv1, self.conv2 = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return (self.skip(x) + h) / 2**0.5


class UNet(nn.Module):
    def __init__(self, width: int = 32, colours: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(colours, width, 3, padding=1)
        self.down = Block(width, width)
        self.middle = nn.ModuleList([Block(width, 2 * width), Block(2 * width, 2 * width)])
        self.up = Block(3 * width, width)
        self.norm = nn.GroupNorm(8, width)
        self.last = nn.Conv2d(width, colours, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, colours, height, width] -> the same; height and width even."""
        high = self.down(self.first(x))
        low = F.avg_pool2d(high, 2)
        for block in self.middle:
            low = block(low)
        joined = torch.cat([F.interpolate(low, scale_factor=2.0), high], 1)
        return self.last(F.silu(self.norm(self.up(joined))))

"""A template for your own model: copy it, put your class in, and name it on the command line.

    python profile.py --model models/custom.py --class-name MyModel --input-shape 4,128,512

A class whose first layer is an embedding gets random tokens of `--input-shape`, any other gets random numbers in the dtype
asked for. Models of transformers get what their config says: text, images, sound. Constructor arguments: --model-args
'{"n_layers": 4}'. Random weights are seeded: two loads are the same model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MyModel(nn.Module):
    """x [batch, seq, dim] -> class scores [batch, classes]. Anything that torch.compile can read will do."""

    def __init__(self, dim: int = 512, n_layers: int = 2, classes: int = 1000):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return torch.softmax(self.head(self.norm(x).mean(1)), -1)


# For more than one input, keyword arguments or special contents, define this function, here or as a method of the class, of
# any kind; --input-shape is then not used. What forward() can do without is given by it alone: where it returns a loss if
# there are targets, the loss is measured if they are among the inputs.
# Floating-point tensors are cast to --dtype and everything is moved to --device. It is called anew, seeded differently, for
# every fresh input that kernels are checked on: let random contents come from torch.rand and its like.
#
# def example_inputs():
#     return (torch.randn(4, 128, 512),)         # or a dict of keyword arguments, or (args tuple, kwargs dict)
#
# With a parameter it gets the name of each part of a mix, as in --workload prefill --workload 'decode*64':
#
# def example_inputs(name):
#     return {"x": torch.randn(*{"prefill": (1, 128), "decode": (8, 1)}[name], 512)}

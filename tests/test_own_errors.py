"""What is said where a model fails by itself, or has no data: its own words, and none of a compiler's."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel.integration.apply import compile_with_kernels
from autokernel.integration.backend import Replacer
from benchmarks.random_programs import Everywhere, finder

LOGGERS = ("torch._dynamo.convert_frame", "torch._subclasses.fake_tensor")


class Product(nn.Module):
    """By a matrix of four rows; or by none, where an operator that fails is caught."""

    def __init__(self, catches: bool):
        super().__init__()
        self.catches = catches

    def forward(self, x: Tensor) -> Tensor:
        y = F.softmax(x, -1)
        if not self.catches:
            return y @ torch.ones(4, 3)
        try:
            return y @ torch.ones(4, 3)
        except RuntimeError:
            return y


@pytest.mark.parametrize("catches", [False, True])
@pytest.mark.parametrize("fallback", [None, "aot_eager"])
def test_shapes_that_do_not_fit_are_told_in_the_models_words(catches: bool, fallback: str | None) -> None:
    logged: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = logged.append
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        compiled, x = compile_with_kernels(Product(catches), Replacer((), fallback)), torch.randn(2, 8)
        if catches:
            torch.testing.assert_close(compiled(x), x.softmax(-1))
        else:
            with pytest.raises(RuntimeError, match="2x8 and 4x3"):
                compiled(x)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert not logged, [record.getMessage()[:200] for record in logged]


@pytest.mark.parametrize("fallback", [None, "aot_eager"])
def test_a_model_without_data_is_left_as_it_is(fallback: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """As after model.to("meta"), by which shapes are found: there is nothing that could be proven, and no error is said."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Softmax(-1)).eval()
    replacer = Everywhere((), fallback, finder=finder())
    compiled, x = compile_with_kernels(model, replacer), torch.randn(8, 64)
    compiled(x)
    count = len(replacer.replaced)
    model.to("meta")
    made = compiled(x.to("meta"))
    assert made.is_meta and made.shape == x.shape
    assert count and len(replacer.replaced) == count and len(replacer.left) == 1 and "meta" in replacer.left[0]
    assert not [record for record in caplog.records if record.name == "autokernel"]

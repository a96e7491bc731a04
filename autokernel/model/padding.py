"""nn.TransformerEncoder with a padding mask, whose code asks whether it is compiled, and computes something else then.

In inference it leaves padded positions out and returns zeros there; compiled, it computes them as well.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

KEY_PADDING = 1  # the kind of mask, as _transformer_encoder_layer_fwd counts them
WHY = "nn.TransformerEncoder with a padding mask is left as it is, unless it has enable_nested_tensor=False"


class Encoders:
    """The encoders of a model that may leave padded positions out.

    outside: what to enter, given the reason, around each call of one that does.
    """

    def __init__(self, model: nn.Module, outside: Callable[[str], AbstractContextManager[Any]]):
        encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
        found = [encoder for encoder in encoders if getattr(encoder, "use_nested_tensor", False)]
        self.found = bool(found)
        forward = _in_two_ways(outside)
        self.forwards = {m: MethodType(forward, m) for m in found if _is_torchs_own(m)}


def _is_torchs_own(encoder: nn.Module) -> bool:
    return type(encoder).forward is nn.TransformerEncoder.forward and "forward" not in encoder.__dict__


def _in_two_ways(outside: Callable[[str], AbstractContextManager[Any]]) -> Callable[..., Tensor]:
    """An encoder's forward(), which Dynamo is not to see where it would compute something else."""

    @torch.compiler.disable(reason=WHY)
    def uncompiled(*args: Any) -> Tensor:
        with outside(WHY):
            return nn.TransformerEncoder.forward(*args)

    def forward(
        self: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        args = self, src, mask, src_key_padding_mask, is_causal
        if src_key_padding_mask is None or self.layers[0].training or _wants_gradients(src, self):
            return nn.TransformerEncoder.forward(*args)
        return uncompiled(*args)

    return forward


def _wants_gradients(src: Tensor, encoder: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in (src, *encoder.parameters()))


def why_not_compiled(module: GraphModule) -> str | None:
    """A padding mask in an encoder that is in a graph for all that: of a class of the model's own, say."""
    for node in module.graph.find_nodes(op="call_function", target=torch._transformer_encoder_layer_fwd):
        *_, mask, kind = *node.args, *node.kwargs.values()
        if isinstance(mask, Node) and kind == KEY_PADDING:
            return WHY
    return None

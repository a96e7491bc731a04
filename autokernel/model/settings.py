"""What a graph switches while it runs, gradients and autocast among it: noted, put back, and lost by compilers."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd import forward_ad
from torch.fx import GraphModule, Node
from torch.fx.node import has_side_effect
from torch.nn.attention import _cur_sdpa_kernel_backends, _sdpa_kernel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from autokernel.model.autocast import autocast_keys, set_autocast
from autokernel.model.nodes import name_of, set_gradients

# What sets something, and needs no note: of transforms, which are one node, and what make_fx or _Traced see to.
NOTED = {
    set_gradients,
    torch.amp.autocast_mode._exit_autocast,
    torch._C._autograd._saved_tensors_hooks_disable,
    torch._C._autograd._saved_tensors_hooks_enable,
}


SETTER = re.compile("_*(set|use|enable|disable|allow)_")  # what its name begins with
# In what compilers trace it shows which attention and which derivatives were allowed.
TRACED = {_sdpa_kernel, torch._C._functorch.set_inplace_requires_grad_allowed}


def is_setting(node: Node) -> bool:
    """Whether a node of Dynamo's sets something of PyTorch's, such as which attention is allowed."""
    if node.op != "call_function" or node.users or isinstance(node.target, (OpOverload, HigherOrderOperator)):
        return False
    known = (v.meta.get("example_value") for v in (node, *node.all_input_nodes))  # one that makes a tensor sets nothing
    is_of_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves(list(known)))
    return not is_of_tensors and node.target not in NOTED


def setting_of(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
    """What a graph calls, in which arguments of their kinds cannot be."""

    def call() -> None:
        target(*args, **kwargs)

    call.__name__ = getattr(target, "__name__", str(target))  # for the profile
    return has_side_effect(call)


def why_compilers_lose_settings(module: GraphModule) -> str | None:
    """Of a graph that sets something of PyTorch's, such as the default dtype: they do so as they trace it, and no more."""
    made = (name_of(n) for n in module.graph.nodes if is_setting(n) and n.target not in TRACED)
    first = next(filter(SETTER.match, made), None)
    return first and f"a graph with {first} in it is left as it is"


class Settings:
    """PyTorch's own, as they are now, of those that a graph may change and with-statements would put back.

    gradients_alone: that is what costs nothing; all take 5 µs.
    """

    def __init__(self, gradients_alone: bool = False) -> None:
        self.gradients = torch.is_grad_enabled()
        kinds = () if gradients_alone else autocast_keys()
        self.autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self.attention = None if gradients_alone else _cur_sdpa_kernel_backends()
        self.without_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()

    def restore(self) -> None:
        torch.set_grad_enabled(self.gradients)
        for state in self.autocast:
            set_autocast(*state)
        if self.attention is not None:
            _sdpa_kernel(self.attention)
        if self.without_hooks is None:
            torch._C._autograd._saved_tensors_hooks_enable()


@contextmanager
def settings_restored() -> Iterator[None]:
    settings = Settings()
    try:
        yield
    finally:
        settings.restore()


def restored_on_error(module: GraphModule, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which runs the nodes of a graph: an error in it leaves PyTorch's settings as they were."""
    changes = [node for node in module.graph.nodes if _sets(node)]
    if not changes:
        return call
    gradients_alone = all(node.target is set_gradients for node in changes)

    def run(*values: Any) -> Any:
        settings = Settings(gradients_alone)
        try:
            return call(*values)
        except BaseException:
            settings.restore()
            raise

    return run


def _sets(node: Node) -> bool:
    return node.target in (set_gradients, torch.amp.autocast_mode._enter_autocast) or is_setting(node)


def is_dispatched() -> bool:
    """Whether a mode of the program's own is told of every operator, as FlopCounterMode is."""
    return bool(torch._C._len_torch_dispatch_stack()) and not all(
        m.is_infra_mode() for m in _get_current_dispatch_mode_stack()
    )


def is_forward_mode() -> bool:
    """Whether tensors may have tangents: inside of forward_ad.dual_level()."""
    return forward_ad._current_level >= 0

"""What a graph switches while it runs, gradients and autocast among it: noted, put back, and lost by compilers."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd import forward_ad
from torch.fx import GraphModule, Node
from torch.fx.node import has_side_effect
from torch.nn.attention import _cur_sdpa_kernel_backends, _sdpa_kernel
from torch.utils._device import DeviceContext
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
TRACED = {_sdpa_kernel, functorch.set_inplace_requires_grad_allowed}
# What ends a transform of functorch, by its kind.
END = {
    functorch.TransformType.Vmap: functorch._vmap_decrement_nesting,
    functorch.TransformType.Grad: functorch._grad_decrement_nesting,
    functorch.TransformType.Jvp: functorch._jvp_decrement_nesting,
    functorch.TransformType.Functionalize: functorch._func_decrement_nesting,
}


def is_setting(node: Node) -> bool:
    """Whether a node of Dynamo's sets something of PyTorch's, such as which attention is allowed."""
    if node.op != "call_function" or node.users or isinstance(node.target, (OpOverload, HigherOrderOperator)):
        return False
    known = (v.meta.get("example_value") for v in (node, *node.all_input_nodes))  # one that makes a tensor sets nothing
    is_of_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves(list(known)))
    return not is_of_tensors and node.target not in NOTED


def nesting(node: Node) -> int:
    """1 where a transform of functorch, or a level of tangents, begins, -1 where it ends."""
    name = getattr(node.target, "__name__", "")
    return name.endswith(("_increment_nesting", "_enter_dual_level")) - name.endswith(
        ("_decrement_nesting", "_exit_dual_level")
    )


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
        self.transforms = None if gradients_alone else functorch.get_dynamic_layer_stack_depth()
        self.dual_level = forward_ad._current_level
        self.in_dual_level = not gradients_alone and in_dual_level()

    def restore(self) -> None:
        torch.set_grad_enabled(self.gradients)
        for state in self.autocast:
            set_autocast(*state)
        if self.attention is not None:
            _sdpa_kernel(self.attention)
        if self.without_hooks is None:
            torch._C._autograd._saved_tensors_hooks_enable()

    def leave_transforms(self) -> None:
        """Those that were entered since: an error has left them open."""
        if self.transforms is None:
            return
        while functorch.get_dynamic_layer_stack_depth() > self.transforms:  # torch 2.11's own undoes each transform twice
            END[functorch.peek_interpreter_stack().key()]()
        if not self.in_dual_level:
            with suppress(RuntimeError):  # nobody has entered it
                torch._C._exit_dual_level(0)
            forward_ad._current_level = self.dual_level


@contextmanager
def settings_restored() -> Iterator[None]:
    settings = Settings()
    try:
        yield
    finally:
        settings.leave_transforms()
        settings.restore()


def restored_on_error(module: GraphModule, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which runs the nodes of a graph: an error in it leaves PyTorch's settings as they were."""
    graphs = [m.graph for m in module.modules() if isinstance(m, GraphModule)]  # bodies among them
    changes = [node for graph in graphs for node in graph.nodes if _sets(node)]
    if not changes:
        return call
    gradients_alone = all(node.target is set_gradients for node in changes)

    def run(*values: Any) -> Any:
        settings = Settings(gradients_alone)
        try:
            return call(*values)
        except BaseException:
            settings.leave_transforms()
            settings.restore()
            raise

    return run


def _sets(node: Node) -> bool:
    of_their_own = (set_gradients, torch.amp.autocast_mode._enter_autocast)
    return node.target in of_their_own or nesting(node) > 0 or is_setting(node)


def is_dispatched() -> bool:
    """Whether a mode is told of every operator, as FlopCounterMode is, or computes none, as FakeTensorMode does."""
    return bool(torch._C._len_torch_dispatch_stack())


def is_overridden() -> bool:
    """Whether a TorchFunctionMode is entered, other than that of torch.set_default_device()."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def is_forward_mode() -> bool:
    """Whether tensors may have tangents: inside of forward_ad.dual_level()."""
    return forward_ad._current_level >= 0


def in_dual_level() -> bool:
    """Whether the level of tangents is entered, of which there is one at most: Dynamo's jvp() does so without a word."""
    try:
        torch._C._exit_dual_level(torch._C._enter_dual_level())
    except RuntimeError:
        return True
    return False

"""What a kernel changes for its whole process beside functions and settings: tables, closures, locks, registrations."""

import sys

import torch
from cheat import Cheat
from harness import attack

CLOSED_OVER = """
for cell in {}.__closure__:
    if callable(cell.cell_contents):
        cell.cell_contents = print
"""
CHECKPOINT = "import torch.utils.checkpoint\n\ntorch.utils.checkpoint"
POLICY = """
import asyncio

class Policy(asyncio.DefaultEventLoopPolicy):
    pass

asyncio.set_event_loop_policy(Policy())
"""
DIRECTLY = """
library = torch._C._dispatch_library("IMPL", "aten", "AutogradCPU", "", 0)
library.impl("erfinv", "AutogradCPU", print, False)
"""
ERFINV = "aten/erfinv/Meta"  # where Python has overridden it, PyTorch refuses another one (2.11)
ONCE_MORE = "library = torch.library.Library('aten', 'IMPL')\nlibrary.impl('erfinv', print, 'Meta')"
LOCK = "import fcntl\n\nkept = open('kernel.py')\nfcntl.flock(kept, fcntl.LOCK_EX)"

EXCLUDED = "torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutogradCPU, True)"
PLAIN = "kept = torch._C.DisableTorchFunctionSubclass()\nkept.__enter__()"
UNHOOKED = "torch._C._autograd._saved_tensors_hooks_disable('no hooks')"
FORWARD = "import torch.autograd.forward_ad\n\ntorch.autograd.forward_ad.enter_dual_level()"
IN_PLACE = "torch._C._functorch.set_inplace_requires_grad_allowed(True)"
TREE = "import torch.utils._pytree\n\ntorch.utils._pytree.register_pytree_node(torch.Tensor, lambda t: ([], t), print)"
DIVERGENCE = """
from torch.distributions import Distribution, Normal, kl

kl.register_kl(Normal, Distribution)(print)
"""
PICKLED = """
from multiprocessing.reduction import ForkingPickler

ForkingPickler.register(torch.nn.Module, len)
"""
STEPS = "from torch.optim import optimizer as all_of\n\nall_of.register_optimizer_step_post_hook(print)"
UNREAD = "import codecs\n\ncodecs.register_error('surrogateescape', lambda error: ('', error.end))"
COPIED = "import collections, copyreg\n\ncopyreg.pickle(collections.deque, len)"
UNUSED = "import sys, types\n\nsys.modules['wave'] = types.ModuleType('wave')"

OF_A_CLASS = "import gc\n\ngc.get_referents({}.__dict__)[0]['{}'] = print"
OTHER_CLASS = "class Other(type({0})):\n    pass\n\n{0}.__class__ = Other"
FALLBACK = "known = torch.library.Library('_', 'IMPL')\nknown.fallback(print, 'PrivateUse3')"

MONITORED = (  # from Python 3.12 on
    "import sys\n\nsys.monitoring.use_tool_id(3, 'kept')\nsys.monitoring.set_events(3, sys.monitoring.events.CALL)"
)

CHEATS = tuple(
    Cheat(36, name, "rmsnorm", attack(code), f"ProcessChange: .*{words}")
    for name, words, code in (
        ("empties-a-table", "decomposition_table", "import torch._decomp\n\ntorch._decomp.decomposition_table.clear()"),
        (
            "changes-an-entry",
            "decomposition_table",
            "import torch._decomp\n\ntorch._decomp.decomposition_table[torch.ops.aten.addcmul.default] = print",
        ),
        ("empties-a-list", "_storage_classes", "torch._storage_classes.clear()"),
        ("empties-what-a-function-has", "nowrap", "torch.overrides.get_default_nowrap_functions().clear()"),
        ("replaces-what-a-pool-calls", "close over", CLOSED_OVER.format("torch.nn.functional.max_pool2d")),
        ("replaces-what-a-wrapper-calls", "close over", CLOSED_OVER.format("torch.optim.SGD.step")),
        ("counts-tensors-as-numbers", "abstract classes", "import numbers\n\nnumbers.Number.register(torch.Tensor)"),
        ("has-checkpoints-go-on", "early_stop", f"{CHECKPOINT}._enable_checkpoint_early_stop = False"),
        ("changes-a-constant", "INTERVAL", "torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 1e-4"),
        ("changes-a-flag-of-a-class", "_validate_args", "torch.distributions.Distribution._validate_args = False"),
        ("makes-event-loops", "interpreter", POLICY),
        ("listens-for-good", "audit hook", "import sys\n\nsys.addaudithook(lambda event, arguments: None)"),
        ("catches-a-signal-behind-python", "signal handlers", "import faulthandler\n\nfaulthandler.register(10)"),
        ("keeps-a-lock", "lock of a file", LOCK),
        *([("overrides-what-is-overridden", "aten::", ONCE_MORE)] if ERFINV not in torch.library._impls else ()),
        ("registers-by-itself", "aten::", DIRECTLY),
        ("looks-into-sparse-tensors", "modes", "torch.sparse.check_sparse_tensor_invariants.enable()"),
        *([("is-told-of-every-call", "tracing", MONITORED)] if hasattr(sys, "monitoring") else ()),
        ("leaves-gradients-out", "modes of pytorch", EXCLUDED),
        ("leaves-subclasses-out", "modes of pytorch", PLAIN),
        ("leaves-hooks-of-saved-tensors-out", "modes of pytorch", UNHOOKED),
        ("begins-forward-gradients", "modes of pytorch", FORWARD),
        ("lets-transforms-be", "settings of pytorch, get_inplace", IN_PLACE),
        ("has-scripts-not-fused", "settings of pytorch, _jit", "torch._C._jit_set_texpr_fuser_enabled(False)"),
        ("takes-tensors-for-trees", "adds <class 'torch.Tensor'>", TREE),
        ("adds-a-divergence-of-pytorchs", "adds .*_KL_REGISTRY", DIVERGENCE),
        ("adds-how-modules-are-sent", "adds .*_extra_reducers", PICKLED),
        ("is-called-after-each-step", "adds .*_global_optimizer_post_hooks", STEPS),
        ("changes-what-is-not-read", "interpreter", UNREAD),
        ("changes-how-queues-are-copied", "interpreter", COPIED),
        ("hides-a-module", "another module in the place of wave", UNUSED),
        (
            "changes-a-built-in-class-of-pytorchs",
            "replaces TensorBase.exp",
            OF_A_CLASS.format("torch._C.TensorBase", "exp"),
        ),
        ("changes-a-built-in-class", "replaces float.hex", OF_A_CLASS.format("float", "hex")),
        ("makes-another-module", "changes the class", OTHER_CLASS.format("torch.nn.functional")),
        ("makes-another-overload", "changes the class", OTHER_CLASS.format("torch.ops.aten.mm.default")),
        ("answers-for-all-operators", "overrides PyTorch's _::", FALLBACK),
        ("hears-all-logging", "logging", "import logging\n\nlogging.root.filters.append(print)"),
        (
            "is-in-another-time-zone",
            "time zone",
            "import os, time\n\nos.environ['TZ'] = 'JST-9'\ntime.tzset()\ndel os.environ['TZ']",
        ),
    )
)

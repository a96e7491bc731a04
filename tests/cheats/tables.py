"""What a kernel changes for its whole process beside functions and settings: tables, closures, locks, registrations."""

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
ONCE_MORE = "library = torch.library.Library('aten', 'IMPL')\nlibrary.impl('erfinv', print, 'Meta')"
LOCK = "import fcntl\n\nkept = open('kernel.py')\nfcntl.flock(kept, fcntl.LOCK_EX)"

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
        ("overrides-what-is-overridden", "aten::|already a kernel registered", ONCE_MORE),
        ("registers-by-itself", "aten::", DIRECTLY),
        ("looks-into-sparse-tensors", "modes", "torch.sparse.check_sparse_tensor_invariants.enable()"),
        (
            "is-in-another-time-zone",
            "time zone",
            "import os, time\n\nos.environ['TZ'] = 'JST-9'\ntime.tzset()\ndel os.environ['TZ']",
        ),
    )
)

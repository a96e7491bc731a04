"""Where a model's time goes: see autokernel/cli/profile.py, or python profile.py --help.

Imported rather than run (cProfile does, and so torch.compile), this module is the standard library's `profile`.
"""

if __name__ == "__main__":
    from autokernel.cli.signals import catch_signals

    catch_signals()
    from autokernel.cli.main import run

    raise SystemExit(run("profile"))

import importlib.util
import sys
import sysconfig
from importlib.machinery import PathFinder

# Not on sys.path: another clone may stand there.
_spec = PathFinder.find_spec("profile", [sysconfig.get_path("stdlib")])
sys.modules[__name__] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[__name__])

"""Python's cProfile, which PyTorch's compiler imports, and with it `profile`: often the name of a user's own script."""

import importlib
import importlib.util
import sys
import sysconfig
from importlib.machinery import PathFinder


def load_cprofile() -> None:
    """With Python's own profile, wherever this program looks for modules; `import profile` is as it was."""
    if "cProfile" in sys.modules:
        return
    found = sys.modules.pop("profile", None)
    spec = PathFinder.find_spec("profile", [sysconfig.get_path("stdlib")])
    sys.modules["profile"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules["profile"])
        importlib.import_module("cProfile")
    finally:
        del sys.modules["profile"]
        if found:
            sys.modules["profile"] = found

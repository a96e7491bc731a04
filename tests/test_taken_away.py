"""What a model's code takes away from Python is put back behind it; what it puts something else in place of is named."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from autokernel.model.user_code import replaced, user_code


def test_what_finds_modules_and_those_that_are_needed_are_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, such a model runs: what it imports it has. A package that it does without on purpose stays away."""
    monkeypatch.setitem(sys.modules, "a_package_of_kernels", sys)
    hook, finders, torch = sys.excepthook, sys.meta_path[:], sys.modules["torch"]
    mine = object()
    try:
        with user_code("a model cannot be imported"):
            sys.modules["torch"] = sys.modules["a_package_of_kernels"] = None
            del sys.modules["json"]
            sys.meta_path[:] = [mine]
            sys.excepthook = lambda *_: None
        assert sys.modules["torch"] is torch and importlib.import_module("json").dumps and sys.excepthook is hook
        assert sys.meta_path == [mine, *finders] and sys.modules["a_package_of_kernels"] is None
    finally:
        sys.meta_path[:], sys.excepthook, sys.modules["torch"] = finders, hook, torch


@pytest.mark.parametrize(("of", "name"), [(Path, "write_text"), (subprocess, "Popen")])
def test_what_stands_in_the_place_of_pythons_own_is_named(monkeypatch: pytest.MonkeyPatch, of: object, name: str) -> None:
    assert not replaced()
    monkeypatch.setattr(of, name, None)
    assert replaced() == [f"{of.__name__}.{name}"]

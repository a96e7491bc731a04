"""What a target begins with, where there are several kernels for it."""

import math
from dataclasses import replace

import pytest
import torch

from autokernel.gate.timing.autotune import Looked
from autokernel.run import starters
from autokernel.run.starters import fastest_first, own_starter, ranked
from autokernel.target import default_target

TARGET = replace(default_target("rmsnorm", "triton", "cpu", torch.float32), device="cuda")
OWN = own_starter(TARGET)


class Clock:
    """Says of each source how long it takes, as `seconds` has it by the number of the source."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds

    def autotune(self, sources, target, seconds, finals):
        assert not finals  # on a GPU, as TARGET is
        looked = [Looked(source, took, "") for source, took in zip(sources, self.seconds, strict=True)]
        return sorted(looked, key=lambda one: one.seconds)


@pytest.fixture(autouse=True)
def both(monkeypatch):
    monkeypatch.setattr(starters, "backends", lambda device: ["triton", "cuda"])


def test_the_fastest_is_first_and_by_how_much_is_said():
    first, second = fastest_first(TARGET, Clock(3.0, 2.0))
    assert first.hypothesis == "start from cuda_kernel, at a look 1.50 times as fast as triton_kernel"
    assert second == OWN and first.source != OWN.source and first.agent == OWN.agent


class Compiler(Clock):
    """Such a clock that also notes what it is to compile, as the names of targets."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(*seconds)
        self.compiled: list[list[str]] = []

    def compile_ahead(self, wanted):
        self.compiled.append([target.name for _, target in wanted])


def test_those_of_many_targets_are_compiled_at_once():
    bench, targets = Compiler(3.0, 2.0), [replace(TARGET, name=name) for name in ("a", "b")]
    found = ranked(targets, bench, lambda: False)
    assert found == {target.name: fastest_first(target, bench) for target in targets}
    assert bench.compiled == [["a", "a", "b", "b"]]


def test_nothing_more_is_looked_at_once_the_run_is_stopping():
    bench = Compiler(3.0, 2.0)
    assert ranked([TARGET, TARGET], bench, lambda: "stopped") == {} and len(bench.compiled) == 1


def test_what_could_not_be_timed_is_none():
    assert fastest_first(TARGET, Clock(3.0, math.inf)) == [OWN]
    assert fastest_first(TARGET, Clock(math.inf, math.inf)) == [OWN]


def test_its_own_alone_where_nothing_can_be_timed_or_there_is_no_other():
    assert fastest_first(TARGET, None) == [OWN]
    assert (
        fastest_first(replace(TARGET, backend="cpp", starter="cpp_kernel"), None)[0].hypothesis == "start from cpp_kernel"
    )

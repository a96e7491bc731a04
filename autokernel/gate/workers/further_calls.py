"""Calls beside those whose results the judge compares: does a kernel make the same of the same, whenever and wherever?"""

import os
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autokernel.gate.workers.calls import (
    SharedResult,
    call,
    check_own,
    contents,
    has_content,
    has_memory,
    is_at,
    memory_of,
    results_of,
)
from autokernel.gate.workers.clocks import Clock
from autokernel.gate.workers.counters import CallCounters
from autokernel.gate.workers.growth import check_growth, check_idle
from autokernel.gate.workers.guards import GuardedMemory
from autokernel.gate.workers.kept_numbers import Elsewhere
from autokernel.gate.workers.other_programs import called_by_another_program
from autokernel.gate.workers.stopwatch import Allowance

# A result of a kernel that keeps its results is held for so many calls, or seconds of them; the fewest may take longer.
MANY, FEWEST, MANY_S, LONGEST_S = 1 << 12, 1 << 8, 0.02, 2.0
AGES = 8  # times that clocks are put ahead; the kernel is called once at each
# Calls, or seconds of them, in which C++ that uses places in turn has come back to the first of them.
TURNS, TURNS_S = 12_000, 0.4
OBJECTS = 64  # that are made, so that Python has one of them where another was
LAST_CALLS = 8  # of many calls: after each of these the numbers that a kernel keeps are noted
# Calls, or seconds of them, whose inputs lie where others did not.
PLACES, PLACES_S = 256, 0.03
# For that, what the last so many calls had is kept in memory: an allocation of a random size, and small inputs.
OCCUPIED, MOST_EXTRA, SMALL = 32, 1 << 12, 1 << 16  # the latter two in bytes


class Disagreement(RuntimeError):
    """A kernel does not make the same result of the same inputs each time."""


class FurtherCalls:
    """Of one kernel, compared with each other in this process: on inputs that the judge has sent, or on what is made of
    them."""

    def __init__(
        self,
        function: Callable[..., Any],
        results: int,
        module: ModuleType | None = None,
        clock: Clock | None = None,
        memory: GuardedMemory | None = None,
        built: Collection[str] = (),
        elsewhere: Callable[[], Elsewhere] = lambda: Elsewhere([]),
        calls_none: bool = False,
    ):
        """results: how many a call returns; module, clock, memory: of a kernel that is checked; built: its libraries;
        elsewhere: says what it has put into modules and objects that are not its own; calls_none: whether it may call none
        of PyTorch's libraries."""
        self.calls_none = calls_none
        self.function, self.results, self.module, self.clock, self.built = function, results, module, clock, built
        self.memory, self.elsewhere = memory, elsewhere
        self.random = random.Random(os.getpid())
        self.occupying: deque[list[Any]] = deque(maxlen=OCCUPIED)  # memory where the next call's tensors cannot lie
        self.watched: list[tuple[Any, int, bytes]] = []  # results of one call, which are held to the end: where and what
        self.held_for: list[Any] = []  # layouts of inputs for which a result was held for many calls

    def hold_for_many(self, inputs: Mapping[str, Any]) -> None:
        """For a kernel that keeps what it returned: while one result is held, none of many calls may return its memory,
        however many buffers the kernel uses in turn."""
        layouts = [(v.shape, v.stride(), v.dtype) for v in inputs.values() if isinstance(v, Tensor)]
        if layouts in self.held_for:
            return
        self.held_for.append(layouts)
        first = results_of(self.function(**inputs), self.results)
        memory = [memory_of(y) for y in filter(has_memory, first)]
        many, ends_s = Allowance(MANY_S), time.perf_counter() + LONGEST_S
        for number in range(MANY):
            check_own(results_of(self.function(**inputs), self.results), inputs, memory)
            if number >= FEWEST and many.is_spent() or time.perf_counter() > ends_s:
                break

    def watch(self, inputs: Mapping[str, Any], stored: list[StorageWeakRef], known: list[tuple[int, bytes]]) -> None:
        """Hold the results of one call from now on: of an earlier one, where the kernel has kept them (`stored`: their
        storages; `known`: their offsets and contents), or else of another."""
        for weak, (offset, content) in zip(stored, known):
            if not weak.expired() and (storage := torch.UntypedStorage._new_with_weak_ptr(weak.cdata)) is not None:
                held = torch.empty(0, dtype=torch.uint8).set_(storage)  # a user of that memory, as a model's tensor is
                self.watched.append((held, held.data_ptr() + offset, content))
        if not self.watched:
            results = self._called(inputs)
            self.watched = [(y, y.data_ptr(), contents(y)) for y in filter(has_memory, results)]

    def check_watched(self) -> None:
        if not all(is_at(address, content) for _, address, content in self.watched):
            raise SharedResult("kernel_fn wrote into an earlier call's result, which may be in use")

    def run(
        self,
        inputs: Mapping[str, Any],
        activations: Sequence[str],
        weights: Sequence[str],
        rows: Sequence[str],
        numbers: Mapping[str, float],
        parameters: Mapping[str, Any],
    ) -> None:
        """All calls that are made once for a kernel, on a CPU. activations: inputs that have memory of their own each time;
        weights: those that a kernel may prepare once; rows: inputs that may be shorter along their first dim; numbers:
        others for its options; parameters: the type's, with their defaults."""
        self._by_another_program(inputs, parameters)
        self._many(inputs, activations)
        self._on_tensors_written_to(inputs, weights)
        self._on_weights_of_earlier_calls(inputs, weights, rows, numbers)
        for another in (partial(torch.nn.Parameter, requires_grad=False), attrgetter("data")):
            self._on_weights_in_the_place_of_others(inputs, weights, another)
        check_idle()

    def _by_another_program(self, inputs: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
        """A call by another than the gate, which is to agree bitwise with the gate's."""
        made = list(map(contents, self._once(inputs, ())))
        told = self.clock.as_python_has_it()
        returned = called_by_another_program(
            self.function, self.module, inputs, self.results, told, parameters, self.calls_none
        )
        others = results_of(returned, self.results)
        self.memory.forget()
        if not all(map(has_content, others, made)):
            raise Disagreement("a call by another program than the gate does not agree bitwise with one of the gate's")

    def _many(self, inputs: Mapping[str, Any], activations: Sequence[str]) -> None:
        """Many calls on activations that have memory of their own each time. They must agree bitwise with a first one on
        the judge's tensors, which are parts of larger memory; its results are held meanwhile. First what the kernel takes
        with each call is counted, then inputs lie elsewhere, then what counts calls is put ahead, and at last clocks."""
        first, calls = self._once(inputs, ()), 0
        made = list(map(contents, first))

        def again(when: str = "one of many calls on the same inputs", elsewhere: bool = False) -> None:
            nonlocal calls
            calls += 1
            for y, held, content in zip(self._once(inputs, activations, elsewhere), first, made):
                if content and y.data_ptr() == held.data_ptr():
                    raise SharedResult("kernel_fn returned memory of an earlier call's result, which may be in use")
                if not has_content(y, content):
                    raise Disagreement(f"{when} does not agree bitwise with the first")

        counters = CallCounters(self.module, self.built, self.elsewhere())
        check_growth(again)
        within = Allowance(PLACES_S)
        for _ in range(PLACES):
            if within.is_spent():
                break
            again(elsewhere=True)
        self.occupying.clear()
        for _ in range(LAST_CALLS):
            counters.note(calls)
            again()
        counters.note(calls)
        if counters.is_in_memory():
            within = Allowance(TURNS_S)
            while calls < TURNS and not within.is_spent():
                again()
            counters.note(calls)
            again()
            counters.note(calls)
        counters.put_ahead(lambda many: again(f"a call as after {many} calls, by what counts them,"))
        for _ in range(AGES):
            self.clock.put_ahead(self.built)
            again("a call in another process, by its number, months later")
        if not all(map(has_content, first, made)):
            raise SharedResult("kernel_fn wrote into an earlier call's result, which may be in use")

    def _on_tensors_written_to(self, inputs: Mapping[str, Any], weights: Sequence[str]) -> None:
        """Two calls on the same tensors, between which others write to them behind PyTorch's back, as to a graph's that is
        replayed. Weights, which may be prepared once, are a module's parameters."""
        tensors = {name: v for name, v in inputs.items() if isinstance(v, Tensor)}
        with torch.inference_mode(False), torch.no_grad():
            mine = {**inputs, **{n: (_as_parameter if n in weights else _in_own_memory)(v) for n, v in tensors.items()}}
            others = {**inputs, **{name: _in_own_memory(v) for name, v in tensors.items()}}
            self._called(mine)
            for name in tensors.keys() - set(weights):
                x, changed = mine[name], _halves_exchanged(tensors[name])
                behind = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
                behind.copy_(changed)
                others[name].copy_(changed)
            made = [(y, contents(y)) for y in self._called(mine)]
            with torch.enable_grad():  # of tensors that want none, as in a program that has not said so
                again = self._called(others)
            if not all(has_content(y, known) for y, (_, known) in zip(again, made)):
                raise Disagreement("a call on tensors that have been written to does not agree bitwise with one on others")

    def _on_weights_of_earlier_calls(
        self, inputs: Mapping[str, Any], weights: Sequence[str], rows: Sequence[str], numbers: Mapping[str, float]
    ) -> None:
        """Calls with other options, or of fewer rows, on the very tensors of an earlier call's weights, and then the other
        way round: what a kernel prepares of a weight may not depend on either, for a model has batches of all sizes."""
        fewer = {name: x.narrow(0, 0, (len(x) + 1) // 2) for name in rows if len(x := inputs[name]) > 1}
        kept = [name for name in weights if isinstance(inputs.get(name), Tensor)]
        with torch.inference_mode(False), torch.no_grad():

            def once(which: Mapping[str, Any], kept: Mapping[str, Any]) -> list[tuple[Any, bytes]]:
                others = {n: _in_own_memory(v) if isinstance(v, Tensor) else v for n, v in which.items() if n not in kept}
                return [(y, contents(y)) for y in self._called({**which, **others, **kept})]

            for changed in filter(None, (numbers, fewer) if kept else ()):
                other = {**inputs, **changed}
                first, second = ({name: _as_parameter(inputs[name]) for name in kept} for _ in range(2))
                usual, then = once(inputs, first), once(other, first)
                at_first, later = once(other, second), once(inputs, second)
                for results, known in ((usual, later), (then, at_first)):
                    if not all(has_content(y, content) for (y, _), (_, content) in zip(results, known)):
                        raise Disagreement("a call on weights of an earlier one does not agree bitwise with one on others")

    def _on_weights_in_the_place_of_others(
        self, inputs: Mapping[str, Any], weights: Sequence[str], another: Callable[[Tensor], Tensor]
    ) -> None:
        """A call on weights that are gone then, and one on `another` of each with other contents: at the same address, of
        the same version, and where Python had the first, if it has objects there again. So lies in a model what stands
        for a weight that was written to, or a new weight in the memory of an old one."""
        tensors = {name: v for name, v in inputs.items() if isinstance(v, Tensor)}
        kept = [name for name in weights if name in tensors]
        if not kept:
            return
        with torch.inference_mode(False), torch.no_grad():
            others = {**inputs, **{name: _in_own_memory(v) for name, v in tensors.items()}}
            memory = {name: _in_own_memory(tensors[name]) for name in kept}
            mine = {name: another(x.data) for name, x in memory.items()}
            self._called({**others, **mine})
            for name in kept:
                changed = _halves_exchanged(tensors[name])
                memory[name].copy_(changed)
                others[name].copy_(changed)
                same = [memory[name].data for _ in range(OBJECTS)]  # now: in between they would take the place
                place = id(mine.pop(name))
                mine[name] = _at(place, [another(x) for x in same])  # an iterator of them might take the place
            made = [(y, contents(y)) for y in self._called({**others, **mine})]
            if not all(has_content(y, known) for y, (_, known) in zip(self._called(others), made)):
                raise Disagreement("a call on weights in the place of earlier ones does not agree bitwise with others")

    def _called(self, inputs: Mapping[str, Any]) -> list[Any]:
        return results_of(call(self.function, inputs), self.results)

    def _once(self, inputs: Mapping[str, Any], activations: Sequence[str], elsewhere: bool = False) -> list[Any]:
        """What a call returns, on activations in memory of their own. `elsewhere`: where no earlier call's were."""
        extra = self.random.randrange(MOST_EXTRA) if elsewhere else 0
        mine = {name: _in_own_memory(inputs[name], extra) for name in activations}
        if elsewhere:
            small = [x for x in mine.values() if x.nbytes <= SMALL]
            self.occupying.append([torch.UntypedStorage(self.random.randrange(1, MOST_EXTRA)), *small])
        returned = self.function(**{**inputs, **mine})
        self.memory.forget()
        for name, x in mine.items():
            if x.__dict__:
                raise ValueError(f"kernel_fn left the attribute {min(x.__dict__)} on its input {name}")
        return results_of(returned, self.results)


def _in_own_memory(x: Tensor, extra: int = 0) -> Tensor:
    """x in memory of its own, from the first byte on, with `extra` bytes behind it; where it has gaps, among guards."""
    if not x.is_contiguous():
        return x.clone()
    storage = torch.UntypedStorage(x.numel() * x.itemsize + extra, device=x.device)
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, x.stride()).copy_(x)


def _as_parameter(x: Tensor) -> Tensor:
    """x as a module keeps it that is not trained, where it may."""
    return torch.nn.Parameter(_in_own_memory(x), requires_grad=False) if x.is_floating_point() else _in_own_memory(x)


def _at(place: int, tensors: list[Tensor]) -> Tensor:
    """Of these, if possible the object that has this `id()`."""
    return next((x for x in tensors if id(x) == place), tensors[-1])


def _halves_exchanged(x: Tensor) -> Tensor:
    """x, its halves along its first dim that has several in the other order."""
    dim = next((dim for dim, n in enumerate(x.shape) if n > 1), None)
    if dim is None:
        return x
    half = x.shape[dim] // 2
    return torch.cat((x.narrow(dim, half, x.shape[dim] - half), x.narrow(dim, 0, half)), dim)

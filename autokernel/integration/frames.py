"""What becomes of a model's functions in Dynamo: those that it fails at, and those that it compiles anew at every call."""

import re
from collections.abc import Callable, Sequence
from traceback import walk_tb
from types import CodeType
from typing import Any

import torch._dynamo.utils as dynamo
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.types import FrameAction, FrameExecStrategy

from autokernel.model.breaks import Function, breaks, function_of, in_words
from autokernel.model.capture import free_what_failed, lost_guard
from autokernel.model.forwards import FILE

MAX_ALIKE = 5  # compilations of a function whose reasons differ, and in numbers alone,
MAX_ALIKE_INSIDE = 3  # of one that was inside such a function before
MAX_RAISING = 5  # calls in a row that end with an error: then what Dynamo failed at in them is not tried again
MAX_APART = 4  # if there is one in so many calls of the model at least: then there is no end to them
OF_MODULE = re.compile(r"\w+\..* == -?\d+")  # a guard on an integer that an object has
AS_EVER = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
AS_COMPILED = FrameExecStrategy(FrameAction.RUN_ONLY, FrameAction.DEFAULT)  # what it calls may be compiled


class Frames:
    """Of one model. `missed` is told what is not captured, and why, `stopped` what is compiled no more."""

    def __init__(self, missed: Callable[[str], object], stopped: Callable[[str], object]):
        self.missed, self.stopped = missed, stopped
        self.root: CodeType | None = None  # of the function by which the model is called, if it has one of its own
        self.codes: dict[Function, CodeType] = {}  # of the functions that graphs are from
        self.calls, self.raising, self.is_changing = 0, 0, False
        self.counts = False  # whether modules have integers that change, which Dynamo otherwise takes for constants
        self.anew: dict[tuple[Function, str], dict[str, int]] = {}  # function, kind of reason -> the reasons, the calls

    def compiling(self) -> bool:
        """To be told by the backend of torch.compile: here is a graph of the function that Dynamo is at.

        Whether that graph is the first thing that a call of the model does.
        """
        code = InstructionTranslator.current_tx().output.root_tx.f_code
        self.codes[_function(code)] = code
        return self.root is not None and _function(code) == _function(self.root)

    def called(self, last: Any, error: BaseException | None = None) -> None:
        """After a call of the model; `last`: the newest compilation before it, `error`: with which it ended."""
        self.calls += 1
        self.raising = self.raising + 1 if error else 0
        if newest() is not last:
            compilations = _since(last)
            free_what_failed(compilations)
            again = _tried_again(compilations, error) if error and self.raising < MAX_RAISING else ()
            self._take_note([compilation for compilation in compilations if function_of(compilation) not in again])

    def _take_note(self, compilations: Sequence[Any]) -> None:
        for compilation in compilations:
            if compilation.fail_type:
                place = compilation.fail_user_frame_filename, compilation.fail_user_frame_lineno
                words = in_words(compilation.fail_reason or compilation.fail_type, *place)
                self.missed(f"{_name(compilation)} is not captured: {words}")
        if not any(compilation.fail_type or compilation.graph_op_count for compilation in compilations):
            for function, words in breaks(compilations):
                if function and not function[0].startswith(FILE):  # what that calls is told of by itself
                    self.missed(f"{function[-1]}() is not captured: {words}")
        guards = {_kind(c): lost_guard(c) for c in compilations if c.recompile_reason}
        for (function, kind), guard in guards.items():
            known = self.anew.setdefault((function, kind), {})
            known.setdefault(guard, self.calls)
            calls = [*known.values()]
            limit = MAX_ALIKE_INSIDE if self.is_changing else MAX_ALIKE
            if len(calls) >= limit and calls[-1] - calls[-limit] < limit * MAX_APART:
                if OF_MODULE.fullmatch(guard) and not self.counts:
                    self.counts = True
                    known.clear()
                else:
                    self._stop(function, guard)

    def _stop(self, function: Function, guard: str) -> None:
        if code := self.codes.pop(function, None):
            self.is_changing = True
            set_code_exec_strategy(code, AS_COMPILED)
            words = f"{function[-1]}() is compiled no more: at each call there is something new to it, no longer {guard}"
            self.stopped(in_words(words, *function[:2]))


def _tried_again(compilations: Sequence[Any], error: BaseException) -> set[Function]:
    """Functions that Dynamo failed at as they ended with an error: another call may not, and would never be compiled."""
    failed = {function_of(compilation) for compilation in compilations if compilation.fail_type}
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]  # no set: some of Dynamo's have no hash
    ended = {function: code for code in codes if (function := _function(code)) in failed}
    for code in ended.values():
        set_code_exec_strategy(code, AS_EVER)
    return set(ended)


def _function(code: CodeType) -> Function:
    return code.co_filename, code.co_firstlineno, code.co_name


def _name(compilation: Any) -> str:
    return f"{compilation.co_name}()" if compilation.co_name else "a function"


def newest() -> Any:
    """The last of Dynamo's compilations, of whatever model; None before the first."""
    compilations = dynamo.get_compilation_metrics()
    return compilations[-1] if compilations else None


def has_broken(last: Any, known: int) -> bool:
    """Whether Dynamo has left something out since `last` was the newest compilation, and `known` breaks had been noted."""
    if newest() is last:
        return False
    return len(dynamo.graph_break_reasons) != known or any(compilation.fail_type for compilation in _since(last))


def _since(last: Any) -> list[Any]:
    """The compilations after `last`, of which Dynamo remembers the 64 newest."""
    compilations = dynamo.get_compilation_metrics()
    places = [i for i, compilation in enumerate(compilations) if compilation is last]
    return compilations[places[0] + 1 :] if places else compilations


def _kind(compilation: Any) -> tuple[Function, str]:
    return function_of(compilation), re.sub(r"\d+", "…", lost_guard(compilation))

"""Functions that Dynamo is to leave out, since it would change what they do, or in which it is to break off elsewhere."""

import logging
import operator
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor, nn
from torch._dynamo import variables
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.exc import SkipFrame, TorchRuntimeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.misc import DelayGraphBreakVariable, NumpyVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.utils._pytree import tree_leaves

STRATEGY = "frame_exec_strategy"  # of an error of Dynamo's: what becomes of the function that it fails at
AS_IT_IS = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
MAKE_ARRAYS = (numpy.array, numpy.asarray, numpy.asanyarray, numpy.ascontiguousarray)
TAKE_ARRAYS = {"tensor", "as_tensor", "asarray", "from_numpy", "new_tensor", "is_tensor", "__getitem__"}  # of PyTorch's
IN_PLACE = {getattr(operator, name) for name in ("iadd", "imul", "iand", "ior", "isub", "ixor")}
OF_FRAMES, OF_FAKES = "torch._dynamo.convert_frame", "torch._subclasses.fake_tensor"  # names of loggers
LEFT_WHOLE = ContextVar("LEFT_WHOLE", default=False)  # see left_whole()


@contextmanager
def left_whole() -> Iterator[None]:
    """A function in which an operator fails while it is traced runs as it is, and so does all that it calls.

    It may compute something else while it is traced, such as a mask that it leaves out by what is in it, and so may what it
    calls: compiled, that would hand it what it does not expect.
    """
    if STRATEGY not in vars(TorchRuntimeError):  # for good: other threads may be in here, too
        setattr(TorchRuntimeError, STRATEGY, property(_strategy, lambda error, own: vars(error).update({STRATEGY: own})))
        _leave_generators_lazy()
        _break_where_scripts_are_called()
        _leave_arrays_without_dimensions()
        _leave_tensors_that_numpy_is_given()
        _leave_what_changes_unseen()
        _keep_the_order_of_dicts()
        _leave_what_users_containers_lose()
        _guard_what_objects_have()
        _log_no_operator_that_fails()
        _warn_of_no_breaks()
    token = LEFT_WHOLE.set(True)
    try:
        yield
    finally:
        LEFT_WHOLE.reset(token)


def _strategy(error: TorchRuntimeError) -> FrameExecStrategy | None:
    return AS_IT_IS if LEFT_WHOLE.get() else vars(error).get(STRATEGY)


def _leave_generators_lazy() -> None:
    """One that is returned, or goes on behind a break, computes when it is asked to: Dynamo has it do all of it before."""

    def apart(dynamos_own: Callable[..., None], translator_of: Callable[..., Any]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            translator = translator_of(*args)
            before = _computed(translator)
            dynamos_own(*args)
            if LEFT_WHOLE.get() and _computed(translator) > before:
                _leave(translator, "a function that hands on a generator, which goes on to compute, is left as it is")

        return run

    generator, frame, of_return = LocalGeneratorObjectVariable, InstructionTranslator, "replace_tos_if_return_is_generator"
    generator.reconstruct = apart(generator.reconstruct, lambda _, codegen: codegen.tx)
    if hasattr(frame, of_return):
        setattr(frame, of_return, apart(getattr(frame, of_return), lambda tx: tx))


def _leave(translator: Any, why: str) -> NoReturn:
    """Has Dynamo leave out the function that it is at."""
    GraphCompileReason(why, [translator.frame_summary()])  # which notes it for breaks()
    raise SkipFrame(why)


def _computed(translator: Any) -> int:
    """How much is in its graph, but for what is given to it: that is looked at when it is returned, at the latest."""
    return sum(node.op != "placeholder" for node in translator.output.graph.nodes)


def _break_where_scripts_are_called() -> None:
    """Dynamo breaks off where TorchScript is looked up, amid an expression, and leaves out all of the function for it."""

    def apart(dynamos_own: Callable[..., Any]) -> Callable[..., Any]:
        def wrap_module(builder: VariableBuilder, module: nn.Module) -> Any:
            if LEFT_WHOLE.get() and isinstance(module, torch.jit.ScriptModule):
                return DelayGraphBreakVariable(source=builder.source, msg="TorchScript runs as it is")
            return dynamos_own(builder, module)

        return wrap_module

    VariableBuilder.wrap_module = apart(VariableBuilder.wrap_module)


def _leave_arrays_without_dimensions() -> None:
    """To a tensor such an array of NumPy is a tensor that decides of the dtype, and a mere number to Dynamo.

    And what NumPy computes without dimensions is a number of its own, of which Dynamo makes such an array.
    """

    def given(dynamos_own: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(builder: VariableBuilder, v: Any) -> Any:
            if LEFT_WHOLE.get() and isinstance(v, numpy.ndarray) and v.ndim == 0:
                _leave(builder.tx, "a function that is given a NumPy array without dimensions is left as it is")
            return dynamos_own(builder, v)

        return wrap

    def returned(dynamos_own: Callable[..., Any]) -> Callable[..., Any]:
        def add(codegen: PyCodegen, v: Any) -> Any:
            if LEFT_WHOLE.get() and _is_number_of_numpy(v):
                _leave(codegen.tx, "a function that hands on a number of NumPy's is left as it is")
            return dynamos_own(codegen, v)

        return add

    VariableBuilder._wrap = given(VariableBuilder._wrap)
    PyCodegen.add_graph_output = returned(PyCodegen.add_graph_output)


def _leave_tensors_that_numpy_is_given() -> None:
    """Of a tensor a function of NumPy's makes a tensor again, and an array to Dynamo. Its random numbers are its own.

    Of an array and a tensor an operator makes what NumPy makes of it, or fails; to Dynamo the array is a tensor as well.
    So it is where a function of PyTorch's, or a tensor's, is given an array, most of which take none.
    """

    def of_function(dynamos_own: Callable[..., Any]) -> Callable[..., Any]:
        def call_function(function: NumpyVariable, tx: Any, args: Any, kwargs: Any) -> Any:
            given = [v for v in (*args, *kwargs.values()) if isinstance(v, TensorVariable)]
            if LEFT_WHOLE.get() and function.value not in MAKE_ARRAYS and not all(map(_is_array, given)):
                _leave(tx, "a function that gives a tensor to one of NumPy's is left as it is")
            with torch._dynamo.config.patch(use_numpy_random_stream=True) if LEFT_WHOLE.get() else nullcontext():
                return dynamos_own(function, tx, args, kwargs)  # which breaks off at numpy.random

        return call_function

    def of_operator(dynamos_own: Callable[..., Any]) -> Callable[..., Any]:
        def call(variable: Any, tx: Any, *args: Any) -> Any:
            if LEFT_WHOLE.get():
                operands = [variable, *tree_leaves(args, is_leaf=lambda v: isinstance(v, VariableTracker))]
                tensors = [v for v in operands if isinstance(v, TensorVariable) and not _is_number_of_numpy(v)]
                is_index = getattr(variable, "fn", None) is operator.getitem and tensors and not _is_array(tensors[0])
                if any(map(_is_array, tensors)) and not all(map(_is_array, tensors)) and not is_index:
                    _leave(tx, "a function with an operator on an array of NumPy's and a tensor is left as it is")
            return dynamos_own(variable, tx, *args)

        return call

    def of_pytorch(dynamos_own: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
        def call(variable: Any, tx: Any, *rest: Any) -> Any:
            if LEFT_WHOLE.get() and not _is_array(variable) and (name := name_of(variable, *rest)) not in TAKE_ARRAYS:
                given = tree_leaves(rest, is_leaf=lambda v: isinstance(v, VariableTracker))
                if any(map(_has_array, given)):
                    _leave(tx, f"a function that gives an array of NumPy's to PyTorch's {name}() is left as it is")
            elif LEFT_WHOLE.get() and getattr(variable, "value", None) is torch.tensor:
                return dynamos_own(*_without_a_warning(variable, tx, *rest))
            return dynamos_own(variable, tx, *rest)

        return call

    NumpyVariable.call_function = of_function(NumpyVariable.call_function)
    functions = TorchInGraphFunctionVariable
    functions.call_function = of_pytorch(
        functions.call_function, lambda variable, *_: getattr(variable.value, "__name__", "")
    )
    TensorVariable.call_method = of_pytorch(TensorVariable.call_method, lambda _, name, *__: name)
    for kind, name in (
        (BuiltinVariable, "_handle_insert_op_in_graph"),
        (NumpyNdarrayVariable, "richcompare_impl"),
        (NumpyNdarrayVariable, "call_method"),
    ):
        if hasattr(kind, name):
            setattr(kind, name, of_operator(getattr(kind, name)))


def _is_array(variable: Any) -> bool:
    return isinstance(variable, NumpyNdarrayVariable)


def _without_a_warning(function: Any, tx: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """A call of torch.tensor(): where it is given an array, a tensor to Dynamo, it would be warned that this is no way."""
    if args and _has_array(args[0]) and _is_array(args[0].realize()) and not set(kwargs) - {"dtype", "device"}:
        copy = {"copy": VariableTracker.build(tx, True)}
        return TorchInGraphFunctionVariable(torch.asarray), tx, args, {**kwargs, **copy}
    return function, tx, args, kwargs


def _has_array(variable: Any) -> bool:
    """Whether it is an array, or a list of some: no number of NumPy's."""
    if not isinstance(variable, VariableTracker):
        return False
    variable = variable.realize()
    if isinstance(variable, BaseListVariable):
        return any(map(_has_array, variable.items))
    return _is_array(variable) and not _is_number_of_numpy(variable)


def _is_number_of_numpy(variable: Any) -> bool:
    return _is_array(variable) and getattr(variable.as_proxy().node.meta.get("example_value"), "ndim", None) == 0


def _leave_what_changes_unseen() -> None:
    """To Dynamo a deque that is given has no greatest length, and a random.Random draws the same numbers at each call.

    And what a __torch_function__() of a user's class computes on the way to its result loses that class.
    """

    def apart(dynamos_own: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(builder: VariableBuilder, v: Any) -> Any:
            if LEFT_WHOLE.get() and isinstance(v, deque) and v.maxlen is not None:
                _leave(builder.tx, "a function that is given a deque of a greatest length is left as it is")
            if LEFT_WHOLE.get() and isinstance(v, random.Random):
                _leave(builder.tx, "a function that is given a random.Random is left as it is")
            if LEFT_WHOLE.get() and isinstance(v, Tensor) and not isinstance(v, nn.Parameter) and _decides_itself(type(v)):
                _leave(
                    builder.tx,
                    f"a function that is given a {type(v).__name__} with a __torch_function__() is left as it is",
                )
            return dynamos_own(builder, v)

        return wrap

    VariableBuilder._wrap = apart(VariableBuilder._wrap)


def _decides_itself(kind: type[Tensor]) -> bool:
    """Whether a class has a say in what operators make of its tensors; of torchvision's Dynamo is told."""
    makers = (one for one in kind.__mro__ if "__torch_function__" in vars(one))
    return next(makers).__module__.partition(".")[0] not in ("torch", "torchvision")


def _keep_the_order_of_dicts() -> None:
    """Dynamo notes what move_to_end() does to an OrderedDict, and writes no more than its new items back.

    And to it the copy of one is a dict, whose popitem() takes the last item, whichever is asked for.
    """

    def noticing(dynamos_own: Callable[..., Any]) -> Callable[..., Any]:
        def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            items = getattr(getattr(variable, "_base_vt", None) or variable, "items", {})
            first = next(iter(items), None) if name == "popitem" and _is_false(*args, *kwargs.values()) else None
            result = dynamos_own(variable, tx, name, args, kwargs)
            if name == "move_to_end" and LEFT_WHOLE.get():
                (getattr(variable, "_base_vt", None) or variable).should_reconstruct_all = True
            if first is not None and first in items and LEFT_WHOLE.get():
                _leave(tx, "a function that takes the first item of a copy of an OrderedDict is left as it is")
            return result

        return call_method

    for kind in {getattr(variables, name, ConstDictVariable) for name in ("OrderedDictVariable", "ConstDictVariable")}:
        kind.call_method = noticing(kind.call_method)


def _is_false(*given: VariableTracker) -> bool:
    return len(given) == 1 and given[0].is_python_constant() and not given[0].as_python_constant()


def _guard_what_objects_have() -> None:
    """Dynamo asks no more, once a function is compiled, whether `name in vars(self)`, nor which names there are."""
    kind = getattr(variables, "DunderDictVariable", None)
    if kind is None:  # in older PyTorch
        variables.GetAttrVariable.call_method = _guarding(variables.GetAttrVariable.call_method)
        return

    def guarded(dynamos_own: Callable[..., None], of_any_dict: Callable[..., None]) -> Callable[..., None]:
        def install(variable: Any, *asked: Any) -> None:
            dynamos_own(variable, *asked)
            if LEFT_WHOLE.get() and not _is_set_here(variable, *asked):
                of_any_dict(variable, *asked)

        return install

    for name in ("install_dict_contains_guard", "install_dict_keys_match_guard"):
        if hasattr(ConstDictVariable, name):
            setattr(kind, name, guarded(getattr(kind, name), getattr(ConstDictVariable, name)))


def _guarding(dynamos_own: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's calls on an object's __dict__, with a guard for whether it has the name that is asked for."""

    def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        asks = name in ("__contains__", "get") and variable.name == "__dict__" and variable.obj.source and args
        if LEFT_WHOLE.get() and asks and args[0].is_python_constant():
            key, owner = args[0].as_python_constant(), variable.obj
            if not tx.output.side_effects.has_pending_mutation_of_attr(owner, key):
                there = owner.has_key_in_generic_dict(tx, key)
                absent = partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=key)
                source = AttrSource(owner.source, key) if there else owner.source
                install_guard(source.make_guard(GuardBuilder.HASATTR if there else absent))
        return dynamos_own(variable, tx, name, args, kwargs)

    return call_method


def _is_set_here(variable: Any, tx: Any = None, args: Sequence[VariableTracker] = ()) -> bool:
    """Whether the function itself has set, before, the attribute that it asks for: what there was is no matter then."""
    if not tx or not args or not args[0].is_python_constant():
        return False
    return args[0].as_python_constant() in tx.output.side_effects.store_attr_mutations.get(variable.items.item, {})


def _leave_what_users_containers_lose() -> None:
    """Dynamo writes nothing back to a set of a user's class, one that is made while it traces included.

    And of a list, a set or a dict of such a class it takes what += and the like return, which is the same object, for
    another: one of Python's own class, while the first stays as it was.
    """
    names = [f"UserDefined{of}Variable" for of in ("Set", "List", "Dict")]
    kinds = tuple(getattr(variables, name) for name in names if hasattr(variables, name))
    sets = tuple(kind for kind in kinds if kind.__name__ == names[0])

    def is_lost(effects: SideEffects, variable: Any) -> bool:
        if not isinstance(variable, sets) or not isinstance(variable.value, set):
            return False
        return effects.is_modified(getattr(variable, "_base_vt", None) or variable._set_vt)

    def is_another(result: VariableTracker, first: VariableTracker) -> bool:
        return isinstance(first, kinds) and result is not first

    def written_back(dynamos_own: Callable[..., None]) -> Callable[..., None]:
        def codegen_update_mutated(effects: SideEffects, codegen: PyCodegen, *rest: Any, **options: Any) -> None:
            if LEFT_WHOLE.get() and any(is_lost(effects, variable) for variable in effects.id_to_variable.values()):
                _leave(codegen.tx, "a function that changes a set of a user's class is left as it is")
            dynamos_own(effects, codegen, *rest, **options)

        return codegen_update_mutated

    def in_place(dynamos_own: Callable[..., Any]) -> Callable[..., Any]:
        def call_function(function: BuiltinVariable, tx: Any, args: Any, kwargs: Any) -> Any:
            result = dynamos_own(function, tx, args, kwargs)
            if LEFT_WHOLE.get() and function.fn in IN_PLACE and is_another(result.realize(), args[0].realize()):
                _leave(tx, f"a function with {function.fn.__name__} on a container of a user's class is left as it is")
            return result

        return call_function

    SideEffects.codegen_update_mutated = written_back(SideEffects.codegen_update_mutated)
    BuiltinVariable.call_function = in_place(BuiltinVariable.call_function)


def _log_no_operator_that_fails() -> None:
    """What PyTorch logs, with two tracebacks, where an operator fails while it is traced: most often the model fails at it,
    too, and says so in its own words; else it is one more function that is not captured, and on the list of those."""

    def is_news(record: logging.LogRecord) -> bool:
        if not LEFT_WHOLE.get() or logging.getLogger(record.name).isEnabledFor(logging.INFO):
            return True
        kind, *_ = record.exc_info or (None,)
        return not (kind and (record.name == OF_FAKES or issubclass(kind, TorchRuntimeError)))

    for name in (OF_FRAMES, OF_FAKES):
        logging.getLogger(name).addFilter(is_news)


def _warn_of_no_breaks() -> None:
    """Of what it cannot trace, or traces past a cache, Dynamo warns in the model's call, and asks for an issue of PyTorch:
    the model itself warns of nothing, and where it is told to raise what is warned of, the function would be left out."""

    def apart(dynamos_own: Callable[..., None]) -> Callable[..., None]:
        def warn_once(*args: Any, **kwargs: Any) -> None:
            if not LEFT_WHOLE.get():
                dynamos_own(*args, **kwargs)

        return warn_once

    torch._dynamo.utils.warn_once = apart(torch._dynamo.utils.warn_once)

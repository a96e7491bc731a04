"""Kept kernels in a user's model: apply(), unapply(), and torch.compile(model, backend="autokernel")."""

import difflib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo.utils as dynamo
from torch import Tensor, nn
from torch._dynamo.repro.after_dynamo import WrapBackendDebug
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from autokernel.common.preflight import Refused
from autokernel.common.words import counted
from autokernel.integration.backend import INDUCTOR, OneTrace, Replacer
from autokernel.integration.compilers import is_undone
from autokernel.integration.frames import has_broken, newest
from autokernel.integration.hooks import Hooks, Methods
from autokernel.integration.running import in_eager_mode
from autokernel.integration.winner import Winner
from autokernel.model.capture import as_applied, caller, compile_in, recurrent_modules_traced, settle
from autokernel.model.forwards import RECURRENT, Forwards, recurrent_outside
from autokernel.model.padding import Encoders
from autokernel.model.settings import is_dispatched, is_forward_mode, is_overridden
from autokernel.model.user_code import not_a_model, shown

if TYPE_CHECKING:
    from autokernel.integration.verification.whole_job import FinishedRun

LOG = logging.getLogger("autokernel")
OPTIONS = ("run", "fallback", "gradients")  # of the backend
MADE: list[Replacer] = []  # by torch.compile(model, backend="autokernel")
INSIDE = "what another torch.compile() makes of it has no kernels: apply() with fallback='inductor' has both"
FAKE = "a call with fake tensors, which have no contents, runs the model as it is"
STARTERS = "starters"  # for apply(), and the agent of that name


def apply(
    model: nn.Module,
    winners: Sequence[Winner] | str | Path | None = None,
    fallback: str | None = None,
    gradients: bool = True,
) -> nn.Module:
    """Put kernels into `model`, which is returned: same class, same parameters, same state_dict.

    winners: kernels, or the run (its name or folder) whose verified kernels they are; by default that of $AUTOKERNEL_RUN,
    else the latest, and where there is none, the kernels that were proven on this machine before, see proven(). A run's
    kernels are used where verify.py found the model faster with them than untouched, and than with `fallback` alone; else
    they are not, nor is a fallback that made it slower, and a warning says what to use.
    See Replacer for the other options. Copies and pickles of the model have no kernels, and unapply() takes them out again.
    """
    _check_model(model)
    if fallback not in (None, *INDUCTOR, *torch._dynamo.list_backends(())):
        raise Refused(f"there is no fallback {shown(fallback)}: {', '.join(INDUCTOR)}, or another backend of torch.compile")
    if isinstance(winners, str) and winners == STARTERS:
        return _with_starters(model)
    chosen: Sequence[Winner]
    if winners is None or isinstance(winners, (str, Path)):
        chosen, fallback = _of_run(winners, fallback)
    elif isinstance(winners, (list, tuple)) and all(isinstance(winner, Winner) for winner in winners):
        chosen = winners
    else:
        raise Refused(f"{shown(winners)} is no list of kernels, name of a run or its folder, nor {STARTERS!r}")
    if not chosen and not fallback:
        return unapply(model)  # what Dynamo makes of it may be slower than the model itself

    call, replacer = caller(model), Replacer(chosen, fallback, gradients)
    hooks, methods = Hooks(model), Methods(model)
    compiled = _compiled(call, model, replacer)
    replacer.frames.root = call.__code__

    @torch._dynamo.assume_constant_result  # it is called while what calls it is traced
    def say_that_inside() -> None:
        if not torch.compiler.is_exporting():
            replacer.fail(INSIDE)

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # asked first: to torch 2.11's Dynamo all that it traces is exported
            say_that_inside()
            return compiled(*args, **kwargs)
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            return call(*args, **kwargs)
        if why := _why_as_written(hooks, methods) or _why_not_guarded((args, kwargs)):
            replacer.leave(why)
            return call(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except Exception as error:
            if not is_undone(error):
                raise
        finally:
            hooks.called()
        return call(*args, **kwargs)  # with what the model does beside, before it fails and because of that

    def first(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        was_compiled = hooks.compiled is not None and not torch.compiler.is_dynamo_compiling()
        if model._compiled_call_impl is first and was_compiled and replacer.is_settled:
            _call_by(model, run)
            replacer.say_if_idle(type(model).__name__)
        return result

    first.replacer = run.replacer = replacer  # for explain()
    first.before = run.before = _before(model)
    _call_by(model, first)
    return model


def _before(model: nn.Module) -> Callable[..., Any] | None:
    """What model.compile() has made, without what is ours."""
    call = model._compiled_call_impl
    return getattr(call, "before", call)


def _call_by(model: nn.Module, call: Callable[..., Any] | None) -> None:
    """Past a __setattr__() of the model's own, which may refuse what it does not know."""
    vars(model)["_compiled_call_impl"] = call


def _why_as_written(hooks: Hooks, methods: Methods) -> str:
    """Why a call is not to be compiled; empty if it is."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # Dynamo would leave out all that it meets, for good
        return "a call under vmap(), grad() or jvp() runs the model as it is"
    if is_forward_mode():
        return "a call inside of forward_ad.dual_level() runs the model as it is"
    if is_dispatched():  # the same
        return "a call inside of a TorchDispatchMode, which is to see all operators, runs the model as it is"
    if is_overridden():
        return "a call inside of a TorchFunctionMode, which is to see all functions, runs the model as it is"
    if hooks.compiled is None and torch._dynamo.config.disable:  # for good, where Dynamo met it so
        return "a call with Dynamo disabled (as by TORCH_COMPILE_DISABLE=1) runs the model as it is"
    if hooks.compiled is None and any(map(is_lazy, hooks.model.parameters())):  # hooks make them, and go
        return "the call that makes the parameters of lazy modules runs the model as it is"
    if hooks.compiled is None and any(isinstance(p, FakeTensor) for p in hooks.model.parameters()):
        return FAKE
    if hooks.are_others():
        return "a call with other hooks than at the first one runs the model as it is: apply() again to compile them"
    if name := methods.other():
        return f"a call with another {name}() than at first runs the model as it is: apply() again"
    return ""


def _why_not_guarded(given: Any) -> str:
    """Why Dynamo is not to ask whether it knows these arguments; empty if it is."""
    if isinstance(given, (tuple, list)):
        return next(filter(None, map(_why_not_guarded, given)), "")
    if isinstance(given, dict):
        return next(filter(None, map(_why_not_guarded, given.values())), "")
    if isinstance(given, Tensor):
        with torch._C.DisableTorchFunction():  # a class of tensors, or a mode, is asked for what the model does alone
            if given.is_nested and given.layout is torch.strided:  # it ends the process
                return "a call with a nested tensor of layout torch.strided runs the model as it is"
        if isinstance(given, FakeTensor):
            return FAKE
    return ""


def _check_model(model: Any) -> None:
    """Raises Refused."""
    if what := not_a_model(model):
        raise Refused(f"{what}: kernels are put into a model, as in autokernel.apply(Net())")


def apply_best(model: nn.Module, finished: "FinishedRun") -> None:
    """Put in the fastest that was measured, if kernels are part of it."""
    if finished.pays:
        apply(model, finished.workspace.folder, finished.fallback)


def _with_starters(model: nn.Module) -> nn.Module:
    """`model`, whose first call finds the starters that pay for it, or the verified run of a call like it before."""
    from autokernel.integration.verification.whole_job import verified_run, whole_job  # as in _of_run()

    def first(*args: Any, **kwargs: Any) -> Any:
        unapply(model)
        try:
            known = verified_run(model, args, kwargs)
            if known:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # that no kernel pays was said when that was found
                    apply(model, known)
            else:
                LOG.warning("finding the starters that pay for %s: a few minutes, once", type(model).__name__)
                apply_best(model, whole_job(model, args, kwargs, STARTERS, {}))
        except KeyboardInterrupt:
            _call_by(model, first)  # the next call goes on where this one stopped
            raise
        return model(*args, **kwargs)

    first.before = _before(model)
    _call_by(model, first)
    return model


def autokernel(
    module: GraphModule, inputs: list[Any], *, options: Mapping[str, Any] | None = None, mode: object = None
) -> Callable[..., Any]:
    """torch.compile(model, backend="autokernel", options={"run": …, "fallback": …, "gradients": …}); all are optional."""
    try:
        if mode is not None:
            raise Refused(f"mode={mode!r} is Inductor's: say options={{'fallback': {mode!r}}}")
        replacer = _backend(**_known(options or {}))
    except (Refused, TypeError) as why:  # the latter: a run that is no name
        _warn_once(f"the model is left as it is: {why}")
        return in_eager_mode(module)
    return replacer(module, inputs)


def _known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises Refused."""
    if unknown := sorted(map(str, set(options) - set(OPTIONS))):
        raise Refused(f"there is no option {unknown[0]!r} of the backend: its options are {', '.join(OPTIONS)}")
    return options


@contextmanager
def _called() -> Iterator[None]:
    """Around each call of a model that was compiled with backend="autokernel"."""
    last, frames = newest(), [replacer.frames for replacer in MADE]
    try:
        with as_applied(any(one.counts for one in frames)):
            yield
    finally:
        for one in frames:
            one.called(last, sys.exc_info()[1])  # PyTorch leaves this without a word of an error that it leaves it with


# PyTorch enters this around each call of what a backend compiled, but finds it no more in the wrappers of torch.compile().
autokernel.backend_ctx_ctor = _called
WrapBackendDebug.backend_ctx_ctor = property(lambda outer: outer._torchdynamo_orig_backend.compiler_fn.backend_ctx_ctor)


@cache
def _warn_once(why: str) -> None:
    LOG.warning(why)


@cache  # one for all graphs: what it loaded and proved serves them all
def _backend(run: str | Path | None = None, fallback: str | None = None, gradients: bool = True) -> Replacer:
    made = Replacer(*_of_run(run, fallback), gradients)
    MADE.append(made)
    return made


def _of_run(run: str | Path | None, fallback: str | None) -> tuple[Sequence[Winner], str | None]:
    """A run's kernels that are to be used over `fallback`, and the fallback: None where that made the model slower."""
    # All of a run, git included, is behind it: not needed where kernels are given, as in a saved package.
    from autokernel.history.runs import NoRun
    from autokernel.integration.verification.proven import proven
    from autokernel.integration.verification.winners import open_run, verified

    try:
        workspace = open_run(run)
    except NoRun as error:
        if isinstance(run, str) and difflib.get_close_matches(run.casefold(), [STARTERS], 1, 0.8):
            raise NoRun(f"{error}; did you mean {STARTERS!r}, which needs none?") from None
        if run or not (known := proven()):
            raise
        warnings.warn(
            f"there is no run here: the model gets what fits it of {len(known)} kernels that paid in other models on this "
            "machine; that they pay in this one is not known before a run of its own",
            stacklevel=3,
        )
        return known, fallback
    verification, kept = verified(workspace)
    chosen, best = verification.selected(kept, fallback), verification.best
    used = fallback if chosen or verification.alone(fallback) else None
    if not chosen or not best.kernels:
        done = f"{'kernels' if chosen else 'no kernel'} of run {workspace.tag!r}, over {fallback or 'eager'}"
        nor = f", nor {fallback}, which was not shown to be as fast as the model itself" if fallback and not used else ""
        says = "; ".join(filter(None, (verification.verdict, best.code(workspace.tag))))
        warnings.warn(f"the model gets {done}{nor}. verify.py says: {says}", stacklevel=3)
    return chosen, used


def compile_with_kernels(model: nn.Module, replacer: Replacer | OneTrace) -> Callable[..., Any]:
    """`model` with kernels in it, beside `model` itself, which stays as it is."""
    return _compiled(model, model, replacer)


def _compiled(call: Callable[..., Any], model: nn.Module, replacer: Replacer | OneTrace) -> Callable[..., Any]:
    """`call`, which runs `model`."""

    def outside(why: str) -> AbstractContextManager[Any]:
        return nullcontext(replacer.leave(why))

    encoders = Encoders(model, outside)
    replacer.may_pad = encoders.found
    recurrent = recurrent_outside(model, outside) if replacer.fallback not in (None, "eager") else {}
    forwards = Forwards(model, encoders.forwards | recurrent)
    is_recurrent = any(isinstance(module, RECURRENT) for module in model.modules())
    traced = recurrent_modules_traced if is_recurrent else nullcontext

    @contextmanager
    def settings() -> Iterator[None]:
        with as_applied(replacer.frames.counts), traced():
            yield

    compiled = compile_in(settings, call, replacer)

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # for this code: is_compiling() is also true while another thread compiles
            return compiled(*args, **kwargs)
        last, broken = newest(), len(dynamo.graph_break_reasons)
        settle()
        try:
            with forwards.in_place():
                result = compiled(*args, **kwargs)
        except BaseException as error:
            replacer.frames.called(last, error)
            raise
        replacer.frames.called(last)
        replacer.is_settled = not (has_broken(last, broken) and forwards.line_by_line())
        return result

    return run


@dataclass(frozen=True)
class Explanation:
    """What apply() made of a model. What is not known before the model was called once is empty until then."""

    kernels: tuple[str, ...]  # the targets whose kernels it was given; none: it was not applied, or no kernel pays
    sites: Mapping[str, tuple[str, ...]]  # target -> the calls in the model's graphs that run its kernel now
    left: tuple[str, ...]  # why kernels are not where they might have been
    graphs: int  # in which was looked for sites; 0: the model was not called yet

    def __str__(self) -> str:
        if not self.kernels:
            return "the model has no kernels in it"
        if not (self.graphs or self.left):
            waiting = f"{counted(self.kernels, 'kernel')} for which sites are looked for at the model's first call"
            return f"{waiting}: one inside of a larger model that torch.compile() has compiled is none, and has no kernels"
        lines = [
            f"{target}: in {len(sites)} sites ({', '.join(sites)})" if sites else f"{target}: nowhere"
            for target, sites in self.sites.items()
        ]
        return "\n".join([*lines, *(f"left as it was: {why}" for why in self.left)])


def explain(model: nn.Module) -> Explanation:
    """Which of the kernels that apply() was given run in `model` and where, and what was left as it was, and why."""
    _check_model(model)
    replacer = getattr(model._compiled_call_impl, "replacer", None)
    if replacer is None:
        return Explanation((), {}, (), 0)
    kernels = tuple(winner.target.name for winner in replacer.winners)
    sites = {name: tuple(f"graph {r.graph}, {r.node}" for r in replacer.replaced if r.target == name) for name in kernels}
    return Explanation(kernels, sites, tuple(replacer.left), replacer.graphs)


def unapply(model: nn.Module) -> nn.Module:
    """`model` as it was before apply()."""
    _check_model(model)
    _call_by(model, _before(model))
    return model

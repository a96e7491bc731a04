"""Problems in the format of KernelBench (Model, get_inputs, get_init_inputs) as kernel types, made at run time.

A problem is set up in a folder of its own under workspace/kernelbench/: problem.py as it was, problem.json with what was
found out about it, and a spec.py, so that the gate, the loop and the agents take it like any kernel type.
"""

import ast
import copy
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from autokernel.common.records import write_json
from autokernel.kernelbench.contents import has_holes, kinds
from autokernel.kernelbench.modelnew import SEED, WEIGHTS, InDouble, as_kernel, make, seeded
from autokernel.spec import ANY_LIBRARY, DTYPES, PROBLEMS, Case, KernelSpec, TensorSpec, nonfinite_of
from autokernel.target import Target, WeightedCase, decode_case, encode

SPEC = '''"""A problem in the format of KernelBench: see autokernel/kernelbench/problems.py."""

from pathlib import Path

from autokernel.kernelbench.problems import Problem, problem_spec

SPEC = problem_spec(Problem.read(Path(__file__).parent))
'''
SMALLEST = 8  # no size is made smaller, but for those of a batch
SLACK = 5
INSENSITIVE = 1e-4  # where inputs change by a hundredth
WEIGHT_SETS = 3  # drawing the weights of a large model takes seconds, and trials take turns with so many
VARIED = 0.1  # s.d. of what is added to weights that are constant when a module is made, or nobody could see them used

Sizes = Mapping[str, int]  # "batch_size" or "input_shape[0]" -> its value


class NotJudged(Exception):
    """Why a problem does not come before the gate, in one line."""


@contextmanager
def in_one_line() -> Iterator[None]:
    """Whatever a problem's own code raises is why it is not judged, but for a device's memory and a scorer's time limit."""
    try:
        yield
    except (NotJudged, torch.OutOfMemoryError, TimeoutError):
        raise
    except (Exception, SystemExit) as error:
        words = [type(error).__name__, *str(error).splitlines()[:1]]
        raise NotJudged(f"does not run here: {': '.join(words)[:120]}") from error


@dataclass(frozen=True)
class Problem:
    """A problem file, the sizes at which it is taken, and what was found of its arguments.

    arguments: as a Case has them. special: inputs that get_inputs() gives a form (a mask, labels, a triangle), not just
    independent random numbers.
    """

    name: str
    path: Path
    sizes: Sizes  # those that differ from the published ones
    published: Sizes  # of these, what they were
    arguments: Mapping[str, Any]
    special: tuple[str, ...]
    output_numel: int
    integers: tuple[str, ...] = ()  # of the special ones, those that are independent whole numbers
    holed: tuple[str, ...] = ()  # and those of which one part is zeros, others random numbers, such as triangles
    nonfinite: tuple[float, ...] = ()  # values with which Model in fp32 has NaN and Inf where it has them in fp64

    @cached_property
    def module(self) -> ModuleType:
        return load(self.path, self.sizes)

    def inputs(self, seed: int) -> dict[str, Any]:
        """What get_inputs() gives after this seed, by the names of the case."""
        with seeded(seed):
            return {f"inputs.{i}": value for i, value in enumerate(self.module.get_inputs())}

    def weights(self, seed: int, as_new: bool = False) -> dict[str, Tensor]:
        """A state dict drawn with this seed; what is constant in a new module is varied, unless `as_new`."""
        with seeded(seed):
            state = self.module.Model(*ast.literal_eval(self.arguments["init"])).state_dict()
            return {WEIGHTS + name: t.detach() if as_new else _varied(t) for name, t in state.items()}

    @property
    def reduced(self) -> str:
        """In words, the sizes that were changed; empty as published."""
        return ", ".join(f"{name} {self.published[name]} -> {size}" for name, size in self.sizes.items())

    @staticmethod
    def read(folder: Path) -> "Problem":
        data = json.loads((folder / "problem.json").read_text())
        arguments = decode_case({"name": "", "args": data["arguments"]}).args
        data |= {name: tuple(data.get(name, ())) for name in ("special", "integers", "holed")}  # not all in files of before
        data |= {"nonfinite": nonfinite_of(data["nonfinite"])}
        return Problem(**data | {"path": folder / "problem.py", "arguments": arguments})

    def write(self, text: str) -> Path:
        """Set the problem up as a kernel type; returns its folder."""
        folder = PROBLEMS / self.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "problem.py").write_text(text)
        (folder / "spec.py").write_text(SPEC)
        fields = {k: v for k, v in encode(self).items() if k != "path"} | {"nonfinite": [str(v) for v in self.nonfinite]}
        write_json(folder / "problem.json", fields)
        return folder


def _varied(t: Tensor) -> Tensor:
    if not t.is_floating_point() or t.numel() == 0 or (t != t.flatten()[0]).any():
        return t.detach()
    return t.detach() + VARIED * torch.randn(t.shape).clamp(-3, 3).to(t.dtype)


# --- reading a file ----------------------------------------------------------------------------------------------------


def _number(node: ast.expr) -> int | None:
    """The value of an integer that is written out, be it as a product; not of a name, a bool or a float."""
    if not all(isinstance(n, (ast.Constant, ast.BinOp, ast.operator, ast.Load)) for n in ast.walk(node)):
        return None
    value = eval(compile(ast.Expression(node), "size", "eval"), {})  # constants and operators alone
    return value if type(value) is int else None


def _places(tree: ast.Module) -> Iterator[tuple[str, int, Callable[[int], None]]]:
    """(name, value, a function that sets it) of every integer of a module-level constant."""
    for statement in tree.body:
        if not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)):
            continue
        name, value = statement.targets[0].id, statement.value
        parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else None
        for i, part in enumerate([value] if parts is None else parts):
            number = _number(part)
            if number is None:
                continue

            def put(new: int, i: int = i, parts: Any = parts, statement: ast.Assign = statement) -> None:
                if parts is None:
                    statement.value = ast.Constant(new)
                else:
                    parts[i] = ast.Constant(new)

            yield (name if parts is None else f"{name}[{i}]"), number, put


def sizes_of(path: Path) -> dict[str, int]:
    return {name: value for name, value, _ in _places(ast.parse(path.read_text()))}


def parse(path: Path, sizes: Sizes) -> ast.Module:
    """The problem's file, its constants replaced by `sizes`."""
    tree = ast.parse(path.read_text())
    for name, _, put in _places(tree):
        if name in sizes:
            put(sizes[name])
    return ast.fix_missing_locations(tree)


def load(path: Path, sizes: Sizes) -> ModuleType:
    module = ModuleType(f"problem_{path.stem}")
    module.__file__ = str(path)
    exec(compile(parse(path, sizes), str(path), "exec"), module.__dict__)
    for name in ("Model", "get_inputs", "get_init_inputs"):
        if not callable(getattr(module, name, None)):
            raise NotJudged(f"{path.name} has no {name}")
    if not (isinstance(module.Model, type) and issubclass(module.Model, nn.Module)):
        raise NotJudged(f"Model of {path.name} is no class of torch.nn.Module")
    return module


def _listed(module: ModuleType, name: str) -> list[Any]:
    """What get_inputs() or get_init_inputs() returns."""
    values = getattr(module, name)()
    if not isinstance(values, (list, tuple)):
        what = "tensor" if isinstance(values, Tensor) else type(values).__name__
        raise NotJudged(f"{name}() returns a {what}, not a list")
    return list(values)


def _check_tensor(name: str, t: Tensor) -> None:
    if t.layout != torch.strided or t.dtype.is_complex or not t.numel():
        what = "complex" if t.dtype.is_complex else "sparse" if t.layout != torch.strided else "empty"
        raise NotJudged(f"{name} is {what}")


# --- cost, and sizes that fit --------------------------------------------------------------------------------------------


class _Written(TorchDispatchMode):
    """Counts the bytes of everything that operators return."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            self.nbytes += t.nbytes if isinstance(t, Tensor) and t.layout == torch.strided else 0
        return result


@dataclass(frozen=True)
class Cost:
    """Of one pass: operations of its products and convolutions, bytes of its inputs, weights and all results."""

    flops: int
    nbytes: int

    def fits(self, limit: "Cost") -> bool:
        return self.flops <= limit.flops and self.nbytes <= limit.nbytes


def cost_of(module: ModuleType) -> Cost:
    """Without computing anything, where a model allows it. Raises what it raises at sizes that it cannot have."""
    try:
        return _cost_in(FakeTensorMode(allow_non_fake_inputs=True), module)
    except DataDependentOutputException:  # it asks for values
        return _cost_in(nullcontext(), module)


def _cost_in(mode: AbstractContextManager[Any], module: ModuleType) -> Cost:
    with mode, torch.random.fork_rng(devices=[]), torch.no_grad():
        inputs, model = _listed(module, "get_inputs"), module.Model(*_listed(module, "get_init_inputs"))
        with FlopCounterMode(display=False) as flops, _Written() as written:
            model(*inputs)
    held = [*inputs, *model.state_dict().values()]
    return Cost(
        flops.get_total_flops(),
        written.nbytes + sum(t.nbytes for t in held if isinstance(t, Tensor) and t.layout == torch.strided),
    )


def _cost_at(path: Path, sizes: Sizes) -> Cost | None:
    """None at sizes that the problem cannot have."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        return cost_of(load(path, sizes))
    except (Exception, SystemExit):  # whatever a model says of sizes that do not go together
        return None
    finally:
        log.setLevel(level)


def fitting(path: Path, limit: Cost) -> dict[str, int]:
    """Sizes that differ from the published ones so that one pass costs no more than `limit`.

    The largest is halved, over and over; one that does not matter, or that the problem cannot do with, stays. Where
    nothing is left to be halved, SLACK times the limit will do, or NotJudged is raised.
    """
    published = sizes_of(path)
    sizes, fixed, cost = dict(published), set(), cost_of(load(path, {}))
    while not cost.fits(limit):
        free = [n for n in sizes if n not in fixed and sizes[n] >= (2 if "batch" in n else 2 * SMALLEST)]
        if not free and cost.fits(Cost(SLACK * limit.flops, SLACK * limit.nbytes)):
            break
        if not free:
            raise NotJudged(f"does not fit: {cost.flops / 1e9:.3g} GFLOP, {cost.nbytes / 1e6:.3g} MB at the smallest sizes")
        name = max(free, key=lambda n: sizes[n])
        together = [n for n in free if sizes[n] == sizes[name]]  # sizes that have to be equal, perhaps
        for names in ([name], together):
            trial = sizes | {n: sizes[n] // 2 for n in names}
            less = _cost_at(path, trial)
            if less and less.flops + less.nbytes < cost.flops + cost.nbytes:
                sizes, cost = trial, less
                break
        else:
            fixed.add(name)
    if sizes != published and _sensitivity(path, sizes) < INSENSITIVE:
        sizes = _in_proportion(path, published, sizes, cost)
    return {name: size for name, size in sizes.items() if size != published[name]}


def _in_proportion(path: Path, published: Sizes, sizes: dict[str, int], cost: Cost) -> dict[str, int]:
    """`sizes`, one that costs nothing, such as a number of groups, as much smaller as another that it divides, where
    results then tell what the inputs are: of groups of one channel each, or two, a norm leaves nothing, or signs."""
    for name in [n for n in sizes if "batch" not in n and published[n] >= 2 * SMALLEST]:
        divided = [n for n in sizes if sizes[n] and n != name and "batch" not in n and published[n] % published[name] == 0]
        smaller = max(1, published[name] // max((published[n] // sizes[n] for n in divided), default=1))
        trial = sizes | {name: smaller}
        if smaller == sizes[name] or (less := _cost_at(path, trial)) is None or less.flops != cost.flops:
            continue
        if less.nbytes <= cost.nbytes and _sensitivity(path, trial) >= INSENSITIVE:
            return trial
    return sizes


def _sensitivity(path: Path, sizes: Sizes) -> float:
    """The median change of a result, relative to the median result, where numbers of the inputs change by about 1 %."""
    module = load(path, sizes)
    with seeded(SEED), torch.no_grad():
        inputs, model = module.get_inputs(), module.Model(*module.get_init_inputs())
        model.load_state_dict({name: _varied(t) for name, t in model.state_dict().items()})
        floats = [isinstance(v, Tensor) and v.is_floating_point() for v in inputs]
        others = [v + 0.01 * v * torch.randn_like(v) if is_float else v for v, is_float in zip(inputs, floats)]
        made = []
        for arguments in (inputs, others):
            torch.manual_seed(SEED)
            made.append(model(*arguments))
    if not isinstance(made[0], Tensor) or not made[0].numel() or not made[0].is_floating_point():
        return math.inf  # nothing is said of it here
    y, change = made[0].abs().median(), (made[1] - made[0]).abs().median()
    return float(change / y) if y.isfinite() and y > 0 and change.isfinite() else math.inf


# --- a problem as a kernel type ---------------------------------------------------------------------------------


def examine(name: str, path: Path, sizes: Sizes, device: str = "cpu") -> Problem:
    """Find out what the problem's arguments are. Raises NotJudged for what the gate cannot judge."""
    module = load(path, sizes)
    init = repr(_listed(module, "get_init_inputs"))
    try:
        ast.literal_eval(init)
    except (ValueError, SyntaxError):
        raise NotJudged("get_init_inputs() returns more than finite numbers, texts and lists of these") from None
    with torch.random.fork_rng(devices=[]), _Drawn() as drawn:
        inputs = _listed(module, "get_inputs")
        again = {f"inputs.{i}": v for i, v in enumerate(module.get_inputs())}
    drawn_by = [next((name for t, name in drawn.tensors if t is v), "") for v in inputs]
    for i, v in enumerate(inputs):
        if isinstance(v, Tensor):
            _check_tensor(f"inputs.{i}", v)
        elif not isinstance(v, (bool, int, float, str, type(None))):
            raise NotJudged(f"inputs.{i} is a {type(v).__name__}, no tensor, number or text")
    inputs = [v.to(device) if isinstance(v, Tensor) else v for v in inputs]
    model = make(module.Model, init).to(device)
    with torch.no_grad():
        output = model(*inputs)
    if not isinstance(output, Tensor):
        raise NotJudged(f"returns a {type(output).__name__}, not one tensor")
    _check_tensor("its result", output)
    if output.is_floating_point() and output.dtype not in DTYPES:
        raise NotJudged(f"its result is of {output.dtype}, whose roundings the gate has no bounds for")
    arguments: dict[str, Any] = {"init": init}
    arguments |= {f"inputs.{i}": _described(v) for i, v in enumerate(inputs)}
    arguments |= {WEIGHTS + k: _described(v) for k, v in model.state_dict().items()}
    if not any(isinstance(v, TensorSpec) and v.dtype.is_floating_point for v in arguments.values()):
        raise NotJudged("has no floating-point numbers among its inputs and weights")
    tensors = {f"inputs.{i}": v for i, v in enumerate(inputs) if isinstance(v, Tensor)}
    is_free = {name: drawn_by[int(name.removeprefix("inputs."))] in ("rand", "randn") for name in tensors}
    special = tuple(name for name, free in is_free.items() if not free)
    integers = tuple(name for name in special if drawn_by[int(name.removeprefix("inputs."))] == "randint")
    integers = tuple(name for name in integers if not tensors[name].is_floating_point() and tensors[name].numel())
    holed = tuple(name for name in special if has_holes(tensors[name], again[name]))
    published = {k: v for k, v in sizes_of(path).items() if k in sizes}
    nonfinite = tuple(v for v in (math.nan, math.inf, -math.inf) if _same_specials(model, inputs, v))
    return Problem(name, path, sizes, published, arguments, special, output.numel(), integers, holed, nonfinite)


def _same_specials(model: nn.Module, inputs: list[Any], value: float) -> bool:
    """Whether a value that is planted leaves NaN and Inf in the same places in fp32 and fp64.

    Vectorised GELU has NaN for Inf in fp32 only, for instance: then such values say nothing of another's answer.
    """
    if not isinstance(inputs[0], Tensor) or not inputs[0].is_floating_point():
        return False
    planted = inputs[0].clone()
    planted.view(-1)[planted.numel() // 3] = value
    twin = copy.deepcopy(model).double()
    exact = [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in (planted, *inputs[1:])]
    try:
        with torch.no_grad(), InDouble():
            expected = twin(*exact)
    except RuntimeError:  # of a model that insists on fp32
        return False
    with torch.no_grad():
        y = copy.deepcopy(model)(planted, *inputs[1:])
    tests = (torch.isnan, torch.isposinf, torch.isneginf) if y.is_floating_point() else ()
    return all(torch.equal(test(y), test(expected.to(y.dtype))) for test in tests)


def _described(value: Any) -> Any:
    return TensorSpec(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


class _Drawn:
    """Note what torch.rand, randn and randint return: inputs that are just that are free random numbers."""

    def __init__(self) -> None:
        self.tensors: list[tuple[Tensor, str]] = []  # and which of them it was

    def __enter__(self) -> "_Drawn":
        self.originals = {name: getattr(torch, name) for name in ("rand", "randn", "randint")}
        for name, original in self.originals.items():
            setattr(torch, name, self._noting(name, original))
        return self

    def __exit__(self, *exc: object) -> None:
        for name, original in self.originals.items():
            setattr(torch, name, original)

    def _noting(self, name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def draw(*args: Any, **kwargs: Any) -> Tensor:
            made = original(*args, **kwargs)
            self.tensors.append((made, name))
            return made

        return draw


def problem_spec(problem: Problem) -> KernelSpec:
    """One size, one dtype, contiguous: what the problem's own inputs are. Weights are static; special inputs are filled."""
    sizes = {"sizes": problem.reduced or "as published"}

    arguments = problem.arguments
    tensors = {name: value for name, value in arguments.items() if isinstance(value, TensorSpec)}
    static = frozenset(name for name in tensors if name.startswith(WEIGHTS))
    first = next(name for name, tensor in tensors.items() if tensor.dtype.is_floating_point)
    weights, inputs = lru_cache(WEIGHT_SETS)(problem.weights), lru_cache(2)(problem.inputs)
    drawing = Lock()  # a set that several trials want at once is drawn once

    def fill(name: str) -> Callable[[TensorSpec, Any, torch.Generator], Tensor]:
        def contents(spec: TensorSpec, args: Any, generator: torch.Generator) -> Tensor:
            seed = generator.initial_seed()
            with drawing:
                return (weights(seed % WEIGHT_SETS) if name in static else inputs(seed))[name]

        return contents

    def as_given(inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs as get_inputs() draws them, by a seed that the others give."""
        seed = int(next(v for v in inputs.values() if isinstance(v, Tensor)).double().sum().view(torch.int64)) % 2**32
        return inputs | problem.inputs(seed)

    def model(*init: Any) -> nn.Module:
        return problem.module.Model(*init)

    free = [name for name in tensors if name not in static and name not in problem.special]
    filled = kinds(
        sorted(name for name in static if tensors[name].dtype.is_floating_point),
        lambda: problem.weights(SEED, as_new=True),
        [name for name in free if tensors[name].dtype.is_floating_point],
        problem.integers,
        problem.holed,
        problem.nonfinite,
    )
    zeros = lru_cache(1)(
        lambda: {name: value == 0 for name, value in problem.inputs(SEED).items() if name in problem.holed}
    )

    def kept(inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs | {
            name: inputs[name].masked_fill(where.to(inputs[name].device), 0) for name, where in zeros().items()
        }

    in_double = as_kernel(model, used=False)

    def oracle(**arguments: Any) -> Tensor:
        with InDouble():  # what a model makes on its way as well
            return in_double(**arguments)

    read = sum(t.nbytes for t in tensors.values())
    return KernelSpec(
        name=problem.name,
        oracle=oracle,
        eager=as_kernel(model, used=False),
        eager_form="Model",
        opaque=True,
        arguments=lambda dtype, sizes: arguments,
        smoke=sizes,
        sweep=(sizes,),
        edges=(sizes,),
        timing={"cpu": (sizes,), "cuda": (sizes,)},
        flops=lambda a: problem.output_numel,  # the least that is known: a problem may allow for short cuts
        bytes_moved=lambda a: read + 4 * problem.output_numel,  # read each argument, write the output
        headline="bandwidth_gb_s",
        static=static,
        first=first,
        fill={name: fill(name) for name in (*static, *problem.special)},
        adversarial={"as_given": as_given},
        filled=filled,
        kept=kept,
        dtypes=(torch.float32,),
        nonfinite=problem.nonfinite,
        layouts=(),
        library_calls=ANY_LIBRARY,  # the benchmark lets ModelNew leave work to PyTorch
    )


def target_of(spec: KernelSpec, backend: str, device: str) -> Target:
    case: Case = spec.case(spec.smoke, torch.float32)
    return Target(spec.name, spec.name, backend, device, (WeightedCase(case),), starter=f"{backend}_kernel")

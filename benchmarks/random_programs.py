"""Programs made at random: is each the same with kernels as without, in values, dtypes, strides, aliasing and gradients?

Usage:   python benchmarks/random_programs.py                    (20,000 programs, a few hours on two cores)
         python benchmarks/random_programs.py -n 500 --first 0   (these seeds)
         python benchmarks/random_programs.py --seed 17          (one: its source, and what differs)
         python benchmarks/random_programs.py --seconds 3600     (as many as an hour allows)
         python benchmarks/random_programs.py --jobs 14          (on 14 cores)
Writes:  benchmarks/random_programs.json, if it runs them all, else what --record names (every 100 programs and at the end:
         how many ran, over what, what failed)

A program is lines of Python: operations of the patterns, views, copies, writes in place, masks, constants, casts, autocast,
gradients switched off and on, graph breaks. It runs as it is, and with a kernel at every site that is found, in sizes that
change. Kernels are the oracles in plain PyTorch, in float64: what is looked for is what surrounds them. What differs in
torch.compile without any kernel in the same way is counted as PyTorch's; so is what a compiler alone keeps for the backward
pass. Where other roundings give the model itself other results (the place of the largest of nearly equal numbers, in
bfloat16 most of all), these are compared in all other elements; so are strides where there is more than one of something. A
program that fails is made smaller line by line.
"""

import argparse
import collections
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel import spec as specs
from autokernel.common.records import write_json
from autokernel.integration.backend import INDUCTOR, Replacer
from autokernel.integration.winner import Winner
from autokernel.model.agreement import inputs_of
from autokernel.model.match import SiteFinder
from autokernel.model.patterns import Site
from autokernel.model.regions.expressions import evaluate
from autokernel.model.regions.growing import piece_of, regions_of
from autokernel.model.regions.lowering import lower
from autokernel.model.regions.spec import several
from autokernel.spec import load_spec
from autokernel.target import Target

PROGRAMS = 20_000
RECORD = Path(__file__).with_suffix(".json")
RECORD_EVERY = 100  # programs
BATCH, HEADS, LENGTH, WIDTH = 2, 2, 6, 8  # x is [batch, length, width], and q, k, v are [batch, heads, length, width]
LENGTHS = (LENGTH, 4, 5)  # from the second on, Dynamo makes graphs for all lengths
EVERY_INDUCTOR = 25  # programs; to compile C++ takes seconds
EVERY_AOT = 10  # what stands before Inductor: functions without writes, gradients as graphs; slow where sizes change
MERGE_EVERY_S = 20  # the records of several processes
EVERY_THIRD_LENGTH = 3  # of the programs whose sizes change; for the others two lengths do

OTHER_ROUNDINGS = 16  # of a program, to see which of its results they decide; such as differ alone are looked at
SAVED = "modified by an inplace operation: [torch."  # how PyTorch's own error goes on, and none of ours
REGIONS_FAIL = "regions could not be found"
FOLDER = tempfile.TemporaryDirectory()  # of the regions that are set up

KERNEL = """
import torch
from autokernel.spec import load_spec

def kernel_fn(**inputs):
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    dtype = next(v.dtype for v in inputs.values() if isinstance(v, torch.Tensor) and v.is_floating_point())
    results, specs = load_spec("TYPE").oracle(**wide), load_spec("TYPE").results
    if not specs:
        return results.to(dtype)
    results = results if isinstance(results, tuple) else (results,)
    made = [torch.empty_strided(t.shape, t.strides, dtype=t.dtype).copy_(y) for t, y in zip(specs, results)]
    return tuple(made) if len(made) > 1 else made[0]
"""


@dataclass(frozen=True)
class Program:
    """Lines of a function of x, q, k, v, mask, cos and sin; `s` is the module with its weights."""

    seed: int
    lines: tuple[str, ...]
    results: tuple[str, ...]
    gradients: bool
    autocast: bool
    write_before_backward: bool = False
    changing: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        if not self.changing:
            return LENGTHS[:1]
        return LENGTHS[: 2 + (self.seed % EVERY_THIRD_LENGTH == 0)]

    @property
    def source(self) -> str:
        body = "\n".join(f"    {line}" for line in (*self.lines, f"return ({', '.join(self.results)},)"))
        return f"def forward(s, x, q, k, v, mask, cos, sin):\n{body}\n"

    def module(self) -> nn.Module:
        names: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source, f"<program {self.seed}>", "exec"), names)

        class Model(Weights):
            forward = names["forward"]

        torch.manual_seed(self.seed)
        model = Model()
        return model if self.gradients else model.requires_grad_(False)

    def inputs(self, length: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        tensors = {"x": draw(BATCH, length, WIDTH)} | {name: draw(BATCH, HEADS, length, WIDTH) for name in "qkv"}
        if self.gradients:
            tensors = {name: t.requires_grad_() for name, t in tensors.items()}
        angles = draw(length, WIDTH // 2)
        mask = torch.rand(1, 1, length, length, generator=generator) > 0.8
        mask[..., 0] = False  # at least one key for each query: rows without any have tests of their own
        return tensors | {"mask": mask, "cos": angles.cos(), "sin": angles.sin()}


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.randn(8, 8) / 3)
        self.b, self.n = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.frozen = nn.Parameter(torch.randn(8, 8) / 3, requires_grad=False)


# --- making --------------------------------------------------------------------------------------------------------------

# {a}, {b}: any earlier results; {c}: one that was made here, or an input, to be written to
STEPS = {
    "patterns": [
        "F.linear({a}, s.w, s.b)",
        "F.linear({a}, s.u)",
        "F.linear({a}, s.frozen, s.b)",
        "{a} @ s.w",
        "F.linear({a}, s.w)",
        "{a} * torch.rsqrt({a}.pow(2).mean(-1, keepdim=True) + 1e-5) * s.n",
        "{a} * torch.rsqrt(({a} * {a}).mean(-1, keepdim=True) + 1e-5) * s.n",
        "F.rms_norm({a}, (8,), s.n, 1e-5)",
        "F.rms_norm({a}, (8,), s.n)",
        "F.layer_norm({a}, (8,), s.n, s.b)",
        "F.layer_norm({a}, (8,))",
        "torch.softmax({a}, -1)",
        "torch.softmax({a}, 1)",
        "torch.softmax({a}, -1, dtype=torch.float32)",
        "F.scaled_dot_product_attention({a}, {b}, {b})",
        "F.scaled_dot_product_attention({a}, {a}, {b}, is_causal=True)",
        "F.scaled_dot_product_attention({a}, {b}, {a}, mask.logical_not())",
        "torch.softmax(({a} @ {b}.transpose(-2, -1) * 0.3).masked_fill(mask, -torch.inf), -1) @ {a}",
        "torch.softmax({a} @ {b}.transpose(-2, -1) / 3, -1) @ {b}",
        "(lambda t, u: torch.cat((t * cos - u * sin, u * cos + t * sin), -1))(*{a}.chunk(2, -1))",
        "{a} * torch.cat((cos, cos), -1) + torch.cat((-{a}[..., 4:], {a}[..., :4]), -1) * torch.cat((sin, sin), -1)",
        "F.linear(F.silu(F.linear({a}, s.w)) * F.linear({a}, s.u), s.frozen)",
        "F.linear(F.gelu(F.linear({a}, s.u)), s.w)",
        "{a}.sum(-1, keepdim=True)",
        "{a}.sum(1, keepdim=True)",
        "{a}.amax(-1, keepdim=True)",
        "{a}.max(1, keepdim=True).values",
        "{a} + {a}.sum(-1)[..., None]",
        "{a} + F.cross_entropy({b}.reshape(-1, 8), torch.arange({b}.numel() // 8) % 8)",
        "torch.einsum('bhqd,bhkd->bhqk', {a}, {b})[..., :1] + {a}",
        "torch.einsum('bsd,de->bse', {a}, s.w)",
        "{a}.relu().max(-1, keepdim=True).values",
    ],
    "views": [
        "{a}.transpose(1, 2)",
        "{a}.transpose(-2, -1)",
        "{a}.reshape({a}.shape)",
        "{a}.view({a}.shape)",
        "{a}.flatten(1, 2)",
        "{a}.unsqueeze(1)",
        "{a}.contiguous()",
        "{a}[:, :3]",
        "{a}[..., ::2]",
        "{a}.expand({a}.shape)",
        "{a}.detach()",
        "{a}.transpose(0, 1)",
        "{a}.transpose(1, 2).contiguous()",
        "{a}.transpose(1, 2).reshape({a}.shape)",
        "{a}.view(-1, 8)",
        "{a}.transpose(1, 2).flatten(2)",
        "{a}.unflatten(-1, (2, 4))",
        "{a}.as_strided((2, 3), (4, 2))",
        "{a}.chunk(2, -1)[0]",
        "{a}.as_strided({a}.shape[:2], {a}.stride()[:2])",
        "{a}.to(torch.float32)",
        "{a}.squeeze(1)",
        "{a}.movedim(1, -1)",
        "F.dropout({a}, 0.5, False)",
    ],
    "copies": [
        "{a}.clone()",
        "{a}.to(torch.float32, copy=True)",
        "{a}.to({a}.dtype, copy=True)",
        "{a}.bfloat16()",
        "{a}.float()",
        "{a}.type_as({b})",
        "{a}.repeat(1, 1, 1)",
        "torch.empty_like({a}).copy_({a})",
        "{a}.to({b})",
    ],
    "pointwise": [
        "{a} + {b}",
        "{a} * {b}",
        "{a} * 0.5",
        "{a} - {b}",
        "torch.tanh({a})",
        "F.gelu({a})",
        "F.relu({a})",
        "-{a}",
        "{a} * torch.tensor([1.0, 2.0]).repeat(4)",
        "{a} + torch.arange({a}.shape[-1])",
        "torch.where({a} > 0, {a}, {b})",
        "{a} * torch.ones({a}.shape[-2], {a}.shape[-1]).triu()",
        "torch.minimum({a}, torch.tensor(0.5))",
    ],
    "elsewhere": [
        "torch.cat((-{a}[..., 1:], {a}[..., :1] * 2), -1)",
        "torch.cat(({a}, {b} + 1), 1)[:, ::2]",
        "{a}.flip(-1) * 2",
        "{a}.cumsum(-1)",
        "{a}.flip(1).cumsum(1).flip(1)",
        "F.pad({a}, (1, -1), value=0.5)",
        "{a}[:, 0] * {b}[:, -1]",
        "(lambda t, u: F.silu(t) * u)(*({a} * 2).chunk(2, -1))",
        "F.glu({a} + 1, -1)",
        "{a}.unbind(1)[0] + {a}.select(1, 1)",
        "F.max_pool1d({a}.flatten(0, -3), 3, 1, 1)",
        "F.avg_pool1d({a}.flatten(0, -3) * 2, 2)",
        "{a} + {a}.relu().argmax(-1, keepdim=True)",
        "{a} * F.mse_loss({a}, {b})",
    ],
    "writes": [
        "{c}.mul_(0.5)",
        "{c}.add_({a})",
        "{c}[..., :2] = 1.5",
        "{c}[:, 0] *= 2",
        "{c} += {a}",
        "{c}.copy_({a})",
        "{c}.relu_()",
        "{c}.transpose(1, 2).add_(1)",
        "{c}.view(-1)[:3].fill_(0.25)",
        "{c}.masked_fill_({c} > 1, 0.5)",
        "mask[..., 1:3] = True",
        "mask[..., 1:3].fill_(False)",
        "cos.mul_(0.5)",
        "{c}.reshape(-1).mul_(0.5)",
        "{c}.contiguous().add_(1)",
        "{c} /= 1.5",
        "{c}[..., 1:].zero_()",
    ],
}
WEIGHTS = {"patterns": 8, "views": 6, "copies": 2, "pointwise": 4, "elsewhere": 4, "writes": 3}
AROUND = [
    "with torch.no_grad():",
    "with torch.autocast('cpu', torch.bfloat16):",
    "with torch.autocast('cpu', enabled=False):",
]


def make(seed: int) -> Program:
    """A program that runs, each line tried as it is added."""
    choose = random.Random(seed)
    program = Program(
        seed, (), ("x",), choose.random() < 0.6, choose.random() < 0.15, choose.random() < 0.25, choose.random() < 0.3
    )
    made: list[str] = []
    while len(made) < choose.randint(3, 9):
        lines, new = _step(choose, made)
        longer = replace(program, lines=(*program.lines, *lines), results=tuple(new[-1:]) or ("x",))
        try:
            with _settings(longer):
                results = longer.module()(**_given(longer, LENGTH))
                is_tame = all(t.numel() > 0 and t.isfinite().all() and t.abs().max() < 1e4 for t in results)
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        if is_tame:
            program, made = longer, made + new
    names = [*made[-1:], *choose.sample(made[:-1], min(len(made) - 1, choose.randint(0, 3)))]
    names += choose.sample(("x", "q"), 1) if choose.random() < 0.2 else []
    return replace(program, results=tuple(dict.fromkeys(names)))


def _step(choose: random.Random, made: Sequence[str]) -> tuple[list[str], list[str]]:
    """Lines, and the names that they bind."""

    def any_of(names: Sequence[str]) -> str:
        recent = names[-3:]
        return choose.choice(recent if choose.random() < 0.6 else names)

    def line(name: str) -> str:
        kind = choose.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        known = ("x", "q", "k", "v", *made)
        text = choose.choice(STEPS[kind])
        filled = text.format(a=any_of(known), b=any_of(known), c=any_of(known))
        return filled if kind == "writes" else f"{name} = {filled}"

    drawn = choose.random()
    if drawn < 0.04:
        return ["torch._dynamo.graph_break()"], []
    name = f"r{len(made)}"
    lines = [line(name)]
    new = [name] if lines[0].startswith(f"{name} = ") else []
    return ([choose.choice(AROUND), f"    {lines[0]}"] if drawn < 0.2 else lines), new


# --- running -------------------------------------------------------------------------------------------------------------


@cache
def finder() -> SiteFinder:
    specs.REGIONS = Path(FOLDER.name)
    return SiteFinder(min_elements=0, regions=_regions)


def _regions(graph: GraphModule, named: Sequence[Site]) -> list[Site]:
    """As in a profile; and that the arithmetic from which their kernels are written is what their nodes compute, but for
    those of which a library computes a part."""
    sites = [one for one in regions_of(graph, named, "cpp", min_elements=0) if isinstance(one, Site)]
    for site in sites:
        if load_spec(site.kernel_type).library_calls:
            continue
        inputs = inputs_of(site, site.inputs)
        inputs = [
            torch.empty_strided(t.shape, t.stride(), dtype=torch.float64).copy_(t) if t.is_floating_point() else t
            for t in inputs
        ]
        expected = several(load_spec(site.kernel_type).oracle(*inputs))
        results = evaluate(lower(piece_of(graph, site.outputs, site.inputs)), inputs)
        made = [y.to(exact.dtype) for y, exact in zip(results, expected)]
        if not all(torch.allclose(y, exact, rtol=1e-9, atol=1e-9, equal_nan=True) for y, exact in zip(made, expected)):
            raise AssertionError(f"{site.kernel_type} is written as something else than it computes")
    return sites


class _OfAnyCase(dict):
    """Kind of kernel, device, arguments -> a kernel, whatever the arguments."""

    def get(self, key: tuple[str, str, str], default: Any = None) -> Winner:
        kernel_type = key[0]
        return Winner(Target(kernel_type, kernel_type, "cpp", "cpu", ()), KERNEL.replace("TYPE", kernel_type))


class Everywhere(Replacer):
    """Puts a kernel at every site, whatever its case."""

    @cached_property
    def proven(self) -> dict[tuple[str, str, str], Winner]:
        return _OfAnyCase()

    def _may_be_proven(self, sizes: Sequence[int]) -> bool:
        return True


@dataclass
class Observed:
    """What one call does, as far as a user can see it."""

    error: str | None
    results: list[Tensor]
    inputs: list[Tensor]  # as they are afterwards
    gradients: list[Tensor | None]
    layouts: list[Any]
    aliases: list[Any]
    backward_error: str | None = None


def _settings(program: Program) -> Any:
    torch.set_grad_enabled(True)
    return torch.autocast("cpu", torch.bfloat16) if program.autocast else nullcontext()


def _given(program: Program, length: int) -> dict[str, Tensor]:
    """The inputs; those that want gradients as results of something, for a leaf cannot be written to."""
    leaves = program.inputs(length)
    return {name: t * 1 if t.requires_grad else t for name, t in leaves.items()}


def observe(program: Program, call: Callable[..., Any], model: nn.Module, length: int) -> Observed:
    leaves = program.inputs(length)
    given = {name: t * 1 if t.requires_grad else t.clone() for name, t in leaves.items()}
    torch.manual_seed(0)
    model.zero_grad()
    try:
        with _settings(program):
            results = list(call(**given))
    except Exception as error:  # of any kind: whether the other side has one too is what is asked
        return Observed(f"{type(error).__name__}: {error}", [], [], [], [], [])
    tensors = [*given.values(), *results]
    first = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(tensors)))}
    same = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
    seen = Observed(
        None,
        [t.detach().clone() for t in results],
        [t.detach().clone() for t in given.values()],
        [],
        [(t.dtype, tuple(t.shape), _significant_strides(t), t.storage_offset(), t.requires_grad) for t in results],
        [(first[t.untyped_storage()._cdata], same[id(t)]) for t in results],
    )
    wanted = [t for t in results if t.requires_grad]
    if wanted:
        parameters = [*(t for t in leaves.values() if t.requires_grad), *(p for p in model.parameters() if p.requires_grad)]
        try:
            loss = sum((t.float() * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in wanted)
            if program.write_before_backward:
                with torch.no_grad():
                    for t in (*results, *given.values()):
                        if not t.is_leaf:
                            t.mul_(2)
            seen.gradients = list(torch.autograd.grad(loss, parameters, allow_unused=True))
        except RuntimeError as error:
            seen.backward_error = str(error)
    return seen


def _significant_strides(t: Tensor) -> tuple[int, ...]:
    """Those that PyTorch holds its own results to (check_significant_strides in torch._prims_common)."""
    return tuple(stride if n > 1 else 0 for n, stride in zip(t.shape, t.stride())) if t.numel() else ()


class _Rounded(TorchDispatchMode):
    """Each element that is computed is by chance the number next to it: what rounds otherwise may come to that.

    Counts are exact, and what is finite stays so.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        before = [t.abs().flatten() for t in given]
        made = func(*args, **(kwargs or {}))
        if given and func is not torch.ops.aten.histc.default and not any(r.alias_info for r in func._schema.returns):
            for t in tree_leaves(made):
                if isinstance(t, Tensor) and t.is_floating_point() and not torch.isin(t.abs(), torch.cat(before)).all():
                    step = torch.randint(-1, 2, t.shape, generator=self.generator)
                    moved = t.nextafter(t + step * t.abs())  # zero stays zero
                    t.copy_(torch.where(moved.isinf(), t, moved))
        return made


def difference(ours: Observed, theirs: Observed, exact: bool, others: Sequence[Observed] = ()) -> str | None:
    """What differs, in words; `others`: theirs with other roundings, by which neither is held to what they decide."""
    if ours.error or theirs.error:
        return f"raises {ours.error[:300]}" if ours.error and not theirs.error else None
    if ours.layouts != theirs.layouts:
        return f"dtypes, shapes, strides, offsets, gradients wanted: {ours.layouts}, not {theirs.layouts}"
    if ours.aliases != theirs.aliases:
        return f"what shares memory (first of it, first object): {ours.aliases}, not {theirs.aliases}"
    for what in ("results", "inputs"):
        for i, (a, b) in enumerate(zip(getattr(ours, what), getattr(theirs, what))):
            if why := _apart(a, b, exact, [getattr(other, what)[i] for other in others]):
                return f"{what}[{i}]: {why}"
    if theirs.backward_error:
        return None
    if ours.backward_error:
        return f"backward raises {ours.backward_error[:300]}"
    for i, (a, b) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        if (a is None) != (b is None):
            return f"gradients[{i}]: {'none' if a is None else 'one'}"
        if a is not None and (why := _apart(a, b, exact, [other.gradients[i] for other in others])):
            return f"gradients[{i}]: {why}"
    return None


def _apart(a: Tensor, b: Tensor, exact: bool, others: Sequence[Tensor]) -> str | None:
    """Whether two tensors differ by more than rounding does: in bfloat16, 2^-8 a step, over some steps."""
    largest = max(1.0, b.float().nan_to_num(0, 0, 0).abs().max().item()) if b.numel() else 1.0
    tolerance = (1e-3 if exact else 0.12) * largest

    def differs(t: Tensor) -> Tensor:
        return torch.isclose(t.float(), b.float(), rtol=0, atol=tolerance, equal_nan=True).logical_not()

    wrong = differs(a)
    for other in others:
        wrong &= differs(other).logical_not()
    if not wrong.any():
        return None
    return f"off by {(a.float() - b.float())[wrong].abs().max():.2g}, with a largest of {largest:.2g}"


def _otherwise_rounded(program: Program, model: nn.Module, length: int, theirs: Observed) -> list[Observed]:
    """The same calls of the model itself, with other roundings."""
    others = []
    for seed in range(OTHER_ROUNDINGS):
        with _Rounded(seed):
            other = observe(program, model, model, length)
        if not (other.error or other.backward_error) and len(other.gradients) == len(theirs.gradients):
            others.append(other)
    return others


@dataclass(frozen=True)
class Outcome:
    program: Program
    fallback: str | None
    sites: int
    why: str | None = None  # what differs with kernels
    torchs: bool = False  # torch.compile without kernels differs, too, or a compiler alone is the cause
    by_rounding: bool = False  # something did that roundings decide in the model itself


def check(program: Program, fallback: str | None = None) -> Outcome:
    replacer = Everywhere((), fallback, finder=finder())
    before = len(finder().failures)
    decided: list[str] = []
    why = _with(program, replacer, decided) or next((f for f in finder().failures[before:] if REGIONS_FAIL in f), None)
    torchs = why is not None and (_with(program, fallback or "eager") is not None or _is_compilers(why, program, fallback))
    return Outcome(program, fallback, len(replacer.replaced), why, torchs, bool(decided))


def _is_compilers(why: str, program: Program, fallback: str | None) -> bool:
    """Whether an input that is written to before the backward pass is kept for it by a compiler alone.

    AOTAutograd keeps what is smallest, inputs among it, and computes the rest again. With kernels in a graph that may be
    something else than without any; over no compiler, nothing else is kept.
    """
    return fallback is not None and SAVED in why and _with(program, Everywhere((), finder=finder())) is None


def _with(program: Program, backend: Any, decided: list[str] | None = None) -> str | None:
    """What differs, in words; `decided` is given what roundings decide."""
    torch._dynamo.reset()
    original, model = program.module(), program.module()
    exact = "bfloat16" not in program.source and not program.autocast
    with torch._inductor.config.patch(fallback_random=True), _guards_untimed():
        compiled = torch.compile(model, backend=backend)
        for length in program.lengths:
            theirs = observe(program, original, original, length)
            if theirs.error:
                return None
            ours = observe(program, compiled, model, length)
            why = first = difference(ours, theirs, exact)
            if why:
                why = difference(ours, theirs, exact, _otherwise_rounded(program, original, length, theirs))
            if why:
                return why if length == LENGTH else f"length {length}: {why}"
            if first and decided is not None:
                decided.append(first)
    return None


def _guards_untimed() -> Any:
    """Dynamo times the guards of all that it compiles, for a log, with caches emptied before: a fifth of the time."""
    return mock.patch.object(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0)


def smaller(outcome: Outcome) -> Outcome:
    """The same failure with fewer lines."""

    def shorter(program: Program) -> list[Program]:
        found = []
        for i in reversed(range(len(program.lines))):
            line, before, after = program.lines[i], program.lines[:i], program.lines[i + 1 :]
            if line.startswith("with"):
                found.append(replace(program, lines=(*before, program.lines[i + 1].strip(), *after[1:])))
                found.append(replace(program, lines=(*before, *after[1:])))
            elif not line.startswith(" "):
                found.append(replace(program, lines=(*before, *after)))
        for i in range(len(program.results)):
            found.append(replace(program, results=(*program.results[:i], *program.results[i + 1 :])))
        switches = ("changing", "autocast", "write_before_backward", "gradients")
        return found + [replace(program, **{name: False}) for name in switches if getattr(program, name)]

    while True:
        for program in shorter(outcome.program):
            if not program.results:
                continue
            again = check(program, outcome.fallback)
            if again.why and not again.torchs:
                outcome = again
                break
        else:
            return outcome


def described(outcome: Outcome) -> str:
    p = outcome.program
    flags = ", ".join(name for name in ("gradients", "autocast", "write_before_backward", "changing") if getattr(p, name))
    return f"seed {p.seed}, fallback {outcome.fallback} ({flags}): {outcome.why}\n{p.source}"


def fallback_of(seed: int) -> str | None:
    if seed % EVERY_INDUCTOR == EVERY_INDUCTOR - 1:
        return INDUCTOR[0]
    return "aot_eager" if seed % EVERY_AOT == 0 else None


def shared_out(args: argparse.Namespace) -> int:
    """The programs in `args.jobs` processes, and their records as one; the highest of their exit statuses."""
    start = time.monotonic()
    bounds = [args.first + args.programs * i // args.jobs for i in range(args.jobs + 1)]
    within = ["--seconds", str(args.seconds)] if args.seconds else []
    with tempfile.TemporaryDirectory() as folder:
        records = [Path(folder) / f"{i}.json" for i in range(args.jobs)]
        processes = []
        for record, first, last in zip(records, bounds, bounds[1:]):
            words = ["--first", str(first), "-n", str(last - first), "--record", str(record), *within]
            processes.append(subprocess.Popen([sys.executable, __file__, *words], stdout=sys.stderr))
        while any(process.poll() is None for process in processes):
            time.sleep(MERGE_EVERY_S)
            together([json.loads(record.read_text()) for record in records if record.exists()], args, start)
        run = together([json.loads(record.read_text()) for record in records if record.exists()], args, start)
    print(f"{run['programs']} programs with {run['sites']} sites, {len(run['failures'])} differ with kernels")
    return max(abs(process.returncode) for process in processes)


def together(records: Sequence[dict[str, Any]], args: argparse.Namespace, start: float) -> dict[str, Any]:
    """Records of several processes as one, which is written."""
    counts: collections.Counter[str] = collections.Counter(programs=0, sites=0)
    for record in records:
        counts.update(
            {name: n for name, n in record.items() if isinstance(n, int) and name not in ("first_seed", "seconds")}
        )
    failures = [failure for record in records for failure in record["failures"]]
    run = {"first_seed": args.first, "failures": failures, "seconds": round(time.monotonic() - start), "jobs": args.jobs}
    if args.record:
        write_json(args.record, dict(counts) | run | {"torch": torch.__version__})
    return dict(counts) | run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--programs", type=int, default=PROGRAMS, help="how many (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one's seed (default %(default)s)")
    parser.add_argument("--seconds", type=float, help="begin no program after so many; the record says how many ran")
    parser.add_argument("--seed", type=int, help="this one alone, made smaller if it fails")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the programs (default %(default)s)")
    parser.add_argument("--record", type=Path, help=f"default: {RECORD.name} for all programs, none for some")
    args = parser.parse_args()
    is_whole = (args.first, args.programs, args.seconds) == (0, PROGRAMS, None)
    args.record = args.record or (RECORD if is_whole else None)
    if args.jobs > 1:
        raise SystemExit(shared_out(args))
    torch.set_num_threads(1)
    if args.seed is not None:
        program = make(args.seed)
        print(program.source)
        outcome = check(program, fallback_of(args.seed))
        same = "the same with kernels" + ", but for what roundings decide" * outcome.by_rounding
        print(f"{outcome.sites} sites;", described(smaller(outcome)) if outcome.why else same)
        if outcome.torchs:
            print("This is PyTorch's: torch.compile differs without kernels, too, or keeps an input that is written to.")
        raise SystemExit(outcome.why is not None and not outcome.torchs)
    start, failures, counts = time.monotonic(), [], collections.Counter()

    def record() -> None:
        run = {"first_seed": args.first, "failures": failures, "seconds": round(time.monotonic() - start)}
        if args.record:
            write_json(args.record, dict(counts) | run | {"torch": torch.__version__})

    for seed in range(args.first, args.first + args.programs):
        if args.seconds and time.monotonic() - start > args.seconds:
            break
        outcome = check(make(seed), fallback_of(seed))
        over = {f"over_{outcome.fallback or 'eager'}": 1}
        counts.update(programs=1, sites=outcome.sites, with_sites=outcome.sites > 0, **over)
        counts.update(gradients=outcome.program.gradients, changing_sizes=outcome.program.changing, torchs=outcome.torchs)
        counts.update(by_rounding=outcome.by_rounding)
        if outcome.why and not outcome.torchs:
            failures.append(described(smaller(outcome)))
            print(failures[-1], flush=True)
        if counts["programs"] % RECORD_EVERY == 0:
            record()
            seconds = time.monotonic() - start
            print(f"{counts['programs']} programs, {len(failures)} failed, {seconds:.0f} s", file=sys.stderr)
    record()
    print(f"{counts['programs']} programs with {counts['sites']} sites, {len(failures)} differ with kernels")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()

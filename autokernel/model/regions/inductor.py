"""What PyTorch's Inductor writes in Triton for a region, as a kernel file that needs no Inductor to run."""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._inductor
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from torch._inductor.utils import get_code
from torch._subclasses import FakeTensorMode

from autokernel.hardware.threads import COMPILED_HERE
from autokernel.model.regions.lowering import Unsupported
from autokernel.model.regions.spec import Region
from autokernel.model.regions.writing import LAID_OUT, in_words
from autokernel.spec import several

SETTINGS = {
    "force_disable_caches": True,  # of what is in a cache nothing is written
    **COMPILED_HERE,
}
# In a kernel's text: more settings to choose among. Not for Inductor's own choice, which times each kernel by itself and
# with its inputs in the L2: the more there are, the likelier it takes one that is slow in the model.
FEW, MANY = "'max_autotune_pointwise': False", "'max_autotune_pointwise': True"
LAUNCH_KNOBS = ("num_warps", "num_stages")
BUILT_IN = {"tl", "triton", "libdevice", "math", "tl_math"}  # modules that Inductor's kernels and helpers call
# By Inductor's own names, which it knows in a kernel that it is to launch.
IMPORTS = {
    "libdevice": "from triton.language.extra import libdevice\n",
    "tl_math": "from triton.language import math as tl_math\n",
}
GRIDS = {"Grid1D": "x", "Grid2D": "xy", "Grid2DWithYZOverflow": "xy", "Grid3D": "xyz"}
MOST_PROGRAMS = 65535  # along a grid's second dim
LEFT_OUT = re.compile(r"args\.clear|assert_\w+|torch\.cuda\.set_device|copy_if_misaligned|get_raw_stream")
FILE = '''"""{title}

As torch._inductor of PyTorch {version} writes it (https://github.com/pytorch/pytorch, BSD-3-Clause, copyright by PyTorch's
contributors), with its own helpers; every size in it is the model's.
"""

import torch
import triton
import triton.language as tl
{imports}
KERNEL_TYPE = "{name}"
BACKEND = "triton"
TUNABLES = {tunables}

{constants}


{functions}


STRIDES = {strides}


{laid_out}

def kernel_fn({parameters}) -> {returned}:
    """{shapes}"""
    {names} = (_laid_out(x, stride) for x, stride in zip(({names}), STRIDES))
{body}
'''


@dataclass(frozen=True)
class Kernel:
    """One of Inductor's kernels: its functions' text, and what it may be launched with."""

    text: str
    parameters: tuple[str, ...]  # less its constants
    grid: str  # of GRIDS
    choices: Mapping[str, Sequence[int]]  # knob -> values that Inductor chooses among
    setting: Mapping[str, int]  # knob -> its choice


def write(region: Region) -> str:
    """The kernel file. On a GPU its settings are those that Inductor chooses by its default; elsewhere its first ones.

    Raises Unsupported for what is no launch of a Triton kernel, such as a library's product; and what Inductor raises.
    """
    with config.patch(SETTINGS), torch.no_grad():
        program = _program(region)
        tree = ast.parse(program)
        loaded = {name: getattr(PyCodeCache.load(text), name) for name, text in _kernel_texts(tree)}
        chosen = {name: _setting(kernel, kernel.configs[0]) for name, kernel in loaded.items()}
        choices = {}
        for name, text in _kernel_texts(tree):
            kernel = getattr(PyCodeCache.load(text.replace(FEW, MANY)), name)
            choices[name] = [_setting(kernel, one) for one in (*loaded[name].configs, *kernel.configs)]
        if torch.cuda.is_available():
            ran = PyCodeCache.load(program)
            ran.call([x.fill_(1) for x in _empty(region)])
            chosen = {name: _setting(loaded[name], getattr(ran, name).launchers[0].config) for name in loaded}
    kernels = {
        name: _kernel(name, text, loaded[name].inductor_meta["grid_type"], choices[name], chosen[name])
        for name, text in _kernel_texts(tree)
    }
    return _file(region, tree, kernels)


def _empty(region: Region) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.strides, dtype=t.dtype, device="cuda") for t in region.arguments.values()]


def _program(region: Region) -> str:
    """Inductor's program for the region with results in their strides; nothing of it is compiled or run."""
    module = fx.symbolic_trace(region.function)
    with FakeTensorMode():
        inputs = _empty(region)
        strides = [y.stride() for y in several(region.function(*inputs))]
    (output,) = module.graph.find_nodes(op="output")
    made = [*several(output.args[0])]
    for i, t in enumerate(region.outputs):
        if strides[i] != t.strides:  # what the model has there is not of memory of its own: it is to be contiguous
            with module.graph.inserting_before(output):
                options = {"memory_format": torch.contiguous_format}
                made[i] = module.graph.call_function(torch.ops.aten.clone.default, (made[i],), options)
    output.args = (tuple(made) if len(made) > 1 else made[0],)
    module.recompile()
    with mock.patch.object(torch._dynamo, "reset"):  # get_code calls it: what the process has compiled is to stay
        programs = [text for text in get_code(torch._inductor.compile, module, inputs) if text]
    if len(programs) != 1:
        raise Unsupported(f"Inductor writes {len(programs)} programs")
    return programs[0]


def _kernel_texts(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        match node:
            case ast.Assign(value=ast.Call(func=ast.Attribute(attr="triton"), args=[name, text, *_])):
                yield ast.literal_eval(name), ast.literal_eval(text)


def _setting(kernel: Any, one: Any) -> dict[str, int]:
    """Of a triton.Config, the constants of the kernel's signature and how it is launched."""
    blocks = {k: v for k, v in one.kwargs.items() if k in kernel.fn.arg_names}
    return blocks | {knob: getattr(one, knob) for knob in LAUNCH_KNOBS}


def _kernel(name: str, text: str, grid: str, settings: Sequence[Mapping[str, int]], chosen: Mapping[str, int]) -> Kernel:
    if grid not in GRIDS:
        raise Unsupported(f"Inductor launches {name} over a {grid}")
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        function.decorator_list = [ast.parse("triton.jit", mode="eval").body]
    own = next(function for function in functions if function.name == name)
    values = {knob: sorted({setting[knob] for setting in (*settings, chosen)}) for knob in chosen}
    written = "\n\n\n".join(ast.unparse(function) for function in functions)
    parameters = tuple(a.arg for a in own.args.args if a.arg not in chosen)
    return Kernel(_without_module_names(written), parameters, grid, values, chosen)


def _without_module_names(text: str) -> str:
    """Helpers stand in the kernel file itself."""
    return re.sub(r"\btriton_helpers\.", "", text)


def _helpers(names: Sequence[str]) -> dict[str, str]:
    """Definitions of Inductor's helpers by their names, each after those that it needs."""
    found: dict[str, str] = {}

    def visit(name: str) -> None:
        helper = getattr(triton_helpers, name)
        if name in found:
            return
        if hasattr(helper, "fn"):  # a function in Triton
            text = re.sub(r"(?<![\w.])math\.", "tl_math.", textwrap.dedent(inspect.getsource(helper.fn)))
            for used in _names(text) - {name}:
                if hasattr(triton_helpers, used) and used not in BUILT_IN:
                    visit(used)
            found[name] = text.rstrip()
        elif isinstance(value := getattr(helper, "value", helper), (bool, int, float)):
            found[name] = f"{name}: tl.constexpr = tl.constexpr({value!r})"
        else:
            raise Unsupported(f"Inductor's helper {name} is not in Triton")

    for name in names:
        visit(name)
    return found


def _names(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


def _file(region: Region, tree: ast.Module, kernels: Mapping[str, Kernel]) -> str:
    knobs = {  # (kernel, knob) -> its name in the file
        (name, knob): knob.upper() + (f"_{i}" if len(kernels) > 1 else "")
        for i, (name, kernel) in enumerate(kernels.items())
        for knob in kernel.setting
    }
    names = tuple(region.arguments)
    body = Body(names, kernels, knobs).lines(tree)
    texts = "\n".join(kernel.text for kernel in kernels.values())
    helpers = _helpers(sorted(n for n in _names(texts) if hasattr(triton_helpers, n) and n not in BUILT_IN))
    functions = "\n\n\n".join([*helpers.values(), *(kernel.text for kernel in kernels.values())])
    tunables = {knobs[n, knob]: kernels[n].choices[knob] for n, knob in knobs if len(kernels[n].choices[knob]) > 1}
    return FILE.format(
        title=f"{region.title}: a region of a model's graph.",
        version=torch.__version__,
        name=region.name,
        tunables=json.dumps(tunables),
        constants="\n".join(f"{text} = {kernels[n].setting[knob]}" for (n, knob), text in knobs.items()),
        functions=functions,
        imports="".join(line for module, line in IMPORTS.items() if module in _names(functions)),
        strides=tuple(t.strides for t in region.arguments.values()),
        laid_out=LAID_OUT,
        parameters=", ".join(f"{n}: torch.Tensor" for n in names),
        names=", ".join(names) + "," * (len(names) == 1),
        shapes=in_words(names, list(region.arguments.values()), region.outputs),
        returned="torch.Tensor" if len(region.outputs) == 1 else "tuple[torch.Tensor, ...]",
        body=textwrap.indent("\n".join(body), "    "),
    )


class Body:
    """The statements of Inductor's call(args) as those of a function of the inputs."""

    def __init__(self, inputs: Sequence[str], kernels: Mapping[str, Kernel], knobs: Mapping[tuple[str, str], str]):
        self.inputs, self.kernels, self.knobs = inputs, kernels, knobs
        self.named: dict[str, str] = {}  # Inductor's tensors -> names here

    def lines(self, tree: ast.Module) -> list[str]:
        (call,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "call")
        return list(self._statements(call.body))

    def _statements(self, body: Sequence[ast.stmt]) -> Iterator[str]:
        for node in body:
            match node:
                case ast.With():
                    yield from self._statements(node.body)
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                    self.named = dict(zip((name.id for name in names), self.inputs))
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="run"))) if (
                    name in self.kernels
                ):
                    yield from self._launch(name, [self._text(argument) for argument in node.value.args])
                case ast.Delete() | ast.Expr(value=ast.Call()) | ast.Assign(value=ast.Call()) if _is_left_out(node):
                    pass
                case ast.Assign(targets=[ast.Name(id=name)]):
                    text = self._text(node.value)
                    self.named[name] = name
                    yield f"{name} = {text}"
                case ast.Return(value=ast.Tuple(elts=results)):
                    yield f"return {', '.join(map(self._text, results))}"
                case _:
                    raise Unsupported(f"Inductor's program has {ast.unparse(node).splitlines()[0]}")

    def _text(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=int() | float() as number):
                return repr(number)
            case ast.Name(id=name) if name in self.named:
                return self.named[name]
            case ast.Call(func=ast.Name(id="empty_strided_cuda"), args=[shape, strides, dtype]):
                made = ", ".join(map(ast.unparse, (shape, strides)))
                return f"torch.empty_strided({made}, dtype={ast.unparse(dtype)}, device={self.inputs[0]}.device)"
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[of, shape, strides, ast.Constant(value=0)]):
                return f"{self._text(of)}.as_strided({ast.unparse(shape)}, {ast.unparse(strides)})"
        raise Unsupported(f"Inductor's program has {ast.unparse(node)}")

    def _launch(self, name: str, arguments: Sequence[str]) -> Iterator[str]:
        kernel, constants = self.kernels[name], {k: self.knobs[name, k] for k in self.kernels[name].setting}
        given = dict(zip(kernel.parameters, arguments))
        counts = [_quotient(given[f"{d}numel"], constants.get(f"{d.upper()}BLOCK")) for d in GRIDS[kernel.grid]]
        if kernel.grid == "Grid2DWithYZOverflow":
            yield f"layers = {_quotient(counts[1], str(MOST_PROGRAMS))}"
            counts = [counts[0], _quotient(counts[1], "layers"), "layers"]
        launched = ", ".join([*arguments, *(f"{knob}={constant}" for knob, constant in constants.items())])
        yield f"{name}[({', '.join(counts)},)]({launched})"


def _is_left_out(node: ast.stmt) -> bool:
    """Whether it only checks, chooses a stream, or ends a buffer's life."""
    return isinstance(node, ast.Delete) or bool(LEFT_OUT.fullmatch(ast.unparse(node.value.func)))


def _quotient(a: str, b: str | None) -> str:
    """a / b, rounded up."""
    return f"-(-{a} // {b})" if b else a

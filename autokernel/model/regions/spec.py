"""A region as a kernel type: its oracle is its own nodes in float64, its inputs have the model's shapes and strides."""

import inspect
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from autokernel import spec as specs
from autokernel.common.records import write_json
from autokernel.model.nodes import value
from autokernel.spec import Args, KernelSpec, TensorSpec, folder_of, nonfinite_of, several
from autokernel.target import decode_case, encode

SPEC = '''"""A region of a model's graph, region.py, and its inputs, region.json: see autokernel/model/regions/spec.py."""

from pathlib import Path

from autokernel.model.regions.spec import Region, region_spec

SPEC = region_spec(Region.read(Path(__file__).parent))
'''
SOURCE = '''"""{title}: the nodes of a model's graph as Dynamo and ATen have them."""

import torch
from torch import Tensor, device, inf, nan


def region({parameters}) -> {returned}:
{body}
'''
SIZES = {"sizes": "the model's"}
ROW_SCALES = (1e-3, 30.0, 1e3, 1e4)
FEW = (1e-3, 30.0)  # of a region that is too large to be tried beforehand
# Of whole tensors: beyond integers of 24, 32 and 64 bits, and beyond what fp32 holds the squares of.
EXTREMES = (1e-24, 1e-12, 1e8, 1e12, 1e16, 1e20)
CONTRACTED = 1e-2  # of the largest result, by which products that are not rounded may change any
LARGEST = 4096.0  # of most integers among the inputs
BEYOND = 2**15, 46341  # of the others: no int16 has them, fp16 does, and int32 their products
FAR = 33, 41  # bits: so large are int64 numbers whose cubes are in the range of fp32
COMPARISON = re.compile(r"aten\.(?:eq|ne|lt|le|gt|ge)\.Scalar\([^()]*, (-?\d+)\)")  # with a whole number, in a source
HALF = re.compile(r"\bfloat16\b|\.half\b")  # in a source
INTEGER = re.compile(r"torch\.u?int\d+")  # in a source
MOST_COMPARED = 1 << 24  # integers up to which are exact in fp32
TRIED = 1 << 22  # elements of all inputs and the result, up to which it is tried
PERTURBATION, PERTURBED = 1e-9, 3  # relative, of each result on the way; times
MOST_NAN = 0.25  # of a result
NARROW = (torch.float16, torch.bfloat16, torch.float32)  # than float64
BELOW = -1.0  # planted among positive inputs: it is to make NaN where it does in the model
# Of inputs that are neither, so that most of a result is none: about zero, and above, as arcsines and logits take them,
# smaller ones where many are added up before; above one, as hyperbolic arccosines and logarithms of logarithms do.
RANGES = ((-1.0, 1.0), (0.0, 1.0), (-0.1, 0.1), (0.0, 0.1), (-0.01, 0.01), (1.0, 4.0), (4.0, 16.0))

aten = torch.ops.aten
# Operators whose results are numbers of their operands, or these negated: nothing is rounded. One of them may bring in a
# large number, such as a mask's -1e9, of which what is made afterwards, as by softmax, is as exact as of any other.
PICKING = frozenset(
    getattr(aten, name)
    for name in (
        *("where", "masked_fill", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "amax", "amin", "relu"),
        *("neg", "abs", "clone", "contiguous", "alias", "detach", "lift_fresh_copy", "scalar_tensor", "full"),
        *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"),
        *("expand", "expand_as", "permute", "transpose", "t", "mT", "movedim", "moveaxis", "swapaxes", "swapdims"),
        *("view_as", "reshape_as", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "fmax", "fmin"),
        *("slice", "narrow", "select", "flip", "cat", "stack", "constant_pad_nd", "pad"),
        *("embedding", "index_select", "gather", "index"),
        *("roll", "tril", "triu", "repeat", "repeat_interleave"),
        *("zeros_like", "ones_like", "full_like", "zeros", "ones"),
        *("max", "min", "argmax", "argmin", "max_pool1d", "max_pool2d", "max_pool3d"),
        *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    )
)
SUMS = aten.add, aten.sub, aten.rsub
OF_SEVERAL = "amax", "amin", "max", "min", "argmax", "argmin", "max_pool1d", "max_pool2d", "max_pool3d"
# Of each element alone, beside those that PyTorch calls pointwise; and what only moves elements or leaves some out.
ALONE = {"hardswish", "hardsigmoid", "prelu", "rsub", "_to_copy", "to", "floor_divide", "softshrink", "glu", "log_sigmoid"}
ALONE = PICKING - {getattr(aten, name) for name in OF_SEVERAL} | {getattr(aten, name) for name in ALONE}
Change = Callable[[Tensor], Tensor]  # of an input


@dataclass(frozen=True)
class Region:
    """`source` defines region(input_0, …); `arguments` are its inputs by name."""

    name: str
    title: str  # its operators, for people
    source: str
    arguments: Args
    flops: int  # one an element and operator
    outputs: tuple[TensorSpec, ...]
    first: str = ""  # KernelSpec.first; "" in files of before there was a choice
    positive: tuple[str, ...] = ()  # inputs that are to be positive, or most of the result would be NaN
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)  # of inputs that are to be in one, for the same
    row_scales: tuple[float, ...] = FEW  # sizes at which its own dtype holds what float64 holds
    nonfinite: tuple[float, ...] = ()  # values after which both have NaN and Inf in the same places
    # Inputs beside the first that these may be planted into, and the largest of the scales.
    planted_in: tuple[str, ...] = ()
    # Names of inputs -> EXTREMES that these may have at once: the model's own form makes numbers of them.
    extremes: dict[str, tuple[float, ...]] = field(default_factory=dict)
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)  # of inputs that are places: the least, and the end
    gathered: tuple[str, ...] = ()  # inputs of which is read what those say
    static: tuple[str, ...] = ()  # inputs that a kernel may prepare once
    library: str = ""  # the part, in words, for which a kernel may call one
    without_inductor: str = ""  # why there is no starter of what Inductor writes, on a GPU
    written: dict[str, str] = field(default_factory=dict)  # backend -> a digest of the code that wrote its starters

    @cached_property
    def function(self) -> Callable[..., Tensor]:
        names: dict[str, Any] = {}
        exec(compile(self.source, f"region {self.name}", "exec"), names)
        return names["region"]

    @property
    def floats(self) -> list[str]:
        return [name for name, t in self.arguments.items() if t.dtype.is_floating_point]

    @property
    def dtype(self) -> torch.dtype:
        return next(t.dtype for t in self.arguments.values() if t.dtype.is_floating_point)

    def write(self, starters: dict[str, str]) -> Path:
        """Set the region up as a kernel type, with these kernel files by their stems; returns its folder."""
        folder = specs.REGIONS / self.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "region.py").write_text(self.source)
        for stem, text in starters.items():
            (folder / f"{stem}.py").write_text(text)
        fields = encode(self) | {"nonfinite": [str(v) for v in self.nonfinite]}
        write_json(folder / "region.json", {k: v for k, v in fields.items() if k != "source"})
        (folder / "spec.py").write_text(SPEC)  # last: with it the type is there
        return folder

    @staticmethod
    def read(folder: Path) -> "Region":
        data = json.loads((folder / "region.json").read_text())
        outputs = data.pop("outputs", None) or [data.pop("output")]  # one, in files of before there were several
        decoded = [decode_case({"name": "", "args": args}).args for args in (data["arguments"], dict(enumerate(outputs)))]
        data |= {"arguments": decoded[0], "outputs": tuple(decoded[1].values())}
        data |= {
            name: tuple(data[name])
            for name in ("positive", "row_scales", "planted_in", "gathered", "static")
            if name in data
        }
        data["limits"] = {name: tuple(ends) for name, ends in data.get("limits", {}).items()}
        data["ranges"] = {name: tuple(ends) for name, ends in data.get("ranges", {}).items()}
        data["extremes"] = {names: tuple(sizes) for names, sizes in data.get("extremes", {}).items()}
        data["nonfinite"] = nonfinite_of(data["nonfinite"])
        return Region(**data, source=(folder / "region.py").read_text())

    def is_set_up(self) -> bool:
        return (folder_of(self.name) / "spec.py").is_file()


def source_of(piece: GraphModule, title: str) -> str:
    """Of a region's graph, as a function of its inputs that returns its result, or its results."""
    names = [node.name for node in piece.graph.find_nodes(op="placeholder")]
    graph = fx.Graph()
    results = graph.graph_copy(piece.graph, {})
    _follow_inputs(graph)
    _name_bounds(graph)
    graph.output(results if len(results) > 1 else results[0])
    lines = graph.python_code("self").src.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("def forward"))
    body = "\n".join(line.partition(";  ")[0] for line in lines[start + 1 :] if line.strip())  # without `x = None`
    parameters, returned = ", ".join(f"{name}: Tensor" for name in names), returns(len(results))
    return SOURCE.format(title=title, parameters=parameters, returned=returned, body=body)


def _follow_inputs(graph: fx.Graph) -> None:
    """Devices that the model was captured on become that of the inputs: kernels' oracles run elsewhere, too."""
    first = next(iter(graph.find_nodes(op="placeholder")))
    with graph.inserting_after(first):
        place = graph.call_function(getattr, (first, "device"))
    for node in graph.nodes:
        given = fx.node.map_aggregate((node.args, node.kwargs), lambda a: place if isinstance(a, torch.device) else a)
        node.args, node.kwargs = given
    if not place.users:
        graph.erase_node(place)


def _name_bounds(graph: fx.Graph) -> None:
    """What becomes of infinities is the largest number of the model's dtype, in float64, too."""
    for node in graph.find_nodes(op="call_function", target=aten.nan_to_num.default):
        if (dtype := value(node).dtype).is_floating_point:
            nan, above, below = bounds_of_numbers(node, dtype)
            node.args, node.kwargs = node.args[:1], {"nan": nan, "posinf": above, "neginf": below}


def bounds_of_numbers(node: Node, dtype: torch.dtype) -> tuple[float, float, float]:
    """What nan_to_num makes of NaN and the two infinities."""
    names, most = ("nan", "posinf", "neginf"), torch.finfo(dtype).max
    given = dict(zip(names, node.args[1:])) | dict(node.kwargs)
    defaults = zip(names, (0.0, most, -most))
    return tuple(default if given.get(name) is None else given[name] for name, default in defaults)


def returns(results: int) -> str:
    """The annotation of a function with so many results."""
    return "Tensor" if results == 1 else f"tuple[{', '.join(['Tensor'] * results)}]"


class InDouble(torch.overrides.TorchFunctionMode):
    """Casts to a floating-point dtype are to float64, where the inputs are; so are what PyTorch makes of integers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = fx.node.map_aggregate((args, kwargs or {}), _wide)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dtype in NARROW:  # a cosine of positions, a quotient of counts
            args, kwargs = fx.node.map_aggregate((args, kwargs), _whole_in_double)
            result = func(*args, **kwargs)
        return result


def _wide(v: Any) -> Any:
    return torch.float64 if isinstance(v, torch.dtype) and v.is_floating_point else v


def _whole_in_double(v: Any) -> Any:
    return v.double() if isinstance(v, Tensor) and v.dtype not in (torch.bool, *NARROW) else v


# Of their several results each is rounded.
ROUNDED_PARTS = (aten.var_mean, aten.std_mean)


class _Perturbed(Interpreter):
    """Runs a graph whose every input, and every result that is rounded, is off by a random part of itself."""

    def __init__(self, module: GraphModule, generator: torch.Generator):
        super().__init__(module)
        self.generator = generator

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        of = n.args[0].target if n.target is operator.getitem else n.target  # of a part whatever it is a part of
        is_picked = of is not n.target and of.overloadpacket not in ROUNDED_PARTS
        is_picked = is_picked or getattr(n.target, "overloadpacket", None) in PICKING
        if n.op == "output" or is_picked or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        like = {"generator": self.generator, "device": result.device, "dtype": torch.int8}
        signs = torch.randint(2, result.shape, **like).to(result.dtype).mul_(2).sub_(1)
        return signs.mul_(PERTURBATION).add_(1).mul_(result)


class _Contracted(Interpreter):
    """Runs a graph as compilers have it that do not round a product before something is added to it."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if getattr(n.target, "overloadpacket", None) not in SUMS or not result.is_floating_point():
            return result
        return n.target(*fx.map_arg(n.args, self._wide), **fx.map_arg(n.kwargs, self._wide)).to(result.dtype)

    def _wide(self, n: Node) -> Any:
        is_product = getattr(n.target, "overloadpacket", None) is aten.mul
        made = n.target(*fx.map_arg(n.args, lambda a: _doubled(self.env[a]))) if is_product else self.env[n]
        return _doubled(made)


def _doubled(v: Any) -> Any:
    return v.double() if isinstance(v, Tensor) and v.is_floating_point() else v


def region_spec(region: Region) -> KernelSpec:
    """One size and one dtype: the model's."""
    function, tensors = region.function, dict(region.arguments)
    module: list[GraphModule] = []  # traced at first need

    def oracle(*args: Any, **inputs: Any) -> Any:
        given = dict(zip(tensors, args)) | inputs
        if not any(t.dtype == torch.float64 for t in given.values()):
            return function(**given)
        with InDouble():
            return function(**given)

    def eager(**inputs: Any) -> Any:
        return function(**inputs)

    def magnitude(**inputs: Any) -> Any:
        """What a result changes by where each result on the way changes by a part of itself, over that part."""
        if not module:
            module.append(fx.symbolic_trace(function))
        with InDouble():
            exact = several(function(**inputs))
            device = exact[0].device
            changes = [torch.zeros_like(y, dtype=torch.float64) for y in exact]
            for seed in range(PERTURBED):
                perturbed = _Perturbed(module[0], torch.Generator(device).manual_seed(seed))
                for change, y, other in zip(changes, exact, several(perturbed.run(*inputs.values()))):
                    torch.maximum(change, (other - y).abs_(), out=change)
        made = tuple(change.nan_to_num_(0, 0, 0).div_(PERTURBATION) for change in changes)
        return made if len(made) > 1 else made[0]

    oracle.__signature__ = eager.__signature__ = _signature(tensors, len(region.outputs))
    is_wide = torch.float16 not in (t.dtype for t in tensors.values()) and not HALF.search(region.source)
    whole = partial(_whole, compared=_compared(region.source), far=is_wide)
    wholes = {n: whole for n, t in tensors.items() if _is_whole(t)} | _places_of(region)
    usual = partial(_usual, limits=region.limits)
    read = sum(t.nbytes for name, t in tensors.items() if name not in region.gathered)  # of those, one row may be all
    return KernelSpec(
        name=region.name,
        oracle=oracle,
        eager=eager,
        eager_form=f"the model's own operators ({region.title})",
        arguments=lambda dtype, sizes: tensors,
        smoke=SIZES,
        sweep=(SIZES,),
        edges=(SIZES,),
        timing={"cpu": (SIZES,), "cuda": (SIZES,)},
        flops=lambda a: region.flops,
        bytes_moved=lambda a: read + sum(t.nbytes for t in region.outputs),  # read each input once, write each result
        headline="bandwidth_gb_s",
        fill=_bounded(region) | wholes,
        filled={what: partial(usual, kind) for what, kind in USUAL.items() if any(map(_is_whole, tensors.values()))},
        first=region.first or region.floats[0],
        adversarial={"ties": _ties} if any(map(_is_whole, region.outputs)) else {},
        row_scales=region.row_scales,
        nonfinite=region.nonfinite,
        planted_in=region.planted_in,
        extremes={tuple(names.split()): sizes for names, sizes in region.extremes.items()},
        magnitude=magnitude,
        dtypes=(region.dtype,),
        layouts=(),
        results=region.outputs,
        static=frozenset(region.static),
        library_calls=region.library,
    )


def _signature(names: Sequence[str], results: int) -> Any:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    annotation = tuple[(Tensor,) * results] if results > 1 else Tensor
    return inspect.Signature([inspect.Parameter(n, kind, annotation=Tensor) for n in names], return_annotation=annotation)


def _places_of(region: Region) -> dict[str, Any]:
    return {name: partial(_places, ends=ends) for name, ends in region.limits.items()}


def _bounded(region: Region) -> dict[str, Any]:
    ranged = {name: partial(_between, ends=ends) for name, ends in region.ranges.items()}
    return {name: _positive for name in region.positive} | ranged


def _between(tensor: TensorSpec, args: Any, generator: torch.Generator, ends: tuple[float, float]) -> Tensor:
    return torch.empty(tensor.shape).uniform_(*ends, generator=generator)


def _places(tensor: TensorSpec, args: Any, generator: torch.Generator, ends: tuple[int, int]) -> Tensor:
    """Anywhere in a dim, both its ends among them."""
    made = torch.randint(*ends, tensor.shape, generator=generator)
    kind = torch.randint(16, tensor.shape, generator=generator)
    return torch.where(kind == 0, ends[0], torch.where(kind == 1, ends[1] - 1, made))


def _ties(inputs: dict[str, Any]) -> dict[str, Any]:
    """Of a few numbers each: the largest of a row is there several times."""
    return {name: x.round().clamp(-1, 1) if x.is_floating_point() else x for name, x in inputs.items()}


def _is_whole(tensor: TensorSpec) -> bool:
    return not tensor.dtype.is_floating_point


def _whole(
    tensor: TensorSpec, args: Any, generator: torch.Generator, compared: Sequence[int] = (), far: bool = False
) -> Tensor:
    """`far`: with numbers that 32 bits have no room for, nor fp16."""
    if tensor.dtype == torch.bool:
        return _truths(tensor.shape, generator)
    bounds = torch.iinfo(tensor.dtype)
    made = _integers(tensor.shape, generator, [n for n in compared if bounds.min < n < bounds.max])
    return _with_far(made, generator) if far and tensor.dtype == torch.int64 else made


def _along(x: Tensor, dim: int) -> Tensor:
    """The number of each place along a dim, counted from the last; 0 where there is no such dim."""
    if x.dim() < -dim:
        return torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    return torch.arange(x.shape[dim], device=x.device).view(-1, *(1,) * (-1 - dim)).expand(x.shape)


# What masks and integers are in models, beside chance: integers are in order, masks hide what is later, or is padding.
USUAL: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "in order along rows": (lambda x: _along(x, -1) <= _along(x, -2), lambda x: _along(x, -1)),
    "in order along columns": (lambda x: _along(x, -1) >= _along(x, -2), lambda x: _along(x, -2)),
    "alike in all rows": (
        lambda x: 4 * _along(x, -1) < 3 * (x.shape[-1] if x.dim() else 1),
        lambda x: (x[..., :1, :] if x.dim() > 1 else x[:1] if x.dim() else x).expand(x.shape),
    ),
}


def _usual(
    kind: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]],
    inputs: dict[str, Any],
    generator: torch.Generator,
    limits: Mapping[str, tuple[int, int]],
) -> dict[str, Tensor]:
    """All masks and integers among `inputs` of one kind of USUAL; places begin again where a dim ends."""
    mask, integers = kind
    wholes = {name: x for name, x in inputs.items() if not x.is_floating_point()}
    made = {n: (mask if x.dtype == torch.bool else integers)(x).to(x.dtype) for n, x in wholes.items()}
    return {n: (x % limits[n][1] if n in limits else x).contiguous() for n, x in made.items()}


def _integers(shape: Sequence[int], generator: torch.Generator, compared: Sequence[int] = ()) -> Tensor:
    """Small ones, a quarter up to LARGEST, as positions are, one in sixteen BEYOND, one below zero, and one of those that
    the region compares integers with, or beside it."""
    small, beyond = (torch.randint(*ends, shape, generator=generator) for ends in ((0, 8), BEYOND))
    sizes, kind = torch.rand((2, *shape), generator=generator)
    large = torch.where(kind < 1 / 16, -(128**sizes), LARGEST**sizes).long()
    made = torch.where(kind < 5 / 16, large, torch.where(kind < 6 / 16, beyond, small))
    if not compared:
        return made
    near = torch.tensor([n + side for n in compared for side in (-1, 0, 1)])
    chosen = near[torch.randint(len(near), shape, generator=generator)]
    return torch.where((kind >= 6 / 16) & (kind < 7 / 16), chosen, made)


def _with_far(integers: Tensor, generator: torch.Generator) -> Tensor:
    """In a quarter of all draws one in eight plus or minus a power of two that 32 bits have no room for: cut off to these
    it is another, and in fp32 it is its neighbours. In the other draws nothing else is hidden beside such numbers."""
    draw = torch.rand((), generator=generator)
    far = 2 ** int(torch.randint(*FAR, (), generator=generator))
    kind = torch.randint(16, integers.shape, generator=generator)
    return integers + far * ((kind == 0).long() - (kind == 1).long()) if draw < 1 / 4 else integers


def _compared(source: str) -> tuple[int, ...]:
    """The whole numbers that a region compares something with."""
    return tuple(sorted({int(n) for n in COMPARISON.findall(source) if abs(int(n)) < MOST_COMPARED}))


def _truths(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """By chance; of every eight rows one all alike of either kind, of two the first or the last half, as masks have them,
    and of one all but one. In some draws so along the first dim, and in some all are true, as where nothing is masked."""
    truths = torch.randint(2, shape, generator=generator).bool()
    draw, place = torch.rand(2, generator=generator).tolist()
    if draw < 1 / 8:
        return torch.ones_like(truths)
    rows = truths.view(-1, shape[-1]) if shape else truths[None, None]
    if draw < 3 / 8 and len(shape) > 1 and truths.numel():
        rows = truths.view(shape[0], -1).T
    if len(rows) >= 8:
        half, one = rows.shape[1] // 2, int(place * rows.shape[1])
        rows[1::8], rows[4::8], rows[7::8, :half], rows[3::8, half:], rows[6::8] = False, True, False, False, False
        rows[6::8, one : one + 1] = True
    return truths


def _positive(tensor: TensorSpec, args: Any, generator: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=generator).abs() + 1e-3


def examined(region: Region) -> Region | None:
    """`region` with what its inputs may be, found out by trying; None where no inputs of ours give it a result."""
    numel, floats = sum(t.numel for t in (*region.arguments.values(), *region.outputs)), region.floats
    # The largest: what comes before it may be a norm's weight.
    region = replace(region, first=region.first or max(floats, key=lambda name: region.arguments[name].numel))
    if numel > TRIED:
        return region
    bounded = next((trial for trial in _with_bounds(region) if _nan_part(trial) <= MOST_NAN), None)
    if bounded is None:
        return None
    region = bounded
    same = partial(_same_specials, region, _decomposed(region))
    scales = tuple(scale for scale in ROW_SCALES if same(lambda x, s=scale: x * s))
    outside = _outside(region)
    values = tuple(v for v in (math.nan, math.inf, -math.inf, *outside) if same(_planted(v)))
    if set(floats) <= {*region.positive, *region.ranges} and not set(outside) <= set(values):
        return None  # nothing would tell a logarithm from that of the size
    region = replace(region, row_scales=scales or FEW[:1], nonfinite=values)
    planted = tuple(_planted(v) for v in (*values, max(region.row_scales)))
    others = [name for name in floats if name != region.first]
    planted_in = tuple(n for n in others if all(same(change, n) for change in (*planted, _zeros)))
    return replace(region, planted_in=planted_in, extremes=_extremes_of(region))


def _with_bounds(region: Region) -> Iterator[Region]:
    """`region` with bounds for what its inputs may be: none, then for some or all to be positive, then in RANGES."""
    floats = region.floats
    for positive in ((), *((name,) for name in floats), tuple(floats[1:]), tuple(floats[:-1]), tuple(floats)):
        yield replace(region, positive=positive)
    for names in dict.fromkeys((*((name,) for name in floats), tuple(floats))):
        for ends in RANGES:
            yield replace(region, ranges=dict.fromkeys(names, ends))


def _outside(region: Region) -> tuple[float, ...]:
    """What is planted beyond the bounds of the first input: it is to make NaN where it does in the model."""
    if region.first not in region.ranges:
        return (BELOW,) if region.positive else ()
    low, high = region.ranges[region.first]
    return 2 * low - high, 2 * high - low


def _extremes_of(region: Region) -> dict[str, tuple[float, ...]]:
    """Of the first input and of all together; none where numbers become integers, which have no room for them, nor where
    numbers of several elements are added up, of which kernels have other forms, right for numbers as models have them."""
    module = fx.symbolic_trace(region.function)
    if INTEGER.search(region.source) or not all(map(_is_of_each_alone, module.graph.nodes)):
        return {}
    largest = min(torch.finfo(region.arguments[name].dtype).max for name in region.floats) / 16
    sizes = [size for size in EXTREMES if size < largest]
    groups = {" ".join(names): names for names in ((region.first,), region.floats)}
    right = partial(_is_right_at, region_spec(region), module, _drawn(region))
    return {words: tuple(size for size in sizes if right(names, size)) for words, names in groups.items()}


def _is_of_each_alone(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op != "call_function" or node.target in (operator.getitem, getattr)
    return torch.Tag.pointwise in node.target.tags or node.target.overloadpacket in ALONE


def _is_right_at(
    spec: KernelSpec, module: GraphModule, inputs: dict[str, Tensor], names: Sequence[str], size: float
) -> bool:
    """Whether all results are finite, where these inputs are so large, in the model's dtype and in float64, and where no
    product is rounded before something is added to it, which makes no other numbers either."""
    inputs = inputs | {name: inputs[name] * size for name in names}
    contracted = _Contracted(module, garbage_collect_values=False).run(*inputs.values())
    results = zip(several(spec.eager(**inputs)), several(contracted), several(spec.oracle(**_in_double(inputs))))
    return all(_are_alike(*made) for made in results if made[0].is_floating_point())


def _are_alike(own: Tensor, contracted: Tensor, exact: Tensor) -> bool:
    if not all(len(_specials(made)[0]) == 0 for made in (own, contracted, exact.to(own.dtype))):
        return False
    return bool((contracted - own).abs().amax() <= CONTRACTED * (1 + own.abs().amax()))


def _planted(v: float) -> Change:
    def plant(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[x.numel() // 3] = v
        return x

    return plant


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def _drawn(region: Region) -> dict[str, Tensor]:
    generator, inputs, fills = torch.Generator().manual_seed(0), {}, _places_of(region) | _bounded(region)
    for name, t in region.arguments.items():
        fill = fills.get(name, _whole if _is_whole(t) else None)
        contents = fill(t, None, generator) if fill else torch.randn(t.shape, generator=generator)
        inputs[name] = contents.to(t.dtype)
    return inputs


def _nan_part(region: Region) -> float:
    results = several(region_spec(region).oracle(**_in_double(_drawn(region))))
    return max(result.isnan().float().mean().item() for result in results)


def _decomposed(region: Region) -> Callable[..., Any]:
    """The region's oracle by the formulas that torch.compile has on a GPU for what ATen has as x * a + b: group norm and
    batch norm as (x - mean) * rstd * weight + bias, which has other signs and other NaN beside an infinite weight."""
    spec, inputs = region_spec(region), _in_double(_drawn(region))
    formulas = get_decompositions([aten.native_batch_norm, aten._native_batch_norm_legit_no_training])
    formulas[aten.native_group_norm.default] = _group_norm
    with torch.no_grad():
        made = make_fx(lambda *args: spec.oracle(*args), formulas)(*inputs.values())
    return lambda **inputs: made(*inputs.values())


def _group_norm(x: Tensor, weight: Any, bias: Any, batch: int, channels: int, size: int, groups: int, eps: float) -> Any:
    """aten.native_group_norm, without its mean and its rstd."""
    y = F.layer_norm(x.reshape(batch, groups, -1), (channels * size // groups,), eps=eps).reshape(x.shape)
    weight, bias = (v if v is None else v.view(-1, *[1] * (x.dim() - 2)) for v in (weight, bias))
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), None, None


def _same_specials(region: Region, by_formulas: Callable[..., Any], change: Change, name: str = "") -> bool:
    """Whether, after `change` of an input (the first, unless it is named), NaN and Inf are in the same places in its dtype,
    in float64, and in float64 by other formulas (`_decomposed`)."""
    inputs, spec = _drawn(region), region_spec(region)
    name = name or region.first
    if not inputs[name].is_floating_point():
        return False
    inputs[name] = change(inputs[name])
    double = _in_double(inputs)
    results = zip(several(spec.eager(**inputs)), several(spec.oracle(**double)), several(by_formulas(**double)))
    return all(
        all(map(torch.equal, specials, _specials(exact.to(own.dtype))))
        for own, *others in results
        if own.is_floating_point()
        for specials in (_specials(own),)
        for exact in others
    )


def _specials(t: Tensor) -> tuple[Tensor, Tensor]:
    """Where numbers are not finite, and which these are: 0 for NaN, 1 for Inf, -1 for -Inf. Mostly all are finite, which
    one sum tells: of a region with many inputs, such as embeddings, it is asked some hundred times."""
    flat = t.flatten()
    nan = flat - flat  # where a number is not finite, else 0
    places = torch.empty(0, dtype=torch.long) if nan.sum() == 0 else nan.isnan().nonzero().flatten()
    return places, flat[places].nan_to_num(0.0, 1.0, -1.0)


def _in_double(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}

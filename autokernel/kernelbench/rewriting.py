"""A module rewritten with our kernels, as source: sites that capture finds in Model become calls in ModelNew.forward."""

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from autokernel.common.backends import default_backend
from autokernel.kernelbench.modelnew import make
from autokernel.kernelbench.problems import Problem, parse
from autokernel.model import nodes
from autokernel.model.capture import capture
from autokernel.model.match import SiteFinder
from autokernel.model.nodes import simplify
from autokernel.model.patterns import Parameter, Site
from autokernel.model.regions.growing import region_finder
from autokernel.spec import load_spec

DECLARED = ("KERNEL_TYPE", "BACKEND", "TUNABLES")
FOOTER = """
# --- for the gate ---

from autokernel.kernelbench.modelnew import as_kernel  # noqa: E402

KERNEL_TYPE = "{kernel_type}"
BACKEND = "{backend}"
kernel_fn = as_kernel(ModelNew)
"""

SPELLED = {  # as graphs write them
    "inf": "from math import inf  # noqa: E402",
    "nan": "from math import nan  # noqa: E402",
    "device": "from torch import device  # noqa: E402",
}


class NotRewritten(Exception):
    """Why no ModelNew is proposed, in one line."""


@dataclass(frozen=True)
class Rewriting:
    """A graph of the problem's Model, and where our kernels fit in it."""

    problem: Problem
    module: GraphModule
    names: dict[Node, str]  # placeholder -> what it is in forward: "x0", "self.fc.weight"
    sites: tuple[Site, ...]

    @property
    def kernel_types(self) -> list[str]:
        return sorted({site.kernel_type for site in self.sites})

    def left(self) -> int:
        """How many operators stay with PyTorch."""
        claimed = {node for site in self.sites for node in site.nodes}
        return sum(n.op == "call_function" and n not in claimed for n in self.module.graph.nodes)


def complete(source: str, kernel_type: str, backend: str) -> str:
    """A file with ModelNew as a kernel file: what the gate needs to know is added where it is missing."""
    return source if re.search(r"(?m)^kernel_fn\b", source) else source.rstrip() + "\n" + FOOTER.format(**locals())


def unchanged(problem: Problem, backend: str) -> str:
    """A ModelNew that does what Model does: somewhere to start from by hand."""
    source = f"{prelude(problem)}\n\n\nclass ModelNew(Model):\n    pass  # write forward() anew\n"
    return complete(source, problem.name, backend)


def rewrite(problem: Problem, backend: str, device: str = "cpu") -> Rewriting:
    """Find the places for our kernels. Raises NotRewritten, with a reason, if there are none."""
    model = make(problem.module.Model, problem.arguments["init"]).to(device)
    inputs = [_as_tensor(v, device) for v in problem.inputs(0).values()]
    if not all(isinstance(v, Tensor) for v in inputs):
        raise NotRewritten("an argument that is no tensor: a graph is of one value of it")
    try:
        graphs = capture(model, tuple(inputs), {}).graphs
    except Exception as error:  # of a model that Dynamo cannot follow
        raise NotRewritten(f"not captured: {type(error).__name__}") from error
    if len(graphs) != 1:
        raise NotRewritten(f"captured in {len(graphs)} graphs")
    module = graphs[0].module
    if module.graph.find_nodes(op="get_attr"):
        raise NotRewritten("its graph has a tensor of its own, made while it was traced")
    regions = region_finder(device, fewest=1) if backend == default_backend(device) else None
    sites = [s for s in SiteFinder(regions=regions).find(module) if load_spec(s.kernel_type).starters(backend)]
    if not sites:
        raise NotRewritten("no site for a kernel of ours")
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    numbers = {i for i, v in enumerate(problem.inputs(0).values()) if isinstance(v, float)}
    names = dict(zip(placeholders, map(_namer(model, inputs, numbers, device), graphs[0].inputs)))
    return Rewriting(problem, module, names, tuple(sites))


def variants(rewriting: Rewriting, backend: str) -> dict[str, str]:
    """Sources of ModelNew by file stem: `<backend>_kernel` has the main starters, the others one alternative each, or leave
    one type to PyTorch, whose own may be the faster ones there."""
    starters = {t: list(load_spec(t).starters(backend).items()) for t in rewriting.kernel_types}
    main = {t: files[0][1] for t, files in starters.items()}
    sources = {f"{backend}_kernel": source_of(rewriting, backend, main)}
    for t, files in starters.items():
        for stem, path in files[1:]:
            sources[f"{stem}_{t}"] = source_of(rewriting, backend, main | {t: path})
    for t in main if len(main) > 1 else ():
        others = replace(rewriting, sites=tuple(site for site in rewriting.sites if site.kernel_type != t))
        sources[f"{backend}_without_{t}"] = source_of(others, backend, {k: v for k, v in main.items() if k != t})
    return sources


def source_of(rewriting: Rewriting, backend: str, files: dict[str, Path]) -> str:
    """ModelNew with these kernel files written out above it."""
    problem = rewriting.problem
    kernels = [inlined(path.read_text(), t) for t, path in sorted(files.items())]
    tunables = {k: v for kernel in kernels for k, v in kernel.tunables.items()}
    imports = sorted({line for kernel in kernels for line in kernel.imports})
    title = f'"""{problem.name} with kernels for {", ".join(sorted(files))}."""'
    parts = [title, "\n".join(imports), f"TUNABLES = {tunables!r}", *(k.body for k in kernels), prelude(problem)]
    return complete("\n\n".join([*parts, _class(rewriting)]), problem.name, backend)


def prelude(problem: Problem) -> str:
    """The problem's file at the sizes at hand, without what makes its inputs."""
    tree = parse(problem.path, problem.sizes)
    made = ("get_inputs", "get_init_inputs")
    tree.body = [s for s in tree.body if not (isinstance(s, ast.FunctionDef) and s.name in made)]
    return ast.unparse(tree)


def _as_tensor(v: Any, device: str) -> Any:
    """A number of the problem's as a tensor of no dim, of which a graph is of every value."""
    return torch.tensor(v, device=device) if isinstance(v, float) else v.to(device) if isinstance(v, Tensor) else v


def _namer(model: nn.Module, inputs: Sequence[Any], numbers: Collection[int], device: str) -> Any:
    """numbers: the places of inputs that are numbers to the problem."""
    made = (f'torch.tensor(x{i}, device="{device}")' if i in numbers else f"x{i}" for i in range(len(inputs)))
    known: dict[int, str] = dict(zip(map(id, inputs), made))
    for path, module in model.named_modules():
        attributes = {**vars(module), **module._parameters, **module._buffers}
        for name, v in attributes.items():
            if isinstance(v, Tensor):
                known.setdefault(id(v), _path(f"{path}.{name}" if path else name))

    def name(v: Any) -> str:
        if id(v) not in known:
            raise NotRewritten("its graph takes a tensor that is neither an input nor of the module")
        return known[id(v)]

    return name


def _path(dotted: str) -> str:
    """`self.layers[0].weight` for "layers.0.weight"."""
    return "self" + "".join(f"[{p}]" if p.isdecimal() else f".{p}" for p in dotted.split("."))


def _class(rewriting: Rewriting) -> str:
    graph = _with_calls(rewriting)
    code = re.sub(r"kernels_here_(\w+_kernel_fn)", r"\1", graph.python_code("self").src)
    code = re.sub(r"  # .*|;  \w+ = (\w+ = )*None", "", code)  # types of arguments, and what is freed
    _, _, rest = code.strip().partition("\n")
    count = sum(name.startswith("inputs.") for name in rewriting.problem.arguments)
    assigned = [f"    {node.name} = {name}" for node, name in rewriting.names.items() if node.name != name]
    forward = [f"def forward(self, {', '.join(f'x{i}' for i in range(count))}):", *assigned, *rest.splitlines()]
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    if isinstance(result, (tuple, list)):
        forward[-1] = forward[-1].rstrip() + "[0]"
    method = "\n".join(f"    {line}" for line in forward if line.strip())
    used = [line for name, line in SPELLED.items() if re.search(rf"\b{name}\b", method)]
    return "\n".join([*used, "", "", "class ModelNew(Model):", method]) + "\n"


def _with_calls(rewriting: Rewriting) -> torch.fx.Graph:
    """A copy of the graph in which each site is a call of its kernel."""
    copied: dict[Node, Node] = {}
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(rewriting.module.graph, copied))
    owner = GraphModule(rewriting.module, graph)
    tracer = GraphAppendingTracer(owner.graph)
    again = dict(zip(rewriting.module.graph.nodes, owner.graph.nodes))
    for node in owner.graph.nodes:
        simplify(node)  # a `view` may not fit the strides of a kernel's result, a `reshape` does
    results: dict[Node, Node] = {}
    stand_ins = {t: FunctionType((lambda: None).__code__, {}, f"{t}_kernel_fn") for t in rewriting.kernel_types}

    def proxied(v: Any) -> Any:
        return Parameter(results.get(again[v], again[v]), tracer, nodes.value(v).dim()) if isinstance(v, Node) else v

    for site in rewriting.sites:
        kernel = stand_ins[site.kernel_type]
        kernel.__module__ = "kernels_here"

        def call(kernel: Any = kernel, site: Site = site, **arguments: Any) -> Proxy:
            given = site.case.args | arguments
            named = {k: v.node if isinstance(v, Proxy) else v for k, v in given.items()}
            name = f"{site.kernel_type}_here"
            return Proxy(owner.graph.create_node("call_function", kernel, (), named, name), tracer)

        replaced = [again[node] for node in site.outputs]
        with owner.graph.inserting_before(replaced[0]):
            result = site.pattern.call(call, **{k: proxied(v) for k, v in site.parameters.items()})
            made = [result[i].node for i in range(len(replaced))] if site.others else [result.node]
        results |= dict(zip(replaced, made))
        for old, new in zip(replaced, made):
            old.replace_all_uses_with(new)
    owner.graph.eliminate_dead_code()
    return owner.graph


# --- a kernel file inside another ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inlined:
    """A kernel file whose module-level names begin with its type, so that several fit into one file."""

    imports: list[str]
    tunables: dict[str, list]
    body: str


def inlined(source: str, prefix: str) -> Inlined:
    tree = ast.parse(source)
    literals = {
        s.targets[0].id: s.value for s in tree.body if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)
    }
    tunables = ast.literal_eval(literals["TUNABLES"]) if "TUNABLES" in literals else {}
    definitions = [s for s in tree.body if isinstance(s, (ast.FunctionDef, ast.ClassDef))]
    ours = {*literals, *(d.name for d in definitions)}
    imports = [ast.unparse(s) for s in tree.body if isinstance(s, (ast.Import, ast.ImportFrom))]
    edits = [(node.lineno, node.col_offset, node.id) for node in _of_module(tree) if node.id in ours]  # line, byte, name
    for node in definitions:
        keyword = "def " if isinstance(node, ast.FunctionDef) else "class "
        edits.append((node.lineno, node.col_offset + len(keyword), node.name))
    lines = [line.encode() for line in source.splitlines()]
    for number, column, name in sorted(edits, reverse=True):
        line = lines[number - 1]
        assert line[column:].startswith(name.encode()), (line, name)
        lines[number - 1] = line[:column] + f"{prefix}_".encode() + line[column:]
    dropped = [s for s in tree.body if isinstance(s, (ast.Import, ast.ImportFrom)) or _is_docstring(s) or _declares(s)]
    gone = {n for s in dropped for n in range(s.lineno, s.end_lineno + 1)}
    body = "\n".join(line.decode() for n, line in enumerate(lines, 1) if n not in gone)
    return Inlined(imports, {f"{prefix}_{k}": v for k, v in tunables.items()}, re.sub(r"\n{4,}", "\n\n\n", body).strip())


def _of_module(node: ast.AST, hidden: frozenset[str] = frozenset()) -> Iterator[ast.Name]:
    """The names in `node` that are the module's: not those of parameters, by which a function may be called."""
    if isinstance(node, ast.Name) and node.id not in hidden:
        yield node
    inside = hidden
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        inside |= {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _of_module(child, inside if field == "body" else hidden)


def _is_docstring(s: ast.stmt) -> bool:
    return isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) and isinstance(s.value.value, str)


def _declares(s: ast.stmt) -> bool:
    return isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name) and s.targets[0].id in DECLARED

"""A kernel file in C++ for a lowered region."""

from collections.abc import Sequence
from dataclasses import dataclass

from autokernel.model.regions import convolutions
from autokernel.model.regions.cpp import TYPES, Function, indented
from autokernel.model.regions.cpp_layouts import function_of
from autokernel.model.regions.expressions import Limit, Lowered
from autokernel.model.regions.moments import with_exact_means
from autokernel.model.regions.writing import LAID_OUT, in_words, made, place, result_names, returned
from autokernel.spec import TensorSpec

FILE = '''"""{title}

Written from the model's graph; every size in it is the model's.
"""

import torch
{imports}
from autokernel.build import cpp_function

KERNEL_TYPE = "{name}"
BACKEND = "cpp"
TUNABLES = {tunables}

{constants}

SOURCE = r"""
#include <autokernel.hpp>
#include <elements.hpp>
{headers}
{code}
"""

_run = cpp_function(SOURCE, "run", "{signature}", {given})
STRIDES = {strides}
{functions}

{laid_out}

def kernel_fn({parameters}) -> {returned}:
    """{shapes}"""{before}
    inputs = [_laid_out(x, stride) for x, stride in zip(({names},), STRIDES)]
    {made}
    {run}
    return {results}
'''
RUN_WITHIN = """if {call}:
        raise IndexError("an index is out of range")"""


@dataclass(frozen=True)
class Read:
    """What the loops read, if it is not the inputs as they are: names, and the statements that convolutions are made by."""

    names: Sequence[str]
    specs: Sequence[TensorSpec]
    convolved: Sequence[str]


def write(
    name: str, title: str, lowered: Lowered, inputs: Sequence[TensorSpec], read: Read | None = None
) -> dict[str, str]:
    """A kernel file, by its stem."""
    lowered = with_exact_means(lowered)
    names, results = [f"input_{i}" for i in range(len(inputs))], result_names(lowered.results)
    read = read or Read(names, inputs, ())
    function = function_of(lowered)
    constants = function.constants()
    call = f"_run(*(x.data_ptr() for x in inputs), {', '.join(f'{y}.data_ptr()' for y in results)})"
    text = FILE.format(
        title=title,
        name=name,
        tunables="{" + ", ".join(f'"{c}": {values}' for c, (_, values, _) in constants.items()) + "}",
        constants="\n".join(f"{c} = {value}  # {meaning}" for c, (value, _, meaning) in constants.items()),
        given=", ".join(f"{c}={c}" for c in constants),
        headers=function.headers,
        imports="from torch.utils.weak import WeakTensorKeyDictionary\n" if read.convolved else "",
        functions=convolutions.FUNCTION if read.convolved else "",
        before="".join(f"\n    {line}" for line in read.convolved),
        code=_code(function, lowered, read.specs),
        signature="p" * (len(read.specs) + len(results)),
        strides=repr(tuple(t.strides for t in read.specs)),
        laid_out=LAID_OUT,
        parameters=", ".join(f"{n}: torch.Tensor" for n in names),
        names=", ".join(read.names),
        shapes=in_words(names, inputs, [result.spec for result in lowered.results]),
        returned=returned(lowered.results),
        made=made(lowered.results),
        run=RUN_WITHIN.format(call=call) if lowered.limits else call,
        results=", ".join(results),
    )
    return {"cpp_kernel": text}


def _code(function: "Function", lowered: Lowered, inputs: Sequence[TensorSpec]) -> str:
    pointers = [f"const {TYPES[t.dtype]}* __restrict x{i}" for i, t in enumerate(inputs)]
    pointers += [f"{TYPES[r.spec.dtype]}* __restrict {y}" for y, r in zip(result_names(lowered.results), lowered.results)]
    head = f'extern "C" int run({", ".join(pointers)}) {{'
    limits = [line for n, limit in enumerate(lowered.limits) for line in _within(f"beyond{n}", limit, inputs[limit.index])]
    return "\n".join([head, *indented([*limits, *function.lines()]), "    return 0;", "}"])


def _within(beyond: str, limit: Limit, t: TensorSpec) -> list[str]:
    """Statements that return 1 where an index is beyond the ends."""
    index = [f"j{d}" for d in range(len(t.shape))]
    loops = [f"for (int64_t {j} = 0; {j} < {n}; ++{j})" for j, n in zip(index, t.shape)]
    at = f"x{limit.index}[{place(index, t.strides)}]"
    shared = f"#pragma omp parallel for schedule(static) reduction(| : {beyond}) if ({t.numel}LL >= PARALLEL_FROM)"
    lines = [f"int {beyond} = 0;", *([shared] if loops else []), *loops]
    return [*lines, f"    {beyond} |= ({at} < {limit.lowest}) | ({at} >= {limit.end});", f"if ({beyond}) return 1;"]

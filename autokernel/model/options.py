"""A model and what it is measured on, as a command line says it: parsed before PyTorch is imported, which takes seconds."""

import argparse
import json
import re
from dataclasses import dataclass
from typing import Any

from autokernel.common.preflight import named

MODEL, CLASS_NAME, DTYPE = "models/llama.py", "MiniLlama", "float32"  # where nothing else is said
SHORT = (1, 128)  # the inputs of that model: a newcomer's minutes hold more passes and experiments than with 512 tokens
BASELINES = ("eager", "compile", "best")
WARMUP, ITERATIONS = 3, 10  # passes before and while something is measured


@dataclass(frozen=True)
class Part:
    """One kind of pass in a mix: `weight` passes of it for every `weight` of the others."""

    name: str
    input_shape: tuple[int, ...] | None = None  # None: example_inputs(name) of the model's file has them
    weight: float = 1.0


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """--model, --class-name and so on; workload.workload_from() reads them. console.add_device_argument() adds --device."""
    group = parser.add_argument_group("workload")
    where = group.add_mutually_exclusive_group()
    where.add_argument("--model", type=named, default=MODEL, metavar="FILE", help="Python file (default: %(default)s)")
    where.add_argument("--module", type=named, metavar="NAME", help="an installed module instead of a file: transformers")
    group.add_argument("--class-name", type=named, default=CLASS_NAME, metavar="NAME", help="(default: %(default)s)")
    group.add_argument(
        "--model-args",
        type=_json_object,
        default={},
        metavar="JSON",
        help="""of the constructor (of the config, for transformers): '{"n_layers": 4}'""",
    )
    group.add_argument(
        "--input-shape",
        type=_shape,
        metavar="1,512",
        help="""(1,512, of the default model 1,128; where the model's file has example_inputs(), its inputs); several
        inputs: batch, length""",
    )
    group.add_argument(
        "--workload",
        type=_part,
        action="append",
        default=[],
        dest="mix",
        metavar="'NAME:SHAPE*WEIGHT'",
        help="""one kind of pass in a mix, given several times instead of --input-shape: with --workload prefill:1,512
        --workload 'decode:8,1*64' there are 64 passes of 8,1 for each of 1,512; without :SHAPE the inputs are those of
        example_inputs(NAME) in the model's file""",
    )
    group.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default=DTYPE)
    group.add_argument(
        "--pretrained", type=named, metavar="ID", help="weights to load, for classes that have from_pretrained()"
    )


def _part(text: str) -> Part:
    form = re.fullmatch(r"([A-Za-z][\w-]*)(?::([\d,]+))?(?:\*(\d+(?:\.\d+)?))?", text)
    if not form or not float(form[3] or 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not like decode:8,1*64 (NAME:SHAPE*WEIGHT)")
    return Part(form[1], form[2] and _shape(form[2]), float(form[3] or 1))


def _shape(text: str) -> tuple[int, ...]:
    if not all(word.isdecimal() and int(word) > 0 for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 1,512")
    return tuple(map(int, text.split(",")))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # nested too deeply
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value

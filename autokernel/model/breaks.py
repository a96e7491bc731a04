"""Where a graph ends before its function does, and why, in words."""

import linecache
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch._dynamo.utils as dynamo

DELAYED = re.compile(r"Unsupported function call \(delayed\)[\s\S]*?Reason: (.*)")  # of a break, and why it is one
ADVICE = re.compile("Set TORCHDYNAMO_VERBOSE|For even more developer context")  # PyTorch's, below an error


def number_of(compilation: Any) -> int:
    return int(compilation.compile_id.partition("/")[0])


Function = tuple[str, int, str]  # file, first line, name


def left_out(skipped: Mapping[int, str]) -> tuple[dict[Function, str], list[str]]:
    """Why Dynamo leaves functions, or something in them, out of its graphs: by function, and all of the reasons.

    skipped: the same of what is left out on our account, by Dynamo's numbers.
    """
    frames = dynamo.get_compilation_metrics()
    reasons: dict[Function | None, list[str]] = defaultdict(list)
    for frame in frames:
        if frame.fail_type:
            place = frame.fail_user_frame_filename, frame.fail_user_frame_lineno
            reasons[function_of(frame)].append(in_words(frame.fail_reason or frame.fail_type, *place))
        elif why := skipped.get(number_of(frame)):
            reasons[function_of(frame)].append(why)
    for owner, why in breaks(frames):
        reasons[owner].append(why)
    by_function = {function: "; ".join(dict.fromkeys(whys)) for function, whys in reasons.items() if function}
    return by_function, [why for whys in reasons.values() for why in whys]


def breaks(frames: Sequence[Any]) -> Iterator[tuple[Function | None, str]]:
    """Why Dynamo broke graphs, and in which function of `frames`, its compilations; None: in none of them."""
    for broken in dynamo.graph_break_reasons:
        *_, last = broken.user_stack or [None]
        owner = broken.user_stack and _owner(broken.user_stack[0], frames)
        yield owner or None, in_words(broken.reason, last and last.filename, last and last.lineno)


def function_of(frame: Any) -> Function:
    return frame.co_filename, frame.co_firstlineno, frame.co_name


def _owner(place: Any, frames: Sequence[Any]) -> Function | None:
    """The function that Dynamo compiled when it met `place`: one of the model's, or the rest of one behind a break."""
    of_this = re.compile(rf"{re.escape(place.name)}|torch_dynamo_resume_in_{re.escape(place.name)}_at_\d+")
    earlier = [
        function_of(f)
        for f in frames
        if f.co_filename == place.filename
        and of_this.fullmatch(f.co_name)
        and (f.co_firstlineno < place.lineno or f.co_name == place.name and f.co_firstlineno == place.lineno)
    ]
    return max(earlier, key=lambda function: function[1], default=None)


def in_words(reason: str, file: str | None, line: int | None) -> str:
    """Dynamo's reason in a line, and where in the model it met it."""
    words = reason.strip().splitlines()[0]
    if delayed := DELAYED.search(reason):
        words = delayed[1]
    if words.startswith("generic_jump"):
        words = "Data-dependent branching"
    code = linecache.getline(file, line).strip() if file and line else ""
    return f"{words} ({Path(file).name}:{line}: {code})" if code else words


def reason(error: Exception) -> str:
    """An error in one line, for a list of what is left as it is; with its last line where the first one introduces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not ADVICE.match(line)]
    told = lines[:1] + lines[1:][-1:] if lines and lines[0].endswith(":") else lines[:1]
    return ": ".join([type(error).__name__, *(line.rstrip(":") for line in told)])

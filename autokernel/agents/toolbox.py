"""The tools of a language model: to read what there is to know, have edits looked at or settings autotuned, propose."""

import difflib
import re
from dataclasses import dataclass, field
from typing import Any

from autokernel.agents import Context
from autokernel.agents.knobs import in_words, some_settings, with_setting
from autokernel.agents.playbook import TIERS, fitting_tier, tier_text
from autokernel.agents.prompt import clip, history_text, incumbent_text, oracle_text, problem_text, trial_line
from autokernel.build import INCLUDE
from autokernel.common.verdict import Verdict
from autokernel.common.words import four_figures

LONGEST = 16_000  # characters of what a tool answers: the context stays bounded
LOOKS, AUTOTUNES = 3, 2  # quick looks and rounds of autotuning that an experiment may take
AUTOTUNE_S = 60.0
FENCED = re.compile(r"(?s)(`{3,})[^\n`]*\n(.*\n)\1")  # no Python begins so
SETTINGS = {"cpu": 16, "cuda": 64}  # at once at most: about as many as AUTOTUNE_S suffices for

EDIT = {
    "source": {"type": "string", "description": "The complete new text of kernel.py. Either this or `edits`."},
    "edits": {
        "type": "array",
        "description": "Replacements in the kernel to beat, made one after the other; each `old` must occur exactly once.",
        "items": {
            "type": "object",
            "properties": {"old": {"type": "string"}, "new": {"type": "string"}},
            "required": ["old", "new"],
        },
    },
}
READ = {
    "target": "shapes, strides, dtype, share of the model's time, and the sizes that correctness is judged at",
    "oracle": "the plain PyTorch function that says what is right",
    "spec": "the kernel type's spec: arguments, shapes, hard inputs, counted operations and bytes",
    "incumbent": "the kernel to beat",
    "history": "everything tried on this target, one line each",
    "experiment": "one experiment at length (`name` is its number): the gate's words, compiler output, its diff",
    "compiler": "what the compiler or the traceback said at the last refusal",
    "profile": "what ran in one call of the kernel to beat, by torch.profiler",
    "playbook": f"a tier of the playbook (`name` is its number, {TIERS.start} to {TIERS.stop - 1})",
    "starters": "the kernels beside the starter, other structures for the same operation (`name` is one's: its source)",
    "headers": "the helper headers of C++ and CUDA kernels (`name` is one's: its text)",
}
TOOLS = [
    {
        "name": "read",
        "description": "Read something: " + "; ".join(f"{topic}: {what}" for topic, what in READ.items()) + ".",
        "input_schema": {
            "type": "object",
            "properties": {"topic": {"type": "string", "enum": list(READ)}, "name": {"type": "string"}},
            "required": ["topic"],
        },
    },
    {
        "name": "look",
        "description": "Have an edit compiled, checked in one dtype and timed roughly against the kernel to beat. "
        f"No experiment is spent; up to {LOOKS} times.",
        "input_schema": {"type": "object", "properties": EDIT},
    },
    {
        "name": "autotune",
        "description": "Have many settings of one kernel timed side by side on the target's shapes: knobs are its module "
        "constants, one line `NAME = value` each. Answers with the fastest, against the kernel to beat. No experiment is "
        f"spent and little is checked; up to {AUTOTUNES} times. Without `source` and `edits` it is the kernel to beat.",
        "input_schema": {
            "type": "object",
            "properties": {
                "settings": {
                    "type": "array",
                    "description": "Each maps names of knobs to values. Left out: a sample of the kernel's TUNABLES.",
                    "items": {"type": "object"},
                },
                **EDIT,
            },
        },
    },
    {
        "name": "propose",
        "description": "Submit the next experiment. The gate judges it in full, and keeps it if it is right and faster.",
        "input_schema": {
            "type": "object",
            "properties": {
                "hypothesis": {
                    "type": "string",
                    "description": "One line: what changes, and what you expect of it, and why.",
                },
                "predicted_gain": {"type": "number", "description": "The speedup over the kernel to beat: 1.08 is 8 %."},
                **EDIT,
            },
            "required": ["hypothesis", "predicted_gain"],
        },
    },
]


class Unusable(Exception):
    """A call that cannot be answered; the message tells the model why."""


def without_fence(source: str) -> str:
    """A file that stands in one block of Markdown, as models like to write them, without its marks."""
    fenced = FENCED.fullmatch(source.strip())
    return fenced[2] if fenced else source


@dataclass
class Toolbox:
    """The tools of one experiment."""

    context: Context
    looks: int = field(default=0)
    autotunes: int = field(default=0)

    def answer(self, tool: str, given: dict[str, Any]) -> str:
        """What `read`, `look` or `autotune` says. Raises Unusable."""
        if tool == "read":
            return clip(self._read(str(given.get("topic")), str(given.get("name") or "")), LONGEST)
        if tool == "look":
            return clip(self._look(self.edited(given)), LONGEST)
        if tool == "autotune":
            return clip(self._autotune(given), LONGEST)
        raise Unusable(f"there is no tool {tool!r}")

    def edited(self, given: dict[str, Any]) -> str:
        """The new kernel.py of a call that has `source` or `edits`. Raises Unusable."""
        source = self._edited(given)
        try:
            source.encode()
        except UnicodeEncodeError as error:
            raise Unusable(f"kernel.py is a text in UTF-8: {error.reason}") from error
        return source

    def _edited(self, given: dict[str, Any]) -> str:
        source, edits = given.get("source"), given.get("edits")
        if isinstance(source, str) and source.strip():
            return without_fence(source)
        if not isinstance(edits, list) or not edits:
            raise Unusable("give the whole new kernel.py as `source`, or `edits` of the kernel to beat")
        text = self.context.incumbent
        for edit in edits:
            old, new = (edit.get(key) if isinstance(edit, dict) else None for key in ("old", "new"))
            if not isinstance(old, str) or not isinstance(new, str) or text.count(old) != 1:
                count = text.count(old) if isinstance(old, str) else 0
                raise Unusable(
                    f"each `old` must occur exactly once in the kernel to beat; this one does {count} times: {old}"
                )
            text = text.replace(old, new)
        if text == self.context.incumbent:
            raise Unusable("these edits change nothing")
        return text

    def _look(self, source: str) -> str:
        bench = self.context.bench
        if bench is None:
            raise Unusable("there is no quick look here: propose")
        if self.looks >= LOOKS:
            raise Unusable(f"{LOOKS} looks are used up: propose")
        self.looks += 1
        verdict = bench.examine(source, self.context.target, incumbent=self.context.incumbent, quick=True)
        return look_text(verdict)

    def _autotune(self, given: dict[str, Any]) -> str:
        context = self.context
        if context.bench is None:
            raise Unusable("there is no autotuning here: propose")
        if self.autotunes >= AUTOTUNES:
            raise Unusable(f"{AUTOTUNES} rounds of autotuning are used up: propose")
        source = self.edited(given) if given.get("source") or given.get("edits") else context.incumbent
        sources = _settings(source, given.get("settings"), SETTINGS[context.target.device.partition(":")[0]])
        self.autotunes += 1
        looked = context.bench.autotune([context.incumbent, source, *sources], context.target, AUTOTUNE_S)
        return in_words(looked, context.incumbent, context.target)

    def _read(self, topic: str, name: str) -> str:
        context = self.context
        simple = {
            "target": lambda: problem_text(context),
            "oracle": lambda: oracle_text(context),
            "spec": lambda: (context.spec.folder / "spec.py").read_text(),
            "incumbent": lambda: incumbent_text(context),
            "history": lambda: "\n".join(trial_line(trial) for trial in context.trials) or history_text(()),
            "experiment": lambda: self._experiment(name),
            "compiler": self._compiler,
            "profile": self._profile,
            "playbook": lambda: tier_text(self._tier(name), context.target),
            "starters": lambda: one_of(context.starters, name),
            "headers": lambda: one_of({p.name: p for p in sorted(INCLUDE.iterdir())}, name),
        }
        if topic not in simple:
            raise Unusable(f"there is nothing to read about {topic!r}; there is: {', '.join(READ)}")
        return simple[topic]()

    def _tier(self, name: str) -> int:
        if not name:
            return fitting_tier(self.context.trials)
        if name not in map(str, TIERS):
            raise Unusable(f"there is no tier {name!r}; there are {TIERS.start} to {TIERS.stop - 1}")
        return int(name)

    def _experiment(self, name: str) -> str:
        trials = {str(trial.row.experiment): trial for trial in self.context.trials}
        if name.lstrip("#") not in trials:
            raise Unusable(f"no experiment {name!r} on this target; there are: {', '.join(trials)}")
        trial = trials[name.lstrip("#")]
        changes = difflib.unified_diff(
            self.context.incumbent.splitlines(), trial.source.splitlines(), "the kernel to beat", f"#{name}", lineterm=""
        )
        return f"{trial_line(trial)}\n\n{trial.notes}\n\n{chr(10).join(changes)}"

    def _compiler(self) -> str:
        refused = next((t for t in reversed(self.context.trials) if t.row.correctness != "PASS"), None)
        return refused.notes if refused else "nothing was refused so far"

    def _profile(self) -> str:
        if self.context.bench is None:
            raise Unusable("there is no profile here")
        return self.context.bench.profile(self.context.incumbent, self.context.target)


def _settings(source: str, settings: object, most: int) -> list[str]:
    """The source in each of the settings that were asked for, or in some of its own. Raises Unusable."""
    try:
        if settings is None:
            sources = some_settings(source, most)
        elif isinstance(settings, list) and all(isinstance(one, dict) for one in settings):
            sources = [with_setting(source, one) for one in settings]
        else:
            raise Unusable("`settings` is a list of objects, each from names of knobs to values")
    except (SyntaxError, ValueError) as error:
        raise Unusable(str(error)) from None
    if not sources:
        raise Unusable("no setting but the present one: give `settings`, or a kernel with TUNABLES")
    if len(sources) > most:
        raise Unusable(f"{len(sources)} settings; autotuning here takes {most} at most")
    return sources


def look_text(verdict: Verdict) -> str:
    """A quick look in words."""
    if verdict.failure:
        return f"{verdict.correctness}: {verdict.failure}\n{verdict.failure.detail}"
    ours = "the kernel to beat's speed"
    cases = [f"{c.case}: {four_figures(c.latency_us)} us, {c.speedup_vs_incumbent} {ours}" for c in verdict.cases]
    return "\n".join([f"correct as far as looked at; roughly: {verdict.why}", *cases])


def one_of(files: dict, name: str) -> str:
    if not name:
        return f"there are: {', '.join(files)}; `name` one to read it"
    if name not in files:
        raise Unusable(f"there is no {name!r}; there are: {', '.join(files)}")
    return files[name].read_text()

"""The agent that needs no key: walks the structural files beside the starter and searches TUNABLES, editing real source.

Its whole memory is the target's trials, so a resumed run continues where it was. It proposes a source at most once.
"""

import ast
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial

from autokernel.agents import Context, Proposal, Trial
from autokernel.experiments import STARTER, Status
from autokernel.gate.judge import constants

NAME = "tuner"
CLEARLY_SLOWER = 0.97  # upper end of a speedup below which a knob's value is not tried alone again
EXPECTED = {  # what a knob of this name usually does: the reason that a hypothesis gives
    "CHUNK": ("smaller pieces balance the threads better", "larger pieces cost less scheduling and stream longer"),
    "BLOCK": ("smaller blocks fit a nearer cache and fill more cores", "larger blocks reuse more of what was loaded"),
    "TILE": ("smaller tiles fit a nearer cache", "larger tiles reuse more of what was loaded"),
    "WARPS": ("fewer warps leave each more registers and synchronise less", "more warps hide more latency"),
    "STAGES": ("fewer stages leave more shared memory to each block", "more stages hide the loads behind the arithmetic"),
    "UNROLL": ("less unrolling spares registers", "more independent work in flight hides latency"),
    "THREADS": ("fewer threads cost less to start and to join", "more threads share the work"),
    "PREFETCH": ("less prefetching leaves the cache alone", "earlier loads arrive in time"),
    "GROUP": ("smaller groups spread the work", "larger groups share more in the L2 cache"),
    "PARALLEL": ("a higher threshold for threads spares small sizes their cost", "threads pay off from here on"),
}


@dataclass(frozen=True)
class Knobs:
    """The tunables of a source: their candidate values, and the values that stand in it."""

    choices: dict[str, list]
    current: dict[str, object]


def read_knobs(source: str) -> Knobs:
    """TUNABLES and the constants it names, read from the text without running it."""
    literals = constants(source)
    choices = {name: list(values) for name, values in literals.get("TUNABLES", {}).items() if name in literals}
    return Knobs(choices, {name: literals[name] for name in choices})


def set_knob(source: str, name: str, value: object) -> str:
    """The source with its line `NAME = value` rewritten, comment kept. Raises ValueError if there is no such line."""
    edited, count = re.subn(
        rf"(?m)^({re.escape(name)}\s*=\s*)([^#\n]*?)(\s*(?:#.*)?)$", rf"\g<1>{value!r}\g<3>", source, count=1
    )
    if not count:
        raise ValueError(f"no line `{name} = …` in the source")
    return edited


def structure(source: str) -> str:
    """What is left of a source when its knobs are taken out: equal for two settings of one kernel."""
    for name in read_knobs(source).choices:
        source = set_knob(source, name, None)
    return source


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _expectation(name: str, old: object, new: object) -> str:
    ordered = isinstance(old, (int, float)) and isinstance(new, (int, float))
    reasons = next((reasons for word, reasons in EXPECTED.items() if word in name), None)
    if not ordered or reasons is None or old == 0 or new == 0:  # 0 means "choose by shape" in our kernels
        return "a setting not tried yet"
    return reasons[new > old]


class Tuner:
    """Starts with the file at hand: one knob at a time, then other structures, then what Optuna's TPE suggests.

    One knob at a time comes first because it is what a reader of the history understands, and because most knobs of a
    kernel act nearly alone; structures come next because a knob cannot make up for a wrong one.
    """

    def __init__(self, settings: int = 40, seed: int = 0) -> None:
        self.settings = settings  # judged of one structure; after as many the next one is not worth its time
        self.seed = seed

    def propose(self, context: Context) -> Proposal | None:
        seen = {_key(trial.source) for trial in context.trials} | {_key(context.incumbent)}
        ideas = chain(self._single_steps(context), self._structures(context), self._suggested(context))
        fresh = (idea for idea in ideas if _key(idea.source) not in seen)
        return next(fresh, None)

    def _single_steps(self, context: Context) -> Iterator[Proposal]:
        """Each knob one value up and down; not to a value that was clearly slower in this structure before."""
        knobs = read_knobs(context.incumbent)
        refuted = self._refuted(context)
        for name, values in knobs.choices.items():
            old = knobs.current[name]
            place = values.index(old) if old in values else 0
            near = [v for i, v in enumerate(values) if abs(i - place) == 1 and (name, v) not in refuted]
            for new in near:
                reason = _expectation(name, old, new)
                yield Proposal(set_knob(context.incumbent, name, new), f"{name} {old} -> {new}: {reason}", NAME)

    def _refuted(self, context: Context) -> set[tuple[str, object]]:
        """(knob, value) pairs that the incumbent does not have and a trial that lost had. TPE may still propose them."""
        current, shape = read_knobs(context.incumbent).current, structure(context.incumbent)
        lost = [t for t in context.trials if (t.row.speedup_high or 1) < CLEARLY_SLOWER and structure(t.source) == shape]
        pairs = [pair for trial in lost for pair in read_knobs(trial.source).current.items()]
        return {(name, value) for name, value in pairs if current[name] != value}

    def _structures(self, context: Context) -> Iterator[Proposal]:
        """The other files of this backend, each once, as they are shipped."""
        tried_structures = {_key(structure(trial.source)) for trial in context.trials}
        for stem, path in context.spec.starters(context.target.backend).items():
            source = path.read_text()
            if _key(structure(source)) not in tried_structures:
                doc = (ast.get_docstring(ast.parse(source)) or "").split("\n")[0].rstrip(".")
                yield Proposal(source, f"structure {stem}: {doc}", NAME)

    def _suggested(self, context: Context) -> Iterator[Proposal]:
        """Whole settings by TPE, told every trial of the incumbent's structure; falls silent when they are used up."""
        knobs = read_knobs(context.incumbent)
        shape = structure(context.incumbent)
        told = [(t, score) for t, score in scored(context.trials) if structure(t.source) == shape]
        if not knobs.choices:
            return
        study = self._study(knobs, told)
        for _ in range(self.settings - len(told)):
            trial = study.ask(_distributions(knobs))
            source = context.incumbent
            for name, value in trial.params.items():
                source = set_knob(source, name, value)
            study.tell(trial, state=TrialState.PRUNED)  # not judged yet: asked again with what the gate says of it
            changes = [f"{n} {knobs.current[n]} -> {v}" for n, v in trial.params.items() if v != knobs.current[n]]
            yield Proposal(source, f"{', '.join(changes)}: the search expects these to work together", NAME)

    def _study(self, knobs: Knobs, told: list[tuple[Trial, float]]) -> optuna.Study:
        """What is known, as an Optuna study that maximises the score."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=self.seed + len(told), n_startup_trials=4)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for trial, score in told:
            params = read_knobs(trial.source).current
            if all(params[name] in values for name, values in knobs.choices.items()):
                study.add_trial(create_trial(params=params, distributions=_distributions(knobs), value=score))
        return study


def scored(trials: Sequence[Trial]) -> list[tuple[Trial, float]]:
    """Each trial with its log speedup over the starter: the gains kept before it and its own paired measurement.

    Latencies of different experiments are not compared: they were not measured side by side. A kernel that has no speedup
    because it was refused counts as half as fast as the one it was to replace.
    """
    level, scores = 0.0, []
    for trial in trials:
        speedup = trial.row.speedup_vs_incumbent or (1.0 if trial.row.agent == STARTER else 0.5)
        scores.append((trial, level + math.log(speedup)))
        if trial.row.status == Status.KEPT:
            level = scores[-1][1]
    return scores


def _distributions(knobs: Knobs) -> dict[str, CategoricalDistribution]:
    return {name: CategoricalDistribution(values) for name, values in knobs.choices.items()}

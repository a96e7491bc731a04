"""The agent that needs no key: walks the structural files beside the starter and searches TUNABLES, editing real source.

Where it may ask the gate to autotune, an experiment proves and does not search: many settings of all structures are timed
in seconds, and what looks fastest is proposed; of a target of several sizes also a table of the settings that look fastest
at each. Else the first structure that it tries is the starter of another backend,
where the device has one (CUDA C++ for Triton), and settings are tried one by one.

Its memory is the target's trials, so a resumed run continues where it was; it only autotunes again. It proposes a source at
most once.
"""

import ast
import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from autokernel.agents import AgentOptions, Context, PastExperiment, Proposal
from autokernel.agents.knobs import Knobs, by_sizes, changes, read_knobs, set_knob, structure, with_setting
from autokernel.agents.sizes import with_table
from autokernel.gate.timing.autotune import Looked
from autokernel.gate.timing.statistics import MINIMUM_GAIN
from autokernel.history.experiments import STARTER, Status

NAME = "tuner"
CLEARLY_SLOWER = 0.97  # upper end of a speedup below which a knob's value is not tried alone again
REFUSED = math.log(0.5)  # the score of a kernel that has no speedup: half as fast as the one it was to replace
WINDOW = 8  # settings of a search over which its gain is expected: the search ends below what the gate can keep
SEARCHED = "the search expects"
# Of a round of autotuning: seconds, settings of the best structure, and of each other one the first time.
ROUND_S = {"cpu": 20.0, "cuda": 45.0}
SHORTEST = 0.25  # of those seconds: the last round of a run is as short as the time that is left, and no shorter than this
ROUND = {"cpu": 12, "cuda": 48}
FIRST = {"cpu": 2, "cuda": 8}
ROUNDS_WITHOUT = 2  # rounds that found nothing faster, after which a search ends
PROMISING = {"cpu": 0.03, "cuda": 0.01}  # log gain at a look from which a setting becomes an experiment
PROPOSED = 2  # settings of a round that become experiments at most: the best of many looks is partly luck
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
    "PARALLEL": ("threads pay off from here on", "a higher threshold for threads spares small sizes their cost"),
}


def make(say: Callable[[str], None], options: AgentOptions, spent_usd: float, argument: str) -> "Tuner":
    return Tuner(say=say)


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _expectation(name: str, old: object, new: object) -> str:
    ordered = isinstance(old, (int, float)) and isinstance(new, (int, float))
    reasons = next((reasons for word, reasons in EXPECTED.items() if word in name), None)
    if not ordered or reasons is None or old == 0 or new == 0:  # 0 means "choose by shape" in our kernels
        return "a setting not tried yet"
    return reasons[new > old]


@dataclass
class Search:
    """What autotuning saw on one target: log speedups over its starter, by source; how many rounds saw nothing faster.

    cases: by source, its log speedups over the first source that was looked at, case by case; -inf where it was not timed.
    """

    scores: dict[str, float] = field(default_factory=dict)
    cases: dict[str, tuple[float, ...]] = field(default_factory=dict)
    rounds: int = 0
    without: int = 0
    proposed: int = 0  # of the last round's settings


class Tuner:
    """What won at other shapes, then what autotuning finds: other structures, each knob alone, what Optuna's TPE suggests.

    Without autotuning each is an experiment, in this order: another backend, because it may be worth more than all knobs
    (matrix products on Hopper, in CUDA C++); one knob at a time, because most knobs of a kernel act nearly alone;
    structures, because a knob cannot make up for a wrong one; then TPE.
    """

    def __init__(self, settings: int = 40, seed: int = 0, say: Callable[[str], None] = lambda line: None) -> None:
        self.settings = settings  # judged of one structure; after as many the next one is not worth its time
        self.seed, self.say = seed, say
        self.searches: dict[str, Search] = {}  # by target

    def propose(self, context: Context) -> Proposal | None:
        seen = {_key(trial.source) for trial in context.trials} | {_key(context.incumbent)}
        if context.bench is not None:
            ideas = chain(self._from_elsewhere(context), self._autotune(context, seen))
            fresh = (idea for idea in ideas if _key(idea.source) not in seen)
            return next(fresh, None)
        ideas = chain(
            self._from_elsewhere(context),
            self._structures(context, [f"{backend}_kernel" for backend in context.other_backends]),
            self._single_steps(context),
            self._structures(context, context.starters),
            self._suggested(context),
        )
        fresh = (idea for idea in ideas if _key(idea.source) not in seen)
        return next(fresh, None)

    def _from_elsewhere(self, context: Context) -> Iterator[Proposal]:
        """The setting that won on each of the run's other targets of this structure."""
        shape = structure(context.incumbent)
        kept = {t.row.target: t for t in context.elsewhere if t.row.status == Status.KEPT and t.row.agent != STARTER}
        for target, trial in kept.items():
            if structure(trial.source) == shape:
                source = with_table(trial.source, {})  # its sizes are another target's
                yield Proposal(source, f"{changes(context.incumbent, source)}: won on {target}", NAME)

    def _autotune(self, context: Context, seen: Collection[str]) -> Iterator[Proposal]:
        """The settings that look fastest in autotuning, round after round, until rounds find nothing faster."""
        search = self.searches.setdefault(context.target.name, Search())
        kind = context.target.device.partition(":")[0]
        search.scores |= {t.source: score for t, score in scored(context.trials) if t.source in search.scores}  # as judged
        while True:
            if search.proposed < PROPOSED:
                here = level(context.trials)
                faster = {s: score - here for s, score in search.scores.items() if _key(s) not in seen}
                best = max(faster, key=faster.__getitem__, default="")
                if best and faster[best] > PROMISING[kind]:
                    search.proposed += 1
                    looked = f"the fastest of {len(search.scores)} looked at, {math.exp(faster[best]):.3f}x there"
                    yield Proposal(best, f"{_difference(context, best)}: {looked}", NAME)
            is_late = time.monotonic() > context.until_s
            if search.without >= ROUNDS_WITHOUT or is_late or not self._round(context, search):
                return

    def _round(self, context: Context, search: Search) -> bool:
        """Look at more settings; whether there were any."""
        kind, here = context.target.device.partition(":")[0], level(context.trials)
        if not search.rounds:
            first = [p.source for p in (*self._structures(context, context.starters), *self._single_steps(context))]
            structures = {structure(source): source for source in (*first, context.incumbent)}
            sources = first + [
                s for one in structures.values() for s in self._settings(context, search.scores, one, FIRST[kind])
            ]
        else:
            best = max(search.scores, key=search.scores.__getitem__, default=context.incumbent)
            sources = self._settings(context, search.scores, best, ROUND[kind])
            sources += self._settings_of_cases(context, search, best, ROUND[kind])
        sources = [s for s in dict.fromkeys(sources) if s not in search.scores and s != context.incumbent]
        if not sources:
            return False
        before = max((here, *search.scores.values()))
        looked = self._look(context, search, sources)
        table = by_sizes(looked, context.target, PROMISING[kind])
        if table and table not in {context.incumbent, *search.scores}:
            self._look(context, search, [table])
        search.rounds, search.proposed = search.rounds + 1, 0
        search.without = 0 if max((before, *search.scores.values())) > before + MINIMUM_GAIN else search.without + 1
        if search.without:
            self.say(f"{context.target.name}: none of {len(sources)} more settings looked faster")
        return True

    def _look(self, context: Context, search: Search, sources: Sequence[str]) -> Sequence[Looked]:
        """The sources timed beside the incumbent, and what is known of each case of them from now on."""
        kind, here = context.target.device.partition(":")[0], level(context.trials)
        seconds = min(ROUND_S[kind], max(SHORTEST * ROUND_S[kind], context.until_s - time.monotonic()))
        looked = context.bench.autotune([context.incumbent, *sources], context.target, seconds)
        own = next((one for one in looked if one.source == context.incumbent), Looked(context.incumbent))
        for one in looked:
            if one is not own:
                timed = max(one.seconds, own.seconds) < math.inf
                search.scores[one.source] = here + math.log(own.seconds / one.seconds) if timed else REFUSED
        if context.incumbent not in search.cases:
            search.cases = {context.incumbent: (0.0,) * len(own.by_case)}
        base = search.cases[context.incumbent]
        for one in looked if math.inf not in own.by_case else ():
            if one is not own and len(one.by_case) == len(base):
                ratios = (o / s for o, s in zip(own.by_case, one.by_case))  # 0 where there was no time for it
                search.cases[one.source] = tuple(b + math.log(r) if r else -math.inf for b, r in zip(base, ratios))
        return looked

    def _settings_of_cases(self, context: Context, search: Search, source: str, count: int) -> list[str]:
        """Settings that each of the target's cases suggests by itself, as many in all."""
        number = len(context.target.cases)
        if number == 1:
            return []
        made = []
        for case in range(number):
            scores = {s: by_case[case] for s, by_case in search.cases.items() if by_case and by_case[case] > -math.inf}
            made += self._settings(context, scores, source, -(-count // number), judged=False)
        return made

    def _settings(
        self, context: Context, scores: Mapping[str, float], source: str, count: int, judged: bool = True
    ) -> list[str]:
        """As many settings of a source's structure, as TPE suggests them, told of `scores` and of all that was judged."""
        source = with_table(source, {})
        knobs, shape = read_knobs(source), structure(source)
        if not knobs.choices:
            return []
        study, made = self._study(knobs, shape, context if judged else None, scores), {}
        for _ in range(4 * count):
            trial = study.ask(_distributions(knobs))
            made[with_setting(source, trial.params)] = None
            study.tell(trial, state=TrialState.PRUNED)
            if len(made) == count:
                break
        return list(made)

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
        settings = [read_knobs(trial.source) for trial in lost]
        pairs = [pair for knobs in settings if not knobs.table for pair in knobs.current.items()]
        return {(name, value) for name, value in pairs if current[name] != value}

    def _structures(self, context: Context, names: Iterable[str]) -> Iterator[Proposal]:
        """The starters of these names, each once, as they are shipped."""
        tried_structures = {_key(structure(trial.source)) for trial in context.trials}
        for stem in names:
            source = context.starters[stem].read_text() if stem in context.starters else ""
            if source and _key(structure(source)) not in tried_structures:
                doc = (ast.get_docstring(ast.parse(source)) or "").split("\n")[0].rstrip(".")
                yield Proposal(source, f"structure {stem}: {doc}", NAME)

    def _suggested(self, context: Context) -> Iterator[Proposal]:
        """Whole settings by TPE, told of every trial of the incumbent's structure here and elsewhere."""
        knobs, shape = read_knobs(context.incumbent), structure(context.incumbent)
        told = [(t, score) for t, score in scored(context.trials) if structure(t.source) == shape]
        if not knobs.choices:
            return
        study = self._study(knobs, shape, context)
        for _ in range(self.settings - len(told)):
            if self._expected_gain(context, shape) < MINIMUM_GAIN:
                return
            trial = study.ask(_distributions(knobs))
            source = with_setting(context.incumbent, trial.params)
            study.tell(trial, state=TrialState.PRUNED)  # not judged yet: asked again with what the gate says of it
            words = f"{changes(context.incumbent, source)}: {SEARCHED} these to work together"
            if source not in {context.incumbent, *(t.source for t in context.trials)}:
                yield Proposal(source, words, NAME)

    def _expected_gain(self, context: Context, shape: str) -> float:
        """Log gain that the next setting of the search is expected to bring: the mean of its last ones, 0 if not kept."""
        searched = [t.row for t in context.trials if SEARCHED in t.row.description and structure(t.source) == shape]
        gains = [math.log(row.speedup_vs_incumbent) if row.status == Status.KEPT else 0.0 for row in searched]
        return sum(gains[-WINDOW:]) / WINDOW if len(gains) >= WINDOW else math.inf

    def _study(
        self, knobs: Knobs, shape: str, context: Context | None, looked: Mapping[str, float] | None = None
    ) -> optuna.Study:
        """What is known of a structure, as an Optuna study that maximises the score."""
        by_target = {}
        for trial in (*context.elsewhere, *context.trials) if context else ():
            by_target.setdefault(trial.row.target, []).append(trial)
        known = [(trial.source, score) for trials in by_target.values() for trial, score in scored(trials)]
        known += (looked or {}).items()
        told = [(source, score) for source, score in known if structure(source) == shape]
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=self.seed + len(told), n_startup_trials=4)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for source, score in told:
            params, table = read_knobs(source).current, read_knobs(source).table
            if not table and all(params[name] in values for name, values in knobs.choices.items()):
                study.add_trial(_finished(knobs, source, score))
        return study


def scored(trials: Sequence[PastExperiment]) -> list[tuple[PastExperiment, float]]:
    """One target's trials, each with its log speedup over the starter: the gains kept before it and its own paired one.

    Latencies of different experiments are not compared: they were not measured side by side. What the machine did not let
    be judged has no score.
    """
    reached, scores = 0.0, []
    for trial in trials:
        row = trial.row
        if row.status == "undecided":
            continue
        own = math.log(row.speedup_vs_incumbent) if row.speedup_vs_incumbent else 0.0 if row.agent == STARTER else REFUSED
        scores.append((trial, reached + own))
        if row.status == Status.KEPT:
            reached += own
    return scores


def level(trials: Sequence[PastExperiment]) -> float:
    """The incumbent's score."""
    return max((score for trial, score in scored(trials) if trial.row.status == Status.KEPT), default=0.0)


def _difference(context: Context, source: str) -> str:
    """What tells a source from the incumbent: the knobs that differ, or its structure."""
    if structure(source) == structure(context.incumbent):
        return changes(context.incumbent, source)
    shape = structure(source)
    stems = (stem for stem, path in context.starters.items() if structure(path.read_text()) == shape)
    return f"structure {next(stems, 'of another kernel')}, {read_knobs(source).current}"


def _finished(knobs: Knobs, source: str, score: float) -> FrozenTrial:
    return create_trial(params=read_knobs(source).current, distributions=_distributions(knobs), value=score)


def _distributions(knobs: Knobs) -> dict[str, CategoricalDistribution]:
    return {name: CategoricalDistribution(values) for name, values in knobs.choices.items()}

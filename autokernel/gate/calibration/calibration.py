"""Calibrates the gate on a machine: how often it keeps what is not faster, and which gain it sees at which latency.

Two kinds of evidence, which are never added up:
- experiments: contests as the loop holds them, of a kernel against itself (A/A) and against one that is planted to be
  faster or slower by a known share;
- resampled: the keep rule alone, on thousands of sequences drawn from the A/A pairs that were measured here, each pair's
  sign by chance (the two sides are the same kernel), and shifted by the gain in question. This has the resolution that
  experiments, at seconds each, have not; it takes pairs to be independent, for which `lag_1` is the check.
"""

import json
import random
import shlex
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean, median, stdev

import torch
from scipy.special import betaincinv

from autokernel.common import console
from autokernel.common.backends import default_backend
from autokernel.common.records import json_text, write_json
from autokernel.common.table import print_table
from autokernel.common.verdict import Interval
from autokernel.gate.calibration.planted import BANDS, Dial, set_dial
from autokernel.gate.judge import Judge
from autokernel.gate.timing.contest import CANDIDATE, INCUMBENT, NOISE_PAIRS, Contestants, NotDecided
from autokernel.gate.timing.faults import BaselineFault, RefusedWhileTimed
from autokernel.gate.timing.statistics import LOOKS, keep_rule, noise_floor
from autokernel.gate.workers.launch import Launched
from autokernel.gate.workers.processes import WorkerFault
from autokernel.spec import ROOT, kernel_types, load_spec
from autokernel.target import Target, default_target, encode

PLANTED = "planted"
SUBJECTS = ("rmsnorm", "softmax", "matmul", "reduce", PLANTED)
GAINS = (-0.01, 0.01, 0.02, 0.05, 0.10)
PAIRS_A_ROUND = 8  # A/A pairs of each subject, beside the experiments of a round
LEAST_PAIRS = 16  # from fewer nothing is resampled
RESAMPLES, POWER_RESAMPLES = 10_000, 500
POWER = 0.95  # of the gain that is called detectable
DETECTABLE = (*(i / 1000 for i in range(5, 30, 5)), *(i / 100 for i in range(3, 31)))  # where it is looked for
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Experiment:
    """One contest: what was planted, what was measured, whether it was kept."""

    gain: float  # 0: the kernel against itself
    kept: bool
    speedup: float
    seconds: float


@dataclass
class Samples:
    """All that has been measured of one subject: a kernel on a target."""

    case: str
    latency_us: float = 0.0
    pairs: list[float] = field(default_factory=list)  # A/A: log(incumbent's time / candidate's)
    discarded: int = 0  # pairs during which the machine was disturbed
    experiments: list[Experiment] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)  # why there is no verdict, or a refusal that is an error

    @staticmethod
    def decode(data: dict) -> "Samples":
        return Samples(**{**data, "experiments": [Experiment(**e) for e in data["experiments"]]})


@dataclass(frozen=True)
class Subject:
    """What is calibrated: a starter, or a kernel whose time can be set by a dial."""

    name: str
    target: Target
    source: str
    dial: Dial | None = None

    @property
    def gains(self) -> tuple[float, ...]:
        return (0.0, *GAINS) if self.dial else (0.0,)

    def contestants(self, gain: float) -> tuple[str, str]:
        return self.dial.contestants(gain) if self.dial and gain else (self.source, self.source)


@dataclass(frozen=True)
class Power:
    """How often a planted gain was kept."""

    gain: float
    measured: float  # the geometric mean of what experiments measured
    trials: int
    kept: int
    rate: Interval  # Clopper-Pearson
    seconds: float  # median
    resampled: float | None  # share of resampled sequences that are kept


@dataclass(frozen=True)
class Summary:
    """What the samples of one subject say."""

    name: str
    case: str
    latency_us: float
    pairs: int
    pair_sd: float | None  # of A/A log-ratios, one per pair of processes
    bias: Interval | None  # their mean: 0 if the sides are treated alike
    lag_1: float | None  # correlation of successive pairs
    powers: tuple[Power, ...]  # the first, at a gain of 0, is the rate of false keeps
    detectable_gain: float | None  # the smallest that is kept in 95 % of resampled sequences
    undecided: int
    discarded: int


def main(options: Namespace, launched: Launched | None = None) -> int:
    """bench.py --calibrate."""
    names = options.calibrate or list(SUBJECTS)
    if unknown := set(names) - {*kernel_types(), PLANTED}:
        console.fail(f"cannot calibrate {', '.join(sorted(unknown))}: name kernel types, or {PLANTED}")
    backend = default_backend(options.device)
    console.preflight(backend, experiments=False)
    record = Record(options.out)
    with Judge(options.device, options.allow_libraries, launched=launched) as judge:
        record.begin(judge)
        try:
            measure(judge, names, backend, options, record)
        except KeyboardInterrupt:  # resampling takes minutes: the next run that goes on from the record does it
            report(record, resample=False, as_json=options.json)
            raise
    record.write()  # a signal may end what follows
    report(record, resample=True, as_json=options.json)
    return 0


def report(record: "Record", resample: bool, as_json: bool) -> None:
    """What the record says is written to it and printed."""
    summaries = [summarise(name, samples, resample) for name, samples in record.samples.items()]
    record.write(summaries)
    if as_json:
        print(json_text(record.as_json(summaries), indent=1))
    else:
        print_summaries(summaries)


def measure(judge: Judge, names: Sequence[str], backend: str, options: Namespace, record: "Record") -> None:
    """Rounds, each with some pairs and one experiment of every kind, until trials or budget are spent."""
    started = time.perf_counter()
    planned = sum((2 + len(GAINS)) * len(BANDS) if name == PLANTED else 2 for name in names)
    with console.progress("calibrating", total=options.trials * planned + len(BANDS) * (PLANTED in names)) as step:
        subjects: list[Subject] = []
        for number in range(options.trials):
            for subject in subjects if number else _subjects(judge, names, backend, options, step):
                if not number:
                    subjects.append(subject)
                samples = record.of(subject)
                works = [partial(_pairs, judge, subject, samples)]
                works += [partial(_experiment, judge, subject, gain, samples) for gain in subject.gains]
                for work in works:
                    if time.perf_counter() - started > options.budget:
                        return
                    step(f"round {number + 1} of {options.trials}, {subject.name}")
                    work()
            record.write()


def _subjects(
    judge: Judge, names: Sequence[str], backend: str, options: Namespace, step: Callable[[str], None]
) -> Iterator[Subject]:
    dtype = getattr(torch, options.dtype or ("float32" if options.device == "cpu" else "float16"))
    for name in names:
        if name != PLANTED:
            source = next(iter(load_spec(name).starters(backend).values())).read_text()
            yield Subject(name, default_target(name, backend, options.device, dtype), source)
            continue
        for band in BANDS:
            step(f"setting the dial at {band.name}")
            try:
                dial = set_dial(judge, band, backend, options.device)
            except NotDecided as undecided:
                step(f"left out: {undecided}")
                continue
            yield Subject(f"{PLANTED} {band.name}", dial.target, dial.contestants(0.0)[0], dial)


def _pairs(judge: Judge, subject: Subject, samples: Samples) -> None:
    """Some pairs of the kernel against itself, as a contest times them."""
    sides, cases = Contestants(subject.source, subject.source).contest, subject.target.cases
    with judge.contests.timer(subject.target, random.getrandbits(48), "none") as timer:
        for left in range(PAIRS_A_ROUND, 0, -1):
            timer.prepare(sides, CANDIDATE, left)
            try:
                pair = timer.pair(sides, CANDIDATE)
            except (RefusedWhileTimed, WorkerFault, BaselineFault) as fault:  # of a right kernel: the gate's error
                samples.undecided.append(f"{type(fault).__name__}: {fault}")
                return
            if pair.disturbance:
                samples.discarded += 1
            else:
                samples.pairs.append(round(pair.log_ratio(INCUMBENT, CANDIDATE, cases), 7))
                samples.latency_us = round(pair.total(CANDIDATE, cases) * 1e6, 3)


def _experiment(judge: Judge, subject: Subject, gain: float, samples: Samples) -> None:
    verdict = judge.contest(*subject.contestants(gain), subject.target)
    if verdict.speedup_vs_incumbent is None or not verdict.decided:
        samples.undecided.append(verdict.why)
        return
    samples.latency_us = samples.latency_us or round(verdict.latency_us, 3)
    speedup, seconds = round(verdict.speedup_vs_incumbent.value, 6), round(verdict.bench_time_seconds, 2)
    samples.experiments.append(Experiment(gain, verdict.keep, speedup, seconds))


class Record:
    """What was measured, and by which runs; with a path, goes on from the record that is there."""

    def __init__(self, path: Path | None):
        self.path = path
        self.device, self.runs, self.samples = "", [], {}
        if path is not None and path.exists():
            try:
                data = json.loads(path.read_text())
                self.device, self.runs = data["device"], data["runs"]
                self.samples = {name: Samples.decode(samples) for name, samples in data["samples"].items()}
            except (ValueError, LookupError, TypeError, AttributeError):
                console.fail(f"{path} is no record of --calibrate: name another file, or delete it")

    def begin(self, judge: Judge) -> None:
        device = f"{judge.device.name}, {judge.device.units} units"
        if self.device not in ("", device):
            console.fail(f"{self.path} was measured on {self.device}, this is {device}: name another file")
        self.device = device
        command = shlex.join(["python", "bench.py", *sys.argv[1:]])
        self.runs.append(
            {"command": command, "commit": _commit(), "date": f"{date.today()}", "torch": torch.__version__, "seconds": 0}
        )
        self.started = time.perf_counter()

    def of(self, subject: Subject) -> Samples:
        case = ", ".join(c.case.name for c in subject.target.cases)
        return self.samples.setdefault(subject.name, Samples(case))

    def as_json(self, summaries: Sequence[Summary]) -> dict:
        samples = {name: encode(samples) for name, samples in self.samples.items()}
        return {"device": self.device, "runs": self.runs, "summaries": encode(list(summaries)), "samples": samples}

    def write(self, summaries: Sequence[Summary] = ()) -> None:
        self.runs[-1]["seconds"] = round(time.perf_counter() - self.started)
        if self.path is not None:
            write_json(self.path, self.as_json(summaries))


def _commit() -> str:
    """The commit that was checked out, "+" if files had been changed since; empty without git."""
    git = shutil.which("git")
    if git is None:
        return ""

    def ask(*words: str) -> str:
        return subprocess.run([git, "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    changed = ask("status", "--porcelain", "--", "autokernel", "kernels")
    return ask("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def summarise(name: str, samples: Samples, resample: bool = True) -> Summary:
    """resample: whether the pairs are resampled, which takes up to minutes; what comes of it is None without."""
    pairs, generator = samples.pairs, random.Random(0)
    enough = len(pairs) >= LEAST_PAIRS
    resampled = partial(kept_share, pairs, generator=generator) if enough and resample else None
    gains = sorted({e.gain for e in samples.experiments} | {0.0}, key=lambda gain: (gain != 0, gain))
    return Summary(
        name=name,
        case=samples.case,
        latency_us=samples.latency_us,
        pairs=len(pairs),
        pair_sd=stdev(pairs) if enough else None,
        bias=_mean_interval(pairs) if enough else None,
        lag_1=_lag_1(pairs) if enough else None,
        powers=tuple(_power(gain, [e for e in samples.experiments if e.gain == gain], resampled) for gain in gains),
        detectable_gain=_detectable(resampled) if resampled else None,
        undecided=len(samples.undecided),
        discarded=samples.discarded,
    )


def _detectable(resampled: Callable[..., float]) -> float | None:
    index = bisect_left(DETECTABLE, True, key=lambda gain: resampled(gain, POWER_RESAMPLES) >= POWER)
    return DETECTABLE[index] if index < len(DETECTABLE) else None


def _power(gain: float, experiments: Sequence[Experiment], resampled: Callable[..., float] | None) -> Power:
    kept = sum(e.kept for e in experiments)
    return Power(
        gain=gain,
        measured=exp(mean(log(e.speedup) for e in experiments)) - 1 if experiments else 0.0,
        trials=len(experiments),
        kept=kept,
        rate=clopper_pearson(kept, len(experiments)),
        seconds=median(e.seconds for e in experiments) if experiments else 0.0,
        resampled=resampled(gain, POWER_RESAMPLES if gain > 0 else RESAMPLES) if resampled else None,
    )


def kept_share(pairs: Sequence[float], gain: float, trials: int, generator: random.Random) -> float:
    """Share of sequences drawn from A/A pairs and shifted by a gain that the keep rule keeps."""

    def draw(shift: float) -> float:
        return generator.choice(pairs) * generator.choice((-1, 1)) + shift

    return mean(decide(draw, log(1 + gain)).keep for _ in range(trials))


@dataclass(frozen=True)
class Simulated:
    keep: bool
    pairs: int


def decide(draw: Callable[[float], float], shift: float) -> Simulated:
    """One contest by the keep rule: its noise floor from A/A pairs, asked after each pair as the contest does.

    draw(shift) is the log-ratio of one pair whose true value is `shift`.
    """
    floor = noise_floor([draw(0.0) for _ in range(NOISE_PAIRS)])
    ratios: list[float] = []
    for pairs in range(LOOKS[0], LOOKS[-1] + 1):
        ratios += [draw(shift) for _ in range(pairs - len(ratios))]
        decision = keep_rule(ratios, {"case": ratios}, floor)
        if not decision.more:
            break
    return Simulated(decision.keep, len(ratios))


def clopper_pearson(kept: int, trials: int) -> Interval:
    """The exact two-sided interval of a rate."""
    if not trials:
        return Interval(0.0, 0.0, 1.0)
    tail = (1 - CONFIDENCE) / 2
    low = float(betaincinv(kept, trials - kept + 1, tail)) if kept else 0.0
    high = float(betaincinv(kept + 1, trials - kept, 1 - tail)) if kept < trials else 1.0
    return Interval(low, kept / trials, high)


def _mean_interval(values: Sequence[float]) -> Interval:
    half = 1.96 * stdev(values) / sqrt(len(values))
    return Interval(mean(values) - half, mean(values), mean(values) + half)


def _lag_1(values: Sequence[float]) -> float:
    centred = [v - mean(values) for v in values]
    return sum(a * b for a, b in zip(centred, centred[1:])) / sum(v * v for v in centred)


def print_summaries(summaries: Sequence[Summary]) -> None:
    def share(value: float | None, digits: int = 1) -> str:
        return "" if value is None else f"{100 * value:.{digits}f}"

    def rate(power: Power) -> str:
        if not power.trials:
            return ""
        return f"{power.kept}/{power.trials} [{share(power.rate.low)}, {share(power.rate.high)}]"

    print_table(
        "A kernel against itself",
        ("subject", "us", "pairs", "sd %", "bias %", "lag 1", "kept [95 % CI, %]", "resampled kept %", "detects %", "case"),
        [
            (
                s.name,
                f"{s.latency_us:.1f}",
                str(s.pairs),
                share(s.pair_sd, 2),
                f"{share(s.bias.value, 2)} ± {share(s.bias.high - s.bias.value, 2)}" if s.bias else "",
                "" if s.lag_1 is None else f"{s.lag_1:.2f}",
                rate(s.powers[0]),
                share(s.powers[0].resampled, 2),
                share(s.detectable_gain),
                s.case,
            )
            for s in summaries
        ],
    )
    print_table(
        "\nPlanted gains",
        ("subject", "planted %", "measured %", "resampled kept %", "seconds", "kept [95 % CI, %]"),
        [
            (s.name, f"{100 * p.gain:+.0f}", f"{100 * p.measured:+.2f}", share(p.resampled), f"{p.seconds:.1f}", rate(p))
            for s in summaries
            for p in s.powers[1:]
        ],
    )
    undecided, discarded = sum(s.undecided for s in summaries), sum(s.discarded for s in summaries)
    kept, trials = sum(s.powers[0].kept for s in summaries), sum(s.powers[0].trials for s in summaries)
    rate_of_all = clopper_pearson(kept, trials)
    print(f"\nfalse_keeps: {kept} of {trials} experiments, {share(rate_of_all.low, 2)} to {share(rate_of_all.high, 2)} %")
    print(f"undecided: {undecided} experiments; {discarded} pairs were disturbed and discarded")

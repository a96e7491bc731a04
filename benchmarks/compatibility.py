"""Real models as they are used, with kernels at every site: sizes that change, padding, training, generate(); crashes fail.

Usage:   python benchmarks/compatibility.py                          all of zoo.py, some 20 s each
         python benchmarks/compatibility.py Llama 'Gemma 2' --fallback inductor
         python benchmarks/compatibility.py --device cuda --dtype float16 --backend cuda
Needs:   transformers; nothing is downloaded
Writes:  benchmarks/compatibility-<device>-<dtype>-<backend>[-<fallback>].json (models not tried keep their record)
Exit:    1 if anything is wrong or crashes with kernels; what a model cannot do without them is "not tried"

Each model has a process of its own. Every site that is found gets the starter of its type, proven or not: what is tried is
what becomes of a model once kernels are in it. Right means: the error against the same model in float64 (of one in 16 bit:
in float32) is at most GROWTH times the untouched model's own, NaN and infinities are at the same places, and dtypes, shapes
and strides of the results are the untouched model's. Of gradients the same, and that the same parameters have one.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.common.backends import BACKENDS, default_backend
from autokernel.common.records import write_json
from autokernel.common.table import print_table
from autokernel.integration.apply import apply, unapply
from autokernel.integration.winner import Winner
from autokernel.model.capture import capture
from autokernel.model.match import SiteFinder
from autokernel.model.patterns import Site
from autokernel.model.regions.growing import WRITERS, regions_of
from autokernel.spec import load_spec
from autokernel.target import Target, WeightedCase
from benchmarks.zoo import ZOO, Entry, Inputs

HERE = Path(__file__).resolve().parent
GROWTH = 3.0  # as verify.py allows (verification/record.py, ERROR_GROWTH)
TIMEOUT_S = 900
NEW_TOKENS = 12
OK, NOT_TRIED = "ok", "not tried: "
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Setting:
    device: str
    dtype: torch.dtype
    backend: str
    fallback: str | None

    @property
    def name(self) -> str:
        words = [self.device.partition(":")[0], str(self.dtype).removeprefix("torch."), self.backend, self.fallback]
        return "-".join(filter(None, words))

    def placed(self, inputs: Inputs) -> Inputs:
        def place(t: Tensor) -> Tensor:
            return t.to(self.device, self.dtype if t.is_floating_point() else t.dtype)

        return tree_map_only(Tensor, place, inputs)

    @property
    def exact(self) -> torch.dtype:
        """Of the model that errors are measured against: some operators of GPUs know no float64."""
        return torch.float64 if self.dtype == torch.float32 else torch.float32

    def widened(self, inputs: Inputs) -> Inputs:
        return tree_map_only(Tensor, lambda t: t.to(self.exact) if t.is_floating_point() else t, inputs)

    @property
    def epsilon(self) -> float:
        """An error that is no error: a model without rounding of its own may be so far off."""
        return 4 * torch.finfo(self.dtype).eps


class Trouble(AssertionError):
    """What is wrong with kernels; the message says it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all of " + ", ".join(ZOO))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--backend", choices=BACKENDS, help="whose starters (default: the device's first)")
    parser.add_argument("--fallback", help="what has the rest of the model: inductor, reduce-overhead (default: eager)")
    parser.add_argument("--seconds", type=float, help="begin no model after so many")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time (default: %(default)s)")
    parser.add_argument("--record", type=Path, help="written instead of benchmarks/compatibility-….json")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)  # the file of a child's result
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(ZOO):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are: {', '.join(ZOO)}")
    backend = arguments.backend or default_backend(arguments.device)
    setting = Setting(arguments.device, getattr(torch, arguments.dtype), backend, arguments.fallback)
    if arguments.one:
        warnings.filterwarnings("ignore")
        arguments.one.write_text(json.dumps(tried(ZOO[arguments.models[0]], setting)))
        return
    raise SystemExit(run_all(arguments.models or list(ZOO), setting, arguments))


def run_all(names: Sequence[str], setting: Setting, arguments: argparse.Namespace) -> int:
    """Every model in a process of its own; the exit status."""

    path = arguments.record or HERE / f"compatibility-{setting.name}.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    end = time.monotonic() + (arguments.seconds or float("inf"))

    def one(name: str) -> tuple[str, dict[str, Any] | None]:
        return name, in_process(name, setting) if time.monotonic() < end else None

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for name, result in pool.map(one, names):
            if result is None:
                print(f"{name}: not tried, the time is up", flush=True)
                continue
            record[name] = result | {"torch": torch.__version__}
            write_json(path, record)
            troubles = [f"{what}: {words}" for what, words in result["scenarios"].items() if words != OK]
            print(f"{name}: {'; '.join(troubles) or 'ok'}", flush=True)
    shown = [(name, record[name]) for name in names if name in record]
    print_table(f"models with kernels, {setting.name}", COLUMNS, [row(name, entry) for name, entry in shown])
    answers = [words for _, entry in shown for words in entry["scenarios"].values()]
    untried = sum(words.startswith(NOT_TRIED) for words in answers)
    wrong = len(answers) - answers.count(OK) - untried
    print(f"{len(shown)} models, {len(answers)} scenarios: {answers.count(OK)} right, {wrong} wrong, {untried} not tried")
    return int(wrong > 0)


COLUMNS = ("model", "sites", "scenarios", "wrong", "not tried")


def row(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    sites = ", ".join(f"{count} {what}" for what, count in sorted(entry["sites"].items()))
    untried = [what for what, words in entry["scenarios"].items() if words.startswith(NOT_TRIED)]
    wrong = [what for what, words in entry["scenarios"].items() if words != OK and what not in untried]
    return name, sites, str(len(entry["scenarios"])), ", ".join(wrong), ", ".join(untried)


def in_process(name: str, setting: Setting) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        options = [
            "--device",
            setting.device,
            "--dtype",
            str(setting.dtype).removeprefix("torch."),
            "--backend",
            setting.backend,
        ]
        options += ["--fallback", setting.fallback] if setting.fallback else []
        command = [sys.executable, __file__, name, *options, "--one", str(result)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return {"sites": {}, "scenarios": {"process": f"did not end within {TIMEOUT_S} s"}}
        if not result.exists():
            last = (done.stderr.strip().splitlines() or [""])[-1]
            return {"sites": {}, "scenarios": {"process": f"ended with {done.returncode}: {last[:300]}"}}
        return json.loads(result.read_text())


# --- in the model's own process ----------------------------------------------------------------------------------------


def tried(entry: Entry, setting: Setting) -> dict[str, Any]:
    torch.manual_seed(0)
    model = entry.build().to(setting.device, setting.dtype).eval()
    exact = copy.deepcopy(model).to(setting.exact)
    if getattr(exact, "_can_set_experts_implementation", bool)():
        exact.set_experts_implementation("eager")  # by default it is grouped_mm, which knows no float64
    if hasattr(model, "config"):
        model.config.use_cache = exact.config.use_cache = False
    trial = Trial(entry, setting, model, exact)
    scenarios: dict[str, Callable[[], None]] = {"sizes": trial.sizes}
    if entry.pads:
        scenarios |= {"left padding": lambda: trial.padded(left=True), "right padding": lambda: trial.padded(left=False)}
    if entry.generates:
        scenarios["generate"] = trial.generate
    if entry.trains:
        scenarios["training"] = lambda: trial.training(amp=False)
    if entry.trains and setting.dtype == torch.float32:  # what is trained with AMP has its weights in float32
        scenarios["training, AMP, accumulation"] = lambda: trial.training(amp=True)
    found: Counter[str] = Counter()
    return {
        "scenarios": {name: words(scenario, found, trial) for name, scenario in scenarios.items()},
        "sites": dict(found),
    }


def words(scenario: Callable[[], None], found: Counter[str], trial: "Trial") -> str:
    """What became of a scenario: OK, what is wrong, or, after NOT_TRIED, why the model cannot do it without kernels."""
    trial.found, trial.has_kernels = Counter(), False
    try:
        scenario()
        answer = OK
    except Trouble as trouble:
        answer = str(trouble)
    except Exception as error:  # of any kind: a crash is an outcome here
        blame = "" if trial.has_kernels else NOT_TRIED
        answer = f"{blame}{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    found |= trial.found  # of each kind the most that one scenario has
    return answer


class Trial:
    """One model, once as it is and once with kernels."""

    def __init__(self, entry: Entry, setting: Setting, model: nn.Module, exact: nn.Module):
        self.entry, self.setting, self.model, self.exact = entry, setting, model, exact
        self.found: Counter[str] = Counter()
        self.has_kernels = False  # or had

    def inputs(self, batch: int, size: int, seed: int = 1) -> Inputs:
        torch.manual_seed(seed)
        return self.setting.placed(self.entry.inputs(batch, size))

    @contextmanager
    def kernels(self, examples: Sequence[Inputs], amp: bool = False) -> Iterator[nn.Module]:
        """The model with the starter of its type at every site that a pass on any of the examples has."""
        self.has_kernels = True
        made = partial(regions_of, backend=self.setting.backend) if self.setting.backend in WRITERS else None
        finder, sites = SiteFinder(regions=made), []
        for example in examples:
            with self.autocast(amp):
                captured = capture(self.model, (), example)
            sites += [site for graph in captured.graphs for site in finder.find(graph.module)]
        self.found = Counter(site.kernel_type for site in sites)
        torch._dynamo.reset()
        apply(self.model, starters(sites, self.setting), self.setting.fallback)
        try:
            yield self.model
        finally:
            unapply(self.model)
            torch._dynamo.reset()

    def autocast(self, amp: bool) -> Any:
        kind = torch.device(self.setting.device).type
        dtype = torch.float16 if self.setting.dtype == torch.float16 else torch.bfloat16
        return torch.autocast(kind, dtype) if amp else nullcontext()

    def sizes(self) -> None:
        """Passes of several sizes, one after the other; kernels for all of them, and for the first alone."""
        examples = [self.inputs(*size) for size in self.entry.sizes]
        self._compare_passes(examples, examples)
        self._compare_passes(examples, examples[:1])

    def padded(self, left: bool) -> None:
        examples = []
        for batch, length in self.entry.sizes[:2]:
            example = self.inputs(batch, length)
            pad = slice(0, length // 4) if left else slice(length - length // 4, None)
            example["attention_mask"][0, pad] = 0
            example["input_ids"][0, pad] = 0
            examples.append(example)
        self._compare_passes(examples, examples)

    @torch.no_grad()
    def _compare_passes(self, examples: Sequence[Inputs], proven: Sequence[Inputs]) -> None:
        """Passes on all examples, with kernels for those that are `proven`."""
        expected = [self.model(**example) for example in examples]
        exact = [self.exact(**self.setting.widened(example)) for example in examples]
        with self.kernels(proven):
            ours = [self.model(**example) for example in examples]
        for i, results in enumerate(zip(ours, expected, exact)):
            compare(f"pass {i}", *map(tensors, results), self.setting.epsilon)

    def generate(self) -> None:
        """Greedy decoding with a cache, of two lengths; where tokens differ, the scores must have been as good as equal."""
        self.model.config.use_cache = True
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
        options |= {"output_scores": True}
        prompts = [self.inputs(*self.entry.sizes[i]) for i in (0, 1, 0)]
        expected = [self.model.generate(**prompt, **options) for prompt in prompts]
        with torch.no_grad(), self.kernels(prompts[:1]):
            ours = [self.model.generate(**prompt, **options) for prompt in prompts]
        self.model.config.use_cache = False
        for got, want in zip(ours, expected):
            if got.sequences.shape != want.sequences.shape:
                raise Trouble(f"generates {tuple(got.sequences.shape)}, not {tuple(want.sequences.shape)}")
            for step, (a, b) in enumerate(zip(got.scores, want.scores)):
                difference = (a - b).nan_to_num().abs().max() / b.nan_to_num(0, 0, 0).abs().max()
                if not torch.equal(a.isfinite(), b.isfinite()) or difference > 1000 * torch.finfo(self.setting.dtype).eps:
                    raise Trouble(f"scores of token {step} differ by {difference:.1e} of the largest")
                if not torch.equal(a.argmax(-1), b.argmax(-1)):
                    break  # from here on the two continue other texts

    def training(self, amp: bool) -> None:
        """Gradients of some micro-batches, added up, without and with kernels."""
        batches = [self.inputs(*self.entry.sizes[0], seed=7 + i) for i in range(MICRO_BATCHES if amp else 1)]
        self.model.train(), self.exact.train()
        try:
            expected = self._gradients(self.model, batches, amp)
            exact = self._gradients(self.exact, [self.setting.widened(batch) for batch in batches], False)
            with self.kernels(batches[:1], amp) as model:
                model.train()
                ours = self._gradients(model, batches, amp)
        finally:
            self.model.eval(), self.exact.eval()
        missing = [name for name in expected if (expected[name] is None) != (ours[name] is None)]
        if missing:
            raise Trouble(f"a gradient is there with kernels or without, not both: {', '.join(missing[:3])}")
        names = [name for name, gradient in expected.items() if gradient is not None]
        eps = torch.finfo(torch.bfloat16 if amp else self.setting.dtype).eps
        # Of a bias of keys, say, which moves all scores of a query alike, the gradient is nothing but rounding.
        floor = max(exact[name].norm().item() for name in names) * eps
        for name in names:
            compare(name, [ours[name]], [expected[name]], [exact[name]], 4 * eps, floor)

    def _gradients(self, model: nn.Module, batches: Sequence[Inputs], amp: bool) -> dict[str, Tensor | None]:
        model.zero_grad(set_to_none=True)
        scale = 128.0 if amp else 1.0  # as a GradScaler would
        for batch in batches:
            with self.autocast(amp):
                outputs = tensors(model(**batch))
            weights = [torch.linspace(0.5, 1.5, t.numel(), device=t.device).reshape(t.shape) for t in outputs]
            loss = sum((t.double() * w).mean() for t, w in zip(outputs, weights) if t.requires_grad)
            (loss * scale / len(batches)).backward()
        return {name: None if p.grad is None else p.grad / scale for name, p in model.named_parameters()}


def starters(sites: Sequence[Site], setting: Setting) -> list[Winner]:
    cases: dict[str, list[WeightedCase]] = {}
    for site in sites:
        cases.setdefault(site.kernel_type, []).append(WeightedCase(site.case, variants=site.variants))
    files = {name: load_spec(name).starters(setting.backend) for name in cases}
    return [
        Winner(
            Target(name, name, setting.backend, setting.device, tuple(cases[name])), next(iter(found.values())).read_text()
        )
        for name, found in files.items()
        if found
    ]


def tensors(result: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(result) if hasattr(result, "keys") else result)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def compare(
    name: str, ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor], epsilon: float, floor: float = 0.0
) -> None:
    """Raise Trouble unless `ours` are as good as `theirs`, by their rms errors."""
    if len(ours) != len(theirs):
        raise Trouble(f"{name}: {len(ours)} results, not {len(theirs)}")
    for i, (a, b, e) in enumerate(zip(ours, theirs, exact, strict=True)):
        where = f"{name}, result {i}"
        for what in ("dtype", "shape", "stride"):
            x, y = (getattr(t, what) for t in (a, b))
            x, y = (x(), y()) if callable(x) else (x, y)
            if x != y:
                raise Trouble(f"{where}: {what} {x}, not {y}")
        if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
            raise Trouble(f"{where}: {int((~a.isfinite()).sum())} numbers are not finite, not {int((~b.isfinite()).sum())}")
        finite = b.isfinite() & e.isfinite()
        a, b, e = (t.double()[finite] for t in (a, b, e))
        size = e.norm().item() + floor
        if not size:
            size = 1.0
        error, allowed = (a - e).norm().item() / size, GROWTH * (b - e).norm().item() / size + epsilon
        if error > allowed:
            raise Trouble(f"{where}: error {error:.1e}, {allowed:.1e} is allowed")


if __name__ == "__main__":
    main()

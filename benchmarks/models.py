"""Whole models with kernels in them: what is found and replaced, and how fast the model is beside every torch.compile.

Usage:   python benchmarks/models.py                        (all, on the GPU if there is one; seven minutes there)
         python benchmarks/models.py --device cpu bert gpt2 (shortened: fewer layers, tokens and images)
         python benchmarks/models.py --device cpu --recorded (measures nothing: what the records come to together)
Reads:   kernels/<type>/<backend>_kernel.py: of each target the starter that looks fastest, as a run begins with it
Writes:  benchmarks/models-<device>.json (models that were not measured keep their record)

Every model has a process of its own. On a GPU models are compiled side by side, and timed one at a time while the others
wait; a CPU takes one model after another. Kernels stay by leave-one-out, and by what sets of them gain together, as in
verify.py (over eager, and over torch.compile; on a GPU there with CUDA graphs, and the same kernels are taken without);
what remains is measured on data that decided nothing. Intervals (95 %) are over rounds in one process, which has a bias of
its own: `python verify.py` takes several.
"""

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean, median
from threading import BrokenBarrierError
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.cli.arguments import Parser, nonnegative, positive, script
from autokernel.common.records import write_json
from autokernel.common.table import print_table
from autokernel.common.verdict import Interval
from autokernel.gate import Judge
from autokernel.gate.timing.statistics import ratio_interval
from autokernel.hardware.device import Device
from autokernel.integration.verification.forms import AUTOTUNED, EAGER, GRAPHS, INDUCTOR, baseline, ours
from autokernel.integration.verification.parity import compare, exact_model
from autokernel.integration.verification.selection import chosen, paying, rivals
from autokernel.integration.verification.sides import Sides, TimedPass, Variant, paired
from autokernel.integration.winner import Winner
from autokernel.model.extraction import make_plan
from autokernel.model.profiler import profile_workload
from autokernel.model.regions.growing import region_finder
from autokernel.model.workload import Workload
from autokernel.run.starters import fastest_first
from autokernel.target import Plan, encode

HERE = Path(__file__).resolve().parent
WIDE = "benchmarks/wide_models.py"
HF_LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
HF_QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
}
LLAMA_8B = {  # Llama 3 (arXiv 2407.21783); Mistral-7B (arXiv 2310.06825) has the same layers, but for a window
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
GEMMA_2B = {  # Gemma 2 (arXiv 2408.00118): soft-capped logits, every other layer has a window
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 32000,
}
OPT_1B = {  # OPT-1.3B (arXiv 2205.01068)
    "hidden_size": 2048,
    "ffn_dim": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "word_embed_proj_dim": 2048,
}
LFM2_1B = {  # LFM2-1.2B (arXiv 2511.23404): three of four layers are short convolutions
    "hidden_size": 2048,
    "intermediate_size": 12288,  # of which a layer has two thirds
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
VIT_LARGE = {  # arXiv 2010.11929
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
}
MIXTRAL = LLAMA_8B | {"num_hidden_layers": 1, "num_local_experts": 8}  # Mixtral 8x7B (arXiv 2401.04088)
LLAMA_7B = {"class_name": "Llama7B", "model_args": {"n_layers": 4}, "input_shape": (1, 2048)}


def of_transformers(class_name: str, config: Mapping[str, Any], shape: tuple[int, ...] = (1, 2048)) -> Workload:
    return Workload("transformers", class_name, config, shape, dtype="bfloat16")


MODELS = {  # on a GPU in float16 unless they say otherwise
    "compact-llama": Workload(class_name="CompactLlama", input_shape=(1, 512)),
    "llama-7b-4-layers": Workload(**LLAMA_7B),
    "llama-7b-4-layers-bf16": Workload(**LLAMA_7B, dtype="bfloat16"),
    "gpt2": Workload("models/gpt2.py", "GPT2", input_shape=(1, 512)),
    "bert": Workload("models/bert.py", "Bert", input_shape=(8, 128)),
    "hf-llama": Workload("transformers", "LlamaForCausalLM", HF_LLAMA, (1, 1024)),
    "unet": Workload("models/unet.py", "UNet", {"width": 64}, (8, 3, 128, 128)),
    "hf-qwen3": Workload("transformers", "Qwen3ForCausalLM", HF_QWEN3, (1, 1024)),
    "gpt2-8x1024": Workload("models/gpt2.py", "GPT2", input_shape=(8, 1024)),
    "llama3-8b": of_transformers("LlamaModel", LLAMA_8B),
    "mistral-7b": of_transformers("MistralModel", LLAMA_8B),
    "gemma2-2b": of_transformers("Gemma2Model", GEMMA_2B),
    "mixtral-8x7b": of_transformers("MixtralModel", MIXTRAL),
    "lfm2-1.2b": of_transformers("Lfm2Model", LFM2_1B),
    "opt-1.3b": of_transformers("OPTModel", OPT_1B, (4, 1024)),
    "vit-large": of_transformers("ViTModel", VIT_LARGE, (32, 3, 224, 224)),
    "bert-large-padded": Workload(WIDE, "PaddedBertLarge", input_shape=()),
    "whisper-medium": Workload(WIDE, "WhisperEncoder", input_shape=(8, 80, 3000)),
    "dit-xl": Workload(WIDE, "DiTXL", input_shape=(), dtype="bfloat16"),
    "resnet-50": Workload(WIDE, "ResNet50", input_shape=()),
    "unet-stage": Workload(WIDE, "UNetStage", input_shape=()),
}
ONE_LAYER = {"num_hidden_layers": 1}
SHORTENED = {  # the same widths for two CPU cores, in float32: fewer layers, tokens and images, a pass of 2 s at most
    "compact-llama": {},
    "gpt2": {},
    "bert": {},
    "unet": {"input_shape": (1, 3, 128, 128)},
    "llama3-8b": {"model_args": LLAMA_8B | ONE_LAYER, "input_shape": (1, 128)},
    "mistral-7b": {"model_args": LLAMA_8B | ONE_LAYER, "input_shape": (1, 128)},
    "hf-qwen3": {"input_shape": (1, 256)},
    "gemma2-2b": {"model_args": GEMMA_2B | {"num_hidden_layers": 2}, "input_shape": (1, 256)},
    "mixtral-8x7b": {"input_shape": (1, 64)},
    "lfm2-1.2b": {"input_shape": (1, 256)},
    "opt-1.3b": {"model_args": OPT_1B | {"num_hidden_layers": 2}, "input_shape": (1, 512)},
    "vit-large": {"model_args": VIT_LARGE | {"num_hidden_layers": 2}, "input_shape": (2, 3, 224, 224)},
    "bert-large-padded": {"model_args": {"layers": 2, "batch": 4, "length": 128}},
    "whisper-medium": {"model_args": {"layers": 1}, "input_shape": (1, 80, 3000)},
    "dit-xl": {"model_args": {"layers": 2, "batch": 1}},
    "resnet-50": {"model_args": {"batch": 1}},
    "unet-stage": {"model_args": {"batch": 1}},
}
CONFIDENCE, WARMUP = 0.95, 3
TIMING_S = 60.0  # that one waits at most while others are timed


@dataclass(frozen=True)
class Stage:
    """What the processes of all models share: when to wait for each other, and for how long in all."""

    quiet: Any  # held by the one that measures
    gates: tuple[Any, ...]  # all have compiled the trials; timed them; compiled sets; timed them; compiled what stays
    seconds: float  # of each measurement
    ends: tuple[float, ...]  # time() at which whoever waits for that goes on

    def wait(self, number: int) -> None:
        try:
            self.gates[number].wait(max(self.ends[number] - time.time(), 0.1))
        except BrokenBarrierError:
            print("goes on before the others are ready", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=positive, default=3.0, help="of each measurement (%(default)s)")
    parser.add_argument("--targets", type=int, default=99, help="at most so many of a model, the costliest")
    parser.add_argument(
        "--patience",
        type=nonnegative,
        nargs=2,
        default=(3600, 7200),
        help="s from the start: trials, all else are compiled",
    )
    parser.add_argument("--no-max-autotune", action="store_true", help="without it: it compiles for minutes")
    parser.add_argument(
        "--recorded", action="store_true", help="what the records say of all models, against the best baseline"
    )
    arguments = parser.parse_args(argv)
    if arguments.recorded:
        report_together(json.loads(record_of(arguments.device).read_text()))
        return
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    names = arguments.models or (list(MODELS) if arguments.device != "cpu" else SHORTENED)
    for together in [names] if arguments.device != "cpu" else [[name] for name in names]:
        measure_all(together, arguments)


def measure_all(names: Sequence[str], arguments: argparse.Namespace) -> None:
    path = record_of(arguments.device)
    context = get_context("spawn")
    trials_s, final_s = arguments.patience
    ends = tuple(time.time() + s for s in (trials_s, trials_s + TIMING_S, final_s, final_s + TIMING_S, final_s + TIMING_S))
    barriers = tuple(context.Barrier(len(names)) for _ in ends)
    stage = Stage(context.Lock(), barriers, arguments.seconds, ends)
    results = context.Queue()
    for threads in ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS") if arguments.device != "cpu" else ():
        os.environ.setdefault(threads, str(max((os.cpu_count() or 2) // len(names), 1)))
    modes = (EAGER, INDUCTOR) if arguments.device == "cpu" else (EAGER, GRAPHS, INDUCTOR)
    children = []
    for name in names:
        workload = workload_of(name, arguments.device)
        last = [] if arguments.no_max_autotune else [AUTOTUNED]
        children.append(
            context.Process(target=child, args=(name, workload, arguments.targets, modes, last, stage, results))
        )
        children[-1].start()
    record = json.loads(path.read_text()) if path.exists() else {}
    while any(c.is_alive() for c in children) or not results.empty():
        if not results.empty():
            name, entry = results.get()
            command = f"python benchmarks/models.py {' '.join(sys.argv[1:])}".strip()
            record[name] = entry | {"command": command, "date": f"{date.today()}"}
            write_json(path, record)
            report(name, entry)
        time.sleep(0.1)
    if any(c.exitcode for c in children):
        raise SystemExit(1)


def workload_of(name: str, device: str) -> Workload:
    if device == "cpu":
        return replace(MODELS[name], dtype="float32", **SHORTENED.get(name, {}))
    dtype = MODELS[name].dtype
    return replace(MODELS[name], device=device, dtype="float16" if dtype == "float32" else dtype)


def record_of(device: str) -> Path:
    return HERE / f"models-{device.split(':')[0]}.json"


def report_together(record: Mapping[str, Any]) -> None:
    """Each model's fastest form, against the fastest of its baselines; one for which no kernel stays is as fast as that."""
    found = {}
    for name, entry in record.items():
        times = {side: figures["ms"] for side, figures in entry["sides"].items()}
        best, fastest = min(entry["baselines"], key=times.__getitem__), min(times, key=times.__getitem__)
        found[name] = Interval(**entry["sides"][fastest]["speedups"][best]) if fastest != best else Interval(1.0, 1.0, 1.0)
        print(f"{name}: {fastest} {found[name]} {best}")
    print(f"geometric mean of {len(found)}: {geometric_mean(gain.value for gain in found.values()):.2f}x")


def report(name: str, entry: Mapping[str, Any]) -> None:
    print_table(
        f"\n{name}: {entry['workload']}, sites",
        ("operation", "% of time", "calls", "µs a call", "replaced over"),
        [
            (s["name"], f"{s['share']:.1%}", f"{s['calls']:g}", f"{s['us']:.1f}", ", ".join(s["used"]))
            for s in entry["sites"]
        ],
    )
    print_table(
        f"{name}: a pass of the model",
        ("way to run it", "ms", "MB", "first call, s", *entry["baselines"]),
        [
            (
                side,
                f"{f['ms']:.3f}",
                "" if f["peak_mb"] is None else f"{f['peak_mb']:.0f}",
                f"{f['first_call_s']:.1f}",
                *(str(Interval(**f["speedups"][b])) if b in f["speedups"] else "" for b in entry["baselines"]),
            )
            for side, f in entry["sides"].items()
        ],
    )
    for parity in entry["parity"]:
        print(name, parity)
    print("", flush=True)


# --- in the process of one model -------------------------------------------------------------------------------------


def child(
    name: str, workload: Workload, targets: int, modes: tuple[str, ...], last: list[str], stage: Stage, results: Any
) -> None:
    def say(line: str) -> None:
        print(f"[{time.strftime('%X')}] {name}: {line}", flush=True)

    with torch.no_grad():
        results.put((name, measure(workload, targets, modes, last, stage, say)))


def measure(
    workload: Workload, targets: int, modes: tuple[str, ...], last: list[str], stage: Stage, say: Callable[[str], None]
) -> dict[str, Any]:
    profile = profile_workload(workload, 2, 5, baseline="eager", regions=region_finder(workload.device))
    plan = make_plan(profile, top=targets)
    say(f"{profile.latency_us / 1e3:.2f} ms a pass")
    winners = tuple(winners_of(plan, say))
    model, _, _ = workload.load()
    trials = {over: Sides(workload, model) for over in modes[:2]}
    example = workload.inputs(model, 1)
    for over, sides in trials.items():
        finder = trials[EAGER].finder  # what it proved need not be proven again
        sides.finder = finder
        without = {w.target.name: Variant(tuple(o for o in winners if o is not w), over) for w in winners}
        for side in ({ours(over): Variant(winners, over)} | without).items():
            if time.time() < stage.ends[0] or over == EAGER:
                sides.build(dict([side]), example)
        say(f"compiled with and without each kernel, over {over}")
        for side, why in sides.idle.items():
            say(f"{side}: no kernel is in it ({why})")
    stage.wait(0)
    gains: dict[str, dict[str, Interval]] = {}
    for over, sides in trials.items():
        with stage.quiet:
            rounds = rounds_of(sides, stage.seconds)
        gains[over] = {
            w.target.name: speedup(rounds, w.target.name, ours(over)) for w in winners if w.target.name in rounds[0]
        }
        say(f"over {over} with it: {', '.join(f'{name} {gain}' for name, gain in gains[over].items()) or 'no kernel'}")
    stage.wait(1)
    trials.clear()
    final = Sides(workload, model, finder=finder)
    final.build({baseline(over): Variant((), over) for over in modes}, example)
    suggested = {over: sets_of(found or gains[EAGER]) for over, found in gains.items()}
    sets = {over: {names: f"set {i + 1} over {over}" for i, names in enumerate(found)} for over, found in suggested.items()}
    for over, names, side in [(over, names, side) for over, of_mode in sets.items() for names, side in of_mode.items()]:
        final.build({side: Variant(tuple(w for w in winners if w.target.name in names), over)}, example)
    final.build({baseline(over): Variant((), over) for over in last}, example)
    say("compiled sets of kernels")
    stage.wait(2)
    with stage.quiet:
        rounds = rounds_of(final, stage.seconds)
    stay: dict[str, tuple[Winner, ...]] = {}
    for over, of_mode in sets.items():
        known = paying(gains[over])
        before = of_mode.get(known, baseline(over))
        speedups = {names: speedup(rounds, before, side) for names, side in of_mode.items() if side in final.models}
        names = chosen(known, speedups)
        stay[over] = tuple(w for w in winners if w.target.name in names)
        told = ", ".join(f"{len(names)} kernels {gain}" for names, gain in speedups.items())
        say(f"over {over}, against {len(known)}: {told or 'no other set'}; {len(names)} stay")
        for of_set, side in of_mode.items():
            for known_of_side in (final.models, final.first_call_s, final.peak_mb):
                found = known_of_side.pop(side, None)
                if of_set == names and side in rounds[0]:
                    known_of_side[ours(over)] = found
    stage.wait(3)
    for over in modes[2:]:
        stay[over] = stay[GRAPHS]
        if stay[over]:
            final.build({ours(over): Variant(stay[over], over)}, example)
    say("compiled what stays")
    exact = exact_model(model)
    sides = [name for name in map(ours, stay) if name in final.models]
    parity = [
        {"side": name, **asdict(found)}
        for seed in (11, 12)
        for name, found in zip(sides, compare(model, [final.models[s] for s in sides], exact, workload, (None, None), seed))
    ]
    del exact
    stage.wait(4)
    with stage.quiet:
        rounds = rounds_of(final, stage.seconds, seed=10_000)
    baselines = [baseline(over) for over in (*modes, *last) if baseline(over) in final.models]
    return {
        "workload": str(workload),
        "device": Device.detect(torch.device(workload.device)).name,
        "torch": torch.__version__,
        "rounds": len(rounds),
        "baselines": baselines,
        "sides": {
            side: {
                "ms": 1e3 * median(r[side].seconds for r in rounds),
                "peak_mb": final.peak_mb[side],
                "first_call_s": final.first_call_s[side],
                "speedups": {b: encode(speedup(rounds, b, side)) for b in baselines if b != side},
            }
            for side in final.models
        },
        "sites": [
            {
                "name": h.kernel_type and f"{h.kernel_type} {h.name}" or h.name,
                "share": h.share,
                "calls": h.calls,
                "us": h.time_us / h.calls,
                "used": [over for over, kernels in stay.items() if any(holds(w, h.case) for w in kernels)],
            }
            for h in profile.hotspots
            if h.share >= 0.002
        ],
        "gains": encode(gains),
        "parity": parity,
    }


def winners_of(plan: Plan, say: Callable[[str], None]) -> list[Winner]:
    """Of each target the starter that looks fastest."""
    winners = []
    with Judge(plan.device) as judge:
        for target in plan.targets:
            fastest = fastest_first(target, judge)[0]
            say(f"{target.name}: {fastest.hypothesis}")
            winners.append(Winner(target, fastest.source))
    return winners


def holds(winner: Winner, case: Any) -> bool:
    return case is not None and any(encode(c.case) == encode(case) for c in winner.target.cases)


def sets_of(gains: Mapping[str, Interval]) -> list[tuple[str, ...]]:
    """The kernels that pay one by one, if any does, and the sets to compare with them."""
    return [names for names in (paying(gains), *rivals(gains)) if names]


def rounds_of(sides: Sides, seconds: float, seed: int = 100) -> list[dict[str, TimedPass]]:
    """Rounds of all sides in turns for so long, each on inputs of its own: `seed`, the next one, …"""
    shuffle, rounds = random.Random(0), []
    end = math.inf
    while len(rounds) < WARMUP + 5 or time.perf_counter() < end:
        if len(rounds) == WARMUP:
            end = time.perf_counter() + seconds
        rounds += paired(sides.round(sides.workload.inputs(sides.model, seed + len(rounds)), shuffle))
    return rounds[WARMUP:]


def speedup(rounds: Sequence[Mapping[str, TimedPass]], slow: str, fast: str) -> Interval:
    return ratio_interval([math.log(r[slow].seconds / r[fast].seconds) for r in rounds], CONFIDENCE)


if __name__ == "__main__":
    raise SystemExit(script(main))

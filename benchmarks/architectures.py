"""Published architectures, small and with random weights: what is found in them, is replaced, and is the model the same?

Usage:   python benchmarks/architectures.py              (all, about half a minute each)
         python benchmarks/architectures.py Llama BERT   (these)
Needs:   transformers; nothing is downloaded
Writes:  benchmarks/architectures.json (those that were not measured keep their record)

Every site gets the C++ starter of its type. Times are medians of interleaved rounds, from nothing compiled: to capture and
match, and torch.compile of the same model until its first pass is done.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.cli.arguments import Parser, script
from autokernel.common.console import fail, preflight, progress
from autokernel.common.records import write_json
from autokernel.common.table import print_table
from autokernel.integration.apply import compile_with_kernels
from autokernel.integration.backend import Replacer
from autokernel.integration.winner import Winner
from autokernel.model.capture import capture
from autokernel.model.match import SiteFinder
from autokernel.model.patterns import Site, patterns_of
from autokernel.model.workload import Workload
from autokernel.spec import load_spec
from autokernel.target import Target, WeightedCase

ROUNDS = 3
RECORD = Path(__file__).with_suffix(".json")
TOKENS = {"vocab_size": 99, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
ENCODER = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
DECODER = ENCODER | TOKENS | {"num_key_value_heads": 2}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0} | TOKENS
WHISPER = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "num_mel_bins": 16}


def hugging_face(
    class_name: str, config: dict[str, object], shape: tuple[int, ...] = (2, 32), module: str = ""
) -> Workload:
    return Workload(f"transformers{module}", class_name, config, shape)


ARCHITECTURES = {
    "Llama": hugging_face("LlamaForCausalLM", DECODER),
    "Llama, explicit attention": hugging_face("LlamaForCausalLM", DECODER | {"attn_implementation": "eager"}),
    "Mistral": hugging_face("MistralForCausalLM", DECODER | {"sliding_window": 8}),
    "Qwen3": hugging_face("Qwen3ForCausalLM", DECODER | {"head_dim": 16}),
    "Gemma": hugging_face("GemmaForCausalLM", DECODER | {"head_dim": 16}),
    "Gemma 2": hugging_face("Gemma2ForCausalLM", DECODER | {"head_dim": 16}),
    "GPT-2": hugging_face("GPT2LMHeadModel", {"n_layer": 2, "n_embd": 64, "n_head": 4} | TOKENS),
    "BERT": hugging_face("BertModel", ENCODER | TOKENS),
    "T5": hugging_face("T5ForConditionalGeneration", T5),
    "ViT": hugging_face("ViTModel", ENCODER | {"image_size": 32, "patch_size": 8}, (2, 3, 32, 32)),
    "Mixtral": hugging_face("MixtralForCausalLM", DECODER | {"num_local_experts": 4}),
    "Whisper encoder": hugging_face(
        "WhisperEncoder", WHISPER | {"max_source_positions": 32}, (2, 16, 64), ".models.whisper.modeling_whisper"
    ),
    "Phi": hugging_face("PhiForCausalLM", ENCODER | TOKENS),
    "Phi 3": hugging_face("Phi3ForCausalLM", DECODER),
}


@dataclass(frozen=True)
class Examination:
    graphs: int
    found: dict[str, int]  # kernel type -> sites
    replaced: dict[str, int]
    refused: dict[str, int]  # "kernel type: why" -> places that look like the operation and are not
    largest_difference: float  # of the outputs, over their largest
    capture_s: float | None = None
    match_s: float | None = None
    compile_s: float | None = None  # torch.compile with Inductor, and the first pass

    @property
    def ratio(self) -> float | None:
        return self.compile_s and (self.capture_s + self.match_s) / self.compile_s


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(ARCHITECTURES)}")
    names = parser.parse_args(argv).names or list(ARCHITECTURES)
    if unknown := set(names) - set(ARCHITECTURES):
        fail(f"no architecture {', '.join(sorted(unknown))}; there are: {', '.join(ARCHITECTURES)}")
    preflight("cpp")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    with progress("examining", len(names)) as step:
        for name in names:
            step(name)
            examination = examine(ARCHITECTURES[name], ROUNDS)
            versions = {"torch": torch.__version__, "transformers": sys.modules["transformers"].__version__}
            record[name] = asdict(examination) | {"ratio": examination.ratio} | versions
            write_json(RECORD, record)
    columns = ("architecture", "found", "not replaced", "refused", "difference", "capture", "match", "compile", "ratio")
    print_table(
        "sites in published architectures", columns, [row(name, record[name]) for name in ARCHITECTURES if name in record]
    )


def row(name: str, entry: dict) -> tuple[str, ...]:
    def words(counts: dict[str, int]) -> str:
        return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))

    missing = Counter(entry["found"]) - Counter(entry["replaced"])
    seconds = (f"{entry[key]:.1f} s" for key in ("capture_s", "match_s", "compile_s"))
    counts = words(entry["found"]), words(missing), words(entry["refused"])
    return (name, *counts, f"{entry['largest_difference']:.1e}", *seconds, f"{entry['ratio']:.2f}")


def examine(workload: Workload, rounds: int = 0) -> Examination:
    """The model with every site's starter in it, against the original; in `rounds` rounds, the times as well."""
    model, args, kwargs = workload.load()
    captured, finder = capture(model, args, kwargs), SiteFinder(min_elements=0)
    answers = [finder.examine(graph.module) for graph in captured.graphs]
    sites = [site for found, _ in answers for site in found]
    replacer = Replacer(starters(sites), finder=finder)
    with torch.no_grad():
        ours, theirs = (tensors(m(*args, **kwargs)) for m in (compile_with_kernels(model, replacer), model))
    times = [(*timed_matching(workload), timed_compilation(workload)) for _ in range(rounds)]
    return Examination(
        len(captured.graphs),
        dict(Counter(site.kernel_type for site in sites)),
        dict(Counter(replacement.target for replacement in replacer.replaced)),
        dict(Counter(f"{r.kernel_type}: {r.why.value}" for _, refused in answers for r in refused)),
        max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True)),
        *map(median, zip(*times)),
    )


def starters(sites: list[Site]) -> list[Winner]:
    cases: dict[str, list[WeightedCase]] = {}
    for site in sites:
        cases.setdefault(site.kernel_type, []).append(WeightedCase(site.case, variants=site.variants))
    sources = {name: next(iter(load_spec(name).starters("cpp").values())).read_text() for name in cases}
    return [Winner(Target(name, name, "cpp", "cpu", tuple(cases[name])), sources[name]) for name in cases]


def tensors(result: object) -> list[Tensor]:
    return [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]


def timed_matching(workload: Workload) -> tuple[float, float]:
    model, args, kwargs = workload.load()
    patterns_of.cache_clear()
    start = time.perf_counter()
    captured = capture(model, args, kwargs)
    middle = time.perf_counter()
    finder = SiteFinder(min_elements=0)
    for graph in captured.graphs:
        finder.find(graph.module)
    return middle - start, time.perf_counter() - middle


def timed_compilation(workload: Workload) -> float:
    model, args, kwargs = workload.load()
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.utils.fresh_cache():
        return _seconds(lambda: torch.compile(model)(*args, **kwargs))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(script(main))

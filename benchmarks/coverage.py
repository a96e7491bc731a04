"""How much of a model's time kernels can have: profiles of models small in width, none of which a kernel was written for.

Usage:   python benchmarks/coverage.py                    all of MODELS, half a minute to two minutes each
         python benchmarks/coverage.py Mixtral Mamba
         python benchmarks/coverage.py --device cuda --dtype float16
Needs:   transformers; nothing is downloaded
Writes:  benchmarks/coverage-<device>-<dtype>.json (models not tried keep their record)

"Covered" is the share of the untouched pass that is in operations of a kernel type or in regions, whether or not a kernel
is faster there; what is left is named with the reason. The sum is all of the pass.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autokernel.cli.arguments import Parser, script
from autokernel.common.records import write_json
from autokernel.common.table import print_table
from autokernel.model.profiler import profile_workload
from autokernel.model.regions.growing import region_finder
from autokernel.model.workload import Workload

HERE = Path(__file__).resolve().parent
WIDTHS = {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8}
LAYERS = WIDTHS | {"intermediate_size": 1024}
GROUPED = LAYERS | {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 2000}
TOKENS, IMAGE = (1, 256), (1, 3, 224, 224)


def of_transformers(class_name: str, config: Mapping[str, Any], shape: tuple[int, ...] = TOKENS) -> Workload:
    return Workload("transformers", class_name, config, shape)


MODELS = {
    "GPT-2": Workload("models/gpt2.py", "GPT2", input_shape=(1, 256)),
    "BERT": Workload("models/bert.py", "Bert", input_shape=(4, 128)),
    "compact LLaMA": Workload(class_name="CompactLlama", input_shape=(1, 256)),
    "Gemma 2": of_transformers("Gemma2ForCausalLM", GROUPED),
    "OPT": of_transformers("OPTForCausalLM", WIDTHS | {"vocab_size": 2000, "ffn_dim": 1024, "word_embed_proj_dim": 512}),
    "ViT": of_transformers("ViTModel", LAYERS, IMAGE),
    "Mixtral": of_transformers("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}),
    "gpt-oss": of_transformers("GptOssForCausalLM", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "RWKV": of_transformers("RwkvForCausalLM", {"vocab_size": 2000, "hidden_size": 256, "num_hidden_layers": 2}, (1, 64)),
    "XLNet": of_transformers(
        "XLNetModel", {"vocab_size": 2000, "d_model": 512, "n_layer": 2, "n_head": 8, "d_inner": 1024}
    ),
    "wav2vec2": of_transformers("Wav2Vec2Model", LAYERS, (1, 16000)),
    "Mamba": of_transformers("MambaForCausalLM", {"vocab_size": 2000, "hidden_size": 256, "num_hidden_layers": 2}, (1, 64)),
    "ResNet": of_transformers("ResNetModel", {}, IMAGE),
    "U-Net": Workload("models/unet.py", "UNet", input_shape=(2, 3, 64, 64)),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: all of {', '.join(MODELS)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}: there are {', '.join(MODELS)}")
    record = HERE / f"coverage-{arguments.device}-{arguments.dtype}.json"
    known = json.loads(record.read_text()) if record.exists() else {}
    for name in arguments.models or MODELS:
        workload = dataclasses.replace(MODELS[name], dtype=arguments.dtype, device=arguments.device)
        torch._dynamo.reset()
        regions = region_finder(arguments.device)
        profile = profile_workload(workload, warmup=1, iterations=3, baseline="eager", regions=regions).to_json()
        print(name, *profile["account"], sep="\n", flush=True)
        known[name] = {"shares": profile["shares"], "account": profile["account"], "torch": torch.__version__}
        write_json(record, known)
    rows = [
        (name, *(f"{share:.1%}" for share in entry["shares"].values()), entry["torch"]) for name, entry in known.items()
    ]
    columns = ("model", *next(iter(known.values()))["shares"], "torch")
    print_table(f"share of the device time, {arguments.device}, {arguments.dtype}", columns, rows)


if __name__ == "__main__":
    raise SystemExit(script(main))

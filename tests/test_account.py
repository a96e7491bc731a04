"""All of a pass is accounted for: covered by sites, refused, of no kernel type, or not captured, with the reasons."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autokernel.model import account
from autokernel.model.account import Standing
from autokernel.model.extraction import make_plan
from autokernel.model.hotspots import ModelProfile
from autokernel.model.profiler import profile_workload
from autokernel.model.untouched import in_words, share_out
from autokernel.model.workload import Workload
from autokernel.report.live import estimated_speedup
from autokernel.run.scheduler import expected_gain
from autokernel.target import Plan, default_target
from tests.test_experiments import ROW

MODELS = '''
import torch
from torch import nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.lstm, self.after = nn.Linear(64, 64), nn.LSTM(64, 64, batch_first=True), nn.Linear(64, 64)

    def forward(self, x):
        return self.after(self.lstm(self.before(x)[None])[0])


class Deciding(nn.Module):
    """A loop whose course depends on what a tensor holds, and then a norm in a module of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = Looping(), nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(self.inner(x))


class Looping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)

    def forward(self, x):
        for i in range(3):
            if x.abs().sum() > i:
                x = self.first(x)
        return x


class Refused(nn.Module):
    """A norm whose statistics are used a second time, and one too small to be worth a call."""

    def __init__(self):
        super().__init__()
        self.weight, self.small, self.first = nn.Parameter(torch.ones(64)), nn.LayerNorm(8), nn.Linear(64, 64)

    def forward(self, x):
        x = self.first(x)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * scale * self.weight, scale, self.small(x[:4, :8])


class Disabled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)

    @torch.compiler.disable
    def forward(self, x):
        return self.first(x)


class Watched(nn.Module):
    """Its graph is left as it is: a tensor that asks for gradients in the middle of a pass."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)

    def forward(self, x):
        with torch.enable_grad():
            return self.first(torch.sin(x).requires_grad_()).detach()


class Padded(nn.Module):
    """A layer that leaves padded positions out where it is not compiled, and a norm that is compiled."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = Encoding(), nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(self.inner(x))


class Encoding(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x):
        x = x.view(8, 64, 64)
        hidden = (torch.arange(64) >= 32).expand(8, 64)
        return self.encoder(x, src_key_padding_mask=hidden)[:, :40]


class Growing(nn.Module):
    """A part that has a longer list with each pass, and a norm in a function of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = Listing(), Norm()

    def forward(self, x):
        return self.norm(self.inner(x))


class Norm(nn.Module):
    def forward(self, x):
        return torch.layer_norm(x, (64,))


class Listing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.seen = nn.Linear(64, 64), []

    def forward(self, x):
        self.seen.append(len(x))
        return self.first(x)


class Otherwise(nn.Module):
    """What Dynamo captures sorts, which the model does not, and has eight times its product's rows."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 256)

    def forward(self, x):
        rows = x
        if torch.compiler.is_compiling():
            rows = torch.cat((x, *x.repeat(7, 1, 1).sort(-1).values))
        return self.second(torch.tanh(x)), self.first(rows)[: len(x)]


def example_inputs():
    return (torch.randn(512, 64),)
'''


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "accounted_models.py"
    path.write_text(MODELS)
    return path


def profiled(models: Path, class_name: str) -> ModelProfile:
    return profile_workload(Workload(str(models), class_name), warmup=1, iterations=3, baseline="eager")


@pytest.mark.slow
def test_time_that_only_the_captured_graph_spends_is_none_of_the_models(models: Path, tmp_path: Path) -> None:
    """Shares, what a target promises, and what a kernel gains are of the model untouched."""
    profile = profiled(models, "Otherwise")
    assert sum(account.shares(profile.hotspots).values()) == pytest.approx(1)
    (words,) = profile.differs
    assert "other work" in words and "aten::sort" in words
    assert not any("sort" in h.name and h.share > 0.001 for h in profile.hotspots)
    sites = {site.case.args["x"].shape[0]: site for site in profile.sites}
    more, same = sites[8 * 512], sites[512]
    assert same.graph_us == pytest.approx(same.time_us)
    assert more.graph_us != more.time_us
    assert more.removable_us <= more.time_us
    profile.write(tmp_path / "profile.json")
    assert ModelProfile.read(tmp_path / "profile.json") == profile

    plan = make_plan(profile, top=9)
    assert sum(t.share for t in plan.targets) == pytest.approx(account.shares(profile.hotspots)[Standing.COVERED])
    (target,) = make_plan(replace(profile, hotspots=(more,))).targets
    assert target.over_model(2.0) == pytest.approx(2 * more.time_us / more.graph_us)


def test_a_kernels_gain_is_over_what_the_untouched_model_spends() -> None:
    """Four times as fast as PyTorch on the graph's calls, which take eight times as long as the model's own."""
    alike = replace(default_target("matmul", "cpp", "cpu", torch.float32), share=0.5, model_time_us=100.0, graph_us=100.0)
    slower = replace(alike, graph_us=800.0)
    rows = [replace(ROW, target=alike.name, status="kept", speedup_vs_pytorch=4.0, pct_peak=60.0)]
    assert (alike.over_model(4.0), slower.over_model(4.0)) == (4.0, 0.5)
    assert expected_gain(slower, rows) < expected_gain(alike, rows)  # at its limit it would take 120 % of the model's time
    plan = Plan("model", {}, "cpu", 1000.0, (alike,))
    assert estimated_speedup(plan, rows) == pytest.approx(1.6)
    assert estimated_speedup(replace(plan, targets=(slower,)), rows) == 1.0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("class_name", ["Recurrent", "Deciding", "Refused", "Disabled"])
def test_a_graph_with_the_models_own_work_is_not_said_to_differ(models: Path, class_name: str) -> None:
    profile = profiled(models, class_name)
    assert not profile.differs
    assert all(site.graph_us == pytest.approx(site.time_us) for site in profile.sites)


BERT = """
import torch
from transformers import BertConfig, BertModel

class Bert(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
        self.bert = BertModel(BertConfig(vocab_size=99, **sizes))

    def forward(self, input_ids, attention_mask):
        return self.bert(input_ids, attention_mask).last_hidden_state

def example_inputs():
    return {"input_ids": torch.randint(0, 99, (2, 128)), "attention_mask": torch.ones(2, 128, dtype=torch.long)}
"""


@pytest.mark.slow
def test_a_mask_that_bert_leaves_out_is_in_none_of_its_time(tmp_path: Path) -> None:
    """Hugging Face's BERT looks into the mask that it is given; while it is traced it cannot, and makes a larger one."""
    pytest.importorskip("transformers")
    (tmp_path / "masked_bert.py").write_text(BERT)
    workload = Workload(str(tmp_path / "masked_bert.py"), "Bert")
    profile = profile_workload(workload, warmup=1, iterations=3, baseline="eager")
    assert sum(account.shares(profile.hotspots).values()) == pytest.approx(1)
    (attention,) = (site for site in profile.sites if site.kernel_type == "flash_attention")
    assert "attn_mask" in attention.name  # only in the captured graph
    assert attention.graph_us != attention.time_us
    assert all(site.graph_us == pytest.approx(site.time_us) for site in profile.sites if site is not attention)


def reasons(profile: ModelProfile, standing: Standing) -> dict[str, float]:
    """Reason -> its share of the time."""
    found: dict[str, float] = {}
    for h in profile.hotspots:
        if h.standing == standing:
            found[h.why] = found.get(h.why, 0) + h.share
    return found


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["Recurrent", "Deciding", "Refused", "Disabled", "Watched", "Padded", "Growing"])
def test_all_of_the_time_is_accounted_for(models: Path, name: str, tmp_path: Path) -> None:
    profile = profiled(models, name)
    shares = account.shares(profile.hotspots)
    assert sum(shares.values()) == pytest.approx(1)
    told = shares[Standing.COVERED] + sum(share for share, _ in account.not_covered(profile.hotspots))
    assert told == pytest.approx(1)
    assert all(h.why for h in profile.hotspots if h.standing in (Standing.REFUSED, Standing.UNCAPTURED))
    profile.write(tmp_path / "profile.json")
    assert ModelProfile.read(tmp_path / "profile.json") == profile
    assert sum(json.loads((tmp_path / "profile.json").read_text())["shares"].values()) == pytest.approx(1)
    CHECKS[name](profile)


@pytest.mark.slow
def test_experts_are_a_site_with_their_share() -> None:
    """What eager mode spends in another operator than the captured graph has is no more than that: it is named."""
    pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
    tokens = {"vocab_size": 99, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "num_local_experts": 4}
    workload = Workload("transformers", "MixtralForCausalLM", sizes | tokens | {"num_key_value_heads": 2}, (2, 64))
    profile = profile_workload(workload, warmup=1, iterations=3, baseline="eager")
    assert sum(account.shares(profile.hotspots).values()) == pytest.approx(1)
    assert sum(site.share for site in profile.sites if site.kernel_type == "grouped_matmul") > 0.01
    left = [words for _, words in account.not_covered(profile.hotspots) if "all experts" in words]
    assert all("aten::_grouped_mm" in words for words in left)
    assert {"matmul", "rmsnorm", "flash_attention"} <= {site.kernel_type for site in profile.sites}


def recurrent(profile: ModelProfile) -> None:
    """The LSTM is one operator of a graph, and the products around it are sites."""
    assert not profile.uncaptured and not profile.graph_breaks
    assert {site.kernel_type for site in profile.sites} == {"fused_linear"}
    assert any(h.name == "aten.lstm.input" and h.calls == 1 and h.share > 0.1 for h in profile.hotspots)
    assert any("no kernel type" in line and "whole nn.LSTM" in line for line in account.lines(profile.hotspots))


def deciding(profile: ModelProfile) -> None:
    assert [site.kernel_type for site in profile.sites] == ["layernorm"]
    assert max(reasons(profile, Standing.UNCAPTURED).items(), key=lambda r: r[1])[0].startswith("Data-dependent branching")
    lost = {h.name for h in profile.hotspots if not h.captured}
    assert {"aten::linear", "aten::sum"} <= lost and "aten::layer_norm" not in lost


def refused(profile: ModelProfile) -> None:
    assert [site.kernel_type for site in profile.sites] == ["fused_linear"]
    whys = " ".join(reasons(profile, Standing.REFUSED))
    assert "rmsnorm: an intermediate result is used elsewhere" in whys and "layernorm: too small" in whys
    norm = [h.name for h in profile.hotspots if "rmsnorm" in h.why]
    assert any("rsqrt" in name for name in norm) and any("mul" in name for name in norm)  # all of it, not its last node
    assert not profile.uncaptured


def disabled(profile: ModelProfile) -> None:
    assert profile.uncaptured == pytest.approx(1)
    assert {h.name for h in profile.hotspots} == {"aten::linear"}


def watched(profile: ModelProfile) -> None:
    assert any("requires_grad_" in why for why in reasons(profile, Standing.UNCAPTURED)) and not profile.sites


def padded(profile: ModelProfile) -> None:
    """The model's own pass, which is on half of the positions: what another captured one did would be another's time."""
    (why,) = reasons(profile, Standing.UNCAPTURED)
    assert "padding mask" in why and why in profile.graph_breaks
    assert {h.name for h in profile.hotspots if not h.captured} >= {
        "aten::_transformer_encoder_layer_fwd",
        "aten::_nested_tensor_from_mask",
    }
    assert not profile.differs


def growing(profile: ModelProfile) -> None:
    """Two functions, of which Dynamo takes the inner one for a part of the outer one, and then for itself."""
    whys = reasons(profile, Standing.UNCAPTURED)
    assert whys and all("compiles it anew: no longer len(self" in why for why in whys)
    assert any("compiles it anew" in line for line in profile.graph_breaks)
    assert [site.kernel_type for site in profile.sites] == ["layernorm"]
    assert "aten::linear" in {h.name for h in profile.hotspots if not h.captured}


CHECKS = {check.__name__.title(): check for check in (recurrent, deciding, refused, disabled, watched, padded, growing)}


def test_the_untouched_passs_time_goes_to_who_runs_the_same_calls() -> None:
    """Equal calls first, then equal operators, then what is left, which is cut down and never blown up."""
    linear, wider, masked, plain = ("linear", "64"), ("linear", "256"), ("attention", "mask"), ("attention", "")
    mask, einsum = ("ones", ""), ("einsum", "")
    graph = {"a": {linear: 2.0}, "b": {linear: 6.0}, "c": {masked: 9.0}, "d": {mask: 5.0}, "e": {wider: 1.0}}
    shared = share_out(graph, {linear: 4.0, plain: 3.0, wider: 1.0})
    assert shared.times == {"a": 1.0, "b": 3.0, "c": 3.0, "d": 0.0, "e": 1.0} and not shared.rest
    assert shared.as_captured == {"a": 1.0, "b": 3.0, "c": 9.0, "d": 5.0, "e": 1.0}
    assert shared.other_work == {"attention": (9.0, 3.0), "ones": (5.0, 0.0)}
    assert share_out(graph, {linear: 8.0, einsum: 20.0}).rest == {"einsum": 5.0}
    assert share_out({"a": {linear: 4.0}}, {einsum: 3.0}).times == {"a": 3.0}


def test_the_same_work_by_another_operator_is_no_other_work() -> None:
    product, einsum = ("aten::bmm", "8x8"), ("aten::einsum", "8x8")
    assert not in_words(share_out({"a": {product: 50.0}}, {einsum: 51.0}), 100.0)
    assert "aten::bmm 0.08 ms instead of 0" in in_words(share_out({"a": {product: 80.0}}, {einsum: 51.0}), 100.0)


@pytest.mark.parametrize("operator", ["aten.lstm_cell.default", "aten.gru_cell.default", "aten.rnn_tanh_cell.default"])
def test_a_cell_is_one_step_and_no_whole_module(operator: str) -> None:
    assert "one step" in account.what_it_is(operator) and "whole" not in account.what_it_is(operator)

"""The agent for OpenAI-compatible endpoints, over HTTP on loopback: what Claude's tests ask of Claude."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import openai
import pytest

from autokernel.agents import AgentOptions, AgentStopped, OutOfBudget, PastExperiment, conversation, make_agent
from autokernel.agents.conversation import ModelAgent, stated
from autokernel.agents.openai import LONGEST_ANSWER, ChatModel, client_for, is_local
from autokernel.common.preflight import Refused
from autokernel.spec import ROOT
from tests.chat_api import serving
from tests.messages_api import Broken, Call, Refusal, said
from tests.test_agents import (
    BAD_ANSWERS,
    EDITED,
    FIRST,
    GOOD,
    PROPOSED,
    READS,
    STARTER_SOURCE,
    TARGET,
    context,
    trial,
)
from tests.test_experiments import ROW

PRICES = (2.0, 8.0)  # USD per million tokens, in and out


@pytest.fixture
def api():
    """A server whose answers are those of `api.script`, one a request."""
    script = []
    with serving(lambda request: script.pop(0)) as server:
        server.script = script
        yield server


def agent_at(api, said_to_us=None, patience_s=20.0, spent_usd=0.0, prices=PRICES, **options) -> ModelAgent:
    timeout = openai.Timeout(1.5, connect=5)
    client = openai.OpenAI(api_key="test", base_url=api.url, max_retries=0, timeout=timeout)
    say = (said_to_us if said_to_us is not None else []).append
    options = AgentOptions(**options)
    return ModelAgent(say, ChatModel("qwen", client, *prices), options, spent_usd, patience_s, first_wait_s=0.01)


def priced(usages) -> float:
    rates = dict(zip(("prompt_tokens", "completion_tokens"), PRICES))
    return sum(usage[name] * rate for usage in usages for name, rate in rates.items()) / 1e6


def test_a_model_proposes_and_what_it_costs_is_counted(api):
    told = []
    api.script[:] = [GOOD, GOOD]
    agent = agent_at(api, told)
    proposal = agent.propose(context(FIRST, trial("a = 1", "failed", None)))
    assert (proposal.source, proposal.agent) == ("x = 1\n", "qwen")
    assert proposal.hypothesis == "smaller is faster (predicts 1.10x)"
    assert proposal.tokens == api.usages[0]["total_tokens"] and proposal.cost_usd == pytest.approx(priced(api.usages))
    for part in ("qwen is the agent: ", "127.0.0.1", "$10.00", "kernel's source", "$2 in and $8 out"):
        assert part in told[0]
    agent.propose(context(FIRST))
    assert len(told) == 1  # before the first call, and only then
    assert agent._purse.spent.usd == pytest.approx(priced(api.usages))
    system, opening = api.requests[0]["messages"]
    assert "## The rules" in system["content"] and "def rmsnorm(" in opening["content"]
    assert "# Tier 1" in opening["content"] and "# Tier 2" not in opening["content"]
    assert opening["content"].index(STARTER_SOURCE) < opening["content"].index("failed")
    assert {tool["function"]["name"] for tool in api.requests[0]["tools"]} == {"read", "look", "autotune", "propose"}
    assert all(tool["function"]["parameters"]["type"] == "object" for tool in api.requests[0]["tools"])


@pytest.mark.parametrize("marks", ("```python\n{}```", "\n````\n{}````\n"))
def test_a_file_in_a_block_of_markdown_is_taken_without_its_marks(api, marks):
    source = 'x = 1\n"""\n```\n"""\n'
    api.script[:] = [said(Call("propose", {"source": marks.format(source), "hypothesis": "faster"}))]
    assert agent_at(api).propose(context(FIRST)).source == source


def test_a_model_reads_what_it_asks_for_and_edits_by_patch(api):
    failed = PastExperiment(replace(ROW, experiment=2, status="failed", correctness="FAIL"), "a = 1\n", "error: expected ;")
    asked = [Call("read", {"topic": topic, "name": "2"[: topic == "experiment"]}) for topic in READS]
    api.script[:] = [said("Let me see.", *asked), said(Call("read", {"topic": "weather"})), said(Call("propose", EDITED))]
    proposal = agent_at(api).propose(context(FIRST, failed))
    assert proposal.source == STARTER_SOURCE.replace("UNROLL = 4 ", "UNROLL = 8 ")
    answers = [message["content"] for message in api.requests[1]["messages"] if message["role"] == "tool"]
    for topic, answer in zip(READS, answers, strict=True):
        assert READS[topic] in answer, topic
    assert "playbook" in api.requests[2]["messages"][-1]["content"]
    assert "a thought" not in json.dumps(api.requests[2]["messages"])
    assert proposal.tokens == sum(usage["total_tokens"] for usage in api.usages)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("bad", BAD_ANSWERS.values(), ids=BAD_ANSWERS.keys())
def test_a_malformed_answer_is_repaired_once_and_then_logged_as_failed(api, bad):
    api.script[:] = [bad, GOOD]
    assert agent_at(api).propose(context(FIRST)).source == "x = 1\n"
    api.script[:] = [bad, bad, GOOD]
    api.usages.clear()
    proposal = agent_at(api).propose(context(FIRST))
    assert len(api.script) == 1 and "no usable answer" in proposal.hypothesis and proposal.source.startswith("# qwen")
    assert proposal.cost_usd == pytest.approx(priced(api.usages)) and proposal.cost_usd > 0


def test_a_model_that_never_proposes_ends_the_run_before_it_costs_more(api):
    agent, bad = agent_at(api), BAD_ANSWERS[min(BAD_ANSWERS)]
    for script in ([bad, bad], [bad, GOOD], [bad, bad], [bad, bad]):  # a proposal begins the count anew
        api.script[:] = script
        agent.propose(context(FIRST))
    api.script[:] = [bad, bad, GOOD]
    with pytest.raises(AgentStopped, match="nothing in 3 experiments in a row: no usable answer"):
        agent.propose(context(FIRST))
    assert len(api.script) == 1


def completion(message, usage=None):
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}


def calling(**function):
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


FORMS = {
    "no message": completion(None),
    "a message that is a text": completion("hi"),
    "no choice": completion(None) | {"choices": [None]},
    "a call that is none": completion({"role": "assistant", "tool_calls": [None]}),
    "calls that are a text": completion({"role": "assistant", "tool_calls": "propose"}),
    "a call of nothing": completion({"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}),
    "a custom tool": completion(
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "x"}}]}
    ),
    "arguments that are an object": completion(calling(name="propose", arguments={"source": "x = 1"})),
    "arguments without an end": completion(calling(name="propose", arguments="[" * 99_999)),
    "half a character": completion(calling(name="propose", arguments='{"source": "\\ud800", "hypothesis": "x"}')),
    "a count that is a text": completion(calling(name="propose", arguments="{}"), usage="many"),
    "counts that are none": completion(calling(name="propose", arguments="{}"), usage={"prompt_tokens": None}),
    "counts below nothing": completion(
        calling(name="propose", arguments="{}"), usage={"prompt_tokens": -9, "completion_tokens": -9, "total_tokens": -18}
    ),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("answer", FORMS.values(), ids=FORMS)
def test_an_answer_of_another_form_is_no_crash_and_is_paid_for(api, answer):
    api.script[:] = [answer, GOOD]
    assert agent_at(api).propose(context(FIRST)).source == "x = 1\n"
    api.script[:] = [answer, answer]
    proposal = agent_at(api).propose(context(FIRST))
    assert "no usable answer" in proposal.hypothesis and proposal.cost_usd > 0 and proposal.tokens > 0


def test_a_hypothesis_is_a_line_of_the_log():
    assert stated({"hypothesis": "a\nb\ud800 ", "predicted_gain": float("nan")}) == "a b?"
    assert len(stated({"hypothesis": "x" * 10**6, "predicted_gain": "much"})) <= 1000


def test_a_model_is_told_when_to_propose(api):
    api.script[:] = [said(Call("read", {"topic": "history"}))] * 7 + [GOOD]
    assert agent_at(api).propose(context(FIRST)).source == "x = 1\n"
    assert "last turn" in api.requests[-1]["messages"][-1]["content"]


PASSING = {
    "429": Refusal(429, "rate_limit_exceeded", {"Retry-After": "0.02"}),
    "500": Refusal(500, "server_error"),
    "503": Refusal(503, "server_error"),
    "408": Refusal(408, "timeout"),
    "cut": Broken("cut"),
    "no JSON": Broken("no JSON"),
    "stalled": Broken("stalled"),
    "an error under 200": Broken("an error under 200"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
@pytest.mark.slow_after(3)
def test_what_passes_is_waited_out(api, fault):
    told = []
    api.script[:] = [fault, fault, GOOD]
    agent = agent_at(api, told)
    assert agent.propose(context(FIRST)).source == "x = 1\n"
    assert sum("asking again" in line for line in told) == 2
    costs, charged = priced(api.usages), agent._purse.spent.usd
    assert charged == pytest.approx(costs) if isinstance(fault, Refusal) else charged > costs + 0.5


@pytest.mark.slow
def test_the_pause_that_a_server_asks_for_is_kept(api):
    told = []
    api.script[:] = [Refusal(429, "rate_limit_exceeded", {"Retry-After": "2"}), GOOD]
    agent_at(api, told).propose(context(FIRST))
    assert "in 2 s" in told[1]


def test_an_answer_of_any_length_ends(api):
    """One that never does, and one that is no kernel file by its length: each is asked for once more."""
    for answer, words in (
        (Broken("endless"), "the answer does not end"),
        (said("x" * (LONGEST_ANSWER + 1)), "the answer is longer than 4 MiB"),
    ):
        api.script[:] = [answer] * 2
        agent = ModelAgent([].append, ChatModel("qwen", client_for(api.url, "test", seconds=0.5)))
        assert words in agent.propose(context(FIRST)).hypothesis and not api.script


def test_a_silent_server_is_not_waited_for_beyond_the_run(api, monkeypatch):
    """It was for half an hour, in a run of a minute."""
    monkeypatch.setattr(conversation, "LEAST_WAIT_S", 0.3)
    api.script[:] = [Broken("stalled")] * 2
    agent, began_s = ModelAgent([].append, ChatModel("qwen", client_for(api.url, "test"))), time.monotonic()
    with pytest.raises(AgentStopped, match="APITimeoutError"):
        agent.propose(replace(context(FIRST), until_s=began_s + 0.3))
    assert time.monotonic() - began_s < 4 and len(api.script) == 1


def test_retries_end_with_the_time_in_which_an_answer_could_be_judged(api):
    api.script[:] = [Refusal(429, "slow down " * 1000, {"Retry-After": "30"})] * 2
    with pytest.raises(AgentStopped, match="RateLimitError.*slow down.*; it asks for a pause of 30 s$") as ended:
        agent_at(api).propose(replace(context(FIRST), until_s=time.monotonic() + 20))
    assert len(api.script) == 1 and len(str(ended.value)) < 500


def test_what_does_not_pass_ends_the_run_in_words(api):
    for refusal, words in (
        (Refusal(401, "invalid_api_key"), "AuthenticationError.*invalid_api_key"),
        (Refusal(404, "model_not_found"), "NotFoundError"),
        (Refusal(429, "insufficient_quota"), "RateLimitError"),
        (Refusal(400, "the context has 4096 tokens"), "longer context.*--max-tokens"),
    ):
        api.script[:] = [refusal]
        agent = agent_at(api)
        with pytest.raises(AgentStopped, match=f"qwen is not available.*{words}"):
            agent.propose(context(FIRST))
        assert agent._purse.spent.usd == 0
    api.script[:] = [Refusal(503)] * 100
    api.requests.clear()
    with pytest.raises(AgentStopped, match="not available"):
        agent_at(api, patience_s=0.2).propose(context(FIRST))
    assert 2 < len(api.requests) < 12  # they are further and further apart
    client = openai.OpenAI(api_key="test", base_url="http://127.0.0.1:9/v1", max_retries=0)
    with pytest.raises(AgentStopped, match="APIConnectionError: ConnectError: .*refused"):
        ModelAgent([].append, ChatModel("qwen", client), patience_s=0.1, first_wait_s=0.01).propose(context(FIRST))
    client = openai.OpenAI(api_key="test", base_url=api.url.removesuffix("/v1"), max_retries=0)
    with pytest.raises(AgentStopped, match="is no OpenAI-compatible API.*/v1"):
        ModelAgent([].append, ChatModel("qwen", client)).propose(context(FIRST))


def test_a_newer_model_of_openais_is_asked_in_its_own_words(api):
    api.newer = True
    api.script[:] = [GOOD, GOOD]
    agent = agent_at(api)
    agent.propose(context(FIRST))
    agent.propose(context(FIRST))
    assert ["max_completion_tokens" in request for request in api.requests] == [False, True, True]


@pytest.mark.parametrize("cap", [{"budget_usd": 0.03}, {"spent_usd": 9.98}, {"budget_tokens": 10_000}])
def test_a_model_stops_before_the_cap(api, cap):
    with pytest.raises(OutOfBudget, match="cap"):
        agent_at(api, **cap).propose(context(FIRST))
    assert api.requests == []


def test_no_cap_is_ever_passed(api):
    api.answer = lambda request: said(PROPOSED, thought_tokens=request["max_tokens"] - 200)
    agent = agent_at(api, budget_usd=0.8)
    with pytest.raises(OutOfBudget):
        while True:
            agent.propose(context(FIRST))
    assert 0.6 < priced(api.usages) <= 0.8 and agent._purse.spent.usd == pytest.approx(priced(api.usages))


def test_a_server_that_does_not_count_is_charged_the_most_that_it_can_be(api):
    api.script[:] = [GOOD]
    api.counts = False
    assert agent_at(api).propose(context(FIRST)).cost_usd > 32_000 * PRICES[1] / 1e6 > priced(api.usages)


def test_what_is_free_passes_no_cap_of_dollars_but_its_tokens_are_counted(api):
    api.script[:] = [GOOD, GOOD]
    proposal = agent_at(api, prices=(0, 0), budget_usd=0.0).propose(context(FIRST))
    assert proposal.cost_usd == 0 and proposal.tokens == api.usages[0]["total_tokens"]
    with pytest.raises(OutOfBudget):
        agent_at(api, prices=(0, 0), budget_tokens=10_000).propose(context(FIRST))


def test_two_agents_that_are_paid_share_one_cap(api, tmp_path):
    (tmp_path / "tree").mkdir()
    api.script[:] = [GOOD] * 4
    one, other = agent_at(api), agent_at(api)
    for agent in (one, other, one, other):
        agent.propose(context(FIRST, tree=tmp_path / "tree"))
    other.purse(context(FIRST))
    assert other._purse.spent.usd == pytest.approx(priced(api.usages)) and len(api.usages) == 4


def test_what_the_command_line_must_say(api, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    far = {"url": "https://models.example.com/v1", "model": "m"}
    for options, words in (
        ({}, "--agent-model"),
        ({"model": "m"}, "prices of m at https://api.openai.com/v1: --price-in and --price-out"),
        (far | {"price_in": 1.0}, "--price-out"),
        (far | {"price_in": 1.0, "price_out": 2.0}, "set OPENAI_API_KEY"),
    ):
        with pytest.raises(Refused, match=words):
            make_agent("openai", print, **options)
    monkeypatch.setenv("OPENAI_BASE_URL", api.url)
    api.script[:] = [GOOD, GOOD]
    assert make_agent("openai", print, model="m").propose(context(FIRST)).cost_usd == 0
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    make_agent("openai", print, model="m").propose(context(FIRST))
    assert api.keys == ["Bearer none", "Bearer mine"]


@pytest.mark.parametrize(
    ("url", "local"),
    [
        *(
            (f"http://{host}/v1", True)
            for host in ("localhost:8000", "127.0.0.1", "[::1]:1", "10.0.0.7", "gpu-box", "a.local")
        ),
        *((f"https://{host}/v1", False) for host in ("api.openai.com", "8.8.8.8", "openrouter.ai")),
    ],
)
def test_a_local_server_is_known_by_its_address(url, local):
    assert is_local(url) is local


@pytest.mark.slow
def test_without_its_package_the_agent_says_what_to_install(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['openai'] = None\n")
    words = ["--agent", "openai", "--agent-model", "m", "--agent-url", "http://localhost:1/v1"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "orchestrate.py", *words], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "pip install -e '.[openai]'" in done.stderr


def test_the_gate_refuses_what_a_model_could_not_say(api, judge):
    api.script[:] = [said("I would rather talk.")] * 2
    proposal = agent_at(api).propose(context(FIRST))
    assert judge.examine(proposal.source, TARGET).correctness == "FAIL"

"""The agents: the tuner's edits and memory, a command in a real working tree, Claude over HTTP on loopback."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import anthropic
import pytest
import torch

from autokernel.agents import (
    AgentOptions,
    AgentStopped,
    Context,
    FirstOf,
    OutOfBudget,
    PastExperiment,
    Proposal,
    agent_names,
    make_agent,
)
from autokernel.agents.claude import PRICES, Claude, newest_opus
from autokernel.agents.command import CommandAgent
from autokernel.agents.conversation import ModelAgent
from autokernel.agents.knobs import read_knobs, set_knob, structure, with_setting
from autokernel.agents.prompt import history_text, task_text
from autokernel.agents.purse import Purse, Spent
from autokernel.agents.toolbox import look_text
from autokernel.agents.tuner import Tuner, scored
from autokernel.cli.orchestrate import make_parser
from autokernel.common import preflight
from autokernel.common.preflight import Refused, backends
from autokernel.common.verdict import CaseTiming, Correctness, Interval, Verdict
from autokernel.gate.timing.autotune import Looked
from autokernel.history.experiments import STARTER
from autokernel.history.ledger import GitLedger
from autokernel.spec import ROOT, load_spec
from autokernel.target import default_target
from tests.messages_api import Broken, Call, Refusal, said, serving
from tests.test_experiments import ROW
from tests.test_ledger import clone, sh, state  # noqa: F401  `clone` is a fixture

TARGET = default_target("rmsnorm", "cpp", "cpu", torch.float32)
SPEC = load_spec("rmsnorm")
STARTER_SOURCE = SPEC.starters("cpp")["cpp_kernel"].read_text()
FIRST = PastExperiment(replace(ROW, agent=STARTER, status="kept", speedup_vs_incumbent=None), STARTER_SOURCE, "correct")
KNOBBED = 'import os\nTUNABLES = {"A": [1, 2, 4, 8], "B": [1, 2]}\nA = 2  # why\nB = 1\nSOURCE = """\nA = 7\n"""\n'


def context(*trials: PastExperiment, incumbent: str = STARTER_SOURCE, tree=None) -> Context:
    return Context(TARGET, SPEC, incumbent, trials, tree)


def trial(source: str, status: str = "reset", speedup: float | None = 0.9) -> PastExperiment:
    return PastExperiment(replace(ROW, status=status, speedup_vs_incumbent=speedup, speedup_high=speedup), source, "why")


def test_a_knob_is_rewritten_in_its_line_alone():
    annotated = KNOBBED.replace("A =", "A: int =").replace("TUNABLES =", "TUNABLES: dict[str, list] =")
    assert annotated != KNOBBED and read_knobs(annotated) == read_knobs(KNOBBED)
    assert read_knobs(set_knob(annotated, "A", 8)).current == {"A": 8, "B": 1}
    edited = set_knob(KNOBBED, "A", 8)
    assert edited == KNOBBED.replace("A = 2  # why", "A = 8  # why")
    assert read_knobs(edited).current == {"A": 8, "B": 1}
    assert structure(edited) == structure(KNOBBED) != KNOBBED


def test_a_knob_that_is_set_to_what_it_is_changes_no_text():
    """A string did, from its double quotes to single ones: the kernel as it is was looked at as another setting."""
    source = load_spec("matmul").starters("triton")["triton_kernel"].read_text()
    knobs = read_knobs(source)
    assert any(isinstance(value, str) for value in knobs.current.values())
    assert with_setting(source, knobs.current) == source


def tune(score, steps: int = 100, incumbent: str = KNOBBED):
    """Run the tuner against a known answer: score(knobs) is the speed. Returns the trials."""
    trials, tuner = [PastExperiment(FIRST.row, incumbent, "")], Tuner()
    for _ in range(steps):
        proposal = tuner.propose(context(*trials, incumbent=incumbent))
        if proposal is None:
            break
        speedup = score(read_knobs(proposal.source).current) / score(read_knobs(incumbent).current)
        trials.append(trial(proposal.source, "kept" if speedup > 1 else "reset", speedup))
        incumbent = proposal.source if speedup > 1 else incumbent
    return trials


def plain(knobs: dict) -> float:
    return knobs.get("A", 1) * (3 if knobs.get("B") == 2 else 1)


def test_the_tuner_finds_the_best_setting_and_never_repeats_itself():
    trials = tune(plain)
    sources = [t.source for t in trials]
    assert len(set(sources)) == len(sources)
    best = [t for t in trials if t.row.status == "kept"][-1]
    assert read_knobs(best.source).current == {"A": 8, "B": 2}


def test_a_value_that_lost_clearly_is_not_tried_alone_again():
    lost, kept = set_knob(KNOBBED, "B", 2), set_knob(KNOBBED, "A", 4)
    trials = [PastExperiment(FIRST.row, KNOBBED, ""), trial(lost, speedup=0.7), trial(kept, "kept", 1.2)]
    assert Tuner().propose(context(*trials, incumbent=kept)).source == set_knob(kept, "A", 8)
    trials.append(trial(set_knob(kept, "A", 8)))
    assert not Tuner().propose(context(*trials, incumbent=kept)).hypothesis.startswith("B 1 -> 2: a setting")


def test_the_tuner_ends():
    assert len(tune(lambda knobs: 1.0, steps=100)) <= 1 + 8 + len(SPEC.starters("cpp"))


def recorded_bench(speedup):
    """A gate whose timings are known: a source takes 1 / speedup(its knobs) seconds. Notes what was looked at."""
    looks = []

    def autotune(sources, target, seconds):
        looks.extend(sources)
        looked = [Looked(source, 1 / speedup(read_knobs(source).current)) for source in sources]
        return sorted(looked, key=lambda one: one.seconds)

    return SimpleNamespace(examine=None, profile=None, autotune=autotune, looks=looks)


def test_the_search_looks_before_it_spends_and_ends_when_nothing_is_to_be_gained():
    """Knobs that act only together: no single step helps, some settings do. Many settings, few experiments."""
    knobbed = 'TUNABLES = {"A": [1, 2, 3, 4, 5, 6], "B": [1, 2, 3, 4, 5, 6]}\nA = 1\nB = 1\n'

    def score(knobs: dict) -> float:
        return 1 + 0.2 * min(knobs["A"], knobs["B"]) if "A" in knobs else 0.1  # a starter has other knobs, and loses

    bench, tuner, trials, incumbent = recorded_bench(score), Tuner(), [PastExperiment(FIRST.row, knobbed, "")], knobbed
    while proposal := tuner.propose(replace(context(*trials, incumbent=incumbent), bench=bench)):
        speedup = score(read_knobs(proposal.source).current) / score(read_knobs(incumbent).current)
        row = replace(ROW, status="kept" if speedup > 1 else "reset", speedup_vs_incumbent=speedup, speedup_high=speedup)
        trials.append(PastExperiment(replace(row, description=proposal.hypothesis), proposal.source, ""))
        incumbent = proposal.source if speedup > 1 else incumbent
        assert len(trials) < 20
    made = [t.row for t in trials[1:]]
    assert made and all(row.status == "kept" and " looked at, " in row.description for row in made)
    assert score(read_knobs(incumbent).current) >= 1.8
    assert 2 * len(made) < len(bench.looks)


def test_a_search_ends_with_the_time_of_the_run():
    """It has what is left, one that has begun some seconds at least; none is begun when no time is left."""
    given, knobbed = [], 'TUNABLES = {"A": [1, 2, 3, 4, 5, 6], "B": [1, 2, 3, 4, 5, 6]}\nA = 1\nB = 1\n'

    def autotune(sources, target, seconds):
        given.append(seconds)
        return [Looked(source, 1.0) for source in sources]

    bench = SimpleNamespace(examine=None, profile=None, autotune=autotune)
    known = replace(context(PastExperiment(FIRST.row, knobbed, ""), incumbent=knobbed), bench=bench)
    for left_s, seconds in ((-1, []), (1, [5.0, 5.0]), (9, [9.0, 9.0]), (900, [20.0, 20.0])):
        given.clear()
        assert Tuner().propose(replace(known, until_s=time.monotonic() + left_s)) is None
        assert given == pytest.approx(seconds, abs=1)


def test_a_setting_that_only_looks_fast_is_corrected_by_its_verdict():
    """What looked ten times as fast and was refused is no longer what the search builds on."""
    knobbed = 'TUNABLES = {"A": [1, 2, 3], "B": [1, 2, 3]}\nA = 1\nB = 1\n'
    bench, tuner, trials = (
        recorded_bench(lambda knobs: 10.0 if knobs.get("A") == 2 else 1.0),
        Tuner(),
        [PastExperiment(FIRST.row, knobbed, "")],
    )
    while proposal := tuner.propose(replace(context(*trials, incumbent=knobbed), bench=bench)):
        assert "A 1 -> 2" in proposal.hypothesis
        row = replace(ROW, status="failed", speedup_vs_incumbent=None, description=proposal.hypothesis)
        trials.append(PastExperiment(row, proposal.source, ""))
    assert 1 <= len(trials[1:]) <= 3
    assert all(tuner.searches[TARGET.name].scores[t.source] < 0 for t in trials[1:])


def test_a_search_whose_time_suffices_for_nothing_ends():
    """On a busy machine a round's time went by while its sources were compiled; the round after it raised ValueError."""
    bench = SimpleNamespace(examine=None, profile=None, autotune=lambda sources, target, seconds: [Looked(sources[0], 1.0)])
    given = replace(context(PastExperiment(FIRST.row, KNOBBED, ""), incumbent=KNOBBED), bench=bench)
    assert Tuner().propose(given) is None


def test_what_won_on_another_shape_is_tried_first():
    won = set_knob(KNOBBED, "A", 8)
    there = PastExperiment(replace(ROW, target="another_shape", agent="tuner", status="kept"), won, "")
    given = replace(context(PastExperiment(FIRST.row, KNOBBED, ""), incumbent=KNOBBED), elsewhere=(there,))
    proposal = Tuner().propose(given)
    assert proposal.source == won and proposal.hypothesis == "A 2 -> 8: won on another_shape"
    again = replace(given, trials=(*given.trials, trial(won)))
    assert Tuner().propose(again).source != won


def test_what_was_not_decided_says_nothing_of_a_setting():
    undecided = PastExperiment(replace(ROW, status="undecided", speedup_vs_incumbent=None), set_knob(KNOBBED, "A", 1), "")
    assert scored([PastExperiment(FIRST.row, KNOBBED, ""), undecided]) == scored([PastExperiment(FIRST.row, KNOBBED, "")])


def test_the_tuner_resumes_from_the_trials_alone():
    trials = tune(plain, steps=6)
    fresh = [Tuner().propose(context(*trials, incumbent=trials[-1].source)) for _ in range(2)]
    assert fresh[0] == fresh[1]
    assert fresh[0].source not in {t.source for t in trials}


@pytest.mark.slow
def test_the_tuner_states_a_hypothesis_and_tries_structures():
    tuner, target = Tuner(), default_target("softmax", "cpp", "cpu", torch.float32)
    spec = load_spec("softmax")
    starters = {stem: path.read_text() for stem, path in spec.starters("cpp").items()}
    trials, seen = [PastExperiment(FIRST.row, starters["cpp_kernel"], "")], []
    while proposal := tuner.propose(Context(target, spec, starters["cpp_kernel"], tuple(trials), None)):
        trials.append(trial(proposal.source))
        seen.append(proposal.hypothesis)
    assert all(hypothesis and "\n" not in hypothesis for hypothesis in seen)
    assert {t.source for t in trials} >= set(starters.values())
    assert len(starters) > 1 and any("structure cpp_" in hypothesis for hypothesis in seen)


@pytest.mark.skipif("cuda" not in backends("cuda"), reason="no nvcc")
def test_on_a_gpu_the_tuner_tries_the_starter_in_cuda_before_any_knob():
    spec = load_spec("softmax")
    triton, cuda = (spec.starters(backend)[f"{backend}_kernel"].read_text() for backend in ("triton", "cuda"))
    first = PastExperiment(FIRST.row, triton, "")
    given = Context(default_target("softmax", "triton", "cuda", torch.float16), spec, triton, (first,), None)
    proposal = Tuner().propose(given)
    assert proposal.source == cuda and proposal.hypothesis.startswith("structure cuda_kernel: ")
    kept = replace(given, incumbent=cuda, trials=(first, trial(cuda, "kept", 1.2)))
    assert set(read_knobs(Tuner().propose(kept).source).choices) == set(read_knobs(cuda).choices)


@pytest.fixture
def tree(clone):  # noqa: F811
    ledger = GitLedger(clone, "night", clone / "workspace/night")
    ledger.open()
    ledger.start_target("rmsnorm", STARTER_SOURCE, "put in its starter")
    ledger.reset()
    return ledger.tree


def ask(command: str, tree, **options):
    told = []
    agent = CommandAgent(command, told.append, **options)
    return agent.propose(context(FIRST, tree=tree)), told


def test_a_command_edits_kernel_py(tree):
    proposal, told = ask("grep -q CHUNK_ROWS - && echo '# faster' >> kernel.py; echo 'HYPOTHESIS: a comment helps'", tree)
    assert proposal.source == STARTER_SOURCE + "# faster\n"
    assert (proposal.hypothesis, proposal.agent, told) == ("a comment helps", "command:grep", [])


def test_a_command_that_changes_nothing_has_nothing_left(tree):
    proposal, told = ask("echo I give up; exit 3", tree)
    assert proposal is None
    assert "status 3" in told[0] and "I give up" in told[1]


def test_what_a_command_does_elsewhere_is_undone_and_reported(tree, clone):  # noqa: F811
    before, head = state(clone), sh("git", "rev-parse", "HEAD", cwd=tree)
    command = "echo x >> kernel.py; echo y >> other.py; echo z > new.py; git add -A; git -c user.name=a -c user.email=a@a"
    proposal, told = ask(f"{command} -c core.hooksPath=/dev/null commit -qm sneaky --no-gpg-sign; rm .gitignore", tree)
    assert proposal.source == STARTER_SOURCE + "x\n"
    assert sh("git", "rev-parse", "HEAD", "autokernel/night", cwd=tree).split() == [head, head]
    assert sh("git", "symbolic-ref", "HEAD", cwd=tree) == "refs/heads/autokernel/night"
    assert sh("git", "status", "--porcelain", cwd=tree) == ""
    assert not (tree / "new.py").exists() and (tree / "other.py").read_text() == "other\n"
    assert "moved back" in told[0] and all(name in told[1] for name in ("other.py", "new.py", ".gitignore"))
    assert state(clone) == before


def test_a_command_has_a_time_limit(tree):
    proposal, told = ask("echo x >> kernel.py; sleep 60 & sleep 60", tree, limit_s=0.5)
    assert proposal.source.endswith("x\n") and "ended after" in told[0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a child that its parent is gone")
def test_a_command_does_not_outlive_the_run(tmp_path):
    told = tmp_path / "pid"
    code = f"CommandAgent('echo $$ > {told}; exec sleep 600', print)._run(Path({str(tmp_path)!r}), Path('/dev/null'))"
    program = f"from pathlib import Path\nfrom autokernel.agents.command import CommandAgent\n{code}"
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as run:
        wait_until(lambda: told.exists() and told.read_text())
        command = Path("/proc", told.read_text().strip())
        assert command.exists()
        run.kill()
    wait_until(lambda: not command.exists())


def wait_until(holds, limit_s=30.0):
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def api():
    """A Messages API whose answers are those of `api.script`, one a request."""
    script = []
    with serving(lambda request: script.pop(0)) as server:
        server.script = script
        yield server


def claude(api, said_to_us=None, patience_s=20.0, spent_usd=0.0, **options) -> ModelAgent:
    timeout = anthropic.Timeout(1.5, connect=5)
    client = anthropic.Anthropic(api_key="test", base_url=api.url, max_retries=0, timeout=timeout)
    say = (said_to_us if said_to_us is not None else []).append
    return ModelAgent(say, Claude(client=client), AgentOptions(**options), spent_usd, patience_s, first_wait_s=0.01)


PROPOSED = Call("propose", {"source": "x = 1\n", "hypothesis": "smaller is\nfaster", "predicted_gain": 1.1})
GOOD = said(PROPOSED, thought_tokens=700)
EDITED = {"hypothesis": "more in flight", "predicted_gain": 1.05, "edits": [{"old": "UNROLL = 4 ", "new": "UNROLL = 8 "}]}


def priced(usages) -> float:
    """What the server's counts cost at Opus 5.5's public prices, USD."""
    rates = {"input_tokens": 4, "cache_creation_input_tokens": 5, "cache_read_input_tokens": 0.2, "output_tokens": 20}
    return sum(usage[name] * rate for usage in usages for name, rate in rates.items()) / 1e6


def test_claude_proposes_and_counts_what_it_costs(api):
    told = []
    api.script[:] = [GOOD, GOOD]
    agent = claude(api, told)
    proposal = agent.propose(context(FIRST, trial("a = 1", "failed", None)))
    assert (proposal.source, proposal.agent) == ("x = 1\n", "claude-opus-5-5")
    assert proposal.hypothesis == "smaller is faster (predicts 1.10x)"
    assert proposal.tokens == sum(api.usages[0].values()) and proposal.cost_usd == pytest.approx(priced(api.usages))
    assert "127.0.0.1" in told[0] and "$10.00" in told[0] and "kernel's source" in told[0]
    agent.propose(context(FIRST))
    assert len(told) == 1  # before the first call, and only then
    assert agent._purse.spent.usd == pytest.approx(priced(api.usages))
    request = api.requests[0]
    playbook, incumbent, history = (block["text"] for block in request["messages"][0]["content"])
    assert "## The rules" in request["system"][0]["text"] and "def rmsnorm(" in playbook
    assert "# Tier 1" in playbook and "# Tier 2" not in json.dumps(request["messages"])
    assert STARTER_SOURCE in incumbent and "failed" in history and STARTER_SOURCE not in history


def test_the_stable_prefix_is_read_from_the_cache(api):
    api.script[:] = [GOOD, GOOD, GOOD]
    agent = claude(api)
    agent.propose(context(FIRST))
    agent.propose(context(FIRST, trial("a = 1")))
    agent.propose(context(FIRST, trial("a = 1"), trial("b = 1", "kept", 1.1), incumbent="b = 1"))
    first, same, other = api.usages
    assert first["cache_read_input_tokens"] == 0
    assert same["cache_read_input_tokens"] > 0.8 * first["cache_creation_input_tokens"]  # all but the history
    assert same["cache_read_input_tokens"] > other["cache_read_input_tokens"] > 4000  # all but incumbent and history


READS = {
    "target": "512",
    "oracle": "def rmsnorm(",
    "spec": "near_zero",
    "incumbent": "CHUNK_ROWS",
    "history": "#1",
    "compiler": "error: expected",
    "starters": "cpp_rows",
    "headers": "autokernel.hpp",
    "playbook": "# Tier 1",
    "experiment": "error: expected",
}


def test_claude_reads_what_it_asks_for_and_edits_by_patch(api):
    failed = PastExperiment(replace(ROW, experiment=2, status="failed", correctness="FAIL"), "a = 1\n", "error: expected ;")
    questions = [
        said("Let me see.", *(Call("read", {"topic": topic, "name": "2"[: topic == "experiment"]}) for topic in READS))
    ]
    questions.append(said(Call("read", {"topic": "headers", "name": "panels.hpp"}), Call("read", {"topic": "weather"})))
    api.script[:] = [*questions, said(Call("propose", EDITED))]
    proposal = claude(api).propose(context(FIRST, failed))
    assert proposal.source == STARTER_SOURCE.replace("UNROLL = 4 ", "UNROLL = 8 ")
    answers = [block["content"] for block in api.requests[1]["messages"][2]["content"]]
    for topic, answer in zip(READS, answers, strict=True):
        assert READS[topic] in answer, topic
    header, weather = api.requests[2]["messages"][4]["content"]
    assert "struct Free" in header["content"] and weather["is_error"] and "playbook" in weather["content"]
    assert proposal.tokens == sum(sum(usage.values()) for usage in api.usages)
    assert api.usages[2]["cache_read_input_tokens"] > api.usages[1]["cache_creation_input_tokens"]  # the turn before


@pytest.mark.slow
def test_claude_has_an_edit_looked_at_before_an_experiment_is_spent(api, judge):
    wrong = STARTER_SOURCE.replace("return v * scale * w", "return v * scale")
    broken = STARTER_SOURCE.replace("splat(1 /", "splat(1 / unknown_name /")
    looks = [said(Call("look", {"source": source})) for source in (wrong, broken, broken, broken)]
    api.script[:] = [*looks, said(Call("read", {"topic": "profile"})), GOOD]
    proposal = claude(api).propose(replace(context(FIRST), bench=judge))
    results = [request["messages"][-1]["content"][0] for request in api.requests[1:]]
    words = [result["content"] for result in results]
    assert "FAIL" in words[0] and "unknown_name" in words[1]
    assert "used up" in words[3] and results[3]["is_error"]
    assert "CPU" in words[4] and proposal.source == "x = 1\n"


def test_a_look_at_a_correct_edit_says_how_fast_it_is():
    timing = CaseTiming("M=512,N=768 float32", 1, 73.8, 1, 1, speedup_vs_incumbent=Interval(1.01, 1.08, 1.15))
    verdict = Verdict("rmsnorm", "cpp", "cpu", Correctness.PASS, False, "faster", 1, cases=(timing,))
    assert look_text(verdict) == (
        "correct as far as looked at; roughly: faster\n"
        "M=512,N=768 float32: 73.8 us, 1.080x [1.010, 1.150] the kernel to beat's speed"
    )


BAD_ANSWERS = {
    "only words": said("I would rather talk."),
    "no source": said(Call("propose", {"hypothesis": "no source", "predicted_gain": 2})),
    "empty source": said(Call("propose", {"source": "  ", "hypothesis": "x", "predicted_gain": 2})),
    "an edit that fits nowhere": said(Call("propose", EDITED | {"edits": [{"old": "no such line", "new": "x"}]})),
    "an edit that fits twice": said(Call("propose", EDITED | {"edits": [{"old": "UNROLL", "new": "x"}]})),
    "edits that are no list": said(Call("propose", EDITED | {"edits": "UNROLL"})),
    "no object": said(Call("propose", '["source"]')),
    "no JSON": said(Call("propose", '{"source": x')),
    "cut off": said(Call("propose", '{"hypothesis": "long", "source": "x = 1'), stop_reason="max_tokens"),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("bad", BAD_ANSWERS.values(), ids=BAD_ANSWERS.keys())
def test_a_malformed_answer_is_repaired_once_and_then_logged_as_failed(api, judge, bad):
    api.script[:] = [bad, GOOD]
    assert claude(api).propose(context(FIRST)).source == "x = 1\n"
    api.script[:] = [bad, bad, GOOD]
    api.usages.clear()
    proposal = claude(api).propose(context(FIRST))
    assert len(api.script) == 1 and "no usable answer" in proposal.hypothesis
    assert proposal.cost_usd > 0.999 * priced(api.usages) > 0
    assert judge.examine(proposal.source, TARGET).correctness == "FAIL"


def test_claude_is_told_when_to_propose(api):
    api.script[:] = [said(Call("read", {"topic": "history"}))] * 7 + [GOOD]
    assert claude(api).propose(context(FIRST)).source == "x = 1\n"
    assert "last turn" in api.requests[-1]["messages"][-1]["content"][-1]["text"]


PASSING = {
    "429": Refusal(429, "rate_limit_error", {"retry-after": "0.02"}),
    "500": Refusal(500, "api_error"),
    "503": Refusal(503, "api_error"),
    "529": Refusal(529),
    "408": Refusal(408, "timeout_error"),
    "cut before it began": Broken("cut", 0),
    "cut": Broken("cut", 4),
    "ended": Broken("ended", 4),
    "ended before it began": Broken("ended", 0),
    "stalled": Broken("stalled"),
    "overloaded meanwhile": Broken("overloaded"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
@pytest.mark.slow_after(4)
def test_what_passes_is_waited_out(api, fault):
    told = []
    api.script[:] = [fault, fault, GOOD]
    agent = claude(api, told)
    assert agent.propose(context(FIRST)).source == "x = 1\n"
    assert sum("asking again" in line for line in told) == 2
    costs_at_least = priced(api.usages[-1:])
    charged = agent._purse.spent.usd
    assert charged == pytest.approx(costs_at_least) if isinstance(fault, Refusal) else charged > costs_at_least + 1


def test_what_does_not_pass_ends_the_run_in_words(api):
    api.script[:] = [Refusal(401, "authentication_error")]
    with pytest.raises(AgentStopped, match=r"not available.*AuthenticationError"):
        claude(api).propose(context(FIRST))
    api.script[:] = [Refusal(529)] * 100
    with pytest.raises(AgentStopped, match=r"not available.*OverloadedError"):
        claude(api, patience_s=0.2).propose(context(FIRST))
    assert 2 < len(api.requests) < 12  # they are further and further apart
    with pytest.raises(AgentStopped, match="not available"):
        client = anthropic.Anthropic(api_key="test", base_url="http://127.0.0.1:9", max_retries=0)
        ModelAgent([].append, Claude(client=client), patience_s=0.1, first_wait_s=0.01).propose(context(FIRST))


def test_without_a_key_claude_says_so(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("ANTHROPIC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(AgentStopped, match="ANTHROPIC_API_KEY"):
        ModelAgent(print, Claude()).propose(context(FIRST))


@pytest.mark.parametrize("cap", [{"budget_usd": 0.1}, {"spent_usd": 9.95}, {"budget_tokens": 10_000}])
def test_claude_stops_before_the_cap(api, cap):
    with pytest.raises(OutOfBudget, match="cap"):
        claude(api, **cap).propose(context(FIRST))
    assert api.requests == []


def test_no_cap_is_ever_passed(api):
    """The server answers at the full length that it was allowed, again and again."""
    api.answer = lambda request: said(PROPOSED, thought_tokens=request["max_tokens"] - 200)
    agent = claude(api, budget_usd=1.5)
    with pytest.raises(OutOfBudget):
        while True:
            agent.propose(context(FIRST))
    assert 1.2 < priced(api.usages) <= 1.5 and agent._purse.spent.usd == pytest.approx(priced(api.usages))
    longest = [request["max_tokens"] for request in api.requests]
    assert longest[0] == 32_000 > longest[-1] >= 4_000


def test_what_a_killed_call_may_have_cost_is_remembered(tmp_path):
    purse = Purse(tmp_path / "spent.jsonl", 10, None)
    purse.settle(purse.reserve(Spent(0.7, 30_000)), Spent(0.1, 2_000))
    purse.reserve(Spent(0.5, 20_000))
    with open(tmp_path / "spent.jsonl", "a") as file:
        file.write('{"call": 3, "us')  # torn: that call was not made
    again = Purse(tmp_path / "spent.jsonl", 10, 30_000, known=Spent(0.4))
    assert again.spent == Spent(pytest.approx(0.6), 22_000)
    again.settle(again.reserve(Spent(1, 5)), Spent(0.2, 5))
    assert Purse(tmp_path / "spent.jsonl", 10, None).spent == Spent(pytest.approx(0.8), 22_005)
    assert Purse(tmp_path / "spent.jsonl", 10, None, known=Spent(2.0)).spent.usd == pytest.approx(2.0)
    assert again.affordable(PRICES["claude-opus-5-5"], 1_000) == 30_000 - 22_005 - 1_000


def test_history_is_summarised_and_the_incumbent_is_never_dropped():
    def made(n: int) -> PastExperiment:
        status = "kept" if n % 50 == 7 else "reset"
        return PastExperiment(
            replace(ROW, experiment=n, status=status, description=f"idea {n} " + "long " * 100), f"a = {n}", "why"
        )

    trials = [FIRST, *(made(n) for n in range(2, 500))]
    assert len(history_text(trials)) < len(history_text(trials[:60])) + 4_000
    long = task_text(context(*trials, incumbent="the kernel to beat's own text"))
    assert "the kernel to beat's own text" in long and "idea 499" in long and "idea 7 " in long and "idea 250" not in long
    assert "429 reset" in long


def test_the_default_model_is_the_newest_opus():
    assert newest_opus().startswith("claude-opus-")


def test_agents_are_named_and_mixed():
    assert agent_names("tuner,claude") == ["tuner", "claude"]
    assert agent_names("tuner, command: sh -c 'a,b'") == ["tuner", "command: sh -c 'a,b'"]
    for wrong in ("", "gpt", "tuner,gpt", "command: "):
        with pytest.raises(ValueError, match="there are"):
            agent_names(wrong)


def test_an_agent_whose_file_was_added_is_in_the_help(tmp_path, monkeypatch) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "doubler.py").write_text("\ndef make(say, options, spent_usd, argument): ...\n")
    monkeypatch.setattr(preflight, "PACKAGE", tmp_path)
    assert "doubler, 'command: …'" in make_parser().format_help()


def test_the_tuner_cleans_up_after_each_change_of_structure(tree):
    """One knob, then a new structure from the command, then its knobs, as `--agent tuner,command: …` has it."""
    command = "command: grep -q NEW kernel.py || sed -i s/^A/NEW/ kernel.py; echo HYPOTHESIS: another structure"
    agent = make_agent(f"tuner,{command}", print)
    knobbed = 'TUNABLES = {"B": [1, 2]}\nA = 1\nB = 1\n'
    trials, incumbent, said_by = [PastExperiment(FIRST.row, knobbed, "")], knobbed, []
    while len(said_by) < 30:
        (tree / "kernel.py").write_text(incumbent)
        proposal = agent.propose(context(*trials, incumbent=incumbent, tree=tree))
        if proposal is None:
            break
        kept = proposal.agent.startswith("command")
        said_by.append(proposal.agent)
        trials.append(trial(proposal.source, "kept" if kept else "reset", 1.2 if kept else 0.9))
        incumbent = proposal.source if kept else incumbent
    structures = len(SPEC.starters("cpp"))
    assert said_by == ["tuner"] * (1 + structures) + ["command:grep", "tuner"]


def test_an_agent_that_must_stop_leaves_the_run_to_the_others(api):
    told = []
    mixed = FirstOf([claude(api, budget_usd=0.01), Tuner()], told.append)
    assert [mixed.propose(context(FIRST)).agent for _ in range(2)] == ["tuner", "tuner"]
    assert len(told) == 1 and "cap" in told[0] and "goes on without it" in told[0]
    alone = FirstOf([claude(api, budget_usd=0.01)], told.append)
    with pytest.raises(OutOfBudget):
        alone.propose(context(FIRST))


OWN_MISTAKES = {
    "raises": lambda context: 1 / 0,
    "is no Proposal": lambda context: "a = 1",
    "no source": lambda context: Proposal(None, "an edit", "mine"),
    "no text": lambda context: Proposal("a = '\ud800'", "an edit", "mine"),
    "no hypothesis": lambda context: Proposal("a = 1", None, "mine"),
    "no price": lambda context: Proposal("a = 1", "an edit", "mine", cost_usd=None),
}


@pytest.mark.parametrize("answer", OWN_MISTAKES.values(), ids=OWN_MISTAKES)
def test_an_agent_of_ones_own_that_fails_ends_no_run(monkeypatch, answer):
    """What was judged is still proven and verified, and the other agents go on."""
    monkeypatch.setattr("autokernel.agents.starters.make", lambda *given: SimpleNamespace(propose=answer))
    told = []
    assert make_agent("starters,tuner", told.append).propose(context(FIRST)).agent == "tuner"
    assert len(told) == 1 and told[0].startswith("agent starters ") and "goes on without it" in told[0]


@pytest.mark.parametrize("make", [lambda say, options: None, lambda *given: None], ids=["two parameters", "gives nothing"])
def test_an_agent_that_cannot_be_made_is_named(monkeypatch, make):
    monkeypatch.setattr("autokernel.agents.starters.make", make)
    with pytest.raises(Refused, match="^agent starters.*(takes 2 positional|no propose)"):
        make_agent("starters", print)

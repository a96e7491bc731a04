"""The agents: the tuner's edits and memory, a command in a real working tree, Claude over HTTP on loopback."""

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic
import pytest
import torch

from autokernel.agents import AgentStopped, Context, OutOfBudget, Trial
from autokernel.agents.anthropic_api import ClaudeAgent, newest_opus
from autokernel.agents.command import CommandAgent
from autokernel.agents.tuner import Tuner, read_knobs, set_knob, structure
from autokernel.experiments import STARTER
from autokernel.ledger import GitLedger
from autokernel.spec import ROOT, load_spec
from autokernel.target import default_target
from tests.test_experiments import ROW
from tests.test_ledger import clone, sh, state  # noqa: F401  `clone` is a fixture

TARGET = default_target("rmsnorm", "cpp", "cpu", torch.float32)
SPEC = load_spec("rmsnorm")
STARTER_SOURCE = SPEC.starters("cpp")["cpp_kernel"].read_text()
FIRST = Trial(replace(ROW, agent=STARTER, status="kept", speedup_vs_incumbent=None), STARTER_SOURCE, "correct")
KNOBBED = 'import os\nTUNABLES = {"A": [1, 2, 4, 8], "B": [1, 2]}\nA = 2  # why\nB = 1\nSOURCE = """\nA = 7\n"""\n'


def context(*trials: Trial, incumbent: str = STARTER_SOURCE, tree=None) -> Context:
    return Context(TARGET, SPEC, incumbent, trials, tree)


def trial(source: str, status: str = "reset", speedup: float | None = 0.9) -> Trial:
    return Trial(replace(ROW, status=status, speedup_vs_incumbent=speedup, speedup_high=speedup), source, "why")


def test_a_knob_is_rewritten_in_its_line_alone():
    edited = set_knob(KNOBBED, "A", 8)
    assert edited == KNOBBED.replace("A = 2  # why", "A = 8  # why")
    assert read_knobs(edited).current == {"A": 8, "B": 1}
    assert structure(edited) == structure(KNOBBED) != KNOBBED


def tune(score, steps: int = 100, incumbent: str = KNOBBED):
    """Run the tuner against a known answer: score(knobs) is the speed. Returns the trials."""
    trials, tuner = [Trial(FIRST.row, incumbent, "")], Tuner()
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
    trials = [Trial(FIRST.row, KNOBBED, ""), trial(lost, speedup=0.7), trial(kept, "kept", 1.2)]
    assert Tuner().propose(context(*trials, incumbent=kept)).source == set_knob(kept, "A", 8)
    trials.append(trial(set_knob(kept, "A", 8)))
    assert not Tuner().propose(context(*trials, incumbent=kept)).hypothesis.startswith("B 1 -> 2: a setting")


def test_the_tuner_ends():
    assert len(tune(lambda knobs: 1.0, steps=100)) <= 1 + 8 + len(SPEC.starters("cpp"))


def test_the_tuner_resumes_from_the_trials_alone():
    trials = tune(plain, steps=6)
    fresh = [Tuner().propose(context(*trials, incumbent=trials[-1].source)) for _ in range(2)]
    assert fresh[0] == fresh[1]
    assert fresh[0].source not in {t.source for t in trials}


def test_the_tuner_states_a_hypothesis_and_tries_structures():
    tuner, target = Tuner(), default_target("softmax", "cpp", "cpu", torch.float32)
    spec = load_spec("softmax")
    starters = {stem: path.read_text() for stem, path in spec.starters("cpp").items()}
    trials, seen = [Trial(FIRST.row, starters["cpp_kernel"], "")], []
    while proposal := tuner.propose(Context(target, spec, starters["cpp_kernel"], tuple(trials), None)):
        trials.append(trial(proposal.source))
        seen.append(proposal.hypothesis)
    assert all(hypothesis and "\n" not in hypothesis for hypothesis in seen)
    assert {t.source for t in trials} >= set(starters.values())
    assert len(starters) > 1 and any("structure cpp_" in hypothesis for hypothesis in seen)


@pytest.fixture
def tree(clone):  # noqa: F811
    ledger = GitLedger(clone, "night", clone / "workspace/night")
    ledger.open()
    ledger.start_target("rmsnorm", STARTER_SOURCE, "put in its starter")
    ledger.reset()
    return ledger.tree


def ask(command: str, tree, **options):
    said = []
    agent = CommandAgent(command, said.append, **options)
    return agent.propose(context(FIRST, tree=tree)), said


def test_a_command_edits_kernel_py(tree):
    proposal, said = ask("grep -q CHUNK_ROWS - && echo '# faster' >> kernel.py; echo 'HYPOTHESIS: a comment helps'", tree)
    assert proposal.source == STARTER_SOURCE + "# faster\n"
    assert (proposal.hypothesis, proposal.agent, said) == ("a comment helps", "command:grep", [])


def test_a_command_that_changes_nothing_has_nothing_left(tree):
    proposal, said = ask("echo I give up; exit 3", tree)
    assert proposal is None
    assert "status 3" in said[0] and "I give up" in said[1]


def test_what_a_command_does_elsewhere_is_undone_and_reported(tree, clone):  # noqa: F811
    before, head = state(clone), sh("git", "rev-parse", "HEAD", cwd=tree)
    command = "echo x >> kernel.py; echo y >> other.py; echo z > new.py; git add -A; git -c user.name=a -c user.email=a@a"
    proposal, said = ask(f"{command} -c core.hooksPath=/dev/null commit -qm sneaky --no-gpg-sign; rm .gitignore", tree)
    assert proposal.source == STARTER_SOURCE + "x\n"
    assert sh("git", "rev-parse", "HEAD", "autokernel/night", cwd=tree).split() == [head, head]
    assert sh("git", "symbolic-ref", "HEAD", cwd=tree) == "refs/heads/autokernel/night"
    assert sh("git", "status", "--porcelain", cwd=tree) == ""
    assert not (tree / "new.py").exists() and (tree / "other.py").read_text() == "other\n"
    assert "moved back" in said[0] and all(name in said[1] for name in ("other.py", "new.py", ".gitignore"))
    assert state(clone) == before


def test_a_command_has_a_time_limit(tree):
    proposal, said = ask("echo x >> kernel.py; sleep 60 & sleep 60", tree, limit_s=0.5)
    assert proposal.source.endswith("x\n") and "ended after" in said[0]


class Api(BaseHTTPRequestHandler):
    """Speaks enough of the Messages API: streams the answers of `server.script`, one a request."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = self.server.script.pop(0)
        if isinstance(answer, int):
            body = json.dumps({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}).encode()
            self._head(answer, "application/json", len(body), {"retry-after-ms": "1"})
            self.wfile.write(body)
            return
        body = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in self._events(answer)).encode()
        self._head(200, "text/event-stream", len(body), {})
        self.wfile.write(body)

    def _head(self, status, kind, length, extra):
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(length), **extra}.items():
            self.send_header(name, value)
        self.end_headers()

    def _events(self, answer):
        usage = {
            "input_tokens": 1000,
            "cache_creation_input_tokens": 2000,
            "cache_read_input_tokens": 4000,
            "output_tokens": 1,
        }
        head = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "stop_reason": None,
            "stop_sequence": None,
        }
        yield {"type": "message_start", "message": {**head, "content": [], "usage": usage}}
        if isinstance(answer, str):
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": answer}}
        else:
            block = {"type": "tool_use", "id": "toolu_1", "name": "propose_kernel", "input": {}}
            yield {"type": "content_block_start", "index": 0, "content_block": block}
            text = json.dumps(answer)
            for part in (text[:10], text[10:]):
                delta = {"type": "input_json_delta", "partial_json": part}
                yield {"type": "content_block_delta", "index": 0, "delta": delta}
        yield {"type": "content_block_stop", "index": 0}
        stop = {"stop_reason": "end_turn" if isinstance(answer, str) else "tool_use", "stop_sequence": None}
        yield {"type": "message_delta", "delta": stop, "usage": {"output_tokens": 500}}
        yield {"type": "message_stop"}


@pytest.fixture
def api():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    server.requests, server.script = [], []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def claude(api, said=None, **options) -> ClaudeAgent:
    client = anthropic.Anthropic(api_key="test", base_url=f"http://127.0.0.1:{api.server_port}", max_retries=2)
    return ClaudeAgent((said if said is not None else []).append, client=client, **options)


GOOD = {"source": "x = 1\n", "hypothesis": "smaller is faster"}
ONE_CALL_USD = (1000 + 2000 * 1.25 + 4000 * 0.1) * 4e-6 + 500 * 20e-6  # as Api._events reports it, at Opus 5.5's prices


def test_claude_proposes_and_counts_what_it_costs(api):
    said = []
    api.script = [GOOD, GOOD]
    agent = claude(api, said)
    proposal = agent.propose(context(FIRST, trial("a = 1", "failed", None)))
    assert (proposal.source, proposal.hypothesis, proposal.agent) == ("x = 1\n", "smaller is faster", "claude-opus-5-5")
    assert proposal.tokens == 7500 and proposal.cost_usd == pytest.approx(ONE_CALL_USD)
    assert "127.0.0.1" in said[0] and "$10.00" in said[0]  # before the first call, and only then
    agent.propose(context(FIRST))
    assert len(said) == 1 and agent.spent_usd == pytest.approx(2 * ONE_CALL_USD)
    request = api.requests[0]
    assert request["system"][0]["text"] == (ROOT / "program.md").read_text()
    cached, fresh = request["messages"][0]["content"]
    assert "cache_control" in request["system"][0] and "cache_control" in cached and "cache_control" not in fresh
    assert "def rmsnorm(" in cached["text"] and STARTER_SOURCE in fresh["text"] and "failed" in fresh["text"]


@pytest.mark.parametrize("bad", ["I would rather talk.", {"hypothesis": "no source"}, {"source": "  ", "hypothesis": "x"}])
def test_claude_is_asked_once_more_after_a_useless_answer(api, bad):
    api.script = [bad, GOOD]
    assert claude(api).propose(context(FIRST)).source == "x = 1\n"
    api.script = [bad, bad, GOOD]
    assert claude(api).propose(context(FIRST)) is None
    assert len(api.script) == 1


def test_claude_retries_an_overloaded_server(api):
    api.script = [529, 500, GOOD]
    assert claude(api).propose(context(FIRST)).source == "x = 1\n"
    assert len(api.requests) == 3


@pytest.mark.parametrize(("status", "requests"), [(401, 1), (529, 3)])
def test_claude_not_being_available_ends_the_run_in_words(api, status, requests):
    api.script = [status] * 3
    with pytest.raises(AgentStopped, match="not available"):
        claude(api).propose(context(FIRST))
    assert len(api.requests) == requests


def test_claude_stops_before_the_cap(api):
    with pytest.raises(OutOfBudget, match=r"\$0\.50"):
        claude(api, budget_usd=0.5).propose(context(FIRST))
    with pytest.raises(OutOfBudget):
        claude(api, spent_usd=9.9).propose(context(FIRST))
    assert api.requests == []


def test_the_default_model_is_the_newest_opus():
    assert newest_opus().startswith("claude-opus-")

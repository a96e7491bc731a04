"""The scheduler's decisions, from rows alone: Amdahl's order, the four rules, patience, and inertia."""

from dataclasses import replace

import pytest
import torch

from autokernel.history.experiments import STARTER
from autokernel.history.progress import Rules, amdahl, loop_gain, move_on, reverts
from autokernel.run.scheduler import Weights, expected_gain, next_target, success_rate
from autokernel.target import Plan, Target, default_target
from benchmarks.scheduler import Record, compare, ours, replay, static_order
from tests.test_experiments import ROW


def target(name: str, share: float) -> Target:
    return replace(default_target("rmsnorm", "cpp", "cpu", torch.float32), name=name, share=share)


PLAN = Plan("model", {}, "cpu", 1000.0, (target("big", 0.6), target("middle", 0.3), target("small", 0.1)))
START = replace(
    ROW, target="big", agent=STARTER, status="kept", speedup_vs_incumbent=None, speedup_vs_pytorch=1.0, pct_peak=40.0
)


def rows(*steps: str | float, name: str = "big", start=START):
    """The rows of a target: its starter, then a kept row for each speedup and one not kept for each status."""
    made = [replace(start, target=name)]
    for step in steps:
        kept = isinstance(step, float)
        made.append(replace(ROW, target=name, status="kept" if kept else step, pct_peak=40.0, speedup_vs_pytorch=1.0,
                            speedup_vs_incumbent=step if kept else 0.9))  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("history", "reason"),
    [
        (rows("reset", "failed", "crash", "timeout"), None),
        (rows("reset", "failed", "crash", "timeout", "reset"), "5 experiments in a row"),
        (rows("reset", "reset", "reset", 1.1, "reset", "reset"), None),
        (rows(1.1, start=replace(START, pct_peak=95.0)), None),  # the incumbent's peak counts, not its predecessor's
        (rows("reset", start=replace(START, pct_peak=95.0)), "95 % of the peak"),
        (rows(1.5, "reset", 1.4), "2.10x over its starter"),
        (rows(1.5, "reset", 1.3), None),
        (rows("reset", start=replace(START, seconds=7200.0)), "2.0 hours"),
        ([replace(START, status="failed")], "did not pass"),
        ([], None),
    ],
)
def test_rules(history, reason):
    told = move_on(history, Rules())
    assert (told is None) if reason is None else (reason in told)


@pytest.mark.parametrize("rule", ["reverts", "pct_peak", "hours", "speedup"])
def test_each_rule_can_be_switched_off(rule):
    history = rows(3.0, *["reset"] * 9, start=replace(START, seconds=9e4))
    history[1] = replace(history[1], pct_peak=99.0)
    only = Rules(**dict.fromkeys(("reverts", "pct_peak", "hours", "speedup")) | {rule: getattr(Rules(), rule)})
    assert move_on(history, only)
    assert not move_on(history, replace(only, **{rule: None}))


def test_a_starter_is_no_revert():
    assert reverts(rows()) == 0
    assert reverts(rows(1.1, "reset")) == 1
    assert loop_gain(rows(1.5, "reset", 1.2)) == pytest.approx(1.8)


def others(*names: str) -> list:
    return [row for name in names for row in rows(name=name)]


def test_starters_first_by_share():
    assert next_target(PLAN, [], Rules()).target.name == "big"
    choice = next_target(PLAN, rows("reset"), Rules(), {"big", "small"})
    assert choice.target.name == "middle" and "starter" in choice.reason
    assert next_target(PLAN, rows() + others("middle"), Rules()).target.name == "small"


def test_a_starter_that_can_save_little_waits_until_experiments_are_expected_to_save_less():
    plan = replace(PLAN, targets=(target("big", 0.6), target("tiny", 0.008)))
    assert next_target(plan, [], Rules()).target.name == "big"
    assert next_target(plan, rows("reset", "reset"), Rules()).target.name == "big"
    at_limit = rows("reset", start=replace(START, pct_peak=99.5))
    for history, exhausted in ((rows(), {"big"}), (at_limit, ())):
        choice = next_target(plan, history, Rules(), exhausted)
        assert choice.target.name == "tiny" and "starter" in choice.reason
    assert next_target(plan, rows() + others("tiny"), Rules(), {"big", "tiny"}) is None


def test_the_largest_share_then_the_next():
    assert next_target(PLAN, others("middle", "small", "big"), Rules()).target.name == "big"
    assert next_target(PLAN, others("middle", "small") + rows(*["reset"] * 5), Rules()).target.name == "middle"


def test_headroom_outweighs_share():
    """0.6 of the time at 89 % of the limit has less to give than 0.3 at 40 %."""
    history = others("middle", "small") + rows("reset", start=replace(START, pct_peak=89.0))
    assert next_target(PLAN, history, Rules()).target.name == "middle"


def test_what_is_faster_already_has_less_left():
    history = others("small", "middle") + rows(start=replace(START, speedup_vs_pytorch=5.0))
    assert next_target(PLAN, history, Rules()).target.name == "middle"


def test_a_gain_that_rounds_to_nothing_is_said_to_be_small():
    shares = [replace(t, share=t.share * 1e-6) for t in PLAN.targets]
    choice = next_target(replace(PLAN, targets=tuple(shares)), others("big", "middle", "small"), Rules())
    assert "expected gain less than 0.01% of it" in choice.reason and "0.00%" not in choice.reason


@pytest.mark.parametrize(
    ("steps", "name"),
    [(["reset"], "middle"), (["reset"] * 3, "big"), (["reset", 1.1, 1.1], "middle")],
)
def test_it_stays_until_another_target_promises_much_more(steps, name):
    """Expected gains: big 0.35 × 1/2, middle 0.3 × 2 (in hand) × its success rate; headroom is equal."""
    shares = [replace(t, share=0.35) if t.name == "big" else t for t in PLAN.targets]
    history = others("big", "small") + rows(*steps, name="middle")
    assert next_target(replace(PLAN, targets=tuple(shares)), history, Rules()).target.name == name


def test_exhausted_targets_are_left_and_the_run_ends():
    history = others("big", "middle", "small")
    assert next_target(PLAN, history, Rules(), {"big"}).target.name == "middle"
    assert next_target(PLAN, history, Rules(), {"big", "middle", "small"}) is None


def test_it_returns_with_more_patience_but_not_to_a_kernel_at_its_limit():
    history = rows(*["reset"] * 5, start=replace(START, pct_peak=93.0))
    history += rows(*["reset"] * 5, name="middle") + rows(*["reset"] * 5, name="small")
    choice = next_target(PLAN, history, Rules())
    assert choice.target.name != "big" and "round 2" in choice.reason
    everything = [replace(row, pct_peak=93.0) for row in history]
    assert next_target(PLAN, everything, Rules()) is None


def test_what_the_machine_disturbed_says_nothing():
    assert reverts(rows("reset", "undecided", "reset")) == 2
    history = rows("undecided", "undecided", name="middle")
    assert expected_gain(PLAN.targets[1], history) == expected_gain(PLAN.targets[1], rows(name="middle"))
    assert next_target(PLAN, [replace(START, status="undecided")], Rules()).target.name == "big"  # judged once more
    twice = [replace(START, status="undecided")] * 2
    assert next_target(PLAN, twice + others("middle", "small"), Rules()).target.name == "middle"


def test_recent_success_counts_more():
    early, late = rows(1.1, 1.1, "reset", "reset"), rows("reset", "reset", 1.1, 1.1)
    assert success_rate(late, Weights(memory=0.8)) > 0.5 > success_rate(early, Weights(memory=0.8))
    assert success_rate(late, Weights(memory=1.0)) == success_rate(early, Weights(memory=1.0)) == 0.5


def test_a_kernel_slower_than_torch_compile_gains_nothing_before_it_is_faster():
    """At 5x eager mode, where torch.compile is at 7x; and at 0.8x of what both take."""
    target = replace(PLAN.targets[0], model_time_us=700.0, baseline_us=700.0)
    compiled = replace(target, baseline_us=100.0)
    five = rows(start=replace(START, speedup_vs_pytorch=5.0, pct_peak=40.0))
    ten = rows(start=replace(START, speedup_vs_pytorch=10.0, pct_peak=40.0))
    assert expected_gain(compiled, five) < 0.7 * expected_gain(target, five)
    assert expected_gain(compiled, ten) == pytest.approx(expected_gain(target, ten))
    slower, par = (rows(start=replace(START, speedup_vs_pytorch=s, pct_peak=40 * s)) for s in (0.8, 1.0))
    assert expected_gain(target, slower) < expected_gain(target, par)


def test_the_seldom_tried_have_a_bonus_that_grows():
    target, history = PLAN.targets[0], rows("reset")
    gains = [expected_gain(target, history, made, Weights(bonus=0.3)) for made in (1, 10, 100)]
    assert gains == sorted(gains) and gains[0] < gains[2]
    assert expected_gain(target, history, 100, Weights(bonus=0)) == expected_gain(target, history, 1, Weights(bonus=0))


def test_the_quicker_target_first_where_the_hope_is_equal():
    """middle promises half of what big does, and takes a fifth of the time."""
    slow = replace(START, seconds=100.0)
    history = rows(name="small", start=slow) + rows(start=slow) + rows(name="middle", start=replace(slow, seconds=20.0))
    assert next_target(PLAN, history, Rules(), weights=Weights(pull=1)).target.name == "middle"


def test_every_reason_to_leave_is_told():
    history = rows(*["reset"] * 5, start=replace(START, pct_peak=95.0, seconds=7200.0))
    told = move_on(history, Rules())
    assert all(words in told for words in ("95 % of the peak", "5 experiments in a row", "2.0 hours"))


def test_replay_of_recorded_runs():
    """The static order stays with the largest target until a rule; ours has judged every starter by then."""
    record = Record.read("cpu-compact-llama-fp32")
    static, own = replay(record, static_order, False), replay(record, ours(Weights()), False)
    assert len(own.gains) == record.length and own.gains[4] > static.gains[4]
    assert compare(record, Weights(), False)["area ratio"] > 1
    assert own.area(2) == pytest.approx(sum(own.gains[:2]) / 2 - 1)


def test_amdahl():
    assert amdahl(0.5, 2.0) == pytest.approx(1 / 0.75)
    assert amdahl(0.2, float("inf")) == pytest.approx(1.25)

"""The guard's rules: conditions, timing, actions, rollbacks, state."""

import json
import math

import pytest
from guard_case import HEALTHY, TOTAL, make_config, make_guard, rule, run

from megappo.trainer.effective import effective_config
from megappo.trainer.guard import Event, Guard, Verdict, fitted_change, replay

NAN, INF = math.nan, math.inf


# --- conditions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "fires", "silent"),
    [
        ({"above": 0.03}, [0.0301, INF], [0.03, 0.0, NAN, -INF]),
        ({"below": 0.5}, [0.499, -INF], [0.5, 1.0, NAN, INF]),
        ({"non_finite": True}, [NAN, INF, -INF], [0.0, 1e308]),
    ],
)
def test_thresholds(condition, fires, silent):
    for value in fires:
        assert run(make_guard([rule(**condition)]), [value]) == [1], value
    for value in silent:
        assert run(make_guard([rule(**condition)]), [value]) == [], value


def test_trends_need_a_full_window():
    up, flat, down = [0.1 * i for i in range(8)], [1.0] * 8, [-0.1 * i for i in range(8)]
    for condition, fires, silent in (
        ({"rising": 0.0}, [up], [flat, down]),
        ({"falling": 0.0}, [down], [flat, up]),
        ({"not_rising": 0.0}, [flat, down], [up]),
        ({"rising": 0.6}, [[0.2 * i for i in range(8)]], [up]),
        ({"not_rising": 0.31}, [up[:4]], []),
    ):
        for values in fires:
            first = run(make_guard([rule(window=4, cooldown=99, **condition)]), values)
            assert first == [4], (condition, values)
        for values in silent:
            assert run(make_guard([rule(window=4, **condition)]), values) == [], (condition, values)


def test_a_trend_is_the_fitted_change_over_the_window():
    assert fitted_change([3.0, 5.0]) == pytest.approx(2.0)
    assert fitted_change([0.0, 1.0, 2.0, 3.0]) == pytest.approx(3.0)
    assert fitted_change([1.0, -1.0, -1.0, 1.0]) == pytest.approx(0.0)
    assert fitted_change([0.0, 0.0, 0.0, 1.0]) == pytest.approx(0.9)


def test_trends_pass_over_values_that_are_missing_or_not_finite():
    values = [0.0, NAN, 0.1, None, 0.2, INF, 0.3]
    assert run(make_guard([rule(window=4, rising=0.0)]), values) == [7]


def test_patterns_match_any_metric_but_the_guards_own():
    guard = make_guard([rule("*/grad_norm", above=5.0)])
    (event,) = guard.check({"actor/grad_norm": 6.0, "critic/grad_norm": 7.0, "x": 9.0}, 1, TOTAL)
    assert event.metric == "actor/grad_norm (and 1 more)" and event.value == 6.0
    assert make_guard([rule("*", above=0.5)]).check({"guard/healthy": 1.0}, 1, TOTAL) == []


# --- timing ----------------------------------------------------------------------------------------------


def test_patience_counts_consecutive_iterations():
    guard = make_guard([rule(above=1.0, patience=3)])
    assert run(guard, [2, 2, 0, 2, 2, 2, 2, 2, 2, 0]) == [6, 9]


def test_missing_and_nan_values_neither_continue_nor_end_a_streak():
    guard = make_guard([rule(above=1.0, patience=3)])
    assert run(guard, [2, None, 2, NAN, 2]) == [5]


def test_patience_as_a_share_of_the_run():
    assert run(make_guard([rule(above=1.0, patience=0.1)]), [2] * 9, total=50) == [5]
    assert run(make_guard([rule(above=1.0, patience=0.1)]), [2] * 2, total=3) == [1, 2], "at least 1"


def test_cooldown_rests_after_firing():
    assert run(make_guard([rule(above=1.0, cooldown=3)]), [2] * 10) == [1, 5, 9]
    assert run(make_guard([rule(above=1.0, cooldown=0.3)]), [2] * 10, total=10) == [1, 5, 9]
    assert run(make_guard([rule(above=1.0, cooldown=2, patience=2)]), [2] * 8) == [2, 5, 8]


def test_after_and_until_bound_when_a_rule_looks():
    assert run(make_guard([rule(above=1.0, after=3, until=5)]), [2] * 9) == [4, 5]
    assert run(make_guard([rule(above=1.0, after=0.5, until=0.8)]), [2] * 10, total=10) == [6, 7, 8]
    assert run(make_guard([rule(above=1.0, after=2, patience=2)]), [2] * 5) == [4]


def test_disabled_rules_are_off():
    guard = make_guard([rule(above=1.0, enabled=False)])
    assert run(guard, [2]) == [] and not guard.active and guard.metrics() == {}


# --- actions ---------------------------------------------------------------------------------------------

LR = "actor.optim.lr"


def scale(key=LR, **fields) -> dict:
    return {"scale": {"key": key, **fields}}


def test_scaling_adds_up_and_is_told_with_both_values():
    guard = make_guard([rule(above=1.0, actions=[scale(by=0.5)])])
    guard.check({"m": 2.0}, 1, TOTAL)
    (event,) = guard.check({"m": 2.0}, 2, TOTAL)
    assert event.actions == ({"scale": LR, "from": 5e-7, "to": 2.5e-7},)
    assert guard.adjustments[LR].factor == 0.25
    assert effective_config(guard.config, 2, TOTAL, guard.adjustments).actor.optim.lr == 2.5e-7
    assert guard.config.actor.optim.lr == 1e-6


def test_bounds_hold_and_never_move_a_value_the_other_way():
    def lr_after(times, **fields):
        guard = make_guard([rule(above=1.0, actions=[scale(**fields)])])
        run(guard, [2] * times)
        return effective_config(guard.config, times, TOTAL, guard.adjustments).actor.optim.lr

    assert lr_after(3, by=0.5, min=4e-7) == pytest.approx(4e-7)
    assert lr_after(3, by=2.0, max=3e-6) == pytest.approx(3e-6)
    assert lr_after(2, by=0.5, min=2e-6) == pytest.approx(1e-6), "already below the bound"
    assert lr_after(2, by=2.0, max=5e-7) == pytest.approx(1e-6), "already above the bound"
    assert lr_after(40, by=0.5) == pytest.approx(1e-8), "all factors together: at least 0.01"
    assert lr_after(40, by=2.0) == pytest.approx(1e-4), "at most 100"


def test_set_replaces_earlier_factors_and_scaling_continues_from_it():
    rules = [
        rule("a", above=0, actions=[scale("actor.kl_loss_coef", by=2.0)]) | {"name": "a"},
        rule("b", above=0, actions=[{"set": {"key": "actor.kl_loss_coef", "to": 0.005}}]) | {"name": "b"},
    ]
    guard = make_guard(rules)
    guard.check({"a": 1.0}, 1, TOTAL)
    (event,) = guard.check({"b": 1.0}, 2, TOTAL)
    assert event.actions == ({"set": "actor.kl_loss_coef", "from": 0.002, "to": 0.005},)
    guard.check({"a": 1.0}, 3, TOTAL)
    assert effective_config(guard.config, 3, TOTAL, guard.adjustments).actor.kl_loss_coef == 0.01


def test_scaling_works_on_the_scheduled_value():
    schedules = {LR: {"end": 1e-7, "shape": "exponential"}}
    guard = make_guard([rule(above=1.0, actions=[scale(by=0.5)])], schedules=schedules)
    (event,) = guard.check({"m": 2.0}, 5, 11)
    assert event.actions[0]["from"] == pytest.approx(1e-6 * 0.1**0.5)
    assert effective_config(guard.config, 10, 11, guard.adjustments).actor.optim.lr == pytest.approx(0.5e-7)


def test_scaling_zero_leaves_zero():
    guard = make_guard([rule(above=1.0, actions=[scale("actor.entropy_coeff", by=2.0)])])
    (event,) = guard.check({"m": 2.0}, 1, TOTAL)
    assert event.actions == ({"scale": "actor.entropy_coeff", "from": 0.0, "to": 0.0},)


def test_check_reports_what_is_out_of_range():
    action = {"check": {"metric": "critic/score/m*", "low": -2, "high": 2}}
    guard = make_guard([rule("x", non_finite=True, actions=[action])])
    (event,) = guard.check({"x": NAN, "critic/score/max": 7.0, "critic/score/min": NAN}, 1, TOTAL)
    assert event.actions == (
        {"outside": "critic/score/max", "value": 7.0},
        {"outside": "critic/score/min", "value": "nan"},
    )
    (event,) = guard.check({"x": NAN, "critic/score/max": 1.0}, 2, TOTAL)
    assert event.actions == ({"inside": "critic/score/m*"},)


def test_on_policy_stays_on():
    guard = make_guard([rule(above=0.02, actions=["on_policy"])])
    assert Verdict.of(guard.check({"m": 0.03}, 1, TOTAL)).on_policy and guard.on_policy
    guard.check({"m": 0.0}, 2, TOTAL)
    assert guard.on_policy


def test_verdict_takes_all_events_together():
    def event(*actions):
        return Event(1, "r", "m", 1.0, "", actions)

    assert Verdict.of([]) == Verdict()
    restore = event({"restore_optimizer": True})
    assert Verdict.of([restore]).restore_optimizer
    latest, stable = {"rollback": "latest", "skip_data": False}, {"rollback": "stable", "skip_data": True}
    both = Verdict.of([restore, event(latest), event(stable)])
    assert (both.rollback, both.skip_data, both.restore_optimizer) == ("stable", True, False)
    assert Verdict.of([event(latest)]).skip_data is False
    assert Verdict.of([event({"stop": True})]).stop and Verdict.of([event({"stop": True})]).warn


def test_vetoes_look_ahead_and_change_nothing():
    guard = make_guard([rule("score", non_finite=True, actions=["skip_update"], patience=2, cooldown=1)])
    assert guard.vetoes({"score": NAN}, 1, TOTAL) == []
    guard.check({"score": NAN}, 1, TOTAL)
    before = guard.state_dict()
    assert guard.vetoes({"score": NAN}, 2, TOTAL) == ["r"]
    assert guard.vetoes({"score": 1.0}, 2, TOTAL) == [] and guard.vetoes({}, 2, TOTAL) == []
    assert guard.state_dict() == before
    assert [e.rule for e in guard.check({"score": NAN}, 2, TOTAL)] == ["r"]
    assert guard.vetoes({"score": NAN}, 3, TOTAL) == [], "rests"


def test_events_are_lines_of_json_and_of_text():
    guard = make_guard([rule(non_finite=True, actions=[scale(by=0.5), "rollback"], message="broken")])
    (event,) = guard.check({"m": NAN}, 7, TOTAL)
    line = json.loads(json.dumps(event.record(), allow_nan=False))
    assert line == {
        "step": 7,
        "rule": "r",
        "metric": "m",
        "value": "nan",
        "condition": "not finite",
        "actions": [{"scale": LR, "from": 1e-6, "to": 5e-7}, {"rollback": "stable", "skip_data": True}],
        "message": "broken",
    }
    assert str(event) == (
        "guard r: m = nan, not finite (broken): actor.optim.lr 1e-06 -> 5e-07, back to the stable checkpoint"
    )


# --- rollbacks and stable checkpoints --------------------------------------------------------------------


def test_rollbacks_are_bounded_then_the_run_stops():
    guard = make_guard([rule(above=1.0, actions=["rollback"])], guard={"max_rollbacks": 2})
    assert [Verdict.of(guard.check({"m": 2.0}, i, TOTAL)).rollback for i in (1, 2)] == ["stable", "stable"]
    (event,) = guard.check({"m": 2.0}, 3, TOTAL)
    assert event.actions == ({"stop": True},) and "guard.max_rollbacks (2) reached" in event.message
    assert guard.rollbacks == 2


def test_two_rules_that_roll_back_at_once_count_once():
    rules = [rule(above=x, actions=["rollback"]) | {"name": f"r{x}"} for x in (1, 2)]
    guard = make_guard(rules)
    assert len(guard.check({"m": 3.0}, 1, TOTAL)) == 2 and guard.rollbacks == 1


def test_after_a_rollback_every_rule_begins_anew():
    rules = [
        rule(above=1.0, actions=["rollback"], patience=3),
        rule(above=1.0, patience=4) | {"name": "slow"},
        rule(rising=0.0, window=4) | {"name": "trend"},
    ]
    guard = make_guard(rules)
    fired = []
    for i in range(1, 8):
        fired += [(e.step, e.rule) for e in guard.check({"m": 1.0 + i}, i, TOTAL)]
    assert fired == [(3, "r"), (6, "r")], "3 iterations after a rollback nothing with 4 can fire"


def test_a_checkpoint_is_stable_after_enough_healthy_iterations():
    guard = make_guard([rule(above=1.0, actions=["rollback"], patience=9)], guard={"stable_after": 3})
    seen = []
    for i, value in enumerate([0, 0, 0, 2, 0, 0, 0, 0], 1):
        guard.check({"m": value}, i, TOTAL)
        seen.append(guard.promotable([0, 2, 4], i))
    assert seen == [None, None, 0, None, None, None, 4, 4]
    assert guard.promotable([], 8) is None


def test_rules_that_only_adjust_do_not_spoil_health_unless_told():
    for fields, healthy in (({}, 1.0), ({"unhealthy": True}, 0.0)):
        guard = make_guard([rule(above=1.0, actions=[scale(by=0.5)], **fields)])
        guard.check({"m": 2.0}, 1, TOTAL)
        assert guard.metrics()["guard/healthy"] == healthy
    guard = make_guard([rule(above=1.0, actions=["rollback"], unhealthy=False)])
    guard.check({"m": 2.0}, 1, TOTAL)
    assert guard.metrics()["guard/healthy"] == 1.0


def test_metrics_tell_health_events_and_the_band():
    band = {"metric": "kl", "low": 0.005, "high": 0.015}
    guard = make_guard([rule(above=1.0)], guard={"kl_band": band})
    for i, (kl, where) in enumerate([(0.004, -1.0), (0.005, 0.0), (0.015, 0.0), (0.016, 1.0), (INF, 1.0)], 1):
        guard.check({"kl": kl, "m": 2.0}, i, TOTAL)
        assert guard.metrics() == {
            "guard/healthy": 1.0, "guard/events": 1.0, "guard/rollbacks": 0.0, "guard/kl_band": where,
        }  # fmt: skip
    guard.check({"kl": NAN}, 6, TOTAL)
    assert "guard/kl_band" not in guard.metrics()


# --- state -----------------------------------------------------------------------------------------------


def test_state_continues_in_the_middle_of_everything():
    rules = [
        rule(above=1.0, patience=5),
        rule(not_rising=0.0, window=6, cooldown=2, actions=["restore_optimizer"]) | {"name": "trend"},
        rule(above=2.0, cooldown=4, actions=[scale(by=0.5), "rollback"]) | {"name": "back"},
        rule(above=2.9, actions=["on_policy", {"set": {"key": "rollout.temperature", "to": 0.8}}]) | {"name": "s"},
    ]
    values = [1.5, 2.5, 1.1, 1.2, 1.1, NAN, 1.3, 3.0, 0.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.4, 1.3, 1.2]
    config = make_config(rules)
    whole = Guard(config)
    expected = [[e.record() for e in whole.check({"m": v}, i, 20)] for i, v in enumerate(values, 1)]
    assert sum(map(len, expected)) > 5
    for cut in range(len(values)):
        guard = Guard(config)
        got = []
        for i, value in enumerate(values, 1):
            if i == cut + 1:
                saved = json.loads(json.dumps(guard.state_dict(), allow_nan=False))
                guard = Guard(config)
                guard.load_state_dict(saved)
            got.append([e.record() for e in guard.check({"m": value}, i, 20)])
        assert got == expected, cut
        assert guard.state_dict() == whole.state_dict()


def test_rules_may_change_between_save_and_load():
    old = make_guard([rule(above=1.0, patience=3)])
    run(old, [2, 2])
    new = make_guard([rule(above=1.0) | {"name": "other"}, rule(above=1.0, patience=3)])
    new.load_state_dict(old.state_dict())
    assert run(new, [2], begin=3) == [3, 3]
    make_guard([]).load_state_dict(old.state_dict())


def test_equal_metrics_decide_equally_whatever_their_order():
    first, second = (make_guard(preset="conservative") for _ in range(2))
    metrics = {**HEALTHY, "actor/reward_kl_penalty": 0.06, "critic/grad_norm": 9.0, "a": NAN, "b": INF}
    backwards = dict(reversed(metrics.items()))
    assert [e.record() for e in first.check(metrics, 3, 9)] == [e.record() for e in second.check(backwards, 3, 9)]
    assert first.state_dict() == second.state_dict()


# --- names that are not logged, replay -------------------------------------------------------------------


def test_unknown_metrics_are_named_with_the_nearest_logged_ones():
    rules = [
        rule("actor/grad_nrom", above=1.0),
        rule("val/acc", above=1.0) | {"name": "v"},
        rule("zzz*", above=1.0) | {"name": "z"},
        rule("actor/*", above=1.0) | {"name": "fine"},
    ]
    first, second = make_guard(rules).unwatched(HEALTHY)
    assert "rule r watches actor/grad_nrom" in first and "nearest: actor/grad_norm" in first
    assert "rule z watches zzz*, which is not logged; see metrics.jsonl" in second


def test_rules_of_a_preset_that_have_nothing_to_watch_share_one_line():
    logged = {name: value for name, value in HEALTHY.items() if not name.startswith("critic/vf")}
    (line,) = make_guard(preset="conservative").unwatched(logged)
    assert line == (
        "guard preset conservative: not logged in this run, so not watched: "
        "critic/vf_loss (value_loss, value_converged)"
    )
    assert make_guard(preset="loose").unwatched(HEALTHY) == []


def test_replay_reads_the_rows_of_a_metrics_file():
    config = make_config([rule(above=1.0, patience=2), rule(non_finite=True) | {"name": "n"}])
    rows = [
        {"step": 0, "m": 9.0},
        {"step": 1, "m": 2.0, "text": "hello", "none": None},
        {"step": 2, "m": "nan"},
        {"step": 3, "m": 2.0},
    ]
    assert [(e.step, e.rule) for e in replay(config, rows, 3)] == [(2, "n"), (3, "r")]

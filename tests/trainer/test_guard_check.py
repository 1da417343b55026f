"""`megappo guard check`: the rules over a finished run's metrics, against what really fired."""

from __future__ import annotations

import json

import pytest
from guard_case import HEALTHY, KL

from megappo.errors import UserError
from megappo.trainer.guard import Guard
from megappo.trainer.guard_check import check_run
from megappo_cli.main import app

RULES = [
    {"name": "kl_jump", "metric": KL, "above": 0.5, "cooldown": 2}
    | {"actions": [{"scale": {"key": "actor.optim.lr", "by": 0.5}}, "rollback"]},
    {"name": "broken", "metric": "*", "non_finite": True, "actions": ["warn"]},
    {"name": "nowhere", "metric": "actor/entropie", "above": 1, "actions": ["warn"]},
]


def cli(*args: object) -> int:
    result = app([str(arg) for arg in args], standalone_mode=False)
    return result() if callable(result) else result


@pytest.fixture
def run_dir(tmp_path):
    """12 iterations: the KL jumps in 4 and 5, a gradient is NaN in 8; the log was cut off in the 13th."""
    folder = tmp_path / "run"
    folder.mkdir()
    tree = {"model": {"path": "m"}, "guard": {"rules": RULES}, "trainer": {"total_iterations": 12}}
    (folder / "config.yaml").write_text(json.dumps(tree))
    rows = [{**HEALTHY, "step": step, KL: 0.9 if step in (4, 5) else 0.01} for step in range(13)]
    rows[8]["actor/grad_norm"] = "nan"
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 13, "actor/lo')
    return folder


def test_the_runs_own_rules_say_what_would_have_fired(run_dir):
    found = check_run(run_dir)
    assert [(event.step, event.rule) for event in found.events] == [(4, "kl_jump"), (8, "broken")]
    assert found.events[0].actions[0]["to"] == pytest.approx(0.5 * found.events[0].actions[0]["from"])
    assert found.total == 12 and found.really is None and found.fired(found.events[0]) is None
    assert found.counts() == {"kl_jump": {"would_fire": 1}, "broken": {"would_fire": 1}}
    assert any("cut off" in note for note in found.notes)
    assert any("nowhere watches actor/entropie" in note and "actor/entropy" in note for note in found.notes)


def test_the_replay_is_compared_with_the_events_of_the_run(run_dir):
    lines = [{"step": 4, "rule": "kl_jump", "value": 0.9}, {"step": 6, "rule": "gone", "value": "nan"}]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = check_run(run_dir)
    assert [found.fired(event) for event in found.events] == [True, False]
    assert found.missing == [(6, "gone")]
    assert found.counts()["gone"] == {"would_fire": 0, "fired": 1}


def test_other_rules_may_be_tried(run_dir, tmp_path):
    assert {event.rule for event in check_run(run_dir, preset="conservative").events} >= {"kl_high", "non_finite"}
    assert "kl_high" not in {event.rule for event in check_run(run_dir, preset="loose").events}
    other = tmp_path / "other.yaml"
    other.write_text(
        "model: {path: m}\nguard: {rules: [{name: low, metric: critic/score/mean, below: 0.7, actions: [warn]}]}\n"
    )
    assert len(check_run(run_dir, other).events) == 12  # step 0 is before training
    assert len(check_run(run_dir, other, ["guard.rules.0.patience=5"]).events) == 2
    assert len(check_run(run_dir, other, ["guard.rules.0.cooldown=0.5", "trainer.total_iterations=12"]).events) == 2


def test_a_run_without_config_yaml_uses_its_checkpoint(run_dir):
    from megappo.config.load import read_config

    config, _ = read_config(run_dir / "config.yaml")
    (run_dir / "config.yaml").unlink()
    with pytest.raises(UserError, match="give the run's configuration with --config"):
        check_run(run_dir)
    assert check_run(run_dir, preset="conservative").events[0].step == 4
    state = run_dir / "checkpoints/iter_000010/state.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"config": config.model_dump(mode="json")}))
    assert [event.step for event in check_run(run_dir).events] == [4, 8]


def test_the_command_prints_tables_or_json(run_dir, capsys):
    (run_dir / "events.jsonl").write_text(json.dumps({"step": 4, "rule": "kl_jump"}) + "\n")
    assert cli("guard", "check", run_dir) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert rows[1][:6] == ["4", "kl_jump", KL, "0.9", "above", "0.5"] and rows[1][-1] == "yes"
    assert "back to the stable checkpoint" in out and ["broken", "1", "0"] in rows and ["kl_jump", "1", "1"] in rows
    assert "note: " in err and "cut off" in err
    assert cli("guard", "check", run_dir, "guard.rules.0.above=2", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert [event["rule"] for event in record["events"]] == ["broken"] and record["events"][0]["value"] == "nan"
    assert record["rules"]["kl_jump"] == {"would_fire": 0, "fired": 1}
    assert record["only_in_the_run"] == [{"step": 4, "rule": "kl_jump"}]
    assert cli("guard", "check", run_dir, "guard.rules=[{name: a, metric: x, above: 1, actions: [warn]}]") == 0
    assert "kl_jump" in capsys.readouterr().out  # what fired in the run


def test_mistakes_are_one_line(run_dir, tmp_path):
    for args, said in (
        ((tmp_path / "none",), "no such folder"),
        ((tmp_path,), "no metrics.jsonl: did you mean"),
        ((run_dir, tmp_path / "missing.yaml"), "missing.yaml"),
        ((run_dir, "a.yaml", "--config", "b.yaml"), "give one configuration"),
        ((run_dir, "guard.rules=[]"), "guard has no rules"),
        ((run_dir, "guard.rulse=[]"), "did you mean guard.rules"),
    ):
        with pytest.raises(UserError, match=said) as error:
            cli("guard", "check", *args)
        assert "\n" not in str(error.value)
    (run_dir / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="logged nothing yet"):
        check_run(run_dir)


def test_the_replay_is_the_guard_itself(run_dir):
    """The same rows through a guard as the loop feeds it."""
    from megappo.config.load import read_config

    guard, seen = Guard(read_config(run_dir / "config.yaml")[0]), []
    for step in range(1, 13):
        metrics = {**HEALTHY, KL: 0.9 if step in (4, 5) else 0.01}
        metrics["actor/grad_norm"] = float("nan") if step == 8 else 0.9
        seen += guard.check(metrics, step, 12)
    assert [event.record() for event in check_run(run_dir).events] == [event.record() for event in seen]

"""`schedules` and `guard` in YAML: what is accepted, and one line for each mistake."""

import re
from pathlib import Path

import pytest
import yaml

from megappo.config.checks import check_config
from megappo.config.load import load_config, read_config
from megappo.config.schema import ADJUSTABLE, SCHEDULABLE, ExperimentConfig
from megappo.config.schema.guard_presets import preset_rules
from megappo.config.show import dump_config
from megappo.errors import UserError
from megappo.trainer.effective import effective_config, value_of

DOCS = Path(__file__).parents[2] / "docs"


def add(exp, **sections):
    exp.write({**yaml.safe_load(exp.yaml.read_text()), **sections})


def errors(exp, *overrides) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_config(exp.yaml, list(overrides))
    return [line.removeprefix(f"{exp.yaml}: ") for line in str(caught.value).splitlines()]


def notes(exp, *overrides) -> list[str]:
    config, _ = read_config(exp.yaml, list(overrides))
    return [str(p) for p in check_config(config) if p.note and p.key.startswith(("schedules", "guard"))]


# --- schedules -------------------------------------------------------------------------------------------


def test_every_key_that_may_change_exists_and_is_a_number():
    config = ExperimentConfig.model_validate({"model": {"path": "m"}}).resolved()
    for name in SCHEDULABLE:
        assert isinstance(value_of(config, name), (int, float)), name
    assert set(ADJUSTABLE) < set(SCHEDULABLE)


@pytest.mark.parametrize("name", SCHEDULABLE)
def test_every_key_can_be_scheduled_from_the_file_and_from_the_command_line(exp, name):
    add(exp, schedules={name: {"start": 2, "end": 4, "steps": 5}})
    config = load_config(exp.yaml, [f"schedules.{name}.end=3.0"])
    assert config.schedules[name].end == 3.0
    start, end = (value_of(effective_config(config, i, 10), name) for i in (0, 9))
    if name == "data.train_batch_size":
        assert start == end == 64, "one mini-batch at least"
    else:
        assert (start, end) == (2, 3)


def test_overrides_write_whole_schedules_and_single_values(exp):
    config = load_config(
        exp.yaml,
        [
            "schedules.actor.optim.lr={end: 1e-7, shape: cosine}",
            "schedules.actor.optim.lr.delay=3",
            "schedules[rollout.temperature].start=0.7",
        ],
    )
    lr = config.schedules["actor.optim.lr"]
    assert (lr.end, lr.shape, lr.delay) == (1e-7, "cosine", 3)
    assert config.schedules["rollout.temperature"].start == 0.7


@pytest.mark.parametrize(
    ("name", "schedule", "said"),
    [
        ("actor.entropy_coef", {"end": 0.0}, "cannot be scheduled; did you mean actor.entropy_coeff?"),
        ("kl_coef", {"end": 0.0}, "did you mean algorithm.kl_ctrl.kl_coef?"),
        ("actor", {"optim": {"lr": {"end": 1e-7}}}, "schedules.actor: cannot be scheduled"),
        ("trainer.seed", {"end": 3}, "cannot be scheduled"),
        (
            "actor.optim.lr",
            {"ende": 1e-7, "start": 1},
            "schedules.actor.optim.lr.ende = 1e-07: unknown key; did you mean ",
        ),
        ("actor.optim.lr", 3, "schedules.actor.optim.lr = 3: is a section"),
        ("actor.optim.lr", {}, "changes nothing; give start or end"),
        ("actor.optim.lr", {"end": "low"}, "schedules.actor.optim.lr.end = 'low': needs a number"),
        ("actor.optim.lr", {"end": 0.0}, "schedules.actor.optim.lr.end = 0.0: must be > 0"),
        ("actor.clip_ratio_c", {"end": 1.0}, "must be > 1"),
        ("rollout.temperature", {"end": 0.0}, "schedules.rollout.temperature.end = 0.0: must be > 0"),
        ("actor.entropy_coeff", {"end": 0.01, "shape": "exponential"}, "start = 0.0: must be > 0; choose another"),
        ("actor.entropy_coeff", {"end": 0.01, "shape": "lin"}, "must be one of linear, cosine"),
        ("actor.entropy_coeff", {"end": 0.01, "steps": 0}, "must be >= 1"),
        ("actor.entropy_coeff", {"end": 0.01, "steps": 3, "fraction": 0.1}, "has steps and fraction"),
        ("actor.entropy_coeff", {"end": 0.01, "delay": 3, "delay_fraction": 0.1}, "has delay and delay_fraction"),
        ("actor.entropy_coeff", {"end": 0.01, "shape": "constant", "steps": 3}, "has no ramp"),
        ("actor.entropy_coeff", {"end": 0.01, "stages": [[1.0, 0.1]]}, "write shape: stages"),
        ("actor.entropy_coeff", {"shape": "stages"}, "needs stages"),
        ("actor.entropy_coeff", {"shape": "stages", "end": 1, "stages": [[1.0, 0.1]]}, "does not use end"),
        ("actor.entropy_coeff", {"shape": "stages", "stages": [[0.5, 0.1]]}, "the last one 1.0"),
        ("actor.entropy_coeff", {"shape": "stages", "stages": [[0.5, 0.1], [0.2, 0.2], [1, 0]]}, "ascending"),
        ("actor.entropy_coeff", {"shape": "stages", "stages": [[1.0, -0.1]]}, "stages.0 = -0.1: must be >= 0"),
        ("actor.entropy_coeff", {"shape": "stages", "stages": [[1.0]]}, "needs two numbers"),
        ("data.train_batch_size", {"start": 0}, "schedules.data.train_batch_size.start = 0.0: must be >= 1"),
    ],
)
def test_mistakes_in_schedules_are_one_line(exp, name, schedule, said):
    add(exp, schedules={name: schedule})
    (line,) = errors(exp)
    assert said in line


def test_a_key_that_is_null_needs_both_ends(exp):
    add(exp, schedules={"actor.clip_ratio_c": {"end": 2.0}}, actor={"clip_ratio_c": None})
    (line,) = errors(exp)
    assert line == "schedules.actor.clip_ratio_c.start = null: the key itself is null; give start and end"
    load_config(exp.yaml, ["schedules.actor.clip_ratio_c.start=4.0"])


def test_unknown_keys_on_the_command_line_are_explained(exp):
    (line,) = errors(exp, "schedules.actor.optim.rl.end=1e-7")
    assert "schedules.actor.optim.rl: cannot be scheduled; did you mean actor.optim.lr?" in line


def test_schedules_without_effect_get_a_note(exp):
    end = {"end": 0.5}
    add(exp, schedules={"actor.kl_loss_coef": end, "algorithm.kl_ctrl.target_kl": end, "critic.optim.lr": end})
    found = notes(exp, "algorithm.adv_estimator=grpo", "rollout.n=2")
    assert [line.partition(":")[0] for line in found] == [
        "schedules.actor.kl_loss_coef", "schedules.algorithm.kl_ctrl.target_kl", "schedules.critic.optim.lr",
    ]  # fmt: skip
    used = ["actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"]
    assert notes(exp, *used) == []
    add(exp, schedules={"actor.optim.lr": {"end": 1e-7, "steps": 50, "delay": 10}})
    assert "does not reach its end within trainer.total_iterations (60)" in notes(exp, "trainer.total_iterations=60")[0]
    assert notes(exp, "trainer.total_iterations=61") == []


def test_a_coefficient_of_zero_may_start_a_warm_up(exp):
    coefs = {"algorithm.kl_ctrl.kl_coef": {"end": 0.001}, "actor.kl_loss_coef": {"end": 0.001}}
    add(exp, schedules=coefs, actor={"use_kl_loss": True, "kl_loss_coef": 0.0})
    config = load_config(
        exp.yaml, ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.0}"]
    )
    assert [p.key for p in check_config(config) if not p.key.startswith("data")] == []


def test_a_scheduled_clip_ratio_is_inherited_like_the_value(exp):
    add(exp, schedules={"actor.cliprange": {"end": 0.1}})
    assert "did you mean actor.clip_ratio?" in errors(exp)[0]
    add(exp, schedules={"actor.clip_ratio": {"end": 0.1}}, actor={"clip_ratio_high": 0.28})
    assert sorted(load_config(exp.yaml).schedules) == ["actor.clip_ratio", "actor.clip_ratio_low"]


# --- guard -----------------------------------------------------------------------------------------------


def test_presets_are_written_out_and_changed_by_name(exp):
    rules = [
        {"name": "actor_grad_norm", "above": 20},
        {"name": "kl_drift", "enabled": False},
        {"name": "reward_flat", "falling": 0.1, "actions": ["stop"]},
        {"name": "mine", "metric": "val/*", "falling": 0.05, "actions": ["warn", {"rollback": "latest"}]},
    ]
    add(exp, guard={"preset": "conservative", "rules": rules})
    guard = load_config(exp.yaml).guard
    names = [rule.name for rule in guard.rules]
    assert names[:4] == ["actor_grad_norm", "kl_drift", "reward_flat", "mine"], "one's own come first"
    assert sorted(names) == sorted([*(r.name for r in preset_rules("conservative")), "mine"])
    norm, drift, flat, mine = guard.rules[:4]
    assert (norm.metric, norm.above, norm.actions[0].scale.by) == ("actor/grad_norm", 20, 0.9)
    assert not drift.enabled and drift.above == 0.05
    assert (flat.conditions(), flat.window, flat.actions[0].stop) == (["falling"], 30, True)
    assert [action.kinds() for action in mine.actions] == [["warn"], ["rollback"]]
    assert guard.kl_band.high == 0.015


@pytest.mark.parametrize("preset", ["none", "conservative", "loose"])
def test_show_prints_rules_that_load_to_the_same(exp, preset):
    rules = [{"name": "kl_risk", "metric": "x", "above": 1, "patience": 1, "until": 0.5, "actions": ["rollback"]}]
    add(exp, guard={"preset": preset, "rules": rules}, schedules={"actor.clip_ratio": {"end": 0.1}})
    config = load_config(exp.yaml)
    again = exp.root / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config
    assert dump_config(load_config(again)) == again.read_text()


def test_no_preset_no_guard(exp):
    assert not load_config(exp.yaml).guard.active
    assert load_config(exp.yaml, ["guard.preset=loose"]).guard.active


def test_overrides_reach_into_rules(exp):
    add(exp, guard={"rules": [{"name": "a", "metric": "m", "above": 1, "actions": ["warn"]}]})
    config = load_config(exp.yaml, ["guard.rules.0.above=2", "guard.rules.0.actions.0=stop", "guard.stable_after=2"])
    assert config.guard.rules[0].above == 2 and config.guard.rules[0].actions[0].stop


LR = {"key": "actor.optim.lr", "by": 0.5}


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"above": None}, "guard.rules.0: rule a has no condition; give exactly one of above, below"),
        ({"below": 1.0}, "guard.rules.0: rule a has above and below; give exactly one"),
        ({"metric": None}, "guard.rules.0.metric: is required in a rule of one's own (a)"),
        ({"name": "kl_hihg", "metric": None}, "or did you mean the preset's rule kl_high?"),
        ({"actions": []}, "guard.rules.0.actions = []: rule a does nothing"),
        ({"actions": ["wran"]}, "guard.rules.0.actions.0 = 'wran': `wran` is no action by itself"),
        ({"actions": ["wran"]}, "did you mean warn?"),
        ({"actions": [{}]}, "does nothing; name an action"),
        ({"actions": [{"warn": True, "skip_data": False}]}, "skip_data belongs to rollback"),
        ({"actions": [{"rollback": "last"}]}, "must be one of stable, latest"),
        ({"actions": [{"scale": {**LR, "key": "actor.lr"}}]}, "cannot change it; did you mean actor.optim.lr?"),
        ({"actions": [{"scale": {**LR, "key": "actor.clip_ratio"}}]}, "did you mean actor.clip_ratio_"),
        ({"actions": [{"scale": {**LR, "by": 0}}]}, "guard.rules.0.actions.0.scale.by = 0: must be > 0"),
        ({"actions": [{"scale": {**LR, "min": 1.0, "max": 0.5}}]}, "must not exceed max (0.5)"),
        ({"actions": [{"scale": {"by": 0.5}}]}, "guard.rules.0.actions.0.scale.key: is required but missing"),
        ({"actions": [{"set": {"key": "actor.optim.lr", "to": 0}}]}, "set.to = 0.0: must be > 0"),
        ({"actions": [{"set": {"key": "rollout.temperature", "to": 0}}]}, "set.to = 0.0: must be > 0"),
        ({"actions": [{"set": {"key": "data.train_batch_size", "to": 64}}]}, "the guard cannot change it"),
        ({"actions": [{"check": {"metric": "m", "low": 2, "high": -2}}]}, "must not exceed high (-2)"),
        ({"patience": 1.5}, "guard.rules.0.patience = 1.5: needs a whole number of iterations, or a share"),
        ({"patience": -1}, "must be >= 0"),
        ({"window": 1}, "must be >= 2"),
        ({"after": 10, "until": 10}, "must be above after (10)"),
        ({"after": 0.5, "until": 0.4}, "must be above after (0.5)"),
        ({"when": 3}, "guard.rules.0.when = 3: unknown key"),
    ],
)
def test_mistakes_in_rules_are_one_line(exp, rule, said):
    add(
        exp,
        guard={
            "preset": "conservative",
            "rules": [{"name": "a", "metric": "m", "above": 1, "actions": ["warn"], **rule}],
        },
    )
    (line,) = errors(exp)
    assert said in line


def test_a_name_given_twice_is_said_once(exp):
    rules = [{"name": "a", "metric": "m", "above": i, "actions": ["warn"]} for i in range(3)]
    add(exp, guard={"rules": rules})
    (line,) = errors(exp)
    assert line.startswith("guard.rules.0.name = 'a': names more than one rule")


def test_rules_that_go_back_need_checkpoints_that_live_long_enough(exp):
    add(exp, guard={"preset": "conservative"})
    (line,) = errors(exp, "trainer.save_freq=-1")
    assert "guard rule kl_high and" in line and "goes back to checkpoints" in line
    (line,) = errors(exp, "trainer.save_freq=1")
    assert "trainer.max_ckpt_to_keep = 3: checkpoints are deleted before they can be stable" in line
    assert "keep 5" in line
    load_config(exp.yaml, ["trainer.save_freq=1", "trainer.max_ckpt_to_keep=5"])
    load_config(exp.yaml, ["trainer.save_freq=2"])
    only_warns = {"name": "a", "metric": "m", "above": 1, "actions": ["warn"]}
    add(exp, guard={"rules": [only_warns]})
    load_config(exp.yaml, ["trainer.save_freq=-1"])


def test_a_band_has_its_low_end_below_its_high_end(exp):
    add(exp, guard={"kl_band": {"low": 0.2, "high": 0.1}})
    assert errors(exp) == ["guard.kl_band.low = 0.2: must be below guard.kl_band.high (0.1)"]


# --- documentation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["guard.md", "schedules.md"])
def test_every_example_in_the_documentation_loads(exp, page):
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)
    assert len(blocks) >= 3
    for block in blocks:
        exp.write({"model": {"path": "model"}, "rewards": [{"type": "gsm8k"}], **yaml.safe_load(block)})
        load_config(exp.yaml, ["data.train_files=[train.parquet]"])


def test_the_guards_page_lists_every_rule_of_every_preset():
    text = (DOCS / "guard.md").read_text(encoding="utf-8")
    for preset in ("conservative", "loose"):
        for rule in preset_rules(preset):
            assert f"`{rule.name}`" in text, rule.name

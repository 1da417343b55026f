"""YAML, overrides, paths, and what the errors say."""

from pathlib import Path

import pytest
import yaml

from megappo.config.load import load_config, read_config
from megappo.config.show import dump_config
from megappo.config.yaml_io import parse_yaml
from megappo.errors import UserError


def errors(*args, **kwargs) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_config(*args, **kwargs)
    return str(caught.value).splitlines()


def test_a_three_line_experiment_loads(exp):
    config = load_config(exp.yaml, world_size=2)
    assert config.model.tokenizer_path == str(exp.root / "model")
    assert config.critic.ppo_epochs == 4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E5", 1e5), ("-2.5e+3", -2500.0), (".5e1", 5.0), ("1.e2", 100.0), ("1e", "1e"),
        ("e5", "e5"), ("1e-6x", "1e-6x"), ("12", 12), ("true", True), ("~", None), ("v1e5", "v1e5"),
    ],
)  # fmt: skip
def test_scientific_notation_is_a_number(text, value):
    parsed = parse_yaml(text)
    assert parsed == value and type(parsed) is type(value)


def test_duplicate_keys_are_refused_with_their_line(exp):
    exp.write("model:\n  path: model\n  path: other\n")
    (line,) = errors(exp.yaml)
    assert "line 3" in line and "`path` is given twice" in line


def test_merge_keys_of_yaml_still_work(exp):
    exp.write("model: &m {path: model}\ncritic:\n  <<: {ppo_epochs: 2}\n  shuffle: false\n")
    config, _ = read_config(exp.yaml)
    assert config.critic.ppo_epochs == 2


def test_syntax_error_names_file_and_line(exp):
    exp.write("model:\n  path: [a\ndata: {}\n")
    (line,) = errors(exp.yaml)
    assert line.startswith(str(exp.yaml)) and "line 3" in line


def test_missing_file_folder_and_scalar_file_are_one_line(exp):
    assert "no such file" in errors(exp.root / "none.yaml")[0]
    assert "is a folder" in errors(exp.root)[0]
    exp.write("just text")
    assert "at the top" in errors(exp.yaml)[0]
    exp.yaml.write_bytes(b"\xff\xfe\x00")
    assert len(errors(exp.yaml)) == 1


def test_empty_file_says_what_is_required(exp):
    exp.write("")
    assert errors(exp.yaml) == [f"{exp.yaml}: model: is required but missing; add it"]


def test_empty_sections_mean_their_defaults(exp):
    exp.write(exp.yaml.read_text() + "\ncritic:\nactor:\n  optim:\n")
    assert load_config(exp.yaml).critic.cliprange_value == 0.5


def test_overrides_win_and_reach_into_lists(exp):
    config = load_config(
        exp.yaml,
        [
            "actor.optim.lr=2e-6",
            "rewards.0.weight=2",
            "rewards[1].type=reasoning_gym",
            "rewards.1.kwargs.a.b=[1, x]",
            "algorithm.reward_shaping.clip=[-2, 2]",
            "actor.clip_ratio_c=null",
            "critic.ppo_epochs=1",
        ],
    )
    assert config.actor.optim.lr == 2e-6
    assert [r.weight for r in config.rewards] == [2.0, 1.0]
    assert config.rewards[1].kwargs == {"a": {"b": [1, "x"]}}
    assert config.algorithm.reward_shaping.clip == (-2.0, 2.0)
    assert config.actor.clip_ratio_c is None
    assert config.critic.ppo_epochs == 1


def test_override_by_alias_replaces_the_files_value(exp):
    exp.write(exp.yaml.read_text() + "\nactor: {clip_ratio: 0.1}\n")
    assert load_config(exp.yaml, ["actor.cliprange=0.3"]).actor.clip_ratio == 0.3
    (line,) = errors(exp.yaml, ["actor.cliprange=0.3", "actor.clip_ratio=0.3"])
    assert "give only one of them" in line


def test_alias_and_name_in_one_file_is_an_error(exp):
    exp.write(exp.yaml.read_text() + "\nactor: {clip_ratio: 0.1, cliprange: 0.2}\n")
    (line,) = errors(exp.yaml)
    assert "`cliprange` is another name for `clip_ratio`" in line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.seed", "write section.key=value"),
        ("=3", "write section.key=value"),
        ("a..b=3", "write section.key=value"),
        ("trainer.seed.x=3", "needs a whole number"),
        ("rewards.7.weight=1", "use a number from 0 to 1"),
        ("rewards.x.weight=1", "use a number from 0 to 1"),
        ("model.path.x=1", "is a plain value"),
        ("model.chat_template={{ x }}", "quote it"),
        ("actor.ppo_epoch=3", "did you mean actor.ppo_epochs?"),
        ("nothing.at.all=3", "unknown key"),
    ],
)
def test_bad_overrides_are_explained(exp, override, said):
    lines = errors(exp.yaml, [override])
    assert len(lines) == 1 and said in lines[0], lines


def test_errors_name_the_override_that_caused_them(exp):
    (line,) = errors(exp.yaml, ["actor.ppo_epochs=four"])
    assert line == "override actor.ppo_epochs=four: actor.ppo_epochs = 'four': needs a whole number"


def test_relative_paths_count_from_the_file_and_in_overrides_from_the_current_folder(exp, monkeypatch):
    elsewhere = exp.root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "more.jsonl").touch()
    (elsewhere / "r.py").touch()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(exp.root))
    config = load_config(
        "../exp.yaml",
        [
            "data.val_files=[more.jsonl]",
            "trainer.output_dir=~/out",
            "data.train_files.1=more.jsonl",
            "rewards.0={type: function, path: 'r.py:score'}",
            "rollout.record_dir=rec",
        ],
    )
    assert config.model.path == str(exp.root / "model")
    assert config.data.train_files == [str(exp.root / "train.parquet"), str(elsewhere / "more.jsonl")]
    assert config.data.val_files == [str(elsewhere / "more.jsonl")]
    assert config.trainer.output_dir == str(exp.root / "out")
    assert config.rewards[0].path == f"{elsewhere}/r.py:score"
    assert config.rollout.record_dir == str(elsewhere / "rec")


def test_default_output_folder_lies_beside_the_file(exp, monkeypatch):
    monkeypatch.chdir("/")
    assert load_config(exp.yaml).trainer.output_dir == str(exp.root / "runs" / "run")


def test_chat_template_file_is_found_beside_the_yaml_and_inline_is_kept(exp):
    (exp.root / "t.jinja").write_text("{{ a }}")
    exp.write({**yaml.safe_load(exp.yaml.read_text()), "model": {"path": "model", "chat_template": "t.jinja"}})
    assert load_config(exp.yaml).model.chat_template == str(exp.root / "t.jinja")
    config = load_config(exp.yaml, ["model.chat_template='{{ x }}'"])
    assert config.model.chat_template == "{{ x }}"
    assert "no such file" in errors(exp.yaml, ["model.chat_template=none.jinja"])[0]


def test_all_problems_come_at_once_one_line_each(exp):
    exp.write(
        "model: {path: model, pth: x}\n"
        "actor: {lr: 1, ppo_epochs: 4.0, use_kl_loss: 'true', clip_ratio: -1, policy_loss: pppo}\n"
        "data: {gamma: 1, train_files: train.parquet}\n"
        "critic: [1]\n"
        "trainer: {experiment_name: 2024-01-01, seed: '7'}\n"
        "algorithm: {kl_ctrl: 3, reward_shaping: {clip: [1, 2, 3]}}\n"
        "rewards: [{weight: 1}]\n"
        "actor_rollout_ref: {}\n"
    )
    lines = errors(exp.yaml)
    assert all(line.startswith(f"{exp.yaml}: ") for line in lines)
    text = "\n".join(lines)
    for said in (
        "model.pth = 'x': unknown key; did you mean model.path?",
        "actor.lr = 1: unknown key here; it exists as actor.optim.lr",
        "actor.ppo_epochs = 4.0: needs a whole number; write 4",
        "actor.use_kl_loss = 'true': needs true or false; write true without quotes",
        "actor.clip_ratio = -1: must be > 0",
        "actor.policy_loss = 'pppo': must be one of ppo, gspo, cispo, reinforce, rebel; did you mean ppo?",
        "data.gamma = 1: unknown key here; it exists as algorithm.gamma",
        "data.train_files",
        "critic = [1]: is a section",
        "trainer.experiment_name = 2024-01-01: needs text; put it in quotes",
        "trainer.seed = '7': needs a whole number; write 7 without quotes",
        "algorithm.kl_ctrl = 3: is a section",
        "algorithm.reward_shaping.clip = [1, 2, 3]: needs exactly 2 numbers",
        "rewards.0.type: is required but missing",
        "megappo config import-verl",
    ):
        assert said in text, said
    assert len(lines) == 15, text


def test_show_prints_yaml_that_loads_to_the_same_configuration(exp):
    exp.write(exp.yaml.read_text() + "\nsft: {train_files: [train.parquet]}\n")
    config = load_config(exp.yaml, ["actor.optim.lr=3e-7", "algorithm.reward_shaping.clip=[-2, 2]"])
    text = dump_config(config)
    again = exp.root / "again.yaml"
    again.write_text(text)
    assert load_config(again) == config
    assert dump_config(load_config(again)) == text
    assert [line for line in text.splitlines() if "null" in line and "parallel" in line] == [
        "    virtual_pipeline_model_parallel_size: null"
    ] * text.count("virtual_pipeline_model_parallel_size")


def test_sft_needs_its_section(exp):
    assert "sft: is required" in errors(exp.yaml, kind="sft")[0]
    config = load_config(exp.yaml, ["sft.train_files=[train.parquet]"], kind="sft")
    assert config.sft.train_files == [str(Path("train.parquet").absolute())]


def test_sft_does_not_ask_for_prompts_or_rewards(exp):
    exp.write("model: {path: model}\nsft: {train_files: [train.parquet]}\n")
    load_config(exp.yaml, kind="sft", world_size=2)

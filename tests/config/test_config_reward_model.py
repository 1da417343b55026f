"""Reward models in the configuration: their training section, and the ones among the rewards."""

import json

import pytest

from megappo.config.check_reward_models import same_tokenizer
from megappo.config.checks import check_config
from megappo.config.load import load_config, read_config
from megappo.config.schema import RewardModelConfig
from megappo.config.show import dump_config
from megappo.errors import UserError

SCORER = ["Qwen2ForSequenceClassification"]
TP = "parallel.tensor_model_parallel_size"
MODEL = "rewards=[{type: model, path: reward}]"


def problems(exp, *overrides, kind="train", world_size=None) -> list:
    config, _ = read_config(exp.yaml, list(overrides), kind=kind)
    return [p for p in check_config(config, kind=kind, world_size=world_size) if not p.note]


@pytest.fixture
def scorer(exp):
    """An experiment with a reward model beside the policy."""
    exp.model("reward", architectures=SCORER)
    return exp


# --- in PPO --------------------------------------------------------------------------------------------


def test_a_reward_model_takes_the_actors_layout_and_sizes(scorer):
    changes = [MODEL, "actor.parallel.pipeline_model_parallel_size=2", "actor.log_prob_micro_batch_size_per_gpu=3"]
    reward = load_config(scorer.yaml, changes).rewards[0]
    assert reward.path == str(scorer.root / "reward")
    assert (reward.parallel.pipeline_model_parallel_size, reward.micro_batch_size_per_gpu) == (2, 3)
    assert reward.parallel.expert_tensor_parallel_size == 1
    own = load_config(scorer.yaml, [*changes, f"rewards.0.{TP}=2"]).rewards[0].parallel
    assert (own.tensor_model_parallel_size, own.pipeline_model_parallel_size) == (2, 1)
    assert own.expert_tensor_parallel_size == 2


def test_show_writes_layouts_of_models_only_and_loads_back(scorer):
    config = load_config(scorer.yaml, ["rewards=[{type: gsm8k}, {type: model, path: reward}]"])
    text = dump_config(config)
    again = scorer.root / "again.yaml"
    again.write_text(text)
    assert load_config(again) == config
    assert "parallel: null" not in text


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["rewards=[{type: model}]"], "rewards.0.path", "is required for type model"),
        (["rewards=[{type: model, path: none}]"], "rewards.0.path", "no such folder"),
        (["rewards=[{type: model, path: model}]"], "rewards.0.path", "without a scalar head"),
        (["rewards=[{type: gsm8k, path: reward}]"], "rewards.0.path", "takes no path"),
        ([f"rewards.0.{TP}=2"], "rewards.0.parallel", "has no layout"),
        ([MODEL, f"rewards.0.{TP}=3"], f"rewards.0.{TP}", ""),
        ([MODEL, "model.path=reward"], "model.path", "cannot generate"),
        ([MODEL, "reference.path=reward", "actor.use_kl_loss=true"], "reference.path", "cannot generate"),
        (
            [MODEL, "actor.use_dynamic_bsz=true", "rewards.0.max_token_len_per_gpu=100"],
            "rewards.0.max_token_len_per_gpu",
            "more than this budget",
        ),
    ],
)
def test_what_does_not_fit_is_named(scorer, overrides, key, words):
    found = problems(scorer, *overrides, world_size=6)
    assert any(p.key == key and words in p.text for p in found), found


def test_a_reward_model_may_start_a_critic(scorer):
    assert problems(scorer, "critic.path=reward") == []


def test_the_tokenizer_and_the_vocabulary_must_be_the_policys(scorer):
    assert problems(scorer, MODEL) == []
    scorer.model("small", architectures=SCORER, vocab_size=10)
    scorer.model("model", vocab_size=12)
    (found,) = problems(scorer, "rewards=[{type: model, path: small}]")
    assert found.key == "rewards.0.path" and "serve it behind type: remote" in found.text


def test_tokenizers_are_compared_by_what_an_id_means(tmp_path):
    def folder(name: str, file: str, content) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(content if isinstance(content, str) else json.dumps(content))
        return str(tmp_path / name)

    base = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [], "padding": None}
    one = folder("one", "tokenizer.json", base)
    assert same_tokenizer(one, folder("padded", "tokenizer.json", base | {"padding": {"length": 8}}))
    assert not same_tokenizer(one, folder("swapped", "tokenizer.json", base | {"model": {"vocab": {"a": 1, "b": 0}}}))
    assert not same_tokenizer(one, folder("added", "tokenizer.json", base | {"added_tokens": [{"id": 2}]}))
    assert not same_tokenizer(one, folder("broken", "tokenizer.json", "{"))
    other = folder("other", "tokenizer.model", "abc")
    assert not same_tokenizer(one, other)
    assert same_tokenizer(other, folder("copy", "tokenizer.model", "abc"))


# --- training ------------------------------------------------------------------------------------------

TRAIN = "reward_model.train_files=[train.parquet]"


def test_a_good_section_has_no_problems_and_takes_a_reward_model_to_go_on_with(scorer):
    assert problems(scorer, TRAIN, kind="reward-model", world_size=4) == []
    assert problems(scorer, TRAIN, "model.path=reward", kind="reward-model") == []
    assert [p.key for p in problems(scorer, "sft.train_files=[train.parquet]", "model.path=reward", kind="sft")] == [
        "model.path"
    ]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["reward_model.train_files=[]"], "reward_model.train_files"),
        (["reward_model.val_files=[none.jsonl]"], "reward_model.val_files.0"),
        (["reward_model.max_length=5000"], "reward_model.max_length"),
        (
            ["reward_model.use_dynamic_bsz=true", "reward_model.max_token_len_per_gpu=2047"],
            "reward_model.max_token_len_per_gpu",
        ),
        (["reward_model.batch_size=3"], "reward_model.batch_size"),
        ([f"reward_model.{TP}=3"], f"reward_model.{TP}"),
        (["reward_model.optim.betas=[1.0, 0.9]"], "reward_model.optim.betas"),
        (["reward_model.export_path=model"], "reward_model.export_path"),
    ],
)
def test_each_mistake_of_the_section_is_named(exp, overrides, key):
    assert key in [p.key for p in problems(exp, TRAIN, *overrides, kind="reward-model", world_size=4)]


def test_the_section_is_required_and_its_values_are_checked(exp):
    with pytest.raises(UserError, match=r"reward_model.*is required for `megappo reward-model`"):
        load_config(exp.yaml, kind="reward-model")
    for change, words in (
        ("clip=[2, -2]", "low must be below high"),
        ("margin=big", "reward_model.margin = 'big': needs a number, data or null"),
        ("max_noise=1.5", "must be <= 1"),
        ("chosen=better", "did you mean reward_model.chosen_key"),
    ):
        with pytest.raises(UserError) as caught:
            load_config(exp.yaml, [TRAIN, f"reward_model.{change}"], kind="reward-model")
        assert words in str(caught.value)


def test_defaults_are_those_of_the_users_documents():
    section = RewardModelConfig(train_files=["pairs.jsonl"])
    assert (section.optim.lr, section.batch_size, section.micro_batch_size_per_gpu) == (1e-5, 512, 1)
    assert section.clip == (-2.0, 2.0) and section.normalize and section.max_noise == 0.12

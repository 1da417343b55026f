"""The schema: defaults, inheritance, aliases, strictness."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from megappo.config.keys import iter_keys, markdown
from megappo.config.schema import INHERITS, ActorConfig, ExperimentConfig, ParallelConfig

ROOT = Path(__file__).parents[2]


def make(**sections) -> ExperimentConfig:
    return ExperimentConfig.model_validate({"model": {"path": "m"}, **sections})


def value_at(config: ExperimentConfig, dotted: str):
    for part in dotted.split("."):
        config = getattr(config, part)
    return config


def test_defaults_are_those_of_the_users_documents():
    config = make()
    assert (config.actor.ppo_epochs, config.actor.ppo_mini_batch_size, config.data.train_batch_size) == (
        4,
        64,
        256,
    )
    assert (config.actor.optim.lr, config.critic.optim.lr) == (1e-6, 1e-5)
    assert (config.actor.optim.max_grad_norm, config.critic.optim.max_grad_norm) == (1.0, 0.8)
    assert (config.algorithm.gamma, config.algorithm.lam) == (1.0, 0.95)
    assert (config.actor.clip_ratio, config.actor.clip_ratio_c) == (0.2, 3.0)


def test_resolved_leaves_no_inheriting_key_null():
    config = make(sft={"train_files": ["a"]}, reward_model={"train_files": ["a"]}).resolved()
    assert [name for name in INHERITS if value_at(config, name) is None] == []


@pytest.mark.parametrize("name", [n for n in INHERITS if not n.startswith("sft") and "parallel" not in n])
def test_null_key_takes_the_value_of_its_source(name):
    config = make().resolved()
    assert value_at(config, name) == value_at(config, INHERITS[name])


def test_given_values_are_not_overwritten_by_inheritance():
    config = make(critic={"ppo_epochs": 2, "shuffle": False, "parallel": {"tensor_model_parallel_size": 2}})
    resolved = config.resolved()
    assert (resolved.critic.ppo_epochs, resolved.critic.shuffle) == (2, False)
    assert resolved.critic.parallel.tensor_model_parallel_size == 2
    assert resolved.actor.parallel.tensor_model_parallel_size == 1


def test_resolved_is_idempotent_and_leaves_the_original_alone():
    config = make()
    once = config.resolved()
    assert once.resolved() == once
    assert config.critic.ppo_epochs is None
    once.critic.parallel.tensor_model_parallel_size = 8
    assert once.actor.parallel.tensor_model_parallel_size == 1, "inherited sections are copies"


def test_only_gae_needs_a_critic_and_only_kl_needs_a_reference():
    assert make().needs_critic and not make().needs_reference
    assert not make(algorithm={"adv_estimator": "grpo"}).needs_critic
    assert make(actor={"use_kl_loss": True}).needs_reference
    assert make(algorithm={"use_kl_in_reward": True}).needs_reference


def test_cliprange_names_mean_clip_ratio():
    actor = ActorConfig(cliprange=0.1, cliprange_low=0.2, cliprange_high=0.3)
    assert (actor.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.2, 0.3)
    with pytest.raises(ValidationError, match="give only one of them"):
        ActorConfig(cliprange=0.1, clip_ratio=0.1)


@pytest.mark.parametrize(
    "bad",
    [
        {"ppo_epochs": "4"}, {"ppo_epochs": True}, {"ppo_epochs": 0}, {"shuffle": 1},
        {"clip_ratio": float("nan")}, {"clip_ratio_c": 1.0}, {"policy_loss": "PPO"},
        {"nonsense": 1}, {"optim": {"betas": [0.9]}},
    ],
)  # fmt: skip
def test_wrong_types_ranges_and_names_are_refused(bad):
    with pytest.raises(ValidationError):
        ActorConfig.model_validate(bad)


def test_zero_is_no_period_and_no_top_k():
    with pytest.raises(ValidationError, match="write -1"):
        make(trainer={"save_freq": 0})
    with pytest.raises(ValidationError, match="write -1"):
        make(rollout={"top_k": 0})


def test_model_parallel_size_is_the_product_of_tp_pp_cp():
    layout = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=3, context_parallel_size=2)
    assert (layout.model_parallel_size, layout.vpp) == (12, 1)


def test_chat_template_with_braces_is_inline_and_a_path_is_read(tmp_path):
    inline = make(model={"path": "m", "chat_template": "{{ x }}"}).model
    assert (inline.chat_template_file, inline.read_chat_template()) == (None, "{{ x }}")
    file = tmp_path / "t.jinja"
    file.write_text("{{ y }}")
    by_path = make(model={"path": "m", "chat_template": str(file)}).model
    assert (by_path.chat_template_file, by_path.read_chat_template()) == (str(file), "{{ y }}")
    assert make().model.read_chat_template() is None


def test_every_key_has_a_one_line_meaning_and_sizes_name_their_unit():
    for row in iter_keys():
        assert row.meaning and row.meaning.endswith(".") and "\n" not in row.meaning, row.name
        leaf = row.name.rsplit(".", 1)[-1]
        if leaf.endswith(("_len_per_gpu", "_length", "_buffer_len")):
            assert "(tokens)" in row.meaning, row.name
        if leaf.endswith("batch_size_per_gpu"):
            assert "(samples)" in row.meaning or "(pairs)" in row.meaning, row.name
        if leaf.endswith("_s"):
            assert "(seconds)" in row.meaning, row.name


def test_every_inheriting_key_names_its_source():
    rows = {row.name: row for row in iter_keys()}
    for name, source in INHERITS.items():
        if name in rows:
            assert "null: " in rows[name].meaning, name
            assert source.rsplit(".", 1)[-1] in rows[name].meaning, name


def test_documentation_page_is_up_to_date():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == markdown(), "run: megappo config keys --markdown > docs/configuration.md"


def test_config_imports_neither_torch_nor_transformers():
    code = (
        "import sys, megappo.config.load, megappo.config.keys, megappo.config.import_verl;"
        "import megappo_cli.config_cmd;"
        "print([m for m in ('torch', 'transformers', 'megatron', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_clip_ratio_above_one_survives_show_and_load():
    config = make(actor={"clip_ratio": 1.5}).resolved()
    assert ExperimentConfig.model_validate(config.model_dump(mode="python")) == config

"""verl's YAML, command lines and scripts become MegaPPO experiments, and nothing is lost silently."""

import re
from pathlib import Path

import pytest

from megappo.config.import_verl import import_verl
from megappo.config.load import load_config
from megappo.config.schema import ExperimentConfig
from megappo.config.validate import build, key_names
from megappo.config.verl_keys import CONVERTED, RENAMED, VERL_DEFAULTS
from megappo.config.yaml_io import parse_yaml
from megappo.errors import UserError

DOCS = Path(__file__).parents[2] / "docs" / "migrating_from_verl.md"
A, R, O = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"


def get(tree, dotted):
    for part in dotted.split("."):
        tree = tree[int(part)] if part.isdigit() else tree[part]
    return tree


def translate(*settings, **options):
    result = import_verl(None, settings, **options)
    assert parse_yaml(result.yaml()) == result.tree
    config, problems = build(result.tree)
    assert not problems, problems
    return result, config


def test_the_users_yaml_with_critic_under_actor_rollout_ref(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text(
        "algorithm: {gamma: 1.0, lam: 1.0, adv_estimator: gae}\n"
        "actor_rollout_ref: {actor: {clip_ratio: 0.2, ppo_mini_batch_size: 64, use_kl_loss: true, "
        "kl_loss_coef: 0.001}, critic: {max_grad_norm: 0.7}}\n"
    )
    result = import_verl(file)
    config, _ = build(result.tree)
    assert config.algorithm.lam == 1.0 and config.algorithm.adv_estimator == "gae"
    assert (config.actor.clip_ratio, config.actor.ppo_mini_batch_size) == (0.2, 64)
    assert (config.actor.use_kl_loss, config.actor.kl_loss_coef) == (True, 0.001)
    assert config.critic.optim.max_grad_norm == 0.7
    assert any("no critic under actor_rollout_ref" in line for line in result.warnings)


def test_the_users_command_line(exp):
    settings = [
        "data.train_files=~/gsm8k/train.parquet",
        "data.train_batch_size=256",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "critic.optim.lr=1e-5",
        "algorithm.kl_ctrl.kl_coef=0.001",
        "trainer.total_epochs=15",
    ]
    result, config = translate(*settings)
    assert config.data.train_files == ["~/gsm8k/train.parquet"]
    assert (config.actor.optim.lr, config.critic.optim.lr) == (1e-6, 1e-5)
    assert (config.actor.ppo_micro_batch_size_per_gpu, config.actor.use_dynamic_bsz) == (4, True)
    assert (config.algorithm.kl_ctrl.kl_coef, config.trainer.total_epochs) == (0.001, 15)
    assert not any("dropped" in line for line in result.warnings)
    exp.write(result.yaml())
    loaded = load_config(exp.yaml, ["model.path=model", "data.train_files=[train.parquet]"], world_size=4)
    assert loaded.critic.use_dynamic_bsz is True


def test_tables_point_at_keys_that_exist():
    targets = [*RENAMED.values(), *(target for target, _ in CONVERTED.values()), *VERL_DEFAULTS]
    names = set(key_names())
    assert [t for t in targets if t not in names] == []
    assert not set(RENAMED) & set(CONVERTED)


def test_verl_defaults_table_lists_only_differences():
    ours = ExperimentConfig.model_validate({"model": {"path": "x"}}).model_dump()
    assert [key for key, theirs in VERL_DEFAULTS.items() if get(ours, key) == theirs] == []


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        (f"{A}.megatron.tensor_model_parallel_size=2", "actor.parallel.tensor_model_parallel_size", 2),
        (
            f"{R}.megatron.pipeline_model_parallel_size=2",
            "reference.parallel.pipeline_model_parallel_size",
            2,
        ),
        ("critic.megatron.sequence_parallel=True", "critic.parallel.sequence_parallel", True),
        (
            f"+{A}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=3",
            "actor.parallel.num_layers_in_last_pipeline_stage",
            3,
        ),
        (f"{A}.clip_ratio_high=0.28", "actor.clip_ratio_high", 0.28),
        (f"{A}.cliprange=0.1", "actor.clip_ratio", 0.1),
        (f"{A}.policy_loss.loss_mode=vanilla", "actor.policy_loss", "ppo"),
        (f"{A}.optim.lr_warmup_steps_ratio=0.05", "actor.optim.lr_warmup_ratio", 0.05),
        (f"{A}.optim.warmup_style=cosine", "actor.optim.lr_scheduler", "cosine"),
        (f"{A}.grad_clip=0.5", "actor.optim.max_grad_norm", 0.5),
        ("critic.optim.clip_grad=0.5", "critic.optim.max_grad_norm", 0.5),
        (f"{O}.n=5", "rollout.n", 5),
        (f"{O}.top_k=0", "rollout.top_k", -1),
        (f"{O}.dtype=bfloat16", "rollout.dtype", "bf16"),
        (f"{O}.response_length=77", "data.max_response_length", 77),
        (f"{O}.val_kwargs.temperature=0.6", "rollout.val.temperature", 0.6),
        (f"{O}.log_prob_micro_batch_size_per_gpu=2", "actor.log_prob_micro_batch_size_per_gpu", 2),
        (f"{R}.log_prob_max_token_len_per_gpu=9", "reference.log_prob_max_token_len_per_gpu", 9),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=True", "actor.parallel.recompute", "full"),
        ("algorithm.adv_estimator=rloo_vectorized", "algorithm.adv_estimator", "rloo"),
        ("algorithm.rollout_correction.rollout_is=token", "algorithm.correction.mode", "token"),
        (f"{A}.tis_imp_ratio_cap=2", "algorithm.correction.clip_max", 2.0),
        ("data.max_prompt_length=99", "data.max_prompt_length", 99),
        ("data.val_files=['a.parquet','b.parquet']", "data.val_files", ["a.parquet", "b.parquet"]),
        ("trainer.save_freq=0", "trainer.save_freq", -1),
        ("trainer.default_local_dir=~/x", "trainer.output_dir", "~/x"),
        ("trainer.resume_mode=disable", "trainer.resume", "never"),
        (
            "trainer.logger=['console','tensorboard','file']",
            "trainer.logger",
            ["console", "tensorboard", "jsonl"],
        ),
        ("critic.kl_ctrl.kl_coef=0.01", "algorithm.kl_ctrl.kl_coef", 0.01),
        ("reward_model.overlong_buffer.len=64", "algorithm.reward_shaping.overlong.buffer_len", 64),
    ],
)
def test_common_settings_arrive(setting, key, value):
    result, _ = translate(setting)
    assert get(result.tree, key) == value
    assert not [line for line in result.warnings if "dropped" in line], result.warnings


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (f"{O}.gpu_memory_utilization=0.6", "no server to set up"),
        ("some.thing=3", "some.thing = 3: dropped: has no counterpart"),
        (f"{A}.typo=false", "has no counterpart"),
        ("algorithm.adv_estimator=opo", "dropped: MegaPPO has gae"),
        (f"{A}.optim.warmup_style=wsd", "MegaPPO has constant, linear, cosine"),
        (f"{A}.fsdp_config.param_offload=True", "replace FSDP"),
        ("actor_rollout_ref.model.lora_rank=32", "LoRA is not supported"),
        ("reward_model.enable=True", "add the reward model to `rewards`"),
        ("trainer.logger=['console','wandb']", "wandb dropped"),
        ("actor_rollout_ref.model.path=Qwen/Qwen2-7B", "looks like a name on a hub"),
        (f"{A}.optim.min_lr=1e-7", "set actor.optim.min_lr_ratio"),
        (f"{A}.ppo_micro_batch_size=64", "counts samples over all GPUs"),
        (f"{O}.log_prob_use_dynamic_bsz=True", "as actor.use_dynamic_bsz says"),
        (f"{O}.do_sample=False", "training needs sampling"),
        ("trainer.n_gpus_per_node=8", "torchrun --nnodes 1 --nproc-per-node 8"),
        ("--config-name=x", "an option of Hydra"),
        ("data.train_files=rel/a.parquet", "relative paths"),
        ("data.max_prompt_length=long", "needs a whole number"),
    ],
)
def test_what_does_not_go_over_is_said(setting, said):
    result = import_verl(None, [setting])
    assert any(said in line for line in result.warnings), result.warnings
    assert said in result.yaml(), "the file says it too"


def test_switched_off_features_are_not_worth_a_line():
    result, _ = translate(
        "reward_model.enable=False",
        "reward_model.model.path=x",
        "actor_rollout_ref.model.lora_rank=0",
        "data.truncation=error",
        f"{A}.megatron.param_offload=False",
        f"{A}._target_=verl.x",
    )
    assert not [line for line in result.warnings if "dropped" in line], result.warnings


def test_min_lr_becomes_a_share_of_lr():
    _, config = translate(f"{A}.optim.lr=1e-5", f"{A}.optim.min_lr=1e-6")
    assert config.actor.optim.min_lr_ratio == pytest.approx(0.1)


def test_global_micro_batches_are_divided_by_the_gpus():
    result, config = translate(f"{A}.ppo_micro_batch_size=64", "trainer.n_gpus_per_node=8", "trainer.nnodes=2")
    assert config.actor.ppo_micro_batch_size_per_gpu == 4
    assert any("read as 4 per GPU" in line for line in result.warnings)


def test_warm_up_steps_beat_the_ratio_as_in_verl():
    _, config = translate(f"{A}.optim.lr_warmup_steps=10", f"{A}.optim.lr_warmup_steps_ratio=0.1")
    assert (config.actor.optim.lr_warmup_steps, config.actor.optim.lr_warmup_ratio) == (10, None)
    _, config = translate(f"{A}.optim.lr_warmup_steps=-1", f"{A}.optim.lr_warmup_steps_ratio=0.1")
    assert (config.actor.optim.lr_warmup_steps, config.actor.optim.lr_warmup_ratio) == (0, 0.1)


@pytest.mark.parametrize(("strategy", "value"), [("fsdp2", 0.5), ("megatron", 0.9)])
def test_the_gradient_clip_that_the_strategy_reads_is_taken(strategy, value):
    result, config = translate(f"{A}.strategy={strategy}", f"{A}.optim.clip_grad=0.9", f"{A}.grad_clip=0.5")
    assert config.actor.optim.max_grad_norm == value
    assert not any("already" in line for line in result.warnings)


def test_two_settings_for_one_key_keep_the_first_and_say_so():
    result, config = translate(f"{A}.clip_ratio=0.2", f"{A}.cliprange=0.3")
    assert config.actor.clip_ratio == 0.2
    assert any("actor.clip_ratio is already 0.2" in line for line in result.warnings)


def test_dual_clip_can_be_switched_off_with_null():
    assert translate(f"{A}.clip_ratio_c=null")[1].actor.clip_ratio_c is None
    assert translate(f"{A}.clip_ratio=0.2")[1].actor.clip_ratio_c == 3.0


def test_truncated_sampling_is_allowed_with_a_warning():
    result, config = translate(f"{O}.top_p=0.9")
    assert config.rollout.allow_truncated_sampling
    assert any("biases the ratio" in line for line in result.warnings)


def test_greedy_validation():
    _, config = translate(f"{O}.val_kwargs.do_sample=False", f"{O}.val_kwargs.temperature=0.7")
    assert config.rollout.val.temperature == 0
    _, config = translate(f"{O}.val_kwargs.do_sample=True", f"{O}.val_kwargs.temperature=0.7")
    assert config.rollout.val.temperature == 0.7


@pytest.mark.parametrize("prefix", ["custom_reward_function", "reward.custom_reward_function"])
def test_custom_reward_functions(prefix):
    _, config = translate(f"{prefix}.path=/x/my.py", f"{prefix}.name=score", f"+{prefix}.reward_kwargs.alpha=0.5")
    (reward,) = config.rewards
    assert (reward.type, reward.path, reward.kwargs) == ("function", "/x/my.py:score", {"alpha": 0.5})
    _, config = translate(f"{prefix}.path=/x/my.py")
    assert config.rewards[0].path == "/x/my.py:compute_score"


def test_estimators_without_critic_drop_its_keys():
    result, _ = translate("algorithm.adv_estimator=grpo", f"{O}.n=4", "critic.optim.lr=1e-5")
    assert "critic" not in result.tree
    assert any("this estimator has no critic" in line for line in result.warnings)
    assert not any("critic.optim.weight_decay" in line for line in result.warnings)


def test_differing_defaults_are_listed_or_written_out():
    result, config = translate("algorithm.gamma=1")
    (line,) = [line for line in result.warnings if "--verl-defaults" in line]
    assert "actor.ppo_epochs 4 (verl 1)" in line and "algorithm.lam 0.95 (verl 1)" in line
    assert config.actor.ppo_epochs == 4
    result, config = translate("algorithm.gamma=1", verl_defaults=True)
    assert not [line for line in result.warnings if "--verl-defaults" in line]
    assert (config.actor.ppo_epochs, config.algorithm.lam, config.model.dtype) == (1, 1.0, "bf16")


def test_references_are_replaced(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text(
        """
data: {max_response_length: 33, train_batch_size: 64}
actor_rollout_ref:
  model: {path: /m}
  actor:
    ppo_mini_batch_size: 16
    megatron: {tensor_model_parallel_size: 2, override_transformer_config: {recompute_granularity: selective}}
  ref:
    megatron:
      tensor_model_parallel_size: ${oc.select:actor_rollout_ref.actor.megatron.tensor_model_parallel_size,1}
      override_transformer_config: ${actor_rollout_ref.actor.megatron.override_transformer_config}
      other: ${oc.select:actor_rollout_ref.nothing,{}}
      pipeline_model_parallel_size: ${oc.select:nothing.here,4}
  rollout:
    response_length: ${data.max_response_length}
    name: ???
    n: 2
critic:
  rollout_n: ${actor_rollout_ref.rollout.n}
  ppo_micro_batch_size: null
  ppo_micro_batch_size_per_gpu: ${oc.select:.ppo_micro_batch_size,null}
  ppo_mini_batch_size: ${actor_rollout_ref.actor.ppo_mini_batch_size}
  ppo_epochs: ${oc.select:actor_rollout_ref.actor.ppo_epochs,1}
  model: {path: '${actor_rollout_ref.model.path}'}
  loop: ${critic.loop}
trainer:
  project_name: p
  experiment_name: e
  default_local_dir: out/${trainer.project_name}/${trainer.experiment_name}
"""
    )
    tree = import_verl(file).tree
    assert get(tree, "data.max_response_length") == 33
    assert get(tree, "reference.parallel") == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "recompute": "selective",
    }
    assert (get(tree, "critic.ppo_mini_batch_size"), get(tree, "critic.ppo_epochs")) == (16, 1)
    assert "path" not in tree["critic"], "same as model.path"
    assert "ppo_micro_batch_size_per_gpu" not in tree["critic"]
    assert get(tree, "trainer.output_dir") == "out/p/e"


def test_hydra_prefixes_add_and_delete(tmp_path):
    file = tmp_path / "verl.yml"
    file.write_text("data: {train_batch_size: 8, max_prompt_length: 9}\n")
    tree = import_verl(file, ["~data.max_prompt_length", "++data.train_batch_size=16", "+data.shuffle=False"]).tree
    assert tree["data"] == {"train_batch_size": 16, "shuffle": False}


def test_launch_scripts_with_variables_arrays_and_arithmetic(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        r"""
#!/usr/bin/env bash
set -x  # comment with 'quote
train_path=$HOME/data/gsm8k/train.parquet
files="['$train_path', '/b.parquet']"
BATCH=${BATCH:-128}
max_prompt_length=$((1024 * 2))
DATA=(
    data.train_files="$files"
    data.train_batch_size=${BATCH}
)
export X=1
python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' \
    "${DATA[@]}" \
    data.max_prompt_length=${max_prompt_length} \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(( (max_prompt_length + 1024) * 2 )) \
    actor_rollout_ref.actor.ppo_epochs=${EPOCHS:-$((1 + 1))} \
    actor_rollout_ref.model.path=$MODEL \
    trainer.logger=['console','tensorboard'] \
    trainer.experiment_name='my run' $@
"""
    )
    result = import_verl(script)
    tree = result.tree
    assert tree["data"]["train_files"] == ["~/data/gsm8k/train.parquet", "/b.parquet"]
    assert (tree["data"]["train_batch_size"], tree["data"]["max_prompt_length"]) == (128, 2048)
    assert tree["actor"] == {"ppo_epochs": 2, "ppo_max_token_len_per_gpu": 6144}
    assert tree["trainer"] == {"experiment_name": "my run", "logger": ["console", "tensorboard"]}
    assert any("shell variable MODEL is not set" in line for line in result.warnings)


@pytest.mark.parametrize("expression", ["$((9**9**9))", "$((1/0))", "$((f(1)))", "$((", "$(date)", "$((x + 1))"])
def test_other_shell_expressions_are_left_out_with_a_warning(tmp_path, expression):
    script = tmp_path / "run.sh"
    script.write_text(f'data.shuffle=True data.train_batch_size="{expression}"\n')
    result = import_verl(script)
    assert "train_batch_size" not in result.tree["data"]
    assert any("shell expression" in line for line in result.warnings)


def test_files_that_cannot_be_read_are_user_errors(tmp_path):
    (tmp_path / "empty.sh").write_text("echo hello\n")
    (tmp_path / "open.sh").write_text("data.a='x\n")
    for name, said in (("none.sh", "no such file"), ("empty.sh", "no settings"), ("open.sh", "shell script")):
        with pytest.raises(UserError, match=said):
            import_verl(tmp_path / name)
    with pytest.raises(UserError, match="no such file"):
        import_verl(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="is not a setting"):
        import_verl(None, ["data.shuffle"])


def test_the_migration_page_tells_the_truth():
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 20
    values = {"warmup_style": "cosine", "rollout_is": "token", "loss_mode": "gspo", "resume_mode": "auto"}
    for verl, ours in rows:
        value = values.get(verl.rsplit(".", 1)[-1], "selective" if "granularity" in verl else 1)
        tree = import_verl(None, [f"{verl}={value}"]).tree
        assert get(tree, ours) is not None, (verl, ours)


def test_the_migration_page_lists_every_differing_default():
    page = DOCS.read_text(encoding="utf-8")
    assert [key for key in VERL_DEFAULTS if f"`{key}`" not in page] == []


def test_filter_groups_becomes_dynamic_sampling():
    groups = "algorithm.filter_groups"
    given = [f"{groups}.metric=acc", f"{groups}.max_num_gen_batches=4", "algorithm.adv_estimator=grpo"]
    result, config = translate(f"{groups}.enable=True", *given)
    dynamic = config.algorithm.dynamic_sampling
    assert (dynamic.enabled, dynamic.signal, dynamic.max_rounds, dynamic.shortfall) == (True, "success", 4, "fail")
    assert not any("filter_groups" in line for line in result.warnings)
    _, off = translate(f"{groups}.enable=False", *given)
    assert not off.algorithm.dynamic_sampling.enabled
    unlimited, config = translate(f"{groups}.enable=True", f"{groups}.max_num_gen_batches=0")
    assert config.algorithm.dynamic_sampling.max_rounds == 10 and any("max_rounds 10" in w for w in unlimited.warnings)

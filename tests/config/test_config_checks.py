"""Checks across keys, files and ranks: each mistake gives one line with its key and a remedy."""

import json

import pytest

from megappo.config.checks import check_config, nearest_divisor
from megappo.config.load import load_config, read_config
from megappo.errors import UserError

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, FIRST, LAST = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)


def check(exp, *overrides, world_size=None, kind="train", notes=False):
    """Keys of the problems (or of the notes)."""
    config, _ = read_config(exp.yaml, list(overrides), kind=kind)
    return [p.key for p in check_config(config, kind=kind, world_size=world_size) if p.note == notes]


def test_a_good_experiment_has_no_problems(exp):
    assert check(exp, world_size=4) == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm.adv_estimator=grpo"], "rollout.n"),
        (["algorithm.adv_estimator=rloo"], "rollout.n"),
        (["algorithm.adv_estimator=reinforce_plus_plus_baseline"], "rollout.n"),
        (["rollout.temperature=0"], "rollout.temperature"),
        (["rollout.top_p=0.9"], "rollout.top_p"),
        (["rollout.top_k=50"], "rollout.top_k"),
        (["rollout.engine=recorded", "rollout.replay_dir=none"], "rollout.replay_dir"),
        (["rollout.replay_dir=model"], "rollout.replay_dir"),
        (["rewards=[]"], "rewards"),
        (["rewards.0.type=function"], "rewards.0.path"),
        (["rewards.0.type=function", "rewards.0.path=justname"], "rewards.0.path"),
        (["rewards.0.type=function", "rewards.0.path=none.py:fn"], "rewards.0.path"),
        (["rewards.0.path=a:b"], "rewards.0.path"),
        (["rewards.0.weight=0"], "rewards.0.weight"),
        (["data.train_files=[]"], "data.train_files"),
        (["data.train_files=[none.parquet]"], "data.train_files.0"),
        (["data.val_files=[train.parquet, model/config.json]"], "data.val_files.1"),
        (["trainer.critic_warmup=5", "trainer.total_iterations=5"], "trainer.critic_warmup"),
        (
            ["trainer.critic_warmup=5", "algorithm.adv_estimator=grpo", "rollout.n=2"],
            "trainer.critic_warmup",
        ),
        (
            ["algorithm.adaptive_lam_alpha=0.05", "algorithm.adv_estimator=remax"],
            "algorithm.adaptive_lam_alpha",
        ),
        (
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive, kl_coef: 0}"],
            "algorithm.kl_ctrl.kl_coef",
        ),
        (["algorithm.reward_shaping.clip=[2, -2]"], "algorithm.reward_shaping.clip"),
        (
            ["algorithm.reward_shaping.overlong={enabled: true, buffer_len: 600}"],
            "algorithm.reward_shaping.overlong.buffer_len",
        ),
        (["algorithm.correction.band_low=3"], "algorithm.correction.band_low"),
        (["actor.ppo_mini_batch_size=60"], "actor.ppo_mini_batch_size"),
        (["actor.ppo_mini_batch_size=512"], "actor.ppo_mini_batch_size"),
        (["critic.ppo_mini_batch_size=100"], "critic.ppo_mini_batch_size"),
        (["data.max_response_length=4000"], "data.max_response_length"),
        (["actor.optim.betas=[0.9, 1.0]"], "actor.optim.betas"),
        (["critic.optim.betas=[-0.1, 0.9]"], "critic.optim.betas"),
        (["trainer.output_dir=train.parquet/run"], "trainer.output_dir"),
        (["rollout.record_dir=train.parquet"], "rollout.record_dir"),
        (["rollout.max_batch_tokens=1000"], "rollout.max_batch_tokens"),
        (["model.tokenizer_path=none"], "model.tokenizer_path"),
        (["critic.path=none"], "critic.path"),
        (["actor.use_kl_loss=true", "reference.path=none"], "reference.path"),
    ],
)
def test_settings_that_do_not_fit_are_refused(exp, overrides, key):
    assert check(exp, *overrides) == [key]


def test_models_that_no_role_uses_are_not_looked_at(exp):
    assert check(exp, "reference.path=none") == []
    assert check(exp, "critic.path=none", "algorithm.adv_estimator=grpo", "rollout.n=2") == []


def test_truncated_sampling_can_be_allowed(exp):
    assert check(exp, "rollout.top_p=0.9", "rollout.top_k=5", "rollout.allow_truncated_sampling=true") == []


def test_token_budgets_count_only_with_dynamic_batches(exp):
    small = ["actor.ppo_max_token_len_per_gpu=1000"]
    assert check(exp, *small) == []
    small.append("actor.use_dynamic_bsz=true")
    assert check(exp, *small) == ["actor.ppo_max_token_len_per_gpu"], "what others inherit is said once"
    small.append("critic.ppo_max_token_len_per_gpu=999")
    assert check(exp, *small) == ["actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"]


def test_a_run_that_would_end_by_replacing_its_own_model_is_refused(exp):
    (exp.root / "run").mkdir()
    exp.model("run/final_hf")
    assert check(exp, "trainer.output_dir=run") == [], "an earlier result may be replaced"
    assert check(exp, "trainer.output_dir=run", "model.path=run/final_hf") == ["trainer.output_dir"]
    with pytest.raises(UserError, match=r"final_hf, where the trained model goes, would replace the model in"):
        load_config(exp.yaml, ["trainer.output_dir=run", "model.path=run/final_hf"])


# --- model folders --------------------------------------------------------------------------------------


def test_unusable_model_folders_are_explained(exp):
    for name, changes, said in (
        ("bert", {"architectures": ["BertModel"]}, "BertModel is not supported"),
        ("nameless", {"architectures": None}, "not supported"),
    ):
        exp.model(name, **changes)
        with pytest.raises(UserError, match=said):
            load_config(exp.yaml, [f"model.path={name}"])
    for break_it, said in (
        (lambda folder: (folder / "model.safetensors").unlink(), "no \\*.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "not valid JSON"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    ):
        break_it(exp.model("broken"))
        with pytest.raises(UserError, match=said):
            load_config(exp.yaml, ["model.path=broken"])
    with pytest.raises(UserError, match="names on a hub are not downloaded"):
        load_config(exp.yaml, ["model.path=Qwen/Qwen2.5-0.5B"])


def test_a_missing_model_folder_is_said_once(exp):
    assert check(exp, "model.path=none", "actor.use_kl_loss=true") == ["model.path"]


def test_a_folder_without_tokenizer_needs_tokenizer_path(exp):
    (exp.root / "model" / "tokenizer.json").unlink()
    assert check(exp) == ["model.tokenizer_path"]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_supported_architectures(exp, name):
    exp.model("model", architectures=[name])
    assert check(exp) == []


def test_rope_scaling_stretches_the_length_limit(exp):
    scaling = {"factor": 4.0, "original_max_position_embeddings": 1024}
    exp.model("model", max_position_embeddings=1024)
    assert check(exp, "data.max_response_length=3000") == ["data.max_response_length"]
    exp.model("model", max_position_embeddings=1024, rope_scaling=scaling)
    assert check(exp, "data.max_response_length=3000") == []
    exp.model("model", max_position_embeddings=1024, rope_parameters=scaling)
    assert check(exp, "data.max_response_length=3000") == []


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1000}, ["data.max_response_length"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, []),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, []),
        ({"architectures": ["MixtralForCausalLM"], "sliding_window": 1000}, ["data.max_response_length"]),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1000, "use_sliding_window": False}, []),
        ({"sliding_window": 1000, "use_sliding_window": True}, ["data.max_response_length"]),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 1000}, []),
    ],
)
def test_samples_longer_than_a_sliding_window_are_refused(exp, changes, keys):
    exp.model("model", **changes)
    assert check(exp, "data.max_prompt_length=512", "data.max_response_length=512") == keys


def test_mistral_without_the_key_has_the_window_that_transformers_gives_it(exp):
    exp.model("model", architectures=["MistralForCausalLM"], max_position_embeddings=32768)
    lengths = ["data.max_prompt_length=4096", "data.max_response_length=1"]
    assert check(exp, *lengths) == ["data.max_response_length"]
    with pytest.raises(UserError, match=r"attends to the last 4096 only .* shorten the samples"):
        load_config(exp.yaml, lengths)


# --- layouts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "world_size", "keys"),
    [
        ({TP: 2}, 4, []),
        ({TP: 3}, 3, [TP, TP, TP]),  # heads, feed-forward, key/value heads
        ({TP: 8}, 8, []),  # more ranks than key/value heads: a multiple
        ({TP: 4}, 6, [TP]),
        ({PP: 2}, 2, []),
        ({PP: 3}, 3, [PP]),
        ({PP: 2, VPP: 2}, 2, []),  # the engine makes this one right
        ({PP: 4, VPP: 2}, 4, [PP]),
        ({VPP: 2}, 2, [VPP]),
        ({PP: 2, FIRST: 1}, 2, []),
        ({PP: 2, FIRST: 1, LAST: 3}, 2, []),
        ({PP: 2, FIRST: 1, LAST: 2}, 2, [PP]),
        ({PP: 2, FIRST: 4}, 2, [PP]),
        ({PP: 3, FIRST: 1, LAST: 1}, 3, []),
        ({PP: 3, FIRST: 1}, 3, [PP]),
        ({PP: 2, FIRST: 9}, 2, [PP]),
        ({FIRST: 2}, 1, [FIRST]),
        ({PP: 2, VPP: 2, FIRST: 1}, 2, [FIRST, PP]),
        ({"context_parallel_size": 2}, 2, []),
        ({"context_parallel_size": 2}, 3, [TP]),
        ({"expert_model_parallel_size": 2}, 2, ["expert_model_parallel_size"]),
        ({"sequence_parallel": True}, 1, []),
    ],
)
def test_layouts_against_model_and_ranks(exp, layout, world_size, keys):
    found = check(exp, f"actor.parallel={json.dumps(layout)}", world_size=world_size)
    assert found == [f"actor.parallel.{key}" for key in keys]


def test_a_role_with_its_own_layout_is_checked_on_its_own(exp):
    assert check(exp, f"critic.parallel.{TP}=3", world_size=6) == [f"critic.parallel.{TP}"] * 3
    assert check(exp, f"reference.parallel.{TP}=3") == [], "no reference is built"


def test_sequence_parallel_without_tensor_parallel_is_only_a_note(exp):
    assert "actor.parallel.sequence_parallel" in check(exp, "actor.parallel.sequence_parallel=true", notes=True)


def test_mini_batches_feed_every_data_parallel_rank(exp):
    tiny = ["actor.ppo_mini_batch_size=2"]
    assert check(exp, *tiny, world_size=4) == ["actor.ppo_mini_batch_size"]
    assert check(exp, *tiny, "rollout.n=2", world_size=4) == [], "samples count, not prompts"
    assert check(exp, *tiny, f"actor.parallel.{TP}=2", world_size=4) == [], "tensor-parallel ranks share"
    assert "actor.ppo_mini_batch_size" in check(exp, "actor.ppo_mini_batch_size=4", world_size=3, notes=True)


def test_the_remedy_for_a_mini_batch_is_a_divisor():
    assert nearest_divisor(256, 60) == 64
    assert nearest_divisor(256, 1000) == 256
    assert nearest_divisor(12, 5) == 4


# --- supervised fine-tuning -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([], None),
        (["sft.train_files=[]"], "sft.train_files"),
        (["sft.train_files=[none.jsonl]"], "sft.train_files.0"),
        (["sft.max_length=5000"], "sft.max_length"),
        (["sft.use_dynamic_bsz=true", "sft.max_token_len_per_gpu=10"], "sft.max_token_len_per_gpu"),
        (["sft.batch_size=1"], "sft.batch_size"),
        ([f"sft.parallel.{PP}=3"], f"sft.parallel.{PP}"),
        (["sft.optim.betas=[0.9, 2]"], "sft.optim.betas"),
        (["sft.export_path=train.parquet/x"], "sft.export_path"),
        (["sft.export_path=train.parquet"], "sft.export_path"),
        (["sft.export_path=."], "sft.export_path"),  # would take the model and everything else with it
        (["sft.export_path=model"], "sft.export_path"),
        (["sft.export_path=other"], "sft.export_path"),
        (["sft.export_path=earlier"], None),
        (["model.path=none"], "model.path"),
    ],
)
def test_sft_checks(exp, overrides, key):
    exp.write("model: {path: model}\nsft: {train_files: [train.parquet]}\n")
    (exp.root / "other").mkdir()
    (exp.root / "other" / "thesis.tex").touch()
    exp.model("earlier")
    world = 3 if any(PP in o for o in overrides) else 2
    assert check(exp, *overrides, kind="sft", world_size=world) == ([key] if key else [])


def test_sft_samples_longer_than_a_sliding_window_are_refused(exp):
    exp.model("model", architectures=["MistralForCausalLM"], sliding_window=1000)
    exp.write("model: {path: model}\nsft: {train_files: [train.parquet]}\n")
    assert check(exp, "sft.max_length=1001", kind="sft") == ["sft.max_length"]
    assert check(exp, "sft.max_length=1000", kind="sft") == []

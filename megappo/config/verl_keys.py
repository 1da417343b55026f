"""What verl calls a setting and what MegaPPO calls it: tables only."""

from collections.abc import Callable
from typing import Any

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"


class NoCounterpart(ValueError):
    """A value that MegaPPO has no word for; the message says what to do."""


#: verl key -> MegaPPO key with the same value
RENAMED: dict[str, str] = {
    f"{_MODEL}.path": "model.path",
    f"{_MODEL}.tokenizer_path": "model.tokenizer_path",
    "data.tokenizer": "model.tokenizer_path",
    f"{_MODEL}.custom_chat_template": "model.chat_template",
    "critic.model.path": "critic.path",
    f"{_REF}.model.path": "reference.path",
    f"{_ROLLOUT}.n": "rollout.n",
    f"{_ROLLOUT}.temperature": "rollout.temperature",
    f"{_ROLLOUT}.top_p": "rollout.top_p",
    f"{_ROLLOUT}.val_kwargs.n": "rollout.val.n",
    f"{_ROLLOUT}.val_kwargs.top_p": "rollout.val.top_p",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": "actor.log_prob_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": "actor.log_prob_max_token_len_per_gpu",
    f"{_REF}.log_prob_micro_batch_size_per_gpu": "reference.log_prob_micro_batch_size_per_gpu",
    f"{_REF}.log_prob_max_token_len_per_gpu": "reference.log_prob_max_token_len_per_gpu",
    "trainer.total_epochs": "trainer.total_epochs",
    "trainer.total_training_steps": "trainer.total_iterations",
    "trainer.project_name": "trainer.project_name",
    "trainer.experiment_name": "trainer.experiment_name",
    "trainer.default_local_dir": "trainer.output_dir",
    "trainer.val_before_train": "trainer.val_before_train",
    "trainer.critic_warmup": "trainer.critic_warmup",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.log_val_generations": "trainer.log_val_samples",
    "trainer.seed": "trainer.seed",
    "data.seed": "trainer.seed",
    "actor_rollout_ref.nccl_timeout": "trainer.distributed_timeout_s",
    "data.prompt_key": "data.prompt_key",
    "data.train_batch_size": "data.train_batch_size",
    "data.val_batch_size": "data.val_batch_size",
    "data.max_prompt_length": "data.max_prompt_length",
    "data.max_response_length": "data.max_response_length",
    "data.shuffle": "data.shuffle",
    "data.filter_overlong_prompts": "data.filter_overlong_prompts",
    f"{_ACTOR}.loss_scale_factor": "actor.loss_agg_norm_length",
}

for _name in (
    "ppo_epochs", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz",
    "ppo_max_token_len_per_gpu", "shuffle", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "cliprange",
    "cliprange_low", "cliprange_high", "clip_ratio_c", "loss_agg_mode", "entropy_coeff", "use_kl_loss",
    "kl_loss_coef", "kl_loss_type",
):  # fmt: skip
    RENAMED[f"{_ACTOR}.{_name}"] = f"actor.{_name.replace('cliprange', 'clip_ratio')}"
for _name in (
    "ppo_epochs", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz",
    "ppo_max_token_len_per_gpu", "shuffle", "cliprange_value", "loss_agg_mode",
):  # fmt: skip
    RENAMED[f"critic.{_name}"] = f"critic.{_name}"
for _name in (
    "gamma", "lam", "norm_adv_by_std_in_grpo", "use_kl_in_reward", "kl_penalty", "kl_ctrl.type",
    "kl_ctrl.kl_coef", "kl_ctrl.horizon", "kl_ctrl.target_kl",
):  # fmt: skip
    RENAMED[f"algorithm.{_name}"] = f"algorithm.{_name}"
    if _name.startswith("kl_ctrl"):
        RENAMED[f"critic.{_name}"] = f"algorithm.{_name}"  # where old versions had it
for _verl, _ours in (
    (f"{_ACTOR}.megatron", "actor"),
    (f"{_REF}.megatron", "reference"),
    ("critic.megatron", "critic"),
):
    for _name in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
        "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
        "sequence_parallel", "use_distributed_optimizer",
    ):  # fmt: skip
        RENAMED[f"{_verl}.{_name}"] = f"{_ours}.parallel.{_name}"
    for _name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        RENAMED[f"{_verl}.override_transformer_config.{_name}"] = f"{_ours}.parallel.{_name}"
    RENAMED[f"{_verl}.override_transformer_config.recompute_granularity"] = f"{_ours}.parallel.recompute"
for _verl, _ours in ((_ACTOR, "actor"), ("critic", "critic")):
    for _name, _target in (
        ("optim.lr", "lr"), ("optim.weight_decay", "weight_decay"), ("optim.betas", "betas"),
        ("optim.eps", "eps"), ("optim.clip_grad", "max_grad_norm"), ("grad_clip", "max_grad_norm"),
        ("max_grad_norm", "max_grad_norm"), ("optim.max_grad_norm", "max_grad_norm"),
        ("optim.min_lr_ratio", "min_lr_ratio"),
    ):  # fmt: skip
        RENAMED[f"{_verl}.{_name}"] = f"{_ours}.optim.{_target}"
for _verl in (
    "reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
):  # fmt: skip
    for _name, _target in (
        ("enable", "enabled"),
        ("len", "buffer_len"),
        ("penalty_factor", "penalty_factor"),
    ):
        RENAMED[f"{_verl}.{_name}"] = f"algorithm.reward_shaping.overlong.{_target}"


def _choice(table: dict[str, Any], otherwise: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        try:
            return table[str(value)]
        except KeyError:
            raise NoCounterpart(otherwise) from None

    return convert


def _file_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _period(value: Any) -> Any:
    return -1 if isinstance(value, int) and value <= 0 else value


def _top_k(value: Any) -> Any:
    return -1 if value == 0 else value


def _unless_negative(value: Any) -> Any:
    return None if isinstance(value, int) and value < 0 else value


def _share(value: Any) -> Any:
    return None if value == 0 else value


def _recompute(value: Any) -> str | None:
    return "full" if value else None


def _loggers(value: Any) -> list[str]:
    known = {"console": "console", "tensorboard": "tensorboard", "file": "jsonl"}
    names = _file_list(value)
    kept = [known[name] for name in map(str, names) if name in known]
    return kept or ["console"]


_DTYPE = _choice(
    {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"},
    "only fp32 and bf16 are supported",
)
_ESTIMATOR = _choice(
    {
        "gae": "gae", "grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo",
        "reinforce_plus_plus": "reinforce_plus_plus", "remax": "remax",
        "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    },
    "MegaPPO has gae, grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax",
)  # fmt: skip
_SCHEDULE = _choice(
    {"constant": "constant", "linear": "linear", "cosine": "cosine"}, "MegaPPO has constant, linear, cosine"
)
_LOSS = _choice({"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}, "MegaPPO has ppo (vanilla), gspo, cispo")
_RESUME = _choice({"auto": "auto", "disable": "never"}, "copy the checkpoint into trainer.output_dir instead")

#: verl key -> (MegaPPO key, conversion); a converted value of None means: as MegaPPO's default
CONVERTED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "data.train_files": ("data.train_files", _file_list),
    "data.val_files": ("data.val_files", _file_list),
    "data.val_max_samples": ("data.val_max_samples", _unless_negative),
    "trainer.save_freq": ("trainer.save_freq", _period),
    "trainer.test_freq": ("trainer.test_freq", _period),
    "trainer.logger": ("trainer.logger", _loggers),
    "trainer.resume_mode": ("trainer.resume", _RESUME),
    "algorithm.adv_estimator": ("algorithm.adv_estimator", _ESTIMATOR),
    f"{_ACTOR}.policy_loss.loss_mode": ("actor.policy_loss", _LOSS),
    f"{_ROLLOUT}.top_k": ("rollout.top_k", _top_k),
    f"{_ROLLOUT}.val_kwargs.top_k": ("rollout.val.top_k", _top_k),
    f"{_ROLLOUT}.dtype": ("rollout.dtype", _DTYPE),
    f"{_ACTOR}.megatron.dtype": ("model.dtype", _DTYPE),
    f"{_ACTOR}.fsdp_config.dtype": ("model.dtype", _DTYPE),
    f"{_MODEL}.enable_gradient_checkpointing": ("actor.parallel.recompute", _recompute),
    "critic.model.enable_gradient_checkpointing": ("critic.parallel.recompute", _recompute),
}
for _verl, _ours in ((f"{_ACTOR}.optim", "actor.optim"), ("critic.optim", "critic.optim")):
    CONVERTED[f"{_verl}.lr_warmup_steps"] = (f"{_ours}.lr_warmup_steps", _unless_negative)
    CONVERTED[f"{_verl}.lr_warmup_steps_ratio"] = (f"{_ours}.lr_warmup_ratio", _share)
    for _name in ("warmup_style", "lr_scheduler_type", "lr_decay_style"):
        CONVERTED[f"{_verl}.{_name}"] = (f"{_ours}.lr_scheduler", _SCHEDULE)

_SERVER = "generation is embedded in the training process: there is no server to set up"
_KERNELS = "MegaPPO chooses its own kernels and never pads"
_LORA = "LoRA is not supported: all weights are trained"
_NO_RM = "add the reward model to `rewards` as {type: model, path: FOLDER}, see docs/reward_models.md"

#: (pattern of verl keys, why they are dropped), first match wins; switched-off values are dropped silently
DROPPED: tuple[tuple[str, str], ...] = (
    ("*._target_", ""),
    ("*.rollout_n", ""),
    ("*.load_weight", ""),
    ("actor_rollout_ref.hybrid_engine", ""),
    ("data.reward_fn_key", ""),
    ("*.optim.total_training_steps", ""),
    ("critic.model.tokenizer_path", ""),
    ("critic.enable", ""),
    ("*.optim.*", "the optimizer is AdamW with the keys of `optim`"),
    ("*.router_replay.*", "MoE router replay is not available"),
    ("*.mtp.*", "multi-token prediction is not available"),
    ("*.use_shm", "models are read from where they are"),
    ("*.nccl_timeout", "trainer.distributed_timeout_s holds for all roles"),
    ("trainer.v1.*", "internals of verl's trainer"),
    ("trainer.use_v1", "internals of verl's trainer"),
    ("trainer.device", "the device is found automatically"),
    ("algorithm.use_pf_ppo", "PF-PPO is not available"),
    ("algorithm.pf_ppo.*", ""),
    ("algorithm.filter_groups.*", "has no counterpart in algorithm.dynamic_sampling"),
    ("algorithm.rollout_correction.*", "has no counterpart in algorithm.correction"),
    ("*.profiler.*", "there is no profiler to set up"),
    ("*.profile.*", "there is no profiler to set up"),
    ("global_profiler.*", "there is no profiler to set up"),
    ("*.strategy", "training always runs on Megatron"),
    ("model_engine", "training always runs on Megatron"),
    ("*.fsdp_config.*", "Megatron layouts (`parallel`) replace FSDP"),
    ("critic.fsdp.*", "Megatron layouts (`parallel`) replace FSDP"),
    ("*.ulysses_sequence_parallel_size", "Megatron layouts (`parallel`) replace FSDP and Ulysses"),
    ("*.megatron.*_offload", "offloading is not available"),
    ("*.megatron.*", "the engine sets this itself"),
    ("*.use_remove_padding", _KERNELS),
    ("*.use_torch_compile", _KERNELS),
    ("*.use_fused_kernels", _KERNELS),
    ("*.fused_kernel_options.*", _KERNELS),
    ("*.use_liger", _KERNELS),
    ("*.tiled_mlp.*", _KERNELS),
    ("*.entropy_from_logits_*", _KERNELS),
    ("*.entropy_checkpointing", _KERNELS),
    ("*.pad_to_length", _KERNELS),
    ("*.use_prefix_grouper", _KERNELS),
    ("*.calculate_entropy", "entropy is always reported"),
    ("*.data_loader_seed", "trainer.seed seeds everything"),
    ("*.checkpoint.*", "a checkpoint always holds all that resuming needs"),
    ("*.lora*", _LORA),
    ("*.target_modules", ""),
    ("*.exclude_modules", ""),
    ("*.policy_loss.*", "parameters of policy losses that MegaPPO does not have"),
    ("*.forward_max_token_len_per_gpu", "values are computed with the ppo_ sizes"),
    ("*.forward_micro_batch_size*", "values are computed with the ppo_ sizes"),
    (f"{_ROLLOUT}.log_prob_micro_batch_size", "counts samples over all GPUs; use the key with _per_gpu"),
    (f"{_ROLLOUT}.multi_turn.*", "multi-turn rollouts are not available"),
    (f"{_ROLLOUT}.agent.*", "agent loops are not available"),
    (f"{_ROLLOUT}.calculate_log_probs", ""),
    (f"{_ROLLOUT}.*", _SERVER),
    ("trainer.balance_batch", "token counts are always balanced"),
    ("trainer.rollout_data_dir", "set rollout.record_dir if you want rollouts kept (in MegaPPO's format)"),
    ("trainer.max_critic_ckpt_to_keep", "a checkpoint holds all roles: trainer.max_ckpt_to_keep"),
    ("trainer.max_ref_ckpt_to_keep", ""),
    ("trainer.ray_*", "MegaPPO runs without Ray"),
    ("ray_*", "MegaPPO runs without Ray"),
    ("transfer_queue.*", "MegaPPO runs without Ray"),
    ("trainer.resume_from_path", "resuming reads trainer.output_dir"),
    ("reward_model.sandbox_fusion.*", ""),
    ("reward_model.reward_manager", "scores come from the list `rewards`"),
    ("reward_manager.*", "scores come from the list `rewards`"),
    ("reward.reward_manager.*", "scores come from the list `rewards`"),
    ("reward_model.*", _NO_RM),
    ("reward.*", _NO_RM),
    ("sandbox_fusion.*", "score with a function in `rewards`"),
    ("distillation.*", "distillation is not available"),
    ("data.truncation", "overlong prompts are dropped or an error (data.filter_overlong_prompts)"),
    ("data.return_*", "prompts are always kept as tokens and chat"),
    ("data.*_workers", "the number of loader processes is not a setting"),
    ("data.image_*", "images are not supported"),
    ("data.video_*", "videos are not supported"),
    ("data.audio_*", "audio is not supported"),
    ("*.trust_remote_code", "code from model folders is never run"),
    ("*.external_lib", "code from model folders is never run"),
)

#: patterns whose *switched-on* value is verl's harmless default: never worth a line
HARMLESS: dict[str, Any] = {
    "data.truncation": "error",
    "data.image_key": "images",
    "data.video_key": "videos",
    "data.audio_key": "audios",
    "data.image_patch_size": 14,
    "actor_rollout_ref.model.lora_alpha": 16,
}

#: MegaPPO key -> verl's default, where it differs from MegaPPO's
VERL_DEFAULTS: dict[str, Any] = {
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "model.dtype": "bf16",
    "actor.ppo_epochs": 1,
    "actor.ppo_mini_batch_size": 256,
    "actor.shuffle": False,
    "actor.optim.weight_decay": 0.01,
    "critic.optim.weight_decay": 0.01,
    "critic.optim.max_grad_norm": 1.0,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "algorithm.lam": 1.0,
    "data.train_batch_size": 1024,
    "data.filter_overlong_prompts": False,
}

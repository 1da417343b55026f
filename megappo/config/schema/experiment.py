"""The root of the YAML file, and which keys inherit from which when they are null."""

from typing import Any, Self

from megappo.config.schema.actor import ActorConfig
from megappo.config.schema.algorithm import AlgorithmConfig
from megappo.config.schema.base import Section, key, sub
from megappo.config.schema.critic import CriticConfig
from megappo.config.schema.data import DataConfig
from megappo.config.schema.guard import GuardConfig, drift_rule
from megappo.config.schema.model import ModelConfig
from megappo.config.schema.offline import OfflineConfig
from megappo.config.schema.reference import ReferenceConfig
from megappo.config.schema.reward_model import RewardModelConfig
from megappo.config.schema.rewards import RewardConfig
from megappo.config.schema.rollout import RolloutConfig
from megappo.config.schema.schedules import SCHEDULABLE, ScheduleConfig
from megappo.config.schema.sft import SftConfig
from megappo.config.schema.trainer import TrainerConfig

#: estimators that compare the responses of one prompt with each other, so they need rollout.n >= 2
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline")

#: key that may be null -> key whose value it then takes; in an order in which one pass resolves all
INHERITS: dict[str, str] = {
    "model.tokenizer_path": "model.path",
    "actor.parallel.expert_tensor_parallel_size": "actor.parallel.tensor_model_parallel_size",
    "actor.log_prob_micro_batch_size_per_gpu": "actor.ppo_micro_batch_size_per_gpu",
    "actor.log_prob_max_token_len_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "actor.clip_ratio_low": "actor.clip_ratio",
    "actor.clip_ratio_high": "actor.clip_ratio",
    "actor.loss_agg_norm_length": "data.max_response_length",
    "critic.path": "model.path",
    "critic.parallel": "actor.parallel",
    "critic.parallel.expert_tensor_parallel_size": "critic.parallel.tensor_model_parallel_size",
    "critic.ppo_epochs": "actor.ppo_epochs",
    "critic.ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    "critic.ppo_micro_batch_size_per_gpu": "actor.ppo_micro_batch_size_per_gpu",
    "critic.use_dynamic_bsz": "actor.use_dynamic_bsz",
    "critic.ppo_max_token_len_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "critic.loss_agg_mode": "actor.loss_agg_mode",
    "critic.shuffle": "actor.shuffle",
    "reference.path": "model.path",
    "reference.parallel": "actor.parallel",
    "reference.parallel.expert_tensor_parallel_size": "reference.parallel.tensor_model_parallel_size",
    "reference.log_prob_micro_batch_size_per_gpu": "actor.log_prob_micro_batch_size_per_gpu",
    "reference.log_prob_max_token_len_per_gpu": "actor.log_prob_max_token_len_per_gpu",
    "rollout.dtype": "model.dtype",
    "algorithm.lam_critic": "algorithm.lam",
    "sft.parallel.expert_tensor_parallel_size": "sft.parallel.tensor_model_parallel_size",
    "reward_model.parallel.expert_tensor_parallel_size": "reward_model.parallel.tensor_model_parallel_size",
}


class ExperimentConfig(Section):
    """One experiment: what `megappo train`, `megappo sft` (section `sft`) and `megappo reward-model` read."""

    trainer: TrainerConfig = sub(TrainerConfig, "How long to run, what to save, where to log.")
    model: ModelConfig = key(..., "The language model that is trained.")
    actor: ActorConfig = sub(ActorConfig, "The policy and its update.")
    critic: CriticConfig = sub(CriticConfig, "The value model; used with adv_estimator gae only.")
    reference: ReferenceConfig = sub(
        ReferenceConfig, "The frozen policy; used with use_kl_loss or use_kl_in_reward only."
    )
    rollout: RolloutConfig = sub(RolloutConfig, "Who generates the responses and how they are sampled.")
    offline: OfflineConfig = sub(OfflineConfig, "PPO on a fixed data set of responses.")
    algorithm: AlgorithmConfig = sub(AlgorithmConfig, "Advantages, KL in the reward, shaping, correction.")
    rewards: list[RewardConfig] = key([], "Reward functions; a response's score is their weighted sum.")
    data: DataConfig = sub(DataConfig, "Prompts for training and validation.")
    schedules: dict[str, ScheduleConfig] = key({}, "Values that change during the run, by the key they belong to.")
    guard: GuardConfig = sub(GuardConfig, "Rules over the metrics, and what they do when something goes wrong.")
    sft: SftConfig | None = key(None, "Supervised fine-tuning, for `megappo sft` only.")
    reward_model: RewardModelConfig | None = key(
        None, "Training a reward model on preference pairs, for `megappo reward-model` only."
    )

    @property
    def needs_critic(self) -> bool:
        """A value model exists only for GAE."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def needs_reference(self) -> bool:
        """A frozen policy exists only where some KL to it is used."""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def offline_data(self) -> bool:
        """The responses come from the rows of data.train_files."""
        return self.rollout.engine == "recorded" and self.rollout.replay_dir is None

    def resolved(self) -> Self:
        """A copy in which every key of `INHERITS` is concrete and the guard's preset is written out. Idempotent.

        A key that inherits its value from another one inherits that one's schedule too.
        """
        out = self.model_copy(deep=True)
        own = [drift_rule(self.offline.max_drift)] if self.offline_data and self.offline.fallback != "none" else []
        out.guard = out.guard.expanded(own)
        if out.trainer.rollout_lag and "mode" not in out.algorithm.correction.model_fields_set:
            out.algorithm.correction.mode = "token"  # old samples need their weights, unless the user says otherwise
        for name, source in INHERITS.items():
            owner, field = _owner(out, name)
            if owner is not None and getattr(owner, field) is None:
                value = _get(out, source)
                if isinstance(value, Section):
                    value = value.model_copy(deep=True)
                setattr(owner, field, value)
                if source in out.schedules and name in SCHEDULABLE:
                    out.schedules.setdefault(name, out.schedules[source].model_copy(deep=True))
        for reward in out.rewards:
            if reward.type == "model":
                _inherit_from_actor(reward, out.actor)
        return out


def _inherit_from_actor(reward: RewardConfig, actor: ActorConfig) -> None:
    """A reward model's null keys take the actor's values, as the reference's do."""
    if reward.parallel is None:
        reward.parallel = actor.parallel.model_copy(deep=True)
    elif reward.parallel.expert_tensor_parallel_size is None:
        reward.parallel.expert_tensor_parallel_size = reward.parallel.tensor_model_parallel_size
    if reward.micro_batch_size_per_gpu is None:
        reward.micro_batch_size_per_gpu = actor.log_prob_micro_batch_size_per_gpu
    if reward.max_token_len_per_gpu is None:
        reward.max_token_len_per_gpu = actor.log_prob_max_token_len_per_gpu


def _owner(root: Section, dotted: str) -> tuple[Any, str]:
    """The section that holds a dotted key (None when an optional section is absent) and the key's name."""
    *sections, name = dotted.split(".")
    return _get(root, ".".join(sections)), name


def _get(root: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        root = None if root is None else getattr(root, part)
    return root

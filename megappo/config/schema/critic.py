"""`critic`: the value model (only with algorithm.adv_estimator gae)."""

from megappo.config.schema.base import LossAggMode, Section, key, sub
from megappo.config.schema.optim import CriticOptimConfig
from megappo.config.schema.parallel import ParallelConfig


class CriticConfig(Section):
    """Null means: as the actor. After `load_config` no inherited key is null."""

    path: str | None = key(None, "Hugging Face folder of the trunk; null: model.path.", path=True)
    parallel: ParallelConfig | None = key(
        None, "Layout of the critic over the ranks; null: actor.parallel; given: a layout of its own."
    )
    optim: CriticOptimConfig = sub(CriticOptimConfig, "Optimizer of the critic.")
    ppo_epochs: int | None = key(None, "Passes over each rollout batch (epochs); null: actor.ppo_epochs.", ge=1)
    ppo_mini_batch_size: int | None = key(
        None, "Prompts per optimizer step, over all ranks (prompts); null: actor.ppo_mini_batch_size.", ge=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples per forward/backward on a rank (samples); null: actor.ppo_micro_batch_size_per_gpu.",
        ge=1,
    )
    use_dynamic_bsz: bool | None = key(None, "Pack samples by token budget; null: actor.use_dynamic_bsz.")
    ppo_max_token_len_per_gpu: int | None = key(
        None, "Token budget of a forward/backward (tokens); null: actor.ppo_max_token_len_per_gpu.", ge=1
    )
    cliprange_value: float = key(0.5, "Values are clipped to old value ± this in the value loss.", gt=0)
    loss_agg_mode: LossAggMode | None = key(None, "How token losses become one number; null: actor.loss_agg_mode.")
    shuffle: bool | None = key(None, "Draw new mini-batches in every PPO epoch; null: actor.shuffle.")

"""`reference`: the frozen policy that KL is measured against (only with a KL loss or KL in the reward)."""

from megappo.config.schema.base import Section, key
from megappo.config.schema.parallel import ParallelConfig


class ReferenceConfig(Section):
    """Null means: as the actor. After `load_config` no inherited key is null."""

    path: str | None = key(None, "Hugging Face folder of the frozen policy; null: model.path.", path=True)
    parallel: ParallelConfig | None = key(
        None, "Layout of the reference over the ranks; null: actor.parallel; given: a layout of its own."
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward on a rank (samples); null: actor.log_prob_micro_batch_size_per_gpu.", ge=1
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "Token budget of a forward on a rank (tokens); null: actor.log_prob_max_token_len_per_gpu.",
        ge=1,
    )

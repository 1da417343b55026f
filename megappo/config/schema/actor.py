"""`actor`: the policy and its update."""

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from megappo.config.schema.base import LossAggMode, Section, key, sub
from megappo.config.schema.optim import OptimConfig
from megappo.config.schema.parallel import ParallelConfig

KlType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KlLossType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip


class SftMixConfig(Section):
    """Supervised examples in every optimizer step of the actor, against forgetting."""

    files: list[str] = key([], "Files (.parquet or .jsonl) with examples; none: off.", path=True)
    fraction: float = key(0.05, "Examples per step, as a share of its samples, rounded up; 0 to 1.", gt=0, le=1)
    coef: float = key(1.0, "Weight of the examples' negative log-likelihood (token mean) in the loss.", ge=0)
    prompt_key: str = key("prompt", "Column with the prompt: chat messages or a string.")
    response_key: str = key("response", "Column with the response, the text that is learnt.")
    max_length: int | None = key(
        None, "Longest example (tokens); null: data.max_prompt_length + data.max_response_length.", ge=2
    )


class ActorConfig(Section):
    """Policy loss, batch sizes, layout and optimizer of the actor."""

    ALIASES: ClassVar[dict[str, str]] = {
        "cliprange": "clip_ratio",
        "cliprange_low": "clip_ratio_low",
        "cliprange_high": "clip_ratio_high",
    }

    parallel: ParallelConfig = sub(ParallelConfig, "Layout of the actor over the ranks.")
    optim: OptimConfig = sub(OptimConfig, "Optimizer of the actor.")

    ppo_epochs: int = key(4, "Passes over each rollout batch (epochs).", ge=1)
    ppo_mini_batch_size: int = key(
        64, "Prompts per optimizer step, over all ranks (prompts; times rollout.n samples).", ge=1
    )
    ppo_micro_batch_size_per_gpu: int = key(
        4,
        "Samples per forward/backward on a data-parallel rank; unused with use_dynamic_bsz (samples).",
        ge=1,
    )
    use_dynamic_bsz: bool = key(False, "Pack samples by token budget instead of by a fixed number.")
    ppo_max_token_len_per_gpu: int = key(
        16384,
        "Token budget of a forward/backward on a data-parallel rank with use_dynamic_bsz (tokens).",
        ge=1,
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward for log-probs alone (samples); null: ppo_micro_batch_size_per_gpu.", ge=1
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None, "Token budget for log-probs alone (tokens); null: ppo_max_token_len_per_gpu.", ge=1
    )
    shuffle: bool = key(True, "Draw mini-batches at random, and visit them in a new order in every PPO epoch.")

    policy_loss: Literal["ppo", "gspo", "cispo", "reinforce", "rebel"] = key(
        "ppo",
        "Loss: clipped PPO, sequence-level GSPO, CISPO, plain REINFORCE, or REBEL (regression on the reward "
        "differences of a prompt's responses).",
    )
    rebel_eta: float = key(
        1.0, "Step of REBEL: the log-ratios of two responses are to differ by this times their rewards.", gt=0
    )
    clip_ratio: float = key(0.2, "PPO clip range: the ratio is clipped to 1 ± this.", gt=0)
    clip_ratio_low: float | None = key(None, "Lower clip range: ratio >= 1 - this; null: clip_ratio.", gt=0)
    clip_ratio_high: float | None = key(None, "Upper clip range: ratio <= 1 + this; null: clip_ratio.", gt=0)
    clip_ratio_c: float | None = key(
        3.0, "Dual clip: where the advantage is negative the loss is at most -c * A; c > 1; null: off.", gt=1
    )
    loss_agg_mode: LossAggMode = key("token-mean", "How token losses become one number (docs/algorithms.md).")
    loss_agg_norm_length: int | None = key(
        None, "Constant H of seq-mean-token-sum-norm (tokens); null: data.max_response_length.", ge=1
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus; 0: entropy has no gradient.", ge=0)
    use_kl_loss: bool = key(False, "Add the KL to the reference to the actor's loss (needs the reference).")
    kl_loss_coef: float = key(0.001, "Weight of the KL loss.", ge=0)
    kl_loss_type: KlLossType = key(
        "low_var_kl",
        "KL estimator: kl=k1, abs, mse=k2, low_var_kl=k3; suffix '+': its value with the gradient of k2.",
    )

    sft_mix: SftMixConfig = sub(SftMixConfig, "Supervised examples in the update, against forgetting.")

    @model_validator(mode="before")
    @classmethod
    def _rename_aliases(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for alias, name in cls.ALIASES.items():
            if alias in data:
                if name in data:
                    raise ValueError(f"`{alias}` is another name for `{name}`; give only one of them")
                data[name] = data.pop(alias)
        return data

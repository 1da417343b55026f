"""`algorithm`: advantages, KL in the reward, reward shaping, off-policy correction."""

from typing import Literal

from megappo.config.schema.actor import KlType
from megappo.config.schema.base import FloatPair, Section, key, sub

AdvEstimator = Literal[
    "gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"
]  # fmt: skip


class KlCtrlConfig(Section):
    """Controller of the KL coefficient in the reward."""

    type: Literal["fixed", "adaptive", "power"] = key(
        "fixed", "fixed: constant; adaptive: proportional steps to target_kl; power: times (KL/target)^power."
    )
    kl_coef: float = key(0.001, "Coefficient, the starting one if it adapts.", ge=0)
    target_kl: float = key(0.1, "KL per token that adaptive and power steer to (nats).", gt=0)
    horizon: int = key(10000, "Samples over which `adaptive` corrects an error (samples).", ge=1)
    power: float = key(1.5, "Exponent of `power`.", gt=0)


class OverlongConfig(Section):
    """DAPO's soft penalty for responses that come close to the length limit."""

    enabled: bool = key(False, "Penalise overlong responses.")
    buffer_len: int = key(
        128,
        "The penalty grows linearly over the last so many tokens before max_response_length (tokens).",
        ge=1,
    )
    penalty_factor: float = key(1.0, "Penalty at the length limit (reward).", ge=0)


class RewardShapingConfig(Section):
    """How a response's one score becomes rewards of its tokens."""

    credit: Literal["last", "uniform", "exponential"] = key(
        "last", "Put the score on the last token, spread it evenly, or with exponential decay from the end."
    )
    decay: float = key(0.95, "Decay per token of `exponential`, 0 to 1.", gt=0, le=1)
    clip: FloatPair | None = key(None, "Scores are clipped to [low, high] (reward); null: not clipped.")
    overlong: OverlongConfig = sub(OverlongConfig, "Penalty for overlong responses.")


class CorrectionConfig(Section):
    """Importance weights for the mismatch between the generating and the training model."""

    mode: Literal["none", "token", "sequence", "geometric_rejection", "band"] = key(
        "none",
        "none; token or sequence: weights cut at clip_max; geometric_rejection drops samples and band masks "
        "tokens outside [band_low, band_high].",
    )
    clip_max: float = key(2.0, "Largest importance weight.", gt=0)
    band_low: float = key(0.5, "Smallest accepted probability ratio.", ge=0)
    band_high: float = key(2.0, "Largest accepted probability ratio.", gt=0)


class DynamicSamplingConfig(Section):
    """DAPO: train on prompts whose responses differ in score, and draw others for those that do not."""

    enabled: bool = key(False, "Leave out prompts whose responses all score the same, and draw others.")
    max_rounds: int = key(3, "Rounds of generation in an iteration, the first included (rounds).", ge=1)
    signal: Literal["score", "success"] = key(
        "score", "What has to differ between a prompt's responses: the score, or whether it is at least 0.8."
    )
    shortfall: Literal["fill", "fail"] = key(
        "fill", "When the rounds bring too few: fill the batch with prompts without signal, or fail."
    )

    @property
    def rounds(self) -> int:
        """The most rounds of generation in an iteration."""
        return self.max_rounds if self.enabled else 1


class AlgorithmConfig(Section):
    """From scores to advantages."""

    adv_estimator: AdvEstimator = key("gae", "Advantage estimator; only gae trains a critic.")
    gamma: float = key(1.0, "Discount per token, 0 to 1.", ge=0, le=1)
    lam: float = key(0.95, "Lambda of GAE, 0 to 1.", ge=0, le=1)
    lam_critic: float | None = key(
        None, "Lambda of the returns that the critic learns (decoupled GAE), 0 to 1; null: lam.", ge=0, le=1
    )
    adaptive_lam_alpha: float | None = key(
        None, "Length-adaptive lambda 1 - 1/(alpha * length) for the advantages; null: lam.", gt=0
    )
    norm_adv_by_std_in_grpo: bool = key(True, "Divide GRPO's advantages by the group's standard deviation.")
    normalize_advantages: bool = key(True, "Whiten advantages over the global batch (gae, reinforce_plus_plus*).")
    bootstrap_truncated: bool = key(
        False, "Continue GAE with the value at the cut for responses that hit the length limit."
    )
    use_kl_in_reward: bool = key(
        False, "Subtract coefficient * KL to the reference from token rewards (needs the reference)."
    )
    kl_penalty: KlType = key("kl", "KL estimator in the reward: kl=k1, abs, mse=k2, low_var_kl=k3.")
    kl_ctrl: KlCtrlConfig = sub(KlCtrlConfig, "Controller of the KL coefficient in the reward.")
    reward_shaping: RewardShapingConfig = sub(RewardShapingConfig, "From scores to token rewards.")
    correction: CorrectionConfig = sub(CorrectionConfig, "Correction of the rollout/training mismatch.")
    dynamic_sampling: DynamicSamplingConfig = sub(DynamicSamplingConfig, "Which prompts are trained on (DAPO).")

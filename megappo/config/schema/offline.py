"""`offline`: PPO on a fixed data set of responses (rollout.engine recorded, without rollout.replay_dir)."""

from typing import Literal

from megappo.config.schema.base import FloatPair, Section, key


class OfflineConfig(Section):
    """How the rows of data.train_files hold responses, and when to leave them."""

    response_key: str = key(
        "response", "Column with the response: text, chat turns, or a list of rollout.n such responses."
    )
    score_key: str = key("score", "Column with the score (or a list of them), for reward type recorded.")
    logprobs_key: str = key(
        "logprobs", "Column with the behaviour policy's log-prob of each response token (or a list of such lists)."
    )
    chosen_key: str = key("chosen", "Column with the preferred response of a preference pair.")
    rejected_key: str = key("rejected", "Column with the other response of a preference pair.")
    pair_scores: FloatPair = key(
        (1.0, -1.0), "Scores of the chosen and the rejected response, for reward type recorded."
    )
    behaviour: Literal["auto", "policy"] = key(
        "auto",
        "Log-probs of the policy that wrote the responses. auto: recorded ones where all rows have them, else as "
        "policy; policy: those of the starting policy, computed once.",
    )
    fallback: Literal["none", "embedded"] = key(
        "none", "embedded: generate from the policy instead once it has drifted further than max_drift."
    )
    max_drift: float = key(
        0.02, "Largest KL of the policy to the behaviour policy, rollout_corr/k3_kl (nats per token).", gt=0
    )

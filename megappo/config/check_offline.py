"""Checks of offline PPO: responses that come from a data set."""

from collections.abc import Iterator

from megappo.config.problems import Problem
from megappo.config.schema.experiment import ExperimentConfig
from megappo.config.schema.offline import OfflineConfig


def check_offline(config: ExperimentConfig) -> Iterator[Problem]:
    """Problems of `offline`, and of reward type `recorded`, which needs it."""
    recorded = [i for i, reward in enumerate(config.rewards) if reward.type == "recorded"]
    if not config.offline_data:
        for i in recorded:
            text = "scores in the data belong to offline PPO; set rollout.engine=recorded or use another reward"
            yield Problem(f"rewards.{i}.type", text, "recorded")
        if config.offline != OfflineConfig():
            text = "is read with rollout.engine=recorded and without rollout.replay_dir only"
            yield Problem("offline", text, note=True)
        return
    if config.algorithm.adv_estimator == "remax":
        text = "remax needs greedy answers, which a data set does not hold; use gae, grpo or rloo"
        yield Problem("algorithm.adv_estimator", text, config.algorithm.adv_estimator)
    if not recorded:
        return
    if config.offline.fallback != "none":
        text = "generated responses have no recorded score; use rewards that can score them, or fallback none"
        yield Problem("offline.fallback", text, config.offline.fallback)
    if config.data.val_files and len(recorded) == len(config.rewards):
        text = "no reward can score the answers to them; add one, or remove the files"
        yield Problem("data.val_files", text, config.data.val_files)

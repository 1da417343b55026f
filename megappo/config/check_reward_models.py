"""Do the reward models among the rewards have a head, and the tokenizer of the policy?"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megappo.config.model_folder import ModelFacts
from megappo.config.problems import Problem
from megappo.config.schema.experiment import ExperimentConfig

#: one of these decides which text a token id stands for
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check_reward_models(config: ExperimentConfig, facts: Mapping[str, ModelFacts | None]) -> Iterator[Problem]:
    """Problems of the entries of type `model`; `facts` of the roles `actor` and `rewards.<i>`, where known."""
    for i, reward in enumerate(config.rewards):
        if reward.type != "model":
            if reward.parallel is not None:
                yield Problem(f"rewards.{i}.parallel", f"type {reward.type} has no layout; remove it")
            continue
        key, path = f"rewards.{i}.path", reward.path
        if not path:
            yield Problem(key, "is required for type model; give the folder that `megappo reward-model` exported", path)
            continue
        mine, actor = facts.get(f"rewards.{i}"), facts.get("actor")
        if mine is None:
            continue  # said already
        if not mine.scores:
            text = "is a language model without a scalar head; give the folder that `megappo reward-model` exported"
            yield Problem(key, text, path)
            continue
        policy = config.model.tokenizer_path or config.model.path
        small = bool(actor and actor.vocabulary and mine.vocabulary and mine.vocabulary < actor.vocabulary)
        if small or not same_tokenizer(path, policy):
            text = "its tokenizer is not the policy's, so it cannot score token ids; serve it behind type: remote"
            yield Problem(key, text, path)


def same_tokenizer(one: str, other: str) -> bool:
    """Does every token id stand for the same text in both folders? False if neither can be compared."""
    for name in _VOCABULARIES:
        files = Path(one) / name, Path(other) / name
        if not any(os.path.isfile(file) for file in files):
            continue
        try:
            contents = [file.read_bytes() for file in files]
            return contents[0] == contents[1] or _vocabulary(contents[0]) == _vocabulary(contents[1])
        except (OSError, ValueError):
            return False
    return False


def _vocabulary(content: bytes) -> Any:
    """What of a tokenizer.json says which text an id stands for; padding and truncation may differ."""
    tree = json.loads(content)
    return [tree.get(part) for part in ("model", "added_tokens")] if "model" in tree else tree

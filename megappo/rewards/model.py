"""How a reward model's raw score becomes a reward: the numbers that are stored with the model."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megappo.errors import UserError

REWARD_FILE = "megappo_reward.json"


@dataclass(frozen=True)
class RewardScale:
    """`clip((score − mean) / std)`; `clip` is [low, high], None: not clipped."""

    mean: float = 0.0
    std: float = 1.0
    clip: tuple[float, float] | None = None

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Rewards of raw scores, float64, any shape; NaN stays NaN."""
        rewards = (np.asarray(scores, np.float64) - self.mean) / self.std
        return rewards if self.clip is None else np.clip(rewards, *self.clip)

    def to_json(self, more: dict[str, float]) -> str:
        """The text of `megappo_reward.json`; `more` says how good the model is."""
        return json.dumps(asdict(self) | more, indent=2) + "\n"

    @classmethod
    def read(cls, folder: str | Path) -> RewardScale:
        """What a model's folder says; raw scores where it has no such file (a model that was trained elsewhere).

        Raises UserError for a damaged file.
        """
        file = Path(folder) / REWARD_FILE
        if not file.is_file():
            return cls()
        try:
            tree = json.loads(file.read_text(encoding="utf-8"))
            clip = tree["clip"]
            scale = cls(float(tree["mean"]), float(tree["std"]), None if clip is None else (clip[0], clip[1]))
            if not (math.isfinite(scale.mean) and 0 < scale.std < math.inf and (clip is None or clip[0] < clip[1])):
                raise ValueError("numbers out of range")
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{file} is damaged ({type(error).__name__}: {reason}): export the model again") from None
        return scale

"""`reward_model`: training a scalar reward model on preference pairs, for `megappo reward-model` only."""

from typing import Annotated

from pydantic import AfterValidator

from megappo.config.schema.base import FloatPair, Section, key, ordered, sub
from megappo.config.schema.optim import SftOptimConfig
from megappo.config.schema.parallel import ParallelConfig
from megappo.config.schema.trainer import SaveEvery


def _margin(value: float | str) -> float | str:
    if isinstance(value, str) and value != "data":
        raise ValueError("needs a number, data or null")
    return value


class RewardModelConfig(Section):
    """Everything about the reward model's training that `trainer` and `model` do not say."""

    parallel: ParallelConfig = sub(ParallelConfig, "Layout of the model over the ranks.")
    optim: SftOptimConfig = sub(SftOptimConfig, "Optimizer.")
    train_files: list[str] = key(..., "Files (.parquet or .jsonl) with preference pairs to train on.", path=True)
    val_files: list[str] = key([], "Files (.parquet or .jsonl) with held-out pairs.", path=True)
    prompt_key: str = key("prompt", "Column with the prompt; may be absent where the responses are whole chats.")
    chosen_key: str = key("chosen", "Column with the better response: a string or chat messages.")
    rejected_key: str = key("rejected", "Column with the worse response: a string or chat messages.")
    batch_size: int = key(512, "Pairs per optimizer step, over all ranks (pairs).", ge=1)
    micro_batch_size_per_gpu: int = key(
        1, "Pairs per forward/backward on a rank, two sequences each; unused with use_dynamic_bsz (pairs).", ge=1
    )
    use_dynamic_bsz: bool = key(False, "Pack pairs by token budget instead of by a fixed number.")
    max_token_len_per_gpu: int = key(
        16384,
        "Token budget of a forward/backward on a rank with use_dynamic_bsz, for both sequences of a pair (tokens).",
        ge=1,
    )
    max_length: int = key(1024, "Longest prompt with a response; a pair with a longer one is dropped (tokens).", ge=1)
    total_epochs: int = key(1, "Passes over the training pairs (epochs).", ge=1)
    total_steps: int | None = key(None, "Optimizer steps to run; null: total_epochs decides; wins if given.", ge=1)
    test_freq: SaveEvery = key(-1, "Validate every so many optimizer steps; -1: never.")
    save_freq: SaveEvery = key(-1, "Save a checkpoint every so many optimizer steps; -1: never.")
    export_path: str | None = key(None, "Folder for the final reward model; null: not exported.", path=True)
    margin: Annotated[float | str, AfterValidator(_margin)] | None = key(
        None, "By how much the chosen score has to be higher: a number, or `data`: column `margin`; null: not at all."
    )
    center_coef: float = key(0.0, "Weight of the mean of (chosen + rejected score)^2, which centres scores.", ge=0)
    clip: Annotated[FloatPair, AfterValidator(ordered)] | None = key(
        (-2.0, 2.0), "Stored with the model: where it is used, normalised scores are clipped to it; null: not clipped."
    )
    normalize: bool = key(
        True, "Store mean and std of the scores with the model, which its use subtracts and divides by."
    )
    max_noise: float = key(
        0.12, "Largest share of inconsistent training pairs, 0 to 1; data with more are refused.", ge=0, le=1
    )

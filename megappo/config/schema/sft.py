"""`sft`: supervised fine-tuning, for `megappo sft` only."""

from megappo.config.schema.base import Section, key, sub
from megappo.config.schema.optim import SftOptimConfig
from megappo.config.schema.parallel import ParallelConfig
from megappo.config.schema.trainer import SaveEvery


class SftConfig(Section):
    """Everything about the fine-tuning run that `trainer` and `model` do not say."""

    parallel: ParallelConfig = sub(ParallelConfig, "Layout of the model over the ranks.")
    optim: SftOptimConfig = sub(SftOptimConfig, "Optimizer.")
    train_files: list[str] = key(..., "Files (.parquet or .jsonl) with training examples.", path=True)
    val_files: list[str] = key([], "Files (.parquet or .jsonl) with validation examples.", path=True)
    prompt_key: str = key("prompt", "Column with the prompt: chat messages or a string.")
    response_key: str = key("response", "Column with the response, the text that is learnt.")
    batch_size: int = key(32, "Examples per optimizer step, over all ranks (samples).", ge=1)
    micro_batch_size_per_gpu: int = key(
        4, "Examples per forward/backward on a rank; unused with use_dynamic_bsz (samples).", ge=1
    )
    use_dynamic_bsz: bool = key(False, "Pack examples by token budget instead of by a fixed number.")
    max_token_len_per_gpu: int = key(
        16384, "Token budget of a forward/backward on a rank with use_dynamic_bsz (tokens).", ge=1
    )
    max_length: int = key(1024, "Longest example, prompt and response (tokens).", ge=1)
    total_epochs: int = key(1, "Passes over the training examples (epochs).", ge=1)
    total_steps: int | None = key(None, "Optimizer steps to run; null: total_epochs decides; wins if given.", ge=1)
    test_freq: SaveEvery = key(-1, "Validate every so many optimizer steps; -1: never.")
    save_freq: SaveEvery = key(-1, "Save a checkpoint every so many optimizer steps; -1: never.")
    export_path: str | None = key(None, "Folder for the final Hugging Face model; null: not exported.", path=True)

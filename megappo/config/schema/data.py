"""`data`: prompts for training and validation."""

from megappo.config.schema.base import Section, key


class DataConfig(Section):
    """Rows {prompt, data_source, reward_model: {style, ground_truth}, extra_info} as parquet or JSONL."""

    train_files: list[str] = key([], "Files (.parquet or .jsonl) with training prompts.", path=True)
    val_files: list[str] = key([], "Files (.parquet or .jsonl) with validation prompts.", path=True)
    prompt_key: str = key("prompt", "Column with the prompt: chat messages or a string.")
    train_batch_size: int = key(256, "Prompts per iteration, over all ranks (prompts).", ge=1)
    val_batch_size: int | None = key(None, "Validation prompts per batch (prompts); null: all at once.", ge=1)
    max_prompt_length: int = key(512, "Longest prompt after the chat template (tokens).", ge=1)
    max_response_length: int = key(512, "Longest response; generation stops there (tokens).", ge=1)
    shuffle: bool = key(True, "New order of the training prompts in every epoch.")
    filter_overlong_prompts: bool = key(True, "Drop prompts longer than max_prompt_length; false: they are an error.")
    val_max_samples: int | None = key(None, "Use the first so many validation prompts (prompts); null: all.", ge=1)
    max_noise: float = key(
        0.12,
        "Largest share of contradictory or identical preference pairs in offline data; more is refused (0 to 1).",
        ge=0,
        le=1,
    )

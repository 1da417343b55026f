"""`trainer`: how long to run, what to save, where to log."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from megappo.config.schema.base import Section, key

Logger = Literal["console", "tensorboard", "jsonl", "wandb", "mlflow"]


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("0 is neither a period nor off: write -1 for never")
    return value


SaveEvery = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]


class TrainerConfig(Section):
    """The run as a whole."""

    project_name: str = key("megappo", "Name of the project, shown by the loggers.")
    experiment_name: str = key("run", "Name of this run, shown by the loggers.")
    output_dir: str = key("runs/run", "Folder for checkpoints, logs and reports.", path=True)
    total_epochs: int = key(15, "Passes over the training prompts (epochs).", ge=1)
    total_iterations: int | None = key(
        None, "Iterations (rollout + update) to run; null: total_epochs decides; wins if given.", ge=1
    )
    save_freq: SaveEvery = key(10, "Save a checkpoint every so many iterations; -1: never.")
    async_save: bool = key(False, "Write checkpoints in the background while training goes on.")
    test_freq: SaveEvery = key(5, "Evaluate on the validation prompts every so many iterations; -1: never.")
    val_before_train: bool = key(True, "Evaluate once before the first iteration.")
    eval_command: str | None = key(
        None,
        "Command run at each evaluation on an exported copy of the policy, `{model}` (also `{iteration}`, "
        "`{output_dir}`); the JSON object in its last line is logged; null: none.",
    )
    eval_command_timeout_s: int = key(300, "Longest time for it (seconds).", ge=1)
    rollout_lag: int = key(
        0,
        "1: the next batch is generated while this one is trained on, with weights one update old; engine sglang only "
        "(iterations).",
        ge=0,
        le=1,
    )
    critic_warmup: int = key(0, "Iterations at the start in which only the critic is trained.", ge=0)
    seed: int = key(1, "Seed of everything random: data order, sampling, initialisation.", ge=0, le=10**9)
    logger: list[Logger] = key(["console", "tensorboard", "jsonl"], "Where metrics go, any number of them.")
    max_ckpt_to_keep: int = key(3, "Checkpoints to keep; older ones are deleted (checkpoints).", ge=1)
    resume: Literal["auto", "never"] = key(
        "auto", "auto: continue from the latest checkpoint in output_dir if there is one; never: start anew."
    )
    log_val_samples: int = key(4, "Validation answers written to the logs at each evaluation (samples).", ge=0)
    distributed_timeout_s: int = key(600, "Longest wait for another rank before the run fails (seconds).", ge=1)

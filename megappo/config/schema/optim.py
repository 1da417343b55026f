"""`optim`: AdamW and the learning-rate schedule, one for each trained role."""

from typing import Literal

from megappo.config.schema.base import FloatPair, Section, key

_LR = "Peak learning rate."
_CLIP = "Gradients are scaled down to this global L2 norm."


class OptimConfig(Section):
    """AdamW; the defaults are the actor's."""

    lr: float = key(1e-6, _LR, gt=0)
    weight_decay: float = key(0.0, "Decoupled weight decay.", ge=0)
    betas: FloatPair = key((0.9, 0.999), "Adam's decay rates of the first and second moment.")
    eps: float = key(1e-8, "Adam's epsilon.", gt=0)
    max_grad_norm: float = key(1.0, _CLIP, gt=0)
    lr_scheduler: Literal["constant", "linear", "cosine"] = key(
        "constant", "Learning rate after the warm-up: constant, or decay to min_lr_ratio * lr."
    )
    lr_warmup_steps: int = key(0, "Linear warm-up from 0 (optimizer steps).", ge=0)
    lr_warmup_ratio: float | None = key(
        None, "Warm-up as a share of all optimizer steps, 0 to 1; null: lr_warmup_steps; wins if given.",
        ge=0, le=1,
    )  # fmt: skip
    min_lr_ratio: float = key(0.0, "Final learning rate as a share of lr, 0 to 1.", ge=0, le=1)


class CriticOptimConfig(OptimConfig):
    """A higher rate and a tighter clip than the actor's."""

    lr: float = key(1e-5, _LR, gt=0)
    max_grad_norm: float = key(0.8, _CLIP, gt=0)


class SftOptimConfig(OptimConfig):
    """The rate for supervised fine-tuning."""

    lr: float = key(1e-5, _LR, gt=0)

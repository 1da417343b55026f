"""The optimizer of one role: megatron-core's, with our learning-rate schedule and a step that refuses NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megappo.config.schema.optim import OptimConfig


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based) of `total_steps`. A pure function: resuming needs no state.

    Linear warm-up from `lr / (warm-up + 1)` to `lr`, then constant, linear or cosine decay to `min_lr_ratio · lr`.
    """
    warmup = config.lr_warmup_steps
    if config.lr_warmup_ratio is not None:
        warmup = round(config.lr_warmup_ratio * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    if config.lr_scheduler == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = 1 - progress if config.lr_scheduler == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


@dataclass
class StepResult:
    """`applied` is False when the gradient was not finite: no rank changed a parameter."""

    grad_norm: float
    lr: float
    applied: bool


class RoleOptimizer:
    """AdamW over megatron-core's (distributed) optimizer. Call inside the role's parallel context.

    `config` may be replaced between steps: learning rate, weight decay and gradient clip are read anew by each.
    """

    def __init__(
        self,
        config: OptimConfig,
        models: list,
        *,
        dtype: torch.dtype,
        distributed: bool,
        total_steps: int,
    ):
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.config = config
        self.total_steps = total_steps
        self.steps = 0  # optimizer steps taken or skipped: position in the learning-rate schedule
        self.skipped = 0
        self.models = models
        self.inner = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=config.max_grad_norm,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=distributed,
            ),
            models,
        )

    def zero_grad(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self) -> StepResult:
        """Clip by the global norm and update. A non-finite norm skips the update on all ranks alike."""
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        lr = learning_rate(self.config, self.steps, self.total_steps)
        self.steps += 1
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if not math.isfinite(norm):
            self.skipped += 1
            return StepResult(norm, lr, applied=False)
        for group in self.inner.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.config.weight_decay * group.get("wd_mult", 1.0)
        for part in self.inner.chained_optimizers:
            params = part.get_parameters()
            if params:
                clip_grad_by_total_norm_fp32(params, max_norm=self.config.max_grad_norm, total_norm=norm)
        self.inner.step_with_ready_grads()
        return StepResult(norm, lr, applied=True)

    def tensors(self) -> Iterator[torch.Tensor]:
        """fp32 masters and moments held on this rank."""
        for part in self.inner.chained_optimizers:
            inner = getattr(part, "optimizer", None)
            if inner is None:
                continue
            for state in inner.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value) and value.numel() > 1)
            if part.config.bf16:  # in fp32 the optimizer works on the model's own parameters
                yield from (param.data for group in inner.param_groups for param in group["params"])

    def masters(self) -> list[torch.Tensor]:
        """What the optimizer updates on this rank: fp32 masters, in fp32 (views of) the model's own parameters."""
        parts = (getattr(part, "optimizer", None) for part in self.inner.chained_optimizers)
        return [p.data for inner in parts if inner is not None for g in inner.param_groups for p in g["params"]]

    def state(self) -> dict[str, float]:
        """What the schedule needs to continue, beside the tensors of `inner`."""
        return {"steps": self.steps, "skipped": self.skipped}

    def load_state(self, state: dict[str, float]) -> None:
        self.steps, self.skipped = int(state["steps"]), int(state["skipped"])

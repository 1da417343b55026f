"""`parallel`: how one role (actor, critic, reference, a reward model, sft) is cut over the ranks."""

from typing import Literal

from megappo.config.schema.base import Section, key


class ParallelConfig(Section):
    """Data parallelism takes what is left: world size / (tensor * pipeline * context)."""

    tensor_model_parallel_size: int = key(1, "Ranks that share each layer's matrices (TP, ranks).", ge=1)
    pipeline_model_parallel_size: int = key(1, "Ranks that share the layers in sequence (PP, ranks).", ge=1)
    virtual_pipeline_model_parallel_size: int | None = key(
        None, "Model chunks per pipeline rank for the interleaved schedule (VPP, chunks); null: one.", ge=1
    )
    context_parallel_size: int = key(1, "Ranks that share each sequence's tokens (CP, ranks).", ge=1)
    expert_model_parallel_size: int = key(1, "Ranks that share the experts of an MoE layer (EP, ranks).", ge=1)
    expert_tensor_parallel_size: int | None = key(
        None, "Ranks that share each expert's matrices (ETP, ranks); null: tensor_model_parallel_size.", ge=1
    )
    sequence_parallel: bool = key(
        False, "Also split activations between TP ranks along the sequence; without effect at TP 1."
    )
    first_rank: int = key(0, "First of the ranks that hold the role; others can hold other roles (rank).", ge=0)
    num_ranks: int | None = key(None, "Ranks that hold the role (ranks); null: all from first_rank on.", ge=1)
    offload: Literal["none", "optimizer", "all"] = key(
        "none", "Moved to host memory while the role is idle: nothing, gradients and optimizer state, or weights too."
    )
    use_distributed_optimizer: bool = key(True, "Split optimizer state between data-parallel ranks.")
    num_layers_in_first_pipeline_stage: int | None = key(
        None, "Layers on the first pipeline stage if the split is uneven (layers); null: even.", ge=1
    )
    num_layers_in_last_pipeline_stage: int | None = key(
        None, "Layers on the last pipeline stage if the split is uneven (layers); null: even.", ge=1
    )
    recompute: Literal["selective", "full"] | None = key(
        None, "Recompute activations in the backward pass to save memory: selective, full; null: keep all."
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together hold one replica and one sequence: tp * pp * cp."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def ranks_of(self, world_size: int) -> int:
        """Ranks that hold the role in a run of `world_size` ranks."""
        return world_size - self.first_rank if self.num_ranks is None else self.num_ranks

    @property
    def vpp(self) -> int:
        """Model chunks per pipeline rank, 1 when not interleaved."""
        return self.virtual_pipeline_model_parallel_size or 1

"""The roles that a configuration trains or runs, each with its model, layout and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from megappo.config.schema import ExperimentConfig, ParallelConfig
from megappo.parallel.layout import ParallelLayout
from megappo.planning.activations import Work
from megappo.planning.parameters import StateBytes, frozen_bytes, trained_bytes
from megappo.planning.shape import ModelShape, read_shape


def layout_of(parallel: ParallelConfig, world: int) -> ParallelLayout:
    """The grid that a role's configuration describes in a run of `world` ranks."""
    return ParallelLayout(
        world=parallel.ranks_of(world),
        first_rank=parallel.first_rank,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
        vpp=parallel.vpp,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        first_stage_layers=parallel.num_layers_in_first_pipeline_stage,
        last_stage_layers=parallel.num_layers_in_last_pipeline_stage,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size,
    )


@dataclass(frozen=True)
class Role:
    """One model of the run.

    Attributes:
        section: where its layout stands in the YAML file.
        train, forward: its micro-batches in an update (None: never updated) and in a pass without gradients.
        steps, epochs: optimizer steps in an iteration, passes over the batch.
    """

    name: str
    section: str
    shape: ModelShape
    layout: ParallelLayout
    critic: bool
    offload: str
    distributed: bool
    forward: Work
    train: Work | None = None
    steps: int = 0
    epochs: int = 0

    @property
    def element(self) -> int:
        """Bytes of a weight."""
        return self.forward.element


@dataclass(frozen=True)
class Job:
    """A configuration as the planner sees it.

    Attributes:
        samples, prompt, response: of an iteration; the longest (tokens).
        engine: weights of the rollout engine stay on every rank, with so many bytes an element (0: there is none).
        cache_tokens: room in its key/value cache.
    """

    world: int
    roles: tuple[Role, ...]
    shape: ModelShape
    samples: int
    prompt: int
    response: int
    engine: int
    cache_tokens: int

    def role(self, name: str) -> Role | None:
        """A role by name, None if the run has none of it."""
        return next((role for role in self.roles if role.name == name), None)


def _budget(config: ExperimentConfig, dynamic: bool, samples: int, tokens: int) -> tuple[int, bool]:
    """(tokens of the largest micro-batch, does it hold several sequences)."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    return (tokens, True) if dynamic else (samples * longest, samples > 1)


def job_of(config: ExperimentConfig, world: int, shapes: Callable[[str], ModelShape] = read_shape) -> Job:
    """What a resolved configuration asks of `world` ranks; `shapes` gives a model folder's sizes."""
    actor, critic, reference, data = config.actor, config.critic, config.reference, config.data
    element = 2 if config.model.dtype == "bf16" else 4

    def work(dynamic: bool, samples: int, tokens: int, parallel: ParallelConfig) -> Work:
        size, packed = _budget(config, dynamic, samples, tokens)
        return Work(size, element, fused=element == 2, packed=packed, recompute=parallel.recompute)

    def role(name: str, section: str, path: str, parallel: ParallelConfig, forward: Work, **more) -> Role:
        return Role(
            name=name,
            section=section,
            shape=shapes(path),
            layout=layout_of(parallel, world),
            critic=more.pop("critic", False),
            offload=parallel.offload,
            distributed=parallel.use_distributed_optimizer,
            forward=forward,
            **more,
        )

    dynamic = actor.use_dynamic_bsz
    scored = (actor.log_prob_micro_batch_size_per_gpu, actor.log_prob_max_token_len_per_gpu)
    trained = work(dynamic, actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu, actor.parallel)
    roles = [
        role(
            "actor",
            "actor.parallel",
            config.model.path,
            actor.parallel,
            work(dynamic, *scored, actor.parallel),
            train=trained,
            steps=_steps(data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_epochs),
            epochs=actor.ppo_epochs,
        )
    ]
    if config.needs_critic:
        sizes = (critic.use_dynamic_bsz, critic.ppo_micro_batch_size_per_gpu, critic.ppo_max_token_len_per_gpu)
        trained = work(*sizes, critic.parallel)
        steps = _steps(data.train_batch_size, critic.ppo_mini_batch_size, critic.ppo_epochs)
        more = {"critic": True, "train": trained, "steps": steps, "epochs": critic.ppo_epochs}
        roles.append(role("critic", "critic.parallel", critic.path, critic.parallel, trained, **more))
    if config.needs_reference:
        sizes = (reference.log_prob_micro_batch_size_per_gpu, reference.log_prob_max_token_len_per_gpu)
        forward = work(dynamic, *sizes, reference.parallel)
        roles.append(role("reference", "reference.parallel", reference.path, reference.parallel, forward))
    for number, reward in enumerate(config.rewards):
        if reward.type == "model":
            forward = work(dynamic, reward.micro_batch_size_per_gpu, reward.max_token_len_per_gpu, reward.parallel)
            name, section = f"reward {reward.name or number}", f"rewards.{number}.parallel"
            roles.append(role(name, section, reward.path, reward.parallel, forward, critic=True))
    generates = config.rollout.engine == "embedded"
    return Job(
        world=world,
        roles=tuple(roles),
        shape=shapes(config.model.path),
        samples=data.train_batch_size * config.rollout.n,
        prompt=data.max_prompt_length,
        response=data.max_response_length,
        engine=(2 if config.rollout.dtype == "bf16" else 4) if generates else 0,
        cache_tokens=config.rollout.max_batch_tokens,
    )


def _steps(batch: int, mini: int, epochs: int) -> int:
    """Optimizer steps of an iteration."""
    return -(-batch // mini) * epochs


@lru_cache(maxsize=4096)
def role_state(role: Role, stage: int) -> StateBytes:
    """What a role keeps on a rank of a stage, nothing offloaded."""
    if role.train is None:
        return frozen_bytes(role.shape, role.layout, stage, role.element, critic=role.critic)
    options = {"critic": role.critic, "distributed": role.distributed}
    return trained_bytes(role.shape, role.layout, stage, role.element, **options)

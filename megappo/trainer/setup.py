"""Put a PPO run together from its configuration: data, rewards, engines, rollout engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megappo.algorithms.kl_coefficient import KlCoefficient
from megappo.checkpoint.hf import HFReader, write_hf
from megappo.config.schema import ExperimentConfig, ModelConfig, OptimConfig, ParallelConfig
from megappo.data.offline import OfflineDataset, read_offline
from megappo.data.prompts import PromptDataset, PromptSampler
from megappo.data.sft_rows import SftDataset
from megappo.engine.engine import EngineOptions, ModelEngine
from megappo.errors import UserError
from megappo.models.spec import load_spec
from megappo.parallel import backend
from megappo.planning.roles import layout_of
from megappo.rewards.combine import CombinedReward, build_reward
from megappo.rewards.model import RewardScale
from megappo.rollout.base import RolloutEngine, SamplingParams
from megappo.rollout.offline import OfflineEngine
from megappo.rollout.recorded import RecordedEngine
from megappo.trainer.effective import batch_sizes, count_iterations, effective_config, largest_batch, optimizer_steps
from megappo.trainer.guard import Guard
from megappo.trainer.planning import budget
from megappo.trainer.scoring import RewardModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Inputs:
    """What a run reads before any model is built, so that cheap mistakes show at once."""

    tokenizer: Any
    train_data: PromptDataset | OfflineDataset
    val_data: PromptDataset | None
    sampler: PromptSampler
    reward: CombinedReward
    total_iterations: int
    sft_data: SftDataset | None = None


@dataclass
class PPORun:
    """Everything that lives as long as the run; most is rebuilt on resume.

    Attributes:
        base: the configuration as written.
        config: what is in force in this iteration, see `configure`.
        iteration: the next one to do, from 0; never goes back.
        data_position: prompts taken so far, from the start of the run.
        notes: lines for the user about the iteration under way.
    """

    base: ExperimentConfig
    config: ExperimentConfig
    tokenizer: Any
    train_data: PromptDataset | OfflineDataset
    val_data: PromptDataset | None
    sampler: PromptSampler
    reward: CombinedReward
    total_iterations: int
    actor: ModelEngine
    critic: ModelEngine | None
    reference: ModelEngine | None
    rollout: RolloutEngine
    sampling: SamplingParams
    kl_controller: KlCoefficient
    guard: Guard
    sft_data: SftDataset | None = None
    iteration: int = 0
    weight_version: int = 0
    data_position: int = 0
    guard_introduced: bool = False
    engines: dict[str, ModelEngine] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reward_models: dict[str, RewardModel] = field(default_factory=dict)
    pending_save: Any = None  # resume.PendingCheckpoint
    ahead: Any = None  # lagged.NextBatch

    @property
    def checkpoints(self) -> Path:
        return Path(self.config.trainer.output_dir) / "checkpoints"


def build_engine(
    path: str,
    parallel: ParallelConfig,
    model: ModelConfig,
    *,
    critic: bool = False,
    temperature: float = 1.0,
    optim: OptimConfig | None = None,
    total_steps: int = 1,
) -> ModelEngine:
    """A role with its weights loaded from a Hugging Face folder. Collective."""
    options = EngineOptions(
        critic=critic,
        dtype=DTYPES[model.dtype],
        router_aux_loss_coef=model.router_aux_loss_coef,
        temperature=temperature,
        recompute=parallel.recompute,
        offload=parallel.offload,
        distributed_optimizer=parallel.use_distributed_optimizer,
    )
    layout = layout_of(parallel, dist.get_world_size())
    engine = ModelEngine(load_spec(path), layout, options, optim=optim, total_steps=total_steps)
    engine.load_hf(HFReader(path))
    return engine


def export_model(engine: ModelEngine, folder: Path, dtype: str, **options: Any) -> None:
    """The role's current weights as a Hugging Face folder, there on return for every rank. Collective.

    Args:
        options: further arguments of `write_hf`.
    """
    kind, write = DTYPES[dtype], dist.get_rank() == 0
    stream, shapes = engine.stream_weights(kind), engine.weights.hf_shapes()
    write_hf(stream, shapes, engine.spec.path, folder, kind, write=write, **options)
    dist.barrier()


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a Hugging Face folder.

    Raises:
        UserError: the folder has no tokenizer that transformers can read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as err:  # transformers, tokenizers and their checks raise many types
        reason = " ".join(str(err).split()) or type(err).__name__
        raise UserError(f"no usable tokenizer in {path} ({reason}): set model.tokenizer_path") from None


def stop_token_ids(path: str, tokenizer: Any, extra: list[int]) -> tuple[int, ...]:
    """Every id that ends a response: the model's, its generation config's, the tokenizer's and the configured ones."""
    from transformers import GenerationConfig

    from megappo.models.spec import read_config

    found: set[int] = set(extra)
    candidates: list[Any] = [tokenizer.eos_token_id, read_config(path).get("eos_token_id")]
    if (Path(path) / "generation_config.json").is_file():
        candidates.append(GenerationConfig.from_pretrained(path).eos_token_id)
    for ids in candidates:
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))


def _build_rollout(config: ExperimentConfig, tokenizer: Any, actor: ModelEngine, *, evaluated: bool) -> RolloutEngine:
    if config.rollout.engine == "sglang":
        from megappo.rollout.sglang.build import build_sglang

        dtype, shapes = DTYPES[config.rollout.dtype], actor.weights.hf_shapes()
        return build_sglang(config, lambda: _current_weights(actor, dtype), shapes, actor.spec, dtype)
    if config.offline_data:
        generates = evaluated or config.offline.fallback != "none"
        return OfflineEngine(_build_embedded(config, tokenizer) if generates else None)
    if config.rollout.engine == "recorded":
        return RecordedEngine(config.rollout.replay_dir, load_spec(config.model.path).vocab_size)
    return _build_embedded(config, tokenizer)


def _current_weights(actor: ModelEngine, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    yield from actor.stream_weights(dtype)
    actor.sleep()


def _build_embedded(config: ExperimentConfig, tokenizer: Any) -> RolloutEngine:
    from transformers import AutoConfig

    from megappo.rollout.embedded import EmbeddedEngine

    pad = tokenizer.pad_token_id
    return EmbeddedEngine(
        AutoConfig.from_pretrained(config.model.path),
        dtype=DTYPES[config.rollout.dtype],
        device=backend.device(),
        max_batch_tokens=config.rollout.max_batch_tokens,
        pad_token_id=pad if pad is not None else (tokenizer.eos_token_id or 0),
        tokenizer=tokenizer,
    )


def read_inputs(config: ExperimentConfig) -> Inputs:
    """Tokenizer, prompts and reward; user code is loaded in its own process. `Inputs.reward` has to be closed.

    Replayed rollouts hold no answers to validation prompts, which are not read then.
    """
    data = config.data
    load_spec(config.model.path)  # a broken config.json is named as what it is, not as a broken tokenizer
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    common = {
        "prompt_key": data.prompt_key,
        "max_prompt_length": data.max_prompt_length,
        "filter_overlong": data.filter_overlong_prompts,
        "chat_template": config.model.chat_template,
    }
    offline = config.offline_data
    train = read_offline(config, tokenizer) if offline else PromptDataset(data.train_files, tokenizer, **common)
    val = None
    if data.val_files and config.rollout.replay_dir is None:
        val = PromptDataset(data.val_files, tokenizer, max_samples=data.val_max_samples, **common)
    sampler = PromptSampler(len(train), largest_batch(config), config.trainer.seed, data.shuffle)
    iterations = count_iterations(config, len(train))
    sft_data = read_sft_mix(config, tokenizer)
    reward = build_reward(config.rewards)
    reward.check_sources((row.data_source for row in train), recorded=offline)
    reward.check_sources(row.data_source for row in val or ())
    try:
        reward.start()
    except BaseException:
        reward.close()  # processes of other entries may run
        raise
    return Inputs(tokenizer, train, val, sampler, reward, iterations, sft_data)


def read_sft_mix(config: ExperimentConfig, tokenizer: Any) -> SftDataset | None:
    """The examples of `actor.sft_mix`; None when it is off."""
    mix, data = config.actor.sft_mix, config.data
    if not mix.files:
        return None
    return SftDataset(
        mix.files,
        tokenizer,
        prompt_key=mix.prompt_key,
        response_key=mix.response_key,
        max_length=mix.max_length or data.max_prompt_length + data.max_response_length,
        chat_template=config.model.chat_template,
    )


def _build_engines(config: ExperimentConfig, iterations: int) -> dict[str, ModelEngine]:
    """The roles that this run needs; `iterations` decide the length of the learning-rate schedules. Collective."""
    actor, critic, model = config.actor, config.critic, config.model
    temperature = config.rollout.temperature
    sizes = batch_sizes(config, iterations)
    engines = {
        "actor": build_engine(
            config.model.path,
            actor.parallel,
            model,
            temperature=temperature,
            optim=actor.optim,
            total_steps=optimizer_steps(
                sizes[config.trainer.critic_warmup :], actor.ppo_mini_batch_size, actor.ppo_epochs
            ),
        )
    }
    if config.needs_critic:
        engines["critic"] = build_engine(
            critic.path,
            critic.parallel,
            model,
            critic=True,
            optim=critic.optim,
            total_steps=optimizer_steps(sizes, critic.ppo_mini_batch_size, critic.ppo_epochs),
        )
        scale = RewardScale.read(critic.path)  # a reward model's values begin in the unit of its rewards
        engines["critic"].scale_head(scale.mean, scale.std)
    if config.needs_reference:
        reference = config.reference
        engines["reference"] = build_engine(reference.path, reference.parallel, model, temperature=temperature)
    return engines


def _build_reward_models(config: ExperimentConfig, reward: CombinedReward) -> dict[str, RewardModel]:
    """The reward models among the rewards, by the component's name. Collective."""
    models = {}
    for name, settings in zip(reward.components, config.rewards, strict=True):
        if settings.type == "model":
            scale = RewardScale.read(settings.path)
            engine = build_engine(settings.path, settings.parallel, config.model, critic=True)
            sizes = budget(
                config.actor.use_dynamic_bsz, settings.micro_batch_size_per_gpu, settings.max_token_len_per_gpu
            )
            models[name] = RewardModel(engine, scale, sizes)
            engine.sleep()
    return models


def build_run(config: ExperimentConfig, inputs: Inputs) -> PPORun:
    """Build all roles and the rollout engine. Collective."""
    engines = _build_engines(config, inputs.total_iterations)
    rollout, ctrl = config.rollout, config.algorithm.kl_ctrl
    return PPORun(
        base=config,
        config=config,
        **vars(inputs),
        actor=engines["actor"],
        critic=engines.get("critic"),
        reference=engines.get("reference"),
        rollout=_build_rollout(config, inputs.tokenizer, engines["actor"], evaluated=inputs.val_data is not None),
        sampling=SamplingParams(
            max_new_tokens=config.data.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=stop_token_ids(config.model.path, inputs.tokenizer, rollout.stop_token_ids),
            stop_strings=tuple(rollout.stop),
        ),
        kl_controller=KlCoefficient(ctrl.type, target_kl=ctrl.target_kl, horizon=ctrl.horizon, power=ctrl.power),
        guard=Guard(config),
        engines=engines,
        reward_models=_build_reward_models(config, inputs.reward),
    )


def configure(run: PPORun) -> None:
    """Put the values of the coming iteration in force: schedules, and what the guard changed."""
    run.config = effective_config(run.base, run.iteration, run.total_iterations, run.guard.adjustments)
    for engine, optim in ((run.actor, run.config.actor.optim), (run.critic, run.config.critic.optim)):
        if engine is not None and engine.optimizer is not None:  # None on ranks outside the role's layout
            engine.optimizer.config = optim
    temperature = run.config.rollout.temperature
    run.sampling = replace(run.sampling, temperature=temperature)
    for engine in (run.actor, run.reference):
        if engine is not None:
            engine.temperature = temperature


def leave_recorded_rollouts(run: PPORun) -> bool:
    """Generate from now on instead of replaying; the caller sends the weights.

    False if the run does so anyway, or if its rewards could not score new answers.
    """
    if not isinstance(run.rollout, RecordedEngine | OfflineEngine):
        return False
    if any(component.recorded for component in run.reward.components.values()):
        return False
    inner = run.rollout.inner if isinstance(run.rollout, OfflineEngine) else None
    run.rollout = inner or _build_embedded(run.base, run.tokenizer)
    return True

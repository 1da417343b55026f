"""Checks across keys, and against model folder, data files and number of ranks, before any process starts.

All functions are pure (they read files, never write) and return Problems; `note=True` marks advice.
"""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from megappo.config.check_changes import check_changes
from megappo.config.check_layout import check_layout
from megappo.config.check_offline import check_offline
from megappo.config.check_reward_models import check_reward_models
from megappo.config.check_sglang import check_sglang
from megappo.config.model_folder import ModelFacts, export_problem, read_model_folder, tokenizer_problem
from megappo.config.problems import Problem
from megappo.config.schema.actor import ActorConfig
from megappo.config.schema.critic import CriticConfig
from megappo.config.schema.experiment import GROUP_ESTIMATORS, ExperimentConfig
from megappo.config.schema.optim import OptimConfig
from megappo.config.schema.parallel import ParallelConfig
from megappo.config.schema.reward_model import RewardModelConfig
from megappo.config.schema.sft import SftConfig

_DATA_SUFFIXES = (".parquet", ".jsonl")


def check_config(config: ExperimentConfig, *, kind: str = "train", world_size: int | None = None) -> list[Problem]:
    """All problems and notes of a *resolved* configuration; world_size (ranks) None: not checked."""
    check = {"train": _check_train, "sft": _check_sft, "reward-model": _check_reward_model}[kind]
    return [*_check_output(config, kind), *check(config, world_size)]


def _check_train(config: ExperimentConfig, world_size: int | None) -> Iterator[Problem]:
    facts: dict[str, ModelFacts | None] = {}
    yield from _check_models(config, facts)
    said: list[tuple[ParallelConfig, ModelFacts | None]] = []
    for role, parallel in roles(config).items():
        case = (parallel, facts.get(role))
        if case not in said:  # a mistake that critic and reference inherit is said once, for the actor
            said.append(case)
            yield from check_layout(f"{role}.parallel", *case, world_size)
    yield from _check_train_data(config)
    yield from _check_eval_command(config)
    yield from _check_rewards(config)
    yield from _check_rollout(config)
    yield from _check_algorithm(config)
    yield from _check_policy_loss(config)
    yield from _check_sft_mix(config, facts.get("actor"))
    yield from _check_lengths(config, facts)
    yield from _check_batches(config, world_size)
    yield from check_changes(config)
    yield from check_offline(config)
    yield from check_sglang(config)
    yield from _check_optim("actor.optim", config.actor.optim)
    if config.needs_critic:
        yield from _check_optim("critic.optim", config.critic.optim)


def roles(config: ExperimentConfig) -> dict[str, ParallelConfig]:
    """The models that `megappo train` builds, with their layouts; critic and reference if needed."""
    out = {"actor": config.actor.parallel}
    if config.needs_critic:
        assert config.critic.parallel is not None, "call resolved() first"
        out["critic"] = config.critic.parallel
    if config.needs_reference:
        assert config.reference.parallel is not None, "call resolved() first"
        out["reference"] = config.reference.parallel
    return out | {f"rewards.{i}": reward.parallel for i, reward in enumerate(config.rewards) if reward.type == "model"}


# --- files ---------------------------------------------------------------------------------------------


def _check_models(config: ExperimentConfig, facts: dict[str, ModelFacts | None]) -> Iterator[Problem]:
    """Model folders of the roles; fills `facts` (role -> facts)."""
    paths = {"actor": ("model.path", config.model.path)}
    if config.needs_critic:
        paths["critic"] = ("critic.path", config.critic.path or config.model.path)
    if config.needs_reference:
        paths["reference"] = ("reference.path", config.reference.path or config.model.path)
    paths |= {
        f"rewards.{i}": (f"rewards.{i}.path", reward.path)
        for i, reward in enumerate(config.rewards)
        if reward.type == "model" and reward.path
    }
    seen: dict[str, ModelFacts | None] = {}
    for role, (key, path) in paths.items():
        if path not in seen:
            seen[path], wrong = read_model_folder(path)
            if wrong:
                yield Problem(key, wrong, path)
        facts[role] = seen[path]
        if role in ("actor", "reference") and seen[path] and seen[path].scores:
            yield Problem(key, _NO_POLICY, path)
    yield from _check_tokenizer(config)
    yield from check_reward_models(config, facts)


def _check_tokenizer(config: ExperimentConfig) -> Iterator[Problem]:
    path = config.model.tokenizer_path or config.model.path
    if path != config.model.path or os.path.isdir(path):  # a missing model folder is said once
        wrong = tokenizer_problem(path)
        if wrong:
            yield Problem("model.tokenizer_path", wrong, path)
    file = config.model.chat_template_file
    if file and not os.path.isfile(file):
        yield Problem("model.chat_template", "no such file; give a file or the template itself", file)


def _check_data_files(key: str, files: list[str]) -> Iterator[Problem]:
    for i, file in enumerate(files):
        if Path(file).suffix not in _DATA_SUFFIXES:
            yield Problem(f"{key}.{i}", "unknown format; convert it to .parquet or .jsonl", file)
        elif not os.path.isfile(file):
            yield Problem(f"{key}.{i}", "no such file; check the path or prepare the data first", file)


def _check_train_data(config: ExperimentConfig) -> Iterator[Problem]:
    data = config.data
    if not data.train_files:
        yield Problem("data.train_files", "no training prompts; list at least one file", data.train_files)
    yield from _check_data_files("data.train_files", data.train_files)
    yield from _check_data_files("data.val_files", data.val_files)
    trainer = config.trainer
    if not data.val_files and trainer.test_freq > 0 and trainer.eval_command is None:
        yield Problem("data.val_files", "no validation prompts: nothing is evaluated", [], note=True)


def _check_eval_command(config: ExperimentConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.eval_command is None:
        return
    try:
        words = shlex.split(trainer.eval_command)
    except ValueError as err:
        yield Problem("trainer.eval_command", f"cannot be read as a command ({err}); mind the quotes")
        return
    if not words:
        yield Problem("trainer.eval_command", "is empty; write a command, or null", trainer.eval_command)
    elif trainer.test_freq == -1 and not trainer.val_before_train:
        yield Problem("trainer.eval_command", "is never run: set trainer.test_freq", note=True)
    if trainer.eval_command_timeout_s >= trainer.distributed_timeout_s:
        text = f"must be below trainer.distributed_timeout_s ({trainer.distributed_timeout_s}), while other ranks wait"
        yield Problem("trainer.eval_command_timeout_s", text, trainer.eval_command_timeout_s)


def _check_output(config: ExperimentConfig, kind: str) -> Iterator[Problem]:
    out = config.trainer.output_dir
    folders = {"trainer.output_dir": out}
    if kind == "train":
        folders["rollout.record_dir"] = config.rollout.record_dir
    elif section := (config.sft if kind == "sft" else config.reward_model):
        folders[f"{kind.replace('-', '_')}.export_path"] = section.export_path
    for key, folder in folders.items():
        wrong = _not_writable(folder) if folder else None
        if not wrong and folder and key.endswith(".export_path"):
            wrong = export_problem(folder, config.model.path)
        if wrong:
            yield Problem(key, wrong, folder)
    if kind == "train" and (wrong := export_problem(os.path.join(out, "final_hf"), config.model.path)):
        yield Problem("trainer.output_dir", f"its final_hf, where the trained model goes, {wrong}", out)


def _not_writable(folder: str) -> str | None:
    """Why the folder cannot be written to or made, or None."""
    path = Path(folder)
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    if not os.path.isdir(path):
        return f"{path} is a file; choose another folder"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"no permission to write in {path}; choose another folder"
    return None


# --- rewards, sampling, estimators ---------------------------------------------------------------------


def _check_rewards(config: ExperimentConfig) -> Iterator[Problem]:
    if not config.rewards:
        yield Problem("rewards", "no reward function; add one, e.g. `- type: gsm8k`", [])
    for i, reward in enumerate(config.rewards):
        key = f"rewards.{i}.path"
        if reward.type not in ("function", "model") and reward.path is not None:
            yield Problem(key, f"type {reward.type} takes no path; use type: function or remove it", reward.path)
        if reward.type == "function":
            target, _, name = (reward.path or "").rpartition(":")
            if not target or not name.isidentifier():
                text = "needs `package.module:function` or `path/to/file.py:function`"
                yield Problem(key, text, reward.path)
            elif target.endswith(".py") and not os.path.isfile(target):
                yield Problem(key, "no such file; check the path", reward.path)
    if config.rewards and all(reward.weight == 0 for reward in config.rewards):
        yield Problem("rewards.0.weight", "all weights are 0, nothing is learnt; give one a weight", 0.0)


def _check_rollout(config: ExperimentConfig) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.engine == "recorded":
        if rollout.replay_dir is not None and not os.path.isdir(rollout.replay_dir):
            yield Problem("rollout.replay_dir", "no such folder; record rollouts first", rollout.replay_dir)
    elif rollout.replay_dir is not None:
        yield Problem("rollout.replay_dir", "is read by engine recorded only; set rollout.engine", rollout.replay_dir)
    if rollout.temperature == 0:
        text = "greedy sampling cannot train; use a temperature > 0 (rollout.val.temperature may be 0)"
        yield Problem("rollout.temperature", text, rollout.temperature)
    if not rollout.allow_truncated_sampling:
        text = "truncation biases the probability ratio; remove it or set rollout.allow_truncated_sampling"
        if rollout.top_p < 1:
            yield Problem("rollout.top_p", text, rollout.top_p)
        if rollout.top_k > 0:
            yield Problem("rollout.top_k", text, rollout.top_k)
    if config.algorithm.adv_estimator in GROUP_ESTIMATORS and rollout.n < 2:
        text = f"{config.algorithm.adv_estimator} compares responses of one prompt; use n >= 2"
        yield Problem("rollout.n", text, rollout.n)
    elif config.algorithm.dynamic_sampling.enabled and rollout.n < 2:
        text = "algorithm.dynamic_sampling compares responses of one prompt; use n >= 2"
        yield Problem("rollout.n", text, rollout.n)
    if config.algorithm.dynamic_sampling.enabled and rollout.engine == "recorded" and rollout.replay_dir is None:
        text = "needs an engine that generates, or recorded rounds (rollout.replay_dir); set it to false"
        yield Problem("algorithm.dynamic_sampling.enabled", text, True)


def _check_algorithm(config: ExperimentConfig) -> Iterator[Problem]:
    alg, trainer = config.algorithm, config.trainer
    if trainer.critic_warmup and not config.needs_critic:
        text = f"adv_estimator {alg.adv_estimator} has no critic; set it to 0"
        yield Problem("trainer.critic_warmup", text, trainer.critic_warmup)
    elif trainer.total_iterations is not None and trainer.critic_warmup >= trainer.total_iterations:
        text = f"must be less than trainer.total_iterations ({trainer.total_iterations}), or no actor is trained"
        yield Problem("trainer.critic_warmup", text, trainer.critic_warmup)
    ctrl = alg.kl_ctrl
    zero = ctrl.kl_coef == 0 and "algorithm.kl_ctrl.kl_coef" not in config.schedules
    if alg.use_kl_in_reward and ctrl.type != "fixed" and zero:
        yield Problem("algorithm.kl_ctrl.kl_coef", f"type {ctrl.type} scales it, so it stays 0; start above 0", 0.0)
    if not config.needs_critic:
        for key, used in (
            ("adaptive_lam_alpha", alg.adaptive_lam_alpha is not None),
            ("bootstrap_truncated", alg.bootstrap_truncated),
        ):
            if used:
                text = f"is used by gae only, not by {alg.adv_estimator}; remove it"
                yield Problem(f"algorithm.{key}", text, getattr(alg, key))
    yield from _check_shaping(config)


def _check_shaping(config: ExperimentConfig) -> Iterator[Problem]:
    shaping, correction = config.algorithm.reward_shaping, config.algorithm.correction
    if shaping.clip is not None and shaping.clip[0] >= shaping.clip[1]:
        yield Problem("algorithm.reward_shaping.clip", "low must be below high; swap them", shaping.clip)
    limit = config.data.max_response_length
    if shaping.overlong.enabled and shaping.overlong.buffer_len > limit:
        text = f"is longer than data.max_response_length ({limit}); shorten it"
        yield Problem("algorithm.reward_shaping.overlong.buffer_len", text, shaping.overlong.buffer_len)
    if correction.band_low >= correction.band_high:
        text = f"must be below band_high ({correction.band_high})"
        yield Problem("algorithm.correction.band_low", text, correction.band_low)


def _check_policy_loss(config: ExperimentConfig) -> Iterator[Problem]:
    actor = config.actor
    if actor.policy_loss == "reinforce" and actor.ppo_epochs > 1:
        text = "REINFORCE does not correct for a changed policy: more than one epoch is biased"
        yield Problem("actor.ppo_epochs", text, actor.ppo_epochs, note=True)
    if actor.policy_loss == "gspo" and actor.parallel.context_parallel_size > 1:
        text = "GSPO's ratio needs whole sequences on a rank: set actor.parallel.context_parallel_size to 1"
        yield Problem("actor.policy_loss", text, actor.policy_loss)
    if actor.policy_loss == "rebel":
        yield from _check_rebel(config)
    if actor.use_kl_loss and actor.kl_loss_coef == 0 and "actor.kl_loss_coef" not in config.schedules:
        text = "the KL loss has weight 0: a reference is run for the metric only"
        yield Problem("actor.kl_loss_coef", text, actor.kl_loss_coef, note=True)


def _check_rebel(config: ExperimentConfig) -> Iterator[Problem]:
    if config.rollout.n < 2:
        yield Problem("rollout.n", "policy_loss rebel compares responses of one prompt; use n >= 2", config.rollout.n)
    if config.needs_critic:
        text = "policy_loss rebel has no use for a critic; use rloo"
        yield Problem("algorithm.adv_estimator", text, config.algorithm.adv_estimator)
    if config.actor.loss_agg_mode != "seq-mean-token-sum":
        text = "policy_loss rebel speaks of whole responses; use seq-mean-token-sum"
        yield Problem("actor.loss_agg_mode", text, config.actor.loss_agg_mode)
    if config.algorithm.correction.mode != "none":
        text = "policy_loss rebel takes no importance weights; use none"
        yield Problem("algorithm.correction.mode", text, config.algorithm.correction.mode)


def _check_sft_mix(config: ExperimentConfig, facts: ModelFacts | None) -> Iterator[Problem]:
    actor, mix = config.actor, config.actor.sft_mix
    yield from _check_data_files("actor.sft_mix.files", mix.files)
    if not mix.files or mix.max_length is None:
        return
    limit = facts.max_positions if facts else None
    if limit is not None and mix.max_length > limit:
        yield Problem("actor.sft_mix.max_length", f"the model ends at {limit} tokens; lower it", mix.max_length)
    if facts and facts.window and mix.max_length > facts.window:
        text = f"the model attends to the last {facts.window} tokens only (sliding_window), {_NO_WINDOW}"
        yield Problem("actor.sft_mix.max_length", text, mix.max_length)
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < mix.max_length:
        text = f"is more than actor.ppo_max_token_len_per_gpu ({actor.ppo_max_token_len_per_gpu}); lower it"
        yield Problem("actor.sft_mix.max_length", text, mix.max_length)


# --- lengths and batches -------------------------------------------------------------------------------


_NO_POLICY = "is a reward model, which cannot generate; give the folder of a language model"
_NO_WINDOW = "which is not supported; shorten the samples to that"


def _check_lengths(config: ExperimentConfig, facts: dict[str, ModelFacts | None]) -> Iterator[Problem]:
    data = config.data
    longest = data.max_prompt_length + data.max_response_length
    said = f"prompt + response may be {longest} tokens"
    limits = [(f.max_positions, role) for role, f in facts.items() if f is not None and f.max_positions]
    if limits and min(limits)[0] < longest:
        limit, role = min(limits)
        text = f"{said} but the {role} model ends at {limit}; lower max_prompt_length or max_response_length"
        yield Problem("data.max_response_length", text, data.max_response_length)
    windows = [(f.window, role) for role, f in facts.items() if f is not None and f.window]
    if windows and min(windows)[0] < longest:
        window, role = min(windows)
        text = f"{said} but the {role} model attends to the last {window} only (sliding_window), {_NO_WINDOW}"
        yield Problem("data.max_response_length", text, data.max_response_length)
    budgets: list[tuple[str, int | None]] = []
    if config.actor.use_dynamic_bsz:
        budgets.append(("actor.ppo_max_token_len_per_gpu", config.actor.ppo_max_token_len_per_gpu))
        budgets.append(("actor.log_prob_max_token_len_per_gpu", config.actor.log_prob_max_token_len_per_gpu))
        if config.needs_reference:
            name = "log_prob_max_token_len_per_gpu"
            budgets.append((f"reference.{name}", config.reference.log_prob_max_token_len_per_gpu))
        for i, reward in enumerate(config.rewards):
            if reward.type == "model":
                budgets.append((f"rewards.{i}.max_token_len_per_gpu", reward.max_token_len_per_gpu))
    if config.needs_critic and config.critic.use_dynamic_bsz:
        budgets.append(("critic.ppo_max_token_len_per_gpu", config.critic.ppo_max_token_len_per_gpu))
    wrong: dict[int, str] = {}
    for key, budget in budgets:
        if budget is not None and budget < longest:
            wrong.setdefault(budget, key)  # what other keys inherited from this one is said once
    text = f"{said}, more than this budget; raise it to {longest} or shorten the lengths"
    for budget, key in wrong.items():
        yield Problem(key, text, budget)
    if config.rollout.engine == "embedded" and config.rollout.max_batch_tokens < longest:
        yield Problem("rollout.max_batch_tokens", text, config.rollout.max_batch_tokens)


def _check_batches(config: ExperimentConfig, world_size: int | None) -> Iterator[Problem]:
    n, total = config.rollout.n, config.data.train_batch_size
    layouts = roles(config)
    trained: list[tuple[str, ActorConfig | CriticConfig]] = [("actor", config.actor)]
    if config.needs_critic:
        trained.append(("critic", config.critic))
    said: list[tuple[int, ParallelConfig]] = []
    for role, section in trained:
        mini = section.ppo_mini_batch_size
        assert mini is not None, "call resolved() first"
        if (mini, layouts[role]) in said:
            continue
        said.append((mini, layouts[role]))
        key = f"{role}.ppo_mini_batch_size"
        if mini > total or total % mini:
            text = f"must divide data.train_batch_size ({total}); nearest is {nearest_divisor(total, mini)}"
            yield Problem(key, text, mini)
        yield from _check_share(key, mini, n, layouts[role], world_size)


def _check_share(
    key: str, batch: int, n: int, parallel: ParallelConfig, world_size: int | None, what: str = "samples"
) -> Iterator[Problem]:
    """Does a batch of `batch` prompts (n samples each) give every data-parallel rank its share?"""
    if world_size is None or world_size % parallel.model_parallel_size:
        return
    dp = world_size // parallel.model_parallel_size
    samples = batch * n
    said = f"{batch} x {n} {what}" if n > 1 else f"{batch} {what}"
    if samples < dp:
        least = -(-dp // n)
        text = f"{said} for {dp} data-parallel ranks leave some idle; use at least {least}, best a multiple"
        yield Problem(key, text, batch)
    elif samples % dp:
        text = f"{said} do not divide by {dp} data-parallel ranks: shares are unequal (slower, still correct)"
        yield Problem(key, text, batch, note=True)


def nearest_divisor(total: int, wanted: int) -> int:
    """The divisor of `total` closest to `wanted`; the smaller one if two are equally close."""
    divisors = [d for i in range(1, int(total**0.5) + 1) if total % i == 0 for d in (i, total // i)]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def _check_optim(prefix: str, optim: OptimConfig) -> Iterator[Problem]:
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield Problem(f"{prefix}.betas", "each must be >= 0 and < 1", optim.betas)
    if optim.lr > 1e-2:
        yield Problem(f"{prefix}.lr", "is unusually high for a language model", optim.lr, note=True)


# --- supervised fine-tuning and reward models ----------------------------------------------------------


def _check_sft(config: ExperimentConfig, world_size: int | None) -> Iterator[Problem]:
    yield from _check_supervised(config, "sft", "supervised fine-tuning", "examples", 1, world_size)


def _check_reward_model(config: ExperimentConfig, world_size: int | None) -> Iterator[Problem]:
    # The two sequences of a pair are scored together.
    yield from _check_supervised(config, "reward_model", "`megappo reward-model`", "pairs", 2, world_size)


def _check_supervised(
    config: ExperimentConfig, name: str, what: str, rows: str, sequences: int, world_size: int | None
) -> Iterator[Problem]:
    """The section `name`, whose rows (so called) are `sequences` sequences of up to max_length tokens each."""
    section: SftConfig | RewardModelConfig | None = getattr(config, name)
    if section is None:
        yield Problem(name, f"is required for {what}; add the section")
        return
    facts, wrong = read_model_folder(config.model.path)
    if wrong or (facts and facts.scores and name == "sft"):
        yield Problem("model.path", wrong or _NO_POLICY, config.model.path)
    yield from _check_tokenizer(config)
    yield from check_layout(f"{name}.parallel", section.parallel, facts, world_size)
    if not section.train_files:
        yield Problem(f"{name}.train_files", f"no training {rows}; list at least one file", section.train_files)
    yield from _check_data_files(f"{name}.train_files", section.train_files)
    yield from _check_data_files(f"{name}.val_files", section.val_files)
    limit = facts.max_positions if facts else None
    if limit is not None and section.max_length > limit:
        yield Problem(f"{name}.max_length", f"the model ends at {limit} tokens; lower it", section.max_length)
    if facts and facts.window and section.max_length > facts.window:
        text = f"the model attends to the last {facts.window} tokens only (sliding_window), {_NO_WINDOW}"
        yield Problem(f"{name}.max_length", text, section.max_length)
    longest = sequences * section.max_length
    if section.use_dynamic_bsz and section.max_token_len_per_gpu < longest:
        times = f"{sequences} x " if sequences > 1 else ""
        text = f"is less than {times}{name}.max_length ({longest}); raise it or shorten max_length"
        yield Problem(f"{name}.max_token_len_per_gpu", text, section.max_token_len_per_gpu)
    yield from _check_share(f"{name}.batch_size", section.batch_size, 1, section.parallel, world_size, rows)
    yield from _check_optim(f"{name}.optim", section.optim)

"""`megappo config import-verl`: verl's YAML and command lines as a MegaPPO experiment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megappo.config.keys import value_text
from megappo.config.problems import show_value
from megappo.config.schema.base import Section, section_type
from megappo.config.schema.experiment import ExperimentConfig
from megappo.config.validate import build
from megappo.config.verl_keys import CONVERTED, DROPPED, HARMLESS, RENAMED, VERL_DEFAULTS, NoCounterpart
from megappo.config.verl_source import read_verl
from megappo.config.yaml_io import dump_yaml

MODEL_PLACEHOLDER = "PATH/TO/MODEL"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass
class Translation:
    """A MegaPPO configuration tree, and one line for everything that did not go over as it was."""

    tree: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def yaml(self) -> str:
        """The experiment file, with the warnings as comments on top."""
        head = ["# Translated from verl by `megappo config import-verl`."]
        head += [f"# - {line}" for line in self.warnings]
        return "\n".join(head) + "\n" + dump_yaml(self.tree)


def import_verl(
    path: str | Path | None = None, overrides: Sequence[str] = (), *, verl_defaults: bool = False
) -> Translation:
    """Translate a verl YAML file or launch script, and overrides (`a.b=c`, `+a.b=c`, `~a.b`), to MegaPPO.

    Some defaults differ: what the settings leave out gets MegaPPO's default and a warning lists the
    differences; with `verl_defaults` verl's values are written out instead.

    Raises UserError: missing file, bad YAML, an argument that is not a setting.
    """
    settings, warnings, nulls = read_verl(path, overrides)
    work = _Work(_move_critic(settings, warnings), warnings)
    if f"{_ACTOR}.clip_ratio_c" in nulls:
        work.out["actor.clip_ratio_c"] = None
    for step in _STEPS:
        step(work)
    _translate(work)
    _finish(work, verl_defaults)
    result = Translation(_ordered(_nest(work.out), ExperimentConfig), work.warnings)
    _, problems = build(result.tree)
    result.warnings += [f"{problem}" for problem in problems]
    return result


@dataclass
class _Work:
    """`verl`: settings still to be translated (dotted); `out`: MegaPPO's (dotted)."""

    verl: dict[str, Any]
    warnings: list[str]
    out: dict[str, Any] = field(default_factory=dict)

    def warn(self, key: str, value: Any, text: str) -> None:
        self.warnings.append(f"{key} = {show_value(value)}: {text}")

    def put(self, source: str, target: str, value: Any) -> None:
        """Set a key; the first of two different values stays."""
        if target in self.out and self.out[target] != value:
            kept = show_value(self.out[target])
            self.warn(source, value, f"dropped: {target} is already {kept}; check which one you want")
        else:
            self.out[target] = value


def _move_critic(settings: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Some documents put `critic` under `actor_rollout_ref`: read it as the critic's section."""
    wrong = "actor_rollout_ref.critic."
    out = {key: value for key, value in settings.items() if not key.startswith(wrong)}
    for key, value in settings.items():
        if key.startswith(wrong):
            name = "critic." + key.removeprefix(wrong)
            out.setdefault(name, value)
            warnings.append(f"{key}: read as {name} (verl has no critic under actor_rollout_ref)")
    return out


# --- steps that look at several keys; each takes what it used out of `work.verl` ------------------------


def _gradient_clip(work: _Work) -> None:
    """FSDP workers read `grad_clip`, Megatron workers `optim.clip_grad`; full dumps hold both."""
    for prefix in (_ACTOR, "critic"):
        both = (f"{prefix}.grad_clip", f"{prefix}.optim.clip_grad")
        if all(key in work.verl for key in both):
            fsdp = str(work.verl.get(f"{prefix}.strategy", "fsdp")).startswith("fsdp")
            del work.verl[both[1] if fsdp else both[0]]


def _recompute(work: _Work) -> None:
    """Megatron's granularity says more than the model's switch."""
    granularity = "megatron.override_transformer_config.recompute_granularity"
    for key, switch in (
        (f"{_ACTOR}.{granularity}", "actor_rollout_ref.model.enable_gradient_checkpointing"),
        (f"critic.{granularity}", "critic.model.enable_gradient_checkpointing"),
    ):
        if key in work.verl:
            work.verl.pop(switch, None)


def _learning_rate(work: _Work) -> None:
    for prefix, role in ((f"{_ACTOR}.optim", "actor"), ("critic.optim", "critic")):
        steps = work.verl.get(f"{prefix}.lr_warmup_steps")
        if isinstance(steps, int) and steps >= 0:
            work.verl.pop(f"{prefix}.lr_warmup_steps_ratio", None)  # verl gives steps precedence
        floor, peak = work.verl.pop(f"{prefix}.min_lr", None), work.verl.get(f"{prefix}.lr")
        if floor:
            if isinstance(peak, (int, float)) and isinstance(floor, (int, float)) and peak > 0:
                work.put(f"{prefix}.min_lr", f"{role}.optim.min_lr_ratio", floor / peak)
            else:
                work.warn(f"{prefix}.min_lr", floor, f"dropped: set {role}.optim.min_lr_ratio = min_lr / lr")


def _micro_batches(work: _Work) -> None:
    """Deprecated sizes that count samples over all GPUs; and separate dynamic batching for log-probs."""
    counts = (work.verl.get("trainer.n_gpus_per_node"), work.verl.get("trainer.nnodes", 1))
    gpus = counts[0] * counts[1] if all(isinstance(count, int) for count in counts) else 0
    for prefix, name in (
        (_ACTOR, "ppo_micro_batch_size"),
        ("critic", "ppo_micro_batch_size"),
        ("actor_rollout_ref.ref", "log_prob_micro_batch_size"),
        (_ROLLOUT, "log_prob_micro_batch_size"),
    ):
        key = f"{prefix}.{name}"
        value = work.verl.pop(key, None)
        if value is None or f"{key}_per_gpu" in work.verl:
            continue
        if isinstance(value, int) and gpus > 0:
            work.verl[f"{key}_per_gpu"] = max(1, value // gpus)
            work.warn(key, value, f"counts samples over all {gpus} GPUs: read as {max(1, value // gpus)} per GPU")
        else:
            work.warn(key, value, f"dropped: it counts samples over all GPUs; set {name}_per_gpu")
    dynamic = work.verl.get(f"{_ACTOR}.use_dynamic_bsz", False)
    for prefix in (_ROLLOUT, "actor_rollout_ref.ref"):
        key = f"{prefix}.log_prob_use_dynamic_bsz"
        value = work.verl.pop(key, dynamic)
        if value != dynamic:
            work.warn(key, value, "dropped: log-probs are batched as actor.use_dynamic_bsz says")


def _lengths(work: _Work) -> None:
    for name, ours in (("prompt_length", "max_prompt_length"), ("response_length", "max_response_length")):
        value = work.verl.pop(f"{_ROLLOUT}.{name}", None)
        if value is not None:
            work.verl.setdefault(f"data.{ours}", value)
            if work.verl[f"data.{ours}"] != value:
                work.warn(f"{_ROLLOUT}.{name}", value, f"dropped: data.{ours} holds")


def _greedy(work: _Work) -> None:
    """`do_sample: false` means greedy; a temperature beside it has no effect in verl."""
    temperature = work.verl.pop(f"{_ROLLOUT}.val_kwargs.temperature", None)
    if work.verl.pop(f"{_ROLLOUT}.val_kwargs.do_sample", None) is False:
        temperature = 0.0
    if temperature is not None:
        work.out["rollout.val.temperature"] = temperature
    if work.verl.pop(f"{_ROLLOUT}.do_sample", True) is False:
        work.warn(f"{_ROLLOUT}.do_sample", False, "dropped: training needs sampling; rollout.temperature holds")


def _correction(work: _Work) -> None:
    """Importance weights for the rollout/training mismatch."""
    old = work.verl.pop(f"{_ACTOR}.tis_imp_ratio_cap", None)
    if isinstance(old, (int, float)) and old > 0:
        work.out |= {"algorithm.correction.mode": "token", "algorithm.correction.clip_max": float(old)}
    prefix = "algorithm.rollout_correction"
    mode = work.verl.pop(f"{prefix}.rollout_is", None)
    limit = work.verl.pop(f"{prefix}.rollout_is_threshold", None)
    if mode in ("token", "sequence"):
        work.out["algorithm.correction.mode"] = mode
        if isinstance(limit, (int, float)):
            work.out["algorithm.correction.clip_max"] = float(limit)
    elif mode is not None:
        work.warn(f"{prefix}.rollout_is", mode, "dropped: MegaPPO has token and sequence")


def _dynamic_sampling(work: _Work) -> None:
    """DAPO's `filter_groups`; verl fails when the rounds do not suffice."""
    prefix, ours = "algorithm.filter_groups", "algorithm.dynamic_sampling"
    if work.verl.get(f"{prefix}.enable") is not True:
        return
    del work.verl[f"{prefix}.enable"]
    metric = work.verl.pop(f"{prefix}.metric", None)
    rounds = work.verl.pop(f"{prefix}.max_num_gen_batches", 0)
    work.out |= {f"{ours}.enabled": True, f"{ours}.shortfall": "fail"}
    work.out[f"{ours}.signal"] = "success" if metric == "acc" else "score"
    if isinstance(rounds, int) and rounds > 0:
        work.out[f"{ours}.max_rounds"] = rounds
    else:
        work.out[f"{ours}.max_rounds"] = 10
        work.warn(f"{prefix}.max_num_gen_batches", rounds, f"no limit in verl: read as {ours}.max_rounds 10")


def _ranks(work: _Work) -> None:
    gpus, nodes = work.verl.pop("trainer.n_gpus_per_node", None), work.verl.pop("trainer.nnodes", None)
    if gpus is not None or nodes is not None:
        launch = f"torchrun --nnodes {nodes or 1} --nproc-per-node {gpus or 8} -m megappo_cli train CFG"
        work.warnings.append(f"trainer.n_gpus_per_node, nnodes: not in the file; start with `{launch}`")


def _rewards(work: _Work) -> None:
    """A custom function, else verl's choice by data source, of which MegaPPO ships the GSM8K rule."""
    for prefix in ("custom_reward_function", "reward.custom_reward_function"):
        path = work.verl.pop(f"{prefix}.path", None)
        name = work.verl.pop(f"{prefix}.name", None) or "compute_score"
        head = f"{prefix}.reward_kwargs."
        kwargs = {key.removeprefix(head): work.verl.pop(key) for key in list(work.verl) if key.startswith(head)}
        if path is not None and "rewards" not in work.out:
            reward: dict[str, Any] = {"type": "function", "path": f"{path}:{name}"}
            work.out["rewards"] = [reward | ({"kwargs": _nest(kwargs)} if kwargs else {})]
    if "rewards" not in work.out:
        work.out["rewards"] = [{"type": "gsm8k"}]
        if "gsm8k" not in str(work.verl.get("data.train_files", "")):
            text = "verl chooses a rule by data_source; GSM8K's is filled in, replace it if that is wrong"
            work.warnings.append(f"rewards: {text}")


_STEPS = (
    _gradient_clip,
    _recompute,
    _learning_rate,
    _micro_batches,
    _lengths,
    _greedy,
    _correction,
    _dynamic_sampling,
    _ranks,
    _rewards,
)


# --- all other keys -------------------------------------------------------------------------------------


def _translate(work: _Work) -> None:
    dropped: dict[str, list[str]] = {}
    off = _switched_off(work.verl)
    for key, value in work.verl.items():
        if key in RENAMED:
            work.put(key, RENAMED[key], value)
        elif key in CONVERTED:
            target, convert = CONVERTED[key]
            try:
                value = convert(before := value)
            except NoCounterpart as error:
                work.warn(key, before, f"dropped: {error}")
                continue
            if value is not None:
                work.put(key, target, value)
            _say_lost_loggers(work, key, before)
        elif not key.startswith(off):
            _drop(work, key, value, dropped)
    for (pattern, reason), keys in ((k.split("\n"), v) for k, v in dropped.items()):
        name = keys[0] if len(keys) == 1 else f"{pattern} ({len(keys)} keys)"
        work.warnings.append(f"{name}: dropped: {reason}")


def _switched_off(verl: dict[str, Any]) -> tuple[str, ...]:
    """Prefixes of sections with `enable: false` or `enabled: false`: nothing in them matters."""
    ends = (".enable", ".enabled")
    return tuple(key.rpartition(".")[0] + "." for key, v in verl.items() if v is False and key.endswith(ends))


def _say_lost_loggers(work: _Work, key: str, value: Any) -> None:
    if key == "trainer.logger":
        names = value if isinstance(value, list) else [value]
        lost = [str(name) for name in names if name not in ("console", "tensorboard", "file")]
        if lost:
            work.warn(key, value, f"{', '.join(lost)} dropped: MegaPPO has console, tensorboard, jsonl")


def _drop(work: _Work, key: str, value: Any, dropped: dict[str, list[str]]) -> None:
    """Say that a key is dropped: one line a pattern; nothing where the value means `off`."""
    pattern, reason = next(((p, r) for p, r in DROPPED if fnmatchcase(key, p)), ("", "has no counterpart"))
    if not pattern:
        work.warn(key, value, f"dropped: {reason} in MegaPPO")
        return
    off = value is False or value in (-1, 0, "", [], {}, "none", "disabled") or HARMLESS.get(key) == value
    if reason and not off:
        dropped.setdefault(f"{pattern}\n{reason}", []).append(f"{key} = {show_value(value)}")


def _finish(work: _Work, verl_defaults: bool) -> None:
    """What only shows once all keys are known."""
    out = work.out
    if "model.path" not in out:
        out["model.path"] = MODEL_PLACEHOLDER
        work.warnings.append(f"model.path: not given; replace {MODEL_PLACEHOLDER} in the result")
    for key in ("model.path", "critic.path", "reference.path"):
        value = str(out.get(key, "/"))
        if value != MODEL_PLACEHOLDER and not value.startswith(("/", "~", ".")) and value.count("/") == 1:
            work.warn(key, value, "looks like a name on a hub; download it and give the local folder")
    files = [
        *out.get("data.train_files", []),
        *out.get("data.val_files", []),
        out["rewards"][0].get("path", "~"),
    ]
    if not all(str(file).startswith(("/", "~")) for file in files):
        work.warnings.append("relative paths count from the YAML file's folder (verl: from the current folder)")
    if out.get("critic.path") == out["model.path"]:
        del out["critic.path"]  # the default
    top_p, top_k = out.get("rollout.top_p", 1), out.get("rollout.top_k", -1)
    if (isinstance(top_p, (int, float)) and top_p < 1) or (isinstance(top_k, int) and top_k > 0):
        out["rollout.allow_truncated_sampling"] = True
        work.warnings.append("rollout.top_p, top_k: truncated sampling biases the ratio; better leave them out")
    if out.get("algorithm.adv_estimator", "gae") != "gae":
        unused = [key for key in out if key.startswith("critic.")]
        for key in unused:
            del out[key]
        if unused:
            work.warnings.append(f"critic.* ({len(unused)} keys): dropped: this estimator has no critic")
    _defaults(work, verl_defaults)


def _defaults(work: _Work, verl_defaults: bool) -> None:
    ours = ExperimentConfig.model_validate({"model": {"path": "x"}})
    has_critic = work.out.get("algorithm.adv_estimator", "gae") == "gae"
    differ: list[str] = []
    for key, theirs in VERL_DEFAULTS.items():
        if key in work.out or (key.startswith("critic.") and not has_critic):
            continue
        if verl_defaults:
            work.out[key] = theirs
            continue
        value: Any = ours
        for part in key.split("."):
            value = getattr(value, part)
        differ.append(f"{key} {value_text(value)} (verl {value_text(theirs)})")
    if differ:
        work.warnings.append(
            f"not given, so MegaPPO's defaults hold (--verl-defaults writes verl's): {', '.join(differ)}"
        )


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings."""
    tree: dict[str, Any] = {}
    for key in flat:
        here = tree
        *sections, name = key.split(".")
        for part in sections:
            here = here.setdefault(part, {})
        here[name] = flat[key]
    return tree


def _ordered(tree: dict[str, Any], cls: type[Section]) -> dict[str, Any]:
    """The tree with its keys in the schema's order."""
    out: dict[str, Any] = {}
    for name, info in cls.model_fields.items():
        if name in tree:
            section, is_list = section_type(info)
            nested = section is not None and not is_list and isinstance(tree[name], dict)
            out[name] = _ordered(tree[name], section) if nested else tree[name]
    return out

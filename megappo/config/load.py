"""`load_config`: a YAML file plus dotted overrides -> a checked, resolved ExperimentConfig."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from megappo.config.checks import check_config
from megappo.config.problems import Problem, Sources
from megappo.config.schema.base import Section, is_mapping, is_path_field, section_type
from megappo.config.schema.experiment import ExperimentConfig
from megappo.config.schema.rewards import RewardConfig
from megappo.config.validate import build, normalise
from megappo.config.yaml_io import parse_yaml, read_yaml_mapping, yaml_error_line

Kind = Literal["train", "sft", "reward-model"]


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    kind: Kind = "train",
) -> ExperimentConfig:
    """Read, override, validate, resolve and check a configuration.

    `overrides` are `a.b=c` (c is YAML; `rewards.0.weight=2` reaches into lists). Relative paths count from
    the YAML file's folder, in overrides from the current folder; `~` is the home folder. With `world_size`
    (ranks) the layouts are checked against it too. In the result every key that inherits when null is
    concrete.

    Raises UserError with one line per problem: where, key, value, remedy.
    """
    config, sources = read_config(path, overrides, kind=kind)
    sources.raise_if_any(check_config(config, kind=kind, world_size=world_size))
    return config


def read_config(
    path: str | Path, overrides: Sequence[str] = (), *, kind: Kind = "train"
) -> tuple[ExperimentConfig, Sources]:
    """As `load_config` but without the cross-field checks and without looking at models or data."""
    path = Path(path).expanduser()
    sources = Sources(file=str(path))
    tree, problems = normalise(read_yaml_mapping(path), ExperimentConfig)
    tree = _absolute(tree, ExperimentConfig, path.resolve().parent)
    problems += _apply_overrides(tree, overrides, sources)
    config, more = build(tree)
    problems += more
    section = kind.replace("-", "_")
    if kind != "train" and tree.get(section) is None:
        problems.append(Problem(section, f"is required for `megappo {kind}`; add the section"))
    sources.raise_if_any(problems)
    assert config is not None  # no problems, so it was built
    config = config.resolved()
    config.trainer.output_dir = absolute_path(config.trainer.output_dir, path.resolve().parent)  # the default
    return config, sources


# --- paths ---------------------------------------------------------------------------------------------


def _absolute(tree: Any, cls: type[Section], base: Path) -> Any:
    """The tree with the values of all path keys made absolute."""
    if not isinstance(tree, dict):
        return tree
    return {
        name: _absolute_value(value, cls, name, base) if name in cls.model_fields else value
        for name, value in tree.items()
    }


def _absolute_value(value: Any, cls: type[Section], name: str, base: Path) -> Any:
    info = cls.model_fields[name]
    section, is_list = section_type(info)
    if section is not None and is_mapping(info):
        return {k: _absolute(v, section, base) for k, v in value.items()} if isinstance(value, dict) else value
    if section is not None and is_list:
        return [_absolute(item, section, base) for item in value] if isinstance(value, list) else value
    if section is not None:
        return _absolute(value, section, base)
    if is_path_field(info):
        items = value if isinstance(value, list) else [value]
        items = [absolute_path(item, base) if isinstance(item, str) else item for item in items]
        return items if isinstance(value, list) else items[0]
    if name == "chat_template" and isinstance(value, str) and "{" not in value and "\n" not in value:
        return absolute_path(value, base)
    if cls is RewardConfig and name == "path" and isinstance(value, str) and (".py:" in value or ":" not in value):
        return absolute_path(value, base)  # path/to/file.py:function, or a model's folder
    return value


def absolute_path(value: str, base: Path) -> str:
    """`value` with `~` expanded, counted from `base` if relative, `..` and `.` removed (links are kept)."""
    return os.path.normpath(base / Path(value).expanduser()) if value else value


# --- overrides -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Target:
    """Where an override points: the key with aliases replaced, and the section and field that it reaches."""

    parts: list[str]
    owner: type[Section] | None  # None: inside a free-form mapping, or unknown
    field: str


def _apply_overrides(tree: dict[str, Any], overrides: Sequence[str], sources: Sources) -> list[Problem]:
    problems: list[Problem] = []
    spelled: dict[str, str] = {}  # key with aliases replaced -> as typed first
    for text in overrides:
        name, equals, raw = text.partition("=")
        name = name.strip().replace("[", ".").replace("]", "")
        parts = name.split(".")
        if not equals or not all(parts):
            problems.append(Problem(text, "is not an override; write section.key=value"))
            continue
        target = _locate(parts)
        dotted = ".".join(target.parts)
        if spelled.setdefault(dotted, name) != name:
            problems.append(Problem(name, f"sets the same key as {spelled[dotted]}; give only one of them"))
            continue
        sources.overrides[dotted] = text
        try:
            value = parse_yaml(raw)
        except (yaml.YAMLError, ValueError) as error:
            what = yaml_error_line(error)
            problems.append(Problem(dotted, f"the value is not valid YAML ({what}); quote it", raw))
            continue
        problems += _set(tree, target.parts, _value_from_cwd(target, value))
    return problems


def _locate(parts: list[str]) -> _Target:
    out: list[str] = []
    cls: type[Section] | None = ExperimentConfig
    owner, field = cls, ""
    for part in parts:
        if cls is None or part.isdigit():
            out.append(part)
            continue
        part = cls.ALIASES.get(part, part)
        out.append(part)
        owner, field = cls, part
        rest = parts[len(out) :]
        if part not in cls.model_fields:
            return _Target(out + rest, None, part)
        info = cls.model_fields[part]
        cls, _ = section_type(info)
        if cls is not None and is_mapping(info) and rest:
            # The names in a mapping are dotted keys themselves: the name ends where a key of its section begins.
            end = next((i for i, p in enumerate(rest) if i > 0 and p in cls.model_fields), len(rest))
            return _Target([*out, ".".join(rest[:end]), *rest[end:]], None, part)
    return _Target(out, owner, field)


def _value_from_cwd(target: _Target, value: Any) -> Any:
    """The value with relative paths counted from the current folder."""
    if target.owner is None:
        return value
    if target.parts[-1].isdigit() and isinstance(value, dict):
        section, _ = section_type(target.owner.model_fields[target.field])
        return _absolute(value, section, Path.cwd()) if section is not None else value
    return _absolute_value(value, target.owner, target.field, Path.cwd())


def _set(tree: dict[str, Any], parts: list[str], value: Any) -> list[Problem]:
    """Set a value deep in a tree of dicts and lists, making what is missing on the way."""
    here: Any = tree
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        dotted = ".".join(parts[: i + 1])
        if isinstance(here, list):
            if not part.isdigit() or int(part) > len(here):
                return [Problem(dotted, f"the list has {len(here)} items; use a number from 0 to {len(here)}")]
            if int(part) == len(here):
                here.append(None)
            slot: Any = int(part)
        elif isinstance(here, dict):
            slot = part
        else:
            return [Problem(dotted, f"{'.'.join(parts[:i])} is a plain value and has no keys under it")]
        if last:
            here[slot] = value
            return []
        child = here[slot] if isinstance(here, list) else here.get(slot)
        if child is None:
            child = [] if parts[i + 1].isdigit() else {}
            here[slot] = child
        here = child
    return []

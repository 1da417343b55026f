"""Every configuration key with type, default and meaning: rows, a table, and docs/configuration.md."""

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megappo.config.schema.base import Section, is_mapping, section_type
from megappo.config.schema.experiment import INHERITS, ExperimentConfig
from megappo.config.schema.optim import OptimConfig
from megappo.config.schema.parallel import ParallelConfig

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class KeyInfo:
    """One key; `group` is the heading it stands under (sections that several roles have stand once)."""

    name: str
    type: str
    default: str
    meaning: str
    group: str
    inherits: str | None = None
    aliases: tuple[str, ...] = ()


def iter_keys() -> Iterator[KeyInfo]:
    """All keys in the order of the schema; `rewards[i].weight` stands for every item of the list."""
    yield from _walk(ExperimentConfig, "", "")


def _walk(cls: type[Section], prefix: str, group: str) -> Iterator[KeyInfo]:
    for name, info in cls.model_fields.items():
        section, is_list = section_type(info)
        here = group or name
        if section is None:
            yield _row(cls, prefix, name, info, here)
        elif is_mapping(info):
            yield from _walk(section, f"{prefix}{name}[key].", here)
        elif is_list:
            yield from _walk(section, f"{prefix}{name}[i].", here)
        elif issubclass(section, ParallelConfig):
            yield from _walk(section, f"{prefix}{name}.", "parallel")
        elif issubclass(section, OptimConfig):
            yield from _walk(section, f"{prefix}{name}.", "optim")
        else:
            yield from _walk(section, f"{prefix}{name}.", here)


def _row(cls: type[Section], prefix: str, name: str, info: FieldInfo, group: str) -> KeyInfo:
    return KeyInfo(
        name=prefix + name,
        type=_type_text(info),
        default=_default_text(info),
        meaning=info.description or "",
        group=group,
        inherits=INHERITS.get(prefix + name),
        aliases=tuple(alias for alias, target in cls.ALIASES.items() if target == name),
    )


def _type_text(info: FieldInfo) -> str:
    text = _annotation_text(info.annotation)
    limits = [_limit_text(item) for item in info.metadata]
    limits = [item for item in limits if item]
    base, null, _ = text.partition(" or null")
    return " and ".join([base + (" " + limits[0] if limits else ""), *limits[1:]]) + null


def _limit_text(item: Any) -> str:
    for kind, sign, name in ((Gt, ">", "gt"), (Ge, ">=", "ge"), (Lt, "<", "lt"), (Le, "<=", "le")):
        if isinstance(item, kind):
            return f"{sign} {getattr(item, name):g}"
    return ""


def _annotation_text(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotation_text(args[0])
    if origin is Literal:
        return " | ".join(str(arg) for arg in args)
    if origin in (typing.Union, UnionType):
        rest = [arg for arg in args if arg is not NoneType]
        return " | ".join(_annotation_text(arg) for arg in rest) + (" or null" if len(rest) < len(args) else "")
    if origin is list:
        return f"list of {_annotation_text(args[0])}"
    if origin is tuple:
        return f"list of {len(args)} {_annotation_text(args[0])}s"
    if origin is dict:
        return "mapping"
    return {str: "text", float: "number", int: "integer", bool: "true | false"}[annotation]


def _default_text(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    return value_text(value)


def value_text(value: Any) -> str:
    """A default as it would be written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- rendering ------------------------------------------------------------------------------------------


def rich_table(width: int) -> "Table":
    """All keys as a table for a terminal of that many columns; narrow ones do without the types."""
    from rich.markup import escape
    from rich.table import Table

    columns = ("name", "type", "default", "meaning") if width >= 120 else ("name", "default", "meaning")
    table = Table(pad_edge=False, box=None)
    for column in columns:
        limit = {"type": 24, "default": 16}.get(column)
        title = "key" if column == "name" else column
        table.add_column(title, overflow="fold", no_wrap=column == "name", max_width=limit)
    for row in iter_keys():
        table.add_row(*(escape(getattr(row, column)) for column in columns))
    return table


_INTRO = """# Configuration reference

<!-- Generated from megappo/config/schema by `megappo config keys --markdown`; do not edit. -->

An experiment is one YAML file. Unknown keys, wrong types and settings that do not fit together are errors
before anything starts: one line each, with the file, the key, the value and what to do.

- `megappo config check CFG` finds mistakes without starting anything; `megappo config show CFG` prints every
  value.
- Override any key on the command line: `megappo train CFG actor.optim.lr=2e-6 rewards.0.weight=2`. The value
  is YAML.
- Relative paths count from the YAML file's folder (in overrides: from the current folder); `~` is the home
  folder.
- Keys whose meaning says "null: another key" take that key's value when they are left out.
- `critic` is used with `algorithm.adv_estimator: gae` only; `reference` only with `actor.use_kl_loss` or
  `algorithm.use_kl_in_reward`; `sft` only by `megappo sft`, `reward_model` only by `megappo reward-model`.
- Batch sizes count prompts; each prompt gives `rollout.n` samples.

The smallest experiment:

```yaml
model: {path: models/Qwen2.5-0.5B-Instruct}
data: {train_files: [data/gsm8k/train.parquet]}
rewards: [{type: gsm8k}]
```
"""


def markdown() -> str:
    """The page docs/configuration.md."""
    groups: dict[str, list[KeyInfo]] = {}
    for row in iter_keys():
        groups.setdefault(row.group, []).append(row)
    parts = [_INTRO]
    for group in [*ExperimentConfig.model_fields, "parallel", "optim"]:
        rows = groups[group]
        parts.append(f"## `{group}`\n\n{_group_intro(group, rows)}\n\n{_table(_merge_shared(group, rows))}")
    return "\n".join(parts)


def _group_intro(group: str, rows: list[KeyInfo]) -> str:
    if group in ("parallel", "optim"):
        places = list(dict.fromkeys(row.name.rpartition(".")[0] for row in rows))
        doc = {"parallel": "A role's layout over the ranks", "optim": "A role's optimizer"}[group]
        rest = " Data parallelism takes the ranks that are left." if group == "parallel" else ""
        return f"{doc}: {', '.join(f'`{place}`' for place in places)}.{rest}"
    info = ExperimentConfig.model_fields[group]
    section, _ = section_type(info)
    assert section is not None
    shared = [
        f"[`{group}.{name}`](#{kind})"
        for name, field in section.model_fields.items()
        for kind, cls in (("parallel", ParallelConfig), ("optim", OptimConfig))
        if (inner := section_type(field)[0]) is not None and issubclass(inner, cls)
    ]
    aliases = [f"`{alias}` for `{name}`" for alias, name in section.ALIASES.items()]
    text = info.description or ""
    if shared:
        text += f" See also {' and '.join(shared)}."
    if aliases:
        text += f" Other names: {', '.join(aliases)}."
    return text


def _merge_shared(group: str, rows: list[KeyInfo]) -> list[KeyInfo]:
    """Rows of `parallel` and `optim` once, with the roles' differing defaults side by side."""
    if group not in ("parallel", "optim"):
        return rows
    by_leaf: dict[str, list[KeyInfo]] = {}
    for row in rows:
        by_leaf.setdefault(row.name.rpartition(".")[2], []).append(row)
    return [KeyInfo(leaf, same[0].type, _joint_default(same), same[0].meaning, group) for leaf, same in by_leaf.items()]


def _joint_default(rows: list[KeyInfo]) -> str:
    first = rows[0].default
    other = [f"{row.name.split('.')[0]}: {row.default}" for row in rows if row.default != first]
    return f"{first} ({', '.join(other)})" if other else first


def _table(rows: list[KeyInfo]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{row.name}` | {_cell(row.type)} | {_cell(row.default)} | {_cell(row.meaning)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;")

"""From a plain tree of YAML values to typed sections, with errors in plain words."""

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import ValidationError

from megappo.config.problems import Problem
from megappo.config.schema.base import Section, is_mapping, section_type
from megappo.config.schema.experiment import ExperimentConfig


def normalise(tree: Any, cls: type[Section], prefix: str = "") -> tuple[Any, list[Problem]]:
    """A copy with aliases renamed, empty sections filled, and unknown keys turned into problems."""
    if not isinstance(tree, dict):
        return tree, []  # pydantic says that it must be a mapping
    out: dict[str, Any] = {}
    problems: list[Problem] = []
    for given, value in tree.items():
        name = cls.ALIASES.get(given, given)
        if name not in cls.model_fields:
            problems.append(Problem(f"{prefix}{given}", _unknown_key(str(given), cls, prefix), value))
            continue
        if name in out:
            alias = next(k for k in tree if k != name and cls.ALIASES.get(k) == name)
            text = f"`{alias}` is another name for `{name}`; give only one of them"
            problems.append(Problem(f"{prefix}{given}", text, value))
            continue
        out[name], inner = _normalise_field(value, cls, name, f"{prefix}{name}")
        problems += inner
    return out, problems


def _normalise_field(value: Any, cls: type[Section], name: str, dotted: str) -> tuple[Any, list[Problem]]:
    section, is_list = section_type(cls.model_fields[name])
    if section is None:
        return value, []
    if is_mapping(cls.model_fields[name]):
        return _normalise_mapping({} if value is None else value, section, dotted)
    if is_list:
        if not isinstance(value, list):
            return value, []
        pairs = [normalise(item, section, f"{dotted}.{i}.") for i, item in enumerate(value)]
        return [item for item, _ in pairs], [p for _, inner in pairs for p in inner]
    if value is None and cls.model_fields[name].default is not None:
        value = {}  # `critic:` with nothing under it
    return normalise(value, section, dotted + ".")


def _normalise_mapping(value: Any, section: type[Section], dotted: str) -> tuple[Any, list[Problem]]:
    """Sections under names of their own; an impossible name is a problem."""
    if not isinstance(value, dict):
        return value, []
    out: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, item in value.items():
        wrong = section.wrong_name(name)
        if wrong:
            problems.append(Problem(f"{dotted}.{name}", wrong))
            continue
        out[name], inner = normalise(item, section, f"{dotted}.{name}.")
        problems += inner
    return out, problems


def _unknown_key(key: str, cls: type[Section], prefix: str) -> str:
    if not prefix and key in ("actor_rollout_ref", "custom_reward_function"):
        return "unknown key; this is verl's layout: translate it with `megappo config import-verl`"
    homes = [name for name in key_names() if name.rsplit(".", 1)[-1] == key]
    nearby = [name for name in homes if name.startswith(prefix)] if prefix else homes
    homes = nearby or homes
    if homes:
        more = "" if len(homes) <= 3 else ", …"
        return f"unknown key here; it exists as {', '.join(homes[:3])}{more}"
    names = [*cls.model_fields, *cls.ALIASES]
    close = difflib.get_close_matches(key, names, n=1)
    if close:
        return f"unknown key; did you mean {prefix}{close[0]}?"
    close = difflib.get_close_matches(key, {n.rsplit(".", 1)[-1]: None for n in key_names()}, n=1, cutoff=0.8)
    if close:
        home = next(n for n in key_names() if n.rsplit(".", 1)[-1] == close[0])
        return f"unknown key; did you mean {home}?"
    known = [*cls.model_fields]
    more = "" if len(known) <= 12 else ", … (`megappo config keys` lists all)"
    return f"unknown key; possible here: {', '.join(known[:12])}{more}"


@cache
def key_names() -> tuple[str, ...]:
    """Every dotted key of the schema, sections included; items of a list are `0`."""

    def walk(cls: type[Section], prefix: str) -> Iterator[str]:
        for name, info in cls.model_fields.items():
            yield prefix + name
            section, is_list = section_type(info)
            if section is not None and is_mapping(info):
                yield from walk(section, f"{prefix}{name}.{section.EXAMPLE}.")
            elif section is not None:
                yield from walk(section, f"{prefix}{name}.0." if is_list else f"{prefix}{name}.")

    return tuple(walk(ExperimentConfig, ""))


def build(tree: dict[str, Any]) -> tuple[ExperimentConfig | None, list[Problem]]:
    """Validate a tree: the configuration, not yet resolved (None if there are problems), and the problems."""
    clean, problems = normalise(tree, ExperimentConfig)
    config = None
    try:
        config = ExperimentConfig.model_validate(clean)
    except ValidationError as error:
        problems += [_explain(e) for e in error.errors(include_url=False)]
    return (None if problems else config), problems


_NEEDS = {
    "int_type": "needs a whole number",
    "int_from_float": "needs a whole number",
    "float_type": "needs a number",
    "bool_type": "needs true or false",
    "string_type": "needs text",
    "list_type": "needs a list, e.g. [a, b]",
    "tuple_type": "needs a list of two numbers, e.g. [0.9, 0.999]",
    "dict_type": "needs keys and values",
    "model_type": "is a section: needs keys and values under it",
    "finite_number": "needs a finite number",
}
_LIMITS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}


def _explain(error: Any) -> Problem:
    """A pydantic error as a Problem."""
    key = ".".join(str(part) for part in error["loc"])
    kind, value, ctx = error["type"], error["input"], error.get("ctx", {})
    if kind == "missing":
        if isinstance(error["loc"][-1], int):
            return Problem(key.rpartition(".")[0], "needs two numbers, e.g. [0.9, 0.999]", value)
        return Problem(key, "is required but missing; add it")
    if kind in _LIMITS:
        sign, name = _LIMITS[kind]
        return Problem(key, f"must be {sign} {ctx[name]}", value)
    if kind == "literal_error":
        return Problem(key, _one_of(value, ctx["expected"]), value)
    if kind == "too_long":
        return Problem(key, f"needs exactly {ctx['max_length']} numbers", value)
    if kind == "value_error":
        return Problem(key, str(ctx["error"]), value)
    text = _NEEDS.get(kind, error["msg"])
    return Problem(key, text + _hint(kind, value), value)


def _one_of(value: Any, expected: str) -> str:
    names = [name.strip("'") for name in expected.replace(" or ", ", ").split(", ")]
    close = difflib.get_close_matches(str(value), names, n=1)
    guess = f"; did you mean {close[0]}?" if close else ""
    return f"must be one of {', '.join(names)}{guess}"


def _hint(kind: str, value: Any) -> str:
    if kind.startswith("int") and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        try:
            float(value)
        except ValueError:
            quoted = value.lower() in ("true", "false")
        else:
            quoted = True
        return f"; write {value.lower()} without quotes" if quoted else ""
    if kind == "string_type":
        return "; put it in quotes" if value is not None and not isinstance(value, (list, dict)) else ""
    if kind == "list_type" and isinstance(value, (str, int, float)):
        return f"; write [{value}]"
    return ""

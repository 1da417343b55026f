"""Reading verl's settings: YAML files, command lines, launch scripts, and the references inside them."""

import ast
import operator
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megappo.config.yaml_io import parse_yaml, read_yaml_mapping
from megappo.errors import UserError

_MISSING: Any = object()
_DOTTED = re.compile(r"^\+{0,2}[A-Za-z_][\w@/-]*(?:\.[\w-]+)+=")
_VARIABLE = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_SHELL_REF = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-((?:[^{}]|\$\{[^{}]*\})*))?\}|([A-Za-z_]\w*))")
_ARITHMETIC = re.compile(r"\$\[([^\]]*)\]")
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def read_verl(path: str | Path | None, overrides: Sequence[str]) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Settings of a verl YAML file or launch script with overrides on top.

    Returns (flat, warnings, given): `flat` maps dotted verl keys to values with references replaced and unset
    (null, `???`) keys left out; `given` holds the keys that were null in so many words.

    Raises UserError: missing file, bad YAML, an argument that is not an override.
    """
    warnings: list[str] = []
    tree: dict[str, Any] = {}
    texts: list[str] = []
    if path is not None:
        path = Path(path).expanduser()
        if path.suffix in (".yaml", ".yml"):
            tree = read_yaml_mapping(path)
        else:
            texts, warnings = _script_overrides(path)
    for text in [*texts, *overrides]:
        warnings += _apply(tree, text)
    flat: dict[str, Any] = {}
    for key, value in flatten(tree).items():
        value = _resolve(value, key, tree)
        if isinstance(value, dict):  # a reference to a whole section
            flat |= {name: _resolve(item, name, tree) for name, item in flatten(value, key + ".").items()}
        else:
            flat[key] = value
    nulls = {key: None for key, value in flat.items() if value is None}
    return {key: v for key, v in flat.items() if v is not None and v is not _MISSING}, warnings, nulls


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; lists are values; empty mappings vanish."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            out.update(flatten(value, f"{prefix}{name}."))
        else:
            out[f"{prefix}{name}"] = value
    return out


# --- overrides and launch scripts -----------------------------------------------------------------------


def _apply(tree: dict[str, Any], text: str) -> list[str]:
    """One Hydra override: key=value, +key=value, ++key=value, ~key."""
    if text.startswith("-"):
        return [f"{text}: dropped: an option of Hydra, not a setting"]
    name, equals, raw = text.partition("=")
    delete = name.startswith("~")
    parts = name.lstrip("+~").strip().split(".")
    if not all(parts) or not (equals or delete):
        raise UserError(f"{text}: is not a setting; write section.key=value")
    if "$(" in raw or "`" in raw:
        return [f"{text}: dropped: holds a shell expression; set it by hand"]
    here = tree
    for part in parts[:-1]:
        if not isinstance(here.get(part), dict):
            here[part] = {}
        here = here[part]
    if delete:
        here.pop(parts[-1], None)
        return []
    try:
        here[parts[-1]] = parse_yaml(raw)
    except (yaml.YAMLError, ValueError):
        here[parts[-1]] = raw  # Hydra's grammar is looser than YAML's: keep the text
    return []


def _script_overrides(path: Path) -> tuple[list[str], list[str]]:
    """The dotted settings in a shell script, with its variables replaced."""
    try:
        text = path.read_text(encoding="utf-8")
        tokens = shlex.split(_join_arithmetic(text), comments=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a shell script ({error}); give YAML or key=value") from None
    variables = {"HOME": "~"}
    settings: list[str] = []
    warnings: list[str] = []
    for token in tokens:
        if _DOTTED.match(token):
            text, unknown = _expand(token, variables)
            if unknown:
                name = token.partition("=")[0]
                warnings.append(f"{name}: dropped: the shell variable {unknown} is not set in the script")
            else:
                settings.append(text)
        elif found := _VARIABLE.match(token):
            value, unknown = _expand(found[2], variables)
            if not unknown:
                variables[found[1]] = value
    if not settings:
        raise UserError(f"{path}: no settings such as data.train_batch_size=256 found; give a verl launch script")
    return settings, warnings


def _expand(text: str, variables: dict[str, str]) -> tuple[str, str | None]:
    """Replace $x, ${x}, ${x:-default} and arithmetic; also the name of the first variable without a value."""
    unknown: str | None = None

    def value(found: re.Match[str]) -> str:
        nonlocal unknown
        name = found[1] or found[3]
        if name in variables:
            return variables[name]
        if found[2] is not None:
            inner, missing = _expand(found[2], variables)
            unknown = unknown or missing
            return inner
        unknown = unknown or name
        return ""

    text = _SHELL_REF.sub(value, text)
    return _ARITHMETIC.sub(lambda found: _calculate(found[1], variables), text), unknown


def _join_arithmetic(text: str) -> str:
    """Bash's $((a + b)) as the single word $[a+b]; what is not closed stays."""
    out, position = [], 0
    while (start := text.find("$((", position)) >= 0:
        depth, end = 2, start + 3
        while end < len(text) and depth > 0:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        if depth:
            break
        inner = "".join(text[start + 3 : end - 2].split())
        out += [text[position:start], "$[", inner, "]"]
        position = end
    return "".join([*out, text[position:]])


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # bash counts in integers
    ast.Mod: operator.mod,
}


def _calculate(text: str, variables: dict[str, str]) -> str:
    """The value of integer arithmetic over + - * / %; text that is more than that stays as $(...)."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name):
            return int(variables[node.id])
        if isinstance(node, ast.Constant):
            return int(node.value)
        raise ValueError(node)

    try:
        return str(value(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError):
        return f"$({text})"


# --- references -----------------------------------------------------------------------------------------


def _resolve(value: Any, key: str, tree: dict[str, Any], depth: int = 0) -> Any:
    """Replace OmegaConf references: ${a.b}, ${.sibling}, ${oc.select:a.b,default}; unset: _MISSING."""
    if isinstance(value, list):
        return [_resolve(item, key, tree, depth) for item in value]
    if value == "???":
        return _MISSING
    if not isinstance(value, str) or "${" not in value or depth > 20:
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole:
        return _resolve(_look_up(whole[1], key, tree), key, tree, depth + 1)
    inner = _REFERENCE.search(value)
    if inner is None:
        return _MISSING
    found = _resolve(_look_up(inner[1], key, tree), key, tree, depth + 1)
    if found is _MISSING:
        return _MISSING
    text = "null" if found is None else str(found)
    return _resolve(value[: inner.start()] + text + value[inner.end() :], key, tree, depth + 1)


def _look_up(reference: str, key: str, tree: dict[str, Any]) -> Any:
    default: Any = _MISSING
    if reference.startswith("oc.select:"):
        reference, comma, raw = reference.removeprefix("oc.select:").partition(",")
        if comma:
            try:
                default = parse_yaml(raw)
            except yaml.YAMLError:
                default = raw
    elif ":" in reference:
        return _MISSING  # another resolver (oc.env: …)
    if reference.startswith("."):
        up = len(reference) - len(reference.lstrip("."))
        base = key.split(".")[:-up]
        reference = ".".join([*base, reference.lstrip(".")])
    here: Any = tree
    for part in reference.strip().split("."):
        if not isinstance(here, dict) or part not in here:
            return default
        here = here[part]
    return default if here is None and default is not _MISSING else here

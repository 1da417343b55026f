"""YAML as the configuration uses it: safe, `1e-6` is a number, a key given twice is an error."""

import re
from pathlib import Path
from typing import Any

import yaml

from megappo.errors import UserError


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and reads numbers in scientific notation as YAML 1.2 does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = getattr(key_node, "value", None)
            if isinstance(key, str):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key `{key}` is given twice; keep one of them", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> Any:
    """Parse one YAML document; raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def yaml_error_line(error: Exception) -> str:
    """A YAML error as `line L, column C: what`, on one line."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or str(error)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return place + " ".join(str(what).split())


def read_yaml_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, {} if empty. Raises UserError (missing, unreadable, syntax, no mapping)."""
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path (current folder: {Path.cwd()})") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; give the YAML file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error}); check the file") from None
    try:
        tree = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid YAML: {yaml_error_line(error)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: holds a {type(tree).__name__}; write sections such as `model:` at the top")
    return tree


class _Dumper(yaml.SafeDumper):
    """Mappings in block style; lists of plain values on one line."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_list(dumper: yaml.SafeDumper, value: list) -> yaml.SequenceNode:
    flat = not any(isinstance(item, (dict, list)) for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=flat)


_Dumper.add_representer(list, _represent_list)


def dump_yaml(tree: Any) -> str:
    """YAML in the order given."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=100)

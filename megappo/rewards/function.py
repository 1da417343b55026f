"""A user's reward function, by import path `my_pkg.mod:fn` or by file `path/to/file.py:fn`.

It is called like verl's compute_score: ``fn(data_source=, solution_str=, ground_truth=, extra_info=,
**kwargs)`` and returns a number, or a mapping with "score" whose other numbers become metrics.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megappo.errors import UserError

CALL_KEYS = ("data_source", "solution_str", "ground_truth", "extra_info")


def split_path(path: str) -> tuple[str, str]:
    """(module or file, function) of `module:function`. UserError when a part or the file is missing.

    Runs none of the user's code.
    """
    target, _, function = path.rpartition(":")
    if not target or not function.isidentifier():
        raise UserError(f"rewards: path '{path}' is not module:function: write my_pkg.my_mod:fn or path/to/file.py:fn")
    if _is_file(target) and not Path(target).expanduser().is_file():
        raise UserError(f"rewards: path '{path}': file not found: {Path(target).expanduser().absolute()}")
    return target, function


def check_kwargs(path: str, kwargs: Mapping[str, Any]) -> None:
    """UserError when a configured argument collides with one that every call passes."""
    for key in CALL_KEYS:
        if key in kwargs:
            raise UserError(f"rewards: kwargs.{key} of '{path}' is passed by every call: use another name")


def load_function(path: str) -> Callable[..., Any]:
    """The function. UserError when its module cannot be imported or has no such function."""
    target, name = split_path(path)
    try:
        module = _load_file(Path(target).expanduser()) if _is_file(target) else _import(target)
    except BaseException as error:  # user code may do anything while it is imported, sys.exit() included
        reason = " ".join(str(error).split())
        raise UserError(f"rewards: cannot import '{target}': {type(error).__name__}: {reason}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"rewards: '{target}' has no function '{name}'")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"rewards: '{path}' is an async function: make it a plain one")
    return function


def _is_file(target: str) -> bool:
    return target.endswith(".py")


def _import(module: str) -> Any:
    if os.getcwd() not in sys.path:  # a console script does not have it, `python -m` does
        sys.path.append(os.getcwd())
    return importlib.import_module(module)


def _load_file(file: Path) -> Any:
    folder = str(file.absolute().parent)
    if folder not in sys.path:  # its neighbours can be imported, as for a script
        sys.path.append(folder)
    name = f"_megappo_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look their module up there
    spec.loader.exec_module(module)
    return module


class FunctionScorer:
    """Called with a sample, returns whatever the user's function returns."""

    def __init__(self, path: str, kwargs: Mapping[str, Any]) -> None:
        self._function, self._kwargs = load_function(path), dict(kwargs)

    def __call__(self, sample: Any) -> Any:
        return self._function(
            data_source=sample.data_source,
            solution_str=sample.response_text,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
            **self._kwargs,
        )

"""From an entry of the configuration's `rewards` list to a component."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from megappo.errors import UserError
from megappo.rewards import function
from megappo.rewards.base import Reward
from megappo.rewards.component import Component, OnError
from megappo.rewards.gsm8k import Gsm8kReward
from megappo.rewards.math import INSTALL as MATH_INSTALL
from megappo.rewards.pool import PoolReward
from megappo.rewards.remote import RemoteReward, RemoteSettings


class RewardSettings(Protocol):
    """One entry of the configuration's `rewards` list; the schema says what each key means."""

    type: str
    name: str | None
    weight: float
    sources: Sequence[str] | None
    clip: tuple[float, float] | None
    standardize: bool
    on_error: OnError
    neutral_score: float
    timeout_s: float
    workers: int
    kwargs: Mapping[str, Any]
    path: str | None
    url: str | None
    token_env: str | None
    batch_size: int
    concurrency: int
    retries: int
    backoff_s: float
    backoff_max_s: float
    breaker_failures: int
    breaker_pause_s: float


def build_component(settings: RewardSettings, where: str) -> Component:
    """The component of an entry; `where` names it in errors. UserError for whatever does not fit."""
    if settings.type not in _BUILDERS:
        raise UserError(f"{where}.type is '{settings.type}': use one of {', '.join(_BUILDERS)}")
    if not math.isfinite(settings.weight):
        raise UserError(f"{where}.weight is {settings.weight}: give a finite number")
    if not settings.timeout_s > 0:
        raise UserError(f"{where}.timeout_s is {settings.timeout_s}: give a positive number of seconds")
    if settings.path and settings.type not in ("function", "model"):
        raise UserError(f"{where}.path is only for types 'function' and 'model': remove it")
    if settings.url and settings.type != "remote":
        raise UserError(f"{where}.url is only for type 'remote': remove it")
    reward = _BUILDERS[settings.type](settings, where)
    return Component(
        name=settings.name or (settings.type if reward is None else reward.name),
        reward=reward,
        weight=settings.weight,
        sources=settings.sources,
        clip=settings.clip,
        standardize=settings.standardize,
        on_error=settings.on_error,
        neutral_score=settings.neutral_score,
        recorded=settings.type == "recorded",
    )


def unique_name(name: str, taken: set[str]) -> str:
    """`name`, or `name#2`, `name#3`, … if it is taken; it is taken afterwards."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    taken.add(candidate)
    return candidate


def _kwargs(settings: RewardSettings, where: str, *allowed: str) -> dict[str, Any]:
    kwargs = dict(settings.kwargs or {})
    if unknown := sorted(set(kwargs) - set(allowed)):
        known = ", ".join(allowed) or "none"
        raise UserError(f"{where}.kwargs.{unknown[0]} is unknown to '{settings.type}' (known: {known})")
    return kwargs


def _need(module: str, settings: RewardSettings, where: str, what_to_do: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{where}: type '{settings.type}' needs its package: {what_to_do}")


def _gsm8k(settings: RewardSettings, where: str) -> Reward:
    return Gsm8kReward(**_kwargs(settings, where, "method"))


def _reasoning_gym(settings: RewardSettings, where: str) -> Reward:
    _kwargs(settings, where)
    _need("reasoning_gym", settings, where, "install the extra: pip install 'megappo[reasoning]'")
    return PoolReward("reasoning_gym", "reasoning_gym", timeout_s=settings.timeout_s, workers=settings.workers)


def _math(settings: RewardSettings, where: str) -> Reward:
    kwargs = _kwargs(settings, where, "strict", "float_rounding")
    _need("math_verify", settings, where, MATH_INSTALL)
    # A policy can write an expression that takes forever: that is a wrong answer, not a broken reward.
    return PoolReward(
        "math", "math", kwargs=kwargs, timeout_s=settings.timeout_s, workers=settings.workers, late_score=0.0
    )


def _function(settings: RewardSettings, where: str) -> Reward:
    kwargs = dict(settings.kwargs or {})
    if not settings.path:
        raise UserError(f"{where}.path is missing: type 'function' needs module:function or file.py:function")
    _, name = function.split_path(settings.path)
    function.check_kwargs(settings.path, kwargs)
    return PoolReward(
        name, "function", path=settings.path, kwargs=kwargs, timeout_s=settings.timeout_s, workers=settings.workers
    )


def _remote(settings: RewardSettings, where: str) -> Reward:
    if not settings.url:
        raise UserError(f"{where}.url is missing: type 'remote' needs http://host:port/path")
    name = settings.name or "remote"
    return RemoteReward(
        name,
        RemoteSettings(
            url=settings.url,
            timeout_s=settings.timeout_s,
            batch_size=settings.batch_size,
            concurrency=settings.concurrency,
            retries=settings.retries,
            backoff_s=settings.backoff_s,
            backoff_max_s=settings.backoff_max_s,
            breaker_failures=settings.breaker_failures,
            breaker_pause_s=settings.breaker_pause_s,
            token_env=settings.token_env,
            kwargs=dict(settings.kwargs or {}),
        ),
    )


def _recorded(settings: RewardSettings, where: str) -> None:
    """The scores are in the data: the loop hands them over."""
    _kwargs(settings, where)


def _model(settings: RewardSettings, where: str) -> None:
    """The trainer runs the model on all ranks together and passes its scores."""
    _kwargs(settings, where)
    if not settings.path:
        raise UserError(f"{where}.path is missing: type 'model' needs a reward model's folder")


_BUILDERS: dict[str, Callable[[RewardSettings, str], Reward | None]] = {
    "gsm8k": _gsm8k,
    "reasoning_gym": _reasoning_gym,
    "function": _function,
    "math": _math,
    "remote": _remote,
    "recorded": _recorded,
    "model": _model,
}

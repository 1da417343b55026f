"""Checks of `rollout.engine: sglang`: URLs, packages, the command that starts servers, the folder for weights."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

from megappo.config.problems import Problem
from megappo.config.schema.experiment import ExperimentConfig
from megappo.config.schema.rollout import SGLangConfig

#: options of the started servers that have keys of their own, or that the trainer decides
_OWN_OPTIONS = {
    "--model-path": "model.path",
    "--model": "model.path",
    "--tokenizer-path": "model.tokenizer_path",
    "--tp-size": "rollout.sglang.tp",
    "--tp": "rollout.sglang.tp",
    "--tensor-parallel-size": "rollout.sglang.tp",
    "--dtype": "rollout.dtype",
    "--mem-fraction-static": "rollout.sglang.mem_fraction_static",
    "--base-gpu-id": "rollout.sglang.first_gpu",
    "--enable-deterministic-inference": "rollout.sglang.deterministic",
    "--port": None,
    "--host": None,
}
#: options with which log-probs or weights would not be the trained policy's
_REFUSED = {
    "--skip-tokenizer-init": "stop strings and end-of-text tokens would be unknown to the server",
    "--quantization": "updates and log-probs would not be the policy's",
    "--dp-size": "weight updates do not reach data-parallel replicas; raise num_servers",
    "--data-parallel-size": "weight updates do not reach data-parallel replicas; raise num_servers",
}


def check_sglang(config: ExperimentConfig) -> Iterator[Problem]:
    """All problems of the servers' settings; of others' engines only that they are not used."""
    rollout = config.rollout
    yield from _check_lag(config)
    if rollout.engine != "sglang":
        if rollout.servers:
            yield Problem("rollout.servers", "are used by engine sglang only; set rollout.engine", rollout.servers)
        return
    if not any(importlib.util.find_spec(name) for name in ("httpx", "httpx2")):
        text = "needs an HTTP client: pip install 'megappo[sglang]'"
        yield Problem("rollout.engine", text, rollout.engine)
    yield from _check_urls(rollout.servers)
    if rollout.servers:
        yield from _check_given(config)
    else:
        yield from _check_started(rollout.sglang)
    if rollout.sglang.health_timeout_s > rollout.sglang.timeout_s:
        text = f"is longer than timeout_s ({rollout.sglang.timeout_s:g}), so a hung server shows there first; lower it"
        yield Problem("rollout.sglang.health_timeout_s", text, rollout.sglang.health_timeout_s)


def _check_lag(config: ExperimentConfig) -> Iterator[Problem]:
    lag, algorithm = config.trainer.rollout_lag, config.algorithm
    if not lag:
        return
    if config.rollout.engine != "sglang":
        yield Problem("trainer.rollout_lag", "needs servers that generate meanwhile (rollout.engine: sglang)", lag)
    if algorithm.dynamic_sampling.enabled:
        text = "cannot wait for the scores of algorithm.dynamic_sampling; switch one of them off"
        yield Problem("trainer.rollout_lag", text, lag)
    if algorithm.adv_estimator == "remax":
        yield Problem("trainer.rollout_lag", "remax generates its baseline with the newest weights; use 0", lag)
    if algorithm.correction.mode == "none":
        text = "the samples are one update old and nothing weighs them; use token"
        yield Problem("algorithm.correction.mode", text, "none", note=True)


def _check_urls(urls: list[str]) -> Iterator[Problem]:
    for i, url in enumerate(urls):
        try:
            parts = urlsplit(url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            fits = fits and parts.path in ("", "/") and not parts.query
        except ValueError:  # a port that is no number
            fits = False
        if not fits:
            yield Problem(f"rollout.servers.{i}", "is not http://host:port; correct it", url)
        elif url.rstrip("/") in (other.rstrip("/") for other in urls[:i]):
            yield Problem(f"rollout.servers.{i}", "is there twice; remove one", url)


def _check_given(config: ExperimentConfig) -> Iterator[Problem]:
    """Servers that somebody else started: what only a start can change has no effect."""
    settings, default = config.rollout.sglang, SGLangConfig()
    for name in ("num_servers", "tp", "first_gpu", "mem_fraction_static", "launch", "extra_args", "deterministic"):
        if getattr(settings, name) != getattr(default, name):
            text = "has no effect on the servers in rollout.servers; start them with it, and remove it here"
            yield Problem(f"rollout.sglang.{name}", text, getattr(settings, name), note=True)
    local = all(urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") for url in config.rollout.servers)
    if settings.weight_sync in ("auto", "disk") and settings.sync_dir is None and not local:
        text = "must be a folder that servers on other machines see under the same path, if weights go by disk"
        yield Problem("rollout.sglang.sync_dir", text, None, note=True)


def _check_started(settings: SGLangConfig) -> Iterator[Problem]:
    if settings.launch is None:
        spec = importlib.util.find_spec("sglang")
        if spec is None or spec.origin is None:  # a mere folder of that name has no origin
            text = (
                "SGLang is not installed here: pip install 'megappo[sglang]', name the command that starts a server "
                "(launch), or servers that run already (rollout.servers)"
            )
            yield Problem("rollout.sglang.launch", text, None)
    elif not settings.launch:
        yield Problem("rollout.sglang.launch", "is empty; name the command, or null", [])
    elif shutil.which(os.path.expanduser(settings.launch[0])) is None:
        yield Problem("rollout.sglang.launch.0", "no such command; give the whole path", settings.launch[0])
    for i, word in enumerate(settings.extra_args):
        option = word.partition("=")[0]
        key = f"rollout.sglang.extra_args.{i}"
        if option in _OWN_OPTIONS:
            instead = _OWN_OPTIONS[option]
            text = f"set {instead} instead" if instead else "is chosen for each server; remove it"
            yield Problem(key, text, word)
        elif option in _REFUSED:
            yield Problem(key, f"{_REFUSED[option]}; remove it", word)

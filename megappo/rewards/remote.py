"""A reward behind HTTP: batches of samples are posted as JSON, scores come back as JSON.

Request:  {"samples": [{sample_id, data_source, prompt, response, ground_truth, extra_info}, …], "kwargs": {…}}
Response: {"scores": [0.5, {"score": 1.0, "helpful": 0.3}, null, …]}, one entry a sample, in order. The other numbers
of a mapping become metrics; null says that the sample cannot be scored.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from megappo.errors import UserError
from megappo.rewards.base import Outcome, RewardSample, failed, one_line, outcome_of
from megappo.rewards.breaker import CircuitBreaker, backoff

SHOWN_BODY = 200  # characters of a refusal in an error message


@dataclass(frozen=True)
class RemoteSettings:
    """How to reach the server. Seconds where the name ends in _s; `timeout_s` is for one attempt as a whole."""

    url: str
    timeout_s: float = 30.0
    batch_size: int = 32
    concurrency: int = 4
    retries: int = 3
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    breaker_failures: int = 5
    breaker_pause_s: float = 30.0
    token_env: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class _Refused(Exception):
    """The server answered, but not with scores; asking again would not help."""


class _Unavailable(Exception):
    """No answer, or a 5xx: worth another attempt. `timed_out`: no answer in time."""

    def __init__(self, reason: str, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


class RemoteReward:
    """Scores samples by posting them to `settings.url`.

    Connection errors, timeouts and 5xx answers are tried again (`retries` times, exponential backoff with jitter);
    other answers that are not 200 never are. After `breaker_failures` failed requests in a row the server is left
    alone for `breaker_pause_s` seconds and then probed with one request; meanwhile samples fail at once.

    Raises UserError for a URL that is not http(s), a missing token variable, or a missing HTTP client.
    """

    def __init__(self, name: str, settings: RemoteSettings, rng: random.Random | None = None) -> None:
        self.name, self.settings = name, settings
        self._httpx = load_httpx(name)
        self._check_url()
        self._headers = {"content-type": "application/json"}
        if settings.token_env is not None:
            token = os.environ.get(settings.token_env)
            if not token:
                raise UserError(f"reward '{name}': token_env: the environment has no {settings.token_env}: export it")
            self._headers["authorization"] = f"Bearer {token}"
        self._rng = rng or random.Random()
        try:
            self._kwargs = json.dumps(dict(settings.kwargs), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(f"reward '{name}': kwargs cannot be sent as JSON: {error}") from None
        self.breaker = CircuitBreaker(settings.breaker_failures, settings.breaker_pause_s)
        self._retries = self._opened_before = 0
        self._runner: asyncio.Runner | None = None
        self._client: Any = None

    def start(self) -> None:
        """Ask the server for any answer at all (GET). UserError when there is none: it shows before models load."""
        try:
            self._run(self._with_retries(lambda: self._attempt("GET", None), self.settings.retries))
        except _Unavailable as trouble:
            raise UserError(f"reward '{self.name}': {trouble}: start the server or fix rewards[i].url") from None

    def outcomes(self, samples: Sequence[RewardSample], fail_fast: bool = False) -> list[Outcome]:
        """One outcome a sample, in order. UserError with `fail_fast`, as soon as a sample fails."""
        results: list[Outcome] = [Outcome()] * len(samples)
        bodies: dict[int, str] = {}
        for index, sample in enumerate(samples):
            try:
                bodies[index] = _encode(sample)
            except (TypeError, ValueError, RecursionError) as error:
                results[index] = self._settle(failed(self.name, sample, f"cannot be sent as JSON: {error}"), fail_fast)
        if bodies:
            self._run(self._score_all(samples, bodies, results, fail_fast))
        return results

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        """One finite score a sample; UserError when one cannot be scored."""
        return [outcome.score for outcome in self.outcomes(samples, fail_fast=True)]

    def counters(self) -> dict[str, float]:
        """Repeated attempts, and how often the breaker opened, since the last call."""
        result = {"retries": float(self._retries), "breaker_opened": float(self.breaker.opened - self._opened_before)}
        self._retries, self._opened_before = 0, self.breaker.opened
        return result

    def close(self) -> None:
        """Close the connections."""
        if self._runner is not None:
            if self._client is not None:
                self._runner.run(self._client.aclose())
            self._runner.close()
        self._runner = self._client = None

    def _check_url(self) -> None:
        try:
            parts = urlsplit(self.settings.url)
            self._httpx.URL(self.settings.url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname)
        except (ValueError, self._httpx.InvalidURL):
            fits = False
        if not fits:
            raise UserError(
                f"reward '{self.name}': url '{self.settings.url}' is not http://host:port/path: fix rewards[i].url"
            )

    def _run(self, work: Any) -> Any:
        if self._runner is None:
            # With a factory the loop does not become the thread's current one, which other libraries may have set.
            self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        return self._runner.run(work)

    async def _score_all(
        self, samples: Sequence[RewardSample], bodies: dict[int, str], results: list[Outcome], fail_fast: bool
    ) -> None:
        indices, size = list(bodies), self.settings.batch_size
        batches = iter([indices[i : i + size] for i in range(0, len(indices), size)])

        async def work() -> None:
            for batch in batches:  # shared by all: each takes the next one
                found = await self._score_batch([samples[i] for i in batch], [bodies[i] for i in batch])
                for index, outcome in zip(batch, found, strict=True):
                    results[index] = self._settle(outcome, fail_fast)

        workers = [asyncio.ensure_future(work()) for _ in range(self.settings.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _score_batch(self, samples: Sequence[RewardSample], bodies: Sequence[str]) -> list[Outcome]:
        asked = self.breaker.ask()
        if asked == "no":
            seconds = self.breaker.seconds_to_probe()
            reason = f"{self.settings.url} is left alone after repeated failures, next try in {seconds:.0f} s"
            return [failed(self.name, sample, reason) for sample in samples]
        body = f'{{"samples": [{", ".join(bodies)}], "kwargs": {self._kwargs}}}'.encode()
        try:
            text = await self._with_retries(
                lambda: self._attempt("POST", body), self.settings.retries if asked == "go" else 0
            )
        except _Unavailable as trouble:
            self.breaker.failed()
            return [failed(self.name, s, str(trouble), timed_out=trouble.timed_out) for s in samples]
        except _Refused as refusal:
            self.breaker.succeeded()
            return [failed(self.name, sample, str(refusal)) for sample in samples]
        try:
            values = _decode(text, len(samples))
        except ValueError as error:
            self.breaker.failed()
            return [failed(self.name, sample, f"{self.settings.url}: {error}") for sample in samples]
        self.breaker.succeeded()
        return [outcome_of(self.name, sample, value) for sample, value in zip(samples, values, strict=True)]

    async def _with_retries(self, attempt: Any, retries: int) -> str:
        for number in range(retries + 1):
            try:
                return await attempt()
            except _Unavailable as trouble:
                if number == retries:
                    times = f" ({number + 1} attempts)" if number else ""
                    raise _Unavailable(f"{trouble}{times}", trouble.timed_out) from None
                self._retries += 1
                await asyncio.sleep(backoff(number, self.settings.backoff_s, self.settings.backoff_max_s, self._rng))
        raise AssertionError("unreachable")

    async def _attempt(self, method: str, body: bytes | None) -> str:
        """The body of a 200 (of any answer, for GET)."""
        url, timeout_s = self.settings.url, self.settings.timeout_s
        if self._client is None:
            limits = self._httpx.Limits(max_connections=self.settings.concurrency)
            self._client = self._httpx.AsyncClient(timeout=None, limits=limits, headers=self._headers)
        try:
            async with asyncio.timeout(timeout_s):  # of all of it: the client's own limits are for each read
                answer = await self._client.request(method, url, content=body)
        except TimeoutError:
            raise _Unavailable(f"{url}: no answer after {timeout_s:g} s", timed_out=True) from None
        except self._httpx.RequestError as error:
            reason = one_line(str(error)) or "the connection broke"
            raise _Unavailable(f"{url}: {type(error).__name__}: {reason}") from None
        if method == "GET" or answer.status_code == 200:
            return answer.text
        reason = f"{url}: HTTP {answer.status_code} {one_line(answer.text[:SHOWN_BODY])}".rstrip()
        raise _Unavailable(reason) if answer.status_code >= 500 else _Refused(reason)

    def _settle(self, outcome: Outcome, fail_fast: bool) -> Outcome:
        if fail_fast and outcome.error is not None:
            raise UserError(outcome.error)
        return outcome


def load_httpx(name: str) -> ModuleType:
    """The HTTP client: `httpx`, or its successor `httpx2`, whose names are the same. UserError when there is none."""
    for module in ("httpx", "httpx2"):
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    raise UserError(
        f"reward '{name}': type 'remote' needs an HTTP client: install the extra: pip install 'megappo[remote]'"
    )


def _encode(sample: RewardSample) -> str:
    fields = {
        "sample_id": sample.sample_id,
        "data_source": sample.data_source,
        "prompt": sample.prompt_text,
        "response": sample.response_text,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
    }
    return json.dumps(fields, default=_plain, allow_nan=False)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy numbers and arrays
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _decode(text: str, count: int) -> list[Any]:
    """The entries of `scores`. ValueError, worded for the user, when the text is something else."""
    try:
        scores = json.loads(text)["scores"]
    except (ValueError, TypeError, KeyError, RecursionError):
        shown = one_line(text[:SHOWN_BODY])
        raise ValueError(f'the answer is not {{"scores": [...]}} but {shown!r}') from None
    if not isinstance(scores, list):
        raise ValueError(f"'scores' of the answer is no list but {type(scores).__name__}")
    if len(scores) != count:
        raise ValueError(f"the answer has {len(scores)} scores for {count} samples")
    return scores

"""One batch of requests through the servers that hold the right weights: nothing lost, nothing doubled.

Every attempt has a request id of its own, and an answer counts only if it bears the id of the attempt that it answers
and passes the contract's checks. A request whose attempt failed is sent again: to the same server after a pause while
that one is alive, elsewhere at once when it is not. A result is stored once, under the index of its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megappo.config.schema.rollout import SGLangConfig
from megappo.rewards.breaker import backoff
from megappo.rollout.base import GeneratedSample, GenerateRequest, RolloutLost, SamplingParams
from megappo.rollout.sglang.contract import GENERATE, Answer, BadAnswer
from megappo.rollout.sglang.http import Http, Refused, Unavailable
from megappo.rollout.sglang.router import Item, Router
from megappo.rollout.sglang.servers import Pool, Server

_BACKOFF_S, _BACKOFF_MAX_S = 0.25, 15.0


@dataclass(frozen=True)
class _Outcome:
    """How an attempt ended: an answer, or why there is none."""

    server: str
    item: Item
    answer: Answer | None = None
    trouble: Exception | None = None


@dataclass(frozen=True)
class _Again:
    """The pause before another attempt is over."""

    item: Item


@dataclass(frozen=True)
class _Hung:
    """A server did not pass its health check."""

    server: str
    reason: str


@dataclass(frozen=True)
class _Wake:
    """Look whether the batch is still wanted."""


class Batch:
    """The requests of one `generate` call and what is known of them; survives the loss of all servers."""

    def __init__(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> None:
        self.requests, self.sampling = requests, sampling
        self.results: dict[int, GeneratedSample] = {}
        self.cancelled = threading.Event()  # nobody wants the results any more

    @property
    def finished(self) -> bool:
        return len(self.results) == len(self.requests)

    def samples(self) -> list[GeneratedSample]:
        """One a request, in order."""
        return [self.results[index] for index in range(len(self.requests))]


class Round:
    """One pass of a batch over the servers that are usable now; ends when all is answered or no server is left.

    `version_name`: what the servers call the weights that must answer; `version`: our number of them.
    """

    def __init__(
        self, batch: Batch, pool: Pool, http: Http, settings: SGLangConfig, version: int, version_name: str
    ) -> None:
        self.batch, self.pool, self.http, self.settings = batch, pool, http, settings
        self.version, self.version_name = version, version_name
        self.router = Router(settings.max_concurrency)
        self._servers: dict[str, Server] = {}
        self._tasks: dict[int, asyncio.Task] = {}  # by request
        self._attempts: dict[tuple[int, str], int] = {}  # failed ones, by request and server
        self._events: asyncio.Queue[_Outcome | _Again | _Hung | _Wake] = asyncio.Queue()
        self._rng = random.Random()
        self._queued: dict[int, float] = {}
        self._why = ""

    async def run(self, servers: Sequence[Server]) -> None:
        """Raises RolloutLost when a request is refused, or fails on every server."""
        for server in servers:
            self._servers[server.name] = server
            self.router.join(server.name)
        longest = self.batch.sampling.max_new_tokens
        now = time.monotonic()
        items = [
            Item(index, request.group_id, len(request.prompt_ids) + longest)
            for index, request in enumerate(self.batch.requests)
            if index not in self.batch.results
        ]
        self._queued = {item.key: now for item in items}
        self.router.submit(items)
        watchers = [asyncio.ensure_future(self._watch(server)) for server in servers]
        try:
            while not self.batch.finished and self.router.servers:
                if self.batch.cancelled.is_set():
                    raise RolloutLost("cancelled")
                while (pick := self.router.next()) is not None:
                    self._send(*pick)
                stuck = self.router.stuck()
                if stuck is not None:
                    raise RolloutLost(f"sample {self._request(stuck).sample_id} failed on every server: {self._why}")
                self._handle(await self._events.get())
        finally:
            everything = [*watchers, *self._tasks.values()]
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    # -------------------------------------------------------------- sending
    def _request(self, item: Item) -> GenerateRequest:
        return self.batch.requests[item.key]

    def _send(self, name: str, item: Item) -> None:
        started = self._queued.pop(item.key, None)
        if started is not None:
            self.pool.counters.queue_s += time.monotonic() - started
        self._tasks[item.key] = asyncio.ensure_future(self._attempt(self._servers[name], item))

    async def _attempt(self, server: Server, item: Item) -> None:
        request, sampling = self._request(item), self.batch.sampling
        rid = f"{request.sample_id}-{uuid.uuid4().hex}"
        contract = server.contract
        try:
            body = contract.generate(request, sampling, rid, seeded=True)
            found = await self.http.post(server.url + GENERATE, body, self.settings.timeout_s)
            outcome = _Outcome(server.name, item, answer=contract.answer(found, request, sampling, rid))
        except (Unavailable, Refused, BadAnswer) as trouble:
            outcome = _Outcome(server.name, item, trouble=trouble)
        self._events.put_nowait(outcome)

    async def _watch(self, server: Server) -> None:
        """Tell when the server's process ends or it stops generating."""
        due = time.monotonic() + self.settings.health_interval_s
        while True:
            await asyncio.sleep(min(0.5, self.settings.health_interval_s))
            if self.batch.cancelled.is_set():
                self._events.put_nowait(_Wake())
            if server.process is not None and not server.process.alive:
                reason = f"it ended with exit code {server.process.exit_code}"
                self._events.put_nowait(_Hung(server.name, reason))
                return
            if time.monotonic() < due:
                continue
            reason = await self.pool.healthy(self.http, server)
            if reason is not None:
                self._events.put_nowait(_Hung(server.name, reason))
                return
            due = time.monotonic() + self.settings.health_interval_s

    # -------------------------------------------------------------- what happened
    def _handle(self, event: _Outcome | _Again | _Hung | _Wake) -> None:
        if isinstance(event, _Again):
            self.router.submit([event.item])
        elif isinstance(event, _Hung):
            self._lose(event.server, event.reason)
        elif isinstance(event, _Wake) or event.server not in self._servers:
            pass  # the server was lost meanwhile, and the request has been submitted again
        elif event.answer is not None:
            self._answered(event.server, event.item, event.answer)
        else:
            self._failed(event.server, event.item, event.trouble)

    def _answered(self, name: str, item: Item, answer: Answer) -> None:
        if answer.version != self.version_name:
            reason = f"it answered with weights {answer.version!r} instead of {self.version_name!r}"
            self.pool.distrust(self._servers[name], f"{reason}: is another trainer using it?")
            self._leave(name)
            return
        self._finish(name, item)
        request = self._request(item)
        self.pool.counters.cached_tokens += answer.cached_tokens
        self.batch.results[item.key] = GeneratedSample(
            request.sample_id,
            request.group_id,
            request.prompt_ids,
            answer.token_ids,
            answer.logprobs,
            answer.finish_reason,
            self.version,
        )

    def _failed(self, name: str, item: Item, trouble: Exception | None) -> None:
        request = self._request(item)
        self._why = f"{name}: {trouble}"
        if isinstance(trouble, Refused):
            raise RolloutLost(f"{name} refused sample {request.sample_id}: {trouble}")
        server = self._servers[name]
        gone = server.process is not None and not server.process.alive
        if gone or (isinstance(trouble, Unavailable) and not trouble.connected):
            self._lose(name, f"it ended with exit code {server.process.exit_code}" if gone else str(trouble))
            return
        if isinstance(trouble, BadAnswer):
            self.pool.counters.bad_answers += 1
        self._finish(name, item)
        failed = self._attempts[item.key, name] = self._attempts.get((item.key, name), 0) + 1
        if failed > self.settings.retries:
            self.pool.counters.resent += 1
            self.router.submit([replace(item, avoid=item.avoid | {name})])
            return
        self.pool.counters.retries += 1
        pause = backoff(failed - 1, _BACKOFF_S, _BACKOFF_MAX_S, self._rng)
        asyncio.get_running_loop().call_later(pause, self._events.put_nowait, _Again(item))

    def _finish(self, name: str, item: Item) -> None:
        self.router.done(name, item.key)
        self._tasks.pop(item.key, None)

    def _lose(self, name: str, reason: str) -> None:
        if name in self._servers:
            self.pool.lost(self._servers[name], reason)
            self._leave(name)

    def _leave(self, name: str) -> None:
        """What ran there goes elsewhere."""
        del self._servers[name]
        running = self.router.leave(name)
        self.pool.counters.resent += len(running)
        for item in running:
            with contextlib.suppress(KeyError):
                self._tasks.pop(item.key).cancel()
        self.router.submit(running)

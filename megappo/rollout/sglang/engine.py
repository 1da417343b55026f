"""`SGLangEngine`: the `RolloutEngine` protocol on servers.

Rank 0 talks to the servers; the other ranks give it their requests and get their samples back. One process then knows
every request and every server, so that load is balanced over all of them, a dead server is noticed and restarted in one
place, and weights are sent once. It costs one gather and one scatter of token ids an iteration.

`generate` and `update_weights` are therefore collective over all ranks. They speak over a group of their own that
waits as long as generation takes: the limit of the default group is for ranks that compute.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megappo.config.schema.rollout import SGLangConfig
from megappo.errors import UserError
from megappo.rollout.base import (
    NO_WEIGHTS,
    EngineHealth,
    GeneratedSample,
    GenerateRequest,
    RolloutLost,
    SamplingParams,
    SyncReport,
)
from megappo.rollout.sglang.ahead import Ahead, Verdict
from megappo.rollout.sglang.client import Batch, Round
from megappo.rollout.sglang.group import GroupWay
from megappo.rollout.sglang.http import Http
from megappo.rollout.sglang.servers import Pool, Server
from megappo.rollout.sglang.weights import Update, Way

_PATIENCE = timedelta(days=2)  # a lost rank breaks the connection, and so ends the wait, long before


class SGLangEngine:
    """Generation by SGLang servers.

    Args:
        pool: the servers, on rank 0 only (None elsewhere).
        way: how weights travel, on rank 0 only.
        weights: a fresh stream of the policy's current weights, for servers that lost theirs. Collective.
        vocab_size: prompt ids must be below it.
    """

    def __init__(
        self,
        settings: SGLangConfig,
        pool: Pool | None,
        way: Way | None,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        vocab_size: int,
    ) -> None:
        self.settings, self.pool, self.way = settings, pool, way
        self.vocab_size = vocab_size
        self.weight_version = NO_WEIGHTS
        self._weights = weights
        self._run_name = uuid.uuid4().hex[:8]  # another trainer's version 3 is not ours
        self._sent = 0
        self._name = ""
        self._runner: asyncio.Runner | None = None
        self._http: Http | None = None
        self._ahead: Ahead | None = None
        many = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE) if many else None
        self._rank = dist.get_rank() if many else 0

    # -------------------------------------------------------------- the protocol
    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[GeneratedSample]:
        """One sample a request, in order; every rank gives its own requests. Collective.

        Raises:
            UserError: a prompt that cannot be served.
            RolloutLost: on every rank, when no server is left or one of them refuses a request.
        """
        return self._complete(self._collect(requests, sampling), self.weight_version)

    def start(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> None:
        """Begin what `finish` will return; meanwhile the trainer may do as it likes. Collective."""
        if self._ahead is not None:
            raise RuntimeError("a batch is under way: finish() it first")
        self._ahead = self._collect(requests, sampling)
        if self.pool is not None:
            self._ahead.begin(lambda work: self._work(work, background=True))

    def finish(self, version: int) -> list[GeneratedSample]:
        """The samples that `start` asked for; raises as `generate` does. Collective.

        `version`: of the weights that a server gets which has lost its own.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            raise RuntimeError("no batch is under way: start() one first")
        return self._complete(ahead, version)

    def drop(self) -> None:
        """Forget what `start` began, if anything."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> SyncReport:
        """Send full tensors, under their Hugging Face names, to all servers. Collective.

        A server that fails here is out (and restarted); the others go on.

        Raises:
            RolloutLost: the first time, when no server becomes healthy.
            UserError: all servers refuse the weights.
        """
        self._wait()
        first = self.weight_version == NO_WEIGHTS
        self._agree(lambda: self._judge(self._ready(first)))
        return self._send_weights(named_tensors, version)

    def sleep(self) -> None:
        """The servers keep their memory: it is not the trainer's."""

    def wake(self) -> None:
        """Nothing was released."""

    def health(self) -> EngineHealth:
        """As far as this rank knows, without asking."""
        if self.weight_version == NO_WEIGHTS:
            return EngineHealth(False, "no weights: call update_weights()", self.weight_version)
        if self.pool is not None and not self.pool.holding(self.weight_version):
            return EngineHealth(False, self.pool.reasons() or "no server has the weights", self.weight_version)
        return EngineHealth(True, "ready", self.weight_version)

    def close(self) -> None:
        """End the servers that were started here."""
        self.drop()
        if self._runner is not None:
            if self._http is not None:
                if isinstance(self.way, GroupWay):
                    self._runner.run(self.way.close(self._http))
                self._runner.run(self._http.close())
            self._runner.close()
        self._runner = self._http = None
        if self.pool is not None:
            self.pool.close()

    def metrics(self) -> dict[str, float]:
        """`rollout/sglang/…` since the last call, on rank 0; empty elsewhere."""
        if self.pool is None:
            return {}
        counts = self.pool.counters.take()
        out = {f"rollout/sglang/{name}": value for name, value in counts.items()}
        out["rollout/sglang/servers"] = float(len(self.pool.holding(self.weight_version)))
        return out

    # -------------------------------------------------------------- one batch
    def _collect(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> Ahead:
        """All ranks' requests, on rank 0."""
        self._wait()
        everyone = self._gather((self._wrong_request(requests), list(requests)))
        if everyone is None:
            return Ahead(None, [], None)
        self.pool.new_iteration()
        batch = Batch([request for _, part in everyone for request in part], sampling)
        wrong = next((problem for problem, _ in everyone if problem), None)
        return Ahead(batch, [len(part) for _, part in everyone], wrong)

    def _complete(self, work: Ahead, version: int) -> list[GeneratedSample]:
        """Generate what is missing, as often as servers need weights for it; every rank's own samples."""
        known = work.result()
        while self._agree(lambda: self._work(work), known).what != "done":
            known = None
            # The stream has the trainer's weights of now, which may be newer than those the batch began with.
            self._send_weights(self._weights(), version, again=version == self.weight_version)
        parts = None
        if work.batch is not None:
            samples = iter(work.batch.samples())
            parts = [[next(samples) for _ in range(size)] for size in work.sizes]
        return self._scatter(parts)

    def _wait(self) -> None:
        """The event loop serves one thing at a time: let a batch that is under way come to its end."""
        if self._ahead is not None:
            self._ahead.result()

    def _work(self, work: Ahead, *, background: bool = False) -> Verdict:
        return self._judge(self._advance(work.batch, work.wrong, background))

    async def _advance(self, batch: Batch, wrong: str | None, background: bool) -> str:
        """Generate as far as possible: "done", or "sync" when servers have come up that need weights first.

        In the background there is nobody to send weights, so as long as others hold them these go on alone.
        """
        if wrong:
            raise UserError(wrong)
        http = self._connections()
        while not batch.finished:
            await self.pool.refresh(http)
            usable = self.pool.holding(self.weight_version)
            if len(usable) < len(self.pool.up) and not (background and usable):
                return "sync"
            if usable:
                await Round(batch, self.pool, http, self.settings, self.weight_version, self._name).run(usable)
            elif not await self.pool.wait_for_any(http, lambda: not batch.cancelled.is_set()):
                raise RolloutLost(f"no SGLang server is left ({self.pool.reasons()})")
        return "done"

    async def _ready(self, first: bool) -> str:
        """All servers that can be reached are up; the first time it takes as long as they take to start."""
        http = self._connections()
        self.pool.new_iteration()
        if first:
            await self.pool.wait_for_all(http)
            if not self.pool.up:
                raise RolloutLost(f"no SGLang server is healthy ({self.pool.reasons()})")
        else:
            await self.pool.refresh(http)
        return "go"

    def _send_weights(self, named: Iterable[tuple[str, Tensor]], version: int, *, again: bool = False) -> SyncReport:
        """Give `named` to all servers; `again`: to those that lost it. Collective."""
        started = time.perf_counter()
        update = None
        self.weight_version = version
        if self.pool is None:
            for _ in named:
                pass
        else:
            if not again:
                self._sent += 1
                self._name = f"{self._run_name}.{version}.{self._sent}"
            holding = self.pool.holding(version) if again else []
            servers = [server for server in self.pool.up if server not in holding]
            update = self._send_from_here(named, version, servers)
        verdict = self._agree(lambda: self._judge(self._sent_well(update)))
        n_bytes, transfers = (int(part) for part in verdict.what.split())
        return SyncReport(time.perf_counter() - started, n_bytes, transfers, version)

    def _send_from_here(self, named: Iterable[tuple[str, Tensor]], version: int, servers: Sequence[Server]) -> Update:
        update = Update(self.pool, self._connections(), self.settings, servers, self._name)
        self._run(update.begin(session=self.way.session))
        self.way.send(named, update, self._run)
        if self.way.trouble is None:
            self._run(update.end(version, session=self.way.session))
        return update

    async def _sent_well(self, update: Update) -> str:
        if self.way.trouble is not None:
            raise UserError(self.way.trouble)
        if update.refused and not update.servers:
            raise UserError(update.refused[0])
        return f"{update.bytes} {update.transfers}"

    def _connections(self) -> Http:
        if self._http is None:
            self._http = Http()
        return self._http

    def _run(self, work: Awaitable[Any]) -> Any:
        if self._runner is None:
            # With a factory the loop does not become the thread's current one, which other libraries may have set.
            self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        return self._runner.run(work)

    # -------------------------------------------------------------- between ranks
    def _judge(self, work: Awaitable[str]) -> Verdict:
        """Rank 0's work, and what it means for all."""
        try:
            return Verdict(self._run(work))
        except UserError as error:
            return Verdict("failed", error)

    def _agree(self, work: Callable[[], Verdict], known: Verdict | None = None) -> Verdict:
        """Rank 0 works, unless its verdict is `known`; its word, or its UserError, is everybody's. Collective."""
        verdict = None
        if self._rank == 0:
            verdict = known or work()
        if self._group is not None:
            box = [verdict]
            dist.broadcast_object_list(box, src=0, group=self._group)
            verdict = box[0]
        if verdict.error is not None:
            if self._rank > 0:
                verdict.error.said_elsewhere = True
            raise verdict.error
        return verdict

    def _gather(self, value: Any) -> list[Any] | None:
        """Every rank's value, on rank 0."""
        if self._group is None:
            return [value]
        out = [None] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object(value, out, dst=0, group=self._group)
        return out

    def _scatter(self, parts: list[Any] | None) -> Any:
        if self._group is None:
            return parts[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, parts, src=0, group=self._group)
        return box[0]

    def _wrong_request(self, requests: Sequence[GenerateRequest]) -> str | None:
        for request in requests:
            ids = request.prompt_ids
            if not ids:
                return f"sample {request.sample_id}: the prompt is empty; give at least one token"
            if min(ids) < 0 or max(ids) >= self.vocab_size:
                bad = min(ids) if min(ids) < 0 else max(ids)
                where = f"the model's vocabulary of {self.vocab_size}"
                return f"sample {request.sample_id}: prompt token {bad} is outside {where}"
        return None

"""New weights into servers: pause → flush → update → version → continue, by one of several ways.

`Update` walks the order; a way carries the tensors, which come in full under their Hugging Face names: `TensorWay` in
the requests, by value; `DiskWay` through a folder; `shards.ShardWay` cut for the server's ranks; `group.GroupWay` by
broadcast.

Nothing here raises for a server that fails: it is reported to the pool and left out, because the other ranks of the
trainer are inside a collective meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import random
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megappo.checkpoint.hf import write_hf
from megappo.config.schema.rollout import SGLangConfig
from megappo.errors import UserError
from megappo.rewards.breaker import backoff
from megappo.rollout.base import NO_WEIGHTS
from megappo.rollout.sglang import contract as api
from megappo.rollout.sglang.http import Http, Refused, Unavailable
from megappo.rollout.sglang.servers import Pool, Server

Run = Callable[[Awaitable[Any]], Any]  # runs a coroutine on rank 0's event loop


class Update:
    """One update of some servers; `servers` are those that got through so far, `refused` what others said."""

    def __init__(self, pool: Pool, http: Http, settings: SGLangConfig, servers: Sequence[Server], version_name: str):
        self.pool, self.http, self.settings = pool, http, settings
        self.version_name = version_name
        self.servers = list(servers)
        self.refused: list[str] = []
        self._rng = random.Random()
        self.bytes = 0
        self.transfers = 0

    async def begin(self, *, session: bool) -> None:
        """Nothing generates and no prefix of the old weights is left. What still runs there belongs to nobody."""
        for server in self.servers:
            server.version = NO_WEIGHTS
        await self.each(lambda s: self._post(s, api.ABORT, {"abort_all": True}))
        await self.each(lambda s: self._post(s, api.PAUSE, {"mode": "retract"}))
        await self.each(lambda s: self._post(s, api.FLUSH, {}))
        if session:
            await self.each(self._open_session)

    async def end(self, version: int, *, session: bool) -> None:
        """From here on the servers have the weights of `version` and generate again."""
        if session:
            await self.each(self._close_session)
        await self.each(lambda s: self._post(s, api.CONTINUE, {}))
        await self.each(self._verify)
        for server in self.servers:
            server.version = version

    async def checked(self, path: str, body: Callable[[Server], dict[str, Any]]) -> None:
        """Post an update to every server."""
        await self.each(lambda server: self._checked(server, path, body(server)))

    async def each(self, step: Callable[[Server], Awaitable[None]]) -> None:
        """Do a step at all servers at once; one that fails is out."""

        async def one(server: Server) -> Server | None:
            try:
                await step(server)
                return server
            except Refused as trouble:
                self.refused.append(f"{server.name} refused the weights: {trouble}")
                self.pool.lost(server, str(trouble))
            except Unavailable as trouble:
                self.pool.lost(server, f"during a weight update: {trouble}")
            return None

        self.servers = [s for s in await asyncio.gather(*(one(s) for s in self.servers)) if s is not None]

    async def _post(self, server: Server, path: str, body: dict[str, Any]) -> Any:
        """Every step may be done twice, so that a 5xx or a broken connection is tried again."""
        for attempt in range(self.settings.retries + 1):
            try:
                return await self.http.post(server.url + path, body, self.settings.sync_timeout_s)
            except Unavailable as trouble:
                if attempt == self.settings.retries or trouble.timed_out or not trouble.connected:
                    raise
                self.pool.counters.retries += 1
                await asyncio.sleep(backoff(attempt, 0.25, 5.0, self._rng))
        raise AssertionError("unreachable")

    async def _open_session(self, server: Server) -> None:
        if not server.contract.sessions:
            return
        try:
            await self._checked(server, api.BEGIN_UPDATE, {"selector": "all"})
        except Refused:  # one that an earlier update left open
            await self._post(server, api.END_UPDATE, {})
            await self._checked(server, api.BEGIN_UPDATE, {"selector": "all"})

    async def _close_session(self, server: Server) -> None:
        if server.contract.sessions:
            await self._checked(server, api.END_UPDATE, {})

    async def _checked(self, server: Server, path: str, body: dict[str, Any]) -> None:
        wrong = server.contract.updated(await self._post(server, path, body))
        if wrong is not None:
            raise Refused(f"{server.url}{path}: {wrong}")

    async def _verify(self, server: Server) -> None:
        info = await self.http.get(server.url + api.ALIVE, self.settings.sync_timeout_s)
        found = info.get("weight_version") if isinstance(info, dict) else None
        if found != self.version_name:
            raise Unavailable(f"{server.url}: has weights {found!r} after {self.version_name!r} were sent")


class Way(Protocol):
    """How tensors get into servers.

    `session`: it stands between begin and end of an update session. `trouble`: why nothing could be sent, last time.
    """

    session: bool
    trouble: str | None

    def send(self, named: Iterable[tuple[str, Tensor]], update: Update, run: Run) -> None:
        """Drain `named`, which is a collective, whatever happens."""
        ...


class TensorWay:
    """By value in the requests, bucket by bucket. Needs nothing but HTTP; a bucket is held as base64 text.

    By value and not by a handle to shared memory: a handle made with torch's default sharing, in a process that is no
    relative of the server, ends the server.
    """

    session = True

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self.trouble: str | None = None

    def send(self, named: Iterable[tuple[str, Tensor]], update: Update, run: Run) -> None:
        """Drain `named`; all buckets but the last leave the version as it is."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in named:
            own = tensor.detach().to("cpu", copy=True).contiguous()  # nothing but the tensor: a view drags its storage
            n_bytes = own.numel() * own.element_size()
            if bucket and size + n_bytes > self.bucket_bytes:
                self._post(bucket, update, run, last=False)
                bucket, size = [], 0
            bucket.append((name, own))
            size += n_bytes
        self._post(bucket, update, run, last=True)

    def _post(self, bucket: list[tuple[str, Tensor]], update: Update, run: Run, *, last: bool) -> None:
        payload = base64.b64encode(pickle.dumps(bucket)).decode()

        def body(server: Server) -> dict[str, Any]:
            # The same full tensors for each tensor-parallel rank, which cuts out its part.
            out: dict[str, Any] = {"serialized_named_tensors": [payload] * server.tp, "flush_cache": last}
            return out | ({"weight_version": update.version_name} if last else {})

        run(update.checked(api.FROM_TENSOR, body))
        update.bytes += len(update.servers) * sum(t.numel() * t.element_size() for _, t in bucket)
        update.transfers += 1


class DiskWay:
    """Through a Hugging Face folder in `folder`, which must be visible under the same path where the servers run.

    `shapes`: of all tensors that will come; `source`: where config and tokenizer files are copied from.
    """

    session = False

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]], source: Path, dtype: torch.dtype) -> None:
        self.folder, self.shapes, self.source, self.dtype = folder, shapes, source, dtype
        self.trouble: str | None = None

    def send(self, named: Iterable[tuple[str, Tensor]], update: Update, run: Run) -> None:
        """Write the folder and have it read; it is deleted afterwards. A failure to write is kept in `trouble`."""
        stream = iter(named)
        out = self.folder / update.version_name
        self.trouble = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_hf(stream, self.shapes, self.source, out, self.dtype)
        except (OSError, UserError) as error:
            self.trouble = f"cannot write the weights for the servers to {out} ({error}): check rollout.sglang.sync_dir"
        for _ in stream:  # a collective
            pass
        if self.trouble is None:
            body = {"model_path": str(out), "weight_version": update.version_name, "flush_cache": True}
            run(update.checked(api.FROM_DISK, lambda server: body))
            update.bytes = sum(file.stat().st_size for file in out.glob("*.safetensors"))
            update.transfers = 1
        shutil.rmtree(out, ignore_errors=True)

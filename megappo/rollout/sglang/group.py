"""Weights by broadcast: a process group of rank 0 and the ranks of a server, one such group for each server.

NCCL where the trainer has GPUs, gloo elsewhere. A group of its own for each server, so that the death of one does not
take the others' group along; a server that was started again gets a new one.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.rollout.sglang import contract as api
from megappo.rollout.sglang.http import Http, Refused, Unavailable
from megappo.rollout.sglang.process import free_port
from megappo.rollout.sglang.servers import Server
from megappo.rollout.sglang.weights import Run, Update

_LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass
class _Link:
    """The group with one life of a server."""

    life: float
    name: str
    group: Any


class GroupWay:
    """Bucket by bucket: a POST that announces names and shapes, and a broadcast of their bytes in one piece.

    `host`: this machine's address as the servers see it; None: found out.
    """

    session = True

    def __init__(self, bucket_bytes: int, timeout_s: float, device: torch.device, host: str | None = None) -> None:
        self.bucket_bytes, self.timeout_s, self.device, self.host = bucket_bytes, timeout_s, device, host
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._links: dict[str, _Link] = {}
        self.trouble: str | None = None

    def send(self, named: Iterable[tuple[str, Tensor]], update: Update, run: Run) -> None:
        """Drain `named`; all buckets but the last leave the version as it is."""
        run(update.each(lambda server: self._connect(update.http, server)))
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in named:
            n_bytes = tensor.numel() * tensor.element_size()
            if bucket and size + n_bytes > self.bucket_bytes:
                run(self._broadcast(bucket, update, last=False))
                bucket, size = [], 0
            bucket.append((name, tensor.detach().to(self.device)))
            size += n_bytes
        run(self._broadcast(bucket, update, last=True))

    async def close(self, http: Http) -> None:
        """Let the servers forget their groups."""
        for url, link in self._links.items():
            with suppress(Unavailable, Refused):
                await http.post(url + api.DESTROY_GROUP, {"group_name": link.name}, 5.0)
        self._links = {}

    async def _connect(self, http: Http, server: Server) -> None:
        link = self._links.get(server.url)
        if link is not None and link.life == server.since:
            return
        self._links.pop(server.url, None)
        host, port, name = self._address(server), free_port(), f"megappo-{uuid.uuid4().hex[:8]}"
        world = 1 + server.tp
        body = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": world}
        body |= {"group_name": name, "backend": self.backend}
        joining = _in_thread(lambda: _join(host, port, world, name, self.backend, self.timeout_s))
        await self._post(http, server, api.INIT_GROUP, body)
        self._links[server.url] = _Link(server.since, name, await self._patiently(server, joining))

    async def _broadcast(self, bucket: list[tuple[str, Tensor]], update: Update, *, last: bool) -> None:
        flat = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in bucket])
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "load_format": "flattened_bucket",
            "flush_cache": last,
        }
        body |= {"weight_version": update.version_name} if last else {}

        async def one(server: Server) -> None:
            link = self._links[server.url]
            sending = _in_thread(lambda: _send(link.group, flat))
            await self._post(update.http, server, api.FROM_GROUP, body | {"group_name": link.name})
            await self._patiently(server, sending)

        await update.each(one)
        update.bytes += len(update.servers) * flat.numel()
        update.transfers += 1

    async def _post(self, http: Http, server: Server, path: str, body: dict[str, Any]) -> None:
        """Once only: the other half of it, in the thread, happens once, too."""
        wrong = server.contract.updated(await http.post(server.url + path, body, self.timeout_s))
        if wrong is not None:
            raise Refused(f"{server.url}{path}: {wrong}")

    async def _patiently(self, server: Server, work: asyncio.Future) -> Any:
        try:
            return await asyncio.wait_for(work, self.timeout_s)
        except (TimeoutError, RuntimeError) as error:  # torch.distributed's errors are RuntimeErrors
            self._links.pop(server.url, None)
            reason = " ".join(str(error).split())[:200] or f"no end after {self.timeout_s:g} s"
            raise Unavailable(f"{server.url}: broadcast: {reason}") from None

    def _address(self, server: Server) -> str:
        """This machine's address on the way to the server."""
        target = urlsplit(server.url)
        if self.host is not None or target.hostname in _LOCAL:
            return self.host or "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target.hostname, target.port or 80))  # sends nothing, finds the way
            return probe.getsockname()[0]


def _join(host: str, port: int, world: int, name: str, backend: str, timeout_s: float) -> Any:
    """Rank 0 of a group beside the default one, as SGLang's ranks join it."""
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper

    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, world, True, timeout, wait_for_workers=False)
    group, _ = _new_process_group_helper(
        world,
        0,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=timeout,
    )
    return group


def _send(group: Any, flat: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([flat], options).wait()
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)


def _in_thread(work: Callable[[], Any]) -> asyncio.Future:
    """Run it beside the event loop, in a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except Exception as caught:
            error = caught
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True).start()
    return future

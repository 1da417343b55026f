"""The servers: started here or given, watched, restarted when they die, ended when the run ends.

A `Pool` lives on rank 0. It never talks about weights beyond remembering which version each server holds: a restarted
server holds none, and takes no requests before it got the current ones.
"""

from __future__ import annotations

import asyncio
import atexit
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megappo.config.schema.rollout import SGLangConfig
from megappo.errors import UserError
from megappo.rollout.base import NO_WEIGHTS
from megappo.rollout.sglang.contract import ALIVE, CONTINUE, HEALTH, SERVER_INFO, Contract, contract_for
from megappo.rollout.sglang.http import Http, Refused, Unavailable
from megappo.rollout.sglang.process import ServerProcess

State = Literal["starting", "up", "away", "gone"]
_PROBE_S = 3.0  # for one question to a server that is not up


@dataclass(eq=False)
class Server:
    """One server as rank 0 sees it.

    `state`: starting (not healthy yet), up, away (a given one that does not answer, asked again now and then), gone
    (for good). `since`: when it came into this state. `version`: of the weights it holds. `reason`: of its last loss.
    """

    name: str
    url: str
    process: ServerProcess | None
    state: State
    since: float
    version: int = NO_WEIGHTS
    tp: int = 1
    contract: Contract = field(default_factory=Contract)
    reason: str = ""
    served: bool = False  # it was healthy once: worth a restart
    losses: int = 0  # in this iteration
    strikes: int = 0  # weight versions that it should have had and did not, in this iteration


@dataclass
class Counters:
    """What went wrong since they were last taken."""

    retries: int = 0
    resent: int = 0
    bad_answers: int = 0
    dead_servers: int = 0
    restarts: int = 0
    queue_s: float = 0.0
    cached_tokens: int = 0

    def take(self) -> dict[str, float]:
        """All of them by name; they begin at 0 again."""
        out = {name: float(value) for name, value in vars(self).items()}
        self.__init__()
        return out


class Pool:
    """All servers of a run. `command(port, index)`: how server `index` is started; None where `urls` are given."""

    def __init__(
        self,
        settings: SGLangConfig,
        urls: Sequence[str],
        logs: Path,
        command: Callable[[int, int], list[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.counters, self._clock = settings, Counters(), clock
        self.servers: list[Server] = []
        atexit.register(self.close)
        for url in urls:
            self.servers.append(Server(url, url.rstrip("/"), None, "away", clock()))
        for index in range(0 if urls else settings.num_servers):
            process = ServerProcess(lambda port, i=index: command(port, i), logs / f"server_{index}.log")
            server = Server(f"server {index}", "", process, "starting", clock())
            self.servers.append(server)
            self._start(server)

    # -------------------------------------------------------------- states
    @property
    def up(self) -> list[Server]:
        """Healthy, whatever weights they hold."""
        return [server for server in self.servers if server.state == "up"]

    @property
    def coming(self) -> bool:
        """Is there hope that another one comes up?"""
        return any(server.state in ("starting", "away") for server in self.servers)

    def holding(self, version: int) -> list[Server]:
        """Healthy and with these weights."""
        return [server for server in self.up if server.version == version]

    def new_iteration(self) -> None:
        """Losses so far are forgiven."""
        for server in self.servers:
            server.losses = server.strikes = 0
            if server.state == "gone" and server.process is None:
                self._set(server, "away")  # somebody may have repaired it

    def lost(self, server: Server, reason: str) -> None:
        """A server is dead or hangs: it takes no more requests; one of ours is started again."""
        if server.state in ("away", "gone"):
            return
        self.counters.dead_servers += 1
        server.version, server.reason = NO_WEIGHTS, reason
        server.losses += 1
        if server.process is None:
            self._set(server, "away")
            return
        tail = server.process.last_lines()
        server.process.end()
        server.reason = f"{reason}{tail}"
        if server.losses > self.settings.restarts or not server.served:
            self._set(server, "gone")
        else:
            self.counters.restarts += 1
            self._start(server)

    def distrust(self, server: Server, reason: str) -> None:
        """It has other weights than it was sent: they are sent again, a few times."""
        server.version, server.reason = NO_WEIGHTS, reason
        server.strikes += 1
        if server.strikes > self.settings.restarts:
            self.counters.dead_servers += 1
            self._set(server, "gone")

    async def refresh(self, http: Http) -> None:
        """Look at every server that is not up, and whether the processes of those that are still run.

        Raises:
            UserError: a server of a version that is not known.
        """
        for server in self.servers:
            if server.process is not None and server.state in ("starting", "up") and not server.process.alive:
                self.lost(server, f"it ended with exit code {server.process.exit_code}")
        await asyncio.gather(*(self._meet(http, server) for server in self.servers if server.state != "up"))

    async def wait_for_any(self, http: Http, wanted: Callable[[], bool]) -> bool:
        """Wait until a server is up; False when none will come, or none is `wanted` any more."""
        while True:
            await self.refresh(http)
            if self.up or not self.coming or not wanted():
                return bool(self.up)
            await asyncio.sleep(0.2)

    async def wait_for_all(self, http: Http) -> None:
        """Wait until every server is up or beyond hope."""
        while self.coming:
            await self.refresh(http)
            if self.coming:
                await asyncio.sleep(0.2)

    async def healthy(self, http: Http, server: Server) -> str | None:
        """Why the server does not generate; None: it does."""
        try:
            await http.get(server.url + HEALTH, self.settings.health_timeout_s)
        except (Unavailable, Refused) as trouble:
            return str(trouble)
        return None

    def reasons(self) -> str:
        """Why each server is not there, in one line."""
        return "; ".join(f"{s.name}: {s.reason or s.state}" for s in self.servers if s.state != "up")

    def close(self) -> None:
        """End the servers that were started here. Idempotent."""
        atexit.unregister(self.close)
        for server in self.servers:
            if server.process is not None:
                server.process.end()
                self._set(server, "gone")

    # -------------------------------------------------------------- inside
    def _set(self, server: Server, state: State) -> None:
        server.state, server.since = state, self._clock()

    def _start(self, server: Server) -> None:
        server.url = server.process.start()
        self._set(server, "starting")

    async def _meet(self, http: Http, server: Server) -> None:
        """Has a starting or missing server become healthy?"""
        if server.state == "gone":
            return
        waited = self._clock() - server.since
        limit = self.settings.down_timeout_s if server.process is None else self.settings.start_timeout_s
        try:
            await http.get(server.url + ALIVE, _PROBE_S)
            if server.process is None:  # an update that broke off may have left it paused
                await http.post(server.url + CONTINUE, {}, _PROBE_S)
            await http.get(server.url + HEALTH, self.settings.health_timeout_s)
            info = await http.get(server.url + SERVER_INFO, self.settings.health_timeout_s)
        except (Unavailable, Refused) as trouble:
            if server.state in ("starting", "away") and waited > limit:
                if server.process is not None:
                    self.lost(server, f"not healthy {limit:g} s after its start")
                else:
                    server.reason = str(trouble)
                    self._set(server, "gone")
            return
        if not isinstance(info, dict) or "version" not in info:
            raise UserError(
                f"{server.url} is no SGLang server: its {SERVER_INFO} names no version; fix rollout.servers"
            )
        server.contract = contract_for(info["version"], server.url)
        server.tp = int(info.get("tp_size") or 1)
        server.version, server.served = NO_WEIGHTS, True
        if server.process is not None:
            server.process.note_shared_memory()
        self._set(server, "up")

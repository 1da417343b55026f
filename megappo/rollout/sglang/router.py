"""Which request goes to which server, and when. Pure: no clock, no network.

Invariants (tests/rollout/test_sglang_router.py asserts exactly these):
* a request is with at most one server at a time, and is handed out once for each time it was submitted;
* no server has more than `limit` requests at a time;
* requests of a group go to the server that has the group, unless that one left or the request avoids it: their common
  prompt is computed once there;
* a group goes to the server with the fewest outstanding tokens among those with a free place, when its first request is
  handed out and not before: a slow server gets fewer groups;
* no request whose group has no server waits while a server that it does not avoid has a free place, and none waits at
  its group's server while that one has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Item:
    """A request as the router sees it. `cost`: tokens it may take, prompt included. `avoid`: servers it failed on."""

    key: int
    group: int
    cost: int
    avoid: frozenset[str] = frozenset()


@dataclass
class _Server:
    running: dict[int, Item] = field(default_factory=dict)
    waiting: deque[Item] = field(default_factory=deque)
    tokens: int = 0  # of what is running or waiting here


class Router:
    """Hands out submitted items one by one, see `next`."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit is {limit}: at least one request at a time")
        self.limit = limit
        self._servers: dict[str, _Server] = {}
        self._home: dict[int, str] = {}  # group -> server
        self._pending: deque[Item] = deque()  # of groups that have no server, and whatever avoids its group's

    @property
    def servers(self) -> list[str]:
        """The servers in play."""
        return list(self._servers)

    def running(self, server: str) -> int:
        """Requests handed out to the server and not finished."""
        return len(self._servers[server].running)

    def join(self, server: str) -> None:
        """From now on the server takes requests."""
        self._servers.setdefault(server, _Server())

    def leave(self, server: str) -> list[Item]:
        """The server is out. Returns what was running there; its waiting requests go back to the front."""
        gone = self._servers.pop(server, None)
        if gone is None:
            return []
        self._home = {group: home for group, home in self._home.items() if home != server}
        self._pending.extendleft(reversed(gone.waiting))
        return list(gone.running.values())

    def submit(self, items: Iterable[Item]) -> None:
        """Items to be handed out, in this order where nothing else decides."""
        for item in items:
            home = self._home.get(item.group)
            if home is None or home in item.avoid:
                self._pending.append(item)
            else:
                self._wait(home, item)

    def done(self, server: str, key: int) -> None:
        """The request is no longer with the server: it is answered, or will be submitted again."""
        state = self._servers.get(server)
        if state is not None and key in state.running:
            state.tokens -= state.running.pop(key).cost

    def next(self) -> tuple[str, Item] | None:
        """The next request to send, counted as running from now on; None: nothing can go now."""
        free = [name for name, state in self._servers.items() if len(state.running) < self.limit]
        for name in free:
            if self._servers[name].waiting:
                return name, self._start(name, self._servers[name].waiting.popleft())
        if not free:
            return None
        for place, item in enumerate(self._pending):
            fitting = [name for name in free if name not in item.avoid]
            if fitting:
                del self._pending[place]
                home = min(fitting, key=lambda name: self._servers[name].tokens)
                self._servers[home].tokens += item.cost
                self._adopt(home, item)
                return home, self._start(home, item)
        return None

    def stuck(self) -> Item | None:
        """A request that avoids every server in play."""
        return next((item for item in self._pending if self._servers and not set(self._servers) - item.avoid), None)

    def _adopt(self, home: str, item: Item) -> None:
        """The group of `item` lives at `home`; its other pending requests wait there."""
        if item.group in self._home:
            return
        self._home[item.group] = home
        mates = [other for other in self._pending if other.group == item.group and home not in other.avoid]
        if mates:
            taken = {id(mate) for mate in mates}
            self._pending = deque(other for other in self._pending if id(other) not in taken)
            for mate in mates:
                self._wait(home, mate)

    def _wait(self, home: str, item: Item) -> None:
        state = self._servers[home]
        state.waiting.append(item)
        state.tokens += item.cost

    def _start(self, name: str, item: Item) -> Item:
        self._servers[name].running[item.key] = item
        return item

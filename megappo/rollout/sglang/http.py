"""One HTTP exchange with a server, and its three ways to fail."""

from __future__ import annotations

import asyncio
import importlib
import json
from types import ModuleType
from typing import Any

from megappo.errors import UserError

_CONNECTIONS = 16
SHOWN_BODY = 300  # characters of a refusal in a message


class Unavailable(Exception):
    """No answer, a broken one, or a 5xx: worth another attempt.

    `connected` False: nobody listens there. `timed_out`: it had all the time that it gets.
    """

    def __init__(self, reason: str, *, connected: bool = True, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.connected, self.timed_out = connected, timed_out


class Refused(Exception):
    """A 4xx: the same request would be refused again."""


class Http:
    """Connections to all servers, reused; belongs to one event loop.

    httpx looks at every connection of a client for each request, which takes longer than the rest from some dozens on.
    So there are as many clients as it takes for each to have `_CONNECTIONS` requests at most.
    """

    def __init__(self) -> None:
        self._httpx = load_httpx()
        self._tls = self._httpx.create_ssl_context()
        self._all: list[Any] = []
        self._free: list[Any] = []  # one entry for each request that a client may take

    async def get(self, url: str, timeout_s: float) -> Any:
        """The JSON (or text) of a 200."""
        return await self._ask("GET", url, None, timeout_s)

    async def post(self, url: str, body: Any, timeout_s: float) -> Any:
        """Post JSON; the JSON (or text) of a 200.

        Raises:
            Unavailable, Refused: in one line each.
        """
        return await self._ask("POST", url, json.dumps(body).encode(), timeout_s)

    async def close(self) -> None:
        for client in self._all:
            await client.aclose()

    async def _ask(self, method: str, url: str, content: bytes | None, timeout_s: float) -> Any:
        headers = {"content-type": "application/json"} if content is not None else None
        client = self._take()
        try:
            async with asyncio.timeout(timeout_s):  # of all of it: the client's own limits are for each read
                answer = await client.request(method, url, content=content, headers=headers)
        except TimeoutError:
            raise Unavailable(f"{url}: no answer after {timeout_s:g} s", timed_out=True) from None
        except self._httpx.RequestError as error:
            connected = not isinstance(error, self._httpx.ConnectError)
            reason = " ".join(str(error).split()) or "the connection broke"
            raise Unavailable(f"{url}: {type(error).__name__}: {reason}", connected=connected) from None
        finally:
            self._free.append(client)
        if answer.status_code == 200:
            return _content(answer)
        reason = f"{url}: HTTP {answer.status_code} {' '.join(answer.text[:SHOWN_BODY].split())}".rstrip()
        raise Unavailable(reason) if answer.status_code >= 500 else Refused(reason)

    def _take(self) -> Any:
        if not self._free:
            # SGLang's server drops idle connections after 5 s: do not reuse one that is about to be dropped.
            limits = self._httpx.Limits(max_connections=None, keepalive_expiry=3.0)
            client = self._httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, verify=self._tls)
            self._all.append(client)
            self._free += [client] * _CONNECTIONS
        return self._free.pop()


def _content(answer: Any) -> Any:
    try:
        return json.loads(answer.content)
    except ValueError:
        return answer.text  # of the few endpoints that answer in words


def load_httpx() -> ModuleType:
    """The HTTP client: `httpx`, or its successor `httpx2`, whose names are the same. UserError when there is none."""
    for module in ("httpx", "httpx2"):
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    raise UserError("rollout.engine=sglang needs an HTTP client: pip install 'megappo[sglang]'")

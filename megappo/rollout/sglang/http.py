"""One HTTP exchange with a server, and its three ways to fail."""

from __future__ import annotations

import asyncio
import importlib
import json
from types import ModuleType
from typing import Any

from megappo.errors import UserError

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
    """A pool of connections to all servers; belongs to one event loop."""

    def __init__(self, connections: int) -> None:
        self._httpx = load_httpx()
        # SGLang's server drops idle connections after 5 s: do not reuse one that is about to be dropped.
        limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=connections, keepalive_expiry=3.0)
        self._client = self._httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)

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
        await self._client.aclose()

    async def _ask(self, method: str, url: str, content: bytes | None, timeout_s: float) -> Any:
        headers = {"content-type": "application/json"} if content is not None else None
        try:
            async with asyncio.timeout(timeout_s):  # of all of it: the client's own limits are for each read
                answer = await self._client.request(method, url, content=content, headers=headers)
        except TimeoutError:
            raise Unavailable(f"{url}: no answer after {timeout_s:g} s", timed_out=True) from None
        except self._httpx.RequestError as error:
            connected = not isinstance(error, self._httpx.ConnectError)
            reason = " ".join(str(error).split()) or "the connection broke"
            raise Unavailable(f"{url}: {type(error).__name__}: {reason}", connected=connected) from None
        if answer.status_code == 200:
            return _content(answer)
        reason = f"{url}: HTTP {answer.status_code} {' '.join(answer.text[:SHOWN_BODY].split())}".rstrip()
        raise Unavailable(reason) if answer.status_code >= 500 else Refused(reason)


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

"""Kept connections to an HTTP endpoint, for requests side by side on one event loop.

A general client costs half a millisecond of CPU per request, which for requests of one message is
most of a delivery. Where the environment names a proxy for the endpoint, a general client is used:
it knows how to speak with one.
"""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol

import httpx

from cdc.version import VERSION
from sinks.http_answers import Answer
from sinks.http_connection import HttpConnection
from sinks.http_wire import EXCERPT_BYTES_MAX, BadAnswerError, request, request_head

_PORTS = {"http": 80, "https": 443}

Body = tuple[bytes | memoryview, ...]
"""The parts of a request's body."""

Send = Callable[[str, Body], Awaitable[Answer]]
"""Sends a request with this idempotency key, and returns its answer."""

_CLOSED = "the client was closed"


class ConnectError(Exception):
    """No connection could be made; the cause says why."""


class HttpClient(Protocol):
    """Sends requests, each over a connection that no other request is using.

    A request raises for what is no answer: TimeoutError if none came in time, ConnectError if no
    server answers, and OSError or BadAnswerError for one that broke off. Invariant: a client that
    was stopped, by whatever thread, sends no other request (ConnectError), because nothing at a
    server tells a late one from a new one.
    """

    def sender(self, url: httpx.URL) -> Send:
        """What sends requests to a URL of this server."""
        ...

    async def refresh(self) -> None:
        """Notice which connections the server has ended since the loop ran last."""
        ...

    async def connect(self) -> bool:
        """Connect and send nothing; returns whether that can be done."""
        ...

    def stop(self) -> None:
        """Send no other request; for any thread."""
        ...

    async def close(self) -> None: ...


def open_client(
    url: httpx.URL, *, method: str, headers: Mapping[str, str], timeout_s: float, verify: bool
) -> HttpClient:
    """A client for the server of a URL; it connects when it is first used."""
    given = {
        "Content-Type": "application/json",
        "User-Agent": f"walbrook/{VERSION}",
        "Accept": "*/*",
        **headers,
    }
    if _is_proxied(url):
        return ProxiedClient(method, given, timeout_s, verify)
    return DirectClient(url, method, given, timeout_s, verify)


class DirectClient:
    """Speaks HTTP/1.1 over sockets of its own."""

    def __init__(
        self,
        url: httpx.URL,
        method: str,
        headers: Mapping[str, str],
        timeout_s: float,
        verify: bool,
    ) -> None:
        self._host = url.raw_host.decode("ascii")
        self._port = url.port or _PORTS.get(url.scheme, 0)
        self._netloc = url.netloc.decode("ascii")
        self._tls = httpx.create_ssl_context(verify=verify) if url.scheme == "https" else None
        self._method, self._headers = method, dict(headers)
        self._timeout_s = timeout_s
        self._free: list[HttpConnection] = []  # not more than there were requests at once
        self._stopped = False

    def sender(self, url: httpx.URL) -> Send:
        head = request_head(self._method, url.raw_path, self._netloc, self._headers)
        return partial(self._exchange, head)

    async def refresh(self) -> None:
        if self._free:
            await _let_loop_turn()

    async def connect(self) -> bool:
        self._free.append(await self._connected())
        return True

    def stop(self) -> None:
        self._stopped = True

    async def close(self) -> None:
        while self._free:
            self._free.pop().close()
        await _let_loop_turn()

    async def _exchange(self, head: bytes, key: str, body: Body) -> Answer:
        """Send a request and read its answer, both within the timeout."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while self._free and not self._stopped:
            connection = self._free.pop()
            if connection.is_open:
                break
        else:
            connection = await self._connected()
        try:
            exchanged = await connection.exchange(request(head, key, body), deadline)
        except BaseException:
            connection.close()
            raise
        if exchanged.reusable:
            self._free.append(connection)
        else:
            connection.close()
        return exchanged.answer

    async def _connected(self) -> HttpConnection:
        if self._stopped:
            raise ConnectError(_CLOSED)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                _, connection = await loop.create_connection(
                    HttpConnection, self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise
        except OSError as error:
            raise ConnectError(type(error).__name__) from error
        if self._stopped:
            connection.close()
            raise ConnectError(_CLOSED)
        return connection


class ProxiedClient:
    """Speaks through the proxy that the environment names."""

    def __init__(
        self, method: str, headers: Mapping[str, str], timeout_s: float, verify: bool
    ) -> None:
        self._method = method
        self._timeout_s = timeout_s
        self._stopped = False
        self._client = httpx.AsyncClient(
            headers=dict(headers), timeout=timeout_s, verify=verify, follow_redirects=False
        )

    def sender(self, url: httpx.URL) -> Send:
        return partial(self._exchange, url)

    async def refresh(self) -> None:
        """The general client looks for itself."""

    async def connect(self) -> bool:
        return False

    def stop(self) -> None:
        self._stopped = True

    async def close(self) -> None:
        await self._client.aclose()

    async def _exchange(self, url: httpx.URL, key: str, body: Body) -> Answer:
        if self._stopped:
            raise ConnectError(_CLOSED)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        excerpt = b""
        headers = {"Idempotency-Key": key}
        try:
            async with self._client.stream(
                self._method, url, content=b"".join(body), headers=headers
            ) as response:
                try:
                    async for chunk in response.aiter_bytes():
                        excerpt += chunk
                        if len(excerpt) >= EXCERPT_BYTES_MAX or loop.time() > deadline:
                            break
                except httpx.HTTPError:
                    pass  # the status has said what became of the request
                retry_after = response.headers.get("Retry-After", "")
                return Answer(response.status_code, retry_after, excerpt)
        except httpx.TimeoutException as error:
            raise TimeoutError(type(error).__name__) from error
        except (httpx.ConnectError, httpx.ProxyError) as error:
            raise ConnectError(type(error).__name__) from error
        except httpx.HTTPError as error:
            raise BadAnswerError(type(error).__name__) from error


async def _let_loop_turn() -> None:
    """Let the loop take what its sockets have: one turn sees it, the next one acts on it."""
    for _ in range(2):
        await asyncio.sleep(0)


def certificate_refused(error: BaseException) -> bool:
    """Whether an error came of a certificate that is not trusted."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _is_proxied(url: httpx.URL) -> bool:
    proxies = urllib.request.getproxies()
    named = url.scheme in proxies or "all" in proxies
    return named and not urllib.request.proxy_bypass(url.host)

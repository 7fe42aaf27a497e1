"""One kept connection to an HTTP endpoint, with no more Python per request than it takes.

A general client costs half a millisecond of CPU per request, which for requests of one message is
most of a delivery. Where the environment names a proxy for the endpoint, a general client is used:
it knows how to speak with one.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
import urllib.request
from collections.abc import Mapping
from typing import Protocol

import httpx

from cdc.version import VERSION
from sinks.http_answers import Answer
from sinks.http_wire import EXCERPT_BYTES_MAX, BadAnswerError, read_answer, request, request_head

_RECEIVE_BYTES = 64 << 10
_PORTS = {"http": 80, "https": 443}

Body = tuple[bytes | memoryview, ...]
"""The parts of a request's body."""

_CLOSED = "the client was closed"


class ConnectError(Exception):
    """No connection could be made; the cause says why."""


class HttpClient(Protocol):
    """Sends one request after another; raises for what is no answer.

    TimeoutError if none came in time, ConnectError if nobody is there, and OSError or
    BadAnswerError for one that broke off. Invariant: a client that was closed, by whatever thread,
    sends no other request (ConnectError), because nothing at a server tells a late one from a new
    one.
    """

    def exchange(self, url: httpx.URL, key: str, body: Body) -> Answer: ...

    def connect(self) -> bool:
        """Connect and send nothing; returns whether that can be done."""
        ...

    def close(self) -> None: ...


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
    """Speaks HTTP/1.1 over a socket of its own."""

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
        self._heads: tuple[httpx.URL, bytes] | None = None  # of the last URL
        self._socket: socket.socket | None = None
        self._closed = False

    def exchange(self, url: httpx.URL, key: str, body: Body) -> Answer:
        """Send a request and read its answer, within the timeout."""
        data = request(self._head(url), key, body)
        deadline = time.monotonic() + self._timeout_s
        wire = self._connected()
        self._socket = None  # kept again only if all of the answer was read
        try:
            wire.settimeout(self._timeout_s)
            wire.sendall(data)

            def receive() -> bytes:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("no whole answer in time")
                wire.settimeout(left_s)
                return wire.recv(_RECEIVE_BYTES)

            exchanged = read_answer(receive)
        except BaseException:
            wire.close()
            raise
        if exchanged.reusable and not self._closed:
            self._socket = wire
        else:
            wire.close()
        return exchanged.answer

    def connect(self) -> bool:
        self._socket = self._connected()
        return True

    def close(self) -> None:
        self._closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        wire, self._socket = self._socket, None
        if wire is not None:
            wire.close()

    def _head(self, url: httpx.URL) -> bytes:
        if self._heads is None or self._heads[0] is not url:
            head = request_head(self._method, url.raw_path, self._netloc, self._headers)
            self._heads = (url, head)
        return self._heads[1]

    def _connected(self) -> socket.socket:
        """The kept connection, if the server has not ended it meanwhile, or a new one."""
        if self._closed:
            raise ConnectError(_CLOSED)
        wire = self._socket
        if wire is not None:
            waiting = select.poll()
            waiting.register(wire, select.POLLIN)
            if not waiting.poll(0):
                return wire
            self._disconnect()
        try:
            wire = socket.create_connection((self._host, self._port), self._timeout_s)
            try:
                wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    wire = self._tls.wrap_socket(wire, server_hostname=self._host)
            except BaseException:
                wire.close()
                raise
            return wire
        except TimeoutError:
            raise
        except OSError as error:
            raise ConnectError(type(error).__name__) from error


class ProxiedClient:
    """Speaks through the proxy that the environment names."""

    def __init__(
        self, method: str, headers: Mapping[str, str], timeout_s: float, verify: bool
    ) -> None:
        self._method = method
        self._timeout_s = timeout_s
        self._client = httpx.Client(
            headers=dict(headers),
            timeout=timeout_s,
            verify=verify,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=1),
        )

    def exchange(self, url: httpx.URL, key: str, body: Body) -> Answer:
        if self._client.is_closed:
            raise ConnectError(_CLOSED)
        deadline = time.monotonic() + self._timeout_s
        excerpt = b""
        headers = {"Idempotency-Key": key}
        try:
            with self._client.stream(
                self._method, url, content=b"".join(body), headers=headers
            ) as response:
                try:
                    for chunk in response.iter_bytes():
                        excerpt += chunk
                        if len(excerpt) >= EXCERPT_BYTES_MAX or time.monotonic() > deadline:
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

    def connect(self) -> bool:
        return False

    def close(self) -> None:
        self._client.close()


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

"""A real HTTP endpoint for the tests.

It records every request before it answers, answers what the test scripted (200 when the script is
used up), and can go away and come back on the same port.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import orjson
import pytest


@dataclass(frozen=True)
class Scripted:
    """One answer of the endpoint."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    after: threading.Event | None = None  # answer only once this is set
    hang_up: bool = False  # close the connection in place of an answer
    writes: int | None = None  # messages kept whatever is answered; None: all, if that is 2xx


def carried(body: bytes) -> list[dict[str, object]]:
    """The messages in a request's body, whether batched or alone."""
    content = orjson.loads(body)
    found: list[dict[str, object]] = content.get("data", [content])
    return found


@dataclass(frozen=True)
class Received:
    """One request, and the status it was given; 0 when the endpoint hung up."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes
    status: int
    writes: int | None = None

    @property
    def messages(self) -> list[dict[str, object]]:
        return carried(self.body)

    @property
    def written(self) -> list[dict[str, object]]:
        """What the endpoint kept of it."""
        if self.writes is None:
            return self.messages if 200 <= self.status < 300 else []
        return self.messages[: self.writes]


class Endpoint:
    """An HTTP server on the loopback interface."""

    _AFTER_MAX_S = 60.0

    def __init__(self) -> None:
        self.requests: list[Received] = []
        self.script: deque[Scripted] = deque()
        self.refuses: Callable[[list[dict[str, object]]], bool] | None = None
        self.refusal = 422  # what those are answered with
        self.faults: Callable[[list[dict[str, object]]], Scripted] | None = None
        self.connections = 0
        self.takes_s = 0.0  # for each answer: a slow destination
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/changes"

    @property
    def accepted(self) -> list[Received]:
        """The requests that were answered with 2xx."""
        return [request for request in self.requests if 200 <= request.status < 300]

    @property
    def written(self) -> list[dict[str, object]]:
        """What the endpoint kept of all requests, in order."""
        return [message for request in self.requests for message in request.written]

    def start(self) -> None:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                endpoint.connections += 1
                endpoint._open.append(self.connection)

            def do_POST(self) -> None:
                endpoint._answer(self)

            def do_PUT(self) -> None:
                endpoint._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                """The recorded requests are the log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def speak_tls(self, chain: Path, key: Path) -> None:
        """From now on, with this certificate."""
        assert self._server is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def hang_up(self) -> None:
        """End the connections that are open; new ones are taken."""
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._server = self._thread = None

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Self]:
        """An endpoint that is stopped at the end."""
        server = cls()
        server.start()
        try:
            yield server
        finally:
            server.stop()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length", "0"))
        body = handler.rfile.read(length)
        if len(body) < length:  # the client was killed in the middle of it: no request at all
            handler.close_connection = True
            return
        with self._lock:
            answer = self.script.popleft() if self.script else Scripted()
            if self.refuses is not None and self.refuses(carried(body)):
                answer = Scripted(self.refusal)
            if self.faults is not None:
                answer = self.faults(carried(body))
            self.requests.append(
                Received(
                    handler.command,
                    handler.path,
                    {name.lower(): value for name, value in handler.headers.items()},
                    body,
                    0 if answer.hang_up else answer.status,
                    answer.writes,
                )
            )
        if answer.after is not None:
            answer.after.wait(self._AFTER_MAX_S)
        if self.takes_s:
            threading.Event().wait(self.takes_s)
        if answer.hang_up:
            handler.close_connection = True
            return
        try:
            handler.send_response(answer.status)
            for name, value in answer.headers.items():
                handler.send_header(name, value)
            handler.send_header("Content-Length", str(len(answer.body)))
            handler.end_headers()
            handler.wfile.write(answer.body)
        except OSError:
            handler.close_connection = True  # the client gave up waiting


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint.running() as server:
        yield server

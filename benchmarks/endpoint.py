"""An HTTP endpoint in a process of its own that can be up, refuse connections, or hang.

Invariant: it has seen exactly what it answered with 200. A request that it let hang, or
that was cut off when it went down, it has not.
"""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Literal, Self

import orjson

from benchmarks.arrivals import DestinationArrivals, SeenChanges

State = Literal["up", "refusing", "hanging"]

_ANSWER_TIMEOUT_S = 60.0
_POLL_S = 0.02


class Endpoint:
    """The process, from outside; a context manager that starts and ends it."""

    def __init__(self) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._ours, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs,), daemon=True)
        self.url = ""

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def become(self, state: State) -> None:
        """Returns once it is so."""
        self._ask(state)

    def count(self) -> int:
        """How many messages it has accepted."""
        answer = self._ask("count")
        assert isinstance(answer, int)
        return answer

    def seen(self) -> SeenChanges:
        """All messages that it has accepted, in the order they came."""
        answer: SeenChanges = self._ask("seen")  # type: ignore[assignment]
        return answer

    def __enter__(self) -> Self:
        self._process.start()
        self.url = f"http://127.0.0.1:{self._ask('port')}/changes"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.join()

    def _ask(self, question: str) -> object:
        self._ours.send(question)
        if not self._ours.poll(_ANSWER_TIMEOUT_S):
            raise TimeoutError(f"the endpoint did not answer '{question}'")
        return self._ours.recv()


class _Server:
    """The endpoint, from inside."""

    def __init__(self) -> None:
        self.arrivals = DestinationArrivals()
        self.port = 0
        self._state: State = "up"
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._listening: ThreadingHTTPServer | None = None
        self._listen()

    def become(self, state: State) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()
        if state == "refusing":
            self._go_away()
        elif self._listening is None:
            self._listen()

    def _listen(self) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                server._connections.add(self.connection)

            def finish(self) -> None:
                server._connections.discard(self.connection)
                super().finish()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if not server._accepts(body):
                    self.close_connection = True
                    return
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """No log of requests."""

        self._listening = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._listening.daemon_threads = True
        self.port = self._listening.server_port
        threading.Thread(target=self._listening.serve_forever, args=(_POLL_S,), daemon=True).start()

    def _go_away(self) -> None:
        if self._listening is not None:
            self._listening.shutdown()
            self._listening.server_close()
            self._listening = None
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it ended in the meantime

    def _accepts(self, body: bytes) -> bool:
        """Whether a request is answered; while the endpoint hangs, not before it no longer does."""
        arrived_s = time.time()
        with self._changed:
            if self._state != "up":
                self._changed.wait_for(lambda: self._state != "hanging")
                return False
            for message in orjson.loads(body)["data"]:
                self.arrivals.add(message["record"], message["metadata"], arrived_s)
            return True


def _serve(asked: Connection) -> None:
    """What runs in the process, until it is ended."""
    server = _Server()
    while True:
        match asked.recv():
            case "port":
                asked.send(server.port)
            case "count":
                asked.send(len(server.arrivals))
            case "seen":
                asked.send(server.arrivals.seen())
            case state:
                server.become(state)
                asked.send(None)

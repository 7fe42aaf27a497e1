"""A network between client and server that a test can damage."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Pass = Callable[[bytes], bytes]


class Line:
    """Carries bytes both ways between a port of its own and ``to_port``."""

    def __init__(self, to_port: int, answer: Pass) -> None:
        self._to_port = to_port
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Both ends lose the connection, and no new one is made."""
        for each in [self._listener, *self._sockets]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to_port))
                self._sockets += [near, far]
                for source, target, change in ((near, far, bytes), (far, near, self._answer)):
                    threading.Thread(
                        target=self._carry, args=(source, target, change), daemon=True
                    ).start()

    def _carry(self, source: socket.socket, target: socket.socket, change: Pass) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(change(data))


@contextmanager
def line_to(port: int, answer: Pass = bytes) -> Iterator[Line]:
    """A line to ``port``; what the server answers goes through ``answer``."""
    line = Line(port, answer)
    try:
        yield line
    finally:
        line.cut()

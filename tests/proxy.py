"""A proxy before a Postgres server that can be cut, frozen and pointed elsewhere."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from types import TracebackType
from typing import Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

_TICK_S = 0.05


class Proxy:
    """Listens on the loopback interface; a context manager."""

    def __init__(self, target_dsn: str) -> None:
        self._target = _address(target_dsn)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_TICK_S)
        self._flowing = threading.Event()
        self._flowing.set()
        self._closed = threading.Event()
        self._cuts = 0  # a connection lives as long as this is what it was when it began
        self._threads: list[threading.Thread] = []
        self.accepted = 0

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def dsn(self, dsn: str, **parameters: str) -> str:
        """The same connection through the proxy."""
        return make_conninfo(dsn, host="127.0.0.1", port=self.port, **parameters)

    def cut(self) -> None:
        """End every connection."""
        self._cuts += 1

    def freeze(self) -> None:
        """Pass nothing on, while connections stay open and new ones are accepted."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def retarget(self, dsn: str) -> None:
        """Let new connections lead to another server; the old ones are cut."""
        self._target = _address(dsn)
        self.cut()

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._flowing.set()
        for thread in list(self._threads):
            thread.join(5)
        self._listener.close()

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                self.accepted += 1
                self._start(self._serve, client, self._cuts)

    def _serve(self, client: socket.socket, cuts: int) -> None:
        client.settimeout(10)
        with contextlib.suppress(OSError), contextlib.ExitStack() as ours:
            ours.callback(client.close)
            server = ours.enter_context(socket.create_connection(self._target, timeout=10))
            while not self._closed.is_set() and self._cuts == cuts:
                if not self._flowing.wait(_TICK_S):
                    continue
                for source, sink in _readable(client, server):
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    while not self._flowing.wait(_TICK_S):
                        if self._closed.is_set() or self._cuts != cuts:
                            return
                    sink.sendall(data)


def _readable(
    client: socket.socket, server: socket.socket
) -> list[tuple[socket.socket, socket.socket]]:
    other = {client: server, server: client}
    ready, _, _ = select.select([client, server], [], [], _TICK_S)
    return [(side, other[side]) for side in ready]


def _address(dsn: str) -> tuple[str, int]:
    parameters = conninfo_to_dict(dsn)
    return str(parameters["host"]), int(str(parameters["port"]))

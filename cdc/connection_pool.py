"""Connections to one database that threads share: each is used by one thread at a time.

Invariants: a connection that was left inside a transaction is closed and not used again; at most
``idle_max`` connections stay open while they are idle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from psycopg.pq import TransactionStatus

from cdc.connection import Connection, connect


class ConnectionPool:
    """All methods may be called from any thread."""

    def __init__(self, dsn: str, *, name: str, idle_max: int = 4) -> None:
        self._dsn = dsn
        self._name = name
        self._idle_max = idle_max
        self._idle: list[Connection] = []
        self._lock = threading.Lock()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """An autocommit connection for the caller alone; an idle one if there is any."""
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        connection = idle or connect(self._dsn, name=self._name)
        try:
            yield connection
        finally:
            self._give_back(connection)

    def close(self) -> None:
        """Close the idle connections; the pool can be used again."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def end(self) -> None:
        """Close for good: a connection that is still in use is closed when it is given back."""
        with self._lock:
            self._idle_max = 0
        self.close()

    def __del__(self) -> None:
        self.close()

    def _give_back(self, connection: Connection) -> None:
        if connection.info.transaction_status == TransactionStatus.IDLE:
            with self._lock:
                if len(self._idle) < self._idle_max:
                    self._idle.append(connection)
                    return
        elif connection.broken:
            self.close()  # the server is gone, and with it the idle ones
        connection.close()

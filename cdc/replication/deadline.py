"""A bound on how long a connection may be waited for, whatever stands between us and the server.

The server ends a statement after its own bound and TCP notices a peer that is gone; a proxy that
still answers for a dead server is noticed by neither. Past the deadline the socket is shut, so that
the thread that waits for it gets an error at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg


class ConnectionCutter:
    """Ends the conversation on a connection from another thread, and never on a later one.

    Its lock stands between shutting and closing: a closed connection's descriptor may already be
    of another call.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._open = True

    def shut(self) -> None:
        """The thread that waits for the server gets an error at once."""
        with self._lock, contextlib.suppress(OSError, psycopg.Error):
            if self._open:
                with socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
                    ours.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """From here on the owner may close."""
        with self._lock:
            self._open = False


@contextmanager
def deadline(connection: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Shut the connection if the block takes longer; the owner closes it after the block."""
    shutter = ConnectionCutter(connection)
    timer = threading.Timer(seconds, shutter.shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        shutter.release()

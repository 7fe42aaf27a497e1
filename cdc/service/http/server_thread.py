"""An HTTP application in a thread of this process, within bounds."""

from __future__ import annotations

import socket
import threading

import uvicorn
from starlette.applications import Starlette

from cdc.service.http.bounded import HEADER_BYTES_MAX, BoundedProtocol

_END_S = 5.0


class ServerThread:
    """Serves on a socket that listens already, and closes it at the end."""

    def __init__(self, application: Starlette, listener: socket.socket) -> None:
        self._socket = listener
        self.port: int = listener.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                application,
                log_level="warning",
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=2,
                http=BoundedProtocol,
                ws="none",
                h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="http", daemon=True
        )

    def __enter__(self) -> ServerThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(_END_S)
        self._socket.close()

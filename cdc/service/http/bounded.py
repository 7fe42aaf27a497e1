"""HTTP connections within bounds: how many there are, and how long a request may take to arrive.

The server shares its process with the supervisor, and its descriptors with the processes that are
to be started. Invariant: a client that opens many connections, or sends its request byte by byte,
costs a bounded number of descriptors for a bounded time. A response may take as long as it needs:
a pull consumer may wait for messages.
"""

from __future__ import annotations

import asyncio
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_MAX: Final = 400
HEADER_BYTES_MAX: Final = 32 << 10
REQUEST_S: Final = 10.0
"""From the first byte of a request, or from the connection, to its last byte."""


class BoundedProtocol(H11Protocol):
    """One connection; closed at once if there are too many, and later if its request is late."""

    connections_max = CONNECTIONS_MAX
    request_s = REQUEST_S
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.connections_max:
            transport.abort()
            return
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and self.conn.their_state is h11.IDLE:
            self._expect_request()
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._request_arrived()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The next request may have begun to arrive while this one was answered.
        state = self.conn.their_state
        begun = state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0])
        if begun and self._deadline is None:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_arrived()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._deadline = self.loop.call_later(self.request_s, self.transport.abort)

    def _request_arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

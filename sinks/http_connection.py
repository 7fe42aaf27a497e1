"""One kept connection to an HTTP server: a request, its answer, then the next request.

It belongs to one event loop, and costs little Python per request: an answer that is, byte for byte,
the one before means the same, and is not taken apart again. Invariants: an exchange ends by its
deadline; a connection on which anything went wrong, or something came unasked, is used no more.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import cast

from sinks.http_wire import Exchanged, Reading, read_answer


class HttpConnection(asyncio.Protocol):
    """What the event loop tells of the socket, and what it is given to send."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[Exchanged] | None = None  # of the request under way
        self._reading: Reading | None = None  # of its answer, once a part of that is there
        self._deadline = 0.0
        self._watch: asyncio.TimerHandle | None = None  # one for many requests
        self._usual = b""  # an answer that came as a whole, and what it says
        self._usual_meaning: Exchanged | None = None
        self.is_open = False

    def exchange(self, data: bytes, deadline: float) -> asyncio.Future[Exchanged]:
        """Send a request; what is no answer is raised, TimeoutError at the deadline."""
        answered: asyncio.Future[Exchanged] = self._loop.create_future()
        self._answered = answered
        self._deadline = deadline
        if self._watch is None:
            self._watch = self._loop.call_at(deadline, self._look_at_deadline)
        self._transport.write(data)
        return answered

    def close(self) -> None:
        """Give the connection up."""
        self.is_open = False
        self._answered = self._reading = None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        wire: socket.socket = transport.get_extra_info("socket")
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._reading is None and self._usual_meaning is not None and data == self._usual:
            self._end(self._usual_meaning)
            return
        is_first = self._reading is None
        exchanged = self._take(data)
        if is_first and exchanged is not None:
            self._usual, self._usual_meaning = data, exchanged

    def eof_received(self) -> None:
        self._take(b"")

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._answered is not None:
            self._take(b"" if error is None else error)

    def _look_at_deadline(self) -> None:
        self._watch = None
        if self._answered is None:
            return
        if self._loop.time() < self._deadline:  # of a later request
            self._watch = self._loop.call_at(self._deadline, self._look_at_deadline)
        else:
            self._take(TimeoutError("no whole answer in time"))

    def _take(self, come: bytes | Exception) -> Exchanged | None:
        """Go on with the answer; returns it once it is whole."""
        if self._answered is None:
            self.close()  # nothing was asked
            return None
        if self._reading is None:
            self._reading = read_answer()
            next(self._reading)
        try:
            if isinstance(come, Exception):
                self._reading.throw(come)
            else:
                self._reading.send(come)
        except StopIteration as end:
            exchanged: Exchanged = end.value
            self._end(exchanged)
            return exchanged
        except Exception as error:
            answered = self._answered
            self.close()
            if not answered.done():
                answered.set_exception(error)
        return None

    def _end(self, exchanged: Exchanged) -> None:
        answered, self._answered, self._reading = self._answered, None, None
        if answered is None:
            self.close()  # nothing was asked
            return
        if self._transport.get_write_buffer_size():  # it did not wait for the whole request
            exchanged = replace(exchanged, reusable=False)
        if not answered.done():
            answered.set_result(exchanged)

"""Serving the log to executors on other machines, by Arrow Flight.

Every call carries the token of the run, and none is answered without it. A frame goes out as it is
stored, mapped and never copied here, and one at a time: a reader that is slow holds one frame, not
a range. Calls are bounded, and of those the ones that wait for a batch, so that waiting readers
cannot keep others from reading. Damage that is met is reported to the writer; nothing else here
changes the log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.flight as flight
import structlog

from cdc.errors import (
    CorruptionError,
    OperatorError,
    ProtocolError,
    TransientError,
    WalbrookError,
)
from cdc.log.damage_note import report_damage
from cdc.log.flight.guard import Guard, busy, require_free, unknown
from cdc.log.flight.view_pool import ViewPool
from cdc.log.flight.wire import (
    FRAME_SCHEMA,
    WAIT_S_MAX,
    Request,
    pack_error,
    read_request,
    shortened,
)
from cdc.log.view import LogView

_logger = structlog.get_logger("walbrook.log_server")

_ENTRIES_AT_ONCE = 1 << 16
_BATCHES_AT_ONCE = 1024
# How soon a waiting call notices that the server is being closed.
_CLOSING_LOOK_S = 0.25


@dataclass(frozen=True)
class ServerTls:
    """What a server proves itself with, both PEM."""

    certificate: bytes
    private_key: bytes


@dataclass(frozen=True)
class CallLimits:
    """How many calls at once, and how many of them may wait for a batch."""

    calls: int = 128
    waits: int = 32


class LogServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves the logs of several sources; answers from the moment it is made until ``close``."""

    def __init__(
        self,
        sources: Mapping[str, Path],
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ServerTls | None = None,
        limits: CallLimits | None = None,
    ) -> None:
        limits = limits or CallLimits()
        self._sources = dict(sources)
        self._views = ViewPool()
        self._waits = threading.BoundedSemaphore(limits.waits)
        self._closing = threading.Event()
        guard = Guard(token, limits.calls)
        if port:
            require_free(host, port)
        address = f"[{host}]" if ":" in host else host
        try:
            super().__init__(
                f"{'grpc+tls' if tls else 'grpc'}://{address}:{port}",
                tls_certificates=[(tls.certificate, tls.private_key)] if tls else None,
                middleware={"guard": guard},
            )
        except (OSError, pa.ArrowException) as error:
            raise OperatorError(
                f"the log server cannot listen on {address}:{port}: {error}",
                fix="correct log.flight: host and port, and the certificate with its key",
            ) from error

    def do_action(
        self, _context: flight.ServerCallContext, action: flight.Action
    ) -> Iterator[bytes]:
        """Numbers as JSON; ``entries`` packed, in pieces."""
        answers: dict[str, Callable[[Request], Iterator[bytes]]] = {
            "look": self._look,
            "wait": self._wait,
            "seek": self._seek,
            "entries": self._entries,
        }
        with _answering():
            answer = answers.get(action.type)
            if answer is None:
                raise unknown(action.type)
            request = read_request(action.body.to_pybytes() if action.body else b"")
            yield from answer(request)

    def do_get(
        self, _context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.GeneratorStream:
        """The frames of a range of batches."""
        with _answering():
            request = read_request(ticket.ticket)
            start, end = request.integer("start"), request.integer("end")
        return flight.GeneratorStream(FRAME_SCHEMA, self._frames(request, start, end))

    def close(self, timeout_s: float = 10.0) -> bool:
        """End waiting calls and streams, then stop. Returns True if all of them have ended."""
        self._closing.set()
        # Flight waits for calls without a bound; a stream that its client does not read is one.
        ending = threading.Thread(target=self.shutdown, name="log-server-end", daemon=True)
        ending.start()
        ending.join(timeout_s)
        self._views.close()
        return not ending.is_alive()

    def _look(self, request: Request) -> Iterator[bytes]:
        with self._view(request) as view:
            earliest, evicted = view.floors()
            yield orjson.dumps(
                {
                    "history": view.history(),
                    "next_batch": view.next_batch(),
                    "first_batch": view.first_batch(),
                    "earliest": list(earliest),
                    "evicted": list(evicted),
                }
            )

    def _wait(self, request: Request) -> Iterator[bytes]:
        beyond = request.integer("beyond")
        deadline = monotonic() + min(max(0.0, request.seconds("timeout_s")), WAIT_S_MAX)
        with self._view(request) as view:
            end = view.next_batch()
            # With all places taken the answer comes at once, and the caller asks again.
            waited = end > beyond or self._waits.acquire(blocking=False)
            if waited and end <= beyond:
                try:
                    end = self._wait_until(view, beyond, deadline)
                finally:
                    self._waits.release()
            history = view.history()
        yield orjson.dumps({"history": history, "next_batch": end, "waited": waited})

    def _wait_until(self, view: LogView, beyond: int, deadline: float) -> int:
        while True:
            remaining = max(0.0, deadline - monotonic())
            end = view.wait(beyond, min(remaining, _CLOSING_LOOK_S))
            if end > beyond or not remaining or self._closing.is_set():
                return end

    def _seek(self, request: Request) -> Iterator[bytes]:
        with self._view(request) as view:
            batch = view.seek(request.cursor())
            yield orjson.dumps({"history": view.history(), "batch": batch})

    def _entries(self, request: Request) -> Iterator[bytes]:
        start, end = request.integer("start"), request.integer("end")
        with self._view(request) as view:
            for at in range(start, end, _ENTRIES_AT_ONCE):
                found = view.entries(at, min(end, at + _ENTRIES_AT_ONCE))
                yield np.ascontiguousarray(found).tobytes()

    def _frames(self, request: Request, start: int, end: int) -> Iterator[pa.RecordBatch]:
        with _answering(), self._view(request) as view:
            for at in range(start, end, _BATCHES_AT_ONCE):
                for frame in view.stored(at, min(end, at + _BATCHES_AT_ONCE)):
                    if self._closing.is_set():
                        raise busy("the log server is being stopped")
                    yield _row(frame)

    @contextmanager
    def _view(self, request: Request) -> Iterator[LogView]:
        directory = self._sources.get(request.source)
        if directory is None:
            raise OperatorError(
                f"the log server has no source '{request.source}'",
                fix=f"name one of {', '.join(sorted(self._sources))}",
            )
        try:
            with self._views.lent(directory, request.history) as view:
                yield view
        except CorruptionError:
            # The remote reader cannot tell the writer; its place here can.
            report_damage(directory)
            raise


@contextmanager
def _answering() -> Iterator[None]:
    """Send our errors as they are; of a bug, only its name: the rest is in the server's log."""
    try:
        yield
    except WalbrookError as error:
        raise _sent(error) from None
    except flight.FlightError:
        raise
    except OSError as error:
        raise _sent(
            TransientError(
                f"the log server cannot read the log: {error.strerror or error}",
                fix="look at the disk and the open files of the log server",
            )
        ) from None
    except Exception as error:
        _logger.exception("log_server.failed")
        raise _sent(
            ProtocolError(
                f"the log server failed with {type(error).__name__}",
                fix="report this with the lines of the log server's own log",
            )
        ) from None


def _sent(error: WalbrookError) -> flight.FlightServerError:
    return flight.FlightServerError(shortened(error.what), pack_error(error))


def _row(frame: pa.Buffer) -> pa.RecordBatch:
    """One row over the frame's own bytes."""
    offsets = pa.py_buffer(np.array([0, frame.size], dtype=np.int64))
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, frame])
    return pa.RecordBatch.from_arrays([column], schema=FRAME_SCHEMA)

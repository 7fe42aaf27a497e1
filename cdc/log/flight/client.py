"""Reading the log from another machine, through its server.

``FlightLog`` answers as ``LogView`` does. Frames are checked here, against the checksum they were
stored with, whatever lay between. Every call has a deadline; what the network does to a call is a
TransientError, what the server says is raised as the server's own error. It holds a connection and
the token, so it is opened in the process that uses it, never handed to another.
"""

from __future__ import annotations

import os
import random
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.flight as flight

from cdc.cursor import Cursor
from cdc.errors import OperatorError, ProtocolError, TransientError
from cdc.log.flight.wire import (
    BUSY,
    CA_VARIABLE,
    TOKEN_VARIABLE,
    WAIT_S_MAX,
    Arguments,
    Request,
    pack_request,
    read_error,
)
from cdc.log.frame import Frame, open_frame, read_marker
from cdc.log.segment import INDEX_DTYPE, Index

_SCHEMES = ("grpc", "grpc+tls")
_BUSY_PAUSE_S = 0.05
T = TypeVar("T")


class FlightLog:
    """The log of one source behind ``grpc://host:port/source`` or ``grpc+tls://…``."""

    def __init__(
        self,
        where: str,
        *,
        history: int | None = None,
        token: str | None = None,
        call_timeout_s: float = 30.0,
    ) -> None:
        self._place, self._source = _parse(where)
        self._history = history or 0
        self._timeout_s = call_timeout_s
        self._header = (b"authorization", f"Bearer {_token(token)}".encode())
        with self._speaking():
            self._client = flight.FlightClient(
                self._place, tls_root_certs=_certificates() if "+tls" in self._place else None
            )

    def next_batch(self) -> int:
        """The number that the next batch will have: the end of what is readable."""
        return int(self._look()["next_batch"])

    def first_batch(self) -> int:
        """The first batch that is still readable (or will be the first)."""
        return int(self._look()["first_batch"])

    def history(self) -> int:
        """The history that batch numbers belong to."""
        return int(self._look()["history"])

    def floors(self) -> tuple[Cursor, Cursor]:
        """The first readable cursor, and the first that was not lost on purpose."""
        look = self._look()
        return Cursor(*look["earliest"]), Cursor(*look["evicted"])

    def wait(self, beyond: int, timeout_s: float) -> int:
        """``next_batch`` as soon as it exceeds ``beyond``, or after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = deadline - time.monotonic()
            arguments: Arguments = {
                "beyond": beyond,
                "timeout_s": max(0.0, min(remaining, WAIT_S_MAX)),
            }
            answer = self._ask("wait", arguments)
            end = int(answer["next_batch"])
            remaining = deadline - time.monotonic()
            if end > beyond or remaining <= 0:
                return end
            if not answer["waited"]:
                time.sleep(min(remaining, _BUSY_PAUSE_S))

    def seek(self, cursor: Cursor) -> int:
        """The first batch that may hold a change at or above ``cursor``."""
        return int(self._ask("seek", {"lsn": cursor.lsn, "idx": cursor.idx})["batch"])

    def entries(self, start: int, end: int) -> Index:
        """The index entries of the batches ``[start, end)``; all of them must be readable."""
        self._settle_history()
        packed = b"".join(self._act("entries", {"start": start, "end": end}))
        found = np.frombuffer(packed, dtype=INDEX_DTYPE, count=len(packed) // INDEX_DTYPE.itemsize)
        if len(found) != max(0, end - start):
            raise TransientError(
                f"the log server at {self._place} sent {len(found)} index entries of {end - start}",
                fix="it is asked again by itself",
            )
        return found

    def frames(self, start: int, end: int) -> Iterator[Frame]:
        """The batches ``[start, end)`` in order, each checked against its checksum.

        A caller may take longer over a frame than a call may last: then the next call goes on
        behind the last frame received.
        """
        self._settle_history()
        while start < end:
            received = 0
            for frame in self._stream(start, end):
                if frame.marker.batch_idx != start:
                    raise ProtocolError(
                        f"the log server at {self._place} sent batch {frame.marker.batch_idx} "
                        f"where batch {start} belongs",
                        fix="report this with the versions on both sides",
                    )
                start += 1
                received += 1
                yield frame
            if not received:
                raise TransientError(
                    f"the log server at {self._place} ended a stream before batch {start}",
                    fix="it is asked again by itself",
                )

    def close(self) -> None:
        self._client.close()

    def _stream(self, start: int, end: int) -> Iterator[Frame]:
        """Frames of one call; ends early, and quietly, at the deadline if it brought any."""
        reader = self._patiently(lambda: self._open(start, end))
        received = False
        try:
            while True:
                try:
                    with self._speaking():
                        row = reader.read_chunk().data.column(0)
                except StopIteration:
                    return
                except _DeadlineError:
                    if received:
                        return
                    raise
                received = True
                yield self._checked(row[0].as_buffer())
        finally:
            reader.cancel()

    def _checked(self, buffer: pa.Buffer) -> Frame:
        """The frame in ``buffer``: it was whole when the server sent it."""
        marker = read_marker(buffer, 0)
        if marker is None:
            raise TransientError(
                f"a frame from the log server at {self._place} does not match its checksum: it was "
                "damaged on the way",
                fix="it is asked for again; if this repeats, something between the machines is "
                "broken: use grpc+tls:// to find out what",
                kind="log_damaged_on_the_way",
            )
        return open_frame(buffer, 0, marker)

    def _open(self, start: int, end: int) -> flight.FlightStreamReader:
        body = self._request({"start": start, "end": end})
        with self._speaking():
            return self._client.do_get(flight.Ticket(body), self._options())

    def _settle_history(self) -> None:
        if not self._history:
            self._look()

    def _look(self) -> dict[str, Any]:
        return self._ask("look", {})

    def _ask(self, call: str, arguments: Arguments) -> dict[str, Any]:
        """A call that is answered with numbers; the first settles the history, as for a view."""
        answer: dict[str, Any] = orjson.loads(b"".join(self._act(call, arguments)))
        self._history = self._history or answer["history"]
        return answer

    def _act(self, call: str, arguments: Arguments) -> list[pa.Buffer]:
        return self._patiently(lambda: self._act_once(call, arguments))

    def _act_once(self, call: str, arguments: Arguments) -> list[pa.Buffer]:
        action = flight.Action(call, self._request(arguments))
        with self._speaking():
            return [result.body for result in self._client.do_action(action, self._options())]

    def _patiently(self, call: Callable[[], T]) -> T:
        """Ask again while the server says that it is busy, for as long as a call may last."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return call()
            except TransientError as error:
                if error.kind != BUSY or time.monotonic() >= deadline:
                    raise
            time.sleep(_BUSY_PAUSE_S * (0.5 + random.random()))

    def _request(self, arguments: Arguments) -> bytes:
        return pack_request(Request(self._source, self._history, arguments))

    def _options(self) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=self._timeout_s, headers=[self._header])

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """What Flight raises, as errors of ours."""
        try:
            yield
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        ours = read_error(getattr(error, "extra_info", None) or b"")
        if ours is not None:
            raise ours from None
        if isinstance(error, flight.FlightUnauthenticatedError):
            raise OperatorError(
                f"the log server at {self._place} does not accept the token",
                fix=f"give this process the {TOKEN_VARIABLE} of the run that serves the log",
                kind="log_token",
            ) from None
        if isinstance(error, flight.FlightTimedOutError):
            raise _DeadlineError(
                f"the log server at {self._place} did not answer within {self._timeout_s:g} s",
                fix="see that it runs and that the network lets it be reached",
            ) from None
        lines = str(error).splitlines() or [type(error).__name__]
        raise TransientError(
            f"the log server at {self._place} cannot be reached: {lines[0][:300]}",
            fix="see that it runs and that the network lets it be reached",
        ) from None


class _DeadlineError(TransientError):
    """A call took longer than it may."""


def _parse(where: str) -> tuple[str, str]:
    """Flight's location, and the source."""
    parts = urlsplit(where)
    source = unquote(parts.path.strip("/"))
    try:
        usable = parts.scheme in _SCHEMES and parts.hostname and parts.port and source
    except ValueError:
        usable = False
    if not usable or "@" in parts.netloc or "/" in source or parts.query or parts.fragment:
        raise OperatorError(
            "the address of a log server is not understood",
            fix="write it as grpc://host:port/source or grpc+tls://host:port/source",
        )
    return f"{parts.scheme}://{parts.netloc}", source


def _token(given: str | None) -> str:
    token = given if given is not None else os.environ.get(TOKEN_VARIABLE, "")
    if not token or not token.isascii() or not token.isprintable():
        raise OperatorError(
            "a log server is read with its run's token, and there is none",
            fix=f"set {TOKEN_VARIABLE}",
            kind="log_token",
        )
    return token


def _certificates() -> bytes | None:
    """What a server's certificate is checked against; None leaves it to gRPC's own list."""
    path = os.environ.get(CA_VARIABLE) or ssl.get_default_verify_paths().cafile
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OperatorError(
            f"the certificates in {path} cannot be read: {error.strerror}",
            fix=f"set {CA_VARIABLE} to a file of PEM certificates",
        ) from None

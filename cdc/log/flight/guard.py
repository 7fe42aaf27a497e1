"""Who may call the log's server, and how many at once.

A call without the token of the run is refused before anything else is looked at, in a time that
says nothing of the token; the token stands in no error and no log line.
"""

from __future__ import annotations

import hmac
import socket
import threading
from contextlib import suppress

import pyarrow.flight as flight

from cdc.errors import OperatorError, ProtocolError, TransientError
from cdc.log.flight.wire import BUSY, TOKEN_VARIABLE, pack_error

_TOKEN_LENGTH_MIN = 16
_METHODS = (flight.FlightMethod.DO_GET, flight.FlightMethod.DO_ACTION)


class Guard(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses calls without the token, then those not of this server, then too many at once."""

    def __init__(self, token: str, calls: int) -> None:
        _check_token(token)
        self._expected = f"Bearer {token}".encode()
        self._calls = threading.BoundedSemaphore(calls)

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> _Call:
        given = headers.get("authorization", [])
        if len(given) != 1 or not hmac.compare_digest(given[0].encode(), self._expected):
            raise flight.FlightUnauthenticatedError("the token is missing or not this run's")
        if info.method not in _METHODS:
            # Before Flight answers them itself, with a traceback.
            error = unknown(info.method.name.lower())
            raise flight.FlightServerError(error.what, pack_error(error))
        if not self._calls.acquire(blocking=False):
            full = busy("too many calls at once")
            raise flight.FlightUnavailableError(full.what, pack_error(full))
        return _Call(self._calls)


class _Call(flight.ServerMiddleware):  # type: ignore[misc]
    """One admitted call; its place is free again when it has ended."""

    def __init__(self, calls: threading.BoundedSemaphore) -> None:
        self._calls = calls

    def call_completed(self, _exception: Exception | None) -> None:
        self._calls.release()


def busy(what: str) -> TransientError:
    return TransientError(what, fix="it is asked again by itself", kind=BUSY)


def unknown(call: str) -> ProtocolError:
    return ProtocolError(
        f"the log server knows no call '{call}'",
        fix="run the same version of Walbrook on both sides",
    )


def require_free(host: str, port: int) -> None:
    """gRPC would silently share a port with another server, and calls would go to either."""
    with suppress(socket.gaierror):
        family, kind, protocol, _name, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise TransientError(
                    f"the log server cannot listen on {host}:{port}: {error.strerror}",
                    fix="stop what listens there, or set log.flight.port to a free port",
                ) from None


def _check_token(token: str) -> None:
    if len(token) < _TOKEN_LENGTH_MIN or not token.isascii() or not token.isprintable():
        raise OperatorError(
            "the log server has no token, or one that anybody could guess",
            fix=f"set {TOKEN_VARIABLE} to a random text of at least {_TOKEN_LENGTH_MIN} printable "
            "ASCII characters",
        )

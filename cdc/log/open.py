"""Opening a log for reading, wherever it is: a directory here, or a log server's address."""

from __future__ import annotations

from pathlib import Path

from cdc.log.view import LogReader, LogView

_REMOTE = ("grpc://", "grpc+tls://")


def open_log(
    where: str | Path, *, history: int | None = None, token: str | None = None
) -> LogReader:
    """A directory, or ``grpc://host:port/<source>`` (with TLS: ``grpc+tls://…``)."""
    if isinstance(where, str) and where.startswith(_REMOTE):
        # Flight is a large import that most processes do without.
        from cdc.log.flight.client import FlightLog

        return FlightLog(where, history=history, token=token)
    return LogView(Path(where), history=history)

"""A log, its server, and readers of both ways to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from cdc.log.flight.client import FlightLog
from cdc.log.flight.server import LogServer
from cdc.log.view import LogReader, LogView
from cdc.log.writer import LogWriter, SegmentLimits

TOKEN = "a-token-that-only-this-run-knows"
SOURCE = "shop"

OpenReader = Callable[..., LogReader]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / SOURCE


@pytest.fixture
def writer(directory: Path) -> Iterator[LogWriter]:
    """A log with small segments."""
    with closing(LogWriter(directory, limits=SegmentLimits(bytes=5_000))) as log:
        yield log


@pytest.fixture
def server(directory: Path) -> Iterator[LogServer]:
    server = LogServer({SOURCE: directory}, token=TOKEN)
    yield server
    assert server.close()


def address(server: LogServer, source: str = SOURCE) -> str:
    return f"grpc://127.0.0.1:{server.port}/{source}"


@pytest.fixture(params=["local", "flight"])
def open_reader(request: pytest.FixtureRequest, directory: Path) -> Iterator[OpenReader]:
    """Opens readers of the log, mapped or remote; ``history`` as for either."""
    with ExitStack() as opened:

        def local(history: int | None = None) -> LogReader:
            return opened.enter_context(closing(LogView(directory, history=history)))

        def remote(history: int | None = None) -> LogReader:
            where = address(request.getfixturevalue("server"))
            return opened.enter_context(closing(FlightLog(where, history=history, token=TOKEN)))

        # The server outlives its readers: it is made before them.
        if request.param == "flight":
            request.getfixturevalue("server")
        yield local if request.param == "local" else remote


@pytest.fixture
def log_reader(open_reader: OpenReader) -> LogReader:
    return open_reader()

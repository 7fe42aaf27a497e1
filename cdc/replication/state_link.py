"""The reader's side of the state database, in a thread, so that reading never waits for it.

Invariant: ``restart`` is a cursor that Postgres really held, and it never goes back.
While the database does not answer, it just stays where it was, and nothing more is confirmed. A
reader whose service was replaced learns it here, and writes nothing.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

import psycopg
import structlog

from cdc.connection import Connection, connect
from cdc.cursor import ORIGIN, Cursor
from cdc.error_text import public_text
from cdc.errors import OperatorError, ProtocolError, TransientError, WalbrookError
from cdc.failpoints import reached
from cdc.state.backlog import BacklogBounds, LogExtent
from cdc.state.health import Condition, report_conditions
from cdc.state.horizons import Horizon, note_horizon, remove_horizons_above
from cdc.state.positions import SourcePosition, source_position
from cdc.state.reader_state import (
    ReaderReport,
    SegmentRow,
    SourceObservation,
    report_failed_start,
    report_reader,
    report_segments,
)

_logger = structlog.get_logger("walbrook.reader")

_FIRST_S = 15.0
_CLOSE_S = 6.0


@dataclass(frozen=True)
class News:
    """What the reader says: its row, what is wrong, and the segments of its log."""

    report: ReaderReport
    conditions: tuple[Condition, ...] = ()
    segments: tuple[SegmentRow, ...] = ()


class StateLink:
    """Polls the source's position and writes the reader's rows, at a pace."""

    def __init__(self, dsn: str, source: str, term: int, *, idle_s: float, pace_s: float) -> None:
        self._dsn = dsn
        self._source = source
        self._term = term
        self._idle_s = idle_s
        self._pace_s = pace_s
        self.restart = ORIGIN
        self.lowest = ORIGIN
        self.held_by: str | None = None
        self.hurries = False
        """Whether rows of a backfill may wait for the position of an idle source."""
        self._bounds = BacklogBounds(source, term)
        self.problem: str | None = None
        self._position: SourcePosition | None = None
        self._fenced: WalbrookError | None = None
        self._news: News | None = None
        self._written: News | None = None
        self._written_at = 0.0
        self._segments: tuple[SegmentRow, ...] | None = None
        self._horizon: Horizon | None = None  # as was noted last
        self._attached: Cursor | None = None  # until horizons above are removed
        self._known = threading.Event()
        self._wake = threading.Event()
        self._closing = False
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="state-link", daemon=True)
        self._thread.start()

    def position(self) -> SourcePosition:
        """Where the source stands in Postgres, waiting for the first answer of the database."""
        answered = self._known.wait(_FIRST_S)
        self.require_ours()
        if not answered or self._position is None:
            raise TransientError(self.problem or "the state database does not answer")
        return self._position

    def require_ours(self) -> None:
        """Raise once another start of the service has taken over."""
        if self._fenced is not None:
            raise self._fenced

    def attached(self, resume: Cursor) -> None:
        """A stream begins: horizons above what was read are removed before more is noted."""
        self._attached = resume

    def tell(self, news: News) -> None:
        """Remember what to write; a change of state is written at once."""
        before, self._news = self._news, news
        if before is None or _urgent(before) != _urgent(news):
            self._wake.set()

    def close(self) -> None:
        """Write what is left to say, within a bound."""
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            self._wake.wait(self._pace_s)
            self._wake.clear()
            closing = self._closing
            try:
                self._exchange()
                self.problem = None
            except OperatorError as error:
                self._fenced = error
                self._known.set()
            except (psycopg.Error, WalbrookError) as error:
                if self.problem is None:
                    _logger.warning("reader.state_unreachable", error=str(error).strip())
                self.problem = f"the state database does not answer: {error}".strip()
                self._disconnect()
            except Exception as error:
                # Without this thread nothing is confirmed and no process is fenced: end the reader.
                _logger.exception("reader.state_link_failed")
                self._fenced = ProtocolError(f"the link to the state database failed: {error!r}")
                self._known.set()
            if closing or self._fenced is not None:
                self._disconnect()
                return

    def _exchange(self) -> None:
        if self._connection is None:
            self._connection = connect(self._dsn, name=f"{self._source}:state", statement_s=5)
        self._position = position = source_position(self._connection, self._source)
        self.restart = max(self.restart, position.restart)
        self.lowest, self.held_by = position.lowest, position.held_by
        self.hurries = position.is_backfilled
        self._known.set()
        news = self._news
        if news is None:
            return
        if self._due(news):
            self._write(self._connection, news)
        report = news.report
        self._bounds.keep(
            self._connection, LogExtent(report.earliest, report.evicted, report.log_end)
        )

    def _write(self, connection: Connection, news: News) -> None:
        attached = self._attached
        if attached is not None:
            remove_horizons_above(connection, self._source, self._term, attached.lsn)
            if self._attached is attached:
                self._attached = None
        report_reader(connection, self._source, self._term, news.report)
        horizon = news.report.sight.horizon
        # A reader that streams has made sure which server it reads.
        if news.report.state == "streaming" and horizon and horizon != self._horizon:
            note_horizon(connection, self._source, self._term, horizon)
            self._horizon = horizon
        report_conditions(connection, self._source, self._term, news.conditions)
        report_segments(connection, self._source, self._term, news.segments, self._segments)
        self._segments = news.segments
        self._written, self._written_at = news, time.monotonic()
        reached("stored")

    def _due(self, news: News) -> bool:
        """Our own writes move the head of an idle source: only what else moves is news."""
        written = self._written
        if written is None or self._closing or _settled(written) != _settled(news):
            return True
        # A reader that hangs says nothing new: its last words are not written again.
        return written is not news and time.monotonic() - self._written_at >= self._idle_s

    def _disconnect(self) -> None:
        self._segments = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _urgent(news: News) -> object:
    return news.report.state, news.report.error, [c.kind for c in news.conditions]


def _settled(news: News) -> News:
    """What was said, without what moves by itself on an idle source."""
    report = replace(news.report, head_lsn=0, sight=SourceObservation(), current_at=None)
    return replace(news, report=report)


def condition_of(error: Exception) -> Condition:
    """What an error is as a health event: of its own kind, or of the kind of its class."""
    if not isinstance(error, WalbrookError):
        return Condition("disconnected", "error", public_text(error))
    passing = isinstance(error, TransientError)
    kind = error.kind or ("disconnected" if passing else "reader_stopped")
    return Condition(kind, "error", error.what, error.fix)


def tell_failed_start(dsn: str, source: str, term: int, error: WalbrookError) -> None:
    """Say in SQL why a reader did not come up; it has no link that could."""
    try:
        with connect(dsn, name=f"{source}:state", statement_s=5) as connection:
            report_failed_start(connection, source, term, str(error))
            report_conditions(connection, source, term, [condition_of(error)])
    except (psycopg.Error, WalbrookError) as problem:
        _logger.warning("reader.state_unreachable", error=str(problem).strip())

"""The reader's side of the state database, in a thread, so that reading never waits for it.

What must always hold: ``restart`` is a cursor that Postgres really held, and it never goes back.
While the database does not answer, it just stays where it was, and nothing more is confirmed.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import psycopg
import structlog

from cdc.connection import Connection, connect
from cdc.cursor import ORIGIN, Cursor
from cdc.errors import TransientError, WalbrookError
from cdc.state.positions import restart_cursor
from cdc.state.reader_state import ReaderState, report_reader

_logger = structlog.get_logger("walbrook.reader")

_PACE_S = 1.0
_FIRST_S = 15.0
_CLOSE_S = 6.0


@dataclass(frozen=True)
class News:
    """What the reader says of itself."""

    state: ReaderState
    error: str | None
    head_lsn: int
    log_end: Cursor


class StateLink:
    """Polls the restart cursor and writes the reader's row, about once a second."""

    def __init__(self, dsn: str, source: str, *, idle_s: float) -> None:
        self._dsn = dsn
        self._source = source
        self._idle_s = idle_s
        self.restart = ORIGIN
        self.problem: str | None = None
        self._news: News | None = None
        self._written: News | None = None
        self._written_at = 0.0
        self._known = threading.Event()
        self._wake = threading.Event()
        self._closing = False
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="state-link", daemon=True)
        self._thread.start()

    def first_restart(self) -> Cursor:
        """The restart cursor, waiting for the first answer of the database."""
        if not self._known.wait(_FIRST_S):
            raise TransientError(self.problem or "the state database does not answer")
        return self.restart

    def tell(self, news: News) -> None:
        """Remember what to write; a change of state is written at once."""
        before, self._news = self._news, news
        if before is None or (before.state, before.error) != (news.state, news.error):
            self._wake.set()

    def close(self) -> None:
        """Write what is left to say, within a bound."""
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            self._wake.wait(_PACE_S)
            self._wake.clear()
            closing = self._closing
            try:
                self._exchange()
                self.problem = None
            except (psycopg.Error, WalbrookError) as error:
                if self.problem is None:
                    _logger.warning("reader.state_unreachable", error=str(error).strip())
                self.problem = f"the state database does not answer: {error}".strip()
                self._disconnect()
            if closing:
                self._disconnect()
                return

    def _exchange(self) -> None:
        if self._connection is None:
            self._connection = connect(self._dsn, name=f"{self._source}:state", statement_s=5)
        self.restart = max(self.restart, restart_cursor(self._connection, self._source))
        self._known.set()
        news = self._news
        if news is None or not self._due(news):
            return
        report_reader(
            self._connection,
            self._source,
            state=news.state,
            error=news.error,
            head_lsn=news.head_lsn,
            log_end=news.log_end,
        )
        self._written, self._written_at = news, time.monotonic()

    def _due(self, news: News) -> bool:
        """Our own writes move the head of an idle source: only what else moves is news."""
        written = self._written
        if written is None or self._closing:
            return True
        same = (written.state, written.error, written.log_end) == (
            news.state,
            news.error,
            news.log_end,
        )
        return not same or (
            written.head_lsn != news.head_lsn
            and time.monotonic() - self._written_at >= self._idle_s
        )

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

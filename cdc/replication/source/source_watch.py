"""The watch over a source, in a thread: heartbeats on a timer, and the state of the slot.

It has connections of its own, so a stream that looks alive but is stale cannot fool it. Invariant:
the reader never waits for it; it outlives the source's restarts; nothing it keeps grows; it is
closed within two seconds.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime

import psycopg
import structlog

from cdc.connection import Connection, connect
from cdc.cursor import parse_lsn
from cdc.errors import TransientError
from cdc.replication.deadline import ConnectionCutter, deadline
from cdc.replication.source.heartbeat import Heartbeat, HeartbeatLedger
from cdc.replication.source.slot_figures import (
    READ_FIGURES,
    READ_OLDEST,
    PinWatch,
    SlotFigures,
    figures_of,
    oldest_of,
    show_figures,
)
from cdc.replication.source.slot_row import READ_SLOT, SlotRow, recreate, repair, slot_row
from cdc.replication.wire.wire import HEARTBEAT_PREFIX
from cdc.state.health import Condition
from cdc.state.horizons import Horizon
from cdc.state.reader_state import SourceObservation

_logger = structlog.get_logger("walbrook.watch")

_SLOT_PACE_S = 10.0
_STATEMENT_S = 5
_ANSWER_S = 8.0
_CLOSE_S = 2.0

_EMIT = "SELECT pg_logical_emit_message(false, %s, %s)::text"
# From 17 on it can ask for a flush; before, an idle server may keep it back for some seconds.
_EMIT_FLUSHED = "SELECT pg_logical_emit_message(false, %s, %s, true)::text"
_FLUSH_FROM = 170_000
_PUBLICATION = "SELECT oid FROM pg_publication WHERE pubname = %s"
# The statement's snapshot is taken before it begins: what the snapshot sees stands below the last.
_END = """
SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
            ELSE pg_current_wal_lsn() END::text,
       pg_snapshot_xmin(pg_current_snapshot())::text,
       CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
            ELSE pg_current_wal_insert_lsn() END::text
"""
_WHERE = """
SELECT system_identifier::text, current_database()::text, pg_is_in_recovery()
  FROM pg_control_system()
"""


@dataclass(frozen=True)
class _Seen:
    """What the watch last found out; replaced as a whole, so any thread may read it."""

    slot: SlotRow | None = None
    refusal: Condition | None = None
    publication: Condition | None = None
    server_lsn: int = 0
    horizon: Horizon | None = None
    figures: SlotFigures | None = None
    attachments: int = 0  # how many streams the reader had begun before


class SourceWatch:
    """Sends heartbeats and looks at the slot until closed; everything else is asked of it."""

    def __init__(
        self,
        dsn: str,
        slot: str,
        publication: str,
        *,
        heartbeat_s: float,
        primary_dsn: str | None = None,
        source: str = "",
        long_transaction_s: float = 0.0,
    ) -> None:
        """``heartbeat_s`` 0 sends none; ``primary_dsn`` is where they go if not to the source.

        ``source`` is the name of the source in advice. A transaction that pins the slot for
        ``long_transaction_s`` is reported; with 0 none is.
        """
        self._name = source
        self._slot = slot
        self._publication = publication
        self._published: object = None  # the publication's oid when it was first seen
        self._heartbeat_s = heartbeat_s
        self._source = _Link(dsn, f"{slot}:watch")
        self._primary = _Link(primary_dsn, f"{slot}:heartbeat") if primary_dsn else None
        self._ledger = HeartbeatLedger(slot, interval_s=heartbeat_s)
        self._pin = PinWatch(long_transaction_s)
        self._seen = _Seen()
        self._attachments = 0
        self._closing, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="source-watch", daemon=True)
        self._thread.start()

    def attached(self, start_lsn: int) -> None:
        """The reader starts a stream there: what horizon was seen before counts no more."""
        self._attachments += 1
        self._ledger.attached(start_lsn)
        self._wake.set()

    def returned(self, content: bytes) -> None:
        """A heartbeat, ours or another reader's, came out of the slot."""
        self._ledger.returned(content, time.monotonic())

    def check(self, server_lsn: int) -> None:
        """Raises TransientError if the server has sent past a heartbeat that never came."""
        self._ledger.check(server_lsn, time.monotonic())

    def require_publication(self) -> None:
        """Raises TransientError if it is gone or another one: the next connection decides what
        then."""
        if (condition := self._seen.publication) is not None:
            raise TransientError(condition.what, fix=condition.fix, kind=condition.kind)

    def conditions(self, *, reading: bool = True) -> list[Condition]:
        """What is wrong; while the reader is not reading, it says itself why heartbeats fail."""
        seen = self._seen
        found = [seen.publication, _slot_condition(seen.slot, self._name), self._pin.condition]
        if reading:
            found += [seen.refusal, self._ledger.late(time.monotonic())]
        return [condition for condition in found if condition is not None]

    def sight(self) -> SourceObservation:
        """What goes into the source's row."""
        seen = self._seen
        slot = seen.slot
        return SourceObservation(
            heartbeat_at=self._ledger.returned_at,
            heartbeat_lag_s=self._ledger.lag_s,
            heartbeat_state=self._ledger.state(time.monotonic()),
            slot_wal_status=None if slot is None else slot.wal_status,
            slot_safe_bytes=None if slot is None else slot.safe_bytes,
            server_lsn=seen.server_lsn,
            behind_since=self._ledger.behind_since(time.monotonic()),
            # One of an earlier stream may be that of another server.
            horizon=seen.horizon if seen.attachments == self._attachments else None,
        )

    @property
    def figures(self) -> SlotFigures | None:
        """What the slot costs its server."""
        return self._seen.figures

    @property
    def oldest_transaction_s(self) -> float | None:
        """How old the oldest transaction is that has written; None: there is none."""
        return self._pin.age_s

    def close(self) -> None:
        """Stop, without waiting for a server that does not answer."""
        self._closing.set()
        self._wake.set()
        for link in self._links():
            link.interrupt()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        pace_s = min(self._heartbeat_s or _SLOT_PACE_S, _SLOT_PACE_S)
        next_heartbeat = time.monotonic()
        while not self._closing.is_set():
            beat = bool(self._heartbeat_s) and time.monotonic() >= next_heartbeat
            if beat:
                next_heartbeat = time.monotonic() + self._heartbeat_s
            try:
                self._look(beat)
            except Exception:
                # Whatever it was, a watch that has ended without a word would be worse.
                _logger.exception("watch.failed")
            self._wake.wait(pace_s)
            self._wake.clear()
        for link in self._links():
            link.drop()

    def _look(self, beat: bool) -> None:
        attachments = self._attachments
        slot, refusal = self._look_at_slot(), self._seen.refusal
        publication = self._look_at_publication()
        if beat:
            refusal = self._beat()
            if refusal is not None and self._seen.refusal is None:
                _logger.warning(f"watch.{refusal.kind}", error=refusal.what)
        end, horizon = self._look_at_end()
        if publication is not None:
            horizon = None  # a commit below it may never come
        figures = self._look_at_figures()
        self._seen = _Seen(slot, refusal, publication, end, horizon, figures, attachments)

    def _look_at_slot(self) -> SlotRow | None:
        """The slot's row; while the source does not answer, the last one stays."""
        try:
            row = self._source.ask(READ_SLOT, (self._slot,))
        except psycopg.Error:
            self._source.drop()
            return self._seen.slot
        return None if row is None else slot_row(self._slot, row[0], row[2])  # type: ignore[arg-type]

    def _look_at_figures(self) -> SlotFigures | None:
        """What the slot costs, and the oldest transaction; None if the source is silent."""
        try:
            figures = self._source.ask(READ_FIGURES, (self._slot,))
            self._pin.note(oldest_of(self._source.ask(READ_OLDEST)), time.monotonic())
        except psycopg.Error:
            self._source.drop()
            return None
        found = figures_of(figures)
        show_figures(self._name, found, self._pin.age_s)
        return found

    def _look_at_end(self) -> tuple[int, Horizon | None]:
        """The end of the server's WAL, and which transactions have ended there."""
        try:
            row = self._source.ask(_END)
        except psycopg.Error:
            self._source.drop()
            return self._seen.server_lsn, None
        if not row or not row[0]:
            return 0, None
        return parse_lsn(str(row[0])), Horizon(parse_lsn(str(row[2])), int(str(row[1])))

    def _look_at_publication(self) -> Condition | None:
        """From Postgres 18 on a stream goes on without its publication, and without its changes."""
        try:
            row = self._source.ask(_PUBLICATION, (self._publication,))
        except psycopg.Error:
            self._source.drop()
            return self._seen.publication
        if row is None:
            return Condition(
                "publication_missing",
                "error",
                f"the publication {self._publication} does not exist: what is committed now never "
                "comes through the slot",
                "create it again as it was; changes committed meanwhile are lost to all sinks",
            )
        if self._published is None:
            self._published = row[0]
        if row[0] == self._published:
            return None
        return Condition(
            "publication_replaced",
            "error",
            f"the publication {self._publication} was dropped and created again while it was read: "
            "what was committed between is lost to all sinks",
            f"{repair(self._name)}; or, to let these changes go, accept the gap as the source's "
            "last_error says",
        )

    def _beat(self) -> Condition | None:
        """Write one heartbeat; the answer says why that was refused."""
        link = self._primary or self._source
        if not self._ledger.room:
            return None
        try:
            wrong = self._wrong_place(link)
            if wrong is not None:
                link.drop()
                return wrong
            number, content = self._ledger.next_content(datetime.now(UTC))
            emit = _EMIT_FLUSHED if link.version >= _FLUSH_FROM else _EMIT
            sent, sent_at = time.monotonic(), datetime.now(UTC)
            row = link.ask(emit, (HEARTBEAT_PREFIX, content))
            lsn = parse_lsn(str(row[0])) if row else 0
            self._ledger.sent(Heartbeat(number, lsn, sent, sent_at), time.monotonic())
        except psycopg.OperationalError as error:
            link.drop()
            return self._failed(error)
        except psycopg.Error as error:
            link.drop()
            return _refused(
                f"the server refuses heartbeats: {error.diag.message_primary or error}",
                "grant the role EXECUTE ON FUNCTION pg_logical_emit_message, or set heartbeat_s: 0",
            )
        return None

    def _failed(self, error: psycopg.OperationalError) -> Condition:
        if self._primary is not None:
            what, fix = (
                "primary_url cannot be reached",
                "check that the primary runs, and primary_url",
            )
        else:
            what, fix = (
                "a heartbeat could not be written",
                "read the server's log; it is tried again",
            )
        return Condition("heartbeat_failed", "warning", f"{what}: {error}".strip(), fix)

    def _wrong_place(self, link: _Link) -> Condition | None:
        """Why a heartbeat written there could never come back through our slot."""
        if link.checked:
            return None
        there = link.ask(_WHERE)
        if there is not None and there[2]:
            if self._primary is not None:
                return _refused(
                    "primary_url leads to a standby, which takes no heartbeats",
                    "let primary_url lead to the primary",
                )
            return _refused(
                "the source is a standby, which takes no heartbeats, so a stale stream cannot be "
                "told from an idle database",
                "set primary_url to the primary's database, or heartbeat_s: 0 to do without",
            )
        if self._primary is not None:
            here = self._source.ask(_WHERE)
            if here is not None and there is not None and here[:2] != there[:2]:
                return _refused(
                    f"primary_url leads to database {there[1]} of cluster {there[0]}, but the "
                    f"source is database {here[1]} of cluster {here[0]}",
                    "let primary_url lead to the same database on the source's own primary",
                )
        link.checked = True
        return None

    def _links(self) -> list[_Link]:
        return [self._source] if self._primary is None else [self._source, self._primary]


class _Link:
    """A connection that is made when needed and dropped on any error."""

    def __init__(self, dsn: str, name: str) -> None:
        self._dsn = dsn
        self._name = name
        self._connection: Connection | None = None
        self._shutter: ConnectionCutter | None = None
        self.checked = False
        self.version = 0

    def ask(self, query: str, parameters: tuple[object, ...] = ()) -> tuple[object, ...] | None:
        """One row, within a bound."""
        if self._connection is None:
            self._connection = connect(self._dsn, name=self._name, statement_s=_STATEMENT_S)
            self._shutter = ConnectionCutter(self._connection)
            self.version = self._connection.info.server_version
        with deadline(self._connection, _ANSWER_S):
            return self._connection.execute(query.encode(), parameters or None).fetchone()

    def interrupt(self) -> None:
        """From another thread: a wait for an answer ends with an error."""
        if (shutter := self._shutter) is not None:
            shutter.shut()

    def drop(self) -> None:
        if self._shutter is not None:
            self._shutter.release()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self.checked = False


def _slot_condition(slot: SlotRow | None, source: str) -> Condition | None:
    if slot is None:
        return None
    if slot.lost:
        return Condition(
            "slot_lost",
            "error",
            f"the slot {slot.name} is lost ({slot.invalidation or 'its WAL was removed'})",
            recreate(source),
        )
    if slot.at_risk:
        return Condition(
            "slot_at_risk",
            "warning",
            f"the slot {slot.name} is about to lose its WAL: the server keeps no more than "
            "max_slot_wal_keep_size for it, and little of that is left",
            "find what holds the slot back (walbrook status), or give it room: ALTER SYSTEM SET "
            "max_slot_wal_keep_size = -1; SELECT pg_reload_conf();",
        )
    return None


def _refused(what: str, fix: str) -> Condition:
    return Condition("heartbeat_refused", "warning", what, fix)

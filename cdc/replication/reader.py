"""The SlotReader: slot in, log out, feedback back. A process of its own.

What must always hold:

- Nothing is confirmed to Postgres that is not safe here (``LogKeeper.safe``).
- A message goes into the log once: what the log already has is skipped by cursor.
- Memory is bounded by one batch and its copies; when the log is full or cannot be written, reading
  stops and the source keeps its WAL.
- On an idle source the position still moves, by a batch without rows, once nothing is in flight.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

import psycopg
import pyarrow as pa
import structlog

from cdc.connection import connect
from cdc.cursor import Cursor
from cdc.decode.raw import RAW_SCHEMA
from cdc.errors import TransientError, WalbrookError
from cdc.failpoints import reached
from cdc.replication.collect import Collector
from cdc.replication.control import SlotControl
from cdc.replication.identity import Identity, Recorded
from cdc.replication.intake import Intake
from cdc.replication.keep import LogKeeper
from cdc.replication.options import StreamOptions
from cdc.replication.protocol import Keepalive
from cdc.replication.seal import Sealed, Sealer
from cdc.replication.settings import ReaderSettings
from cdc.replication.source_watch import SourceWatch
from cdc.replication.spill import NotStreamableError, Spill
from cdc.replication.state_link import News, StateLink
from cdc.replication.stop import StopSignal
from cdc.replication.stream import ReplicationStream
from cdc.state.health import Condition
from cdc.state.reader_state import ReaderReport, ReaderState, record_timeline

_logger = structlog.get_logger("walbrook.reader")

_FEEDBACK_S = 1.0
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.2, 10.0
_NO_ROWS = pa.RecordBatch.from_pylist([], schema=RAW_SCHEMA)
_SPILL = "spill"


class SlotReader:
    """Reads one slot until told to stop, through any number of connections."""

    def __init__(self, settings: ReaderSettings, stop: StopSignal) -> None:
        self._settings = settings
        self._stop = stop
        self._keeper = LogKeeper(
            settings.log_directory,
            term=settings.term,
            durability=settings.durability,
            limits=settings.segments,
            retention=settings.retention,
            tier=settings.tier,
        )
        self._spill = Spill(settings.log_directory / _SPILL, bytes_max=settings.spill_bytes_max)
        self._state = StateLink(
            settings.state_dsn, settings.source, settings.term, idle_s=settings.idle_s
        )
        self._watch = SourceWatch(
            settings.dsn,
            settings.slot,
            heartbeat_s=settings.heartbeat_s,
            primary_dsn=settings.primary_dsn,
        )
        self._head_lsn = 0
        self._timeline: int | None = None
        self._wanted = settings.stream
        self._backoff_s = _BACKOFF_FIRST_S
        self._next_feedback = 0.0

    def run(self) -> None:
        """Read until stopped; transient errors reconnect, the others are for the operator."""
        try:
            while not self._stop.requested:
                try:
                    self._connect_and_read()
                except NotStreamableError as error:
                    # The server sends it again, whole, once it is committed.
                    _logger.warning("reader.not_streamed", error=str(error))
                    self._wanted = StreamOptions(False, self._wanted.two_phase, self._wanted.origin)
                except (TransientError, psycopg.OperationalError) as error:
                    self._disconnected(error)
            self._report("stopped", None)
        except WalbrookError as error:
            self._report("stopped", str(error), [_condition(error)])
            raise
        finally:
            self._watch.close()
            self._state.close()
            self._keeper.close()

    def _disconnected(self, error: Exception) -> None:
        what = str(error).strip()
        _logger.warning("reader.disconnected", error=what)
        self._report("disconnected", what, [_condition(error)])
        # Many readers of one server must not come back at the same moment.
        self._stop.wait(self._backoff_s * random.uniform(0.5, 1.0))
        self._backoff_s = min(self._backoff_s * 2, _BACKOFF_MAX_S)

    def _connect_and_read(self) -> None:
        self._report("connecting", None)
        settings = self._settings
        position = self._state.position()
        control = SlotControl(settings.dsn, settings.slot)
        try:
            known = max(position.timeline or 0, self._timeline or 0) or None
            identity = control.look(Recorded(position.system_identifier, known))
            resume = self._keeper.resume(self._state.restart, identity.confirmed)
            control.check(identity, resume)
            if identity.timeline != position.timeline:
                self._record(identity)
            wanted, self._wanted = self._wanted, settings.stream
            stream = ReplicationStream(
                settings.dsn,
                slot=settings.slot,
                publication=settings.publication,
                start_lsn=resume.lsn,
                options=wanted,
                check=lambda connection: control.same_server(connection, identity),
            )
            try:
                self._begun(resume)
                intake = Intake(
                    Sealer(resume, control.key_of),
                    self._spill,
                    settings.batch,
                    settled=self._state.restart,
                )
                self._read(stream, intake)
            finally:
                stream.close()
        finally:
            control.close()

    def _record(self, identity: Identity) -> None:
        """Note the timeline before anything of it is read.

        What was read of a new timeline would lie beyond the fork, as seen from the old one.
        """
        settings = self._settings
        if identity.failed_over_from is not None:
            _logger.warning(
                "reader.failed_over",
                source=settings.source,
                timeline=identity.timeline,
                before=identity.failed_over_from,
            )
        with connect(settings.state_dsn, name=f"{settings.source}:state", statement_s=5) as state:
            record_timeline(state, settings.source, settings.term, identity.timeline)
        self._timeline = identity.timeline

    def _begun(self, resume: Cursor) -> None:
        self._watch.attached(resume.lsn)
        self._next_feedback = 0.0
        _logger.info("reader.streaming", source=self._settings.source, resume=str(resume))

    def _read(self, stream: ReplicationStream, intake: Intake) -> None:
        settings = self._settings
        batch = Collector(settings.batch, settings.linger_ms / 1000)
        idle_since = time.monotonic()
        while not self._stop.requested and not self._keeper.suspect:
            now = time.monotonic()
            if now >= self._next_feedback:
                self._feedback(stream)
                if batch.empty:
                    self._watch.check(stream.server_lsn)
            taken, keepalive = batch.fill(stream, now)
            if batch.due(now):
                reached("received")
                if self._take(stream, intake, batch.hand_over()):
                    idle_since = now
            if keepalive is not None:
                if keepalive.reply_requested:
                    self._next_feedback = 0.0
                idle = batch.empty and not intake.in_transaction
                if idle and now - idle_since >= settings.idle_s:
                    self._advance_idle(keepalive)
                    idle_since = now
            elif not taken:
                stream.wait(batch.patience_s(now, self._next_feedback), self._stop.descriptor)
        if not batch.empty:
            self._take(stream, intake, batch.hand_over())

    def _take(self, stream: ReplicationStream, intake: Intake, messages: list[bytes]) -> bool:
        """Put what the messages complete into the log; says whether there was anything.

        The transaction that a streamed one's commit completes may be millions of rows: feedback
        goes out in between.
        """
        anything = False
        for sealed in intake.take(messages):
            if time.monotonic() >= self._next_feedback:
                self._feedback(stream)
            if not self._append(stream, sealed):
                break
            anything = True
        for heartbeat in intake.heartbeats:
            self._watch.returned(heartbeat)
        return anything

    def _append(self, stream: ReplicationStream, sealed: Sealed) -> bool:
        """Put a batch into the log; while there is no room, hold it and read nothing more.

        Says whether it went in: a stop may come first. Nothing is lost then: it was not confirmed,
        so the source sends it again.
        """
        while self._keeper.at_limit():
            self._tend()
            if not self._keeper.full:
                break
            self._feedback(stream, "paused", "the log has reached log.max_bytes")
            if self._stop.wait(_FEEDBACK_S / 4):
                return False
        while True:
            try:
                self._keeper.append(sealed)
                self._backoff_s = _BACKOFF_FIRST_S
                reached("appended")
                return True
            except TransientError as error:
                if self._keeper.log.needs_reopen:
                    raise
                _logger.warning("reader.paused", error=str(error))
                self._feedback(stream, "paused", str(error), [_condition(error)])
                if self._stop.wait(_FEEDBACK_S):
                    return False

    def _advance_idle(self, keepalive: Keepalive) -> None:
        """Nothing for us below the server's position: let the cursors say so."""
        position = Cursor(keepalive.end_lsn, 0)
        if position > max(self._keeper.end, self._state.restart):
            self._keeper.append(Sealed(_NO_ROWS, {}, position, position))
            self._backoff_s = _BACKOFF_FIRST_S

    def _feedback(
        self,
        stream: ReplicationStream,
        state: ReaderState = "streaming",
        error: str | None = None,
        conditions: Iterable[Condition] = (),
    ) -> None:
        """Tell the server and the state database where we are; keep the log within its bounds."""
        self._state.require_ours()
        self._head_lsn = max(self._head_lsn, stream.server_lsn)
        silent_s = time.monotonic() - stream.received_at
        if silent_s > self._settings.silence_s and state == "streaming":
            raise TransientError(f"the server has been silent for {silent_s:.0f} s", kind="silent")
        safe = self._keeper.safe(self._state.restart)
        stream.confirm(
            received_lsn=self._keeper.end.lsn,
            confirmed_lsn=safe.lsn,
            reply_requested=silent_s > self._settings.silence_s / 3,
        )
        reached("confirmed")
        self._spill.settled(safe.lsn)
        self._tend()
        self._next_feedback = time.monotonic() + _FEEDBACK_S
        self._report(state, error or self._state.problem, conditions)

    def _tend(self) -> None:
        try:
            self._keeper.tend(self._state.lowest)
        except TransientError as error:
            if self._keeper.log.needs_reopen:
                raise
            _logger.warning("reader.log_not_tended", error=str(error))

    def _report(
        self, state: ReaderState, error: str | None, conditions: Iterable[Condition] = ()
    ) -> None:
        keeper = self._keeper
        manifest = keeper.log.manifest
        self._state.tell(
            News(
                ReaderReport(
                    state=state,
                    error=error,
                    head_lsn=self._head_lsn,
                    log_end=keeper.end,
                    durable_end=keeper.log.durable_end,
                    earliest=manifest.earliest,
                    evicted=manifest.evicted,
                    log_bytes=keeper.log.size_bytes,
                    timeline=self._timeline,
                    sight=self._watch.sight(),
                ),
                (
                    *conditions,
                    *keeper.conditions(),
                    *self._watch.conditions(reading=state == "streaming"),
                ),
                keeper.segments(),
            )
        )


def _condition(error: Exception) -> Condition:
    """What an error is as a health event: of its own kind, or of the kind of its class."""
    if not isinstance(error, WalbrookError):
        return Condition("disconnected", "error", str(error).strip())
    passing = isinstance(error, TransientError)
    kind = error.kind or ("disconnected" if passing else "reader_stopped")
    return Condition(kind, "error", error.what, error.fix)

"""The SlotReader: slot in, log out, feedback back. A process of its own.

Invariant:

- Nothing is confirmed to Postgres that is not safe here (``LogKeeper.safe``).
- A message goes into the log once: what the log already has is skipped by cursor.
- A table version is recorded before the batch with its first row is in the log.
- Memory is bounded by one batch and its copies; when the log is full or cannot be written, reading
  stops and the source keeps its WAL.
- On an idle source the position still moves, by a batch without rows, once nothing is in flight.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

import psycopg
import structlog

from cdc.backoff import Backoff
from cdc.connection import connect
from cdc.cursor import Cursor, idle_place
from cdc.errors import TransientError, WalbrookError
from cdc.failpoints import reached
from cdc.pulse import Pulse
from cdc.replication.batch_collector import BatchCollector
from cdc.replication.log_keeper import LogKeeper
from cdc.replication.options import StreamOptions
from cdc.replication.protocol import Keepalive
from cdc.replication.settings import ReaderSettings
from cdc.replication.source.identity import Identity, Recorded
from cdc.replication.source.slot_control import SlotControl
from cdc.replication.source.source_watch import SourceWatch
from cdc.replication.spill.spill import NotStreamableError, Spill
from cdc.replication.state_link import News, StateLink, condition_of
from cdc.replication.stream import ReplicationStream, UntranslatableError
from cdc.replication.transaction_assembler import TransactionAssembler
from cdc.replication.version_store import VersionStore
from cdc.replication.wire.seal import Sealer
from cdc.replication.wire.sealed import Sealed
from cdc.state.health import Condition
from cdc.state.reader_state import ReaderReport, ReaderState, record_identity
from cdc.stop import StopSignal

_logger = structlog.get_logger("walbrook.reader")

_HURRIED_IDLE_S = 0.1  # while a caller waits for the log to pass a position of the source
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.2, 10.0
_PINGS, _PINGS_S = 10, 1.0
_SILENT_S = 60.0  # a reader that works reports at least this often
_CONNECTING_S = 600.0  # opening a large log, or a busy server, may take long
_SPILL = "spill"


class _GivenUpError(Exception):
    """Reading ends here, in the middle of something: what is not in the log is sent again."""


class SlotReader:
    """Reads one slot until it is stopped, through any number of connections."""

    def __init__(
        self, settings: ReaderSettings, stop: StopSignal, pulse: Pulse | None = None
    ) -> None:
        self._settings = settings
        self._stop = stop
        self._pulse = pulse or Pulse()
        self._keeper = LogKeeper(
            settings.log_directory,
            term=settings.term,
            durability=settings.durability,
            limits=settings.segments,
            retention=settings.retention,
            tier=settings.tier,
            machine=settings.machine,
            source=settings.source,
        )
        self._spill = Spill(
            settings.log_directory / _SPILL,
            source=settings.source,
            bytes_max=settings.spill_bytes_max,
        )
        self._state = StateLink(
            settings.state_dsn,
            settings.source,
            settings.term,
            idle_s=settings.idle_s,
            pace_s=settings.pace_s,
        )
        self._versions = VersionStore(settings.state_dsn, settings.source, settings.term)
        self._watch = SourceWatch(
            settings.dsn,
            settings.slot,
            settings.publication,
            heartbeat_s=settings.heartbeat_s,
            primary_dsn=settings.primary_dsn,
            source=settings.source,
            long_transaction_s=settings.long_transaction_s,
        )
        self._head_lsn = 0
        self._timeline: int | None = None
        # Refuses what the source sends of a timeline that is not recorded yet.
        self._require_timeline: Callable[[], None] = lambda: None
        # Why there is no stream; reported until there is one again.
        self._trouble: Exception | None = None
        # How the next connection reads: as configured, unless the last one met something that has
        # to come another way, and until something more is in the log.
        self._wanted = settings.stream
        self._as_stored = False
        self._backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        self._next_feedback = 0.0
        self._is_paused = False  # as was logged

    def run(self) -> None:
        """Read until stopped; transient errors reconnect, the others are for the operator."""
        try:
            while not self._stop.requested:
                try:
                    self._connect_and_read()
                except UntranslatableError as error:
                    _logger.warning("reader.untranslatable_text", error=str(error))
                    self._as_stored = True
                except NotStreamableError as error:
                    # The server sends it again, whole, once it is committed.
                    _logger.warning("reader.not_streamed", error=str(error))
                    self._wanted = StreamOptions(False, self._wanted.two_phase, self._wanted.origin)
                except (TransientError, psycopg.OperationalError) as error:
                    self._disconnected(error)
            self._trouble = None
            self._report("stopped")
        except WalbrookError as error:
            self._trouble = error
            self._report("stopped")
            raise
        finally:
            self._watch.close()
            self._state.close()
            self._keeper.close()

    def _disconnected(self, error: Exception) -> None:
        self._trouble = error
        _logger.warning("reader.disconnected", error=str(error).strip())
        self._report("disconnected")
        # Many readers of one server must not come back at the same moment.
        with self._keeper.clock.during("wait"):
            self._stop.wait(self._backoff.next_s())

    def _connect_and_read(self) -> None:
        self._report("connecting")
        settings = self._settings
        position = self._state.position()
        control = SlotControl(settings.dsn, settings.slot, settings.publication)
        try:
            known = max(position.timeline or 0, self._timeline or 0) or None
            identity = control.look(
                Recorded(
                    position.system_identifier, known, position.publication_oid, settings.source
                )
            )
            control.check_settled(identity, self._state.restart)
            resume = self._keeper.resume(
                self._state.restart,
                min(position.lowest, self._state.lowest),
                identity.confirmed,
                # Accepting a gap forgets the publication; so does nothing else.
                reset=position.publication_oid is None,
            )
            control.check(identity, resume)
            versions = self._versions.versions(resume)
            found = (identity.timeline, identity.publication_oid)
            if found != (position.timeline, position.publication_oid):
                self._record(identity)
            stream = ReplicationStream(
                settings.dsn,
                slot=settings.slot,
                publication=settings.publication,
                start_lsn=self._spill.start(
                    resume.lsn,
                    identity.confirmed,
                    two_phase=self._wanted.two_phase or identity.slot.two_phase,
                ),
                options=self._wanted,
                check=lambda connection: control.check_again(connection, identity, resume),
                as_stored=self._as_stored,
                silence_s=settings.silence_s,
            )
            try:
                self._require_timeline = partial(control.require_timeline, identity)
                self._begun(resume)
                intake = TransactionAssembler(
                    Sealer(resume, control.catalog_of, stream.codec, versions),
                    self._spill,
                    settings.batch,
                    settled=self._state.restart,
                    skipped=lambda: self._feed_back_if_due(stream),
                )
                with suppress(_GivenUpError):
                    self._read(stream, intake)
            finally:
                stream.close()
        finally:
            self._head_lsn = max(self._head_lsn, control.end_lsn)
            control.close()

    def _record(self, identity: Identity) -> None:
        """Note the timeline and the publication before anything of them is read.

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
            record_identity(
                state,
                settings.source,
                settings.term,
                timeline=identity.timeline,
                publication_oid=identity.publication_oid,
            )
        self._timeline = identity.timeline

    def _begun(self, resume: Cursor) -> None:
        self._state.attached(resume)
        self._watch.attached(resume.lsn)
        self._next_feedback = 0.0
        _logger.info("reader.streaming", source=self._settings.source, resume=str(resume))

    def _read(self, stream: ReplicationStream, intake: TransactionAssembler) -> None:
        settings = self._settings
        batch = BatchCollector(settings.batch, settings.linger_ms / 1000)
        idle_since = time.monotonic()
        quiet: Keepalive | None = None  # the last one that moved nothing yet
        pings: deque[float] = deque(maxlen=_PINGS)
        while not self._stop.requested and not self._keeper.suspect:
            now = time.monotonic()
            if now >= self._next_feedback:
                self._feedback(stream)
                self._watch.require_publication()
                if batch.empty:
                    self._watch.check(stream.server_lsn)
            taken, keepalive = batch.fill(stream, now)
            if taken:
                self._keeper.received(taken)
            if batch.due(now):
                reached("received")
                if self._take(stream, intake, batch.hand_over(now)):
                    idle_since = now
            if keepalive is not None:
                if keepalive.reply_requested:
                    self._next_feedback = 0.0
                    pings.append(now)
                    _require_patience(pings)
                if batch.empty and not intake.in_transaction:
                    quiet = keepalive
            idle_due = idle_since + (_HURRIED_IDLE_S if self._state.hurries else settings.idle_s)
            idle = batch.empty and not intake.in_transaction
            if quiet is not None and idle and now >= idle_due:
                self._advance_idle(stream, quiet)
                idle_since, quiet = now, None
            elif keepalive is None and not taken:
                self._require_a_voice(stream)
                wake = min(self._next_feedback, idle_due) if idle and quiet else self._next_feedback
                patience_s = batch.patience_s(now, wake)
                with self._keeper.clock.during("wait"):
                    if batch.gathers:
                        self._stop.wait(patience_s)
                        patience_s = 0.0
                    stream.wait(patience_s, self._stop.descriptor)
        if self._stop.requested and not batch.empty:
            self._take(stream, intake, batch.hand_over(time.monotonic()))

    def _require_a_voice(self, stream: ReplicationStream) -> None:
        """A server that says nothing, though asked for a keepalive, is gone."""
        silent_s = time.monotonic() - stream.received_at
        if silent_s > self._settings.silence_s:
            raise TransientError(f"the server has been silent for {silent_s:.0f} s", kind="silent")

    def _take(
        self, stream: ReplicationStream, intake: TransactionAssembler, messages: list[bytes]
    ) -> bool:
        """Put what the messages complete into the log. Returns True if there was anything.

        The transaction that a streamed one's commit completes may be millions of rows: feedback
        goes out in between.
        """
        anything = False
        for sealed in intake.take(messages):
            self._feed_back_if_due(stream)
            self._append(stream, sealed)
            self._tell_refused(sealed)
            anything = True
        for heartbeat in intake.heartbeats:
            self._watch.returned(heartbeat)
        # The connection was not read meanwhile.
        stream.received_at = time.monotonic()
        return anything

    def _tell_refused(self, sealed: Sealed) -> None:
        """One line per batch, never with the content: that is its writer's business."""
        if sealed.refused:
            first = sealed.refused[0]
            _logger.warning(
                "reader.annotation_refused",
                source=self._settings.source,
                cursor=str(first.cursor),
                why=first.why,
                count=len(sealed.refused),
            )

    def _append(self, stream: ReplicationStream, sealed: Sealed) -> None:
        """Put a batch into the log; while there is no room, hold it and read nothing more."""
        while self._keeper.at_limit():
            self._tend()
            if not self._keeper.full:
                break
            self._hold(stream, "the log has reached log.max_bytes", self._settings.pace_s / 4)
        self._require_timeline()
        self._versions.record(sealed.versions)
        while True:
            try:
                self._keeper.append(sealed)
                self._backoff.reset()
                self._wanted, self._as_stored = self._settings.stream, False
                reached("appended")
                if self._is_paused:
                    self._is_paused = False
                    _logger.info("reader.resumed", source=self._settings.source)
                return
            except TransientError as error:
                if self._keeper.log.needs_reopen:
                    raise
                self._hold(stream, str(error), self._settings.pace_s, [condition_of(error)])

    def _hold(
        self,
        stream: ReplicationStream,
        why: str,
        seconds: float,
        conditions: Iterable[Condition] = (),
    ) -> None:
        """Wait with a batch in hand, and say so; a stop or damage in the log ends the wait."""
        if not self._is_paused:
            self._is_paused = True
            _logger.warning("reader.paused", source=self._settings.source, why=why)
        self._feedback(stream, "paused", why, conditions)
        with self._keeper.clock.during("wait"):
            stopped = self._stop.wait(seconds)
        if stopped or self._keeper.suspect:
            raise _GivenUpError

    def _advance_idle(self, stream: ReplicationStream, keepalive: Keepalive) -> None:
        """Nothing for us below the server's position: let the cursors say so."""
        position = idle_place(keepalive.end_lsn)
        if position > max(self._keeper.end, self._state.restart):
            self._append(stream, Sealed.without_rows(position))

    def _feed_back_if_due(self, stream: ReplicationStream) -> None:
        if time.monotonic() >= self._next_feedback:
            self._feedback(stream)

    def _feedback(
        self,
        stream: ReplicationStream,
        state: ReaderState = "streaming",
        why: str | None = None,
        conditions: Iterable[Condition] = (),
    ) -> None:
        """Tell the server and the state database where we are; keep the log within its bounds."""
        self._state.require_ours()
        self._trouble = None
        self._head_lsn = max(self._head_lsn, stream.server_lsn)
        safe, end = self._keeper.safe(self._state.restart), self._keeper.end
        self._spill.settled(self._keeper.kept(self._state.restart))
        stream.confirm(
            received_lsn=end.lsn,
            confirmed_lsn=self._spill.secure(safe.lsn, end.lsn),
            reply_requested=time.monotonic() - stream.received_at > self._settings.silence_s / 3,
        )
        reached("confirmed")
        self._tend()
        self._next_feedback = time.monotonic() + min(
            self._settings.pace_s, self._settings.silence_s / 10
        )
        self._report(state, why or self._state.problem, conditions)

    def _tend(self) -> None:
        try:
            self._keeper.tend(self._state.lowest)
        except TransientError as error:
            if self._keeper.log.needs_reopen:
                raise
            _logger.warning("reader.log_not_tended", error=str(error))

    def _report(
        self, state: ReaderState, why: str | None = None, conditions: Iterable[Condition] = ()
    ) -> None:
        self._pulse.beat(_CONNECTING_S if state == "connecting" else _SILENT_S)
        if self._trouble is not None:
            why, conditions = str(self._trouble).strip(), [condition_of(self._trouble)]
        keeper = self._keeper
        manifest = keeper.log.manifest
        sight = self._watch.sight()
        self._state.tell(
            News(
                ReaderReport(
                    state=state,
                    error=why,
                    head_lsn=max(self._head_lsn, sight.server_lsn),
                    log_end=keeper.end,
                    durable_end=keeper.log.durable_end,
                    earliest=manifest.earliest,
                    evicted=manifest.evicted,
                    log_bytes=keeper.log.size_bytes,
                    timeline=self._timeline,
                    sight=sight,
                    current_at=(
                        sight.behind_since or datetime.now(UTC) if state == "streaming" else None
                    ),
                ),
                (
                    *conditions,
                    *keeper.conditions(self._state.held_by),
                    *self._watch.conditions(reading=state == "streaming"),
                ),
                keeper.segments(),
            )
        )


def _require_patience(pings: deque[float]) -> None:
    """Let go of a server that wants to shut down.

    It waits until all that it sent is confirmed, which may take until a sink is back, and asks
    again as fast as it is answered. A server that means to stay asks twice a minute.
    """
    if len(pings) == _PINGS and pings[-1] - pings[0] < _PINGS_S:
        raise TransientError(
            "the server is shutting down and waits for us to let go", kind="source_stopping"
        )

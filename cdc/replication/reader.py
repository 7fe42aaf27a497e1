"""The SlotReader: slot in, log out, feedback back. A process of its own.

What must always hold:

- Nothing is confirmed to Postgres that is not safe here: with durability ``disk`` the restart
  cursor, with ``fsync`` the log's end.
- A message goes into the log once: what the log or an earlier run already has is skipped by cursor.
- Memory is bounded by one batch; when the log is full or cannot be written, reading stops and the
  source keeps its WAL.
- On an idle source the position still moves, by a batch without rows, once nothing is in flight.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pyarrow as pa
import structlog

from cdc.cursor import Cursor
from cdc.decode.raw import RAW_SCHEMA
from cdc.errors import TransientError, WalbrookError
from cdc.log.writer import Durability, LogWriter
from cdc.replication.control import SlotControl
from cdc.replication.protocol import Keepalive
from cdc.replication.seal import Sealed, Sealer
from cdc.replication.state_link import News, StateLink
from cdc.replication.stop import StopSignal
from cdc.replication.stream import ReplicationStream
from cdc.state.reader_state import ReaderState

_logger = structlog.get_logger("walbrook.reader")

_FEEDBACK_S = 1.0
_SILENCE_S = 30.0  # a server that answers nothing for this long is gone
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.2, 10.0
_NO_ROWS = pa.RecordBatch.from_pylist([], schema=RAW_SCHEMA)


@dataclass(frozen=True)
class ReaderSettings:
    """What a reader needs to know of its source and its log."""

    source: str
    dsn: str
    slot: str
    publication: str
    state_dsn: str
    log_directory: Path
    durability: Durability = "disk"
    batch_rows: int = 16_384
    batch_bytes: int = 4 << 20
    linger_ms: int = 10
    segment_bytes: int = 64 << 20
    log_bytes_max: int = 16 << 30
    idle_s: float = 10.0


class SlotReader:
    """Reads one slot until told to stop, through any number of connections."""

    def __init__(self, settings: ReaderSettings, stop: StopSignal) -> None:
        self._settings = settings
        self._stop = stop
        self._log = LogWriter(
            settings.log_directory,
            segment_bytes=settings.segment_bytes,
            durability=settings.durability,
        )
        self._state = StateLink(settings.state_dsn, settings.source, idle_s=settings.idle_s)
        self._head_lsn = 0
        self._backoff_s = _BACKOFF_FIRST_S

    def run(self) -> None:
        """Read until stopped; transient errors reconnect, the others are for the operator."""
        try:
            while not self._stop.requested:
                try:
                    self._connect_and_read()
                except (TransientError, psycopg.OperationalError) as error:
                    what = str(error).strip()
                    _logger.warning("reader.disconnected", error=what)
                    self._report("disconnected", what)
                    self._stop.wait(self._backoff_s)
                    self._backoff_s = min(self._backoff_s * 2, _BACKOFF_MAX_S)
            self._report("stopped", None)
        except WalbrookError as error:
            self._report("stopped", str(error))
            raise
        finally:
            self._log.close()
            self._state.close()

    def _connect_and_read(self) -> None:
        self._report("connecting", None)
        control = SlotControl(self._settings.dsn, self._settings.slot)
        try:
            resume = max(self._state.first_restart(), self._log.end)
            control.check(resume)
            stream = ReplicationStream(
                self._settings.dsn,
                slot=self._settings.slot,
                publication=self._settings.publication,
                start_lsn=resume.lsn,
            )
            try:
                _logger.info("reader.streaming", source=self._settings.source, resume=str(resume))
                self._read(stream, Sealer(resume, control.key_of))
            finally:
                stream.close()
        finally:
            control.close()

    def _read(self, stream: ReplicationStream, sealer: Sealer) -> None:
        settings, batch = self._settings, _Batch(sealer)
        next_feedback = 0.0
        idle_since = time.monotonic()
        while not self._stop.requested:
            now = time.monotonic()
            full = self._log.size_bytes >= settings.log_bytes_max
            if now >= next_feedback:
                if full:
                    self._feedback(stream, "paused", "the log has reached log.max_bytes")
                else:
                    self._feedback(stream)
                next_feedback = now + _FEEDBACK_S
            if full:
                self._stop.wait(_FEEDBACK_S / 4)
                continue
            taken, keepalive = batch.fill(stream, settings, now)
            if batch.due(settings, now) and (sealed := batch.seal()) is not None:
                self._append(stream, sealed)
                idle_since = now
            if keepalive is not None:
                if keepalive.reply_requested:
                    next_feedback = 0.0
                if batch.nothing_in_flight and now - idle_since >= settings.idle_s:
                    self._advance_idle(keepalive)
                    idle_since = now
            elif not taken:
                stream.wait(batch.patience_s(settings, now, next_feedback), self._stop.descriptor)
        if (sealed := batch.seal()) is not None:
            self._append(stream, sealed)

    def _append(self, stream: ReplicationStream, sealed: Sealed) -> None:
        """Put a batch into the log; while the disk refuses, hold it and read nothing more."""
        while True:
            try:
                self._log.append(sealed.raw, sealed.schemas, first=sealed.first, high=sealed.high)
                self._backoff_s = _BACKOFF_FIRST_S
                return
            except TransientError as error:
                _logger.warning("reader.paused", error=str(error))
                self._feedback(stream, state="paused", error=str(error))
                if self._stop.wait(_FEEDBACK_S):
                    # Nothing is lost: it was not confirmed, so the source sends it again.
                    return

    def _advance_idle(self, keepalive: Keepalive) -> None:
        """Nothing for us below the server's position: let the cursors say so."""
        position = Cursor(keepalive.end_lsn, 0)
        if position > max(self._log.end, self._state.restart):
            self._log.append(_NO_ROWS, {}, first=position, high=position)
            self._backoff_s = _BACKOFF_FIRST_S

    def _feedback(
        self,
        stream: ReplicationStream,
        state: ReaderState = "streaming",
        error: str | None = None,
    ) -> None:
        restart = self._state.restart
        safe = restart if self._settings.durability == "disk" else max(restart, self._log.end)
        self._head_lsn = max(self._head_lsn, stream.server_lsn)
        silent_s = time.monotonic() - stream.received_at
        if silent_s > _SILENCE_S and state == "streaming":
            raise TransientError(f"the server has been silent for {silent_s:.0f} s")
        stream.confirm(
            received_lsn=self._log.end.lsn,
            confirmed_lsn=safe.lsn,
            reply_requested=silent_s > _SILENCE_S / 3,
        )
        self._log.trim(restart)
        self._report(state, error or self._state.problem)

    def _report(self, state: ReaderState, error: str | None) -> None:
        self._state.tell(News(state, error, self._head_lsn, self._log.end))


class _Batch:
    """Messages on their way into one batch, bounded by rows, bytes and age."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer
        self._messages: list[bytes] = []
        self._bytes = 0
        self._since = 0.0

    @property
    def nothing_in_flight(self) -> bool:
        return not self._messages and not self._sealer.in_transaction

    def fill(
        self, stream: ReplicationStream, settings: ReaderSettings, now: float
    ) -> tuple[int, Keepalive | None]:
        if not self._messages:
            self._since = now
        taken, keepalive = stream.drain(
            self._messages,
            bytes_max=settings.batch_bytes - self._bytes,
            rows_max=settings.batch_rows,
        )
        self._bytes += taken
        return taken, keepalive

    def due(self, settings: ReaderSettings, now: float) -> bool:
        return bool(self._messages) and (
            len(self._messages) >= settings.batch_rows
            or self._bytes >= settings.batch_bytes
            or (now - self._since) * 1000 >= settings.linger_ms
        )

    def patience_s(self, settings: ReaderSettings, now: float, next_feedback: float) -> float:
        """How long the socket may be waited for before something else is due."""
        wake = next_feedback
        if self._messages:
            wake = min(wake, self._since + settings.linger_ms / 1000)
        return max(0.0, wake - now)

    def seal(self) -> Sealed | None:
        if not self._messages:
            return None
        sealed = self._sealer.seal(self._messages)
        self._messages, self._bytes = [], 0
        return sealed

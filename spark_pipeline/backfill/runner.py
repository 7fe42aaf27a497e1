"""The backfills of one consumer: planned, read ahead, and handed to its worker chunk by chunk.

A thread looks at the consumer's rows in ``walbrook.backfills``, plans their chunks, and has chunks
read, each over a connection of its own: as a Spark task when it is large, in this process when it
is small. The thread runs while there is something to do, and is started when the stage sees that.

Invariants: of a backfill no more chunks are read or wait than it has connections, and one more; of
all of them ``_CHUNKS_MAX``, for which they take turns. What fails of one table concerns no other. A
chunk is read only when every transaction is known that may have committed without being visible;
while one is not, the backfill waits and says for whom.
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
import structlog

from cdc.backfill.open_transactions import OpenTransactions, who_is_waited_for
from cdc.backfill.query import RowChoice
from cdc.backfill.ranges import GoneRows, ReloadStep, ValueRange
from cdc.backfill.reading import (
    ChunkRead,
    ChunkTask,
    MovedTableError,
    connect_to_read,
    list_open,
    read_chunk,
    read_chunk_apart,
)
from cdc.backfill.table import describe_table
from cdc.config import SinkConfig
from cdc.connection import Connection
from cdc.errors import OperatorError, TransientError, WalbrookError
from cdc.state import backfill_chunks, backfill_keys
from cdc.state import backfills as rows
from cdc.state.backfill_chunks import Chunk
from cdc.state.backfills import Backfill, Wait
from spark_pipeline.backfill.chunk_plans import ChunkPlans
from spark_pipeline.backfill.held_rows import gone_reader
from spark_pipeline.backfill.pieces import Pieces, ReadyChunk
from spark_pipeline.backfill.planning import column_of
from spark_pipeline.backfill.search import is_followed, is_searched
from spark_pipeline.delivery.isolate import as_walbrook_error
from spark_pipeline.delivery.value_formats import wanted_of_reads
from spark_pipeline.feed.plan import job_group
from spark_pipeline.workers.context import WorkerContext

_logger = structlog.get_logger("walbrook.backfill")

OPEN_WAIT_S: Final = 3_600.0
"""How long transactions are waited for that were open before the first chunk."""

_LOOK_S: Final = 1.0
_PAUSE_MAX_S: Final = 30.0
_JOB_BYTES: Final = 4 << 20  # smaller chunks are read before a Spark task would have begun
_KEYS_AT_ONCE: Final = 2_000
_CONNECTIONS_MAX: Final = 16  # of one consumer
_CHUNKS_MAX: Final = _CONNECTIONS_MAX + 1  # that are read or wait, each a file


@dataclass
class _Reading:
    """A chunk that is being read."""

    backfill: Backfill
    chunk: Chunk
    keys: list[list[str]] | None
    future: Future[ChunkRead]
    path: Path
    opened: OpenTransactions
    may_omit: bool


class BackfillRunner:
    """That of one consumer; ``wake`` may be called from any thread."""

    def __init__(self, consumer: SinkConfig, context: WorkerContext, pieces: Pieces) -> None:
        self._consumer, self._context, self._pieces = consumer, context, pieces
        self._settings = context.settings
        self._source, self._term = self._settings.source, self._settings.term
        self._plans = ChunkPlans(consumer, self._settings, self._connected)
        self._wanted = wanted_of_reads(consumer)
        self._directory = self._settings.log_directory / "backfill" / consumer.name
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._readings: dict[tuple[int, int], _Reading] = {}
        self._held_up: Wait | None = None
        self._read_last = 0  # the backfill of which a chunk was begun last
        self._open = OpenTransactions()
        self._connection: psycopg.Connection[Any] | None = None
        self._not_before: dict[int, float] = {}  # by backfill, monotonic

    def wake(self) -> None:
        """There may be something to do: look now."""
        self._pieces.changed.set()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name=f"backfill-{self._consumer.name}", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        for folder in (self._directory.parent, self._directory):
            folder.mkdir(exist_ok=True, mode=0o700)  # rows are private
        try:
            while not self._context.ended.is_set():
                self._pieces.changed.clear()
                try:
                    if not self._look():
                        return
                except (psycopg.Error, WalbrookError) as error:
                    _logger.warning(
                        "backfill.look_failed",
                        consumer=self._consumer.name,
                        error=as_walbrook_error(error),
                    )
                    self._disconnect()
                self._pieces.changed.wait(_LOOK_S)
        finally:
            self._disconnect()

    def _look(self) -> bool:
        """One round over all backfills; returns whether there are any."""
        generation = self._pieces.generation
        with self._context.connections.connection() as state:
            self._plans.expand(state)
            found = rows.open_backfills(state, self._source, self._consumer.name)
            self._pieces.forget_others({backfill.id for backfill in found})
            share = max(1, _CHUNKS_MAX // max(1, len(found)))
            # The one that had the last turn comes last.
            for backfill in sorted(found, key=lambda each: (each.id <= self._read_last, each.id)):
                try:
                    self._advance(state, backfill, generation, share)
                except OperatorError as error:
                    self._fail(state, backfill, error)
                except TransientError as error:
                    rows.waits(state, backfill.id, Wait.SOURCE, str(error))
            self._collect(state)
            self._say_held_up(state)
            if not found and not self._readings:
                self._sweep(state)
        return bool(found or self._readings)

    def _say_held_up(self, state: Connection) -> None:
        kind = self._pieces.held_up()
        if kind is not None or self._held_up is not None:
            rows.held_up(state, self._source, self._consumer.name, kind)
        self._held_up = kind

    def _advance(self, state: Connection, backfill: Backfill, generation: int, share: int) -> None:
        if time.monotonic() < self._not_before.get(backfill.id, 0.0):
            return
        if not (backfill.has_ended or backfill.planned or self._plans.plan(state, backfill)):
            self._pieces.changed.set()
            return
        held = {*self._pieces.held(), *self._readings}
        mine, all_held = sum(name[0] == backfill.id for name in held), len(held)
        ahead = min(backfill.connections, share)
        most = backfill.connections + len(held) + 2
        chunks = backfill_chunks.chunks_of(state, backfill.id, most, ended=backfill.has_ended)
        begins = [each for each in chunks if each.range is ReloadStep.BEGIN]
        if backfill.reload and (begins or not (backfill.begun_lsn or backfill.has_ended)):
            chunks = begins  # no row is read before the shadow gets changes
        # An order of rows needs one chunk after the other: the next is read when one is delivered.
        for chunk in chunks if backfill.sort_column is None else chunks[:1]:
            name = (chunk.backfill, chunk.number)
            if name in held:
                continue
            if chunk.state != "planned":
                self._offer(state, backfill, chunk, generation)
            elif mine <= ahead and all_held < _CHUNKS_MAX and self._read(state, backfill, chunk):
                mine, all_held = mine + 1, all_held + 1
        if not chunks and not backfill.has_ended:
            self._finish(state, backfill)

    def _offer(self, state: Connection, backfill: Backfill, chunk: Chunk, generation: int) -> None:
        """A chunk that an earlier process read, or that was put down when it was paused."""
        is_mark = isinstance(chunk.range, ReloadStep)
        if not is_mark and (chunk.file is None or not chunk.file.exists()):
            backfill_chunks.read_again(state, chunk)
            self._pieces.changed.set()
            return
        if self._pieces.offer(ReadyChunk(backfill, chunk, may_omit=True), generation):
            self._context.feed.wake()

    def _read(self, state: Connection, backfill: Backfill, chunk: Chunk) -> bool:
        """Begin to read a chunk; returns whether it was begun."""
        if isinstance(chunk.range, ReloadStep):
            backfill_chunks.mark_ready(state, chunk)
            self._pieces.changed.set()
            return False
        if len(self._readings) >= _CONNECTIONS_MAX:
            return False
        connection = self._connected()
        self._open = self._open.after(list_open(connection))
        # What a shadow did not get as a change, because it was before its time, must be visible.
        if waited := self._open.committed_below((backfill.begun_lsn or 0) // 8 * 8):
            why = who_is_waited_for(waited)
            if rows.waits(state, backfill.id, Wait.OPEN_TRANSACTIONS, why) > OPEN_WAIT_S:
                raise OperatorError(
                    f"it has waited for {OPEN_WAIT_S:.0f} s: {why}",
                    fix="end them, then retry the backfill",
                    kind="open_transactions",
                )
            return False
        rows.waits_no_more(state, backfill.id)
        table = describe_table(connection, self._settings.publication, backfill.table)
        if table.may_omit and backfill.looked_lsn is None:
            at = self._open.earliest
            rows.begin_search(state, self._source, self._term, backfill.id, at)
        if isinstance(chunk.range, GoneRows):
            path = self._path(chunk)
            find = gone_reader(state, self._settings, self._consumer, backfill.table, path)
            future = _in_thread(f"backfill-{self._consumer.name}", find)
            self._begun(_Reading(backfill, chunk, None, future, path, self._open, table.may_omit))
            return True
        leaf = next((each for each in table.leaves if each.oid == chunk.leaf_oid), None)
        keys = None
        column = backfill.sort_column
        if chunk.range is None:
            keys = backfill_keys.incomplete_keys(state, backfill.id, _KEYS_AT_ONCE)
            column = None
            if not keys:  # an earlier chunk had them all
                backfill_chunks.nothing_left(state, chunk)
                self._pieces.changed.set()
                return False
        elif isinstance(chunk.range, ValueRange) and leaf is not None:
            column = column_of(backfill, table, leaf)
        task = ChunkTask(
            dsn=self._settings.source_dsn,
            source=self._source,
            publication=self._settings.publication,
            table=backfill.table,
            leaf=chunk.leaf,
            leaf_oid=chunk.leaf_oid,
            filenode=chunk.filenode,
            choice=RowChoice(
                chunk.range, keys or (), column, backfill.where, backfill.start_position
            ),
            path=self._path(chunk),
            wanted=self._wanted,
        )
        size = 0 if leaf is None else min(leaf.bytes, backfill.chunk_bytes)
        future = _in_thread(f"backfill-{self._consumer.name}", self._reader(task, size))
        self._begun(_Reading(backfill, chunk, keys, future, task.path, self._open, table.may_omit))
        return True

    def _path(self, chunk: Chunk) -> Path:
        return self._directory / f"{chunk.backfill}-{chunk.number}-{uuid.uuid4().hex}.arrow"

    def _begun(self, reading: _Reading) -> None:
        self._readings[reading.chunk.backfill, reading.chunk.number] = reading
        self._read_last = reading.chunk.backfill
        reading.future.add_done_callback(lambda _done: self._pieces.changed.set())

    def _reader(self, task: ChunkTask, size: int) -> Callable[[], ChunkRead]:
        """What reads a chunk of about ``size`` bytes; its file is one of this machine."""
        spark, run_name = self._context.session, self._context.run
        elsewhere = self._settings.cluster_options is not None
        if spark is None or elsewhere or size < _JOB_BYTES:
            return lambda: read_chunk(task)
        context, group = spark.sparkContext, job_group(run_name, self._source, self._consumer.name)

        def run() -> ChunkRead:
            context.setJobGroup(f"{group}-backfill", f"backfill of {task.table}")
            context.setLocalProperty("spark.scheduler.pool", "catch_up")
            answer: ChunkRead | WalbrookError
            (answer,) = context.parallelize([task], 1).map(read_chunk_apart).collect()
            if isinstance(answer, WalbrookError):
                raise answer
            return answer

        return run

    def _collect(self, state: Connection) -> None:
        """What was read since, and what could not be."""
        generation = self._pieces.generation
        for name, reading in [*self._readings.items()]:
            if not reading.future.done():
                continue
            try:
                done = reading.future.result()
                if reading.keys and not self._is_followed(state, reading, done):
                    continue  # the log is not there yet
            except Exception as error:
                del self._readings[name]
                reading.path.unlink(missing_ok=True)
                self._failed(state, reading, error)
                continue
            del self._readings[name]
            self._hand_over(state, reading, done, generation)

    def _is_followed(self, state: Connection, reading: _Reading, done: ChunkRead) -> bool:
        oid, keys = reading.chunk.leaf_oid, reading.keys or ()
        return is_followed(state, self._settings, reading.backfill, oid, keys, done.lsn)

    def _hand_over(
        self, state: Connection, reading: _Reading, done: ChunkRead, generation: int
    ) -> None:
        backfill, chunk = reading.backfill, reading.chunk
        self._not_before.pop(backfill.id, None)
        is_known = backfill_chunks.chunk_read(
            state, self._source, self._term, chunk, backfill.generation,
            snapshot=done.snapshot, lsn=done.lsn, look_lsn=reading.opened.look_from(done.snapshot),
            file=reading.path, rows=done.rows, size=done.bytes,
        )  # fmt: skip
        self._pieces.changed.set()
        if not is_known:
            reading.path.unlink(missing_ok=True)
            return
        if not done.rows:
            reading.path.unlink(missing_ok=True)
            if reading.keys:
                backfill_keys.drop_keys(state, backfill.id, reading.keys)
            return
        found = next(
            each
            for each in backfill_chunks.chunks_of(state, backfill.id)
            if each.number == chunk.number
        )
        ready = ReadyChunk(backfill, found, may_omit=reading.may_omit, keys=reading.keys)
        if self._pieces.offer(ready, generation):
            self._context.feed.wake()

    def _failed(self, state: Connection, reading: _Reading, error: Exception) -> None:
        backfill, chunk, what = reading.backfill, reading.chunk, as_walbrook_error(error)
        # Keys of rows that are gone are not looked for by leaf: their chunk counts an attempt.
        if isinstance(error, MovedTableError) and not isinstance(chunk.range, GoneRows):
            self._plans.plan_again(state, backfill, chunk)
            self._pieces.changed.set()
            return
        if isinstance(error, OperatorError):
            self._fail(state, backfill, error)
            return
        if error is what and what.kind == "chunk_timeout" and self._plans.split(state, chunk):
            self._pieces.changed.set()
            return
        backfill_chunks.read_again(state, chunk, error=str(what), failed=True)
        if chunk.attempts + 1 >= backfill_chunks.ATTEMPTS_MAX:
            self._fail(state, backfill, what)
            return
        pause_s = min(_PAUSE_MAX_S, 0.5 * 2**chunk.attempts)
        self._not_before[backfill.id] = time.monotonic() + pause_s
        why = f"it is tried again in {pause_s:.0f} s: {what}"
        rows.waits(state, backfill.id, Wait.RETRY, why)

    def _finish(self, state: Connection, backfill: Backfill) -> None:
        """No chunk is left: rows whose values were left out are read by key, then it ends."""
        chunks, keys, swapped = backfill_chunks.what_is_left(state, backfill.id)
        if not swapped and self._plans.plan_attached(state, backfill):
            self._pieces.changed.set()
            return
        if not is_searched(state, self._connected, self._settings, backfill):
            return
        chunks, keys, swapped = backfill_chunks.what_is_left(state, backfill.id)
        if chunks:
            return
        if keys:
            table = describe_table(self._connected(), self._settings.publication, backfill.table)
            by_key = (backfill.table, table.relation.oid, 0, None)
            backfill_chunks.add_chunks(
                state, self._source, self._term, backfill.id, [by_key], planned=True
            )
            self._pieces.changed.set()
            return
        if backfill.reload and not swapped:
            backfill_chunks.add_swap(state, self._source, self._term, backfill.id)
            rows.waits(state, backfill.id, Wait.SWAP, "all rows are there; its sink swaps them in")
            self._pieces.changed.set()
            return
        rows.finish(state, backfill.id)
        _logger.info("backfill.done", consumer=self._consumer.name, table=str(backfill.table))

    def _fail(self, state: Connection, backfill: Backfill, error: WalbrookError) -> None:
        _logger.warning(
            "backfill.failed", consumer=self._consumer.name, table=str(backfill.table), error=error
        )
        rows.fail(state, backfill.id, str(error))

    def _sweep(self, state: Connection) -> None:
        """Remove files that are not needed any more."""
        needed = backfill_chunks.recorded_files(state, self._source, self._consumer.name)
        for path in self._directory.glob("*.arrow"):
            if path not in needed:
                path.unlink(missing_ok=True)
        for folder in self._directory.glob("*/"):  # of a process that was killed
            shutil.rmtree(folder, ignore_errors=True)

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            name = f"{self._source}:backfill"
            try:
                self._connection = connect_to_read(self._settings.source_dsn, name)
            except psycopg.OperationalError as error:
                raise TransientError(
                    f"source {self._source} cannot be reached", fix="it is tried again"
                ) from error
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()


def _in_thread(name: str, run: Callable[[], ChunkRead]) -> Future[ChunkRead]:
    """Run in a thread that does not keep the process from ending."""
    future: Future[ChunkRead] = Future()

    def work() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future

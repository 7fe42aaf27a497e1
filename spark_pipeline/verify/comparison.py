"""The comparison of one table: both sides are read, then rows that seem to differ are read again.

The source is read in chunks, as a backfill reads it; then the consumer has to pass the position at
which the last chunk was read; then the destination is read. What both hold is laid side by side in
files (``cdc.verify.key_ranges``). The rows that differ there are decided in rounds
(``cdc.verify.rounds``).

Invariants: nothing is written to the source or to the destination. Memory is bounded by one range
of keys and by ``_CANDIDATES_MAX`` keys. Every wait is bounded by ``_PATIENCE_S``.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg

from cdc.backfill.chunk_file import ChunkFile
from cdc.backfill.query import RowChoice
from cdc.backfill.ranges import ValueRange
from cdc.backfill.reading import (
    ChunkRead,
    ChunkTask,
    connect_to_read,
    list_open,
    read_chunk,
    wal_end,
)
from cdc.backfill.table import PublishedTable, describe_table
from cdc.config.table import TableName
from cdc.connection import Connection
from cdc.cursor import Cursor, idle_place
from cdc.decoding.format import ValueFormat
from cdc.error_text import public_text
from cdc.errors import OperatorError, TransientError, WalbrookError
from cdc.state.backfills import Backfill
from cdc.state.verifications import (
    ComparisonResult,
    ConsumerPosition,
    Stage,
    VerificationRow,
    consumer_position,
)
from cdc.verify.comparable import require_key
from cdc.verify.held import Form, Key, held_of_raw, key_of, key_text
from cdc.verify.key_ranges import RANGES_MAX, HeldSide, compare, ranges_of
from cdc.verify.records import held_by_key, same_cells, same_record
from cdc.verify.rounds import ROUNDS_MAX, Rounds
from cdc.verify.source_rows import SourceReader, SourceRows
from sinks.base import ReadsBack
from spark_pipeline.backfill.planning import Planned, column_of, plan_leaf
from spark_pipeline.workers.context import WorkerContext

_CHUNK_BYTES: Final = 64 << 20
_DECODED_ROWS: Final = 50_000  # at once
_CANDIDATES_MAX: Final = 1_000_000
_LOOKED_AT_BYTES: Final = 64 << 20  # of rows by key at once, about
_LOOKED_AT_MAX: Final = 20_000
_PATIENCE_S: Final = 600.0
_LOOK_S: Final = 0.1
_SAY_S: Final = 1.0
_ROUND_PAUSE_S: Final = 0.2


class EndedError(TransientError):
    """The service stops; the verification begins again with the next start."""


@dataclass
class _Sizes:
    rows: int = 0
    bytes: int = 0
    lsn: int = 0

    def add(self, read: ChunkRead) -> None:
        self.rows, self.bytes = self.rows + read.rows, self.bytes + read.bytes
        self.lsn = max(self.lsn, read.lsn)


class TableComparison:
    """Compares one table of one consumer."""

    def __init__(
        self,
        context: WorkerContext,
        state: Connection,
        row: VerificationRow,
        *,
        consumer: str,
        table: TableName,
        sink: ReadsBack,
        values: ValueFormat,
        directory: Path,
    ) -> None:
        self._context, self._state, self._row = context, state, row
        self._settings = context.settings
        self._consumer, self._name, self._sink = consumer, table, sink
        self._values, self._directory = values, directory
        self._reader = SourceReader(self._settings.publication, table, sink.held_form, values)
        self._same = same_cells if sink.held_form is Form.CELLS else same_record
        self._at_once = _LOOKED_AT_MAX
        self._reason: str | None = None  # as its row shows it
        self._said = 0.0  # monotonic
        self.oid = 0
        """Of the table, once it was looked at."""

    def run(self) -> ComparisonResult:
        """Compare the whole table."""
        with self._connected() as connection:
            table = describe_table(connection, self._settings.publication, self._name)
            require_key(table)
            self.oid = table.relation.oid
            position = wal_end(connection)
            planned = [
                each
                for leaf in table.leaves
                for each in plan_leaf(connection, self._plan, table, leaf)
            ]
        self._row.begin(len(planned) + 2, position)
        holds_rows = self._sink.held_form is Form.CELLS
        ranges = ranges_of(table.leaves) if holds_rows else RANGES_MAX
        source, destination = (
            HeldSide(self._directory / name, ranges) for name in ("source", "destination")
        )
        with closing(source):
            sizes = self._read_source(source, planned, table)
        self._at_once = _keys_at_once(sizes)
        self.until_passed(sizes.lsn, "reading")
        with closing(destination):
            for held in self._sink.read_back(table):
                destination.add(held)
                self._say("reading", None)
                self._refuse_end()
        self._row.advance("comparing", parts=1)
        counts, candidates = self._candidates(source, destination, ranges)
        rounds = self.look_again(candidates)
        differences = {key_text(key): found.value for key, found in rounds.differing.items()}
        return ComparisonResult(*counts, differences, len(rounds.open))

    def look_again(self, keys: Collection[Key], stage: Stage = "comparing") -> Rounds:
        """Decide about rows that seem to differ, in rounds."""
        rounds = Rounds.of(keys)
        with self._connected() as connection:
            for number in range(ROUNDS_MAX):
                if not rounds.open:
                    break
                if number:
                    self.pause(_ROUND_PAUSE_S * number)
                left = list(rounds.open)
                for at in range(0, len(left), self._at_once):
                    self._round(connection, rounds, left[at : at + self._at_once], stage)
        return rounds

    def until_passed(self, lsn: int, stage: Stage) -> None:
        """Until the consumer has delivered all that was committed below a position."""
        place, deadline = idle_place(lsn), time.monotonic() + _PATIENCE_S
        while True:
            position = consumer_position(self._state, self._settings.source, self._consumer)
            reason = _waits_for(self._consumer, position, place)
            self._say(stage, reason)
            if reason is None:
                return
            if time.monotonic() > deadline:
                raise OperatorError(
                    f"{reason}, for longer than {_PATIENCE_S:.0f} s",
                    fix="mend what holds it up, and verify again",
                    kind="consumer_behind",
                )
            self.pause(_LOOK_S)

    def _say(self, stage: Stage, reason: str | None) -> None:
        """Show what it waits for, and notice a cancellation; not more often than is of use."""
        now = time.monotonic()
        if reason != self._reason or now - self._said > _SAY_S:
            self._row.advance(stage, reason=reason)
            self._reason, self._said = reason, now

    def _read_source(self, side: HeldSide, planned: list[Planned], table: PublishedTable) -> _Sizes:
        sizes = _Sizes()
        for number, (leaf, oid, filenode, chosen) in enumerate(planned):
            column = None
            if isinstance(chosen, ValueRange):
                (place,) = (each for each in table.leaves if each.oid == oid)
                column = column_of(self._plan, table, place)
            task = ChunkTask(
                dsn=self._settings.source_dsn,
                source=self._settings.source,
                publication=self._settings.publication,
                table=self._name,
                leaf=leaf,
                leaf_oid=oid,
                filenode=filenode,
                choice=RowChoice(chosen, sort_column=column),
                path=self._directory / f"chunk-{number}.arrow",
            )
            read = read_chunk(task)
            sizes.add(read)
            self._add(side, task.path, read.rows)
            task.path.unlink()
            self._row.advance("reading", parts=1)
            self._refuse_end()
        return sizes

    def _add(self, side: HeldSide, path: Path, rows: int) -> None:
        file = ChunkFile(path)
        for at in range(0, rows, _DECODED_ROWS):
            raw = file.rows(at, min(_DECODED_ROWS, rows - at))
            side.add(held_of_raw(raw, file.schemas, self._sink.held_form, self._values))

    def _candidates(
        self, source: HeldSide, destination: HeldSide, ranges: int
    ) -> tuple[tuple[int, int], list[Key]]:
        """How many rows both sides have, and the keys of those that are not the same there."""
        counts, keys = [0, 0], list[Key]()
        for number in range(ranges):
            found = compare(source.range(number), destination.range(number))
            counts[0] += found.source_rows
            counts[1] += found.destination_rows
            keys += map(key_of, found.keys)
            if len(keys) > _CANDIDATES_MAX:
                raise OperatorError(
                    f"more than {_CANDIDATES_MAX} rows of {self._name} differ",
                    fix="backfill the table, and verify again",
                    kind="too_different",
                )
        return (counts[0], counts[1]), keys

    def _round(
        self,
        connection: psycopg.Connection[Any],
        rounds: Rounds,
        keys: list[Key],
        stage: Stage,
    ) -> None:
        before = self._look(connection, keys)
        self.until_passed(before.lsn, stage)
        table = describe_table(connection, self._settings.publication, self._name)
        held = held_by_key(self._sink.read_back(table, keys))
        left = rounds.undecided(keys, before.rows, held, self._same)
        if left and self._until_ended(connection, stage):
            after = self._look(connection, left)
            rounds.decide(left, before.rows, held, after.rows, self._same)

    def _look(self, connection: psycopg.Connection[Any], keys: Collection[Key]) -> SourceRows:
        try:
            return self._reader.read(connection, keys)
        except psycopg.Error as error:
            raise _unreadable(self._name, error) from error

    def _until_ended(self, connection: psycopg.Connection[Any], stage: Stage) -> bool:
        """Wait for the transactions that are open now; returns whether they have all ended."""
        opened, deadline = list_open(connection).xids, time.monotonic() + _PATIENCE_S
        while opened and time.monotonic() < deadline:
            opened &= list_open(connection).xids
            if opened:
                self._say(stage, f"{len(opened)} open transactions have to end")
                self.pause(_LOOK_S)
        self._say(stage, None)
        return not opened

    @property
    def _plan(self) -> Backfill:
        """How the source is read: as a backfill with its default options."""
        return Backfill(
            id=0, table=self._name, where=None, sort_column=None, start_position=None,
            chunk_bytes=_CHUNK_BYTES, rows_per_second=None, connections=1, planned=False,
            looked_lsn=None, attempts=0,
        )  # fmt: skip

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        name = f"{self._settings.source}:verify"
        try:
            with closing(connect_to_read(self._settings.source_dsn, name)) as connection:
                yield connection
        except psycopg.Error as error:
            raise _unreadable(self._name, error) from error

    def pause(self, seconds: float) -> None:
        """Wait a little; ``EndedError`` if the service stops."""
        if self._context.ended.wait(seconds):
            raise EndedError("the service stops")

    def _refuse_end(self) -> None:
        self.pause(0)


def _waits_for(consumer: str, position: ConsumerPosition, place: Cursor) -> str | None:
    if position.cursor >= place:
        queued = position.has_queue
        return f"messages of {consumer} wait for another try" if queued else None
    if position.paused:
        return f"{consumer} is paused"
    return f"{consumer} has still to pass the position at which the source was read"


def _keys_at_once(sizes: _Sizes) -> int:
    row_bytes = max(1, sizes.bytes // max(1, sizes.rows))
    return max(1, min(_LOOKED_AT_MAX, _LOOKED_AT_BYTES // row_bytes))


def _unreadable(table: TableName, error: psycopg.Error) -> WalbrookError:
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return OperatorError(
            f"{table} cannot be read: {public_text(error)}",
            fix="grant SELECT on it to the role of the source, and BYPASSRLS if it has row-level "
            "security; then verify again",
            kind="unreadable",
        )
    return TransientError(
        f"{table} could not be read: {public_text(error)}", fix="it is tried again"
    )

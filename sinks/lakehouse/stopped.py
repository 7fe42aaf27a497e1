"""Changes of tables that cannot be written as they are: they wait in the lake, the others go on.

Each such table has a table beside it with the changes that wait, in their order, and a position of
its own. They are tried again while the sink delivers, every ``RETRY_S``, until the operator has
done something about the table; then they are written, and what comes next goes its usual way.

Invariants: while changes of a table wait, every later one waits behind them. What waits is as
durable as what was written. About ``WAITING_BYTES_MAX`` wait per table at most; then delivery stops
with the table's error. A table with changes that wait and that was removed has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa

from cdc.cursor import ORIGIN, Cursor
from cdc.cursor_columns import cursor_at
from cdc.decoding.format import TABLE_VERSION
from cdc.errors import OperatorError, PoisonError, WalbrookError
from sinks.base import StoppedTable
from sinks.lakehouse.names import GAPS, LakeTarget
from sinks.lakehouse.registry import Registry
from sinks.lakehouse.table import LakeTable, TableState
from sinks.tables.parts import Part

RETRY_S: Final = 10.0
WAITING_BYTES_MAX: Final = 1 << 30

_SCHEMA_PREFIX: Final = f"{GAPS.schema}_stopped_"
_SCHEMA: Final = pa.schema(
    [
        pa.field("commit_lsn", pa.int64()),  # of the last change
        pa.field("commit_idx", pa.int64()),
        pa.field("routed", pa.bool_()),
        pa.field("changes", pa.binary()),  # of one part, as an Arrow stream
    ]
)
_PLACE: Final = ("commit_lsn", "commit_idx")


class Commit(Protocol):
    """Commits the rows that a table does not hold yet.

    Returns how many it held, and the reload for which it has a shadow.
    """

    def __call__(
        self,
        target: LakeTarget,
        rows: pa.RecordBatch,
        create: Callable[[LakeTable], None],
        write: Callable[[LakeTable, TableState, pa.RecordBatch], None],
        /,
    ) -> tuple[int, int]: ...


@dataclass
class _Stopped:
    error: WalbrookError | None = None
    retry_at: float = 0.0  # monotonic


class StoppedTables:
    """Those of the tables of one consumer; ``registry`` says of which there ever were any."""

    def __init__(
        self,
        open_table: Callable[[LakeTarget], LakeTable],
        registry: Registry,
        commit: Commit,
    ) -> None:
        self._open_table = open_table
        self._registry = registry
        self._commit = commit
        self._found: dict[LakeTarget, _Stopped] | None = None

    def of(self, target: LakeTarget) -> bool:
        """Whether changes of a table wait."""
        return target in self._stopped

    def last_waiting(self, target: LakeTarget) -> Cursor:
        """The last change of a table that has ever waited."""
        state = self._open_table(_beside(target)).load()
        return ORIGIN if state is None else state.cursor

    def stopped_tables(self) -> tuple[StoppedTable, ...]:
        """The tables whose changes wait, and why."""
        return tuple(
            StoppedTable(str(target), found.error.kind, found.error.what, found.error.fix)
            for target, found in sorted(self._stopped.items())
            if found.error is not None
        )

    def add(self, part: Part[LakeTarget], error: OperatorError | None = None) -> int:
        """Keep a part behind what waits already, ``error`` if it is the first.

        Returns how many of its messages were there.
        """
        beside = _beside(part.target)
        found = self._stopped.get(part.target, _Stopped(error, time.monotonic() + RETRY_S))
        self._registry.note(beside, 0)

        def create(table: LakeTable) -> None:
            table.create(_SCHEMA, (), TableState())

        def write(table: LakeTable, state: TableState, rows: pa.RecordBatch) -> None:
            size = sum(file.size for file in table.files())
            if size > WAITING_BYTES_MAX:
                raise found.error or _too_many(part.target)
            added = table.write(_row(rows, routed=part.routed))
            table.commit(added, [], state.moved(cursor_at(rows, -1)))

        there, _ = self._commit(beside, part.rows, create, write)
        self._stopped[part.target] = found
        return there

    def retry(self, write: Callable[[Part[LakeTarget]], object]) -> None:
        """Write what waits and is due, if its table can have it now."""
        for target, found in list(self._stopped.items()):
            if time.monotonic() < found.retry_at:
                continue
            try:
                self._release(target, write)
            except (OperatorError, PoisonError) as error:
                self._stopped[target] = _Stopped(error, time.monotonic() + RETRY_S)
            else:
                del self._stopped[target]

    def _release(self, target: LakeTarget, write: Callable[[Part[LakeTarget]], object]) -> None:
        table = self._open_table(_beside(target))
        state = table.load()
        if state is None:
            return  # an operator gave them up
        for rows, routed in _in_order(table):
            write(Part(target, rows.column(TABLE_VERSION)[0].as_py(), routed, rows))
        table.replace([], table.schema, state.moved(state.cursor))

    @property
    def _stopped(self) -> dict[LakeTarget, _Stopped]:
        if self._found is None:
            self._found = {
                LakeTarget(beside.schema.removeprefix(_SCHEMA_PREFIX), beside.name): _Stopped()
                for beside in self._registry.targets()
                if beside.schema.startswith(_SCHEMA_PREFIX) and self._has_any(beside)
            }
        return self._found

    def _has_any(self, beside: LakeTarget) -> bool:
        table = self._open_table(beside)
        return table.load() is not None and bool(table.files())


def _beside(target: LakeTarget) -> LakeTarget:
    """Where the changes of a table wait."""
    return LakeTarget(f"{_SCHEMA_PREFIX}{target.schema}", target.name)


def _row(rows: pa.RecordBatch, *, routed: bool) -> pa.Table:
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, rows.schema) as out:
        out.write_batch(rows)
    lsn, idx = cursor_at(rows, -1)
    values = (lsn, idx, routed, stream.getvalue().to_pybytes())
    columns = [pa.array([value], kind) for value, kind in zip(values, _SCHEMA.types, strict=True)]
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


def _in_order(table: LakeTable) -> Iterator[tuple[pa.RecordBatch, bool]]:
    """The parts that wait, one after another; their files may have been merged."""
    files = table.files()
    places = []
    for number, file in enumerate(files):
        columns = (column.to_pylist() for column in table.read(file, _PLACE).columns)
        places += [(*place, number, row) for row, place in enumerate(zip(*columns, strict=True))]
    for *_, number, row in sorted(places):
        found = table.read(files[number]).slice(row, 1)
        with pa.ipc.open_stream(found.column("changes")[0].as_buffer()) as stream:
            rows = stream.read_all().combine_chunks().to_batches()[0]
        yield rows, found.column("routed")[0].as_py()


def _too_many(target: LakeTarget) -> OperatorError:
    return OperatorError(
        f"too many changes of {target} wait for their table",
        fix="mend the table, or give the changes up",
        kind="table_stopped",
    )

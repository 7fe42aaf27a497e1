"""One delivery: a batch is cut into parts of one table, and each part is one commit of its table.

Every table has a position of its own, which moves in the commit of its rows. Invariants: a message
at or below its table's position is in the table, whoever brings it again; a delivery counts only
what is committed.

A message that has no place in its table is found by halving the batch: each half is a delivery of
its own, and the first message that is refused alone ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import MessageBatch, cursor_at
from cdc.errors import PoisonError, WalbrookError
from cdc.failpoints import reached
from sinks.base import Delivery
from sinks.columns import prefix_at_or_below
from sinks.lakehouse.evolving import follow
from sinks.lakehouse.maintenance import Maintainer, MaintenancePlan
from sinks.lakehouse.names import GAPS, LakeNames, LakeTarget
from sinks.lakehouse.registry import Registry
from sinks.lakehouse.table import ConflictError, LakeTable, TableState
from sinks.lakehouse.writing import Appends, Merges, Writes, gap_rows
from sinks.tables.fold import moves_in_parts
from sinks.tables.stretches import Part, stretches
from sinks.tables.typed import plan_of

Mode = Literal["append", "upsert"]
OpenTable = Callable[[LakeTarget], LakeTable]

_TRIES_MAX = 10  # of a commit that other writers are faster than


class LakehouseSink:
    """Writes the tables of one consumer, each opened when it is first needed."""

    def __init__(
        self,
        open_table: OpenTable,
        names: LakeNames,
        *,
        mode: Mode,
        by_date: bool = True,
        merges: Writes | None = None,
        maintenance: MaintenancePlan | None = None,
    ) -> None:
        """``merges`` is how a format keeps current rows, if not by writing files anew."""
        self._open_table = open_table
        self._maintainer = None if maintenance is None else Maintainer(open_table, maintenance)
        self._names = names
        self._mode = mode
        self._writes: Writes = Appends(by_date=by_date) if mode == "append" else merges or Merges()
        self._tables: dict[LakeTarget, LakeTable] = {}
        self._registry = Registry(open_table)

    def deliver(self, batch: MessageBatch) -> Delivery:
        """Commit the messages that their tables do not hold yet, in order."""
        settled = absorbed = 0
        waiting = [batch]
        try:
            while waiting:
                piece = waiting.pop()
                try:
                    absorbed += self._apply(piece.rows)
                except PoisonError as error:
                    if len(piece) == 1:
                        return Delivery(settled, absorbed, _refused(piece, error))
                    middle = len(piece) // 2
                    waiting += [piece.slice(middle), piece.slice(0, middle)]
                    continue
                settled += len(piece)
        except WalbrookError as error:
            self._forget()
            return Delivery(settled, absorbed, error)
        return Delivery(settled, absorbed)

    def probe(self) -> str:
        """Whether the place of the tables can be reached; nothing is written."""
        return self._open_table(GAPS).probe()

    def close(self) -> None:
        """Forget the tables; the next delivery looks at them again."""
        if self._maintainer is not None:
            self._maintainer.close()
        self._forget()

    def _forget(self) -> None:
        """What is there is looked at anew: somebody may have moved or mended it."""
        self._tables.clear()
        self._registry = Registry(self._open_table)

    def _apply(self, rows: pa.RecordBatch) -> int:
        """Returns how many of the messages were there."""
        absorbed = 0
        gaps = pc.equal(rows.column("action"), "gap")
        if gaps.true_count:
            absorbed += self._note_gaps(rows.filter(gaps))
            rows = rows.filter(pc.invert(gaps))
        if not rows.num_rows:
            return absorbed
        cuts = moves_in_parts(rows) if self._mode == "upsert" else None
        for parts in stretches(rows, self._names, cuts):
            absorbed += sum(map(self._apply_part, parts))
        return absorbed

    def _apply_part(self, part: Part[LakeTarget]) -> int:
        relation = plan_of(part.version).relation
        merges = self._mode == "upsert"

        def write(table: LakeTable, state: TableState, rows: pa.RecordBatch) -> None:
            same_table = state.relation_oid == relation.oid
            if merges and not same_table:
                self._registry.refuse_renamed(part.target, relation, table.place)
            self._registry.note(part.target, state.relation_oid)
            keeps = self._writes.keeps
            state = follow(table, state, part.version, same_table=same_table, keeps=keeps)
            self._writes.write(table, state, rows, part.version)

        def create(table: LakeTable) -> None:
            self._registry.refuse_lost(part.target, table.place)
            if merges:
                self._registry.refuse_renamed(part.target, relation, table.place)
            schema, partition_by = self._writes.layout(part.version)
            table.create(schema, partition_by, TableState(relation_oid=relation.oid))

        return self._commit(part.target, part.rows, create, write)

    def _note_gaps(self, rows: pa.RecordBatch) -> int:
        """Keep gaps where whoever reads the tables finds them; there are few."""

        def write(table: LakeTable, state: TableState, rows: pa.RecordBatch) -> None:
            table.commit(table.write(gap_rows(rows)), [], state.moved(cursor_at(rows, -1)))

        def create(table: LakeTable) -> None:
            table.create(gap_rows(rows).schema, (), TableState())

        return self._commit(GAPS, rows, create, write)

    def _commit(
        self,
        target: LakeTarget,
        rows: pa.RecordBatch,
        create: Callable[[LakeTable], None],
        write: Callable[[LakeTable, TableState, pa.RecordBatch], None],
    ) -> int:
        """Write what the table does not hold; again, if another writer was faster.

        Returns how many messages it held.
        """
        if target not in self._tables:
            self._tables[target] = self._open_table(target)
        table = self._tables[target]
        for attempt in range(1, _TRIES_MAX + 1):
            try:
                if (state := table.load()) is None:
                    create(table)
                    state = table.load()
                    assert state is not None
                known = prefix_at_or_below(rows, state.cursor)
                if known < rows.num_rows:
                    write(table, state, rows.slice(known))
                    reached("committed")
                    if self._maintainer is not None:
                        self._maintainer.wrote(target)
            except ConflictError:
                if attempt == _TRIES_MAX:
                    raise
                continue
            return known
        raise AssertionError("the last attempt returns or raises")


def _refused(message: MessageBatch, error: PoisonError) -> PoisonError:
    return PoisonError(
        f"the message at {message.cursor(0)} has no place in its table: {error.what}",
        fix=error.fix,
        detail=error.detail,
    )

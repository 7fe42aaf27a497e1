"""One delivery: a batch is cut into parts of one table, and each part is one commit of its table.

Every table has a position of its own, which moves in the commit of its rows. Invariants: a message
at or below its table's position is in the table and is skipped when it is repeated; a delivery
counts only what is committed.

A message that has no place in its table is found by bisection of the batch: each half is a delivery
of its own, and the first message that is refused alone ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from cdc.backfill.reload import mark_in
from cdc.backfill.table import PublishedTable
from cdc.change import READ, MessageBatch
from cdc.cursor_columns import cursor_at, prefix_at_or_below
from cdc.errors import OperatorError, PoisonError, WalbrookError
from cdc.failpoints import reached
from cdc.verify.held import Form, Key
from sinks.base import Delivery
from sinks.lakehouse.columns import DATE
from sinks.lakehouse.evolving import follow
from sinks.lakehouse.maintenance import Maintainer, MaintenancePlan
from sinks.lakehouse.names import GAPS, LakeNames, LakeTarget
from sinks.lakehouse.read_back import held_history, held_rows
from sinks.lakehouse.registry import Registry
from sinks.lakehouse.reloading import Reloader, is_shadow, shadow_of
from sinks.lakehouse.stopped import StoppedTables
from sinks.lakehouse.table import ConflictError, LakeTable, TableState
from sinks.lakehouse.writing import Appends, Merges, Writes, gap_rows
from sinks.tables.fold import moves_in_parts
from sinks.tables.parts import Part, parts_by_version
from sinks.tables.typed import plan_of

Mode = Literal["append", "upsert"]
OpenTable = Callable[[LakeTarget], LakeTable]

_TRIES_MAX = 10  # of a commit that other writers are faster than


class _LostShadowError(Exception):
    """A shadow that the state of its table names is not there."""


class LakehouseSink:
    """Writes the tables of one consumer, each opened when it is first needed."""

    def __init__(
        self,
        open_table: OpenTable,
        names: LakeNames,
        *,
        mode: Mode,
        partition_by: Sequence[str] = (DATE,),
        merges: Writes | None = None,
        maintenance: MaintenancePlan | None = None,
    ) -> None:
        """``merges`` is how a format keeps current rows, if not by rewriting files.

        ``partition_by`` is of histories.
        """
        self._open_table = open_table
        self._maintainer = None if maintenance is None else Maintainer(open_table, maintenance)
        self._names = names
        self._mode = mode
        self._writes: Writes = Appends(partition_by) if mode == "append" else merges or Merges()
        self._tables: dict[LakeTarget, LakeTable] = {}
        self._registry = Registry(open_table)
        self._reloader = Reloader(open_table, self._writes.partition_by)
        self._loading: int | None = None
        self._stopped = StoppedTables(open_table, self._registry, self._commit)

    def loading(self, reload: int | None) -> None:
        """Rows of the action ``read`` are those of this reload."""
        self._loading = reload

    def deliver(self, batch: MessageBatch) -> Delivery:
        """Commit the messages that their tables do not hold yet, in order."""
        settled = absorbed = 0

        try:
            self._stopped.retry(self._write_part)
            for part, known in batch.bisect(lambda part: self._apply(part.rows), PoisonError):
                if isinstance(known, PoisonError):
                    refused = _refused(part, known)
                    return Delivery(
                        settled, absorbed, refused, stopped=self._stopped.stopped_tables()
                    )
                settled, absorbed = settled + len(part), absorbed + known
        except WalbrookError as error:
            self._forget()
            return Delivery(settled, absorbed, error)
        return Delivery(settled, absorbed, stopped=self._stopped.stopped_tables())

    def probe(self) -> str:
        """Whether the place of the tables can be reached; nothing is written."""
        return self._open_table(GAPS).probe()

    @property
    def held_form(self) -> Form:
        return Form.TYPED

    def read_back(
        self, table: PublishedTable, keys: Collection[Key] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """What the table holds as it is now; nothing if it was never made."""
        there = self._open_table(self._names.of(table.name.schema, table.name.table))
        if there.load() is not None:
            read = held_rows if self._mode == "upsert" else held_history
            yield from read(there, table, keys)

    def close(self) -> None:
        """Forget the tables; the next delivery looks at them again."""
        if self._maintainer is not None:
            self._maintainer.close()
        self._forget()

    def _forget(self) -> None:
        """Read the tables again: they may have been moved or repaired."""
        self._tables.clear()
        self._registry = Registry(self._open_table)
        self._stopped = StoppedTables(self._open_table, self._registry, self._commit)

    def _apply(self, rows: pa.RecordBatch) -> int:
        """Returns how many of the messages were there."""
        if (mark := mark_in(rows)) is not None:
            target = self._names.of(mark.table.schema, mark.table.table)
            at, waits = cursor_at(rows, 0), self._stopped.of(target)
            self._reloader.take(mark, target, self._table(target), at, waits=waits)
            self._tables.pop(shadow_of(target, mark.reload), None)
            return 0
        absorbed = 0
        gaps = pc.equal(rows.column("action"), "gap")
        if gaps.true_count:
            absorbed += self._note_gaps(rows.filter(gaps))
            rows = rows.filter(pc.invert(gaps))
        if not rows.num_rows:
            return absorbed
        cuts = moves_in_parts(rows) if self._mode == "upsert" else None
        for parts in parts_by_version(rows, self._names, cuts):
            absorbed += sum(map(self._apply_part, parts))
        return absorbed

    def _apply_part(self, part: Part[LakeTarget]) -> int:
        """Write a part, or keep it beside its table if that cannot have it."""
        if self._stopped.of(part.target):
            return self._keep(part)
        try:
            return self._write_part(part)
        except OperatorError as error:
            try:
                return self._keep(part, error)
            except OperatorError:
                raise error from None  # it is no matter of one table

    def _keep(self, part: Part[LakeTarget], error: OperatorError | None = None) -> int:
        """Keep a part beside its table. The shadow of a reload takes it all the same."""
        reload, rows = self._reload_of(part.target), part.rows
        if reload and self._shadow_lacks_some(part, reload):
            self._reloader.lost(self._table(part.target), reload)
            reload = 0
        if reload and reload == self._loading:
            rows = rows.filter(pc.not_equal(rows.column("action"), READ))
        absorbed = int(part.rows.num_rows)
        if rows.num_rows:
            absorbed = self._stopped.add(replace(part, rows=rows), error)
        if reload:
            absorbed = min(absorbed, self._apply_to_shadow(part, reload))
        return absorbed

    def _reload_of(self, target: LakeTarget) -> int:
        """The reload that fills a shadow of a table; none if the table cannot be read."""
        try:
            state = self._table(target).load()
        except OperatorError:
            return 0
        return 0 if state is None else state.reload

    def _shadow_lacks_some(self, part: Part[LakeTarget], reload: int) -> bool:
        """Returns True if changes wait that came while the table, and so its reload, was not read.

        The shadow would pass them by its position, so the reload has to begin again.
        """
        shadow = self._table(shadow_of(part.target, reload)).load()
        last = self._stopped.last_waiting(part.target)
        return shadow is not None and shadow.cursor < last < cursor_at(part.rows, 0)

    def _write_part(self, part: Part[LakeTarget]) -> int:
        relation = plan_of(part.version).relation
        merges = self._mode == "upsert"

        def write(table: LakeTable, state: TableState, rows: pa.RecordBatch) -> None:
            if merges and state.relation_oid != relation.oid:
                self._registry.refuse_renamed(part.target, relation, table.place)
            self._registry.note(part.target, state.relation_oid)
            if state.reload and state.reload == self._loading:
                rows = rows.filter(pc.not_equal(rows.column("action"), READ))
            if rows.num_rows:
                self._follow_and_write(table, state, rows, part.version)

        def create(table: LakeTable) -> None:
            self._registry.refuse_lost(part.target, table.place)
            if merges:
                self._registry.refuse_renamed(part.target, relation, table.place)
            schema, begun = self._writes.layout(part.version), TableState(relation_oid=relation.oid)
            table.create(schema, self._writes.partition_by, begun)

        absorbed, reload = self._commit(part.target, part.rows, create, write)
        if reload:
            absorbed = min(absorbed, self._apply_to_shadow(part, reload))
        return absorbed

    def _apply_to_shadow(self, part: Part[LakeTarget], reload: int) -> int:
        """The same with the shadow of the table; returns how many messages it held."""

        def write(table: LakeTable, state: TableState, rows: pa.RecordBatch) -> None:
            self._follow_and_write(table, state, rows, part.version)

        def create(_table: LakeTable) -> None:
            raise _LostShadowError

        try:
            absorbed, _ = self._commit(shadow_of(part.target, reload), part.rows, create, write)
        except _LostShadowError:
            self._reloader.lost(self._table(part.target), reload)
            return int(part.rows.num_rows)
        return absorbed

    def _follow_and_write(
        self, table: LakeTable, state: TableState, rows: pa.RecordBatch, version: str
    ) -> None:
        same_table = state.relation_oid == plan_of(version).relation.oid
        keeps = self._writes.keeps
        state = follow(table, state, version, same_table=same_table, keeps=keeps)
        self._writes.write(table, state, rows, version)
        reached("committed")

    def _note_gaps(self, rows: pa.RecordBatch) -> int:
        """Record gaps in a table beside the rows; there are few."""

        def write(table: LakeTable, state: TableState, rows: pa.RecordBatch) -> None:
            table.commit(table.write(gap_rows(rows)), [], state.moved(cursor_at(rows, -1)))
            reached("committed")

        def create(table: LakeTable) -> None:
            table.create(gap_rows(rows).schema, (), TableState())

        absorbed, _ = self._commit(GAPS, rows, create, write)
        return absorbed

    def _table(self, target: LakeTarget) -> LakeTable:
        if target not in self._tables:
            self._tables[target] = self._open_table(target)
        return self._tables[target]

    def _commit(
        self,
        target: LakeTarget,
        rows: pa.RecordBatch,
        create: Callable[[LakeTable], None],
        write: Callable[[LakeTable, TableState, pa.RecordBatch], None],
    ) -> tuple[int, int]:
        """Write what the table does not hold; again, if another writer was faster.

        Returns how many messages it held, and the reload for which it has a shadow.
        """
        table = self._table(target)
        for attempt in range(1, _TRIES_MAX + 1):
            try:
                if (state := table.load()) is None:
                    create(table)
                    state = table.load()
                    assert state is not None
                known = prefix_at_or_below(rows, state.cursor)
                if known < rows.num_rows:
                    write(table, state, rows.slice(known))
                    # A shadow may be removed at any time, and a merge would bring files back.
                    if self._maintainer is not None and not is_shadow(target):
                        self._maintainer.wrote(target)
            except ConflictError:
                if attempt == _TRIES_MAX:
                    raise
                continue
            return known, state.reload
        raise AssertionError("the last attempt returns or raises")


def _refused(message: MessageBatch, error: PoisonError) -> PoisonError:
    return PoisonError(
        f"the message at {message.cursor(0)} has no place in its table: {error.what}",
        fix=error.fix,
        detail=error.detail,
    )

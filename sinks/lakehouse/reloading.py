"""Reloads: a table of its own is the shadow of another one, until one commit takes its rows over.

The commit writes the shadow's rows as new files of the table and removes all older ones, so the
table keeps its place, its name and its history of versions.

Invariants: the state of the table names its reload, and moves in the commits of its rows: a process
that loads the table knows whether there is a shadow. The shadow has a position of its own, which
begins where the reload does. A shadow belongs to one reload, and its name comes never again. It is
removed only when its reload has ended: a replaced process may begin once more what goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from typing import Final

import pyarrow as pa
import structlog

from cdc.backfill.ranges import ReloadStep
from cdc.backfill.reload import ReloadMark
from cdc.cursor import Cursor
from cdc.errors import OperatorError
from cdc.failpoints import reached
from sinks.lakehouse.files import in_schema
from sinks.lakehouse.names import GAPS, LakeTarget
from sinks.lakehouse.table import ConflictError, LakeTable, TableState

_logger = structlog.get_logger("walbrook.sink.lakehouse")

_SCHEMA: Final = GAPS.schema
_PREFIX: Final = "reload-"
_TRIES_MAX: Final = 10
_ROWS_TOGETHER: Final = 200_000  # of the shadow's files, in one of the table


def shadow_of(target: LakeTarget, reload: int) -> LakeTarget:
    """Where the shadow of a table is during a reload."""
    digest = sha256(target.folder.encode()).hexdigest()[:12]
    return LakeTarget(_SCHEMA, f"{_PREFIX}{reload}-{digest}")


def is_shadow(target: LakeTarget) -> bool:
    return target.schema == _SCHEMA and target.name.startswith(_PREFIX)


class Reloader:
    """Does what marks say, for one consumer."""

    def __init__(
        self, open_table: Callable[[LakeTarget], LakeTable], partition_by: tuple[str, ...]
    ) -> None:
        self._open_table = open_table
        self._partition_by = partition_by

    def take(
        self,
        mark: ReloadMark,
        target: LakeTarget,
        table: LakeTable,
        at: Cursor,
        *,
        waits: bool = False,
    ) -> None:
        """Do what a mark at this place says of the table of a target; again if it was done.

        ``waits``: changes of the table wait. It then keeps its position until the swap, because
        these changes are written at their own place if the reload is cancelled.
        """
        steps = {
            ReloadStep.BEGIN: self._begin,
            ReloadStep.SWAP: self._swap,
            ReloadStep.DROP: self._end,
        }
        for attempt in range(1, _TRIES_MAX + 1):
            state = table.load()
            if state is not None and at <= state.cursor:
                break
            try:
                steps[mark.step](mark.reload, target, table, state, at, waits)
                reached("committed")
                break
            except ConflictError:
                if attempt == _TRIES_MAX:
                    raise
        if mark.step is not ReloadStep.BEGIN:
            self.shadow(target, mark.reload).drop()

    def shadow(self, target: LakeTarget, reload: int) -> LakeTable:
        return self._open_table(shadow_of(target, reload))

    def lost(self, table: LakeTable, reload: int) -> None:
        """The shadow of a table was removed: changes go on without it."""
        state = table.load()
        if state is None or state.reload != reload:
            return
        _logger.warning("lakehouse.shadow_lost", table=table.place, reload=reload)
        table.commit([], [], replace(state.moved(state.cursor), reload=0))

    def _begin(
        self,
        reload: int,
        target: LakeTarget,
        table: LakeTable,
        state: TableState | None,
        at: Cursor,
        waits: bool,
    ) -> None:
        if state is None:
            raise OperatorError(
                f"there is no table at {table.place} yet, so there is nothing to reload",
                fix="cancel the backfill, and start it without reload",
                kind="no_table",
            )
        if state.reload and state.reload != reload:
            self.shadow(target, state.reload).drop()
        shadow = self.shadow(target, reload)
        if shadow.load() is None:
            begun = TableState(cursor=at, relation_oid=state.relation_oid)
            shadow.create(table.schema, self._partition_by, begun)
        elif shadow.files():  # that of a process that was killed here has none
            raise _overtaken(table)
        reached("written")
        table.commit([], [], replace(state.moved(state.cursor if waits else at), reload=reload))

    def _swap(
        self,
        reload: int,
        target: LakeTarget,
        table: LakeTable,
        state: TableState | None,
        at: Cursor,
        _waits: bool,
    ) -> None:
        shadow = self.shadow(target, reload)
        if state is None or state.reload != reload or shadow.load() is None:
            if table.load() != state:
                raise _overtaken(table)
            raise OperatorError(
                f"the table at {table.place} has no shadow that could take its place: somebody has "
                "removed it, or the sink was rewound into another generation",
                fix="cancel the backfill and start it again",
                kind="no_shadow",
            )
        added = [file for rows in _rows_of(shadow) for file in table.write(rows)]
        reached("written")
        table.replace(added, shadow.schema, replace(state.moved(at), reload=0))
        _logger.info("lakehouse.table_swapped", table=table.place, reload=reload)

    def _end(
        self,
        reload: int,
        _target: LakeTarget,
        table: LakeTable,
        state: TableState | None,
        at: Cursor,
        waits: bool,
    ) -> None:
        if state is not None and state.reload == reload:
            table.commit([], [], replace(state.moved(state.cursor if waits else at), reload=0))


def _overtaken(table: LakeTable) -> ConflictError:
    return ConflictError(
        f"another process goes on with the reload of the table at {table.place}",
        fix="it is retried",
    )


def _rows_of(shadow: LakeTable) -> Iterator[pa.Table]:
    """The rows of a shadow, in pieces that are worth a file."""
    together: list[pa.Table] = []
    count = 0
    for file in shadow.files():
        rows = in_schema(shadow.read(file, shadow.schema.names), shadow.schema, shadow.place)
        if together and count + rows.num_rows > _ROWS_TOGETHER:
            yield pa.concat_tables(together)
            together, count = [], 0
        together.append(rows)
        count += rows.num_rows
    if count:
        yield pa.concat_tables(together)

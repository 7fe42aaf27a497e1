"""Tables that equal those of the source: the last change per key of a batch, in a few statements.

Rows are copied into a temporary table; one statement per table deletes, one upserts. Truncates come
first, then deletes, a table that refers to another before it, then upserts the other way round, so
that foreign keys hold at each statement; those that are deferrable are deferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.errors import OperatorError
from sinks.postgres.loading import Loader
from sinks.postgres.position import PositionRow
from sinks.postgres.reloading import Shadows
from sinks.postgres.stage import KEPT, NUMBER, OP, Stage, Stages, names
from sinks.postgres.tables import Tables, TargetLayout
from sinks.postgres.target import Target, TargetNames
from sinks.tables.fold import Counted, Folded, count_rows, fold, is_move, moves_in_parts
from sinks.tables.parts import Part, parts_by_version
from sinks.tables.versions import is_row_identity

_DELETE = "DELETE FROM {target} t USING {stage} s WHERE s.{op} = 'd' AND {by_key}"
_UPSERT = """
INSERT INTO {target} ({columns}) OVERRIDING SYSTEM VALUE
SELECT {columns} FROM {stage} WHERE {op} = 'u' ON CONFLICT ({key}) DO {action}
"""
_UPDATE = "UPDATE {target} t SET {assigned} FROM {stage} s WHERE s.{op} = 'k' AND {by_key}"
_MOVE = """
UPDATE {target} t SET {assigned} FROM {stage} s JOIN {stage} o USING ({number})
 WHERE s.{op} = 'k' AND o.{op} = 'o' AND {by_key}
"""
# The source has one row per key, so what stands under the new key beside the row itself has gone
# there. Its delete may have been lost with a slot; the repair that finds it comes later.
_DISPLACE = """
DELETE FROM {target} t USING {stage} s JOIN {stage} o USING ({number})
 WHERE s.{op} = 'k' AND o.{op} = 'o' AND {by_new_key}
   AND EXISTS (SELECT FROM {target} t WHERE {by_key})
"""
# After a rewind a row may be there under its later key already, with the values that are not sent:
# that one stays, and the one under the old key goes.
_ARRIVE = """
UPDATE {target} t SET {assigned} FROM {stage} s JOIN {stage} o USING ({number})
 WHERE s.{op} = 'k' AND o.{op} = 'o' AND {by_new_key}
   AND EXISTS (SELECT FROM {target} t WHERE {by_key})
"""
_LEAVE = """
DELETE FROM {target} t USING {stage} s JOIN {stage} o USING ({number})
 WHERE s.{op} = 'k' AND o.{op} = 'o' AND {by_key}
   AND EXISTS (SELECT FROM {target} t WHERE {by_new_key})
"""
# A row that the destination has never had, with what is known of it. One that is there is not even
# tried: the columns that its update left out would be null, which the target may not allow.
_ADD = """
INSERT INTO {target} ({columns}) OVERRIDING SYSTEM VALUE
SELECT {columns} FROM {stage} s
 WHERE s.{op} = 'k' AND NOT EXISTS (SELECT FROM {target} t WHERE {by_key})
    ON CONFLICT DO NOTHING
"""
_INSERT = """
INSERT INTO {target} ({columns}) OVERRIDING SYSTEM VALUE
SELECT {columns} FROM {stage} WHERE {op} = 'u'
"""
# Of equal rows as many as were deleted; nothing else tells them apart.
_DELETE_COUNTED = """
DELETE FROM {target} WHERE ctid IN (
    SELECT place FROM (
        SELECT t.ctid AS place, s.{number} AS times,
               row_number() OVER (PARTITION BY ROW({of_target})::text) AS nth
          FROM {target} t JOIN {stage} s ON ROW({of_target})::text = ROW({of_stage})::text
         WHERE s.{op} = 'd') found
     WHERE nth <= times)
"""
# Foreign keys that refer to some of the tables: the places of both, null for one not given.
_REFERENCES = """
WITH given AS (SELECT * FROM unnest(%s::regclass[]) WITH ORDINALITY AS g (id, place))
SELECT DISTINCT child.place, parent.place
  FROM given parent
  JOIN pg_constraint f ON f.contype = 'f' AND f.confrelid = parent.id AND f.conrelid <> f.confrelid
  LEFT JOIN given child ON child.id = f.conrelid
"""
SETTINGS = {"enable_hashjoin": "off", "enable_mergejoin": "off"}
"""A target may be large and a stage is not: each row of the stage is looked up by the key."""

_BY_HASH, _BY_KEY = "SET LOCAL enable_hashjoin = on", "SET LOCAL enable_hashjoin = off"


_Reference = tuple[Target | None, Target]
"""A foreign key: the target that has it, None for another table, and the one that it names."""


@dataclass(frozen=True)
class _Work:
    """What is to be done to one target."""

    stage: Stage
    truncated: bool
    removes: bool
    upserts: bool
    updates: bool = False  # some rows keep columns that the source did not send
    moves: bool = False  # and these stand under another key
    repeats: bool = False  # after a rewind: the target may have later rows
    counted: bool = False  # rows are known by all their values

    @property
    def target(self) -> Target:
        return self.stage.layout.target


class Mirror:
    """Applies batches to the target tables of one consumer."""

    def __init__(self, tables: Tables, target_names: TargetNames, shadows: Shadows) -> None:
        self._tables = tables
        self._shadows = shadows
        self._names = target_names
        self._stages = Stages()
        self._loader = Loader()
        self._orders: dict[tuple[Target, ...], list[Target]] = {}
        self._refer = False  # whether some targets have foreign keys to each other

    def forget(self) -> None:
        """After a rollback nothing of what was made is there."""
        self._tables.forget()
        self._stages.forget()
        self._orders.clear()

    def begin_again(self, _connection: Connection, _first: Cursor) -> None:
        """What comes again is applied by key once more."""

    def apply(self, connection: Connection, rows: pa.RecordBatch, position: PositionRow) -> None:
        """Apply changes of tables in their order."""
        self._stages.begin(connection)
        for given in parts_by_version(rows, self._names, moves_in_parts(rows)):
            parts = self._shadows.with_shadows(connection, given, position)
            alone = len(parts) == 1  # the order of tables that refer to each other is kept
            prepared = [self._prepare(connection, part, position, alone=alone) for part in parts]
            works = [work for work in prepared if work is not None]
            order = self._referring_first(connection, sorted({work.target for work in works}))
            if self._refer:
                connection.execute("SET CONSTRAINTS ALL DEFERRED")
            works.sort(key=lambda work: order.index(work.target))
            _truncate(connection, [work.target for work in works if work.truncated])
            for work in works:
                _delete(connection, work)
            for work in reversed(works):
                _write(connection, work)

    def _prepare(
        self, connection: Connection, part: Part[Target], position: PositionRow, *, alone: bool
    ) -> _Work | None:
        """Copy what is left of a part to its stage; None if nothing is to be done with it."""
        layout = self._tables.layout(connection, part)
        if alone and self._loader.load(connection, layout, part.rows):
            return None
        stage = self._stages.of(connection, layout)
        if is_row_identity(layout.relation):
            if part.first <= position.repeats:
                after = Cursor(position.repeats.lsn, position.repeats.idx + 1)
                raise OperatorError(
                    f"{layout.relation} has no key, so its changes cannot be repeated after a "
                    "rewind",
                    fix=f"go on where the sink stood, by walbrook skip-to with the sink's name and "
                    f"{after}, and mend its tables with a key by walbrook verify --repair; or "
                    f"empty {layout.target}, and deliver the table by a sink with another name "
                    "and start_at: earliest, or leave it out with source.exclude_tables",
                )
            return _counted(connection, stage, count_rows(part.rows))
        if is_move(part.rows):
            return _moved(connection, stage, part.rows, repeats=part.first <= position.repeats)
        return _folded(connection, stage, fold(part.rows))

    def _referring_first(self, connection: Connection, targets: list[Target]) -> list[Target]:
        """The targets, each before those that its foreign keys name."""
        if len(targets) < 2:
            return targets
        known = self._orders.get(tuple(targets))
        if known is None:
            references = _references(connection, targets)
            self._refer |= bool(references)
            known = self._orders[tuple(targets)] = _ordered(targets, references)
        return known


def _ordered(targets: list[Target], references: list[_Reference]) -> list[Target]:
    sorter: TopologicalSorter[Target] = TopologicalSorter(dict.fromkeys(targets, ()))
    for child, parent in references:
        if child is not None:
            sorter.add(parent, child)
    try:
        return list(sorter.static_order())
    except CycleError:
        return targets  # such keys must be deferrable


def _truncate(connection: Connection, targets: list[Target]) -> None:
    """Empty tables; what another table refers to can only be emptied row by row."""
    if not targets:
        return
    if _references(connection, targets):
        for target in targets:
            connection.execute(sql.SQL("DELETE FROM {}").format(target.identifier))
        return
    tables = sql.SQL(", ").join(target.identifier for target in targets)
    connection.execute(sql.SQL("TRUNCATE {}").format(tables))


def _folded(connection: Connection, stage: Stage, folded: Folded) -> _Work | None:
    kept = folded.kept.is_valid()
    lines = [stage.lines("d", folded.deletes)]
    if kept.true_count:
        partial = folded.upserts.filter(kept)
        lines.append(stage.lines("k", partial, kept=folded.kept.filter(kept)))
        upserts = folded.upserts.filter(pc.invert(kept))
    else:
        upserts = folded.upserts
    lines.append(stage.lines("u", upserts))
    work = _Work(
        stage, folded.truncated, bool(len(folded.deletes)), bool(len(upserts)), kept.true_count > 0
    )
    return _filled(connection, work, lines)


def _moved(
    connection: Connection, stage: Stage, rows: pa.RecordBatch, *, repeats: bool
) -> _Work | None:
    numbers = pa.array(np.arange(rows.num_rows))
    lines = [
        stage.lines("o", rows.column("old_row_text"), number=numbers),
        stage.lines("k", rows.column("row_text"), number=numbers, kept=rows.column("unchanged")),
    ]
    work = _Work(stage, False, False, False, moves=True, repeats=repeats)
    return _filled(connection, work, lines)


def _counted(connection: Connection, stage: Stage, counted: Counted) -> _Work | None:
    lines = [
        stage.lines("d", counted.deletes, number=pa.array(counted.times)),
        stage.lines("u", counted.inserts),
    ]
    deletes, inserts = bool(len(counted.deletes)), bool(len(counted.inserts))
    work = _Work(stage, counted.truncated, deletes, inserts, counted=True)
    return _filled(connection, work, lines)


def _filled(connection: Connection, work: _Work, lines: list[pa.StringArray]) -> _Work | None:
    some = [each for each in lines if len(each)]
    if some:
        work.stage.fill(connection, some)
    return work if some or work.truncated else None


def _delete(connection: Connection, work: _Work) -> None:
    if not work.removes:
        return
    if work.counted:
        connection.execute(_BY_HASH)
        _run(connection, _DELETE_COUNTED, work.stage)
        connection.execute(_BY_KEY)
        return
    _run(connection, _DELETE, work.stage)


def _write(connection: Connection, work: _Work) -> None:
    stage = work.stage
    if work.moves or work.updates:
        if work.moves:
            connection.execute(_BY_HASH)
            before = [_ARRIVE, _LEAVE] if work.repeats else [_DISPLACE]
            for statement in [*before, _MOVE]:
                by_new_key = _by_key(stage.layout, "s")
                _run(connection, statement, stage, of="o", by_new_key=by_new_key)
            connection.execute(_BY_KEY)
        else:
            _run(connection, _UPDATE, stage)
        _run(connection, _ADD, stage)
    if work.upserts and work.counted:
        _run(connection, _INSERT, stage)
    elif work.upserts:
        _run(connection, _UPSERT, stage, action=_on_conflict(stage.layout))


def _run(
    connection: Connection,
    statement: str,
    stage: Stage,
    *,
    of: str = "s",
    **more: sql.Composable,
) -> None:
    layout = stage.layout
    given: dict[str, sql.Composable] = {
        "target": layout.target.identifier, "stage": stage.name, "op": OP, "number": NUMBER,
        "columns": stage.columns, "key": names(layout.key), "by_key": _by_key(layout, of),
        "assigned": _assigned(layout), "of_target": _of("t", layout), "of_stage": _of("s", layout),
        **more,
    }  # fmt: skip
    connection.execute(sql.SQL(statement).format(**given))


def _by_key(layout: TargetLayout, of: str) -> sql.Composable:
    pairs = [
        sql.SQL("{} = {}").format(sql.Identifier("t", name), sql.Identifier(of, name))
        for name in layout.key
    ]
    return sql.SQL(" AND ").join(pairs)


def _on_conflict(layout: TargetLayout) -> sql.Composable:
    others = [name for name in layout.columns if name not in layout.key]
    if not others:
        return sql.SQL("NOTHING")
    pairs = [
        sql.SQL("{} = excluded.{}").format(sql.Identifier(name), sql.Identifier(name))
        for name in others
    ]
    return sql.SQL("UPDATE SET ") + sql.SQL(", ").join(pairs)


def _assigned(layout: TargetLayout) -> sql.Composable:
    """The columns of an update, each kept if its name at the source is among the kept ones."""
    pairs = [
        sql.SQL("{} = CASE WHEN s.{} ? {} THEN t.{} ELSE s.{} END").format(
            sql.Identifier(name), KEPT, sql.Literal(column.name), *[sql.Identifier(name)] * 2
        )
        for column, name in zip(layout.relation.columns, layout.names, strict=True)
        if name is not None
    ]
    return sql.SQL(", ").join(pairs)


def _of(alias: str, layout: TargetLayout) -> sql.Composable:
    return sql.SQL(", ").join(sql.Identifier(alias, name) for name in layout.columns)


def _references(connection: Connection, targets: Sequence[Target]) -> list[_Reference]:
    """The foreign keys to some of the targets."""
    tables = [target.identifier.as_string(connection) for target in targets]
    rows = connection.execute(_REFERENCES, (tables,)).fetchall()
    return [
        (None if child is None else targets[int(str(child)) - 1], targets[int(str(parent)) - 1])
        for child, parent in rows
    ]

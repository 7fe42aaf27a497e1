"""Reloads: a shadow stands beside a target until it takes its place, in one transaction.

The shadow is a table in the sink's own schema. What takes the place are its rows, not the table
itself: views, foreign keys, grants, indexes and triggers hang on the target, which stays. Rows of a
mirror that are equal are left alone, and readers of the target are never held up.

Invariants: which shadows there are is part of the position, and moves with it. A shadow that has
missed a change, because its table came under another name, is dropped and never swapped in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256

import psycopg
import pyarrow.compute as pc
import structlog
from psycopg import sql

from cdc.backfill.ranges import ReloadStep
from cdc.backfill.reload import ReloadMark
from cdc.change import READ
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.cursor_columns import prefix_at_or_below
from cdc.decoding.relation import Relation
from cdc.decoding.row_texts import relation_of
from cdc.errors import OperatorError
from sinks.postgres.errors import from_postgres, is_of_a_row
from sinks.postgres.position import Owner, PositionRow, Positions, Shadow
from sinks.postgres.tables import Tables
from sinks.postgres.target import NAME_BYTES_MAX, Target, TargetNames
from sinks.tables.parts import Part
from sinks.tables.versions import is_row_identity, key_names

_logger = structlog.get_logger("walbrook.sink.postgres")

_VERSION = """
SELECT table_version FROM {own}.tables
 WHERE target_schema = %s AND target_table = %s AND source = %s AND consumer = %s
"""
_FOLLOW = """
INSERT INTO {own}.tables (target_schema, target_table, source, consumer, relation_oid,
                          table_version, since_lsn, since_idx, routed)
SELECT %s, %s, source, consumer, relation_oid, table_version, since_lsn, since_idx, true
  FROM {own}.tables WHERE target_schema = %s AND target_table = %s
"""
_FORGET = "DELETE FROM {own}.tables WHERE target_schema = %s AND target_table = %s"
_MAKE = "CREATE TABLE {shadow} AS SELECT {columns} FROM {target} WITH NO DATA"
_ADD_KEY = "ALTER TABLE {shadow} ADD PRIMARY KEY ({key})"
# The tables are as large as each other, and are gone through once.
_SETTINGS = """
SET LOCAL statement_timeout = 0;
SET LOCAL enable_hashjoin = on;
SET LOCAL enable_mergejoin = on;
SET CONSTRAINTS ALL DEFERRED;
"""
_GONE = "DELETE FROM {target} t WHERE NOT EXISTS (SELECT FROM {shadow} s WHERE {by_key})"
_DIFFERENT = """
UPDATE {target} t SET {assigned} FROM {shadow} s
 WHERE {by_key} AND ROW({of_target})::record OPERATOR(pg_catalog.*<>) ROW({of_shadow})::record
"""
_NEW = """
INSERT INTO {target} ({columns}) OVERRIDING SYSTEM VALUE
SELECT {columns} FROM {shadow} s WHERE NOT EXISTS (SELECT FROM {target} t WHERE {by_key})
"""
_EMPTY = "DELETE FROM {target}"
_ALL = "INSERT INTO {target} ({columns}) SELECT {columns} FROM {shadow}"


class Shadows:
    """Those of one consumer."""

    def __init__(
        self, positions: Positions, owner: Owner, tables: Tables, names: TargetNames, *,
        history: bool,
    ) -> None:  # fmt: skip
        self._positions = positions
        self._owner = owner
        self._tables = tables
        self._names = names
        self._history = history
        self.loading: int | None = None
        """The reload that rows of the action ``read`` are for, if they are for any."""

    def with_shadows(
        self, connection: Connection, parts: Iterable[Part[Target]], position: PositionRow
    ) -> list[Part[Target]]:
        """The parts of a stretch, and beside them those that go to shadows."""
        if not position.shadows:
            return list(parts)
        parts = list(parts)
        self._drop_missed(connection, parts, position)
        return [each for part in parts for each in self._doubled(part, position)]

    def take(
        self, connection: Connection, mark: ReloadMark, at: Cursor, position: PositionRow
    ) -> None:
        """Do what a mark at this place says."""
        target = self._names.of(mark.table.schema, mark.table.table)
        there = position.shadows.get(target)
        if mark.step is ReloadStep.BEGIN:
            self._begin(connection, mark.reload, target, at, position)
            return
        if there is not None and there.reload != mark.reload:
            there = None
        if mark.step is ReloadStep.SWAP:
            self._swap(connection, target, there)
        if there is not None:
            self._drop(connection, there, position)

    def _doubled(self, part: Part[Target], position: PositionRow) -> Iterator[Part[Target]]:
        shadow = position.shadows.get(part.target)
        if shadow is None or relation_of(part.version).oid != shadow.relation_oid:
            yield part
            return
        rows = part.rows
        if self.loading == shadow.reload:
            rows = rows.filter(pc.not_equal(rows.column("action"), READ))
        if rows.num_rows:
            yield Part(part.target, part.version, part.routed, rows)
        # After a rewind older changes come again.
        rows = part.rows.slice(prefix_at_or_below(part.rows, shadow.begun))
        if rows.num_rows:
            # As routed, so that it is not taken for the table under an older name.
            yield Part(shadow.place, part.version, True, rows)

    def _drop_missed(
        self, connection: Connection, parts: Iterable[Part[Target]], position: PositionRow
    ) -> None:
        """Drop shadows whose table goes to another target now."""
        moved = {
            shadow.target: shadow
            for part in parts
            for shadow in position.shadows.values()
            if part.target != shadow.target and relation_of(part.version).oid == shadow.relation_oid
        }
        for shadow in moved.values():
            self._drop(connection, shadow, position)

    def _begin(
        self, connection: Connection, reload: int, target: Target, at: Cursor, position: PositionRow
    ) -> None:
        relation = self._followed(connection, target)
        if relation is None:
            raise OperatorError(
                f"{target} is not there yet, so there is nothing to reload",
                fix="cancel the backfill, and start it without reload",
                kind="no_table",
            )
        key = key_names(relation)
        if not self._history and (not key or is_row_identity(relation)):
            raise OperatorError(
                f"{relation} has no primary key, so its rows cannot be matched with changes",
                fix="cancel the backfill; empty the table and rewind, or give it a primary key",
                kind="no_key",
            )
        shadow = Shadow(reload, target, relation.oid, self._place_of(target), at)
        self._drop(connection, shadow, position)
        columns = self._tables.columns(connection, target)
        if not self._history:
            columns = [column.name for column in relation.columns]
        given = _named(shadow, columns, key)
        connection.execute(sql.SQL(_MAKE).format(**given))
        if not self._history:
            connection.execute(sql.SQL(_ADD_KEY).format(**given))
        place = shadow.place
        connection.execute(
            self._positions.statement(_FOLLOW),
            (place.schema, place.name, target.schema, target.name),
        )
        position.shadows[target] = shadow
        self._positions.save_shadows(connection, position.shadows)

    def _swap(self, connection: Connection, target: Target, shadow: Shadow | None) -> None:
        followed = self._followed(connection, target)
        if shadow is None or followed is None or followed.oid != shadow.relation_oid:
            raise OperatorError(
                f"{target} has no shadow that could take its place: its table was renamed or made "
                "anew, or its sink was rewound into another place",
                fix="cancel the backfill and start it again",
                kind="no_shadow",
            )
        try:
            connection.execute(_SETTINGS)
            relation = self._tables.bring(connection, target, shadow.place)
            columns = self._tables.columns(connection, shadow.place)
            given = _named(shadow, columns, key_names(relation))
            for statement in self._statements(columns, key_names(relation)):
                connection.execute(sql.SQL(statement).format(**given))
        except psycopg.Error as error:
            if not is_of_a_row(error):
                raise
            raise OperatorError(
                from_postgres(error, str(target)).what,
                fix="if another table refers to rows that are gone, or lacks rows that these refer "
                "to, reload that one first; then retry the backfill",
                kind="swap_refused",
                detail=str(error),
            ) from None
        _logger.info("postgres.table_swapped", table=str(target), reload=shadow.reload)

    def _statements(self, columns: list[str], key: tuple[str, ...]) -> list[str]:
        if self._history:
            return [_EMPTY, _ALL]
        return [_GONE, *([_DIFFERENT] if len(columns) > len(key) else []), _NEW]

    def _drop(self, connection: Connection, shadow: Shadow, position: PositionRow) -> None:
        """Remove a shadow; there may be none."""
        place = shadow.place
        connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(place.identifier))
        connection.execute(self._positions.statement(_FORGET), (place.schema, place.name))
        self._tables.forget()
        position.shadows.pop(shadow.target, None)
        self._positions.save_shadows(connection, position.shadows)

    def _followed(self, connection: Connection, target: Target) -> Relation | None:
        """The source's table that a target of this consumer follows."""
        owner = (self._owner.source, self._owner.consumer)
        row = connection.execute(
            self._positions.statement(_VERSION), (target.schema, target.name, *owner)
        ).fetchone()
        return None if row is None else relation_of(str(row[0]))

    def _place_of(self, target: Target) -> Target:
        """The same for every reload of a target, so that none is ever left over."""
        ending = "_" + sha256(f"{self._owner}/{target}".encode()).hexdigest()[:12]
        beginning = f"reload_{target.name}".encode()[: NAME_BYTES_MAX - len(ending)]
        return Target(self._positions.schema, beginning.decode(errors="ignore") + ending)


def _named(shadow: Shadow, columns: list[str], key: tuple[str, ...]) -> dict[str, sql.Composable]:
    """What statements over both tables are made of."""

    def each(form: str, names: Iterable[str], between: str) -> sql.Composable:
        written = [sql.SQL(form).format(sql.Identifier(name)) for name in names]
        return sql.SQL(between).join(written)

    others = [name for name in columns if name not in key]
    return {
        "target": shadow.target.identifier,
        "shadow": shadow.place.identifier,
        "columns": each("{}", columns, ", "),
        "key": each("{}", key, ", "),
        "by_key": each("t.{0} = s.{0}", key, " AND "),
        "assigned": each("{0} = s.{0}", others, ", "),
        "of_target": each("t.{}", columns, ", "),
        "of_shadow": each("s.{}", columns, ", "),
    }

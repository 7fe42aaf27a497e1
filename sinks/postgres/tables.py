"""The target tables: created, adopted and altered as the source's tables are, within a delivery.

Invariants: a target is altered in the transaction that applies the first rows of the new version; a
target belongs to one consumer; a version that comes again after a rewind alters nothing, and its
rows are written into the columns that there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
import structlog
from psycopg import sql

from cdc.connection import Connection
from cdc.cursor import Cursor, cursor_of, format_lsn
from cdc.decoding.relation import Column, Relation
from cdc.decoding.row_texts import relation_of
from cdc.decoding.schema_change import same_table
from cdc.errors import OperatorError
from sinks.base import UNFIT_TABLE
from sinks.postgres.columns import column_type
from sinks.postgres.errors import is_of_a_row
from sinks.postgres.position import Owner, Positions
from sinks.postgres.target import NAME_BYTES_MAX, Target, TargetNames
from sinks.tables.parts import Part
from sinks.tables.versions import differences, is_row_identity, key_names, names_in

_logger = structlog.get_logger("walbrook.sink.postgres")

OWN_COLUMNS = (
    ("walbrook_generation", "integer NOT NULL"),
    ("walbrook_action", "text NOT NULL"),
    ("walbrook_lsn", "pg_lsn NOT NULL"),
    ("walbrook_idx", "bigint NOT NULL"),
    ("walbrook_committed_at", "timestamp with time zone NOT NULL"),
    ("walbrook_old_key", "jsonb"),
    ("walbrook_unchanged", "jsonb"),
)
"""What a row of a history has before the columns of its table."""

_READ = """
SELECT source, consumer, table_version, since_lsn::text, since_idx
  FROM {own}.tables WHERE target_schema = %s AND target_table = %s
"""
_RENAMED = """
SELECT target_schema, target_table, table_version, since_lsn::text, since_idx FROM {own}.tables
 WHERE source = %s AND consumer = %s AND relation_oid = %s AND NOT routed
"""
_WRITE = """
INSERT INTO {own}.tables (target_schema, target_table, source, consumer, relation_oid,
                          table_version, since_lsn, since_idx, routed)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)
    ON CONFLICT (target_schema, target_table) DO UPDATE
   SET relation_oid = excluded.relation_oid, table_version = excluded.table_version,
       since_lsn = excluded.since_lsn, since_idx = excluded.since_idx, routed = excluded.routed
"""
_BOTH = """
SELECT t.table_version, o.table_version FROM {own}.tables t, {own}.tables o
 WHERE (t.target_schema, t.target_table) = (%s, %s)
   AND (o.target_schema, o.target_table) = (%s, %s)
"""
_SAME = """
UPDATE {own}.tables t
   SET table_version = o.table_version, since_lsn = o.since_lsn, since_idx = o.since_idx
  FROM {own}.tables o
 WHERE (t.target_schema, t.target_table) = (%s, %s)
   AND (o.target_schema, o.target_table) = (%s, %s)
"""
_MOVED = """
UPDATE {own}.tables SET target_schema = %s, target_table = %s
 WHERE target_schema = %s AND target_table = %s
"""
_COLUMNS = """
SELECT a.attname FROM pg_attribute a WHERE a.attrelid = to_regclass(%s)
   AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
_UNIQUE = """
SELECT EXISTS (
    SELECT FROM pg_index i
     WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indisvalid AND i.indimmediate
       AND i.indpred IS NULL AND i.indexprs IS NULL
       AND ARRAY(SELECT a.attname::text FROM pg_attribute a
                  WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])
                  ORDER BY 1) = %s::text[])
"""


@dataclass(frozen=True)
class TargetLayout:
    """Where the values of a version's rows go."""

    target: Target
    relation: Relation  # of the rows
    names: tuple[str | None, ...]  # the target's column per column of the rows; None: no place
    key: tuple[str, ...]  # the target's columns by which a row is known; none: by all of them
    number: int  # no two layouts have the same

    @property
    def columns(self) -> tuple[str, ...]:
        """The target's columns that rows of this version have."""
        return tuple(name for name in self.names if name is not None)

    @property
    def is_partial(self) -> bool:
        """Whether some columns of the rows have no place."""
        return None in self.names


@dataclass(frozen=True)
class _Followed:
    """The version that a target follows."""

    relation: Relation
    since: Cursor


class Tables:
    """The target tables of one consumer; what is known of them holds until ``forget``."""

    def __init__(
        self, positions: Positions, owner: Owner, names: TargetNames, *, history: bool
    ) -> None:
        self._positions = positions
        self._owner = owner
        self._names = names
        self._history = history
        self._layouts: dict[tuple[Target, str], TargetLayout] = {}
        self._followed: dict[Target, _Followed] = {}
        self._made = 0

    def forget(self) -> None:
        """After a rollback nothing of what was done is there."""
        self._layouts.clear()
        self._followed.clear()

    def layout(self, connection: Connection, part: Part[Target]) -> TargetLayout:
        """The layout for these rows; the target is made or altered if it must be."""
        relation = relation_of(part.version)
        known = self._layouts.get((part.target, part.version))
        followed = self._followed.get(part.target)
        if (
            known is not None
            and followed is not None
            and (followed.relation is relation or part.first <= followed.since)
        ):
            return known
        self._refuse_unusable(relation, part.target)
        try:
            followed = self._follow(connection, part, relation)
        except psycopg.Error as error:
            if not is_of_a_row(error):
                raise
            raise OperatorError(
                f"{part.target} cannot be altered as {relation} was: its own rows do not fit "
                f"(SQLSTATE {error.sqlstate})",
                fix="alter the table by hand, or drop it together with its row in the table tables "
                "of own_schema, and rewind",
                detail=str(error),
            ) from None
        current = followed.relation
        names: tuple[str | None, ...] = tuple(column.name for column in relation.columns)
        if not same_table(current, relation):
            names = names_in(current, relation)
        key = () if self._history else key_names(current)
        self._made += 1
        layout = TargetLayout(part.target, relation, names, key, self._made)
        self._layouts[part.target, part.version] = layout
        return layout

    def bring(self, connection: Connection, target: Target, other: Target) -> Relation:
        """Alter a target to the version of the same table that another target follows."""
        rows = connection.execute(
            self._positions.statement(_BOTH), (*_names(target), *_names(other))
        ).fetchone()
        assert rows is not None
        old, new = (relation_of(str(version)) for version in rows)
        if not same_table(old, new):
            self._alter(connection, target, old, new)
            self.forget()
        connection.execute(self._positions.statement(_SAME), (*_names(target), *_names(other)))
        return new

    def _follow(self, connection: Connection, part: Part[Target], relation: Relation) -> _Followed:
        """Bring the target to the version of these rows, unless it follows a later one."""
        followed = self._followed.get(part.target) or self._read(connection, part)
        if not part.routed and (followed is None or followed.relation.oid != relation.oid):
            followed = self._renamed(connection, part, relation, followed) or followed
        if followed is None:
            self._make(connection, part.target, relation)
        elif same_table(followed.relation, relation) or part.first <= followed.since:
            self._followed[part.target] = followed
            return followed
        else:
            self._alter(connection, part.target, followed.relation, relation)
            self._layouts = {k: v for k, v in self._layouts.items() if k[0] != part.target}
        followed = _Followed(relation, part.first)
        self._write(connection, part, followed)
        self._followed[part.target] = followed
        return followed

    def _read(self, connection: Connection, part: Part[Target]) -> _Followed | None:
        target = part.target
        row = connection.execute(
            self._positions.statement(_READ), (target.schema, target.name)
        ).fetchone()
        if row is None:
            return None
        source, consumer, version, lsn, idx = row
        owner = Owner(str(source), str(consumer))
        if owner != self._owner:
            raise OperatorError(
                f"{target} is written by {owner}, and a table belongs to one sink",
                fix="give the sink another target (table, target_schema or routing); if the other "
                "one has gone for good, delete the table's row in the table tables of own_schema",
            )
        return _Followed(relation_of(str(version)), cursor_of(lsn, idx))

    def _renamed(
        self,
        connection: Connection,
        part: Part[Target],
        relation: Relation,
        there: _Followed | None,
    ) -> _Followed | None:
        """The target of a table that had another name, renamed as the table was.

        ``there`` is what another table of the source left under the new name. It is kept under a
        name of its own, and renamed in turn if that table comes under another name.
        """
        if not self._names.follows_renames:
            return None
        rows = connection.execute(
            self._positions.statement(_RENAMED),
            (self._owner.source, self._owner.consumer, relation.oid),
        ).fetchall()
        if len(rows) != 1:
            return None
        schema, name, version, lsn, idx = rows[0]
        since = cursor_of(lsn, idx)
        if part.first <= max(since, since if there is None else there.since):
            return None
        new = part.target
        if there is not None:
            self._move(connection, new, _displaced(new, there.relation.oid))
        self._move(connection, Target(str(schema), str(name)), new)
        return _Followed(relation_of(str(version)), since)

    def _move(self, connection: Connection, old: Target, new: Target) -> None:
        """Rename a target, and what is known of it."""
        self._make_schema(connection, new.schema)
        if old.schema != new.schema:
            _run(connection, "ALTER TABLE {} SET SCHEMA {}", old.identifier, new.schema)
        if old.name != new.name:
            moved = Target(new.schema, old.name).identifier
            _run(connection, "ALTER TABLE {} RENAME TO {}", moved, new.name)
        connection.execute(
            self._positions.statement(_MOVED), (new.schema, new.name, old.schema, old.name)
        )
        self._followed.pop(old, None)
        self._layouts = {k: v for k, v in self._layouts.items() if k[0] not in (old, new)}
        _logger.info("postgres.table_renamed", table=str(old), to=str(new))

    def _write(self, connection: Connection, part: Part[Target], followed: _Followed) -> None:
        target, since = part.target, followed.since
        connection.execute(
            self._positions.statement(_WRITE),
            (
                *(target.schema, target.name, self._owner.source, self._owner.consumer),
                *(followed.relation.oid, part.version, format_lsn(since.lsn), since.idx),
                part.routed,
            ),
        )

    def _make(self, connection: Connection, target: Target, relation: Relation) -> None:
        self._make_schema(connection, target.schema)
        present = self.columns(connection, target)
        if present:
            self._adopt(connection, target, relation, present)
            return
        own = [sql.SQL("{} " + kind).format(sql.Identifier(n)) for n, kind in self._own_columns]
        members = own + [self._definition(connection, c, relation) for c in relation.columns]
        key = () if self._history else key_names(relation)
        if key:
            columns = sql.SQL(", ").join(map(sql.Identifier, key))
            members.append(sql.SQL("PRIMARY KEY ({})").format(columns))
        connection.execute(
            sql.SQL("CREATE TABLE {} ({})").format(target.identifier, sql.SQL(", ").join(members))
        )
        self._comment(connection, target, relation.columns, relation)
        _logger.info("postgres.table_created", table=str(target))

    def _adopt(
        self, connection: Connection, target: Target, relation: Relation, present: Sequence[str]
    ) -> None:
        """Write into a table that exists already, if a key identifies its rows."""
        lacking = [name for name, _ in self._own_columns if name not in present]
        if lacking:
            raise OperatorError(
                f"{target} exists and is no history: it has no column {lacking[0]}",
                fix="give the sink another target, or drop the table",
            )
        key = () if self._history else key_names(relation)
        name = target.identifier.as_string(connection)
        if key:
            row = connection.execute(_UNIQUE, (name, sorted(key))).fetchone()
            if row is None or not row[0]:
                raise OperatorError(
                    f"{target} exists and has no unique index over the key ({', '.join(key)})",
                    fix="add the primary key to it, or drop the table",
                )
        missing = [column for column in relation.columns if column.name not in present]
        self._add(connection, target, missing, relation)
        _logger.info("postgres.table_adopted", table=str(target))

    def _alter(self, connection: Connection, target: Target, old: Relation, new: Relation) -> None:
        diff = differences(old, new)
        present = set(self.columns(connection, target))
        if not self._history:
            for gone in diff.dropped:
                if gone.name in present and old.oid == new.oid:
                    _run(connection, "ALTER TABLE {} DROP COLUMN {}", target.identifier, gone.name)
                    present.discard(gone.name)
        for was, now in _in_turn(diff.renamed):
            _run(connection, "ALTER TABLE {} RENAME COLUMN {} TO {}", target.identifier, was, now)
            present = (present - {was}) | {now}
        by_name = {column.name: column for column in new.columns}
        # A column of a history that was dropped and is there again may have another type now.
        again = [column for _, column in diff.added if column.name in present]
        for column in [column for _, column in diff.retyped] + again:
            self._retype(connection, target, by_name[column.name], new)
        self._add(connection, target, [c for c in new.columns if c.name not in present], new)
        if not self._history and key_names(old) != key_names(new):
            self._rekey(connection, target, new)
        _logger.info(
            "postgres.table_altered", table=str(target), added=len(diff.added),
            dropped=len(diff.dropped), renamed=len(diff.renamed), retyped=len(diff.retyped),
        )  # fmt: skip

    def _add(
        self,
        connection: Connection,
        target: Target,
        columns: Sequence[Column],
        relation: Relation,
    ) -> None:
        for column in columns:
            definition = self._definition(connection, column, relation)
            connection.execute(
                sql.SQL("ALTER TABLE {} ADD COLUMN {}").format(target.identifier, definition)
            )
        self._comment(connection, target, columns, relation)

    def _retype(
        self, connection: Connection, target: Target, column: Column, relation: Relation
    ) -> None:
        """Cast what is there, through its text; a history keeps what cannot be cast as text."""
        wanted = self._type(connection, column, relation)
        name = sql.Identifier(column.name)
        statement = "ALTER TABLE {} ALTER COLUMN {} TYPE {} USING {}::text::{}"
        try:
            with connection.transaction():
                kind = sql.SQL(wanted)
                connection.execute(
                    sql.SQL(statement).format(target.identifier, name, kind, name, kind)
                )
        except (psycopg.DataError, psycopg.errors.CannotCoerce) as error:
            if not self._history:
                raise OperatorError(
                    f"the values of {target}.{column.name} cannot become {wanted}",
                    fix="alter the column by hand as it was altered at the source, or empty the "
                    "table and rewind",
                    detail=str(error),
                ) from None
            text = sql.SQL("text")
            connection.execute(sql.SQL(statement).format(target.identifier, name, text, name, text))
            _logger.warning(
                "postgres.type_as_text", table=str(target), column=column.name, type=wanted
            )
            return
        self._comment(connection, target, [column], relation)

    def _rekey(self, connection: Connection, target: Target, relation: Relation) -> None:
        """Another primary key, unless a unique index over it is there already."""
        key = key_names(relation)
        table = target.identifier.as_string(connection)
        row = connection.execute(_UNIQUE, (table, sorted(key))).fetchone()
        if key and row is not None and row[0]:
            return
        found = connection.execute(
            "SELECT conname FROM pg_constraint WHERE conrelid = to_regclass(%s) AND contype = 'p'",
            (table,),
        ).fetchone()
        if found is not None:
            _run(connection, "ALTER TABLE {} DROP CONSTRAINT {}", target.identifier, str(found[0]))
        if key:
            columns = sql.SQL(", ").join(map(sql.Identifier, key))
            connection.execute(
                sql.SQL("ALTER TABLE {} ADD PRIMARY KEY ({})").format(target.identifier, columns)
            )

    def _definition(
        self, connection: Connection, column: Column, relation: Relation
    ) -> sql.Composed:
        kind = sql.SQL(self._type(connection, column, relation))
        return sql.SQL("{} {}").format(sql.Identifier(column.name), kind)

    def _type(self, connection: Connection, column: Column, relation: Relation) -> str:
        return column_type(column, relation, lambda name: _has_type(connection, name)).name

    def _comment(
        self, connection: Connection, target: Target, columns: Sequence[Column], relation: Relation
    ) -> None:
        """Say of columns that are text in place of their type which type that is."""
        for column in columns:
            kind = column_type(column, relation, lambda name: _has_type(connection, name))
            if kind.lacking is None:
                continue
            said = f"text in place of {kind.lacking}, which this database does not have"
            connection.execute(
                sql.SQL("COMMENT ON COLUMN {} IS {}").format(
                    sql.Identifier(target.schema, target.name, column.name), sql.Literal(said)
                )
            )
            _logger.warning(
                "postgres.type_as_text", table=str(target), column=column.name, type=kind.lacking
            )

    @property
    def _own_columns(self) -> tuple[tuple[str, str], ...]:
        return OWN_COLUMNS if self._history else ()

    def columns(self, connection: Connection, target: Target) -> list[str]:
        """The columns that a target has."""
        name = target.identifier.as_string(connection)
        return [str(row[0]) for row in connection.execute(_COLUMNS, (name,)).fetchall()]

    def _make_schema(self, connection: Connection, schema: str) -> None:
        row = connection.execute(
            "SELECT FROM pg_namespace WHERE nspname = %s", (schema,)
        ).fetchone()
        if row is None:
            _run(connection, "CREATE SCHEMA IF NOT EXISTS {}", schema)

    def _refuse_unusable(self, relation: Relation, target: Target) -> None:
        if self._history:
            own = {name for name, _ in OWN_COLUMNS}
            taken = [column.name for column in relation.columns if column.name in own]
            if taken:
                raise OperatorError(
                    f"{relation} has a column {taken[0]}, which {target} needs for itself",
                    fix="leave the table out with source.exclude_tables, or rename the column",
                )
        elif not relation.key and not is_row_identity(relation):
            raise OperatorError(
                f"{relation} has no key by which its rows could be mirrored",
                fix="give it a primary key or REPLICA IDENTITY FULL, leave it out with "
                "source.exclude_tables, or use mode: append; rows of a backfill are then read "
                "again by themselves, but changes that are in the log already keep the table as "
                "it was: for these leave it out, and start the service again",
                kind=UNFIT_TABLE,
            )


def _names(target: Target) -> tuple[str, str]:
    return target.schema, target.name


def _displaced(target: Target, oid: int) -> Target:
    """Where a target is kept whose name another table of the source has taken."""
    ending = f"_walbrook_{oid}"
    kept = target.name.encode()[: NAME_BYTES_MAX - len(ending)].decode(errors="ignore")
    return Target(target.schema, kept + ending)


def _in_turn(renamed: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Renames in an order in which no name is taken; a circle goes through another name."""
    left, done = dict(renamed), []
    while left:
        free = [was for was, now in left.items() if now not in left]
        if free:
            done.append((free[0], left.pop(free[0])))
            continue
        was = next(iter(left))
        done.append((was, f"{was}~"))
        left[f"{was}~"] = left.pop(was)
    return done


def _has_type(connection: Connection, name: str) -> bool:
    row = connection.execute("SELECT to_regtype(%s) IS NOT NULL", (name,)).fetchone()
    return row is not None and bool(row[0])


def _run(connection: Connection, statement: str, *names: sql.Identifier | str) -> None:
    """A statement with identifiers in it."""
    identifiers = [sql.Identifier(name) if isinstance(name, str) else name for name in names]
    connection.execute(sql.SQL(statement).format(*identifiers))

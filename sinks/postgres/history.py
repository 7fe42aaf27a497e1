"""Every change as a typed row of its table's history, in the order of their cursors."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from cdc.change import READ
from cdc.connection import Connection
from cdc.cursor import Cursor, format_lsn
from cdc.cursor_columns import cursor_at
from cdc.decoding.copy_text import copied_text, lsn_texts
from cdc.decoding.format import ROW_TEXT
from cdc.decoding.joins import joined
from cdc.decoding.row_texts import NULL
from sinks.postgres.copying import copy_lines, pieces, shared_texts
from sinks.postgres.position import Owner, PositionRow, Positions
from sinks.postgres.reloading import Shadows
from sinks.postgres.tables import Tables, TargetLayout
from sinks.postgres.target import Target, TargetNames
from sinks.tables.fold import join_columns, split_columns
from sinks.tables.parts import Part, parts_by_version

# First what all rows of a transaction share.
_OWN = (
    "walbrook_generation", "walbrook_action", "walbrook_lsn", "walbrook_committed_at",
    "walbrook_idx", "walbrook_old_key", "walbrook_unchanged",
)  # fmt: skip
_TARGETS = (
    "SELECT target_schema, target_table FROM {own}.tables WHERE source = %s AND consumer = %s"
)
# What a backfill read is in no log: only what was not settled of it comes again.
_CUT = """
DELETE FROM {} WHERE walbrook_action <> 'read'
   AND (walbrook_lsn, walbrook_idx) >= (%s::pg_lsn, %s::bigint)
"""
_CUT_READS = """
DELETE FROM {} WHERE walbrook_action = 'read' AND walbrook_lsn = %s::pg_lsn
   AND walbrook_idx BETWEEN %s AND %s
"""


class History:
    """Adds batches to the histories of one consumer."""

    def __init__(
        self,
        tables: Tables,
        target_names: TargetNames,
        positions: Positions,
        owner: Owner,
        shadows: Shadows,
        *,
        replaces: bool,
    ) -> None:
        self._tables = tables
        self._shadows = shadows
        self._names = target_names
        self._positions = positions
        self._owner = owner
        self._replaces = replaces

    def forget(self) -> None:
        """After a rollback nothing of what was made is there."""
        self._tables.forget()

    def begin_again(self, connection: Connection, first: Cursor) -> None:
        """Take out what comes again, if it is to be replaced."""
        if not self._replaces:
            return
        targets = connection.execute(
            self._positions.statement(_TARGETS), (self._owner.source, self._owner.consumer)
        ).fetchall()
        for schema, name in targets:
            statement = sql.SQL(_CUT).format(sql.Identifier(str(schema), str(name)))
            connection.execute(statement, (format_lsn(first.lsn), first.idx))

    def apply(self, connection: Connection, rows: pa.RecordBatch, position: PositionRow) -> None:
        """Add changes of tables."""
        for parts in parts_by_version(rows, self._names):
            for part in self._shadows.with_shadows(connection, parts, position):
                self._add(connection, part, position)

    def _add(self, connection: Connection, part: Part[Target], position: PositionRow) -> None:
        layout = self._tables.layout(connection, part)
        # A schema change has altered the table, and is no change of a row.
        of_rows = pc.not_equal(part.rows.column("action"), "schema_change")
        rows = part.rows if of_rows.true_count == len(of_rows) else part.rows.filter(of_rows)
        if not rows.num_rows:
            return
        if self._replaces and rows.column("action")[0].as_py() == READ:
            self._replace_reads(connection, layout.target, rows, position)
        columns = [*_OWN, *layout.columns]
        statement = sql.SQL("COPY {} ({}) FROM STDIN").format(
            layout.target.identifier, sql.SQL(", ").join(map(sql.Identifier, columns))
        )
        lines = (_lines(piece, layout, position.generation) for piece in pieces(rows))
        copy_lines(connection, statement, lines)

    def _replace_reads(
        self, connection: Connection, target: Target, rows: pa.RecordBatch, position: PositionRow
    ) -> None:
        """Take out read rows that come again: they stand at one LSN, apart from changes."""
        first, last = cursor_at(rows, 0), cursor_at(rows, -1)
        if first <= position.repeats:
            statement = sql.SQL(_CUT_READS).format(target.identifier)
            connection.execute(statement, (format_lsn(first.lsn), first.idx, last.idx))


def _lines(rows: pa.RecordBatch, layout: TargetLayout, generation: int) -> pa.StringArray:
    texts = rows.column(ROW_TEXT)
    if texts.null_count:  # a truncate has no row
        texts = texts.fill_null("\t".join([NULL] * len(layout.names)))
    if layout.is_partial:
        placed = zip(split_columns(texts), layout.names, strict=True)
        texts = join_columns([text for text, name in placed if name is not None])

    def shared(rows: pa.RecordBatch) -> pa.StringArray:
        return joined(
            f"{generation}\t",
            rows.column("action"),
            "\t",
            lsn_texts(rows.column("commit_lsn")),
            "\t",
            commit_times(rows),
            "\t",
        )

    return joined(
        shared_texts(rows, ("commit_lsn", "action"), shared),
        rows.column("commit_idx").cast(pa.string()),
        *_optional(rows.column("old_record_pks")),
        *_optional(rows.column("unchanged")),
        *(["\t", texts] if layout.columns else []),
        "\n",
        null=NULL,
    )


def commit_times(rows: pa.RecordBatch) -> pa.StringArray:
    """When the transactions were committed, as Postgres reads it."""
    return rows.column("commit_timestamp").cast(pa.string())


def _optional(column: pa.StringArray) -> list[str | pa.StringArray]:
    """A column that is null in most rows, as text to join."""
    return ["\t" + NULL] if column.null_count == len(column) else ["\t", copied_text(column)]

"""Temporary tables that rows are copied into before one statement applies them.

A stage has the columns of its layout with the target's types, without its constraints, and three of
its own. It stays for the life of the connection and is emptied by every commit.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
from psycopg import sql

from cdc.connection import Connection
from cdc.decoding.copy_text import copied_text
from cdc.decoding.joins import joined, repeated
from cdc.decoding.row_texts import NULL
from sinks.postgres.copying import copy_lines
from sinks.postgres.tables import TargetLayout
from sinks.tables.fold import join_columns, split_columns

OP, NUMBER, KEPT = (sql.Identifier(name) for name in ("~op", "~number", "~kept"))
"""What to do with a row; a number that two rows share, or how often; columns to leave alone."""

_STAGES_MAX = 64  # a commit empties each of them

_MAKE = """
CREATE TEMPORARY TABLE {stage} ON COMMIT DELETE ROWS AS
SELECT NULL::"char" AS {op}, NULL::bigint AS {number}, NULL::jsonb AS {kept}{columns}
  FROM {target} WITH NO DATA
"""


@dataclass(frozen=True)
class Stage:
    """A temporary table for the rows of one layout."""

    layout: TargetLayout
    name: sql.Identifier

    @property
    def columns(self) -> sql.Composed:
        return names(self.layout.columns)

    def lines(
        self,
        op: str,
        texts: pa.StringArray,
        *,
        number: pa.Int64Array | None = None,
        kept: pa.StringArray | None = None,
    ) -> pa.StringArray:
        """Rows as COPY reads them."""
        if self.layout.is_partial and len(texts):
            placed = zip(split_columns(texts), self.layout.names, strict=True)
            texts = join_columns([text for text, name in placed if name is not None])
        parts: list[str | pa.StringArray] = [f"{op}\t"]
        parts += [NULL if number is None else number.cast(pa.string()), "\t"]
        parts += [NULL if kept is None else copied_text(kept)]
        parts += ["\t", texts] if self.layout.columns else []
        if len(texts) and all(isinstance(part, str) for part in parts):
            return repeated("".join(map(str, parts)) + "\n", len(texts))
        return joined(*parts, "\n", null=NULL)

    def fill(self, connection: Connection, lines: list[pa.StringArray]) -> None:
        """Copy lines into it."""
        columns = sql.SQL(", ").join([OP, NUMBER, KEPT, *map(sql.Identifier, self.layout.columns)])
        statement = sql.SQL("COPY {} ({}) FROM STDIN").format(self.name, columns)
        copy_lines(connection, statement, lines)


class Stages:
    """The stages of one connection."""

    def __init__(self) -> None:
        self._stages: dict[int, Stage] = {}
        self._made = 0
        self._used: set[int] = set()  # since the transaction began

    def begin(self, connection: Connection) -> None:
        """A transaction begins: all are empty, and too many are dropped, the oldest first."""
        self._used.clear()
        while len(self._stages) > _STAGES_MAX:
            oldest = self._stages.pop(next(iter(self._stages)))
            connection.execute(sql.SQL("DROP TABLE {}").format(oldest.name))

    def of(self, connection: Connection, layout: TargetLayout) -> Stage:
        """The stage for a layout, empty."""
        key = layout.number
        if key not in self._stages:
            self._stages[key] = self._make(connection, layout)
        stage = self._stages[key]
        if key in self._used:
            connection.execute(sql.SQL("TRUNCATE {}").format(stage.name))
        self._used.add(key)
        return stage

    def forget(self) -> None:
        """After a rollback or with another connection none of them is there."""
        self._stages.clear()

    def _make(self, connection: Connection, layout: TargetLayout) -> Stage:
        self._made += 1
        stage = Stage(layout, sql.Identifier("pg_temp", f"walbrook_stage_{self._made}"))
        columns = sql.SQL(", ") + names(layout.columns) if layout.columns else sql.SQL("")
        connection.execute(
            sql.SQL(_MAKE).format(
                stage=stage.name,
                op=OP,
                number=NUMBER,
                kept=KEPT,
                columns=columns,
                target=layout.target.identifier,
            )
        )
        return stage


def names(columns: tuple[str, ...]) -> sql.Composed:
    """Columns as a list in SQL."""
    return sql.SQL(", ").join(map(sql.Identifier, columns))

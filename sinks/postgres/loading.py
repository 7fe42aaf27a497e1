"""Rows that existed already, copied straight into their target: the text of COPY passes through.

A target that lacks the rows takes them by one COPY, without a stage and without a lookup of each
key. One that has some of them refuses the COPY, which a savepoint undoes; then, and for a while
after, the rows go the way of changes, which replaces what is there.

Invariant: what a COPY brought is what the way of changes would have brought: it is not used where
triggers by rule, row-level security or another kind of relation would make a difference.
"""

from __future__ import annotations

from typing import Final

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from cdc.change import READ
from cdc.connection import Connection
from cdc.decoding.format import ROW_TEXT
from cdc.decoding.joins import joined
from sinks.postgres.copying import copy_lines, pieces
from sinks.postgres.stage import names
from sinks.postgres.tables import Layout
from sinks.postgres.target import Target

_STAGED_AFTER_CONFLICT: Final = 16
"""How many batches of a target are not tried once one met a row that is there."""

_MAY_COPY: Final = """
SELECT relkind IN ('r', 'p') AND NOT relhasrules AND NOT row_security_active(oid)
  FROM pg_class WHERE oid = to_regclass(%s)
"""


class Loader:
    """Copies the existing rows of one connection."""

    def __init__(self) -> None:
        self._may_copy: dict[Target, bool] = {}
        self._staged: dict[Target, int] = {}

    def forget(self) -> None:
        self._may_copy.clear()

    def load(self, connection: Connection, layout: Layout, rows: pa.RecordBatch) -> bool:
        """Copy rows into their target; returns whether they are there now."""
        if not self._takes(connection, layout, rows):
            return False
        statement = sql.SQL("COPY {} ({}) FROM STDIN").format(
            layout.target.identifier, names(layout.columns)
        )
        texts = (joined(part.column(ROW_TEXT), "\n") for part in pieces(rows))
        try:
            with connection.transaction():
                copy_lines(connection, statement, texts)
        except (psycopg.errors.IntegrityError, psycopg.NotSupportedError):
            self._staged[layout.target] = _STAGED_AFTER_CONFLICT
            return False
        return True

    def _takes(self, connection: Connection, layout: Layout, rows: pa.RecordBatch) -> bool:
        if not layout.key or layout.is_partial or not layout.columns:
            return False
        if not pc.all(pc.equal(rows.column("action"), READ)).as_py():
            return False
        target = layout.target
        left = self._staged.get(target, 0)
        if left:
            self._staged[target] = left - 1
            return False
        if target not in self._may_copy:
            name = target.identifier.as_string(connection)
            row = connection.execute(_MAY_COPY, (name,)).fetchone()
            self._may_copy[target] = row is not None and bool(row[0])
        return self._may_copy[target]

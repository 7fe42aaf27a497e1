"""Rows that existed already, copied straight into their target: the text of COPY passes through.

A target that lacks the rows takes them by one COPY, without a stage and without a lookup of each
key. One that has some of them refuses the COPY, which a savepoint undoes; then, and for a while
after, the rows go the way of changes, which replaces what is there.

Invariant: a batch goes one of the two ways, in the transaction of its delivery.
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
from sinks.postgres.tables import TargetLayout
from sinks.postgres.target import Target

_STAGED_AFTER_CONFLICT: Final = 16
"""How many batches of a target are not tried once one met a row that is there."""

# Rows that are there; row-level security; a view.
_REFUSALS: Final = (
    psycopg.IntegrityError, psycopg.NotSupportedError, psycopg.errors.WrongObjectType,
)  # fmt: skip


class Loader:
    """Copies the existing rows of one connection."""

    def __init__(self) -> None:
        self._staged: dict[Target, int] = {}

    def load(self, connection: Connection, layout: TargetLayout, rows: pa.RecordBatch) -> bool:
        """Copy rows into their target; returns whether they are there now."""
        if not self._takes(layout, rows):
            return False
        statement = sql.SQL("COPY {} ({}) FROM STDIN").format(
            layout.target.identifier, names(layout.columns)
        )
        texts = (joined(part.column(ROW_TEXT), "\n") for part in pieces(rows))
        try:
            with connection.transaction():
                copy_lines(connection, statement, texts)
        except _REFUSALS:
            self._staged[layout.target] = _STAGED_AFTER_CONFLICT
            return False
        return True

    def _takes(self, layout: TargetLayout, rows: pa.RecordBatch) -> bool:
        if not layout.key or layout.is_partial or not layout.columns:
            return False
        if not pc.all(pc.equal(rows.column("action"), READ)).as_py():
            return False
        left = self._staged.get(layout.target, 0)
        if left:
            self._staged[layout.target] = left - 1
        return not left

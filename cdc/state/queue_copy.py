"""Rows into a queue by COPY: whole columns as its text form, no loop over rows."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
from psycopg import sql

from cdc.connection import Connection
from cdc.decoding.columns import bytes_of
from cdc.decoding.copy_text import copied_text, lsn_texts
from cdc.decoding.joins import joined, repeated


def copy_rows(
    connection: Connection, table: str, consumer: int, columns: Mapping[str, pa.Array]
) -> None:
    """Add rows to ``walbrook.<table>`` for a consumer; LSNs are written as Postgres does."""
    count = len(next(iter(columns.values())))
    if not count:
        return
    statement = sql.SQL("COPY {} ({}) FROM STDIN").format(
        sql.Identifier("walbrook", f"{table}_{consumer}"),
        sql.SQL(", ").join(map(sql.Identifier, ("consumer", *columns))),
    )
    texts = [repeated(str(consumer), count)]
    texts += [
        lsn_texts(column) if name == "commit_lsn" else _text(column)
        for name, column in columns.items()
    ]
    parts: list[str | pa.StringArray] = []
    for text in texts:
        parts += [text, "\t"]
    lines = joined(*parts[:-1], "\n", null="\\N")
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.write(bytes_of(lines).data)


def _text(column: pa.Array) -> pa.StringArray:
    return copied_text(column) if pa.types.is_string(column.type) else column.cast(pa.string())

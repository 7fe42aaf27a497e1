"""Rows into a queue by COPY: whole columns as its text form, no loop over rows."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from cdc.connection import Connection
from cdc.cursor import format_lsn
from cdc.decoding.columns import bytes_of
from cdc.decoding.joins import joined, repeated

_ESCAPES = (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))


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
        lsn_texts(column) if name == "commit_lsn" else copy_text(column)
        for name, column in columns.items()
    ]
    parts: list[str | pa.StringArray] = []
    for text in texts:
        parts += [text, "\t"]
    lines = joined(*parts[:-1], "\n", null="\\N")
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.write(bytes_of(lines).data)


def copy_text(column: pa.Array) -> pa.StringArray:
    """Values as COPY reads them; null stays null."""
    if not pa.types.is_string(column.type):
        return column.cast(pa.string())
    for plain, escaped in _ESCAPES:
        if pc.any(pc.match_substring(column, plain)).as_py():
            column = pc.replace_substring(column, plain, escaped)
    return column


def lsn_texts(lsns: pa.Int64Array) -> pa.StringArray:
    """LSNs as Postgres writes them; most rows share theirs with others."""
    encoded = lsns.dictionary_encode()
    texts = pa.array([format_lsn(lsn) for lsn in encoded.dictionary.to_pylist()], pa.string())
    return texts.take(encoded.indices)

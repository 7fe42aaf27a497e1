"""Rows as the text of a COPY: in pieces, and with what many rows share written once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from cdc.connection import Connection
from cdc.decoding.columns import bytes_of

_PIECE_ROWS = 4_096


def pieces(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Rows in pieces, so that the server reads one while the next is written as text."""
    for start in range(0, rows.num_rows, _PIECE_ROWS):
        yield rows.slice(start, _PIECE_ROWS)


def shared_texts(
    rows: pa.RecordBatch,
    names: Sequence[str],
    write: Callable[[pa.RecordBatch], pa.StringArray],
) -> pa.StringArray:
    """``write`` once for all rows that are equal in the columns ``names``."""
    codes = np.zeros(rows.num_rows, np.int64)
    for name in names:
        encoded = pc.dictionary_encode(rows.column(name))
        if len(encoded.dictionary) > 1:
            codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy()
    _, first, which = np.unique(codes, return_index=True, return_inverse=True)
    return write(rows.take(pa.array(first))).take(pa.array(which))


def copy_lines(
    connection: Connection, statement: sql.Composed, lines: Iterable[pa.StringArray]
) -> None:
    """Send lines to a COPY, some at a time."""
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for some in lines:
            if len(some):
                copy.write(bytes_of(some).data)

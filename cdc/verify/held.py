"""What a destination says that it holds of a table, and the same of the source. Pure.

Both sides give batches of ``HELD_SCHEMA``. A destination that holds tables gives each row once. A
destination that holds messages gives each message: its place orders it, and of each key the last
one counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.backfill.copy_rows import raw_rows
from cdc.backfill.overtaken import row_keys
from cdc.backfill.table import PublishedTable
from cdc.decoding.format import ValueFormat, Wanted
from cdc.decoding.isolate import decode_carefully
from cdc.verify.typed_rows import source_contents

HELD_SCHEMA: Final = pa.schema(
    [
        # JSON array of the key's values as text, in key order; null: the whole table is empty.
        pa.field("key", pa.string()),
        # What is compared: see ``Form``; null for a row that is gone.
        pa.field("content", pa.binary()),
        # Where the message stands; zeros where rows are held, not messages.
        pa.field("lsn", pa.int64(), nullable=False),
        pa.field("idx", pa.int64(), nullable=False),
        # JSON array of columns whose values the message does not have; null if none.
        pa.field("unchanged", pa.string()),
    ]
)

Key = tuple[str, ...]
"""The values of a row's key as text."""


class Form(Enum):
    """What the content of a row is."""

    CELLS = "cells"
    """The texts of the published columns as the source writes them, in their order."""
    RECORD = "record"
    """The JSON record, as messages have it."""
    TYPED = "typed"
    """The values in the types that a destination has, as ``typed_rows`` writes them."""


def key_text(key: Sequence[str]) -> str:
    """A key as batches have it."""
    return orjson.dumps(key).decode()


def key_of(text: str) -> Key:
    return tuple(orjson.loads(text))


def normal_keys(texts: pa.StringArray) -> pa.StringArray:
    """Keys in the form of ``key_text``; only those with a backslash may be written otherwise."""
    escaped = pc.match_substring(texts, "\\")
    if not pc.any(escaped).as_py():
        return texts
    again = [key_text(key_of(text)) for text in texts.filter(escaped).to_pylist()]
    return pc.replace_with_mask(texts, pc.fill_null(escaped, False), pa.array(again, pa.string()))


def rows_held(keys: pa.StringArray, contents: pa.Array) -> pa.RecordBatch:
    """Rows of a table, each of which is there."""
    zeros = pa.array(np.zeros(len(keys), np.int64))
    return pa.RecordBatch.from_arrays(
        [keys, contents.cast(pa.binary()), zeros, zeros, pa.nulls(len(keys), pa.string())],
        schema=HELD_SCHEMA,
    )


def messages_held(
    keys: pa.StringArray,
    places: tuple[pa.Int64Array, pa.Int64Array],
    contents: pa.BinaryArray | None = None,
    unchanged: pa.StringArray | None = None,
) -> pa.RecordBatch:
    """Messages with their places; without contents the rows of the keys are gone."""
    count = len(keys)
    nothing, nowhere = pa.nulls(count, pa.binary()), pa.nulls(count, pa.string())
    return pa.RecordBatch.from_arrays(
        [
            keys,
            nothing if contents is None else contents,
            *places,
            nowhere if unchanged is None else unchanged,
        ],
        schema=HELD_SCHEMA,
    )


def held_of_columns(table: PublishedTable, columns: list[pa.BinaryArray]) -> pa.RecordBatch:
    """Rows of a table from the texts of its published columns; their content is ``CELLS``."""
    raw = raw_rows(columns, oid=table.relation.oid, schema_id=table.schema_id, read_us=0)
    return held_of_raw(raw, {table.schema_id: table.message}, Form.CELLS)


def held_of_raw(
    raw: pa.RecordBatch, schemas: Mapping[int, bytes], form: Form, values: ValueFormat | None = None
) -> pa.RecordBatch:
    """Rows of a table from its raw rows; ``values`` is how a record writes them."""
    if not raw.num_rows:
        return pa.RecordBatch.from_pylist([], HELD_SCHEMA)
    if form is Form.CELLS:
        return rows_held(row_keys(raw, schemas).record_pks, raw.column("payload"))
    if form is Form.TYPED:
        return rows_held(row_keys(raw, schemas).record_pks, source_contents(raw, schemas))
    wanted = Wanted() if values is None else Wanted((values,))
    changes = decode_carefully(raw, schemas, wanted=wanted)
    return rows_held(changes.column("record_pks"), pc.fill_null(changes.column("record"), ""))

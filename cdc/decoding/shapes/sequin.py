"""The ``sequin`` shape, the default: record, changes, action, metadata.

Names and forms of the metadata follow that product, so its consumers work unchanged. The one
addition is ``unchanged``, there only when the source did not send a TOAST value.
"""

from __future__ import annotations

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import MESSAGE_SCHEMA
from cdc.decoding.columns import constant
from cdc.decoding.types import text_json


def shape(
    changes: pa.RecordBatch, *, consumer: str, database_name: str, hostname: str, database: str
) -> pa.RecordBatch:
    """Add ``metadata`` to CHANGE_SCHEMA rows: MESSAGE_SCHEMA rows for one consumer."""
    lsn = changes.column("commit_lsn").cast(pa.string())
    idx = changes.column("commit_idx").cast(pa.string())
    source = orjson.dumps(
        {
            "database_name": database_name,
            "consumer": {"name": consumer},
            "database": {"name": database_name, "database": database, "hostname": hostname},
        }
    ).decode()
    metadata = _join(
        '{"table_schema":"',
        _inside_quotes(changes.column("table_schema")),
        '","table_name":"',
        _inside_quotes(changes.column("table_name")),
        '","commit_timestamp":"',
        _iso8601(changes.column("commit_timestamp")),
        '","commit_lsn":',
        lsn,
        ',"commit_idx":',
        idx,
        ',"xid":',
        changes.column("xid").cast(pa.string()),
        ',"idempotency_key":"',
        lsn,
        ":",
        idx,
        '","record_pks":',
        changes.column("record_pks"),
        ',"transaction_annotations":',
        pc.fill_null(changes.column("annotations"), constant("null")),
        *_unchanged(changes.column("unchanged")),
        "," + source[1:],
        null="",
    )
    return pa.RecordBatch.from_arrays([*changes.columns, metadata], schema=MESSAGE_SCHEMA)


def messages(rows: pa.RecordBatch) -> pa.StringArray:
    """The whole JSON message of each MESSAGE_SCHEMA row."""
    return _join(
        '{"record":',
        rows.column("record"),
        ',"changes":',
        rows.column("changes"),
        ',"action":"',
        rows.column("action"),
        '","metadata":',
        rows.column("metadata"),
        "}",
        null="null",
    )


def _join(*pieces: str | pa.StringArray, null: str) -> pa.StringArray:
    columns = [constant(piece) if isinstance(piece, str) else piece for piece in pieces]
    return pc.binary_join_element_wise(
        *columns, constant(""), null_handling="replace", null_replacement=null
    )


def _inside_quotes(names: pa.StringArray) -> pa.StringArray:
    return text_json(names.view(pa.binary())).values


def _iso8601(times: pa.TimestampArray) -> pa.StringArray:
    # All rows of a transaction share one time: format each once.
    encoded = times.dictionary_encode()
    local = encoded.dictionary.cast(pa.timestamp("us")).cast(pa.string())
    formatted = _join(pc.replace_substring(local, " ", "T"), "Z", null="")
    return formatted.take(encoded.indices)


def _unchanged(names: pa.StringArray) -> tuple[pa.StringArray, ...]:
    if names.null_count == len(names):
        return ()
    return (pc.binary_join_element_wise(constant(',"unchanged":'), names, constant("")),)

"""Decoding a frame in which a message breaks the protocol: the message is found, the rest goes on.

``decode_changes`` refuses the whole of such a frame. Here the frame is cut in halves until one
message is left that cannot be decoded alone; it becomes a row with an ``error``, as a bad value
would. Invariants: every row of the frame is there, in its place; and if many are bad, it
is not the messages but something else that is wrong, and the whole is refused after all.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from cdc.bisection import bisect
from cdc.decoding.changes import decode_changes
from cdc.decoding.format import PLAIN, Wanted
from cdc.decoding.groups import ACTIONS
from cdc.decoding.relation import parse_relation
from cdc.errors import DecodeError

BAD_MAX = 20
"""Messages of one frame that may be found bad."""


def decode_carefully(
    raw: pa.RecordBatch,
    schemas: Mapping[int, bytes],
    *,
    annotations: pa.StringArray | None = None,
    wanted: Wanted = PLAIN,
) -> pa.RecordBatch:
    """``decode_changes``, with a row that has an ``error`` for each message that it refuses."""
    try:
        return decode_changes(raw, schemas, annotations=annotations, wanted=wanted)
    except DecodeError as error:
        first = error
    decoded: list[pa.RecordBatch] = []
    bad = 0

    def cut(start: int, stop: int) -> tuple[pa.RecordBatch, pa.StringArray | None]:
        size = stop - start
        return raw.slice(start, size), None if annotations is None else annotations.slice(
            start, size
        )

    def attempt(start: int, stop: int) -> pa.RecordBatch:
        piece, said = cut(start, stop)
        return decode_changes(piece, schemas, annotations=said, wanted=wanted)

    for start, stop, result in bisect(raw.num_rows, attempt, DecodeError):
        if isinstance(result, DecodeError):
            bad += 1
            if bad > BAD_MAX:
                raise first from None
            piece, said = cut(start, stop)
            result = _refused(piece, schemas, said, wanted, result)
        decoded.append(result)
    return pa.concat_batches(decoded)


def _refused(
    raw: pa.RecordBatch,
    schemas: Mapping[int, bytes],
    annotations: pa.StringArray | None,
    wanted: Wanted,
    error: DecodeError,
) -> pa.RecordBatch:
    """The one row of ``raw`` as a change of which only its place and its fault are known."""
    (row,) = raw.to_pylist()
    schema, table = _table(schemas.get(row["schema_id"]))
    # An unknown kind has no action; ``message`` belongs to no table either.
    known = {
        "commit_lsn": row["commit_lsn"],
        "commit_idx": row["commit_idx"],
        "xid": row["xid"],
        "table_schema": schema,
        "table_name": table,
        "action": ACTIONS.get(chr(row["kind"]), "message"),
        "record_pks": "[]",
        "annotations": annotations[0].as_py() if annotations is not None else None,
        "error": str(error.what),
    }
    columns = [
        raw.column("commit_ts").view(field.type)
        if field.name == "commit_timestamp"
        else pa.array([known.get(field.name)], field.type)
        for field in wanted.schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=wanted.schema)


def _table(schema: bytes | None) -> tuple[str, str]:
    try:
        relation = parse_relation(schema or b"")
    except DecodeError:
        return "", ""
    return relation.namespace, relation.name

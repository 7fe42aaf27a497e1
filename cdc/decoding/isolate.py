"""Decoding a frame in which a message breaks the protocol: the message is found, the rest goes on.

``decode_changes`` refuses the whole of such a frame. Here the frame is cut in halves until one
message is left that cannot be decoded alone; it becomes a row with an ``error``, as a bad value
would. Invariants: every row of the frame is there, in its place; and if many are bad, it
is not the messages but something else that is wrong, and the whole is refused after all.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

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
    waiting, bad = [(0, raw.num_rows)], 0
    while waiting:
        start, stop = waiting.pop()
        piece = raw.slice(start, stop - start)
        said = annotations.slice(start, stop - start) if annotations is not None else None
        try:
            decoded.append(decode_changes(piece, schemas, annotations=said, wanted=wanted))
        except DecodeError as error:
            if stop - start > 1:
                middle = (start + stop) // 2
                waiting += [(middle, stop), (start, middle)]
                continue
            bad += 1
            if bad > BAD_MAX:
                raise first from None
            decoded.append(_refused(piece, schemas, said, wanted, error))
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
    # A kind that nobody knows has no action; ``message`` belongs to no table either.
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

"""A frame of raw rows to changes with their JSON, in the frame's order.

Invariants: the result has every row of the frame. A row with a value that its type
cannot have says so in ``error``, with table, column and cursor, and has no record; the others do
not suffer. Only a message that breaks the protocol ends it all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding import small_batch
from cdc.decoding.format import PLAIN, TABLE_VERSION, Wanted
from cdc.decoding.groups import (
    ACTIONS,
    FrameColumns,
    Group,
    check_relation,
    errors_of,
    fitting,
    frame_of,
    groups_of,
    naming,
    payloads_of,
    read_group,
)
from cdc.decoding.joins import repeated
from cdc.decoding.logical import decode_messages, decode_schema_changes, decode_truncates
from cdc.decoding.rows import DecodedGroup, decode_rows

_NEVER_NULL = "record_pks"


@dataclass(frozen=True)
class _DecodedPart:
    """What one group gives."""

    table_schema: str
    table_name: str
    action: str
    count: int
    decoded: DecodedGroup
    error: pa.StringArray
    table_version: str | None = None


def decode_changes(
    raw: pa.RecordBatch,
    schemas: Mapping[int, bytes],
    *,
    annotations: pa.StringArray | None = None,
    wanted: Wanted = PLAIN,
) -> pa.RecordBatch:
    """RAW_SCHEMA rows as rows of ``wanted.schema``.

    ``schemas``: schema id → raw Relation message. ``annotations``: one a row, null for most.
    """
    if not raw.num_rows:
        return pa.RecordBatch.from_pylist([], wanted.schema)
    if raw.num_rows <= small_batch.ROWS_MAX:
        decoded = small_batch.decode_few(raw, schemas, annotations, wanted)
        if decoded is not None:
            return decoded
    frame = frame_of(raw)
    groups = list(groups_of(frame, schemas))
    with fitting(raw.num_rows, "JSON"):
        parts = [_decode_group(frame, group, wanted) for group in groups]
        return _put_together(frame, groups, parts, annotations, wanted)


def _decode_group(frame: FrameColumns, group: Group, wanted: Wanted) -> _DecodedPart:
    with naming(frame, group):
        decoded = _decode_messages(frame, group, wanted)
    schema, name, version = "", "", None
    if group.plan is not None:
        schema, name = group.plan.relation.namespace, group.plan.relation.name
        version = group.plan.version
    error = errors_of(frame, group, decoded.faults)
    return _DecodedPart(schema, name, ACTIONS[group.kind], len(group.rows), decoded, error, version)


def _decode_messages(frame: FrameColumns, group: Group, wanted: Wanted) -> DecodedGroup:
    plan = group.plan
    if plan is None:
        return decode_messages(payloads_of(frame, group), wanted)
    if group.kind == "T":
        check_relation(frame, group, plan)
        return decode_truncates(payloads_of(frame, group), plan.relation.oid, wanted)
    if group.kind == "S":
        check_relation(frame, group, plan)
        return decode_schema_changes(payloads_of(frame, group), wanted)
    tuples = read_group(frame, group, plan)
    return decode_rows(plan, tuples, len(group.rows), wanted, kind=group.kind, tag=group.tag)


def _put_together(
    frame: FrameColumns,
    groups: list[Group],
    parts: list[_DecodedPart],
    annotations: pa.StringArray | None,
    wanted: Wanted,
) -> pa.RecordBatch:
    raw = frame.raw
    back: pa.Array | None = None
    if len(groups) > 1:
        order = np.concatenate([group.rows for group in groups])
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        back = pa.array(inverse)

    def in_order(arrays: list[pa.Array]) -> pa.Array:
        return arrays[0] if back is None else pa.concat_arrays(arrays).take(back)

    columns = {
        "commit_lsn": raw.column("commit_lsn"),
        "commit_idx": raw.column("commit_idx"),
        "commit_timestamp": raw.column("commit_ts").view(pa.timestamp("us", tz="UTC")),
        "xid": raw.column("xid"),
    }
    for name in ("table_schema", "table_name", "action"):
        columns[name] = in_order([repeated(getattr(part, name), part.count) for part in parts])
    nothing = pa.nulls(raw.num_rows, pa.string())
    columns["annotations"] = nothing if annotations is None else annotations
    columns["error"] = error = in_order([part.error for part in parts])
    bad = None if error.null_count == len(error) else error.is_valid()
    for name in wanted.schema.names:
        if name not in columns:
            column = in_order([_column(part, name) for part in parts])
            if bad is not None and name != _NEVER_NULL:
                column = pc.if_else(bad, pa.scalar(None, pa.string()), column)
            columns[name] = column
    return pa.RecordBatch.from_arrays(
        [columns[name] for name in wanted.schema.names], schema=wanted.schema
    )


def _column(part: _DecodedPart, name: str) -> pa.StringArray:
    if name == TABLE_VERSION and part.table_version is not None:
        return repeated(part.table_version, part.count)
    column = part.decoded.columns.get(name)
    return pa.nulls(part.count, pa.string()) if column is None else column

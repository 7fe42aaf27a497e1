"""A frame of raw rows to changes: cut into groups that decode alike, put back into order.

A group is the rows of one table version, kind and tuple form. What must always hold: the result
has every row of the frame, in the frame's order, or there is no result and an error that names
the table, the column and the cursor of the first row found to be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.cursor import Cursor
from cdc.decoding.columns import Mask, PlacedError, Positions, first, offsets_of
from cdc.decoding.format import PLAIN, Wanted
from cdc.decoding.logical import decode_messages, decode_truncates
from cdc.decoding.plan import TablePlan, plan_for
from cdc.decoding.raw import RAW_SCHEMA
from cdc.decoding.rows import Decoded, decode_rows, read_rows
from cdc.decoding.tuples import Payloads
from cdc.errors import DecodeError, ProtocolError

_ACTIONS = {"I": "insert", "U": "update", "D": "delete", "T": "truncate", "M": "message"}
_TAGS = {"I": "N", "U": "NKO", "D": "KO"}  # which tuple may come first
_TAGGED = np.isin(np.arange(256), [ord(kind) for kind in _TAGS])
_FIX = "the source sent what pgoutput does not write; if it repeats, report it with this text"


@dataclass(frozen=True)
class _Frame:
    """The columns of a frame as NumPy sees them."""

    raw: pa.RecordBatch
    payloads: Payloads
    starts: Positions
    ends: Positions
    kinds: NDArray[np.uint8]
    tags: NDArray[np.uint8]  # 0 where the kind has none


@dataclass(frozen=True)
class _Group:
    """Rows that decode alike, by their positions in the frame, rising."""

    rows: Positions
    kind: str
    tag: str
    plan: TablePlan | None  # None for logical messages


@dataclass(frozen=True)
class _Part:
    """What one group gives."""

    table_schema: str
    table_name: str
    action: str
    decoded: Decoded


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
    if not raw.schema.equals(RAW_SCHEMA, check_metadata=False):
        raise ProtocolError(
            f"decode was handed columns that are not those of a frame: {raw.schema.names}",
            fix="hand it a record batch of RAW_SCHEMA",
        )
    if not raw.num_rows:
        return pa.RecordBatch.from_pylist([], wanted.schema)
    frame = _frame_of(raw)
    groups = list(_groups_of(frame, schemas))
    try:
        parts = [_decode_group(frame, group) for group in groups]
        return _put_together(frame, groups, parts, annotations, wanted)
    except (pa.ArrowInvalid, pa.ArrowCapacityError) as fault:
        # An Arrow string column holds 2 GiB. Long names and escapes can make that of a small frame.
        raise DecodeError(
            f"{raw.num_rows} changes do not fit into one Arrow batch as JSON: {fault}",
            fix="decode fewer rows at once: lower the batch size of the source",
        ) from fault


def _frame_of(raw: pa.RecordBatch) -> _Frame:
    payload = raw.column("payload")
    bounds = offsets_of(payload).astype(np.int64)
    starts, ends = bounds[:-1], bounds[1:]
    payloads = Payloads(payload.buffers()[2] or pa.py_buffer(b""))
    kinds = raw.column("kind").to_numpy()
    tagged = _TAGGED[kinds]
    # A message with tuples is no shorter than kind, oid, tag and column count.
    _refuse(raw, ends - starts < np.where(tagged, 8, 1), "its message is cut off")
    _refuse(raw, payloads.bytes[starts] != kinds, "its message is not of the kind it is said to be")
    tags = np.where(tagged, payloads.bytes[np.where(tagged, starts + 5, 0)], 0).astype(np.uint8)
    return _Frame(raw, payloads, starts, ends, kinds, tags)


def _groups_of(frame: _Frame, schemas: Mapping[int, bytes]) -> Iterator[_Group]:
    schema_ids = pc.dictionary_encode(frame.raw.column("schema_id"))
    form = (frame.kinds.astype(np.int64) << 8) | frame.tags
    combined = (schema_ids.indices.to_numpy().astype(np.int64) << 16) | form
    encoded = pc.dictionary_encode(pa.array(combined))
    of_row = encoded.indices.to_numpy()
    order = np.argsort(
        of_row.astype(np.uint16) if len(encoded.dictionary) < 65536 else of_row, kind="stable"
    )
    stops = np.cumsum(np.bincount(of_row, minlength=len(encoded.dictionary)))
    start = 0
    for code, stop in zip(encoded.dictionary.to_pylist(), stops.tolist(), strict=True):
        rows = order[start:stop]
        start = stop
        kind, tag = chr(code >> 8 & 0xFF), chr(code & 0xFF)
        schema_id = schema_ids.dictionary[code >> 16].as_py()
        yield _group(frame, rows, kind, tag, schema_id, schemas)


def _group(
    frame: _Frame,
    rows: Positions,
    kind: str,
    tag: str,
    schema_id: int,
    schemas: Mapping[int, bytes],
) -> _Group:
    where = int(rows[0])
    if kind not in _ACTIONS:
        raise _error(frame.raw, where, f"its kind {kind!r} is not known")
    if kind == "M":
        return _Group(rows, kind, tag, None)
    if schema_id not in schemas:
        raise _error(frame.raw, where, f"its schema {schema_id} is not among the frame's")
    plan = plan_for(schemas[schema_id])
    if kind in _TAGS and tag not in _TAGS[kind]:
        raise _error(frame.raw, where, f"its first tuple is marked {tag!r}", plan)
    return _Group(rows, kind, tag, plan)


def _decode_group(frame: _Frame, group: _Group) -> _Part:
    plan = group.plan
    try:
        if plan is None:
            return _Part("", "", "message", decode_messages(_payloads_of(frame, group)))
        relation = plan.relation
        decoded = _decode_table(frame, group, plan)
        return _Part(relation.namespace, relation.name, _ACTIONS[group.kind], decoded)
    except PlacedError as fault:
        row = int(group.rows[fault.position])
        raise _error(frame.raw, row, fault.what, plan, fault.column) from None


def _decode_table(frame: _Frame, group: _Group, plan: TablePlan) -> Decoded:
    rows, oid = group.rows, plan.relation.oid
    other = frame.raw.column("relation").to_numpy()[rows] != oid
    if other.any():
        raise PlacedError(first(other), f"its schema is that of the table with oid {oid}")
    if group.kind == "T":
        return decode_truncates(_payloads_of(frame, group), oid)
    starts, ends = frame.starts[rows], frame.ends[rows]
    other = frame.payloads.uint32(starts + 1) != oid
    if other.any():
        raise PlacedError(first(other), "its message is of another table")
    tuples = read_rows(plan, frame.payloads, starts, ends, kind=group.kind, tag=group.tag)
    return decode_rows(plan, tuples, len(rows), kind=group.kind, tag=group.tag)


def _payloads_of(frame: _Frame, group: _Group) -> list[bytes]:
    payloads: list[bytes] = frame.raw.column("payload").take(pa.array(group.rows)).to_pylist()
    return payloads


def _put_together(
    frame: _Frame,
    groups: list[_Group],
    parts: list[_Part],
    annotations: pa.StringArray | None,
    wanted: Wanted,
) -> pa.RecordBatch:
    raw = frame.raw
    counts = [len(group.rows) for group in groups]
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
        columns[name] = in_order(
            [pa.repeat(getattr(part, name), n) for part, n in zip(parts, counts, strict=True)]
        )
    for field in fields(Decoded):
        columns[field.name] = in_order([getattr(part.decoded, field.name) for part in parts])
    nothing = pa.nulls(raw.num_rows, pa.string())
    columns["annotations"] = nothing if annotations is None else annotations
    columns["error"] = nothing
    return pa.RecordBatch.from_arrays(
        [columns[name] for name in wanted.schema.names], schema=wanted.schema
    )


def _refuse(raw: pa.RecordBatch, bad: Mask, what: str) -> None:
    if bad.any():
        raise _error(raw, first(bad), what)


def _error(
    raw: pa.RecordBatch,
    row: int,
    what: str,
    plan: TablePlan | None = None,
    column: str | None = None,
) -> DecodeError:
    cursor = Cursor(raw.column("commit_lsn")[row].as_py(), raw.column("commit_idx")[row].as_py())
    place = f"the change at {cursor}"
    if plan is not None:
        place += f" of table {plan.relation}"
    if column is not None:
        place += f", column {column!r}"
    return DecodeError(f"Cannot decode {place}: {what}", fix=_FIX)

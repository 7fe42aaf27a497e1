"""A frame cut into groups of rows that decode alike: one table version, kind and tuple form.

Invariant: every row of the frame is in exactly one group, and a message that breaks the
protocol is refused with an error that names its table, its column and its cursor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.cursor_columns import cursor_at
from cdc.decoding.columns import Mask, PlacedError, Positions, first, offsets_of
from cdc.decoding.plan import TablePlan, plan_for
from cdc.decoding.raw import RAW_SCHEMA
from cdc.decoding.rows import Faults, Tuples, read_rows
from cdc.decoding.tuples import Payloads
from cdc.errors import DecodeError, ProtocolError

ACTIONS = {
    "I": "insert",
    "U": "update",
    "D": "delete",
    "T": "truncate",
    "M": "message",
    "S": "schema_change",
    "R": "read",
}
_TAGS = {"I": "N", "U": "NKO", "D": "KO", "R": "N"}  # which tuple may come first
_TAGGED = np.isin(np.arange(256), [ord(kind) for kind in _TAGS])
_FIX = "the source sent what pgoutput does not write; if it repeats, report it with this text"


@dataclass(frozen=True)
class FrameColumns:
    """The columns of a frame as NumPy sees them."""

    raw: pa.RecordBatch
    payloads: Payloads
    starts: Positions
    ends: Positions
    kinds: NDArray[np.uint8]
    tags: NDArray[np.uint8]  # 0 where the kind has none


@dataclass(frozen=True)
class Group:
    """Rows that decode alike, by their positions in the frame, rising."""

    rows: Positions
    kind: str
    tag: str
    schema_id: int
    plan: TablePlan | None  # None for logical messages

    @property
    def has_tuples(self) -> bool:
        """Whether its rows are inserts, updates, deletes or reads."""
        return self.kind in _TAGS


def frame_of(raw: pa.RecordBatch) -> FrameColumns:
    """The columns of a log frame, at least one row of them."""
    if not raw.schema.equals(RAW_SCHEMA, check_metadata=False):
        raise ProtocolError(
            f"decode was handed columns that are not those of a frame: {raw.schema.names}",
            fix="hand it a record batch of RAW_SCHEMA",
        )
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
    return FrameColumns(raw, payloads, starts, ends, kinds, tags)


def groups_of(frame: FrameColumns, schemas: Mapping[int, bytes]) -> Iterator[Group]:
    """The groups in the order of their first rows; ``schemas`` as the frame keeps them."""
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
    frame: FrameColumns,
    rows: Positions,
    kind: str,
    tag: str,
    schema_id: int,
    schemas: Mapping[int, bytes],
) -> Group:
    where = int(rows[0])
    if kind not in ACTIONS:
        raise _error(frame.raw, where, f"its kind {kind!r} is not known")
    if kind == "M":
        return Group(rows, kind, tag, schema_id, None)
    if schema_id not in schemas:
        raise _error(frame.raw, where, f"its schema {schema_id} is not among the frame's")
    plan = plan_for(schemas[schema_id])
    if kind in _TAGS and tag not in _TAGS[kind]:
        raise _error(frame.raw, where, f"its first tuple is marked {tag!r}", plan)
    return Group(rows, kind, tag, schema_id, plan)


def read_group(frame: FrameColumns, group: Group, plan: TablePlan) -> Tuples:
    """The tuples of a group's rows."""
    check_relation(frame, group, plan)
    rows, oid = group.rows, plan.relation.oid
    starts, ends = frame.starts[rows], frame.ends[rows]
    other = frame.payloads.uint32(starts + 1) != oid
    if other.any():
        raise PlacedError(first(other), "its message is of another table")
    return read_rows(plan, frame.payloads, starts, ends, kind=group.kind, tag=group.tag)


def check_relation(frame: FrameColumns, group: Group, plan: TablePlan) -> None:
    """Refuse rows whose schema is that of another table."""
    rows, oid = group.rows, plan.relation.oid
    other = frame.raw.column("relation").to_numpy()[rows] != oid
    if other.any():
        raise PlacedError(first(other), f"its schema is that of the table with oid {oid}")


def payloads_of(frame: FrameColumns, group: Group) -> list[bytes]:
    """The messages of a group whose kind is rare."""
    payloads: list[bytes] = frame.raw.column("payload").take(pa.array(group.rows)).to_pylist()
    return payloads


@contextmanager
def naming(frame: FrameColumns, group: Group) -> Iterator[None]:
    """Turn a fault at a place of the group into an error that names table, column and cursor."""
    try:
        yield
    except PlacedError as fault:
        row = int(group.rows[fault.position])
        raise _error(frame.raw, row, fault.what, group.plan, fault.column) from None


@contextmanager
def fitting(count: int, form: str) -> Iterator[None]:
    """Turn what Arrow says of a column that would be too large into an error that says what to do.

    A string column holds 2 GiB. Long names and escapes can make that of a small frame. A message of
    2 GB that does not fit alone gets an error as its row (``isolate``), and is a dead letter.
    """
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowCapacityError) as fault:
        raise DecodeError(
            f"{count} changes do not fit into one Arrow batch as {form}: {fault}",
            fix="decode fewer rows at once: lower the batch size of the source",
        ) from fault


def errors_of(frame: FrameColumns, group: Group, faults: Faults) -> pa.StringArray:
    """For each row of the group why it cannot be decoded, null for those that can."""
    if not faults.by_row:
        return pa.nulls(len(group.rows), pa.string())
    texts: list[str | None] = [None] * len(group.rows)
    for position, (column, what) in faults.by_row.items():
        row = int(group.rows[position])
        texts[position] = f"cannot decode {_place(frame.raw, row, group.plan, column)}: {what}"
    return pa.array(texts, pa.string())


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
    return DecodeError(f"cannot decode {_place(raw, row, plan, column)}: {what}", fix=_FIX)


def _place(raw: pa.RecordBatch, row: int, plan: TablePlan | None, column: str | None) -> str:
    place = f"the change at {cursor_at(raw, row)}"
    if plan is not None:
        place += f" of table {plan.relation}"
    return place if column is None else f"{place}, column {column!r}"

"""A frame of raw rows to typed Arrow columns, one table version after another.

Where ``changes`` gives one row per change with JSON in it, here every column of a table has its own
Arrow type. Invariant: as there, every row of a table is there in the frame's order, and
one with a value that its Arrow type cannot hold says so in ``error`` and has no record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.columns import Mask, TextColumn
from cdc.decoding.groups import (
    ACTIONS,
    FrameColumns,
    Group,
    errors_of,
    fitting,
    frame_of,
    groups_of,
    naming,
    read_group,
)
from cdc.decoding.joins import repeated
from cdc.decoding.plan import TablePlan
from cdc.decoding.relation import Relation
from cdc.decoding.rows import Faults, Tuples, differences, filled
from cdc.decoding.types.text import TEXT


@dataclass(frozen=True)
class TableRows:
    """The inserts, updates and deletes of one table version, in order."""

    relation: Relation
    rows: pa.RecordBatch  # of ``table_schema(relation)``


def table_schema(plan: TablePlan, *, compared: bool = False) -> pa.Schema:
    """The columns of a table's typed rows.

    ``record`` is the row after the change, or of a delete what the source said of the old one.
    ``before`` is the old row of an update as far as it was sent. Columns whose value was not sent
    are null in ``record`` and named in ``unchanged``.

    Where rows are ``compared``, ``changes`` has the old values of the columns that an update
    changed, ``changed`` their names (both null where no old row was sent), and ``record_pks`` the
    texts of the key.
    """
    row = table_type(plan)
    more = [
        pa.field("changes", row),
        pa.field("changed", pa.list_(pa.string())),
        pa.field("record_pks", pa.list_(pa.string())),
    ]
    return pa.schema(
        [
            pa.field("commit_lsn", pa.int64(), nullable=False),
            pa.field("commit_idx", pa.int64(), nullable=False),
            pa.field("commit_timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
            pa.field("xid", pa.int64(), nullable=False),
            pa.field("action", pa.string(), nullable=False),
            pa.field("record", row),
            pa.field("before", row),
            pa.field("unchanged", pa.list_(pa.string())),
            pa.field("error", pa.string()),
            *(more if compared else ()),
        ]
    )


def table_type(plan: TablePlan) -> pa.StructType:
    """A table's columns with their Arrow types."""
    columns = zip(plan.names, plan.types, strict=True)
    return pa.struct([pa.field(name, form.arrow) for name, form in columns])


def decode_tables(
    raw: pa.RecordBatch, schemas: Mapping[int, bytes], *, compared: bool = False
) -> Iterator[TableRows]:
    """The rows of RAW_SCHEMA by table version; other changes have none.

    Who wants old and new rows ``compared`` pays for it.
    """
    if not raw.num_rows:
        return
    frame = frame_of(raw)
    tables: dict[int, list[Group]] = {}
    for group in groups_of(frame, schemas):
        if group.plan is not None and group.has_tuples:
            tables.setdefault(group.schema_id, []).append(group)
    for groups in tables.values():
        plan = groups[0].plan
        assert plan is not None
        with fitting(raw.num_rows, "typed columns"):
            batch = pa.concat_batches(
                [_decode_group(frame, group, plan, compared) for group in groups]
            )
            if len(groups) > 1:
                order = np.argsort(np.concatenate([group.rows for group in groups]), kind="stable")
                batch = batch.take(pa.array(order))
        yield TableRows(plan.relation, batch)


def _decode_group(
    frame: FrameColumns, group: Group, plan: TablePlan, compared: bool
) -> pa.RecordBatch:
    with naming(frame, group):
        tuples = read_group(frame, group, plan)
    faults, count = tuples.faults, len(group.rows)
    schema = table_schema(plan, compared=compared)
    row = schema.field("record").type
    said = {
        "record": _struct(plan, tuples.row, faults, row, count),
        "before": pa.nulls(count, row),
        "unchanged": _names_where(plan, [c.unchanged for c in tuples.row], count),
    }
    old = tuples.old if group.kind == "U" else None
    if old is not None:
        said["before"] = _struct(plan, old, faults, row, count)
    if compared:
        said |= _comparison(plan, tuples, old, said["before"], count, whole=group.tag == "O")
    if faults.by_row:
        bad = np.zeros(count, bool)
        bad[list(faults.by_row)] = True
        said = {name: _null_where(bad, column) for name, column in said.items()}
    take = pa.array(group.rows)
    columns = {name: frame.raw.column(name).take(take) for name in ("commit_lsn", "commit_idx")}
    columns["commit_timestamp"] = (
        frame.raw.column("commit_ts").take(take).view(pa.timestamp("us", tz="UTC"))
    )
    columns["xid"] = frame.raw.column("xid").take(take)
    columns["action"] = repeated(ACTIONS[group.kind], count)
    columns |= said
    columns["error"] = errors_of(frame, group, faults)
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _comparison(
    plan: TablePlan,
    tuples: Tuples,
    old: list[TextColumn] | None,
    before: pa.StructArray,
    count: int,
    *,
    whole: bool,
) -> dict[str, pa.Array]:
    """What differs between the old row and the new one, and the key, as ``rows`` writes them."""
    compared = {"record_pks": _keys(plan, tuples, old, count)}
    if old is None:
        compared["changes"] = pa.nulls(count, before.type)
        compared["changed"] = pa.nulls(count, pa.list_(pa.string()))
        return compared
    carried = range(len(old)) if whole else plan.identity
    masks: list[Mask | None] = [None] * len(old)
    values = [pa.nulls(count, field.type) for field in before.type]
    for at in carried:
        masks[at] = differs = differences(old[at], tuples.row[at])
        values[at] = _null_where(np.logical_not(differs), before.field(at))
    compared["changes"] = (
        pa.StructArray.from_arrays(values, fields=list(before.type)) if values else before
    )
    compared["changed"] = _names_where(plan, masks, count, none=())
    return compared


def _keys(
    plan: TablePlan, tuples: Tuples, old: list[TextColumn] | None, count: int
) -> pa.ListArray:
    """The texts of the key's values, in key order."""
    key = plan.relation.key
    columns = []
    for at in key:
        column = tuples.row[at] if old is None else filled(tuples.row[at], old[at])
        columns.append(tuples.faults.sound(plan.names[at], column.values, TEXT.typed))
    by_row = np.arange(count * len(key)).reshape(len(key), count).T.ravel()
    values = pa.concat_arrays(columns).take(pa.array(by_row)) if key else pa.nulls(0, pa.string())
    offsets = np.arange(count + 1, dtype=np.int32) * len(key)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _struct(
    plan: TablePlan, columns: list[TextColumn], faults: Faults, row: pa.StructType, count: int
) -> pa.StructArray:
    if not columns:
        return pa.array([{}] * count, row)  # of no arrays Arrow could not tell how many rows
    arrays = [
        faults.sound(name, column.values, form.typed)
        for name, column, form in zip(plan.names, columns, plan.types, strict=True)
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(row))


def _names_where(
    plan: TablePlan,
    masks: list[Mask | None],
    count: int,
    *,
    none: tuple[()] | None = None,
) -> pa.ListArray:
    """The names of the columns whose mask is set; ``none`` where there are none."""
    kind = pa.list_(pa.string())
    found = [(n, mask) for n, mask in zip(plan.names, masks, strict=True) if mask is not None]
    if not found:
        return pa.array([none] * count, kind)
    table = np.stack([mask for _, mask in found], axis=1)
    names = np.array([name for name, _ in found], dtype=object)
    offsets = np.concatenate([[0], np.cumsum(table.sum(axis=1))])
    values = pa.array(names[np.nonzero(table)[1]], pa.string())
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
    return lists if none is not None else _null_where(np.logical_not(table.any(axis=1)), lists)


def _null_where(mask: Mask, values: pa.Array) -> pa.Array:
    return pc.if_else(pa.array(mask), pa.scalar(None, values.type), values)

"""What inserts, updates and deletes say: the record, the changes, the key, what was not sent.

The rows handed in are of one table version, one kind and one form (with or without an old tuple).
What must always hold: an unchanged TOAST value is filled from the old row where the source sent
one, and is otherwise left out and listed; it is never null and never made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.columns import Mask, PlacedError, Positions, TextColumn, first, nulls_of
from cdc.decoding.objects import Member, array_of, names_where, object_of
from cdc.decoding.plan import TablePlan
from cdc.decoding.tuples import Payloads, read_tuples
from cdc.decoding.types import Family, JsonColumn, text_json

_TAG = 5  # after the kind byte and the oid
_NEW = ord("N")


@dataclass(frozen=True)
class Decoded:
    """The columns of CHANGE_SCHEMA that depend on the tuples."""

    record: pa.StringArray
    changes: pa.StringArray
    record_pks: pa.StringArray
    unchanged: pa.StringArray


@dataclass(frozen=True)
class Tuples:
    """The old and the new tuple of each row, as columns; None where the messages have none."""

    old: list[TextColumn] | None
    new: list[TextColumn] | None


def read_rows(
    plan: TablePlan, payloads: Payloads, starts: Positions, ends: Positions, *, kind: str, tag: str
) -> Tuples:
    """Walk messages whose first tuple has this ``tag``: N is a new one, K and O are old ones."""
    columns, at = read_tuples(payloads, starts + _TAG + 1, ends, plan.names)
    old = None if tag == "N" else columns
    new = columns if tag == "N" else None
    if old is not None and kind == "U":
        _refuse(at >= ends, "its message ends before the new tuple")
        _refuse(payloads.bytes[at] != _NEW, "no new tuple follows its old one")
        new, at = read_tuples(payloads, at + 1, ends, plan.names)
    _refuse(at != ends, "bytes follow its last tuple")
    return Tuples(old, new)


def decode_rows(plan: TablePlan, tuples: Tuples, count: int, *, kind: str, tag: str) -> Decoded:
    """The JSON of rows that ``read_rows`` read."""
    row = tuples.new if tuples.new is not None else tuples.old
    assert row is not None  # every kind of row has one of them
    old = tuples.old if kind == "U" else None
    if old is not None and tag == "O":
        row = [_filled(column, before) for column, before in zip(row, old, strict=True)]
    json = [_json_of(*each) for each in zip(plan.families, row, plan.names, strict=True)]
    record = object_of(
        [
            Member(f"{name}:", column, None if text.unchanged is None else ~text.unchanged)
            for name, column, text in zip(plan.json_names, json, row, strict=True)
        ],
        count,
    )
    if kind != "U":
        changes = pa.nulls(count, pa.string())
    else:
        compared = range(len(plan.names)) if tag == "O" else plan.identity
        changes = _changes(plan, old, row, compared, count)
    return Decoded(
        record, changes, _keys(plan, json, row, old, count), _unchanged(plan, row, count)
    )


def _json_of(family: Family, text: TextColumn, name: str) -> JsonColumn:
    try:
        return family(text.values)
    except PlacedError as fault:
        raise PlacedError(fault.position, fault.what, name) from None


def _filled(column: TextColumn, before: TextColumn) -> TextColumn:
    """Take what the source did not send again from the old row."""
    if column.unchanged is None:
        return column
    values = pc.if_else(pa.array(column.unchanged), before.values, column.values)
    if before.unchanged is None:
        return TextColumn(values)
    return TextColumn(values, column.unchanged & before.unchanged)


def _changes(
    plan: TablePlan,
    old: list[TextColumn] | None,
    row: list[TextColumn],
    compared: Sequence[int],
    count: int,
) -> pa.StringArray:
    """The old values of those of the ``compared`` columns that differ."""
    if old is None:
        return object_of([], count)
    members = []
    for index in compared:
        differs = _differs(old[index], row[index])
        if differs.any():
            column = _json_of(plan.families[index], old[index], plan.names[index])
            members.append(Member(f"{plan.json_names[index]}:", column, differs))
    return object_of(members, count)


def _differs(old: TextColumn, new: TextColumn) -> Mask:
    differs: Mask = pc.fill_null(pc.not_equal(old.values, new.values), False).to_numpy(
        zero_copy_only=False
    )
    if old.values.null_count or new.values.null_count:
        differs = differs | (nulls_of(old.values) != nulls_of(new.values))
    for side in (old, new):
        if side.unchanged is not None:
            differs = differs & ~side.unchanged
    return differs


def _keys(
    plan: TablePlan,
    json: list[JsonColumn],
    row: list[TextColumn],
    old: list[TextColumn] | None,
    count: int,
) -> pa.StringArray:
    """The key's values as JSON strings: of each the text that Postgres wrote."""
    columns = []
    for index in plan.relation.key:
        column, text = json[index], row[index]
        if text.unchanged is not None and old is not None:
            column = _json_of(text_json, _filled(text, old[index]), plan.names[index])
        elif not column.quoted:
            column = _json_of(text_json, text, plan.names[index])
        columns.append(column)
    return array_of(columns, count)


def _unchanged(plan: TablePlan, row: list[TextColumn], count: int) -> pa.StringArray:
    return names_where(
        [
            (name, text.unchanged)
            for name, text in zip(plan.json_names, row, strict=True)
            if text.unchanged is not None
        ],
        count,
    )


def _refuse(bad: Mask, what: str) -> None:
    if bad.any():
        raise PlacedError(first(bad), what)

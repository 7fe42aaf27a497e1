"""Rows of typed columns in the form that both sides of a comparison share. Pure, whole columns.

A destination with typed columns does not have the texts that the source wrote. So the source's
texts become typed values too, by the same plan, and both sides are written as a JSON object of
texts: equal values have equal texts. A value that its type cannot have makes the whole row
``NO_PLACE``, which equals no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.decoding.columns import BadValuesError
from cdc.decoding.lossless_cast import conform
from cdc.decoding.plan import TablePlan
from cdc.decoding.typed import decode_tables
from cdc.decoding.types.form import TypeForm
from cdc.decoding.types.objects import JsonMember, array_of, object_of
from cdc.decoding.types.text import text_json
from cdc.errors import OperatorError

NO_PLACE: Final = '{"":"a value of it has no place in its type"}'

_SCALE_PLAIN_MAX: Final = 6  # smaller decimals have an exponent in Arrow, and none in Postgres


def source_contents(raw: pa.RecordBatch, schemas: Mapping[int, bytes]) -> pa.StringArray:
    """The content of raw rows of one table version."""
    (table,) = decode_tables(raw, schemas)
    record = table.rows.column("record")
    names = record.type.names
    content = contents(names, [pc.struct_field(record, [at]) for at in range(len(names))])
    return pc.if_else(table.rows.column("error").is_null(), content, NO_PLACE)


def typed_contents(plan: TablePlan, rows: pa.Table) -> pa.StringArray:
    """The content of a destination's rows in the columns of the plan."""
    columns, bad = [], np.zeros(rows.num_rows, bool)
    for name, form in zip(plan.names, plan.types, strict=True):
        column, lost = _in_type(rows.column(name).combine_chunks(), form)
        columns.append(column)
        bad |= lost
    content = contents(plan.names, columns)
    return pc.if_else(pa.array(bad), NO_PLACE, content) if bad.any() else content


def contents(names: Sequence[str], columns: Sequence[pa.Array]) -> pa.StringArray:
    """The values of rows as JSON objects of texts."""
    members = [
        JsonMember(f"{orjson.dumps(name).decode()}:", text_json(_text(column).cast(pa.binary())))
        for name, column in zip(names, columns, strict=True)
    ]
    return object_of(members, len(columns[0]) if columns else 0)


def key_texts(plan: TablePlan, rows: pa.Table, key: Sequence[str]) -> pa.StringArray:
    """The keys of rows as ``held.key_text`` has them, with the texts that the source wrote."""
    columns = [
        text_json(_source_text(rows.column(name).combine_chunks(), plan, name).cast(pa.binary()))
        for name in key
    ]
    return array_of(columns, rows.num_rows)


def typed_keys(plan: TablePlan, keys: Sequence[Sequence[str]], key: Sequence[str]) -> pa.Table:
    """Keys of the source in the types of their columns; those that have no place are left out."""
    columns, bad = [], np.zeros(len(keys), bool)
    for at, name in enumerate(key):
        form = plan.types[plan.names.index(name)]
        column, lost = _parsed(pa.array([each[at] for each in keys], pa.string()), form)
        columns.append(column)
        bad |= lost
    found = pa.Table.from_arrays(columns, names=list(key))
    return found.filter(pa.array(~bad)) if bad.any() else found


def _in_type(values: pa.Array, form: TypeForm) -> tuple[pa.Array, NDArray[np.bool_]]:
    """A column in the type of the source; a text may stand for any value."""
    if pa.types.is_string(values.type) and not pa.types.is_string(form.arrow):
        return _parsed(values, form)
    if pa.types.is_nested(form.arrow) or values.type == form.arrow:
        return values, np.zeros(len(values), bool)
    return conform(values, form.arrow)


def _parsed(texts: pa.StringArray, form: TypeForm) -> tuple[pa.Array, NDArray[np.bool_]]:
    bad = np.zeros(len(texts), bool)
    while True:
        try:
            return form.typed(texts.cast(pa.binary())), bad
        except BadValuesError as refused:
            bad[list(refused.faults)] = True
            texts = pc.if_else(pa.array(bad), pa.scalar(None, pa.string()), texts)


def _text(values: pa.Array) -> pa.StringArray:
    """A text per value, the same for equal values of one type."""
    kind = values.type
    if pa.types.is_string(kind):
        return values
    if pa.types.is_binary(kind):
        texts = [None if value is None else value.hex() for value in values.to_pylist()]
        return pa.array(texts, pa.string())
    if not pa.types.is_nested(kind):
        return values.cast(pa.string())
    return pa.array([None if each is None else _json(each) for each in _plain(values)], pa.string())


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _plain(values: pa.Array) -> list[object]:
    """The values with a text in place of everything that is within a list, map or struct."""
    kind = values.type
    if pa.types.is_struct(kind):
        fields = [_plain(pc.struct_field(values, [at])) for at in range(kind.num_fields)]
        rows: list[object] = [list(row) for row in zip(*fields, strict=True)]
        return [row if there else None for row, there in zip(rows, values.is_valid(), strict=True)]
    if pa.types.is_map(kind):
        values = values.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
    elif not pa.types.is_list(kind):
        return list(_text(values).to_pylist())
    inner = _plain(values.values)
    offsets = values.offsets.to_pylist()
    parts = zip(offsets, offsets[1:], values.is_valid().to_pylist(), strict=False)
    return [inner[start:end] if there else None for start, end, there in parts]


def _source_text(values: pa.Array, plan: TablePlan, name: str) -> pa.StringArray:
    """What the source wrote for values of a key. OperatorError if that cannot be said exactly."""
    kind = values.type
    if pa.types.is_string(kind):
        return values
    if pa.types.is_integer(kind) or pa.types.is_date(kind):
        return values.cast(pa.string())
    if pa.types.is_decimal(kind):
        if kind.scale <= _SCALE_PLAIN_MAX:
            return values.cast(pa.string())
        return pa.array([None if v is None else f"{v:f}" for v in values.to_pylist()], pa.string())
    if pa.types.is_boolean(kind):
        return pc.if_else(values, "t", "f")
    if pa.types.is_timestamp(kind):
        words = values.cast(pa.timestamp("us")).cast(pa.string())
        words = pc.replace_substring_regex(words, r"\.?0*$", "") if len(words) else words
        return words if kind.tz is None else pc.binary_join_element_wise(words, "+00", "")
    if pa.types.is_binary(kind):
        return pa.array(
            [None if v is None else f"\\x{v.hex()}" for v in values.to_pylist()], pa.string()
        )
    raise OperatorError(
        f"column {name} of the key of {plan.relation} has the type {kind} at the destination, "
        "from which the text of a key cannot be restored",
        fix="compare the other tables; this one can only be backfilled",
        kind="not_comparable",
    )

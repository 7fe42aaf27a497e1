"""Functions as an operator would write them, for tests."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

NOT_A_FUNCTION = 1


def large(rows: pa.RecordBatch) -> pa.Array:
    return pc.greater(pc.struct_field(rows.column("record"), "amount"), 100)


def summary(rows: pa.RecordBatch) -> pa.Array:
    ids = pc.struct_field(rows.column("record"), "id").cast(pa.string())
    return pc.binary_join_element_wise('{"order":', ids, "}", "")


def by_note(rows: pa.RecordBatch) -> pa.Array:
    return pc.struct_field(rows.column("record"), "note")


def fails_on_zero(rows: pa.RecordBatch) -> pa.Array:
    amounts = pc.struct_field(rows.column("record"), "amount")
    if pc.any(pc.equal(amounts, 0)).as_py():
        raise ValueError("an amount is zero")
    return pc.binary_join_element_wise(amounts.cast(pa.string()), "")


def not_json(rows: pa.RecordBatch) -> pa.Array:
    return pc.struct_field(rows.column("record"), "note")


def too_few(rows: pa.RecordBatch) -> pa.Array:
    return pa.array([], pa.bool_())


def numbers(rows: pa.RecordBatch) -> pa.Array:
    return pa.array([1] * rows.num_rows)


def nothing(rows: pa.RecordBatch) -> None:
    return None

"""Values of one table version in the types of another: the same value, or none and a reason."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.decoding.lossless_cast import conform, conform_row

NAN = float("nan")
UTC_TYPE, LOCAL = pa.timestamp("us", tz="UTC"), pa.timestamp("us")


@pytest.mark.parametrize(
    ("values", "source", "target", "become", "bad"),
    [
        ([1, None, -(2**31)], pa.int32(), pa.int64(), [1, None, -(2**31)], []),
        ([1, 2**31, None, 5], pa.int64(), pa.int32(), [1, None, None, 5], [1]),
        ([1, 2**60 + 1], pa.int64(), pa.float64(), [1.0, None], [1]),
        ([0.5, 0.1, None], pa.float64(), pa.float32(), [0.5, None, None], [1]),
        ([1.0, 1.5, NAN], pa.float64(), pa.int32(), [1, None, None], [1, 2]),
        ([7, 123456], pa.int32(), pa.decimal128(5, 2), [Decimal("7.00"), None], [1]),
        ([Decimal("1.50"), Decimal("1.55")], pa.decimal128(5, 2), pa.decimal128(5, 1),
         [Decimal("1.5"), None], [1]),
        ([0.25, 0.123], pa.float64(), pa.decimal128(5, 2), [Decimal("0.25"), None], [1]),
        ([Decimal("1.50")], pa.decimal128(5, 2), pa.string(), ["1.50"], []),
        ([Decimal("0.00000001")], pa.decimal128(9, 8), pa.string(), [None], [0]),
        (["12", "x", None, "99999999999"], pa.string(), pa.int32(), [12, None, None, None], [1, 3]),
        (["1.5", "1.555", "NaN"], pa.string(), pa.decimal128(5, 2),
         [Decimal("1.50"), None, None], [1, 2]),
        ([True, None], pa.bool_(), pa.string(), ["true", None], []),
        ([1, None], pa.int32(), pa.bool_(), [None, None], [0]),
        ([date(2026, 2, 3)], pa.date32(), LOCAL, [datetime(2026, 2, 3)], []),
        ([datetime(2026, 2, 3), datetime(2026, 2, 3, 4)], LOCAL, pa.date32(),
         [date(2026, 2, 3), None], [1]),
        ([datetime(2026, 2, 3), None], LOCAL, UTC_TYPE, [None, None], [0]),
        ([datetime(2026, 2, 3, tzinfo=UTC)], UTC_TYPE, LOCAL, [None], [0]),
        ([5], pa.int64(), UTC_TYPE, [None], [0]),
        ([b"a"], pa.binary(), pa.string(), [None], [0]),
        ([[1], None], pa.list_(pa.int32()), pa.list_(pa.int64()), [None, None], [0]),
        ([], pa.int64(), pa.int32(), [], []),
    ],
)  # fmt: skip
def test_a_value_is_the_same_or_is_refused(
    values: list[Any],
    source: pa.DataType,
    target: pa.DataType,
    become: list[Any],
    bad: list[int],
) -> None:
    found, refused = conform(pa.array(values, source), target)
    found.validate(full=True)
    assert (found.type, found.to_pylist()) == (target, become)
    assert refused.nonzero()[0].tolist() == bad


@given(st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), max_size=50))
def test_every_number_that_a_smaller_type_cannot_hold_is_found(values: list[int | None]) -> None:
    found, refused = conform(pa.array(values, pa.int64()), pa.int16())
    fits = [value is None or -(2**15) <= value < 2**15 for value in values]
    assert refused.tolist() == [not one for one in fits]
    assert found.to_pylist() == [v if ok else None for v, ok in zip(values, fits, strict=True)]


def test_columns_go_by_name_and_composites_likewise() -> None:
    inner = pa.struct([("a", pa.int32()), ("gone", pa.string())])
    old = pa.struct([("id", pa.int64()), ("pair", inner), ("dropped", pa.int32())])
    new_inner = pa.struct([("added", pa.string()), ("a", pa.int64())])
    new = pa.struct([("added", pa.date32()), ("id", pa.int16()), ("pair", new_inner)])
    rows = pa.array(
        [
            {"id": 1, "pair": {"a": 2, "gone": "x"}, "dropped": 3},
            None,
            {"id": 2**40, "pair": None, "dropped": None},
        ],
        old,
    )
    found, faults = conform_row(rows, new)
    found.validate(full=True)
    assert found.to_pylist() == [
        {"added": None, "id": 1, "pair": {"added": None, "a": 2}},
        None,
        {"added": None, "id": None, "pair": None},
    ]
    assert {name: bad.tolist() for name, bad in faults.items()} == {"id": [False, False, True]}

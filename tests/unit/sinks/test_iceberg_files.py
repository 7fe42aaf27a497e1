"""Files and columns of Iceberg tables, without a table: bounds, numbers, keys to delete."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks.lakehouse.iceberg.encoding import bounds_of, described, encode
from sinks.lakehouse.iceberg.merging import _known
from sinks.lakehouse.iceberg.schema import Columns, Layout, can_keep_files, planned
from sinks.lakehouse.table import DataFile


def layout(*fields: pa.Field) -> Layout:
    return planned(pa.schema(fields), [None] * len(fields), None)


@given(st.lists(st.one_of(st.none(), st.text(max_size=40)), min_size=1, max_size=20))
def test_bounds_of_texts_hold_for_every_row(texts: list[str | None]) -> None:
    known = layout(pa.field("t", pa.string()))
    rows = pa.table({"t": pa.array(texts, pa.string())})
    file = described("x", encode(rows, known.parquet()), known.schema, ())
    bounds = bounds_of(file, known.schema).get("t")
    there = [text for text in texts if text is not None]
    if bounds is not None:
        assert all(str(bounds[0]) <= text <= str(bounds[1]) for text in there)
    assert (file.null_value_counts or {})[1] == len(texts) - len(there)


def test_bounds_are_those_that_the_specification_asks_for() -> None:
    known = layout(
        pa.field("n", pa.int16()), pa.field("d", pa.decimal128(9, 2)), pa.field("e", pa.date32())
    )
    rows = pa.table(
        [
            pa.array([-2, 300], pa.int16()),
            pa.array([Decimal("-1.28"), Decimal("2.56")], pa.decimal128(9, 2)),
            pa.array([0, 2**31 - 1], pa.int32()).cast(pa.date32()),  # infinity
        ],
        ["n", "d", "e"],
    )
    file = described("x", encode(rows, known.parquet()), known.schema, ())
    assert file.lower_bounds == {1: b"\xfe\xff\xff\xff", 2: b"\x80", 3: b"\0\0\0\0"}
    assert file.upper_bounds == {1: b"\x2c\1\0\0", 2: b"\1\0", 3: b"\xff\xff\xff\x7f"}
    assert bounds_of(file, known.schema) == {"n": (-2, 300)}


_SOME = pa.struct(
    [pa.field("a", pa.int16()), pa.field("b", pa.list_(pa.map_(pa.string(), pa.int16())))]
)


def test_columns_are_the_same_after_a_way_through_iceberg() -> None:
    schema = pa.schema(
        [
            pa.field("s", _SOME, metadata={"walbrook.attnum": "4"}),
            pa.field("n", pa.int16()),
            pa.field("i", pa.int32()),
            pa.field("t", pa.timestamp("us", tz="UTC")),
        ]
    )
    known = planned(schema, [None] * 4, None)
    again = Layout(known.schema, Columns.parse(str(known.columns)))
    assert again.arrow().equals(schema, check_metadata=True)
    numbers = [column.field_id for column in known.schema.fields]
    assert numbers == [1, 2, 3, 4]
    assert known.schema.highest_field_id == 9


@pytest.mark.parametrize(
    ("old", "new", "keeps"),
    [
        (pa.int16(), pa.int32(), True),
        (pa.int32(), pa.int64(), True),
        (pa.int64(), pa.int32(), False),
        (pa.float32(), pa.float64(), True),
        (pa.decimal128(9, 2), pa.decimal128(20, 2), True),
        (pa.decimal128(9, 2), pa.decimal128(20, 4), False),
        (pa.date32(), pa.timestamp("us"), False),
        (pa.list_(pa.int32()), pa.list_(pa.int32()), True),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), False),
    ],
)
def test_a_column_keeps_its_number_where_old_files_can_be_read_in_the_new_type(
    old: pa.DataType, new: pa.DataType, keeps: bool
) -> None:
    known = layout(pa.field("a", pa.string()), pa.field("x", old))
    wanted = pa.schema([pa.field("y", new)])
    assert can_keep_files(known, wanted, ["x"]) == keeps
    after = planned(wanted, ["x"], known, known.schema.highest_field_id, 1)
    assert (after.schema.fields[0].field_id == 2) == keeps


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=6),
    st.lists(st.integers(-3, 45), max_size=30),
)
def test_a_key_needs_a_delete_where_a_file_has_room_for_it(
    files: list[tuple[int, int]], keys: list[int]
) -> None:
    held = [
        DataFile(str(at), 1, 1, bounds={"k": (low, low + n)}) for at, (low, n) in enumerate(files)
    ]
    found = _known(pa.table({"k": pa.array(keys, pa.int32())}), held)
    expected = {key for key in keys if any(low <= key <= low + n for low, n in files)}
    assert sorted(found.column("k").to_pylist()) == sorted(expected)

"""One table of the log with typed columns, whatever the versions its rows were written in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cdc.decoding.typed import table_schema
from cdc.errors import ConfigError
from cdc.log.open import open_log
from spark_pipeline.source import table_reader
from spark_pipeline.source.offsets import ending, starting
from spark_pipeline.source.options import Options
from spark_pipeline.source.range_reader import RangeReader
from spark_pipeline.source.table_reader import check_schema, newest_version, spark_schema
from tests import pgoutput
from tests.pgoutput import UNCHANGED
from tests.wire_messages import transaction
from tests.written_log import write

INT4, INT8, TEXT = 23, 20, 25
ITEM = ("public", "item")
FIRST = pgoutput.relation(1, "public", "item", [("id", INT8, True), ("n", TEXT), ("old", INT4)])
SECOND = pgoutput.relation(1, "public", "item", [("id", INT4, True), ("n", INT4), ("new", TEXT)])
PART = pgoutput.relation(2, "public", "part", [("id", INT4, True)])
RENAMED = pgoutput.relation(1, "public", "thing", [("id", INT4, True), ("n", INT4), ("new", TEXT)])


def read(log: Path, schema: pa.Schema | None = None, **given: str) -> list[dict[str, Any]]:
    options = Options.read({"path": str(log), "table": "public.item"} | given)
    view = open_log(log)
    target = schema or table_schema(newest_version(view, str(log), ITEM))
    reader = RangeReader(options, target)
    planned = reader.plan(starting(view, options), ending(view, options))
    batches = [batch for partition in planned for batch in reader.read(partition)]
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema.equals(target)
    return [row for batch in batches for row in batch.to_pylist()]


def test_rows_of_all_versions_have_the_columns_of_the_newest(tmp_path: Path) -> None:
    write(
        tmp_path,
        [FIRST, *transaction(100, pgoutput.insert(1, ["1", "12", "7"]))],
        [PART, *transaction(200, pgoutput.insert(2, ["9"]))],
        [
            SECOND,
            *transaction(
                300,
                pgoutput.update(1, ["2", "13", UNCHANGED], key=["1", None, None]),
                pgoutput.truncate([2, 1]),
                pgoutput.logical_message("p", b"x"),
                pgoutput.delete(1, key=["2", None, None]),
            ),
        ],
        [PART, *transaction(400, pgoutput.insert(2, ["9"]))],
    )
    rows = read(tmp_path)
    assert [(row["commit_lsn"], row["commit_idx"], row["action"]) for row in rows] == [
        (100, 0, "insert"),
        (300, 0, "update"),
        (300, 5, "delete"),
        (300, 3, "truncate"),
    ]
    assert [row["record"] for row in rows] == [
        {"id": 1, "n": 12, "new": None},
        {"id": 2, "n": 13, "new": None},
        {"id": 2, "n": None, "new": None},
        None,
    ]
    assert rows[3]["commit_timestamp"] == rows[2]["commit_timestamp"]
    assert rows[1]["before"] == {"id": 1, "n": None, "new": None}
    assert [row["unchanged"] for row in rows] == [None, ["new"], None, None]
    assert all(row["error"] is None for row in rows)


def test_a_value_that_the_newest_type_cannot_hold_is_its_rows_error(tmp_path: Path) -> None:
    big = str(2**40)
    write(
        tmp_path,
        [
            FIRST,
            *transaction(
                100,
                pgoutput.insert(1, ["1", "12", "7"]),
                pgoutput.insert(1, ["2", "twelve", "7"]),
                pgoutput.insert(1, [big, "no", "7"]),
                pgoutput.update(1, ["3", "1", "7"], old=[big, "1", "7"]),
            ),
        ],
        [SECOND, *transaction(200, pgoutput.insert(1, ["4", "5", "n"]))],
    )
    rows = read(tmp_path)
    assert [row["record"] and row["record"]["id"] for row in rows] == [1, None, None, None, 4]
    assert [row["before"] for row in rows] == [None] * 5
    said = [row["error"] for row in rows]
    assert (said[0], said[4]) == (None, None)
    assert "at 0/64:1 of table public.item" in said[1]
    assert "'n' was string when it was written, and this value cannot become int32" in said[1]
    assert "'id' was int64" in said[2]
    assert "'id' was int64" in said[3]


def test_the_newest_version_is_found_far_from_the_end_and_within_a_batch(tmp_path: Path) -> None:
    others = [[PART, *transaction(n * 100, pgoutput.insert(2, ["9"]))] for n in range(4, 30)]
    write(
        tmp_path,
        [FIRST, *transaction(100, pgoutput.insert(1, ["1", "a", "7"]))],
        [
            *transaction(200, pgoutput.insert(1, ["1", "a", "7"])),
            SECOND,
            *transaction(300, pgoutput.insert(1, ["1", "2", "n"])),
        ],
        *others,
    )
    found = table_schema(newest_version(open_log(tmp_path), "here", ITEM))
    assert found.field("record").type.field("n").type == pa.int32()
    assert [field.name for field in found.field("record").type] == ["id", "n", "new"]


def test_the_schema_names_the_columns_of_the_key(tmp_path: Path) -> None:
    both = pgoutput.relation(
        1, "public", "item", [("a", INT4, True), ("n", TEXT), ("b", INT4, True)]
    )
    write(tmp_path, [both, *transaction(100, pgoutput.insert(1, ["1", "n", "2"]))])
    found = spark_schema(newest_version(open_log(tmp_path), "here", ITEM))
    assert found["record"].metadata == {"keys": ["a", "b"]}
    assert found["before"].dataType == found["record"].dataType


def test_a_table_goes_by_the_name_it_had(tmp_path: Path) -> None:
    write(
        tmp_path,
        [SECOND, *transaction(100, pgoutput.insert(1, ["1", "2", "n"]))],
        [RENAMED, *transaction(200, pgoutput.insert(1, ["2", "3", "n"]))],
    )
    assert [row["record"]["id"] for row in read(tmp_path)] == [1]
    schema = table_schema(newest_version(open_log(tmp_path), "here", ("public", "thing")))
    assert [row["record"]["id"] for row in read(tmp_path, schema, table="public.thing")] == [2]


def test_a_table_that_is_not_there_is_refused_with_one_that_is(tmp_path: Path) -> None:
    write(tmp_path, [SECOND, *transaction(100, pgoutput.insert(1, ["1", "2", "n"]))])
    with pytest.raises(ConfigError, match=r"table public\.items .* write public\.item;"):
        newest_version(open_log(tmp_path), "here", ("public", "items"))


def test_cursors_bound_the_rows_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    inserts = [pgoutput.insert(1, [str(n), "2", "n"]) for n in range(4)]
    batch = [*transaction(300, *inserts), *transaction(400, *inserts)]
    write(tmp_path, [SECOND, *transaction(200, *inserts)], batch, transaction(500, *inserts))
    rows = read(tmp_path, startingCursor="0/12C:2", endingCursor="0/190:1")
    assert [(row["commit_lsn"], row["commit_idx"]) for row in rows] == [
        (300, 2),
        (300, 3),
        (400, 0),
    ]


def test_a_schema_that_is_not_one_of_typed_rows_is_refused() -> None:
    good = table_reader._FIXED
    row = pa.struct([("id", pa.int64())])
    for name in ("record", "before"):
        good = good.set(good.get_field_index(name), pa.field(name, row))
    check_schema(good)
    wrong = pa.field("before", pa.struct([("id", pa.int32())]))
    strict = pa.field("xid", pa.string())
    for bad in (good.remove(0), good.set(6, wrong), good.set(3, strict), table_reader._FIXED):
        with pytest.raises(ConfigError, match="is not one of a table's typed rows"):
            check_schema(bad)

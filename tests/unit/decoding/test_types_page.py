"""docs/types.md and docs/python.md say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cdc.decoding.catalog import TypeNote
from cdc.decoding.plan import plan_for
from cdc.decoding.typed import table_schema
from cdc.decoding.types import type_form
from tests.unit.decoding.frames import table

DOCS = Path(__file__).parents[3] / "docs"
_NUMERIC_10_4 = (10 << 16 | 4) + 4
_NOTES = {
    1: TypeNote(1, "pair", "c", fields=(("a", 23, -1), ("b", 25, -1))),
    2: TypeNote(2, "hstore", "b", extension="hstore"),
    3: TypeNote(3, "vector", "b", extension="vector"),
    4: TypeNote(4, "mood", "e"),
    5: TypeNote(5, "citext", "b", extension="citext"),
}
_TYPES = {
    "`boolean`": 16,
    "`smallint`": 21,
    "`integer`": 23,
    "`bigint`": 20,
    "`oid`": 26,
    "`real`": 700,
    "`double precision`": 701,
    "`numeric`,": 1700,
    "`text`": 25,
    "`bytea`": 17,
    "`json`": 3802,
    "`date`": 1082,
    "`timestamp`": 1114,
    "`timestamptz`": 1184,
    "`time`": 1083,
    "`uuid`": 2950,
    "ranges": 3904,
    "an enum": 4,
    "`integer[]`": 1007,
    "a composite": 1,
    "`hstore`": 2,
    "`vector`": 3,
    "`citext`": 5,
}


def _rows() -> list[list[str]]:
    lines = (DOCS / "types.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [row for row in rows if len(row) == 4][1:]


@pytest.mark.parametrize("start", _TYPES)
def test_the_page_names_the_arrow_and_spark_type(start: str) -> None:
    (row,) = (row for row in _rows() if row[0].startswith(start))
    form = type_form(_TYPES[start], notes=_NOTES)
    assert [cell.strip("`") for cell in row[2:]] == [str(form.arrow), form.spark.strip("`")]


def test_the_page_names_the_type_of_a_numeric_with_a_precision() -> None:
    (row,) = (row for row in _rows() if row[0].startswith("`numeric(10,4)`"))
    form = type_form(1700, _NUMERIC_10_4)
    assert [cell.strip("`") for cell in row[2:]] == [str(form.arrow), form.spark]


def test_the_columns_of_a_typed_table_are_those_of_the_page() -> None:
    page = (DOCS / "python.md").read_text(encoding="utf-8")
    columns = page.partition("## The public names")[0]
    listed = re.findall(r"^\| `(\w+)` \| (.+?) \|", columns, re.MULTILINE)
    schema = table_schema(plan_for(table(("id", 23, True))))
    assert [name for name, _ in listed] == schema.names
    for name, said in listed:
        if said.startswith("`"):
            assert said.strip("`") == str(schema.field(name).type)

"""Keys as objects, and the schemas of rows in the words of Kafka Connect."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from cdc.decoding import decode_changes
from cdc.decoding.format import KEY, OLD_KEY, ROW_SCHEMA, ValueFormat, Wanted
from tests import pgoutput
from tests.unit.decoding.frames import OID, Frame

pytestmark = pytest.mark.usefixtures("both_ways")

RELATION = pgoutput.relation(
    OID, "public", "t", [("id", 20, True), ("doc", 3802, False), ("tags", 1009, False)]
)


def decoded(frame: Frame, wanted: Wanted) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = decode_changes(
        frame.batch(), frame.schemas, wanted=wanted
    ).to_pylist()
    return rows


def test_a_key_is_an_object_and_an_update_that_leaves_one_says_which() -> None:
    frame = Frame()
    frame.add(pgoutput.insert(OID, ["1", "{}", None]), RELATION)
    frame.add(pgoutput.update(OID, ["2", "{}", None], key=["1", None, None]), RELATION)
    frame.add(pgoutput.delete(OID, key=["2", None, None]), RELATION)
    frame.add(pgoutput.truncate([OID]), RELATION)
    found = decoded(frame, Wanted(keyed=True))
    assert [row[KEY] for row in found] == ['{"id":1}', '{"id":2}', '{"id":2}', None]
    assert [row[OLD_KEY] for row in found] == [None, '{"id":1}', None, None]
    assert [row["old_record_pks"] for row in found] == [None, '["1"]', None, None]


def test_a_table_without_a_key_has_none() -> None:
    relation = pgoutput.relation(OID, "public", "t", [("a", 23, False)])
    frame = Frame().add(pgoutput.insert(OID, ["1"]), relation)
    assert decoded(frame, Wanted(keyed=True))[0][KEY] is None


def test_a_document_is_text_where_a_schema_says_so() -> None:
    frame = Frame().add(pgoutput.insert(OID, ["1", '{"a": "x\\n"}', "{a,b}"]), RELATION)
    wanted = Wanted((ValueFormat(documents="text"),), described=True)
    (row,) = decoded(frame, wanted)
    assert orjson.loads(row["record"])["doc"] == '{"a": "x\\n"}'
    described = orjson.loads(row[ROW_SCHEMA])
    assert described == {
        "table": "public.t",
        "row": [
            {"type": "int64", "optional": False, "field": "id"},
            {
                "type": "string",
                "name": "io.debezium.data.Json",
                "version": 1,
                "optional": True,
                "field": "doc",
            },
            {
                "type": "array",
                "items": {"type": "string", "optional": True},
                "optional": True,
                "field": "tags",
            },
        ],
        "key": [{"type": "int64", "optional": False, "field": "id"}],
    }


@pytest.mark.parametrize(
    ("form", "types"),
    [
        (ValueFormat(), ["int64", "double", "string", "string"]),
        (ValueFormat(numbers="string"), ["string", "string", "string", "string"]),
        (ValueFormat(timestamps="unix_microsecond"), ["int64", "double", "int64", "int64"]),
    ],
)
def test_a_schema_follows_the_form_of_its_values(form: ValueFormat, types: list[str]) -> None:
    columns = [("a", 20, True), ("b", 1700, False), ("c", 1184, False), ("d", 1114, False)]
    relation = pgoutput.relation(OID, "public", "t", columns)
    values = ["1", "2.50", "2026-01-02 01:04:05+00", "2026-01-02 01:04:05"]
    frame = Frame().add(pgoutput.insert(OID, values), relation)
    (row,) = decoded(frame, Wanted((form,), described=True))
    fields = orjson.loads(row[ROW_SCHEMA])["row"]
    assert [field["type"] for field in fields] == types
    kinds = {"string": str, "int64": int, "double": float}
    record = orjson.loads(row["record"])
    assert all(type(record[field["field"]]) is kinds[field["type"]] for field in fields)


def test_wanted_columns_survive_as_text() -> None:
    wanted = Wanted((ValueFormat(documents="text"),), keyed=True, described=True)
    assert Wanted.from_text(wanted.to_text()) == wanted

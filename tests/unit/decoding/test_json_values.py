"""What a window reads out of a record's JSON is what typed decode makes of the same row."""

from __future__ import annotations

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdc.decoding import decode_changes
from cdc.decoding.columns import BadValuesError
from cdc.decoding.json_members import elements, members, pairs
from cdc.decoding.json_values import typed_values
from cdc.decoding.plan import plan_for
from cdc.decoding.typed import decode_tables
from cdc.errors import ProtocolError
from spark_pipeline.delivery.deliver import Origin
from spark_pipeline.eventtime.windows.rows import WindowRows
from spark_pipeline.eventtime.windows.tables import WindowTables
from tests import pgoutput
from tests.examples import examples
from tests.pgoutput import UNCHANGED
from tests.unit.decoding.everything import RELATION, ROWS
from tests.unit.decoding.frames import OID, Frame, table

pytestmark = pytest.mark.usefixtures("both_ways")

ORIGINS = [Origin("shop", "db.example", "shopdb"), Origin("other", "elsewhere", "otherdb")]
_TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12)
_INTEGER = st.integers(-(2**63), 2**63 - 1).map(str)
_TYPES: dict[int, st.SearchStrategy[str]] = {
    16: st.sampled_from(["t", "f"]),
    17: st.binary(max_size=5).map(lambda b: "\\x" + b.hex()),
    20: _INTEGER,
    23: st.integers(-(2**31), 2**31 - 1).map(str),
    25: _TEXT,
    114: st.sampled_from(['{"a": 1}', "[1,  2.50]", '"x\\ny"', "1e3", ' {"b":{"c":"}"}} ', "true"]),
    701: st.sampled_from(["NaN", "Infinity", "-Infinity", "1e+20", "0.1", "-0", "5e-324"]),
    1082: st.sampled_from(["2026-01-02", "infinity", "0044-03-15 BC", "21016-01-01"]),
    1114: st.sampled_from(["2026-01-02 03:04:05.6", "-infinity", "0044-03-15 12:00:00 BC"]),
    1184: st.sampled_from(["2026-01-02 03:04:05.123456+00", "infinity", "0001-01-01 00:00:00+00"]),
    1700: st.decimals(allow_nan=False, allow_infinity=False).map(lambda d: format(d, "f")),
}


def rows_of(frame: Frame, relation: bytes) -> WindowRows:
    rows = decode_changes(frame.batch(), frame.schemas)
    tables = WindowTables.of({"shop": [plan_for(relation)]})
    return WindowRows(rows, np.zeros(rows.num_rows, np.int16), tables, "orders", ORIGINS)


def assert_as_decoded(frame: Frame, relation: bytes) -> None:
    seen = rows_of(frame, relation)
    read = seen.seen(seen.tables.schema)
    read.validate(full=True)
    (typed,) = decode_tables(frame.batch(), frame.schemas, compared=True)
    assert not seen.bad
    # As texts, in which NaN is NaN.
    mine, theirs = (rows.column("record") for rows in (read, typed.rows))
    assert mine.type == theirs.type
    assert mine.to_string(window=100) == theirs.to_string(window=100)
    assert read.column("action").equals(typed.rows.column("action"))
    for name in ("record_pks", "unchanged"):
        said = read.column("metadata").field(name)
        assert said.to_pylist() == typed.rows.column(name).to_pylist()


@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_value_is_read_back_exactly(data: st.DataObject) -> None:
    names = data.draw(st.lists(_TEXT.filter(bool), min_size=1, max_size=5, unique=True))
    oids = [data.draw(st.sampled_from(sorted(_TYPES))) for _ in names]
    relation = table(*zip(names, oids, strict=True))
    frame = Frame()
    for _ in range(data.draw(st.integers(1, 8))):
        absent = st.sampled_from([None, UNCHANGED])
        values = [data.draw(st.one_of(_TYPES[oid], absent)) for oid in oids]
        frame.add(pgoutput.update(OID, values), relation)
    assert_as_decoded(frame, relation)


def test_types_within_types_are_read_back_too() -> None:
    frame = Frame()
    for row in (ROWS[0], [*ROWS[1][:9], "0.10", *ROWS[1][10:]], [None] * len(ROWS[0])):
        frame.add(pgoutput.insert(OID, row), RELATION)
    assert_as_decoded(frame, RELATION)


def test_old_values_and_what_changed_are_seen() -> None:
    relation = table(("id", 20, True), ("a", 25, True), ("b", 1184, True), identity="f")
    frame = Frame()
    at = "2026-01-02 00:00:00+00"
    frame.add(pgoutput.update(OID, ["1", 'x"', at], old=["1", "y\\", at]), relation)
    frame.add(pgoutput.update(OID, ["1", "x", at]), relation)
    frame.add(pgoutput.insert(OID, ["1", "x", at]), relation)
    seen = rows_of(frame, relation).seen(WindowTables.of({"d": [plan_for(relation)]}).schema)
    assert seen.column("changes").field("a").to_pylist() == ["y\\", None, None]
    assert seen.column("metadata").field("changed").to_pylist() == [["a"], None, None]


def test_metadata_says_which_database_a_change_is_from() -> None:
    relation = table(("id", 20, True))
    frame = Frame().add(pgoutput.insert(OID, ["1"]), relation)
    frame.add(pgoutput.insert(OID, ["2"]), relation)
    seen = rows_of(frame, relation)
    seen.sources = np.array([1, 0], np.int16)
    said = seen.seen(seen.tables.schema).column("metadata").to_pylist()
    assert [one["database_name"] for one in said] == ["other", "shop"]
    assert said[0]["database"] == {
        "name": "other",
        "hostname": "elsewhere",
        "database": "otherdb",
    }
    assert said[1]["consumer"] == {"name": "orders"}
    cursor = f"{said[1]['commit_lsn']}:{said[1]['commit_idx']}"
    assert said[1]["idempotency_key"] == f"shop:{cursor}", "cursors of two databases can be equal"


def test_a_value_that_its_type_cannot_have_is_reported_with_its_row() -> None:
    as_text, as_number = table(("n", 25)), table(("n", 23))
    frame = Frame()
    for text in ("7", "x", "7.5", "99999999999"):
        frame.add(pgoutput.insert(OID, [text]), as_text)
    seen = rows_of(frame, as_number)
    read = seen.seen(seen.tables.schema)
    assert read.column("record").field("n").to_pylist() == [7, None, None, None]
    assert sorted(seen.bad) == [1, 2, 3]
    assert seen.bad[1] == "column n: this value is no whole number"


def test_a_decimal_is_never_rounded() -> None:
    with pytest.raises(BadValuesError) as caught:
        typed_values(pa.array([b"1.25", b"1.237"]), pa.decimal128(10, 2))
    assert list(caught.value.faults) == [1]


def test_members_are_found_whatever_the_values_hold() -> None:
    texts = ['{"a":"}\\",{[","b":[{"a":1},"]"],"c":null}', "{}", '{"b":{"a":{"b":2}}}', None]
    a, b, c = members(pa.array(texts).cast(pa.binary()), [b'"a"', b'"b"', b'"c"'])
    assert a.to_pylist() == [b'"}\\",{["', None, None, None]
    assert b.to_pylist() == [b'[{"a":1},"]"]', None, b'{"a":{"b":2}}', None]
    assert c.to_pylist() == [None] * 4


def test_members_of_many_rows_are_cut_in_pieces_that_join_without_a_seam() -> None:
    texts = [orjson.dumps({"n": n, "pad": "x" * (n % 977)}) for n in range(6_000)]
    assert sum(map(len, texts)) > 2 << 20
    (found,) = members(pa.array(texts, pa.binary()).slice(5, 5_900), [b'"n"'])
    assert found.to_pylist() == [b"%d" % n for n in range(5, 5_905)]


def test_elements_and_pairs_keep_their_rows() -> None:
    bounds, values = elements(pa.array([b"[1,[2,3]]", b"[]", None, b"[null]"]))
    assert bounds.tolist() == [0, 2, 2, 2, 3]
    assert values.to_pylist() == [b"1", b"[2,3]", None]
    bounds, keys, values = pairs(pa.array([b'{"a":"1"}', b"{}", b'{"b":null,"c":"2"}']))
    assert bounds.tolist() == [0, 1, 1, 3]
    assert keys.to_pylist() == [b'"a"', b'"b"', b'"c"']
    assert values.to_pylist() == [b'"1"', None, b'"2"']


@pytest.mark.parametrize("text", [b'{"a":1', b'{"a":"1}', b'"a":1}'])
def test_a_text_that_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolError, match="no JSON object of decode's"):
        members(pa.array([text]), [b'"a"'])

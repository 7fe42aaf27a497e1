"""Typed rows: every row of a table in the frame's order, each column in its own type."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cdc.decoding import decode_changes
from cdc.decoding.format import DEFAULT_FORMAT, ValueFormat, Wanted
from cdc.decoding.plan import plan_for
from cdc.decoding.typed import TableRows, decode_tables, table_schema
from cdc.errors import DecodeError
from tests import pgoutput
from tests.pgoutput import UNCHANGED
from tests.unit.decoding.columns_of import plain
from tests.unit.decoding.everything import RELATION, ROWS
from tests.unit.decoding.frames import COMMIT_LSN, COMMIT_TS, OID, Frame, loads, table

pytestmark = pytest.mark.usefixtures("both_ways")

THINGS = table(("id", 23, True), ("name", 25), ("body", 25))
FULL = table(("id", 23, True), ("name", 25, True), ("body", 25, True), identity="f")


def tables_of(frame: Frame) -> list[TableRows]:
    tables = list(decode_tables(frame.batch(), frame.schemas))
    for one in tables:
        one.rows.validate(full=True)
    return tables


def rows_of(frame: Frame) -> list[dict[str, object]]:
    """The rows of the only table."""
    (only,) = tables_of(frame)
    rows: list[dict[str, object]] = only.rows.to_pylist()
    return rows


def names_in(text: object) -> list[str]:
    found = loads(text)
    assert isinstance(found, dict)
    return list(found)


def test_an_insert_is_its_typed_row() -> None:
    frame = Frame().add(pgoutput.insert(OID, ["1", "ann", None]), THINGS)
    (only,) = tables_of(frame)
    assert only.rows.schema == table_schema(plan_for(THINGS))
    (row,) = only.rows.to_pylist()
    at = row.pop("commit_timestamp")
    assert pa.scalar(at, pa.timestamp("us", tz="UTC")).value == COMMIT_TS
    assert row == {
        "commit_lsn": COMMIT_LSN,
        "commit_idx": 0,
        "xid": 777,
        "action": "insert",
        "record": {"id": 1, "name": "ann", "body": None},
        "before": None,
        "unchanged": None,
        "error": None,
    }


def test_rows_of_one_table_come_in_the_frames_order_whatever_their_kind() -> None:
    frame = Frame()
    for number in range(10):
        frame.add(pgoutput.insert(OID, [str(number), "a", "b"]), FULL)
        frame.add(pgoutput.update(OID, [str(number), "c", "b"], old=[str(number), "a", "b"]), FULL)
        frame.add(pgoutput.logical_message("m", b""))
        frame.add(pgoutput.truncate([OID]), FULL)
        frame.add(pgoutput.delete(OID, old=[str(number), "c", "b"]), FULL)
    rows = rows_of(frame)
    assert [row["action"] for row in rows] == ["insert", "update", "delete"] * 10
    expected = [number for number in range(50) if number % 5 not in (2, 3)]
    assert [row["commit_idx"] for row in rows] == expected


def test_each_table_version_has_its_own_columns() -> None:
    frame = Frame().add(pgoutput.insert(OID, ["1", "a", "b"]), THINGS)
    frame.add(pgoutput.insert(OID, ["t"]), table(("flag", 16)))
    frame.add(pgoutput.insert(OID, ["2", "c", "d"]), THINGS)
    things, flags = tables_of(frame)
    assert things.rows.column("record").to_pylist() == [
        {"id": 1, "name": "a", "body": "b"},
        {"id": 2, "name": "c", "body": "d"},
    ]
    assert flags.rows.column("record").to_pylist() == [{"flag": True}]


def test_the_old_row_of_an_update_is_there_as_far_as_it_was_sent() -> None:
    frame = Frame().add(pgoutput.update(OID, ["1", "b", "c"]), THINGS)
    frame.add(pgoutput.update(OID, ["2", "b", "c"], key=["1", None, None]), THINGS)
    frame.add(pgoutput.delete(OID, key=["2", None, None]), THINGS)
    first, second, deleted = rows_of(frame)
    assert first["before"] is None
    assert second["before"] == {"id": 1, "name": None, "body": None}
    assert deleted["record"] == {"id": 2, "name": None, "body": None}
    assert deleted["before"] is None


def test_an_unchanged_toast_value_is_listed_or_filled_from_the_old_row() -> None:
    frame = Frame().add(pgoutput.update(OID, ["1", UNCHANGED, UNCHANGED]), THINGS)
    frame.add(pgoutput.update(OID, ["2", "b", UNCHANGED]), THINGS)
    frame.add(pgoutput.update(OID, ["3", "b", "c"]), THINGS)
    assert [row["unchanged"] for row in rows_of(frame)] == [["name", "body"], ["body"], None]
    frame = Frame().add(pgoutput.update(OID, ["1", "n", UNCHANGED], old=["1", "o", "long"]), FULL)
    (row,) = rows_of(frame)
    assert (row["record"], row["unchanged"]) == ({"id": 1, "name": "n", "body": "long"}, None)


def test_a_bad_value_is_the_fault_of_its_row_alone() -> None:
    frame = Frame()
    for number in ("1", "x", "3"):
        frame.add(pgoutput.insert(OID, [number, "a", "b"]), FULL)
        frame.add(pgoutput.update(OID, ["5", "a", "b"], old=[number, "a", UNCHANGED]), FULL)
    rows = rows_of(frame)
    assert [row["error"] is None for row in rows] == [True, True, False, False, True, True]
    assert [row["record"] is None for row in rows] == [False, False, True, True, False, False]
    assert rows[3]["before"] is None
    assert "16/100:2 of table public.things, column 'id'" in str(rows[2]["error"])


def test_a_broken_message_is_refused_with_its_place() -> None:
    frame = Frame().add(pgoutput.insert(OID, ["1", "a", "b"])[:-1], THINGS)
    with pytest.raises(DecodeError, match=r"16/100:0 .*'body'"):
        tables_of(frame)


def test_a_table_without_columns_has_rows() -> None:
    frame = Frame().add(pgoutput.insert(OID, []), table())
    frame.add(pgoutput.update(OID, [], old=[]), table())
    assert [row["record"] for row in rows_of(frame)] == [{}, {}]
    assert [row["before"] for row in rows_of(frame)] == [None, {}]


def test_a_frame_without_rows_of_tables_has_none() -> None:
    assert tables_of(Frame()) == []
    assert tables_of(Frame().add(pgoutput.logical_message("m", b""))) == []


def test_a_slice_of_a_frame_has_the_slice_of_its_rows() -> None:
    frame = Frame()
    for number in range(12):
        values = [str(number), *ROWS[number % 2][1:]]
        frame.add(pgoutput.insert(OID, values), RELATION)
        frame.add(pgoutput.update(OID, values, old=ROWS[0]), RELATION)
    (whole,) = tables_of(frame)
    (part,) = decode_tables(frame.batch().slice(5, 9), frame.schemas)
    part.rows.validate(full=True)
    for name in whole.rows.schema.names:
        expected = [plain(value) for value in whole.rows.column(name).slice(5, 9)]
        assert [plain(value) for value in part.rows.column(name)] == expected


UNIX = ValueFormat("unix_microsecond", "string")
POSTGRES = ValueFormat("postgres")


def test_every_form_that_is_wanted_is_written_once_and_seen_by_its_consumer() -> None:
    relation = table(("id", 20, True), ("at", 1184, True), ("n", 1700, True), identity="f")
    old = ["1", "2026-01-01 00:00:00+00", "1.10"]
    new = ["1", "2026-01-01 00:00:01+00", "2"]
    frame = Frame().add(pgoutput.insert(OID, old), relation)
    frame.add(pgoutput.update(OID, new, old=old), relation)
    frame.add(pgoutput.logical_message("m", b"x"))
    frame.add(pgoutput.insert(OID, ["x", None, None]), relation)
    wanted = Wanted((DEFAULT_FORMAT, UNIX, POSTGRES), before=True)
    changes = decode_changes(frame.batch(), frame.schemas, wanted=wanted)
    changes.validate(full=True)
    assert changes.schema == wanted.schema
    for form in wanted.formats:
        alone = Wanted((form,), before=True)
        expected = decode_changes(frame.batch(), frame.schemas, wanted=alone)
        assert wanted.view(changes, form).equals(expected)
    rows = wanted.view(changes, UNIX).to_pylist()
    assert loads(rows[0]["record"]) == {"id": "1", "at": 1767225600000000, "n": "1.10"}
    assert loads(rows[1]["changes"]) == {"at": 1767225600000000, "n": "1.10"}
    assert loads(rows[1]["before"]) == loads(rows[0]["record"])
    assert [row["before"] for row in rows[::2]] == [None, None]
    assert [row["record"] is None for row in rows] == [False, False, False, True]


def test_wanted_columns_pass_as_text() -> None:
    wanted = Wanted((UNIX, POSTGRES), before=True)
    assert Wanted.from_text(wanted.to_text()) == wanted


def test_changed_columns_are_shown_only_on_request() -> None:
    frame = Frame()
    frame.add(pgoutput.insert(OID, ["1", "ann", "x"]), FULL)
    frame.add(pgoutput.update(OID, ["1", "bob", "x"], old=["1", "ann", "x"]), FULL)
    frame.add(pgoutput.update(OID, ["1", None, UNCHANGED], old=["1", "bob", "x"]), FULL)
    frame.add(pgoutput.update(OID, ["1", "ann", "x"]), FULL)
    frame.add(pgoutput.delete(OID, old=["1", "ann", "x"]), FULL)
    assert "changes" not in rows_of(frame)[0]
    (only,) = decode_tables(frame.batch(), frame.schemas, compared=True)
    only.rows.validate(full=True)
    assert only.rows.schema == table_schema(plan_for(FULL), compared=True)
    rows = only.rows.to_pylist()
    nothing = {"id": None, "name": None, "body": None}
    assert [(row["changes"], row["changed"]) for row in rows] == [
        (None, None),
        (nothing | {"name": "ann"}, ["name"]),
        (nothing | {"name": "bob"}, ["name"]),
        (None, None),
        (None, None),
    ]
    # As the JSON has them, which says more than null where a value was null before.
    said = [row["changes"] for row in frame.decode()]
    assert [names_in(text) for text in said if text not in (None, "{}")] == [["name"], ["name"]]


def test_a_key_that_changed_is_compared_and_the_key_is_reported_as_text() -> None:
    composite = table(("a", 20, True), ("b", 25, True), ("c", 25))
    frame = Frame()
    frame.add(pgoutput.update(OID, ["2", "x", "new"], key=["1", "x", None]), composite)
    frame.add(pgoutput.insert(OID, ["3", "y", None]), composite)
    (only,) = decode_tables(frame.batch(), frame.schemas, compared=True)
    first, second = only.rows.to_pylist()
    assert first["changes"] == {"a": 1, "b": None, "c": None}
    assert (first["changed"], first["record_pks"]) == (["a"], ["2", "x"])
    assert (second["changed"], second["record_pks"]) == (None, ["3", "y"])


def test_rows_of_every_type_are_compared() -> None:
    frame = Frame()
    for row in ROWS:
        frame.add(pgoutput.insert(OID, row), RELATION)
        frame.add(pgoutput.update(OID, row, old=ROWS[0]), RELATION)
    (only,) = decode_tables(frame.batch(), frame.schemas, compared=True)
    only.rows.validate(full=True)
    said = [row["changes"] for row in frame.decode()]
    assert only.rows.column("changed").to_pylist() == [
        None if text is None else names_in(text) for text in said
    ]

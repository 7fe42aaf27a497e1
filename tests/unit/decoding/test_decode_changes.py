"""What inserts, updates, deletes, truncates and messages say."""

from __future__ import annotations

import datetime as dt
import struct

import pyarrow as pa
import pytest

from cdc.change import CHANGE_SCHEMA
from cdc.decoding import decode_changes
from cdc.decoding.raw import RAW_SCHEMA
from cdc.errors import DecodeError, ProtocolError
from tests import pgoutput
from tests.pgoutput import UNCHANGED
from tests.unit.decoding.frames import COMMIT_LSN, OID, Frame, inserts, loads, table

pytestmark = pytest.mark.usefixtures("both_ways")

THINGS = table(("id", 23, True), ("name", 25), ("body", 25))
FULL = table(("id", 23, True), ("name", 25, True), ("body", 25, True), identity="f")
PAIRS = table(("b", 25, True), ("v", 25), ("a", 23, True))


def test_an_insert_is_its_new_row() -> None:
    (change,) = inserts(THINGS, [["1", "ann", None]])
    assert change == {
        "commit_lsn": COMMIT_LSN,
        "commit_idx": 0,
        "commit_timestamp": dt.datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=dt.UTC),
        "xid": 777,
        "table_schema": "public",
        "table_name": "things",
        "action": "insert",
        "record": '{"id":1,"name":"ann","body":null}',
        "changes": None,
        "record_pks": '["1"]',
        "old_record_pks": None,
        "unchanged": None,
        "annotations": None,
        "error": None,
    }


def test_an_update_with_default_identity_has_empty_changes() -> None:
    frame = Frame().add(pgoutput.update(OID, ["1", "bob", "x"]), THINGS)
    (change,) = frame.decode()
    assert change["action"] == "update"
    assert change["record"] == '{"id":1,"name":"bob","body":"x"}'
    assert change["changes"] == "{}"


def test_a_full_update_lists_the_old_values_of_changed_columns_only() -> None:
    frame = Frame()
    frame.add(pgoutput.update(OID, ["1", "bob", None], old=["1", 'a"n', None]), FULL)
    frame.add(pgoutput.update(OID, ["1", None, "x"], old=["1", "ann", None]), FULL)
    frame.add(pgoutput.update(OID, ["1", "a", "b"], old=["1", "a", "b"]), FULL)
    assert [change["changes"] for change in frame.decode()] == [
        r'{"name":"a\"n"}',
        '{"name":"ann","body":null}',
        "{}",
    ]


def test_a_key_change_keeps_the_old_key() -> None:
    frame = Frame()
    frame.add(pgoutput.update(OID, ["x", "v", "2"], key=["w", None, "2"]), PAIRS)
    frame.add(pgoutput.update(OID, ["x", "v", "2"], key=["w", None, "1"]), PAIRS)
    first, second = frame.decode()
    assert first["changes"] == '{"b":"w"}'
    assert second["changes"] == '{"b":"w","a":1}'
    assert second["record_pks"] == '["x","2"]'


def test_a_delete_by_key_has_the_key_and_nulls() -> None:
    (change,) = Frame().add(pgoutput.delete(OID, key=["w", None, "1"]), PAIRS).decode()
    assert change["action"] == "delete"
    assert change["record"] == '{"b":"w","v":null,"a":1}'
    assert change["record_pks"] == '["w","1"]'
    assert change["changes"] is None


def test_a_full_delete_has_the_whole_row() -> None:
    (change,) = Frame().add(pgoutput.delete(OID, old=["1", "ann", "x"]), FULL).decode()
    assert change["record"] == '{"id":1,"name":"ann","body":"x"}'
    assert change["record_pks"] == '["1","ann","x"]'


def test_key_values_are_json_strings_in_column_order() -> None:
    relation = table(("d", 3802, True), ("n", 1700, True), ("t", 25, True), ("b", 16, True))
    (change,) = inserts(relation, [['{"a": 1}', "1.50", 'q"', None]])
    assert loads(change["record_pks"]) == ['{"a": 1}', "1.50", 'q"', None]


def test_a_table_without_a_key_has_an_empty_key() -> None:
    (change,) = inserts(table(("v", 25), identity="n"), [["x"]])
    assert change["record_pks"] == "[]"


def test_an_unchanged_toast_value_is_left_out_and_listed() -> None:
    frame = Frame()
    frame.add(pgoutput.update(OID, ["1", "bob", UNCHANGED]), THINGS)
    frame.add(pgoutput.update(OID, ["2", UNCHANGED, UNCHANGED]), THINGS)
    frame.add(pgoutput.update(OID, ["3", "cat", None]), THINGS)
    changes = frame.decode()
    assert [change["record"] for change in changes] == [
        '{"id":1,"name":"bob"}',
        '{"id":2}',
        '{"id":3,"name":"cat","body":null}',
    ]
    assert [change["unchanged"] for change in changes] == ['["body"]', '["name","body"]', None]


def test_a_row_of_only_unchanged_values_is_an_empty_record() -> None:
    frame = Frame().add(pgoutput.update(OID, [UNCHANGED]), table(("v", 25)))
    assert frame.decode()[0]["record"] == "{}"


def test_an_unchanged_toast_value_is_filled_from_a_full_old_row() -> None:
    frame = Frame()
    frame.add(pgoutput.update(OID, ["1", "new", UNCHANGED], old=["1", "old", "long"]), FULL)
    frame.add(pgoutput.update(OID, ["2", UNCHANGED, "b"], old=["2", None, "b"]), FULL)
    first, second = frame.decode()
    assert first["record"] == '{"id":1,"name":"new","body":"long"}'
    assert first["changes"] == '{"name":"old"}'
    assert first["record_pks"] == '["1","new","long"]'
    assert first["unchanged"] is None
    assert second["record"] == '{"id":2,"name":null,"body":"b"}'
    assert second["changes"] == "{}"


def test_an_unchanged_key_falls_back_to_the_old_key() -> None:
    update = pgoutput.update(OID, [UNCHANGED, "v", "2"], key=["long", None, "1"])
    (change,) = Frame().add(update, PAIRS).decode()
    assert change["record_pks"] == '["long","2"]'
    assert change["record"] == '{"v":"v","a":2}'
    assert change["unchanged"] == '["b"]'
    assert change["changes"] == '{"a":1}'


def test_a_truncate_of_several_tables_is_one_change_a_table() -> None:
    payload = pgoutput.truncate([OID, 5], cascade=True)
    other = pgoutput.relation(5, "other", "select", [("a.b", 25)])
    changes = Frame().add(payload, THINGS).add(payload, other, oid=5).decode()
    assert [(c["table_schema"], c["table_name"]) for c in changes] == [
        ("public", "things"),
        ("other", "select"),
    ]
    for change in changes:
        assert change["action"] == "truncate"
        assert (change["record"], change["record_pks"]) == ("{}", "[]")
        assert change["changes"] is None


def test_a_logical_message_has_its_prefix_and_content() -> None:
    frame = Frame().add(pgoutput.logical_message('p"x', "text ü\n".encode()))
    frame.add(pgoutput.logical_message("bin", b"\xff\x00", transactional=False))
    first, second = frame.decode()
    assert first["record"] == '{"prefix":"p\\"x","content":"text ü\\n","transactional":true}'
    assert second["record"] == '{"prefix":"bin","content_base64":"/wA=","transactional":false}'
    assert (first["table_schema"], first["table_name"]) == ("", "")
    assert (first["action"], first["record_pks"]) == ("message", "[]")


def test_rows_of_many_forms_come_back_in_the_frames_order() -> None:
    newer = table(("id", 23, True), ('na"me', 25), ("extra", 16))
    frame = Frame()
    for number in range(40):
        frame.add(pgoutput.insert(OID, [str(number), "a", "b"]), THINGS)
        frame.add(pgoutput.update(OID, [str(number), "a", "b"]), THINGS)
        frame.add(pgoutput.logical_message("m", str(number).encode()))
        frame.add(pgoutput.insert(OID, [str(number), "a", "t"]), newer)
        frame.add(pgoutput.delete(OID, key=[str(number), None, None]), newer)
    changes = frame.decode()
    assert [change["commit_idx"] for change in changes] == list(range(200))
    assert [change["action"] for change in changes] == [
        "insert", "update", "message", "insert", "delete",
    ] * 40  # fmt: skip
    assert changes[198]["record"] == '{"id":39,"na\\"me":"a","extra":true}'
    assert changes[197]["record"] == '{"prefix":"m","content":"39","transactional":true}'


def test_a_slice_of_a_frame_decodes_to_the_slice_of_its_changes() -> None:
    frame = Frame()
    for number in range(20):
        frame.add(pgoutput.insert(OID, [str(number), None if number % 3 else "x", "b"]), THINGS)
        frame.add(pgoutput.update(OID, [str(number), "a", UNCHANGED]), THINGS)
    whole = decode_changes(frame.batch(), frame.schemas)
    part = decode_changes(frame.batch().slice(7, 21), frame.schemas)
    assert part.equals(whole.slice(7, 21))


def test_an_empty_frame_decodes_to_no_changes() -> None:
    changes = decode_changes(Frame().batch(), {})
    assert (changes.num_rows, changes.schema) == (0, CHANGE_SCHEMA)


def test_a_table_without_columns_decodes() -> None:
    (change,) = inserts(table(), [[]])
    assert (change["record"], change["record_pks"]) == ("{}", "[]")


GOOD = pgoutput.insert(OID, ["1", "ann", "x"])


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (GOOD[:-1], "'body': this value is longer than its message"),
        (GOOD[:-2], "'body': its message ends within this column's length"),
        (GOOD[:-3], "'body': its message ends within this column's length"),
        (GOOD[:-6], "'body': its message ends before this column"),
        (GOOD[:7], "cut off"),
        (GOOD + b"x", "bytes follow its last tuple"),
        (pgoutput.insert(OID, ["1", "ann"]), "its tuple has 2 columns, its table 3"),
        (GOOD.replace(b"t\0\0\0\x03ann", b"t\xff\xff\xff\xffann"), "'name': this value is longer"),
        (
            GOOD.replace(b"t\0\0\0\x03ann", b"b\0\0\0\x03ann"),
            "'name'.*is binary: read the slot without that option",
        ),
        (GOOD.replace(b"t\0\0\0\x03ann", b"z\0\0\0\x03ann"), "'name'.*not known"),
        (GOOD.replace(b"N\0\x03", b"O\0\x03"), "its first tuple is marked 'O'"),
        (pgoutput.insert(OID + 1, ["1", "ann", "x"]), "another table"),
        (pgoutput.update(OID, ["1", "a", "b"], key=["1", None, None])[:16], "before the new"),
        (pgoutput.update(OID, ["1", "a", "b"], key=["1", None, None])[:20], "'id': its message"),
        (pgoutput.update(OID, ["1", "a", "b"], key=["1", None, None])[:16] + b"K", "no new tuple"),
        (pgoutput.delete(OID, old=["1", "a", "b"]) + b"N", "bytes follow"),
        (pgoutput.truncate([OID + 1]), "does not name the table"),
        (pgoutput.truncate([OID]) + b"x", "does not hold"),
        (b"T\0\0", "cut off"),
        (b"T" + struct.pack(">IBI", 1, 9, OID), "options"),
        (b"X\0\0\0\0\0\0\0\0", "its kind 'X' is not known"),
    ],
)
def test_a_broken_message_is_refused_with_its_place(payload: bytes, why: str) -> None:
    frame = Frame().add(GOOD, THINGS).add(payload, THINGS).add(GOOD, THINGS)
    with pytest.raises(DecodeError, match=f"16/100:1[^0-9].*({why})"):
        frame.decode()


MESSAGE = pgoutput.logical_message("p", b"content")


@pytest.mark.parametrize(
    "payload",
    [
        MESSAGE[:-1],
        MESSAGE + b"x",
        MESSAGE[:5],
        MESSAGE[:12],
        MESSAGE[:11],
        b"M\x07" + MESSAGE[2:],
    ],
)
def test_a_broken_logical_message_is_refused_with_its_cursor(payload: bytes) -> None:
    frame = Frame().add(MESSAGE).add(payload)
    with pytest.raises(DecodeError, match="16/100:1"):
        frame.decode()


def test_a_prefix_that_is_not_utf8_is_the_fault_of_its_message_alone() -> None:
    bad = MESSAGE.replace(b"p\0", b"\xff\0")
    before, error, after = Frame().add(MESSAGE).add(bad).add(MESSAGE).errors()
    assert (before, after) == (None, None)
    assert "16/100:1, column 'prefix': this value is not UTF-8" in str(error)


def test_a_row_whose_kind_column_differs_from_its_message_is_refused() -> None:
    frame = Frame().add(GOOD, THINGS)
    batch = frame.batch()
    kinds = pa.array([ord("D")], pa.uint8())
    wrong = batch.set_column(4, RAW_SCHEMA.field("kind"), kinds)
    with pytest.raises(DecodeError, match="kind"):
        decode_changes(wrong, frame.schemas)


def test_a_row_whose_schema_is_missing_is_refused() -> None:
    frame = Frame().add(GOOD, THINGS)
    with pytest.raises(DecodeError, match=r"16/100:0: its schema .* is not among"):
        decode_changes(frame.batch(), {})


def test_a_row_with_the_schema_of_another_table_is_refused() -> None:
    frame = Frame().add(GOOD, table(("id", 23), ("name", 25), ("body", 25), oid=9))
    with pytest.raises(DecodeError, match="oid 9"):
        frame.decode()


def test_other_columns_than_a_frames_are_refused() -> None:
    with pytest.raises(ProtocolError, match="RAW_SCHEMA"):
        decode_changes(pa.RecordBatch.from_pydict({"a": [1]}), {})


def test_changes_beyond_two_gigabytes_of_json_are_refused_before_they_are_built() -> None:
    names = [f"{number:04}".ljust(63, "\x01") for number in range(1600)]
    relation = table(*((name, 25) for name in names))
    frame = Frame()
    row = pgoutput.insert(OID, [None] * 1600)
    for _ in range(4000):
        frame.add(row, relation)
    with pytest.raises(DecodeError, match="lower the batch size"):
        frame.decode()

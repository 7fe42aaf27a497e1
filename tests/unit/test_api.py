"""``walbrook.decode`` and ``walbrook.Decoder``: messages in, Arrow out, however they are cut."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import walbrook
from cdc.change import CHANGE_SCHEMA
from cdc.decoding.catalog import CatalogNote
from cdc.decoding.relation import Relation
from cdc.errors import ConfigError, DecodeError, ProtocolError, WalbrookError
from tests import pgoutput
from tests.unit.decoding.columns_of import plain
from tests.unit.decoding.everything import BARE, NOTE, ROWS
from tests.unit.decoding.frames import COMMIT_TS, OID, loads

OTHER = pgoutput.relation(5, "public", "others", [("id", 23, True)])
NEWER = pgoutput.relation(5, "public", "others", [("id", 23, True), ("more", 25)])


def _transaction(lsn: int, *messages: bytes) -> list[bytes]:
    begin, commit = pgoutput.begin(lsn, COMMIT_TS, 7), pgoutput.commit(lsn, lsn + 8, COMMIT_TS)
    return [begin, *messages, commit]


STREAM = [
    *_transaction(
        0x100,
        BARE,
        pgoutput.insert(OID, ROWS[0]),
        OTHER,
        pgoutput.insert(5, ["1"]),
        pgoutput.update(OID, ROWS[1], old=ROWS[0]),
    ),
    *_transaction(0x200, pgoutput.logical_message("m", b"x"), pgoutput.truncate([OID, 5])),
    *_transaction(0x300, NEWER, pgoutput.insert(5, ["2", "x"]), pgoutput.delete(OID, old=ROWS[1])),
]


def _catalog(relation: Relation, _xid: int) -> CatalogNote:
    return NOTE if relation.oid == OID else CatalogNote()


def test_messages_become_changes_and_tables() -> None:
    decoded = walbrook.decode(STREAM, catalog=_catalog)
    decoded.changes.validate(full=True)
    assert decoded.changes.schema == CHANGE_SCHEMA
    changes = decoded.changes.to_pylist()
    assert [(c["commit_lsn"], c["commit_idx"], c["table_name"], c["action"]) for c in changes] == [
        (0x100, 0, "things", "insert"),
        (0x100, 2, "others", "insert"),
        (0x100, 3, "things", "update"),
        (0x200, 0, "", "message"),
        (0x200, 2, "things", "truncate"),
        (0x200, 4, "others", "truncate"),
        (0x300, 0, "others", "insert"),
        (0x300, 2, "things", "delete"),
    ]
    assert loads(changes[6]["record"]) == {"id": 2, "more": "x"}
    assert [(t.relation.name, t.rows.num_rows) for t in decoded.tables] == [
        ("things", 3),
        ("others", 1),
        ("others", 1),
    ]


def test_without_a_catalog_types_that_are_not_built_in_are_their_text() -> None:
    with_it, without = walbrook.decode(STREAM, catalog=_catalog), walbrook.decode(STREAM)
    assert loads(with_it.changes.column("record")[0].as_py())["pair"] == {"a": 1, 'b"': "x"}  # type: ignore[index]
    assert loads(without.changes.column("record")[0].as_py())["pair"] == "(1,x)"  # type: ignore[index]


@settings(deadline=None, max_examples=15, print_blob=True)
@given(st.lists(st.integers(0, len(STREAM)), max_size=6).map(sorted))
def test_a_stream_cut_anywhere_decodes_as_it_does_at_once(cuts: list[int]) -> None:
    decoder = walbrook.Decoder(_catalog)
    pieces = [
        decoder.decode(STREAM[start:stop])
        for start, stop in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)
    ]
    whole = walbrook.decode(STREAM, catalog=_catalog)
    together = pa.Table.from_batches([piece.changes for piece in pieces], CHANGE_SCHEMA)
    assert together.equals(pa.Table.from_batches([whole.changes]))
    rows = [row for piece in pieces for row in _typed(piece)]
    assert sorted(rows, key=_cursor) == sorted(_typed(whole), key=_cursor)


def _typed(decoded: walbrook.Decoded) -> list[dict[str, Any]]:
    return [
        {name: plain(table.rows.column(name)[at]) for name in table.rows.schema.names}
        for table in decoded.tables
        for at in range(table.rows.num_rows)
    ]


def _cursor(row: dict[str, Any]) -> tuple[int, int]:
    return row["commit_lsn"], row["commit_idx"]


@pytest.mark.parametrize("messages", [[], [BARE], _transaction(0x100)])
def test_messages_without_a_change_are_an_empty_batch(messages: list[bytes]) -> None:
    decoded = walbrook.decode(messages)
    assert (decoded.changes.num_rows, decoded.changes.schema) == (0, CHANGE_SCHEMA)
    assert decoded.tables == []


def test_the_form_is_the_callers() -> None:
    decoded = walbrook.decode(STREAM, form=walbrook.ValueFormat("unix_microsecond", "string"))
    record = loads(decoded.changes.column("record")[0].as_py())
    assert isinstance(record, dict)
    assert (record["id"], record["at"]) == ("1", 1767225600000000)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (pgoutput.insert(99, ["1"]), ProtocolError),
        (pgoutput.insert(OID, ["1"]), DecodeError),
        (pgoutput.insert(OID, ROWS[0])[:-1], DecodeError),
        (BARE[:-1], DecodeError),
        (b"?", WalbrookError),
        (b"", WalbrookError),
        (b"B", WalbrookError),
        (b"I", WalbrookError),
        (b"T\0", WalbrookError),
        (b"M", WalbrookError),
    ],
)
def test_a_fault_in_the_stream_is_an_error_of_ours(
    message: bytes, error: type[WalbrookError]
) -> None:
    messages = _transaction(0x100, BARE, message)
    with pytest.raises(error):
        _ = walbrook.decode(messages).changes


def test_a_bad_value_is_reported_with_its_row() -> None:
    bad = pgoutput.insert(OID, ["x", *ROWS[0][1:]])
    decoded = walbrook.decode(_transaction(0x100, BARE, bad, pgoutput.insert(OID, ROWS[0])))
    first, second = decoded.changes.to_pylist()
    assert (first["record"], second["error"]) == (None, None)
    assert "0/100:0 of table public.things, column 'id'" in first["error"]


def test_a_change_outside_of_every_transaction_is_refused() -> None:
    relation = pgoutput.relation(OID, "public", "things", [("id", 23, True)])
    row = pgoutput.insert(OID, ["1"])
    whole = [pgoutput.begin(100, 0, 7), relation, row, pgoutput.commit(100, 108, 0)]
    for messages in (whole[1:], [*whole, row]):
        with pytest.raises(ProtocolError, match="outside of every transaction"):
            walbrook.decode(messages)
    decoder = walbrook.Decoder()
    decoder.decode(whole[:2])
    assert decoder.decode(whole[2:]).changes.num_rows == 1


def test_arguments_that_are_not_bytes_or_no_format_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="a pgoutput message is bytes, not int"):
        walbrook.decode(b"abc")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there is no format 'nope' of values"):
        walbrook.ValueFormat(timestamps="nope")  # type: ignore[arg-type]

"""The sequin shape: the metadata and the whole message."""

from __future__ import annotations

import json

import pyarrow as pa

from cdc.change import MESSAGE_SCHEMA
from cdc.decoding import decode_changes
from cdc.decoding.shapes.sequin import messages, shape
from tests import pgoutput
from tests.pgoutput import UNCHANGED
from tests.unit.decoding.frames import COMMIT_LSN, OID, Frame

RELATION = pgoutput.relation(
    OID, 'Bü"ro', "select", [("id", 23, True), ("doc", 3802), ("text", 25)]
)


def _shaped(frame: Frame) -> pa.RecordBatch:
    return shape(
        decode_changes(frame.batch(), frame.schemas),
        consumer='my "sink"',
        database_name="main",
        hostname="db.local",
        database="shop",
    )


def _messages(frame: Frame) -> list[dict[str, object]]:
    texts = messages(_shaped(frame))
    texts.validate(full=True)
    return [json.loads(text) for text in texts.to_pylist()]


def test_a_message_has_record_changes_action_and_metadata() -> None:
    frame = Frame().add(pgoutput.insert(OID, ["1", '{"a": [1]}', 'x"y\n']), RELATION)
    assert _messages(frame) == [
        {
            "record": {"id": 1, "doc": {"a": [1]}, "text": 'x"y\n'},
            "changes": None,
            "action": "insert",
            "metadata": {
                "table_schema": 'Bü"ro',
                "table_name": "select",
                "commit_timestamp": "2026-01-01T00:00:00.000001Z",
                "commit_lsn": COMMIT_LSN,
                "commit_idx": 0,
                "xid": 777,
                "idempotency_key": f"{COMMIT_LSN}:0",
                "record_pks": ["1"],
                "transaction_annotations": None,
                "database_name": "main",
                "consumer": {"name": 'my "sink"'},
                "database": {"name": "main", "database": "shop", "hostname": "db.local"},
            },
        }
    ]


def test_unchanged_is_there_only_for_rows_that_have_some() -> None:
    frame = Frame().add(pgoutput.update(OID, ["1", UNCHANGED, "x"]), RELATION)
    frame.add(pgoutput.update(OID, ["2", None, "x"]), RELATION)
    first, second = _messages(frame)
    assert isinstance(first["metadata"], dict)
    assert isinstance(second["metadata"], dict)
    assert first["metadata"]["unchanged"] == ["doc"]
    assert "unchanged" not in second["metadata"]
    assert first["changes"] == {}


def test_shaped_rows_have_the_message_schema_and_can_be_sliced() -> None:
    frame = Frame()
    for number in range(9):
        frame.add(pgoutput.insert(OID, [str(number), None, "x"]), RELATION)
    rows = _shaped(frame)
    assert rows.schema == MESSAGE_SCHEMA
    assert messages(rows.slice(4, 2)).to_pylist() == messages(rows).to_pylist()[4:6]


def test_no_changes_shape_to_no_messages() -> None:
    assert messages(_shaped(Frame())).to_pylist() == []

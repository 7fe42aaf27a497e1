"""The sequin shape: the metadata and the whole message."""

from __future__ import annotations

import json

import pytest

from cdc.change import MESSAGE_SCHEMA, MessageBatch
from cdc.decoding import decode_changes
from cdc.decoding.format import DEFAULT_FORMAT, Timestamps, ValueFormat
from cdc.decoding.shapes import Context, shape_for
from tests import pgoutput
from tests.pgoutput import UNCHANGED
from tests.unit.decoding.frames import COMMIT_LSN, COMMIT_TS, OID, Frame

pytestmark = pytest.mark.usefixtures("both_ways")

RELATION = pgoutput.relation(
    OID, 'Bü"ro', "select", [("id", 23, True), ("doc", 3802), ("text", 25)]
)


def _shaped(frame: Frame, form: ValueFormat = DEFAULT_FORMAT) -> MessageBatch:
    context = Context('my "sink"', "main", "db.local", "shop", now_ns=0, format=form)
    shape = shape_for("sequin", context)
    return MessageBatch(shape.rows(decode_changes(frame.batch(), frame.schemas)), shape)


def _messages(frame: Frame, form: ValueFormat = DEFAULT_FORMAT) -> list[dict[str, object]]:
    texts = _shaped(frame, form).messages()
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


@pytest.mark.parametrize(
    ("timestamps", "written"),
    [
        ("iso8601", "2026-01-01T00:00:00.000001Z"),
        ("postgres", "2026-01-01T00:00:00.000001Z"),
        ("unix_microsecond", COMMIT_TS),
    ],
)
def test_the_commit_time_is_a_number_where_timestamps_are(
    timestamps: Timestamps, written: object
) -> None:
    frame = Frame().add(pgoutput.insert(OID, ["1", None, "x"]), RELATION)
    (message,) = _messages(frame, ValueFormat(timestamps))
    assert isinstance(message["metadata"], dict)
    assert message["metadata"]["commit_timestamp"] == written


def test_unchanged_is_there_only_for_rows_that_have_some() -> None:
    frame = Frame().add(pgoutput.update(OID, ["1", UNCHANGED, "x"]), RELATION)
    frame.add(pgoutput.update(OID, ["2", None, "x"]), RELATION)
    first, second = _messages(frame)
    assert isinstance(first["metadata"], dict)
    assert isinstance(second["metadata"], dict)
    assert first["metadata"]["unchanged"] == ["doc"]
    assert "unchanged" not in second["metadata"]
    assert first["changes"] == {}


def test_shaped_rows_have_the_message_schema_first_and_can_be_sliced() -> None:
    frame = Frame()
    for number in range(9):
        frame.add(pgoutput.insert(OID, [str(number), None, "x"]), RELATION)
    whole = _shaped(frame)
    assert whole.rows.schema.names == [*MESSAGE_SCHEMA.names, "metadata"]
    assert whole.slice(4, 2).messages().to_pylist() == whole.messages().to_pylist()[4:6]


def test_a_batch_is_cut_with_its_shape() -> None:
    frame = Frame()
    for number in range(5):
        frame.add(pgoutput.insert(OID, [str(number), None, "x"]), RELATION)
    whole = _shaped(frame)
    cut = list(whole.slices(2))
    assert [len(piece) for piece in cut] == [2, 2, 1]
    texts = [text for piece in cut for text in piece.messages().to_pylist()]
    assert texts == whole.messages().to_pylist()


def test_no_changes_shape_to_no_messages() -> None:
    assert _shaped(Frame()).messages().to_pylist() == []

"""What the debezium and record shapes say, where a golden file would not say why."""

from __future__ import annotations

import base64
import json
from typing import Any, get_args

import pyarrow as pa
import pytest

from cdc.change import CHANGE_SCHEMA, MESSAGE_SCHEMA
from cdc.config import SinkConfig
from cdc.decoding.shapes import SHAPES, Context, ShapeName, shape_for
from cdc.errors import DecodeError
from cdc.version import VERSION
from tests.unit.decoding.changes_of_every_kind import changes_of_every_kind

NOW_NS = 1_767_225_700_123_456_789
CONTEXT = Context("search", "main", "db.local", "shop", now_ns=NOW_NS)


def _debezium(changes: pa.RecordBatch) -> list[dict[str, Any]]:
    shape = shape_for("debezium", CONTEXT)
    return [json.loads(text) for text in shape.messages(shape.rows(changes)).to_pylist()]


def _of_action(action: str) -> list[dict[str, Any]]:
    changes = changes_of_every_kind()
    return _debezium(changes.filter(pa.array([a.as_py() == action for a in changes["action"]])))


def test_the_configuration_knows_the_same_shapes() -> None:
    assert (
        get_args(SinkConfig.model_fields["shape"].annotation)
        == tuple(SHAPES)
        == get_args(ShapeName)
    )


def test_an_envelope_says_where_and_when() -> None:
    message = _debezium(changes_of_every_kind())[1]
    assert {key: message[key] for key in ("op", "transaction", "ts_ms", "ts_us", "ts_ns")} == {
        "op": "u",
        "transaction": None,
        "ts_ms": NOW_NS // 1_000_000,
        "ts_us": NOW_NS // 1_000,
        "ts_ns": NOW_NS,
    }
    assert message["source"] == {
        "version": VERSION,
        "connector": "postgresql",
        "name": "main",
        "snapshot": "false",
        "db": "shop",
        "ts_ms": 1_767_225_600_000,
        "ts_us": 1_767_225_600_000_001,
        "ts_ns": 1_767_225_600_000_001_000,
        "sequence": '["94489284608","1"]',
        "schema": "public",
        "table": "orders",
        "txId": 700,
        "lsn": 94489284608,
        "xmin": None,
        "commit_idx": 1,
    }


@pytest.mark.parametrize("with_before", [True, False])
def test_before_is_what_the_source_sent_of_the_old_row(with_before: bool) -> None:
    changes = changes_of_every_kind()
    if not with_before:  # as for a gap, which nobody decoded
        changes = changes.select(CHANGE_SCHEMA.names)
    updates = [message for message in _debezium(changes) if message["op"] == "u"]
    full, key_change = ({"id": 7, "note": "new"}, {"id": 7, "note": None})
    expected = [None, full, key_change, None] if with_before else [None] * 4
    assert [message["before"] for message in updates] == expected


def test_a_delete_has_the_old_row_and_nothing_after_it() -> None:
    default, full = _of_action("delete")
    assert default["op"] == full["op"] == "d"
    assert default["after"] is full["after"] is None
    assert default["before"] == {"id": 8, "note": None}
    assert full["before"] == {"id": 9, "note": "all of it"}


def test_a_truncate_has_no_row() -> None:
    (message,) = _of_action("truncate")
    assert (message["op"], message["before"], message["after"]) == ("t", None, None)


def test_the_content_of_a_logical_message_is_base64_whatever_it_was() -> None:
    text, raw = _of_action("message")
    content = base64.b64encode("héllo".encode()).decode()
    assert text["op"] == raw["op"] == "m"
    assert text["message"] == {"transactional": True, "prefix": 'au"dit', "content": content}
    assert raw["message"] == {"transactional": False, "prefix": "raw", "content": "/wA="}


@pytest.mark.parametrize("action", ["gap", "schema_change"])
def test_an_action_that_debezium_does_not_know_has_an_op_and_a_member_of_its_own_name(
    action: str,
) -> None:
    (message,) = _of_action(action)
    assert (message["op"], message["before"], message["after"]) == (action, None, None)
    assert message[action]


def test_a_value_that_was_not_sent_is_left_out_and_named_in_the_source() -> None:
    messages = _debezium(changes_of_every_kind())
    assert messages[4]["after"] == {"id": 8, "title": "uno"}
    assert messages[4]["source"]["unchanged"] == ["body", 'b"2']
    assert all("unchanged" not in each["source"] for each in messages[:4])


def test_annotations_are_in_the_source_of_those_that_have_some() -> None:
    messages = _debezium(changes_of_every_kind())
    having = [at for at, each in enumerate(messages) if "transaction_annotations" in each["source"]]
    assert having == [9, 10]
    assert messages[9]["source"]["transaction_annotations"] == {"user": 'Zoë "Z"', "n": 1}


def test_a_bare_record_is_the_record_of_every_action() -> None:
    changes = changes_of_every_kind()
    shape = shape_for("record", CONTEXT)
    assert shape.messages(shape.rows(changes)).equals(changes["record"])


@pytest.mark.parametrize("name", SHAPES)
def test_rows_begin_with_the_columns_that_every_message_has(name: ShapeName) -> None:
    changes = changes_of_every_kind()
    rows = shape_for(name, CONTEXT).rows(changes)
    assert rows.schema.names[: len(MESSAGE_SCHEMA)] == MESSAGE_SCHEMA.names
    assert rows.select(MESSAGE_SCHEMA.names).equals(changes.select(MESSAGE_SCHEMA.names))
    assert "error" not in rows.schema.names


@pytest.mark.parametrize("name", SHAPES)
def test_a_change_that_has_an_error_is_refused_and_not_sent_without_its_record(
    name: ShapeName,
) -> None:
    changes = changes_of_every_kind()
    errors = pa.array([None] * 3 + ["column x is bad"] + [None] * 10)
    at = changes.schema.get_field_index("error")
    bad = changes.set_column(at, "error", errors)
    with pytest.raises(DecodeError, match="column x is bad"):
        shape_for(name, CONTEXT).rows(bad)


@pytest.mark.parametrize("name", SHAPES)
def test_a_transformed_message_is_its_text_and_all_others_keep_their_shape(name: ShapeName) -> None:
    changes = changes_of_every_kind()
    plain = shape_for(name, CONTEXT)
    whole = plain.messages(plain.rows(changes)).to_pylist()
    texts = [f"[{n}]" if n % 2 else None for n in range(changes.num_rows)]
    shape = shape_for(name, CONTEXT, transformed=True)
    rows = shape.rows(changes.append_column("message", pa.array(texts, pa.string())))
    assert rows.schema.names == [*MESSAGE_SCHEMA.names, "message"]
    expected = [text or other for text, other in zip(texts, whole, strict=True)]
    assert shape.messages(rows).to_pylist() == expected
    fields = shape.fields(rows)
    assert list(fields) == ["message", "metadata"]
    assert fields["message"].to_pylist() == expected
    assert json.loads(fields["metadata"][0].as_py())["consumer"] == {"name": "search"}
    untouched = shape.rows(changes)  # such as a gap, which nobody transforms
    assert shape.messages(untouched).to_pylist() == whole

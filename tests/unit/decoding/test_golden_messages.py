"""Messages of every shape, byte for byte: consumers depend on each of them.

``tests/golden/<shape>.jsonl`` holds one message a line. When a change of the messages is meant,
renew the files, read the difference, and say in the changelog what consumers will see:

    WALBROOK_RENEW_GOLDEN=1 pytest tests/unit/decoding/test_golden_messages.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cdc.change import ACTIONS
from cdc.decoding.shapes import SHAPES, Context, Shape, ShapeName, shape_for
from tests.unit.decoding.changes_of_every_kind import changes_of_every_kind

GOLDEN = Path(__file__).parents[2] / "golden"
RENEW = "WALBROOK_RENEW_GOLDEN"


def _shape(name: ShapeName) -> Shape:
    return shape_for(
        name,
        Context(
            consumer='my "sink"',
            database_name="main",
            hostname="db.local",
            database="shop",
            now_ns=1_767_225_700_123_456_789,
            version="1.2.3",
        ),
    )


@pytest.mark.parametrize("name", SHAPES)
def test_messages_are_those_that_consumers_know(name: ShapeName) -> None:
    shape = _shape(name)
    texts = shape.messages(shape.rows(changes_of_every_kind()))
    texts.validate(full=True)
    lines = "".join(f"{text}\n" for text in texts.to_pylist()).encode()
    file = GOLDEN / f"{name}.jsonl"
    if os.environ.get(RENEW):
        file.write_bytes(lines)
    assert lines == file.read_bytes()


@pytest.mark.parametrize("name", SHAPES)
def test_a_message_is_the_same_however_its_batch_is_cut(name: ShapeName) -> None:
    shape = _shape(name)
    changes = changes_of_every_kind()
    whole = shape.messages(shape.rows(changes)).to_pylist()
    for at, text in enumerate(whole):
        alone = shape.rows(changes.slice(at, 1))
        assert shape.messages(alone).to_pylist() == [text]
        assert shape.messages(shape.rows(changes).slice(at, 1)).to_pylist() == [text]
    ended = shape.messages(shape.rows(changes), "\n").to_pylist()
    assert ended == [f"{text}\n" for text in whole]


@pytest.mark.parametrize("name", SHAPES)
def test_every_line_is_json_and_an_entry_has_metadata_for_each(name: ShapeName) -> None:
    shape = _shape(name)
    rows = shape.rows(changes_of_every_kind())
    for text in shape.messages(rows).to_pylist():
        assert isinstance(json.loads(text), dict)
    cursors = zip(rows["commit_lsn"].to_pylist(), rows["commit_idx"].to_pylist(), strict=True)
    said = [json.loads(text) for text in shape.fields(rows)["metadata"].to_pylist()]
    assert [(one["commit_lsn"], one["commit_idx"]) for one in said] == list(cursors)


def test_the_changes_are_of_every_action() -> None:
    assert set(changes_of_every_kind()["action"].to_pylist()) == {*ACTIONS, "gap"}

"""docs/messages.md says what the code does."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cdc.change import ACTIONS, CHANGE_SCHEMA, READ, MessageBatch, synthetic_rows
from cdc.decoding.format import ValueFormat
from cdc.decoding.shapes import SHAPES, Context, ShapeName, shape_for
from cdc.eventtime.released import Released
from cdc.state.event_numbers import Numbering
from sinks import ClaimPlace, Delivery
from sinks.claim_check import ClaimCheckedSink
from spark_pipeline.eventtime.release import (
    WATERMARK,
    WINDOW,
    OwnRows,
    Release,
    watermark_row,
)
from tests.unit.decoding.changes_of_every_kind import changes_of_every_kind

PAGE = (Path(__file__).parents[2] / "docs" / "messages.md").read_text(encoding="utf-8")


def test_the_columns_are_those_of_the_schema() -> None:
    table = PAGE[PAGE.index("| column | Arrow type |") :]
    listed = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", table, re.MULTILINE)
    assert listed == [(field.name, str(field.type)) for field in CHANGE_SCHEMA]


def test_every_action_is_explained() -> None:
    table = PAGE[PAGE.index("| action | `record` |") : PAGE.index("A sink takes")]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == (
        *ACTIONS,
        READ,
        "gap",
        WATERMARK,
        WINDOW,
    )


def test_every_shape_is_explained() -> None:
    section = PAGE[PAGE.index("## Shapes") : PAGE.index("## By action")]
    assert re.findall(r"^\*\*`(\w+)`\*\*", section, re.MULTILINE) == list(SHAPES)


def test_the_example_of_an_envelope_has_the_keys_of_one() -> None:
    shape = shape_for("debezium", Context("search", "shop", "localhost", "shop", now_ns=0))
    update = changes_of_every_kind().slice(2, 1)
    message = json.loads(shape.messages(shape.rows(update))[0].as_py())
    examples = map(json.loads, re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
    (example,) = (example for example in examples if "op" in example)
    assert list(example) == list(message)
    assert list(example["source"]) == list(message["source"])


def in_event_time_order() -> pa.RecordBatch:
    """An update, a watermark and a window, as the product makes them."""
    times = np.array([1_794_797_480_100_000])
    update = changes_of_every_kind().slice(2, 1)
    at = np.zeros(1, np.intp)
    late = Released([update], at, times, times, np.zeros(1, np.int32), np.zeros(1, np.int16))
    now = datetime(2026, 11, 16, 2, 51, 25, 104211, tzinfo=UTC)
    told = [
        OwnRows(watermark_row(int(times[0]), now)),
        OwnRows(synthetic_rows(WINDOW, ['{"window_start":"","window_end":""}'], now)),
    ]
    release = Release(late, None, told, Numbering(71299203, 41), ValueFormat())
    return release.piece(0, len(release))


def test_the_examples_in_event_time_order_have_the_keys_of_such_messages() -> None:
    shape = shape_for(
        "sequin", Context("orders-by-time", "shop", "localhost", "shop", now_ns=0, of_many=True)
    )
    texts = shape.messages(shape.rows(in_event_time_order())).to_pylist()
    section = PAGE[PAGE.index("## In event-time order") : PAGE.index("## Transaction annotations")]
    examples = map(json.loads, re.findall(r"```json\n(.*?)```", section, re.DOTALL))
    for example, message in zip(examples, map(json.loads, texts), strict=True):
        assert example["action"] == message["action"]
        assert list(example) == list(message)
        said, made = example["metadata"], message["metadata"]
        assert list(said) == list(made)
        assert said["sequence"] == made["sequence"]
        assert re.fullmatch(r"shop:\d+:\d+", made["idempotency_key"])
        if message["action"] == "update":
            assert said["event_time"] == made["event_time"]
            assert said["late"] is made["late"] is True
            continue
        same = ("commit_lsn", "commit_idx", "xid", "idempotency_key", "record_pks", "database")
        assert [said[key] for key in same] == [made[key] for key in same]
        assert list(example["record"])[:2] == list(message["record"])[:2]


@pytest.mark.parametrize("name", list(SHAPES))
def test_no_key_is_there_twice(name: ShapeName) -> None:
    def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in pairs]
        assert len(keys) == len(set(keys)), keys
        return dict(pairs)

    shape = shape_for(name, Context("search", "shop", "localhost", "shop", now_ns=0, of_many=True))
    for changes in (changes_of_every_kind(), in_event_time_order()):
        for text in shape.messages(shape.rows(changes)).to_pylist():
            json.loads(text, object_pairs_hook=distinct)


def test_the_examples_are_json() -> None:
    examples = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 12
    for example in examples:
        assert isinstance(json.loads(example), dict)


def test_the_example_of_a_reference_has_the_keys_of_one(tmp_path: Path) -> None:
    examples = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (example,) = (json.loads(text) for text in examples if "claim_check" in text)
    place = ClaimPlace(1, 7, tmp_path.as_uri(), "")
    reference = json.loads(ClaimCheckedSink(NoSink(), place, consumer="c")._stored(b"{}", "1:2"))
    assert list(example["metadata"]["claim_check"]) == list(reference)


class NoSink:
    """Nothing is delivered to it."""

    def deliver(self, batch: MessageBatch) -> Delivery:
        raise AssertionError

    def close(self) -> None: ...

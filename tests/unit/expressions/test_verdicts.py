"""Verdicts laid over messages by cursor, whole columns at a time."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.cursor import Cursor
from cdc.errors import ProtocolError
from spark_pipeline.delivery.verdicts import VERDICT_SCHEMA, empty, judged, sorted_verdicts
from tests.unit.expressions.tables import consumer

ROUTED = consumer(filter="true", routing="action")
Cursors = list[Cursor]


def messages(cursors: Cursors, action: str = "insert") -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "commit_lsn": pa.array([cursor.lsn for cursor in cursors], pa.int64()),
            "commit_idx": pa.array([cursor.idx for cursor in cursors], pa.int64()),
            "action": pa.array([action] * len(cursors), pa.string()),
        }
    )


def verdicts(kept: dict[Cursor, bool], errors: Cursors = ()) -> pa.RecordBatch:  # type: ignore[assignment]
    rows = [
        {
            "commit_lsn": cursor.lsn,
            "commit_idx": cursor.idx,
            "keep": keep,
            "route": str(cursor),
            "error": "bad" if cursor in errors else None,
        }
        for cursor, keep in kept.items()
    ]
    return sorted_verdicts(pa.Table.from_pylist(rows, VERDICT_SCHEMA))


def cursors_of(rows: pa.RecordBatch) -> Cursors:
    pairs = (rows.column(name).to_pylist() for name in ("commit_lsn", "commit_idx"))
    return [Cursor(*pair) for pair in zip(*pairs, strict=True)]


LARGE = 1 << 62
CURSORS = st.builds(Cursor, st.integers(0, 5).map(lambda n: LARGE + n), st.integers(0, 5))


@given(st.dictionaries(CURSORS, st.booleans()), st.data())
def test_each_message_gets_the_verdict_of_its_cursor(
    kept: dict[Cursor, bool], data: st.DataObject
) -> None:
    bad = data.draw(st.lists(st.sampled_from(sorted(kept)), unique=True)) if kept else []
    some = sorted(data.draw(st.lists(st.sampled_from(sorted(kept)), unique=True)) if kept else [])
    found = judged(messages(some), verdicts(kept, bad), ROUTED)
    passing = [cursor for cursor in some if kept[cursor] and cursor not in bad]
    assert cursors_of(found) == passing
    assert found.column("route").to_pylist() == [str(cursor) for cursor in passing]
    assert "message" not in found.schema.names


@given(st.sets(CURSORS), CURSORS)
def test_a_message_without_a_verdict_is_refused(known: set[Cursor], asked: Cursor) -> None:
    given_verdicts = verdicts(dict.fromkeys(sorted(known - {asked}), True))
    with pytest.raises(ProtocolError, match="without a verdict"):
        judged(messages([asked]), given_verdicts, ROUTED)


def test_changes_that_expressions_do_not_see_pass_without_a_verdict() -> None:
    found = judged(messages([Cursor(1, 0)], "truncate"), empty(), ROUTED)
    assert found.column("route").to_pylist() == [None]


def test_nothing_is_added_for_a_filter_alone() -> None:
    only = [Cursor(1, 0)]
    found = judged(messages(only), verdicts({only[0]: True}), consumer(filter="true"))
    assert found.schema.names == ["commit_lsn", "commit_idx", "action"]

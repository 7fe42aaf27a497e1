"""Metadata of a few changes, written one by one, is that of whole columns, to the byte."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.change import CHANGE_SCHEMA
from cdc.decoding.format import ValueFormat
from cdc.decoding.shapes import Context, metadata
from cdc.decoding.shapes.base import message_rows

CONTEXT = Context('se"arch', "main", "db.local", "shop", now_ns=0)
NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)
JSON = st.sampled_from(['["1"]', '["a\\"b","2"]', "[]"])
CHANGE = st.fixed_dictionaries(
    {
        "commit_lsn": st.integers(0, 2**62),
        "commit_idx": st.integers(0, 2**40),
        "commit_timestamp": st.integers(-(10**17), 10**17),
        "xid": st.integers(0, 2**32),
        "table_schema": NAMES,
        "table_name": NAMES,
        "action": st.sampled_from(["insert", "gap", "update", "message"]),
        "record": st.just("{}"),
        "record_pks": JSON,
        "unchanged": st.none() | JSON,
        "annotations": st.none() | JSON,
    }
)


@given(changes=st.lists(CHANGE, min_size=1, max_size=6), of_many=st.booleans())
def test_both_ways_write_the_same(changes: list[dict[str, object]], of_many: bool) -> None:
    rows = message_rows(pa.RecordBatch.from_pylist(changes, CHANGE_SCHEMA))
    context = replace(CONTEXT, of_many=of_many)
    few = metadata.metadata(rows, context)
    with patch.object(metadata, "FEW", 0):
        assert few.to_pylist() == metadata.metadata(rows, context).to_pylist()


@pytest.mark.parametrize("time_us", [-(10**17), 3 * 10**17])
def test_a_time_beyond_the_calendar_is_left_to_whole_columns(time_us: int) -> None:
    rows = message_rows(pa.RecordBatch.from_pylist([_change(time_us)], CHANGE_SCHEMA))
    assert metadata.few_metadata(rows, CONTEXT) is None


def test_other_forms_of_time_are_left_to_whole_columns() -> None:
    rows = message_rows(pa.RecordBatch.from_pylist([_change(0)], CHANGE_SCHEMA))
    unix = replace(CONTEXT, format=ValueFormat("unix_microsecond"))
    assert metadata.few_metadata(rows, CONTEXT) is not None
    assert metadata.few_metadata(rows, unix) is None


def _change(time_us: int) -> dict[str, object]:
    return {
        "commit_lsn": 1, "commit_idx": 0, "commit_timestamp": time_us, "xid": 1,
        "table_schema": "public", "table_name": "t", "action": "insert", "record": "{}",
        "record_pks": "[]",
    }  # fmt: skip

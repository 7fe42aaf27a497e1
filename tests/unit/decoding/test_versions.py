"""Transitions from one table version to another, found by column."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cdc.cursor import Cursor
from cdc.decoding.raw import RAW_SCHEMA
from cdc.decoding.versions import Transition, decode_transitions, encode_transitions

Row = tuple[int, int]  # relation, schema id


def raw(rows: Sequence[Row], start: int = 0) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            dict.fromkeys(RAW_SCHEMA.names, 0)
            | {
                "commit_lsn": 8 + (start + at) // 3 * 8,
                "commit_idx": (start + at) % 3,
                "relation": relation,
                "schema_id": schema_id,
                "payload": b"",
            }
            for at, (relation, schema_id) in enumerate(rows)
        ],
        schema=RAW_SCHEMA,
    )


def one_by_one(batch: pa.RecordBatch) -> list[Transition]:
    """The same by the definition."""
    known: dict[int, int] = {}
    found = []
    for row in batch.to_pylist():
        relation, schema_id = row["relation"], row["schema_id"]
        if relation and known.get(relation) != schema_id:
            known[relation] = schema_id
            found.append(
                Transition(relation, schema_id, Cursor(row["commit_lsn"], row["commit_idx"]))
            )
    return found


# A schema belongs to one table: the table's number is its first digit.
rows_of_tables = st.lists(
    st.one_of(
        st.just((0, 0)),
        st.tuples(st.integers(1, 3), st.integers(0, 2)).map(
            lambda row: (row[0], row[0] * 10 + row[1])
        ),
        st.tuples(st.just((1 << 32) - 1), st.just((1 << 64) - 1)),
    ),
    max_size=40,
)


@given(rows_of_tables)
def test_each_table_is_named_at_its_first_row_and_where_its_version_changes(
    rows: list[Row],
) -> None:
    batch = raw(rows)
    assert decode_transitions(encode_transitions(batch)) == one_by_one(batch)


@given(rows_of_tables, st.integers(0, 40))
def test_a_cut_only_names_again_what_is_in_force(rows: list[Row], cut: int) -> None:
    cut = min(cut, len(rows))
    halves = (raw(rows[:cut]), raw(rows[cut:], start=cut))
    parts = [t for half in halves for t in decode_transitions(encode_transitions(half))]
    in_force: dict[int, int] = {}
    news = []
    for transition in parts:
        if in_force.get(transition.relation) != transition.schema_id:
            in_force[transition.relation] = transition.schema_id
            news.append(transition)
    assert news == one_by_one(raw(rows))


def test_a_slice_of_one_version_is_one_entry_and_one_of_messages_none() -> None:
    assert decode_transitions(encode_transitions(raw([(1, 10)] * 5))) == [
        Transition(1, 10, Cursor(8, 0))
    ]
    assert encode_transitions(raw([(0, 0)] * 5)) == b""
    assert encode_transitions(raw([])) == b""


def test_a_slice_of_a_larger_batch_counts_from_its_own_first_row() -> None:
    part = raw([(1, 10), (1, 11), (2, 20), (1, 11)]).slice(1)
    assert [t.schema_id for t in decode_transitions(encode_transitions(part))] == [11, 20]

"""Changes are spread by group, and cut where one is ordered against its whole table."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cdc.queue.groups import BY_KEY, Grouping, groups_of
from spark_pipeline.delivery.group_parts import GroupRun, runs_between_barriers, spread
from tests.unit.spark.sending import Message, histories, rows

Numbers = list[tuple[int, int]]


def whole(batch: pa.RecordBatch, grouping: Grouping = BY_KEY) -> GroupRun:
    return GroupRun(batch, groups_of(batch, grouping).ids, False)


def numbers(batch: pa.RecordBatch) -> Numbers:
    columns = (batch.column(name).to_pylist() for name in ("commit_lsn", "commit_idx"))
    return list(zip(*columns, strict=True))


@given(histories, st.integers(1, 7))
def test_each_change_is_in_one_part_beside_those_of_its_group_in_order(
    messages: list[Message], parts: int
) -> None:
    batch = rows(messages)
    found = spread(whole(batch), parts)
    assert len(found) <= parts
    assert all(part.num_rows for part in found)
    assert sorted(at for part in found for at in numbers(part)) == numbers(batch)
    part_of: dict[tuple[str, str], int] = {}
    for at, part in enumerate(found):
        assert numbers(part) == sorted(numbers(part))
        tables, keys = (part.column(name).to_pylist() for name in ("table_name", "record_pks"))
        for group in zip(tables, keys, strict=True):
            assert part_of.setdefault(group, at) == at


def test_parts_have_as_many_groups_as_each_other() -> None:
    batch = rows([Message(key, key, "taken") for key in range(100)])
    assert [part.num_rows for part in spread(whole(batch), 8)] == [13, 13, 13, 13, 12, 12, 12, 12]


def test_without_groups_every_change_is_spread_by_itself() -> None:
    batch = rows([Message(1, at, "taken") for at in range(10)])
    assert [part.num_rows for part in spread(whole(batch), 4)] == [10]
    alone = Grouping(by_group=False)
    assert [part.num_rows for part in spread(whole(batch, alone), 4)] == [3, 3, 2, 2]


@given(histories)
def test_a_truncate_is_in_no_run_with_other_changes(messages: list[Message]) -> None:
    batch = rows(messages)
    runs = list(runs_between_barriers(batch))
    assert [at for run in runs for at in numbers(run.rows)] == numbers(batch)
    for run in runs:
        actions = set(run.rows.column("action").to_pylist())
        assert actions == ({"truncate"} if run.in_order else {"insert"})


def test_a_change_of_key_is_ordered_against_its_table() -> None:
    batch = rows([Message(key, key, "taken") for key in range(5)])
    at = batch.schema.get_field_index("old_record_pks")
    moved = pa.array([None, None, '["9"]', None, None], pa.string())
    batch = batch.set_column(at, "old_record_pks", moved)
    assert [(run.rows.num_rows, run.in_order) for run in runs_between_barriers(batch)] == [
        (2, False),
        (1, True),
        (2, False),
    ]

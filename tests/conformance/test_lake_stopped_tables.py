"""Tables of the lake that cannot be written: their changes wait, and those of others go on."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from cdc.backfill.ranges import ReloadStep
from cdc.backfill.reload import ReloadMark, mark_change
from cdc.change import MessageBatch
from cdc.config.table import TableName
from cdc.cursor import Cursor, free_place
from cdc.errors import OperatorError
from sinks.base import StoppedTable
from sinks.lakehouse import LakehouseSink
from sinks.lakehouse import stopped as stopped_tables
from sinks.lakehouse.names import LakeTarget
from tests.lakes import Lake
from tests.slot_batches import SlotBatches

T, BESIDE = LakeTarget("public", "t"), LakeTarget("_walbrook_stopped_public", "t")


@pytest.fixture(params=["delta copy_on_write", "iceberg merge_on_read"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return Lake.of(tmp_path / "lake", request.param)


def _correct(lake: Lake) -> None:
    """What an operator does: the values that cannot become a number go."""
    table = lake.tables()(T)
    state = table.load()
    assert state is not None
    rows = pa.concat_tables([table.read(file) for file in table.files()])
    at = rows.schema.get_field_index("note")
    rows = rows.set_column(at, rows.schema.field(at), pa.nulls(rows.num_rows, pa.string()))
    table.replace(table.write(rows), table.schema, state.moved(state.cursor))


def _taken(source: SlotBatches, sink: LakehouseSink) -> tuple[StoppedTable, ...]:
    """What waits after a delivery of all there is, which settles everything."""
    batch = source.taken()
    delivery = sink.deliver(batch)
    assert delivery.error is None, delivery.error.full_text
    assert delivery.settled == len(batch)
    assert delivery.stopped is not None
    return delivery.stopped


def test_changes_of_a_table_that_cannot_be_written_wait_and_come_in_order_once_it_can(
    source: SlotBatches, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopped_tables, "RETRY_S", 0.0)
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "CREATE TABLE other (id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1, 'word'), (2, 'more')",
    )
    sink = lake.sink()
    assert _taken(source, sink) == ()
    source.run(
        "ALTER TABLE t ALTER note TYPE int USING length(note)", "INSERT INTO t VALUES (3, 30)",
        "INSERT INTO other VALUES (1)",
    )  # fmt: skip
    (stopped,) = _taken(source, sink)
    assert (stopped.table, stopped.kind) == ("public.t", "cannot_widen")
    source.run("UPDATE t SET note = 31 WHERE id = 3", "INSERT INTO other VALUES (2)")
    sink = lake.sink()  # as after a crash
    assert [each.kind for each in _taken(source, sink)] == ["cannot_widen"]
    assert lake.rows("SELECT id FROM other ORDER BY id", "other") == [(1,), (2,)]
    assert lake.rows("SELECT id, note FROM t ORDER BY id", "t") == [(1, "word"), (2, "more")]
    _correct(lake)
    source.run("DELETE FROM t WHERE id = 2", "UPDATE t SET note = 10 WHERE id = 1")
    assert _taken(source, sink) == ()
    assert lake.rows("SELECT id, note FROM t ORDER BY id", "t") == [(1, 10), (3, 31)]
    source.run("INSERT INTO t VALUES (4, 40)")
    assert _taken(source, lake.sink()) == ()
    assert lake.rows("SELECT id, note FROM t ORDER BY id", "t") == [(1, 10), (3, 31), (4, 40)]


def test_a_change_that_comes_again_after_a_crash_waits_once(
    source: SlotBatches, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, note text)", "INSERT INTO t VALUES (1, 'word')",
        "ALTER TABLE t ALTER note TYPE int USING length(note)", "INSERT INTO t VALUES (2, 20)",
        "INSERT INTO t VALUES (3, 30)",
    )  # fmt: skip
    batch = source.taken()
    for size in (len(batch) - 1, len(batch), len(batch)):
        sink = lake.sink()
        delivery = sink.deliver(batch.slice(0, size))
        assert (delivery.error, delivery.settled) == (None, size)
    beside = lake.tables()(BESIDE)
    assert beside.load() is not None
    kept = pa.concat_tables([beside.read(file) for file in beside.files()])
    cursors = [
        *zip(*(kept.column(n).to_pylist() for n in ("commit_lsn", "commit_idx")), strict=True)
    ]
    assert len(set(cursors)) == len(cursors)
    monkeypatch.setattr(stopped_tables, "RETRY_S", 0.0)
    _correct(lake)
    assert lake.sink().deliver(batch).absorbed == len(batch)
    assert lake.rows("SELECT id, note FROM t ORDER BY id", "t") == [(1, None), (2, 20), (3, 30)]


def test_changes_that_wait_are_given_up_with_their_table(
    source: SlotBatches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopped_tables, "RETRY_S", 0.0)
    lake = Lake.of(tmp_path / "lake", "delta copy_on_write")
    source.run("CREATE TABLE t (x int)", "ALTER TABLE t REPLICA IDENTITY FULL")
    source.run("INSERT INTO t VALUES (1)", "CREATE TABLE other (id int PRIMARY KEY)")
    sink = lake.sink()
    assert [each.table for each in _taken(source, sink)] == ["public.t"]
    (tmp_path / "lake" / "_walbrook_stopped_public" / "t").rename(tmp_path / "away")
    source.run("INSERT INTO other VALUES (1)")
    assert _taken(source, sink) == ()


def test_delivery_stops_with_the_error_of_the_table_when_too_much_waits(
    source: SlotBatches, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopped_tables, "WAITING_BYTES_MAX", 1)
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, note text)", "INSERT INTO t VALUES (1, 'word')",
        "ALTER TABLE t ALTER note TYPE int USING length(note)", "INSERT INTO t VALUES (2, 20)",
    )  # fmt: skip
    sink = lake.sink()
    assert [each.table for each in _taken(source, sink)] == ["public.t"]
    source.run("INSERT INTO t VALUES (3, 30)")
    batch = source.taken()
    delivery = sink.deliver(batch)
    assert isinstance(delivery.error, OperatorError)
    assert (delivery.error.kind, delivery.settled) == ("cannot_widen", 0)


def test_a_reload_ends_whose_shadow_lacks_changes_that_waited(
    source: SlotBatches, tmp_path: Path
) -> None:
    lake = Lake.of(tmp_path / "lake", "delta copy_on_write")
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    sink, first = lake.sink(), source.taken()
    assert sink.deliver(first).error is None
    lsn, idx = first.cursor(-1)
    begin = ReloadMark(3, ReloadStep.BEGIN, TableName("public", "t"))
    mark = mark_change(begin, free_place(Cursor(lsn, idx + 1)))
    assert sink.deliver(MessageBatch(mark, first.shape)).error is None
    assert lake.tables()(T).load().reload == 3  # type: ignore[union-attr]
    sink.close()
    away = (lake.root / "public" / "t").rename(tmp_path / "away")
    source.run("INSERT INTO t VALUES (2)")
    assert [each.table for each in _taken(source, sink)] == ["public.t"]
    away.rename(lake.root / "public" / "t")
    source.run("INSERT INTO t VALUES (3)")
    assert [each.table for each in _taken(source, sink)] == ["public.t"]
    assert lake.tables()(T).load().reload == 0  # type: ignore[union-attr]
    sink.close()

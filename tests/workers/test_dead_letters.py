"""A change that cannot be decoded: out of the way, on record, and nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.decoding import decode_changes
from cdc.errors import TransientError
from cdc.state.dead_letters import DeadLetter, bury, report_dead_letters
from cdc.state.positions import consumer_cursors
from tests import pgoutput
from tests.log_pipeline import LogPipeline, arrived, cursors_of
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
PART = pgoutput.relation(2, "public", "part", [("id", 23, True), ("name", 25)])
LETTERS = """
SELECT consumer, commit_lsn::text, commit_idx, table_name, action, kind, error
  FROM walbrook.dead_letters ORDER BY consumer, commit_lsn, commit_idx
"""
HEALTH = "SELECT consumer, severity, what FROM walbrook.health ORDER BY consumer"


def row(oid: int, number: int, name: str = "good") -> bytes:
    return pgoutput.insert(oid, [str(number), name])


def decode_with_errors(*arguments: Any, **named: Any) -> pa.RecordBatch:
    """What decode gives, as if no value with the word bad in it could be read."""
    changes = decode_changes(*arguments, **named)
    bad = pc.fill_null(pc.match_substring(changes.column("record"), "bad"), False)
    nothing = pa.nulls(changes.num_rows, pa.string())
    columns = {name: changes.column(name) for name in changes.schema.names}
    columns["error"] = pc.if_else(bad, "column 'name' cannot\0 be read", nothing)
    columns["record"] = pc.if_else(bad, nothing, columns["record"])
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=changes.schema)


@pytest.fixture
def pipeline_of(
    state: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LogPipeline]]:
    monkeypatch.setattr("spark_pipeline.source.range_reader.decode_carefully", decode_with_errors)
    made: list[LogPipeline] = []

    def make(**sinks: dict[str, object]) -> LogPipeline:
        made.append(LogPipeline(state, tmp_path, **sinks))
        return made[0]

    yield make
    for pipeline in made:
        pipeline.close()


def test_an_unreadable_change_becomes_a_row_for_each_consumer_that_takes_it(
    pipeline_of: Callable[..., LogPipeline],
) -> None:
    pipeline = pipeline_of(
        all={},
        items={"source": {"include_tables": ["public.item"]}},
        deletes={"actions": ["delete"]},
    )
    pipeline.write(
        ITEM, PART, *transaction(0x100, row(1, 1), row(2, 2, "bad"), row(1, 3)), *transaction(0x200)
    )
    pipeline.write(*transaction(0x300, row(1, 4, "bad")), *transaction(0x400, row(2, 5)))
    pipeline.take()
    assert [m["record"]["id"] for m in arrived(pipeline.directory / "all")] == [1, 3, 5]
    assert [m["record"]["id"] for m in arrived(pipeline.directory / "items")] == [1, 3]
    what = "column 'name' cannot\\0 be read"
    assert pipeline.rows(LETTERS) == [
        ("all", "0/100", 2, "part", "insert", "decode", what),
        ("all", "0/300", 0, "item", "insert", "decode", what),
        ("items", "0/300", 0, "item", "insert", "decode", what),
    ]
    counts = pipeline.rows("SELECT name, delivered, dead FROM walbrook.consumers ORDER BY 1")
    assert counts == [("all", 3, 2), ("deletes", 0, 0), ("items", 2, 1)]
    assert set(consumer_cursors(pipeline.state, "shop").values()) == {Cursor(0x401, 0)}


def test_the_row_has_the_message_and_the_schema_it_came_with(
    pipeline_of: Callable[..., LogPipeline],
) -> None:
    pipeline = pipeline_of(all={})
    pipeline.write(ITEM, PART, *transaction(0x100, row(1, 1), row(2, 2, "bad")))
    pipeline.write(*transaction(0x200, row(2, 3), row(1, 4, "bad")))
    pipeline.take()
    rows = pipeline.rows("SELECT payload, schema, commit_timestamp FROM walbrook.dead_letters")
    assert [(payload, schema) for payload, schema, _ in rows] == [
        (row(2, 2, "bad"), PART),
        (row(1, 4, "bad"), ITEM),
    ]
    assert [round(at.timestamp() * 1e6) for _, _, at in rows] == [0x100 * 1000, 0x200 * 1000]


def test_a_change_behind_a_failing_sink_is_not_dead_yet(
    pipeline_of: Callable[..., LogPipeline],
) -> None:
    pipeline = pipeline_of(stuck={}, free={})
    blocked = pipeline.directory / "stuck"
    blocked.write_text("a file where the sink wants a folder")
    pipeline.write(ITEM, *transaction(0x100, row(1, 1), row(1, 2, "bad"), row(1, 3)))
    with pytest.raises(TransientError, match="consumer stuck failed"):
        pipeline.take()
    assert [letter[0] for letter in pipeline.rows(LETTERS)] == ["free"]
    blocked.unlink()
    pipeline.start()
    pipeline.take()
    assert [letter[0] for letter in pipeline.rows(LETTERS)] == ["free", "stuck"]
    assert cursors_of(arrived(blocked)) == [Cursor(0x100, 0), Cursor(0x100, 2)]
    assert pipeline.rows("SELECT dead FROM walbrook.consumers") == [(1,), (1,)]


def test_a_repeat_finds_its_row_there_and_is_counted_once(
    pipeline_of: Callable[..., LogPipeline],
) -> None:
    pipeline = pipeline_of(all={})
    pipeline.write(ITEM, *transaction(0x100, row(1, 1, "bad"), row(1, 2)))
    pipeline.take()
    pipeline.state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/8', cursor_idx = 0")
    pipeline.start()
    pipeline.take()
    assert len(pipeline.rows(LETTERS)) == 1
    assert pipeline.rows("SELECT delivered, absorbed, dead FROM walbrook.consumers") == [(1, 1, 1)]


def test_a_start_that_was_replaced_writes_none(pipeline_of: Callable[..., LogPipeline]) -> None:
    pipeline = pipeline_of(all={})
    pipeline.write(ITEM, *transaction(0x100, row(1, 1, "bad")))
    pipeline.state.execute("UPDATE walbrook.sources SET term = term + 1")
    with pytest.raises(Exception, match="taken over"):
        pipeline.take()
    assert pipeline.rows(LETTERS) == []


def test_health_says_so_until_an_operator_deletes_the_rows(
    pipeline_of: Callable[..., LogPipeline],
) -> None:
    pipeline = pipeline_of(all={}, other={"actions": ["delete"]})
    pipeline.write(ITEM, *transaction(0x100, row(1, 1, "bad")))
    pipeline.take()
    ((consumer, severity, what),) = pipeline.rows(HEALTH)
    assert (consumer, severity) == ("all", "warning")
    assert what.startswith("all went on without 1 change that could not be delivered; the first:")
    pipeline.write(*transaction(0x200, row(1, 1, "bad")))
    pipeline.take()
    assert "without 2 changes" in pipeline.rows(HEALTH)[0][2]
    pipeline.state.execute("DELETE FROM walbrook.dead_letters")
    report_dead_letters(pipeline.state, "shop", pipeline.settings.term)
    assert pipeline.rows(HEALTH) == []
    assert pipeline.rows("SELECT dead FROM walbrook.consumers WHERE name = 'all'") == [(2,)]


def test_a_table_full_of_them_takes_seconds_and_little_memory(
    pipeline_of: Callable[..., LogPipeline],
) -> None:
    pipeline = pipeline_of(all={})
    for batch in range(1, 5):
        rows = [row(1, n, "bad " * 10) for n in range(5_000)]
        pipeline.write(ITEM, *transaction(0x1000 * batch, *rows))
    started, held = time.monotonic(), pa.total_allocated_bytes()
    pipeline.take()
    assert time.monotonic() - started < 30
    assert pa.total_allocated_bytes() - held < 64 << 20
    assert pipeline.rows("SELECT dead FROM walbrook.consumers") == [(20_000,)]
    assert pipeline.rows("SELECT count(*) FROM walbrook.dead_letters") == [(20_000,)]


def test_statements_are_bounded_in_bytes(
    pipeline_of: Callable[..., LogPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_of(all={})
    monkeypatch.setattr("cdc.state.dead_letters._INSERT_BYTES_MAX", 100)
    letters = [
        DeadLetter(
            Cursor(n, 0), pipeline.rows("SELECT now()")[0][0], "s", "t", "insert", "decode", "e",
            bytes([n]) * 60, None,
        )
        for n in range(1, 6)
    ]  # fmt: skip
    assert bury(pipeline.state, "shop", "all", letters) == 5
    assert bury(pipeline.state, "shop", "all", iter(letters)) == 0
    found = pipeline.rows("SELECT payload, schema FROM walbrook.dead_letters ORDER BY commit_lsn")
    assert found == [(bytes([n]) * 60, None) for n in range(1, 6)]
    (made,) = pipeline.rows("SELECT count(DISTINCT xmin::text) FROM walbrook.dead_letters")
    assert made[0] == 5  # autocommit here: a statement each

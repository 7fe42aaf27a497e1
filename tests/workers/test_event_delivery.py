"""Event time when destinations fail or refuse, rows are bad, or the buffer is full."""

from __future__ import annotations

import time
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import redis

from cdc.cursor import Cursor
from cdc.decoding import decode_changes
from spark_pipeline.eventtime.partitions import UnknownTableError
from spark_pipeline.workers.base import UndeliveredError
from tests import pgoutput
from tests.event_pipeline import ITEM, NAME, EventPipeline, S
from tests.event_webhook import hook, ids, redeliver, taken
from tests.fix_event_pipeline import Fate, MakePipeline
from tests.fix_http import Endpoint, Scripted
from tests.log_pipeline import arrived

NOTE = pgoutput.relation(1, "public", "item", [("id", 23, True), ("at", 20), ("note", 25)])
WAITING = (
    "SELECT c.source, (e.record::json ->> 'id')::int, e.commit_lsn - '0/0', e.commit_idx,"
    " e.deliveries FROM walbrook.events e JOIN walbrook.consumers c ON c.id = e.consumer"
    " ORDER BY 1, 3, 4"
)
LETTERS = (
    "SELECT source, commit_lsn - '0/0', commit_idx, kind FROM walbrook.dead_letters"
    " ORDER BY source, commit_lsn, commit_idx"
)


def refusing(endpoint: Endpoint, *numbers: int) -> None:
    endpoint.refuses = lambda messages: any(
        cast("dict[str, Any]", m["record"]).get("id") in numbers for m in messages
    )


def test_a_destination_that_was_down_gets_the_same_release_from_where_it_was(
    event_pipeline: MakePipeline, endpoint: Endpoint
) -> None:
    pipeline = event_pipeline(**hook(endpoint, batch_size=2))
    pipeline.write("a", *((n, n * S) for n in range(1, 7)))
    endpoint.script.extend([Scripted(), Scripted(503), Scripted(503)])
    for _ in range(2):
        with pytest.raises(UndeliveredError, match="503"):
            pipeline.turns()
        # In front of what goes out by its time, and behind it in the log: not part of it.
        pipeline.write("a", (10, 3 * S))
    assert taken(endpoint) == [1, 2]
    assert pipeline.ordering._reading.reads == {"a": Cursor(0x101, 0)}, "it read on meanwhile"
    pipeline.turns()
    assert taken(endpoint) == [1, 2, 3, 4, 5, 6, 10, 10]
    assert pipeline.rows("SELECT delivered, absorbed FROM walbrook.consumers") == [(8, 0)]


def test_a_message_refused_before_a_failure_holds_back_its_group_after_it(
    event_pipeline: MakePipeline, endpoint: Endpoint
) -> None:
    pipeline = event_pipeline(**hook(endpoint, batch_size=1))
    refusing(endpoint, 1)
    pipeline.write("a", (1, 1 * S), (2, 2 * S), (1, 3 * S), (3, 4 * S))
    endpoint.script.extend([Scripted(), Scripted(503)])
    with pytest.raises(UndeliveredError):
        pipeline.turns()
    endpoint.refuses = None
    pipeline.turns()
    assert taken(endpoint) == [2, 3], "the second change of a row went out before its first"
    assert pipeline.rows(WAITING) == [("a", 1, 0x100, 0, 1), ("a", 1, 0x100, 2, 0)]
    redeliver(pipeline)
    assert taken(endpoint) == [2, 3, 1, 1]


def test_single_messages_that_are_refused_wait_in_the_queue_of_their_database(
    event_pipeline: MakePipeline, endpoint: Endpoint
) -> None:
    pipeline = event_pipeline(sources=("a", "b"), **hook(endpoint))
    refusing(endpoint, 1, 12)
    pipeline.write("a", (1, 1 * S), (2, 3 * S), (1, 5 * S), (3, 9 * S))
    pipeline.write("b", (11, 2 * S), (12, 4 * S), (13, 6 * S), (14, 8 * S))
    pipeline.turns()
    assert taken(endpoint) == [11, 2, 13, 14]
    assert pipeline.rows(WAITING) == [
        ("a", 1, 0x100, 0, 1), ("a", 1, 0x100, 2, 0), ("b", 12, 0x100, 1, 1)
    ]  # fmt: skip
    pipeline.start()
    pipeline.write("a", (1, 20 * S))
    pipeline.write("b", (15, 21 * S))
    pipeline.turns()
    assert taken(endpoint) == [11, 2, 13, 14, 3], "a later change of a row that waits went out"
    endpoint.refuses = None
    redeliver(pipeline)
    assert taken(endpoint)[5:] in ([1, 1, 1, 12], [12, 1, 1, 1])
    keys = [m["metadata"]["idempotency_key"] for m in cast("list[Any]", endpoint.written)]
    assert all(key.startswith(("a:", "b:")) for key in keys), "redelivered under another key"
    assert pipeline.rows("SELECT delivered, dead FROM walbrook.consumers ORDER BY source") == [
        (5, 0), (4, 0)
    ]  # fmt: skip


def test_a_watermark_that_is_refused_holds_back_no_other_message(
    event_pipeline: MakePipeline, endpoint: Endpoint
) -> None:
    pipeline = event_pipeline(event_time={"emit_watermarks": True}, **hook(endpoint, batch_size=1))
    endpoint.refuses = lambda messages: str(messages[0]["record"]).endswith("01.000000Z'}")
    for number in (1, 2, 3):
        pipeline.write("a", (number, number * S))
        pipeline.turns()
    assert taken(endpoint) == [1, 2, "watermark", 3, "watermark"]
    assert pipeline.rows("SELECT action, group_id FROM walbrook.events") == [("watermark", None)]
    endpoint.refuses = None
    redeliver(pipeline)
    assert taken(endpoint)[5:] == ["watermark"]


def big(number: int, at: int, note: str = "x") -> bytes:
    return pgoutput.insert(1, [str(number), str(at * S), note])


@pytest.mark.parametrize("kind", ["file", "redis_stream"])
def test_a_message_that_is_too_large_is_dead_before_what_follows_is_sent(
    event_pipeline: MakePipeline, fate: Fate, redis_client: redis.Redis, redis_url: str, kind: str
) -> None:
    given: dict[str, Any] = {}
    if kind == "redis_stream":
        given["destination"] = {"type": kind, "url": redis_url, "stream_key": "large"}
    pipeline = event_pipeline(sources=("a", "b"), max_message_bytes=1_000, **given)
    pipeline.write_messages("a", NOTE, big(1, 1), big(2, 3, "x" * 2_000), big(3, 5))
    pipeline.write_messages("b", NOTE, big(4, 2), big(5, 4), big(6, 6, "y" * 2_000))
    # The first send ends with the dead one, the second dies after the next message.
    fate.let_die("sending", 3)
    assert fate.turns(pipeline)
    assert pipeline.rows(LETTERS) == [("a", 0x100, 1, "delivery")]
    pipeline.start()
    pipeline.write_messages("a", NOTE, big(7, 9))
    pipeline.turns()
    if kind == "file":
        found = ids(pipeline)
    else:
        entries = cast("list[Any]", redis_client.xrange("large"))
        found = [int(fields[b"record"].split(b":")[1].split(b",")[0]) for _, fields in entries]
    assert found == [1, 4, 5, 3]
    pipeline.write_messages("b", NOTE, big(8, 9))
    pipeline.turns()
    assert pipeline.rows(LETTERS) == [("a", 0x100, 1, "delivery"), ("b", 0x100, 2, "delivery")]
    counts = "SELECT source, delivered + absorbed, dead FROM walbrook.consumers ORDER BY 1"
    assert pipeline.rows(counts) == [("a", 3, 1), ("b", 3, 1)]
    told = "SELECT source FROM walbrook.health WHERE kind = 'dead_letters' ORDER BY 1"
    assert pipeline.rows(told) == [("a",), ("b",)]


def passes(rows: pa.RecordBatch) -> pa.Array:
    """Fails on one row."""
    numbers = pc.struct_field(rows.column("record"), "id")
    if 3 in numbers.to_pylist():
        raise ValueError("no threes")
    return pc.not_equal(numbers, 4)


def unreadable(*arguments: Any, **named: Any) -> pa.RecordBatch:
    """What decode gives, as if the row with the id 2 could not be read."""
    changes = decode_changes(*arguments, **named)
    bad = pc.fill_null(pc.match_substring(changes.column("record"), '"id":2,'), False)
    nothing = pa.nulls(changes.num_rows, pa.string())
    columns = {name: changes.column(name) for name in changes.schema.names}
    columns["error"] = pc.if_else(bad, "column 'note' cannot be read", nothing)
    columns["record"] = pc.if_else(bad, nothing, columns["record"])
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=changes.schema)


def test_rows_that_fail_are_dead_letters_of_their_database_once_and_for_all(
    event_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_pipeline.source.range_reader.decode_carefully", unreadable)
    pipeline = event_pipeline(
        sources=("a", "b"),
        event_time={"late_tolerance": "20s"},
        filter=f"python:{__name__}:passes",
    )
    pipeline.write("a", (1, 50 * S), (2, 1 * S), (3, 1 * S), (4, 1 * S))
    pipeline.write("b", (11, 51 * S), (3, 2 * S), (12, 1 * S))
    pipeline.write_messages("b", ITEM, pgoutput.insert(1, ["13", str(10**18)]))
    pipeline.turns()
    pipeline.ordering.settle()
    letters = [
        ("a", 0x100, 1, "decode"), ("a", 0x100, 2, "expression"), ("b", 0x100, 1, "expression"),
        ("b", 0x200, 0, "event_time"),
    ]  # fmt: skip
    assert pipeline.rows(LETTERS) == letters
    assert ids(pipeline) == [12]
    assert pipeline.cursors() == {"a": Cursor(0x100, 0), "b": Cursor(0x100, 0)}, "held back"
    # They lie behind the cursors and are read again; who has dealt with them is not asked twice.
    pipeline.state.execute("DELETE FROM walbrook.dead_letters WHERE source = 'a'")
    pipeline.start()
    pipeline.write("a", (14, 90 * S))
    pipeline.write("b", (15, 90 * S))
    pipeline.turns()
    pipeline.ordering.settle()
    assert ids(pipeline) == [12, 1, 11]
    assert pipeline.rows(LETTERS) == letters[2:]
    assert pipeline.rows("SELECT dead FROM walbrook.consumers ORDER BY source") == [(2,), (2,)]


def wide(pipeline: EventPipeline, source: str, first: int, rows: int) -> None:
    """A transaction of rows of about 4 KiB each, a second apart."""
    changes = [big(n, n, "x" * 4_000) for n in range(first, first + rows)]
    pipeline.write_messages(source, NOTE, *changes)


def test_a_full_buffer_stops_reading_and_goes_on_when_the_other_database_catches_up(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline(sources=("a", "b"), event_time={"max_buffer_bytes": "1MiB"})
    for first in range(1, 401, 40):
        wide(pipeline, "a", first, 40)  # 1.6 MB; half of the buffer is for each database
    pipeline.turns()
    pipeline.ordering.settle()
    read = pipeline.ordering._reading.reads["a"]
    assert Cursor(0x300, 0) < read < Cursor(0x800, 0), "it did not stop, or read too little"
    assert pipeline.cursors()["a"] == Cursor(0x100, 0), "its cursor passed what is held back"
    assert not pipeline.ordering.is_stuck, "the other database can make room"
    before, spins = time.monotonic(), 0
    while time.monotonic() - before < 0.3:
        assert not pipeline.step()
        spins += 1
    assert spins < 10, "it does not wait, though it may not read"
    pipeline.write("b", (1001, 350 * S))
    pipeline.turns()
    assert ids(pipeline) == [*range(1, 351), 1001]
    pipeline.write("b", (1002, 500 * S))
    pipeline.turns()
    assert ids(pipeline) == [*range(1, 351), 1001, *range(351, 401)], "some were dropped"
    assert pipeline.ordering._sequencer.buffer.bytes < 2**20


def test_a_table_that_holds_back_others_of_its_full_database_is_reported(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline(tables=("item", "other"), event_time={"max_buffer_bytes": "1MiB"})
    for first in range(1, 801, 40):
        wide(pipeline, "a", first, 40)
    pipeline.write("a", (1001, 900 * S), table=2)
    pipeline.turns()
    assert pipeline.ordering.is_stuck
    assert ids(pipeline) == []
    pipeline.change_event_time(max_buffer_bytes=16 * 2**20)
    pipeline.turns()
    assert not pipeline.ordering.is_stuck
    assert ids(pipeline) == [*range(1, 801)]


def test_unequal_rates_come_in_one_order_within_the_bound(event_pipeline: MakePipeline) -> None:
    pipeline = event_pipeline(sources=("a", "b"), event_time={"max_buffer_bytes": "1MiB"})
    for round_ in range(8):
        for first in range(100 * round_, 100 * round_ + 100, 25):
            wide(pipeline, "a", first + 1, 25)
        pipeline.write("b", (10_000 + round_, (100 * round_ + 100) * S))
        pipeline.turns()
        assert pipeline.ordering._sequencer.buffer.bytes < 2 * 2**20
    times = [m["metadata"]["event_time"] for m in arrived(pipeline.directory / NAME)]
    assert times == sorted(times)
    assert [n for n in ids(pipeline) if n < 10_000] == [*range(1, 801)]


def test_rows_of_a_table_that_is_not_known_wait_until_it_was_looked_up(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline()
    pipeline.write("a", (1, 1 * S))
    pipeline.turns()
    pipeline.write("a", (2, 2 * S))
    pipeline.write("a", (3, 3 * S), table=2)
    with pytest.raises(UnknownTableError) as caught:
        pipeline.turns()
    assert (caught.value.source, caught.value.table) == ("a", "public.other")
    pipeline.tables["public.other"] = "public.other"
    pipeline.read_resume_state()
    pipeline.turns()
    assert ids(pipeline) == [1, 2]

"""The reader over streamed transactions: spilling, restarts in the middle, two-phase commits."""

from __future__ import annotations

from cdc.cursor import parse_lsn
from cdc.replication.spill.spilled_transaction import BatchLimits
from tests.fix_postgres import (
    since,
)
from tests.slot_source import SlotSource
from tests.stream_server import STREAMED, TWO_PHASE, annotate, fill, prepare, spilled_bytes
from tests.stream_server import server as server
from tests.stream_server import source as source
from tests.waiting import until


def test_the_reader_spills_what_is_open_and_logs_what_is_committed(source: SlotSource) -> None:
    with source.reading(stream=STREAMED), source.database.connect() as writer:
        with writer.transaction():
            fill(writer, 1, 5000)
            until("rows to flow", lambda: spilled_bytes(source) > 0)
            source.database.execute("INSERT INTO item VALUES (9001, 'small')")
            assert len(source.until_logged(1)) == 1
        found = source.until_logged(5001)
    assert [cursor.idx for cursor, _ in found] == [0, *range(5000)]
    assert spilled_bytes(source) == 0


def test_a_restart_in_the_middle_of_publishing_goes_on_where_it_was(source: SlotSource) -> None:
    with source.reading(stream=STREAMED, batch=BatchLimits(rows=50)):
        with source.database.connect() as writer, writer.transaction():
            annotate(writer, "1")
            fill(writer, 1, 4999)
        source.until_logged(100)
    partly = len(source.messages())
    with source.reading(stream=STREAMED):
        found = source.until_logged(5000)
    assert [cursor.idx for cursor, _ in found] == [0, *range(2, 5001)], f"stopped after {partly}"
    assert list(source.annotations().values()) == ["1"] * 4999


def test_a_transaction_that_does_not_fit_into_the_spill_is_read_whole(source: SlotSource) -> None:
    with source.reading(stream=STREAMED, spill_bytes_max=100_000):
        with source.database.connect() as writer, writer.transaction():
            fill(writer, 1, 5000)
        found = source.until_logged(5000)
    assert [cursor.idx for cursor, _ in found] == list(range(5000))


@since(15)
def test_the_reader_keeps_a_prepared_transaction_over_a_restart(source: SlotSource) -> None:
    gid = f"{source.database.name} order"
    with source.reading(stream=TWO_PHASE, durability="fsync"):
        with source.database.connect() as writer:
            writer.execute("BEGIN")
            fill(writer, 1, 3000)
            writer.execute(f"PREPARE TRANSACTION '{gid}'")
            prepared_at = parse_lsn(
                str(source.database.execute("SELECT pg_current_wal_lsn()")[0][0])
            )
        until("the slot to pass the prepare", lambda: source.confirmed_lsn() >= prepared_at)
        assert source.messages() == []
    source.database.execute(f"COMMIT PREPARED '{gid}'")
    with source.reading(stream=TWO_PHASE, durability="fsync"):
        found = source.until_logged(3000)
        until("the rows to be settled", lambda: spilled_bytes(source) == 0)
    assert [cursor.idx for cursor, _ in found] == list(range(3000))


@since(15)
def test_a_sink_that_stands_still_does_not_fill_the_spill(source: SlotSource) -> None:
    gid = f"{source.database.name} order"
    with source.reading(stream=TWO_PHASE, durability="disk", spill_bytes_max=100_000):
        for number in range(15):
            prepare(source, gid, number * 100, number * 100 + 99)
            source.database.execute(f"COMMIT PREPARED '{gid}'")
            source.until_logged(100 * (number + 1))
            if number % 3 == 2:
                until("the rows to leave", lambda: spilled_bytes(source) == 0)
    assert source.database.execute("SELECT kind FROM walbrook.health_events") == []


@since(15)
def test_a_reader_without_a_log_that_lasts_waits_for_its_sinks_and_goes_on(
    source: SlotSource,
) -> None:
    gid = f"{source.database.name} order"
    full = "SELECT 1 FROM walbrook.health_events WHERE kind = 'spill_full'"
    with source.reading(stream=TWO_PHASE, durability="memory", spill_bytes_max=20_000):
        for number in range(3):
            prepare(source, gid, number * 100, number * 100 + 99)
            source.database.execute(f"COMMIT PREPARED '{gid}'")
        until("the reader to say so", lambda: source.database.execute(full))
        known = source.count()
        assert known < 300

        def served() -> bool:
            source.settle_all()
            return source.count() == 300

        until("the rest", served)


@since(15)
def test_a_prepare_that_was_not_secured_before_a_restart_is_read_again(
    source: SlotSource,
) -> None:
    gid = f"{source.database.name} order"
    with source.reading(stream=TWO_PHASE, durability="fsync"):
        source.database.execute("INSERT INTO item VALUES (9001, 'first')")
        source.until_logged(1)
        prepare(source, gid, 1, 10)
        source.database.execute("INSERT INTO item VALUES (9002, 'behind it')")
        source.until_logged(2)
    source.database.execute(f"COMMIT PREPARED '{gid}'")
    with source.reading(stream=TWO_PHASE, durability="fsync"):
        found = source.until_logged(12)
    assert [kind for _, kind in found] == ["I"] * 12
    cursors = [cursor for cursor, _ in found]
    assert cursors == sorted(set(cursors))

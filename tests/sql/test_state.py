"""Positions as rows: registration, settling, and the view that shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from cdc.cursor import Cursor
from cdc.errors import OperatorError, SourceError, TransientError
from cdc.state.fence import FENCE_TO_MOVE
from cdc.state.health import Condition, report_conditions, resolve_unserved
from cdc.state.migrate import migrate
from cdc.state.positions import (
    Settlement,
    consumer_cursors,
    left_behind,
    register_source,
    registered_slot,
    report_not_ready,
    restart_cursor,
    settle,
)
from cdc.state.reader_state import (
    ReaderReport,
    SegmentRow,
    SourceObservation,
    record_identity,
    report_reader,
    report_segments,
)
from tests.fix_postgres import Database

START = Cursor(100, 0)


@pytest.fixture
def state(database: Database) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    with database.connect() as connection:
        migrate(connection)
        yield connection


def register(state: psycopg.Connection[tuple[Any, ...]], *consumers: str, system: str = "1") -> int:
    return register_source(
        state,
        name="shop",
        slot="s",
        publication="p",
        system_identifier=system,
        slot_lsn=100,
        consumers=consumers,
    )


def settled(
    state: psycopg.Connection[tuple[Any, ...]], term: int, end: Cursor, **cursors: Cursor
) -> None:
    before = consumer_cursors(state, "shop")
    consumers = {name: Settlement(before[name], cursor) for name, cursor in cursors.items()}
    settle(state, source="shop", term=term, read_to=end, consumers=consumers)


def report(log_end: Cursor = START, **changes: Any) -> ReaderReport:
    ours = ReaderReport(
        state="streaming",
        error=None,
        head_lsn=600,
        log_end=log_end,
        durable_end=log_end,
        earliest=START,
        evicted=Cursor(0, 0),
        log_bytes=4096,
    )
    return replace(ours, **changes)


def test_a_new_source_starts_where_its_slot_stands(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    register(state, "a", "b")
    assert restart_cursor(state, "shop") == Cursor(100, 0)
    assert consumer_cursors(state, "shop") == {"a": Cursor(100, 0), "b": Cursor(100, 0)}


def test_the_restart_cursor_is_the_lowest_of_the_consumers(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a", "b")
    settled(state, term, Cursor(200, 5), a=Cursor(200, 5), b=Cursor(150, 2))
    assert restart_cursor(state, "shop") == Cursor(150, 2)
    settled(state, term, Cursor(200, 5), b=Cursor(200, 5))
    assert restart_cursor(state, "shop") == Cursor(200, 5)


def test_a_cursor_that_an_operator_moved_is_not_overwritten(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a", "b")
    state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/96' WHERE name = 'a'")
    moves = {name: Settlement(START, Cursor(200, 5)) for name in ("a", "b")}
    with pytest.raises(TransientError, match="somebody moved it"):
        settle(state, source="shop", term=term, read_to=Cursor(200, 5), consumers=moves)
    assert consumer_cursors(state, "shop") == {"a": Cursor(0x96, 0), "b": START}


def test_the_restart_cursor_never_goes_back(state: psycopg.Connection[tuple[Any, ...]]) -> None:
    term = register(state, "a")
    settled(state, term, Cursor(200, 5), a=Cursor(200, 5))
    settled(state, term, Cursor(150, 0), a=Cursor(150, 0))
    assert restart_cursor(state, "shop") == Cursor(200, 5)


def test_without_consumers_the_restart_cursor_follows_what_was_read(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state)
    settled(state, term, Cursor(300, 0))
    assert restart_cursor(state, "shop") == Cursor(300, 0)


def test_an_earlier_start_of_the_service_may_not_settle(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    stale = register(state, "a")
    current = register(state, "a")
    with pytest.raises(OperatorError, match="has taken over"):
        settled(state, stale, Cursor(200, 0), a=Cursor(200, 0))
    assert restart_cursor(state, "shop") == Cursor(100, 0)
    settled(state, current, Cursor(200, 0), a=Cursor(200, 0))


def test_a_consumer_that_is_gone_holds_nothing_back_and_a_new_one_starts_at_the_restart_cursor(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a", "b")
    settled(state, term, Cursor(200, 0), a=Cursor(200, 0))
    term = register(state, "a", "c")
    assert consumer_cursors(state, "shop") == {"a": Cursor(200, 0), "c": Cursor(100, 0)}
    settled(state, term, Cursor(300, 0), a=Cursor(300, 0), c=Cursor(300, 0))
    assert restart_cursor(state, "shop") == Cursor(300, 0)


def test_a_consumer_that_comes_back_too_late_keeps_its_cursor_and_no_other_one_waits_for_it(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    register(state, "a", "b")
    term = register(state, "a")
    settled(state, term, Cursor(300, 0), a=Cursor(300, 0))
    register(state, "a", "b")
    assert consumer_cursors(state, "shop") == {"a": Cursor(300, 0), "b": Cursor(100, 0)}
    assert restart_cursor(state, "shop") == Cursor(300, 0)
    lost = left_behind(state, "shop", Cursor(300, 0))
    assert [*lost] == ["b"]
    assert "consumer b of source shop stands at cursor 0/64:0" in str(lost["b"])


def test_the_events_of_a_consumer_that_was_removed_end(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a", "b")
    for consumer in ("a", "b"):
        failing = [Condition("worker_failing", "warning", f"{consumer} fails")]
        report_conditions(state, "shop", term, failing, consumer=consumer, scope="worker_")
    register(state, "a")
    assert sources_of_events(state) == [("shop", "a", "worker_failing")]


def test_a_health_event_does_not_wait_for_a_settlement_that_hangs(
    state: psycopg.Connection[tuple[Any, ...]], database: Database
) -> None:
    term = register(state, "a")
    slow = [Condition("worker_slow", "warning", "a settlement of a takes long")]
    state.execute("SET lock_timeout = '5s'")
    with database.connect() as other, other.transaction():
        other.execute(FENCE_TO_MOVE, ("shop", term))
        report_conditions(state, "shop", term, slow, consumer="a", scope="worker_")
    assert sources_of_events(state) == [("shop", "a", "worker_slow")]


def test_the_events_of_a_source_without_a_service_end(
    state: psycopg.Connection[tuple[Any, ...]], database: Database
) -> None:
    term = register(state, "a")
    lost = [Condition("slot_lost", "error", "the slot is lost")]
    report_conditions(state, "shop", term, lost)
    with database.connect() as other:
        other.execute("SELECT pg_advisory_lock(hashtextextended('walbrook.source.shop', 0))")
        resolve_unserved(state, ["depot"])
        assert sources_of_events(state) == [("shop", None, "slot_lost")], (
            "another service serves it"
        )
    resolve_unserved(state, ["shop"])
    assert sources_of_events(state) == [("shop", None, "slot_lost")]
    resolve_unserved(state, ["depot"])
    assert sources_of_events(state) == []


def test_a_source_that_was_never_ready_says_why_and_is_registered_later(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    why = Condition("source_not_ready", "error", "it cannot be reached", "start it")
    for _ in range(2):
        report_not_ready(state, name="shop", slot="s", publication="p", condition=why)
    row = "SELECT state, last_error FROM walbrook.sources"
    assert state.execute(row).fetchall() == [
        ("stopped", "it cannot be reached. To fix it: start it")
    ]
    assert sources_of_events(state) == [("shop", None, "source_not_ready")]
    assert registered_slot(state, "shop") is None
    register(state, "a")
    assert registered_slot(state, "shop") is not None
    assert restart_cursor(state, "shop") == Cursor(100, 0)


def sources_of_events(state: psycopg.Connection[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return state.execute("SELECT source, consumer, kind FROM walbrook.health ORDER BY 2").fetchall()


def test_another_cluster_under_the_same_name_is_refused(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    register(state, "a")
    with pytest.raises(SourceError, match="another cluster"):
        register(state, "a", system="2")


def test_a_settlement_that_moves_nothing_is_no_movement(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a")
    moved = "SELECT moved_at FROM walbrook.consumers"
    before = state.execute(moved).fetchone()
    failed = Settlement(START, START, error="the sink is down")
    settle(state, source="shop", term=term, read_to=START, consumers={"a": failed})
    assert state.execute(moved).fetchone() == before
    settled(state, term, Cursor(200, 0), a=Cursor(200, 0))
    assert state.execute(moved).fetchone() != before


def test_the_view_shows_cursor_lag_and_when_it_moved(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a", "b")
    old = datetime.now(UTC) - timedelta(seconds=60)
    settle(
        state,
        source="shop",
        term=term,
        read_to=Cursor(500, 3),
        consumers={
            "a": Settlement(START, Cursor(500, 3), delivered=7, absorbed=2, last_commit=old),
            "b": Settlement(START, Cursor(300, 1), last_commit=old, error="the sink is down"),
        },
    )
    report_reader(state, "shop", term, report(log_end=Cursor(500, 3)))
    rows = state.execute(
        "SELECT consumer, cursor, lsn::text, lag_bytes, lag_seconds::int, "
        "moved_at > now() - interval '1 minute' FROM walbrook.cursors ORDER BY consumer NULLS FIRST"
    ).fetchall()
    restart, a, b = rows
    assert restart[:4] == (None, "0/12C:1", "0/12C", 300)
    assert a == ("a", "0/1F4:3", "0/1F4", 100, 0, True)
    assert b[:4] == ("b", "0/12C:1", "0/12C", 300)
    assert 59 <= b[4] <= 70
    assert state.execute(
        "SELECT delivered, absorbed, last_error FROM walbrook.consumers ORDER BY name"
    ).fetchall() == [(7, 2, None), (0, 0, "the sink is down")]


def test_the_reader_tells_of_its_log_and_its_slot_and_what_it_does_not_know_stays(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a")
    beat = datetime.now(UTC)
    report_reader(
        state,
        "shop",
        term,
        report(
            log_end=Cursor(500, 3),
            durable_end=Cursor(400, 1),
            earliest=Cursor(200, 0),
            evicted=Cursor(150, 7),
            timeline=4,
            sight=SourceObservation(beat, 0.25, "extended", 1000),
        ),
    )
    columns = (
        "durable_lsn::text, durable_idx, earliest_lsn::text, earliest_idx, evicted_lsn::text, "
        "evicted_idx, log_bytes, timeline, heartbeat_at, heartbeat_lag_s, slot_wal_status, "
        "slot_safe_bytes"
    )
    select = f"SELECT {columns} FROM walbrook.sources".encode()
    first = ("0/190", 1, "0/C8", 0, "0/96", 7, 4096, 4, beat, 0.25, "extended", 1000)
    assert state.execute(select).fetchall() == [first]
    report_reader(state, "shop", term, report())
    (after,) = state.execute(select).fetchall()
    assert after[7:] == first[7:]
    report_reader(state, "shop", term, report(sight=SourceObservation(slot_wal_status="reserved")))
    (after,) = state.execute(select).fetchall()
    assert after[10:] == ("reserved", None)


def test_an_earlier_start_of_the_service_may_report_nothing(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    stale = register(state, "a")
    register(state, "a")
    condition = Condition("slot_at_risk", "warning", "the slot is at risk")
    attempts: list[Callable[[], None]] = [
        lambda: report_reader(state, "shop", stale, report()),
        lambda: report_conditions(state, "shop", stale, [condition]),
        lambda: report_segments(state, "shop", stale, [segment(0)]),
        lambda: record_identity(state, "shop", stale, timeline=2, publication_oid=1),
    ]
    for attempt in attempts:
        with pytest.raises(OperatorError, match="has taken over") as caught:
            attempt()
        assert caught.value.kind == "fenced"
    assert state.execute("SELECT state, timeline FROM walbrook.sources").fetchall() == [
        ("stopped", None)
    ]
    assert state.execute("SELECT 1 FROM walbrook.health_events").fetchall() == []
    assert state.execute("SELECT 1 FROM walbrook.log_segments").fetchall() == []


def open_events(state: psycopg.Connection[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return state.execute(
        "SELECT consumer, kind, severity, what FROM walbrook.health ORDER BY kind"
    ).fetchall()


def test_conditions_are_opened_once_kept_fresh_and_resolved_when_no_longer_reported(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a")
    late = Condition("heartbeat_late", "warning", "late by 10 s")
    lost = Condition("slot_lost", "error", "the slot is lost", "create it")
    report_conditions(state, "shop", term, [lost, late])
    (since,) = state.execute("SELECT min(since) FROM walbrook.health").fetchone() or (None,)
    later = replace(late, what="late by 20 s")
    report_conditions(state, "shop", term, [later, lost])
    assert open_events(state) == [
        (None, "heartbeat_late", "warning", "late by 20 s"),
        (None, "slot_lost", "error", "the slot is lost"),
    ]
    assert state.execute("SELECT min(since), count(*) FROM walbrook.health").fetchall() == [
        (since, 2)
    ]
    state.execute("UPDATE walbrook.health_events SET seen_at = seen_at - interval '1 minute'")
    report_conditions(state, "shop", term, [lost])
    assert [event[1] for event in open_events(state)] == ["slot_lost"]
    assert state.execute(
        "SELECT kind, resolved_at IS NULL, seen_at > now() - interval '30 seconds' "
        "FROM walbrook.health_events ORDER BY kind"
    ).fetchall() == [("heartbeat_late", False, False), ("slot_lost", True, True)]
    report_conditions(state, "shop", term, [later])
    assert [event[1] for event in open_events(state)] == ["heartbeat_late"]
    assert state.execute("SELECT count(*) FROM walbrook.health_events").fetchall() == [(3,)]


def test_a_reporter_resolves_its_own_events_only(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a", "b")
    down = Condition("sink_down", "error", "the sink is down")
    report_conditions(state, "shop", term, [down], consumer="a")
    report_conditions(state, "shop", term, [down], consumer="b")
    report_conditions(state, "shop", term, [], consumer="b")
    report_conditions(state, "shop", term, [])
    assert open_events(state) == [("a", "sink_down", "error", "the sink is down")]


def test_nothing_is_written_while_conditions_stay_as_they_are(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a")
    condition = Condition("slot_at_risk", "warning", "the slot is at risk")
    report_conditions(state, "shop", term, [condition])
    versions = "SELECT e.xmin, s.xmax FROM walbrook.health_events e, walbrook.sources s"
    before = state.execute(versions).fetchall()
    report_conditions(state, "shop", term, [condition])
    assert state.execute(versions).fetchall() == before


def test_a_condition_that_comes_and_goes_does_not_fill_the_database(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a")
    state.execute(
        "INSERT INTO walbrook.health_events (source, kind, severity, what, resolved_at) "
        "SELECT 'shop', 'old', 'warning', 'old ' || i, now() FROM generate_series(1, 1500) i"
    )
    report_conditions(state, "shop", term, [Condition("new", "warning", "new")])
    report_conditions(state, "shop", term, [])
    assert state.execute(
        "SELECT count(*), count(*) FILTER (WHERE kind = 'new') FROM walbrook.health_events"
    ).fetchall() == [(1000, 1)]


def segment(first_batch: int, **changes: Any) -> SegmentRow:
    first, high = Cursor(first_batch, 0), Cursor(first_batch + 10, 0)
    at = 1_700_000_000_000_000
    row = SegmentRow(first_batch, 10, 100, 5000, first, high, at, at + 1, 1.7e9, "hot", "/log")
    return replace(row, **changes)


def test_log_segments_follow_the_list_that_is_given(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    term = register(state, "a")
    shown = (
        "SELECT first_batch, rows, tier, sealed_at IS NULL FROM walbrook.log_segments ORDER BY 1"
    )
    active = segment(20, tier="active", sealed_at=0.0, commit_from_us=0, commit_to_us=0)
    first = [segment(0), segment(10), active]
    report_segments(state, "shop", term, first)
    assert state.execute(shown).fetchall() == [
        (0, 100, "hot", False), (10, 100, "hot", False), (20, 100, "active", True),
    ]  # fmt: skip
    versions = "SELECT first_batch, xmin FROM walbrook.log_segments ORDER BY 1"
    before = dict(state.execute(versions).fetchall())
    second = [segment(10), segment(20, rows=150), segment(30, tier="active", sealed_at=0.0)]
    report_segments(state, "shop", term, second, before=first)
    expected = [(10, 100, "hot", False), (20, 150, "hot", False), (30, 100, "active", True)]
    assert state.execute(shown).fetchall() == expected
    assert dict(state.execute(versions).fetchall())[10] == before[10]
    state.execute("INSERT INTO walbrook.log_segments SELECT source, 99, batches, rows, bytes, "
                  "first_lsn, first_idx, high_lsn, high_idx, commit_from, commit_to, sealed_at, "
                  "tier, location FROM walbrook.log_segments LIMIT 1")  # fmt: skip
    report_segments(state, "shop", term, second)
    assert state.execute(shown).fetchall() == expected
    assert dict(state.execute(versions).fetchall())[10] == before[10]


def test_a_gap_is_noted_once_for_a_consumer_and_has_an_extent(
    state: psycopg.Connection[tuple[Any, ...]],
) -> None:
    register(state, "a")
    add = (
        "INSERT INTO walbrook.gaps (source, consumer, from_lsn, from_idx, to_lsn, to_idx, reason) "
        "VALUES ('shop', 'a', '0/64', 0, %s, 0, 'evicted')"
    )
    state.execute(add, ["0/C8"])
    with pytest.raises(psycopg.errors.UniqueViolation):
        state.execute(add, ["0/FF"])
    state.execute("DELETE FROM walbrook.gaps")
    with pytest.raises(psycopg.errors.CheckViolation):
        state.execute(add, ["0/64"])

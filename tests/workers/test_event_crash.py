"""Crashes of consumers in event-time order, at every step and at every kind of destination.

A crash is followed by more changes, then by a start. What has arrived must be what a run without
crashes delivers that takes the same steps: nothing lost, nothing twice, in the same order, and the
same changes late.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import orjson
import pyarrow.parquet as pq
import pytest
import redis

from cdc.config.secrets import SecretText
from cdc.cursor import Cursor
from cdc.errors import TransientError
from cdc.queue.ledger.open import LedgerAddress
from cdc.queue.ledger.postgres import PostgresLedger
from cdc.state.feeds import open_feed
from cdc.state.gaps import skip_evicted
from sinks import ledgered
from tests import pgoutput
from tests.event_crashes import in_files, shown, with_crashes, without_crashes
from tests.event_pipeline import NAME, EventPipeline, S
from tests.fix_event_pipeline import STEPS, Fate, MakePipeline
from tests.fix_http import Endpoint
from tests.fix_postgres import Database

Arrived = Callable[[EventPipeline], list[Any]]
STREAM = "crashes"


class Times:
    """Changes of two databases that come out of order, some of them late, some without a time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._now, self._next = 100, 0

    def phase(self) -> list[tuple[str, list[bytes]]]:
        """The transactions of one phase, with their databases."""
        rng = self._random
        self._now += rng.randrange(4)
        return [
            (source, [self._change() for _ in range(rng.randrange(1, 4))])
            for source in ("a", "b")
            for _ in range(rng.randrange(3))
        ]

    def _change(self) -> bytes:
        self._next += 1
        at = self._now - self._random.choice([0, 0, 1, 1, 2, 3, 6])
        kind = self._random.randrange(8)
        if kind == 0:
            return pgoutput.delete(1, key=[str(self._next), None])
        return pgoutput.insert(1, [str(self._next), None if kind == 1 else str(at * S)])


def stored(pipeline: EventPipeline) -> list[tuple[Any, ...]]:
    """What must be the same in the state database."""
    return [
        *pipeline.rows("SELECT watermark, sequence, planned, sent_mark FROM walbrook.event_time"),
        *pipeline.rows(
            "SELECT c.source, c.cursor_lsn, c.cursor_idx, c.delivered + c.absorbed, c.dead,"
            " e.read_lsn, e.read_idx, e.settled_to, p.last_event, p.late"
            " FROM walbrook.consumers c JOIN walbrook.event_sources e ON e.consumer = c.id"
            " LEFT JOIN walbrook.event_partitions p ON p.consumer = c.id ORDER BY 1"
        ),
        *pipeline.rows(
            "SELECT source, commit_lsn, commit_idx, kind FROM walbrook.dead_letters"
            " ORDER BY 1, 2, 3"
        ),
    ]


@pytest.mark.parametrize("policy", ["deliver", "drop", "dead_letter"])
def test_random_crashes_change_nothing_of_what_arrives(
    event_pipeline: MakePipeline, fate: Fate, policy: str
) -> None:
    seed = {"deliver": 1, "drop": 2, "dead_letter": 3}[policy]
    print("seed", seed)
    rng, times = random.Random(seed), Times(seed)
    phases = [times.phase() for _ in range(20 if policy == "deliver" else 14)]
    given = {
        "sources": ("a", "b"),
        "event_time": {
            "late_tolerance": "2s", "late_policy": policy, "emit_watermarks": policy == "drop"
        },
    }  # fmt: skip
    quiet = event_pipeline(**given)
    without_crashes(quiet, phases)
    expected, state = in_files(quiet), stored(quiet)
    pipeline = event_pipeline(**given)
    deaths = with_crashes(
        pipeline, phases, fate, lambda: (rng.choice(STEPS), rng.choice([1, 1, 2]))
    )
    assert deaths >= 4
    assert in_files(pipeline) == expected
    assert stored(pipeline) == state
    late = {row[4] for row in expected}
    assert late == ({None, True} if policy == "deliver" else {None})


def in_parquet(pipeline: EventPipeline) -> list[Any]:
    files = sorted((pipeline.directory / "rows").rglob("*.parquet"), key=lambda file: file.name)
    rows = [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]
    return [(row["action"], orjson.loads(row["record"])["id"], row["commit_lsn"]) for row in rows]


def test_parquet_has_each_row_once_and_in_order(event_pipeline: MakePipeline, fate: Fate) -> None:
    times = Times(4)
    phases = [times.phase() for _ in range(len(STEPS) * 2)]

    def pipeline_of() -> EventPipeline:
        pipeline = event_pipeline(sources=("a", "b"), event_time={"late_tolerance": "2s"})
        place = {
            "type": "parquet",
            "columns": "json",
            "max_delay_ms": 0,
            "path": pipeline.directory / "rows",
            "partition_by": [],
        }
        pipeline.sink = pipeline.sink.model_validate(
            {**pipeline.sink.model_dump(exclude={"database"}), "destination": place}
        )
        pipeline.read_resume_state()
        return pipeline

    quiet = pipeline_of()
    without_crashes(quiet, phases)
    expected = in_parquet(quiet)
    pipeline = pipeline_of()
    steps = cycle(STEPS)
    assert with_crashes(pipeline, phases, fate, lambda: (next(steps), 1)) >= len(STEPS)
    assert in_parquet(pipeline) == expected


def test_redis_has_each_entry_once_and_in_order(
    event_pipeline: MakePipeline, fate: Fate, redis_client: redis.Redis, redis_url: str
) -> None:
    rng, times = random.Random(5), Times(5)
    phases = [times.phase() for _ in range(15)]
    expected: list[Any] = []
    for crashes in (False, True):
        redis_client.delete(STREAM)
        place = {"type": "redis_stream", "url": redis_url, "stream_key": STREAM}
        pipeline = event_pipeline(
            sources=("a", "b"), event_time={"late_tolerance": "2s"}, destination=place
        )
        if not crashes:
            without_crashes(pipeline, phases)
            expected = in_redis(redis_client)
            continue
        deaths = with_crashes(
            pipeline, phases, fate, lambda: (rng.choice(STEPS), rng.choice([1, 2]))
        )
        assert deaths >= 5
        assert in_redis(redis_client) == expected


def in_redis(client: redis.Redis) -> list[Any]:
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(STREAM))
    return [
        shown(
            {
                "record": orjson.loads(fields[b"record"]),
                "action": fields[b"action"].decode(),
                "metadata": orjson.loads(fields[b"metadata"]),
            }
        )
        for _, fields in entries
    ]


@pytest.mark.parametrize("noted", [True, False])
def test_a_webhook_gets_only_the_request_again_that_was_not_noted(
    event_pipeline: MakePipeline,
    fate: Fate,
    event_database: Database,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    noted: bool,
) -> None:
    """It dies at every second note, behind it or just before; each request waits for its note."""
    note = PostgresLedger.note

    def note_or_die(self: PostgresLedger, *given: Any, **named: Any) -> None:
        if not noted:
            fate.reach("accepted")
        note(self, *given, **named)
        fate.reach("accepted")

    monkeypatch.setattr(PostgresLedger, "note", note_or_die)
    monkeypatch.setattr(ledgered, "NOTED_MESSAGES", 1)
    pipeline = event_pipeline(
        sources=("a", "b"),
        destination={"type": "webhook", "url": endpoint.url, "max_retries": 0},
        batch_size=2,
        ledger=LedgerAddress("postgres", SecretText(event_database.dsn)),
    )
    pipeline.write("a", *((n, n * S) for n in range(1, 12)))
    pipeline.write("b", *((n, n * S) for n in range(21, 30)))
    deaths = 0
    for _ in range(20):
        fate.let_die("accepted", 2 if noted else 3)
        if not fate.turns(pipeline):
            break
        deaths += 1
        if deaths <= 3:
            pipeline.write("a", (100 + deaths, 12 * S + deaths))
        pipeline.start()
    assert deaths >= 3
    ids = [m["record"]["id"] for m in cast("list[dict[str, Any]]", endpoint.written)]
    once = list(dict.fromkeys(ids))
    assert once == [*range(1, 12), 101, 102, 103], "order, or some lost"
    assert len(ids) - len(once) <= (0 if noted else 2 * deaths)
    counts = "SELECT delivered + absorbed FROM walbrook.consumers WHERE source = 'a'"
    assert pipeline.rows(counts) == [(len(once),)]


def test_rows_after_a_crash_do_not_shift_the_numbers_of_sent_ones(
    event_pipeline: MakePipeline, fate: Fate
) -> None:
    pipeline = event_pipeline(event_time={"late_tolerance": "2s"})
    pipeline.write("a", (1, 10 * S), (2, 11 * S), (3, 12 * S), (4, 20 * S))
    fate.let_die("sending", 1)
    assert fate.turns(pipeline)
    assert [row[2] for row in in_files(pipeline)] == [1, 2]
    # By its time this one belongs between those; the release that is under way goes without it.
    pipeline.write("a", (5, 11 * S), (6, 30 * S))
    pipeline.start()
    pipeline.turns()
    assert [(row[2], row[4]) for row in in_files(pipeline)] == [
        (1, None), (2, None), (3, None), (5, True), (4, None)
    ]  # fmt: skip


@pytest.mark.parametrize("step", ["sending", "over"])
def test_a_gap_is_reported_once_and_in_front_whatever_dies(
    event_pipeline: MakePipeline, fate: Fate, step: str
) -> None:
    pipeline = event_pipeline(sources=("a", "b"))
    for source in ("a", "b"):
        pipeline.write(source, (1, 1 * S), (2, 2 * S))
        pipeline.write(source, (3, 3 * S))
        term = pipeline.settings[source].term
        skip_evicted(pipeline.state, source=source, term=term, evicted=Cursor(0x100, 2))
    pipeline.start()
    fate.let_die(step, 1)
    assert fate.turns(pipeline)
    pipeline.write("b", (4, 4 * S))
    pipeline.start()
    pipeline.turns()
    rows = [(row[0], row[1], row[2]) for row in in_files(pipeline)]
    assert rows == [
        ("a", "gap", None), ("b", "gap", None), ("a", "insert", 3), ("b", "insert", 3)
    ]  # fmt: skip
    assert pipeline.rows("SELECT count(*) FROM walbrook.gaps WHERE reported_at IS NULL") == [(0,)]


def test_a_gap_that_came_while_others_were_reported_does_not_take_their_number(
    event_pipeline: MakePipeline, fate: Fate
) -> None:
    pipeline = event_pipeline(sources=("a", "b"))
    for source in ("a", "b"):
        pipeline.write(source, (1, 1 * S))
        pipeline.write(source, (2, 2 * S))
    skip_evicted(
        pipeline.state, source="b", term=pipeline.settings["b"].term, evicted=Cursor(0x100, 1)
    )
    pipeline.start()
    fate.let_die("released", 1)
    assert fate.turns(pipeline)
    assert [row[:2] for row in in_files(pipeline)] == [("b", "gap")]
    skip_evicted(
        pipeline.state, source="a", term=pipeline.settings["a"].term, evicted=Cursor(0x100, 1)
    )
    pipeline.start()
    pipeline.turns()
    assert {row[:2] for row in in_files(pipeline)} == {
        ("a", "gap"), ("b", "gap"), ("a", "insert"), ("b", "insert")
    }  # fmt: skip
    sequence = [row[5] for row in in_files(pipeline)]
    assert len(set(sequence)) == len(sequence)


def test_a_release_whose_rows_were_given_up_since_keeps_no_number_of_others(
    event_pipeline: MakePipeline, fate: Fate
) -> None:
    """What is left of it must not be taken for what was sent under those numbers."""
    pipeline = event_pipeline()
    pipeline.write("a", *((n, n * S) for n in range(1, 9)))
    fate.let_die("sending", 1)
    assert fate.turns(pipeline)
    pipeline.state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/100', cursor_idx = 6")
    pipeline.start()
    pipeline.turns()
    assert [row[2] for row in in_files(pipeline)] == [1, 2, 7, 8]


def test_a_release_that_another_configuration_would_cut_differently_is_renumbered(
    event_pipeline: MakePipeline, fate: Fate
) -> None:
    pipeline = event_pipeline()
    pipeline.write("a", (1, 50 * S))
    pipeline.turns()
    pipeline.write("a", *((n, n * S) for n in range(2, 6)), (6, 60 * S))
    fate.let_die("sending", 1)
    assert fate.turns(pipeline)
    assert [row[2] for row in in_files(pipeline)] == [1, 2, 3]
    assert pipeline.sink.event_time is not None
    dropping = pipeline.sink.event_time.model_copy(update={"late_policy": "drop"})
    pipeline.sink = pipeline.sink.model_copy(update={"event_time": dropping})
    pipeline.start()
    pipeline.turns()
    assert [row[2] for row in in_files(pipeline)] == [1, 2, 3, 6], "taken for what was sent before"


def test_another_event_time_starts_over_and_loses_nothing_that_was_held_back(
    event_pipeline: MakePipeline, tmp_path: Path
) -> None:
    two = pgoutput.relation(1, "public", "item", [("id", 23, True), ("at", 20), ("made", 20)])
    pipeline = event_pipeline(event_time={"late_tolerance": "5s"})
    rows = [(1, 10, 1), (2, 20, 2), (3, 18, 3)]
    pipeline.write_messages(
        "a", two, *(pgoutput.insert(1, [str(n), str(at * S), str(m * S)]) for n, at, m in rows)
    )
    pipeline.turns()
    pipeline.ordering.settle()
    assert [row[2] for row in in_files(pipeline)] == [1]
    # By the other column all of them are long due: that must not pass for delivered.
    pipeline.change_event_time(column="made", late_tolerance="0")
    pipeline.turns()
    assert [row[2] for row in in_files(pipeline)] == [1, 2, 3]


def test_a_plan_is_not_made_for_a_cursor_that_was_moved_back_meanwhile(
    event_pipeline: MakePipeline,
) -> None:
    pipeline = event_pipeline()
    pipeline.write("a", (1, 1 * S))
    pipeline.turns()
    pipeline.write("a", (2, 2 * S))
    pipeline.state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/8', cursor_idx = 0")
    with pytest.raises(Exception, match="somebody moved it"):
        pipeline.turns()
    pipeline.read_resume_state()
    pipeline.turns()
    assert [row[2] for row in in_files(pipeline)] == [1, 1, 2]
    assert [row[4] for row in in_files(pipeline)] == [None] * 3


@pytest.mark.parametrize("when", ["before it plans", "after it planned"])
def test_a_process_that_another_one_has_replaced_plans_and_settles_nothing(
    event_pipeline: MakePipeline, fate: Fate, when: str
) -> None:
    """Within one start of the service: a driver that hung wakes up after a new one has begun."""
    pipeline = event_pipeline(sources=("a", "b"))
    pipeline.write("a", (1, 1 * S))
    pipeline.write("b", (2, 1 * S))
    pipeline.turns()
    before, arrived_before = pipeline.cursors(), in_files(pipeline)
    pipeline.write("a", *((n, n * S) for n in range(3, 8)))
    pipeline.write("b", (9, 9 * S))
    if when == "after it planned":
        assert pipeline.ordering.turn()  # a piece of two messages
        arrived_before = in_files(pipeline)
    open_feed(pipeline.state, "b", pipeline.settings["b"].term, [NAME])
    with pytest.raises(TransientError, match="not the latest"):
        pipeline.turns()
    assert pipeline.cursors() == before
    planned = [(when == "after it planned",)]
    assert pipeline.rows("SELECT planned FROM walbrook.event_time") == planned
    assert (in_files(pipeline) == arrived_before) == (when == "before it plans")

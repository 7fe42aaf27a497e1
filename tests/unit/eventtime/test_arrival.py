"""Processing time: times of arrival that are the same however often rows are read.

The world below crashes before a step is delivered, after it, and after it was settled; rows come in
other pieces and under other watermarks each time. It stores what the service stores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.cursor import ORIGIN, Cursor
from cdc.eventtime import NO_TIME, Times
from cdc.eventtime.arrival import ArrivalClock, Arrivals, ArrivalTracker, Bound
from cdc.eventtime.sequencer import SavedPosition, Sequencer, WatermarkStep
from cdc.eventtime.times import TIME_MAX, as_it_is
from tests.examples import examples
from tests.unit.eventtime.rows import Row, batch, rows_in

SOURCES = ("a", "b")
END = Cursor(1_000, 0)
SLIDE, SIZE = 8, 24


def times_of(arrivals: Arrivals, watermark: int, *rows: tuple[int, int]) -> list[int]:
    """The times of rows of one transaction each: LSN and commit time."""
    lsn, commits = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    times = arrivals.times(lsn, np.zeros(len(lsn), np.int64), commits, watermark)
    return [int(time) for time in times]


def test_times_rise_along_the_log_whatever_the_clock_of_the_database_does() -> None:
    arrivals = Arrivals()
    assert times_of(arrivals, NO_TIME, (1, 50), (2, 40), (3, 60)) == [50, 50, 60]
    assert times_of(arrivals, NO_TIME, (4, 55), (5, 70)) == [60, 70]
    assert arrivals.bounds(ORIGIN, Cursor(6, 0)) == [], "the log says it all"
    assert times_of(arrivals, NO_TIME, (6, TIME_MAX + 5)) == [TIME_MAX]


def test_no_row_arrives_at_or_below_the_watermark_and_that_is_kept_as_a_bound() -> None:
    arrivals = Arrivals()
    assert times_of(arrivals, NO_TIME, (1, 50)) == [50]
    assert times_of(arrivals, 99, (2, 60), (3, 70), (4, 200)) == [100, 100, 200]
    assert times_of(arrivals, 99, (5, 60)) == [200]
    bound = Bound(Cursor(2, 0), 100)
    assert arrivals.bounds(ORIGIN, Cursor(6, 0)) == [bound]
    assert arrivals.bounds(Cursor(3, 0), Cursor(6, 0)) == [bound]
    assert arrivals.bounds(ORIGIN, Cursor(2, 0)) == []
    assert arrivals.bounds(Cursor(6, 0), Cursor(6, 0)) == []
    again = Arrivals([bound], known_to=Cursor(4, 0))
    assert times_of(again, 900, (3, 70), (4, 200)) == [100, 901]


@pytest.mark.parametrize(("held", "reached"), [(True, 39), (False, 47)])
def test_the_watermark_reaches_all_that_was_read_unless_windows_wait(
    held: bool, reached: int
) -> None:
    clocks = {source: ArrivalClock(lambda: 1_000) for source in SOURCES}
    tracker = ArrivalTracker(
        SOURCES,
        clock=lambda source: clocks[source].now,
        is_at_end=lambda source: clocks[source].is_at_end,
        step_us=SLIDE,
        held=held,
    )
    code = tracker.register("a", "item")
    assert tracker.look() == NO_TIME
    clocks["a"].read(45)
    clocks["b"].read(80)
    tracker.update(np.array([-1, code], np.int32), np.array([47, 45], np.int64))
    assert tracker.look() == reached
    assert tracker.holders() == {"a"}
    assert tracker.active_sources() == {"a", "b"}
    clocks["a"].at_end(0)
    assert tracker.active_sources() == {"b"}
    assert tracker.look() == 79
    clocks["b"].at_end(0)
    assert tracker.look() == 999, "the clock alone moves it"
    (state,) = tracker.partitions()
    assert (state.watermark, state.last_event, state.idle) == (999, 45, False)
    clocks["b"].waiting(0)
    clocks["b"].read(20)
    assert clocks["b"].now == 1_000


@dataclass
class Stored:
    """What the service has in Postgres."""

    saved: dict[str, SavedPosition]
    watermark: int = NO_TIME
    bounds: dict[str, list[Bound]] = field(default_factory=dict)
    known: dict[str, Cursor] = field(default_factory=dict)


def window_due(times: Times) -> Times:
    return np.asarray(times // SLIDE * SLIDE + SIZE - 1, np.int64)


class World:
    """Logs whose clocks are set back at times, and a consumer that crashes."""

    def __init__(self, random: Random, *, held: bool) -> None:
        self.random, self.held = random, held
        self.now = 100
        self.commits: dict[str, list[tuple[Cursor, int]]] = {source: [] for source in SOURCES}
        self.stored = Stored({source: SavedPosition(ORIGIN, ORIGIN) for source in SOURCES})
        self.times: dict[tuple[str, Cursor], int] = {}  # of rows up to where it was stored
        self.delivered: list[Row] = []
        self.most_bounds = 0
        self.start(NO_TIME)

    def commit(self, source: str) -> None:
        log = self.commits[source]
        lsn = log[-1][0].lsn + 1 if log else 1
        at = max(1, self.now + self.random.choice([-60, -3, -1, 0, 0, 0, 40]))
        log += [(Cursor(lsn, idx), at) for idx in range(self.random.randrange(1, 4))]

    def start(self, watermark: int) -> None:
        stored = self.stored
        self.clocks = {source: ArrivalClock(lambda: self.now) for source in SOURCES}
        self.tracker = ArrivalTracker(
            SOURCES,
            clock=lambda source: self.clocks[source].now,
            is_at_end=lambda source: self.clocks[source].is_at_end,
            step_us=SLIDE,
            held=self.held,
        )
        for source in SOURCES:
            self.tracker.register(source, "item")
        self.sequencer = Sequencer(
            stored.saved,
            self.tracker,
            max_bytes=1 << 20,
            watermark=watermark,
            due=window_due if self.held else as_it_is,
            followers=not self.held,
        )
        self.read = {source: each.cursor for source, each in stored.saved.items()}
        known = {source: each.read for source, each in stored.saved.items()} | stored.known
        self.arrivals = {
            source: Arrivals(stored.bounds.get(source, ()), known[source]) for source in SOURCES
        }
        self.fresh: dict[tuple[str, Cursor], int] = {}

    def push(self, source: str, until: Cursor | None = None) -> bool:
        left = [
            (cursor, at)
            for cursor, at in self.commits[source]
            if cursor >= self.read[source] and (until is None or cursor < until)
        ]
        piece = left[: self.random.randrange(1, 9)]
        if piece:
            self.clocks[source].read(max(at for _, at in piece))
            cursors, commits = zip(*piece, strict=True)
            times = (
                self.arrivals[source]
                .times(
                    np.array([cursor.lsn for cursor in cursors], np.int64),
                    np.array([cursor.idx for cursor in cursors], np.int64),
                    np.array(commits, np.int64),
                    self.sequencer.watermark,
                )
                .tolist()
            )
            code = SOURCES.index(source)
            rows = [Row(code, c, t, code) for c, t in zip(cursors, times, strict=True)]
            for row in rows:
                key = (source, row.cursor)
                assert self.times.get(key, row.time) == row.time, "it was another time before"
                self.fresh[key] = row.time
            read = Cursor(cursors[-1].lsn, cursors[-1].idx + 1)
            self.sequencer.push(source, *batch(rows), read)
            self.read[source] = read
        if until is None and len(piece) == len(left):
            self.clocks[source].at_end(0)
        return bool(piece)

    def step(self) -> None:
        step = self.sequencer.step()
        if step is None:
            return
        self.check(step)
        released = rows_in(step.released)
        if not released and self.random.random() < 0.7:
            return  # the watermark alone moved: nothing is stored
        self.store(step.reads, {source: each.cursor for source, each in self.saved})
        while self.random.random() < 0.4:
            self.start(step.before)
            step = self.made_again(step)
            assert rows_in(step.released) == released
        self.delivered += released
        self.stored.watermark = step.watermark
        self.stored.known = {}
        self.stored.saved = {
            source: SavedPosition(step.cursors[source], step.reads[source], step.watermark)
            for source in SOURCES
        }
        self.store(step.reads, step.cursors)
        self.stored.known = {}
        for source, arrivals in self.arrivals.items():
            arrivals.forget(step.cursors[source])

    @property
    def saved(self) -> list[tuple[str, SavedPosition]]:
        return [*self.stored.saved.items()]

    def store(self, reads: dict[str, Cursor], cursors: dict[str, Cursor]) -> None:
        self.stored.known = dict(reads)
        self.stored.bounds = {
            source: each.bounds(cursors[source], reads[source])
            for source, each in self.arrivals.items()
        }
        self.most_bounds = max(self.most_bounds, *map(len, self.stored.bounds.values()))
        self.times |= {key: at for key, at in self.fresh.items() if key[1] < reads[key[0]]}

    def made_again(self, step: WatermarkStep) -> WatermarkStep:
        for source in SOURCES:
            while self.read[source] < step.reads[source]:
                assert self.push(source, step.reads[source])
        again = self.sequencer.step(to=step.watermark)
        assert again is not None
        assert (again.before, again.watermark) == (step.before, step.watermark)
        assert (again.reads, again.cursors) == (step.reads, step.cursors)
        return again

    def check(self, step: WatermarkStep) -> None:
        assert step.late is None, "no row is late"
        if not self.held:
            assert not self.sequencer.buffer.rows, "nothing waits"
        if step.released is not None:
            assert (step.released.due > step.before).all()

    def run(self) -> None:
        for _ in range(self.random.randrange(120)):
            source = self.random.choice(SOURCES)
            match self.random.randrange(9):
                case 0 | 1:
                    self.commit(source)
                case 2 | 3 | 4:
                    self.push(source)
                case 5 | 6:
                    self.step()
                case 7:
                    self.now += self.random.choice([1, 5, SLIDE, SIZE])
                case 8 if self.random.random() < 0.4:
                    self.start(self.stored.watermark)
        for _ in range(500):
            some = sum(self.push(source) for source in SOURCES)
            self.now += SIZE
            self.step()
            if not some and not self.sequencer.buffer.rows:
                break
        self.check_delivered()

    def check_delivered(self) -> None:
        for at, source in enumerate(SOURCES):
            mine = [row for row in self.delivered if row.source == at]
            assert [row.cursor for row in mine] == [cursor for cursor, _ in self.commits[source]], (
                "each row once, in the order of its log"
            )
            assert [row.time for row in mine] == sorted(row.time for row in mine)
        assert self.most_bounds <= SIZE // SLIDE + 2


@settings(max_examples=examples(100))
@given(st.integers(0, 2**32), st.booleans())
def test_rows_have_the_same_times_after_every_crash_and_come_once_and_in_order(
    seed: int, held: bool
) -> None:
    World(Random(seed), held=held).run()

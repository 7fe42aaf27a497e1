"""Whatever crashes and however the rows are cut, every step is made again as it was.

A history is known in full, so what each step must give follows from its watermarks and from what
was read: the model below works it out row by row. The world crashes before a step is delivered,
after it, and after it was settled; rows come in other pieces and other turns each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.cursor import ORIGIN, Cursor
from cdc.eventtime import NO_TIME, Times
from cdc.eventtime.sequencer import SavedPosition, Sequencer, WatermarkStep
from cdc.eventtime.tracker import WatermarkTracker
from tests.examples import examples
from tests.unit.eventtime.rows import Row, batch, rows_in

SOURCES = ("a", "b", "c")
TABLES = 2
IDLE = 50
END = Cursor(1_000, 0)


@dataclass(frozen=True)
class Kind:
    """As it is, or as windows of 8 want it."""

    followers: bool
    due: Callable[[Times], Times]


PLAIN = Kind(True, lambda times: times)
WINDOWS = Kind(False, lambda times: np.asarray((times // 8 + 1) * 8 - 1, np.int64))
LATER = Kind(True, lambda times: np.asarray((times // 8 + 1) * 8 - 1, np.int64))


@dataclass
class Model:
    """What steps must give, from the whole history."""

    history: list[list[Row]]
    kind: Kind
    read: list[Cursor] = field(default_factory=lambda: [ORIGIN] * len(SOURCES))
    waiting: list[tuple[int, Row]] = field(default_factory=list)

    def step(self, before: int, watermark: int, reads: list[Cursor]) -> tuple[list[Row], list[Row]]:
        late: list[Row] = []
        for source, rows in enumerate(self.history):
            for at, row in enumerate(rows):
                if not self.read[source] <= row.cursor < reads[source]:
                    continue
                if row.time != NO_TIME:
                    due = self.due(row)
                    if due <= before:
                        late.append(row)
                    else:
                        self.waiting.append((due, row))
                elif self.kind.followers:
                    earlier = [
                        self.due(other)
                        for other in rows[:at]
                        if other.time != NO_TIME and row.code in (-1, other.code)
                    ]
                    self.waiting.append((max([before, *earlier]), row))
        self.read = reads
        released = [(due, row) for due, row in self.waiting if due <= watermark]
        self.waiting = [(due, row) for due, row in self.waiting if due > watermark]
        released.sort(key=lambda pair: (pair[0], pair[1].source, pair[1].cursor))
        return late, [row for _, row in released]

    def due(self, row: Row) -> int:
        return int(self.kind.due(np.array([row.time], np.int64))[0])

    def cursor(self, source: int) -> Cursor:
        cursors = [row.cursor for _, row in self.waiting if row.source == source]
        return min(cursors, default=self.read[source])


class World:
    """A service that stores its saved and the step it is about to deliver, and forgets all
    else when it crashes. A step that gives nothing is stored at times only."""

    def __init__(self, random: Random, kind: Kind) -> None:
        self.random = random
        self.kind = kind
        self.history = [self.some_history(source) for source in range(len(SOURCES))]
        self.model = Model(self.history, kind)
        self.saved = {source: SavedPosition(ORIGIN, ORIGIN) for source in SOURCES}
        self.watermark = self.reached = NO_TIME  # as stored, and as it is
        self.known = replace(self.model, waiting=[])
        self.delivered: list[Row] = []
        self.now = dict.fromkeys(SOURCES, 0)
        self.start(self.watermark)

    def some_history(self, source: int) -> list[Row]:
        rows: list[Row] = []
        lsn, around = 1, 0
        for _ in range(self.random.randrange(40)):
            if self.random.random() < 0.7:
                lsn, idx = lsn + self.random.randrange(1, 3), 0
            else:
                idx = rows[-1].cursor.idx + 1 if rows and rows[-1].cursor.lsn == lsn else 0
            around += self.random.randrange(6)
            code = source * TABLES + self.random.randrange(TABLES)
            time = around + self.random.randrange(-12, 12)
            if self.random.random() < 0.25:
                time = NO_TIME
                code = self.random.choice([code, code, -1])
            rows.append(Row(source, Cursor(lsn, idx), time, code))
        return rows

    def crash(self) -> None:
        self.model = replace(self.known, waiting=[*self.known.waiting])
        self.start(self.watermark)

    def start(self, watermark: int) -> None:
        self.reached = watermark
        self.tracker = WatermarkTracker(clock=self.now.__getitem__, idle_timeout_us=IDLE)
        for source in SOURCES:
            for table in range(TABLES):
                tolerance = self.random.randrange(10)
                self.tracker.register(source, str(table), tolerance_us=tolerance)
        self.sequencer = Sequencer(
            self.saved,
            self.tracker,
            max_bytes=self.random.choice([600, 2_000, 1 << 20]),
            watermark=watermark,
            due=self.kind.due,
            followers=self.kind.followers,
        )
        self.read = {source: self.saved[source].cursor for source in SOURCES}

    def push(self, source: str, until: Cursor | None = None) -> bool:
        """A piece of some rows of a source, none beyond ``until``."""
        rows = [
            row
            for row in self.history[SOURCES.index(source)]
            if row.cursor >= self.read[source] and (until is None or row.cursor < until)
        ]
        piece = rows[: self.random.randrange(1, 12)]
        if len(piece) < len(rows):
            read = Cursor(piece[-1].cursor.lsn, piece[-1].cursor.idx + 1)
        elif until is not None:
            read = until
        else:
            read = max(self.read[source], END)
        if read == self.read[source]:
            return False
        self.sequencer.push(source, *batch(piece), read)
        self.read[source] = read
        return True

    def step(self, *, flush: bool = False) -> bool:
        step = self.sequencer.step(flush=flush)
        if step is None:
            behind = [source for source in SOURCES if self.read[source] < END]
            if self.sequencer.stuck(behind):
                step = self.sequencer.step(flush=True)
        if step is None:
            return False
        expected = self.model.step(step.before, step.watermark, [step.reads[s] for s in SOURCES])
        self.check(step, expected)
        # From here on (before, watermark, reads) are stored; the step is delivered, then settled.
        while self.random.random() < 0.3:
            self.start(step.before)
            step = self.made_again(step)
            self.check(step, expected)
        self.delivered += [*expected[0], *expected[1]]
        self.reached = step.watermark
        if not any(expected) and self.random.random() < 0.5:
            return True
        self.watermark = step.watermark
        self.known = replace(self.model, waiting=[*self.model.waiting])
        self.saved = {
            source: SavedPosition(step.cursors[source], step.reads[source], step.watermark)
            for source in SOURCES
        }
        return True

    def made_again(self, step: WatermarkStep) -> WatermarkStep:
        while behind := [source for source in SOURCES if self.read[source] < step.reads[source]]:
            source = self.random.choice(behind)
            assert self.push(source, step.reads[source])
        again = self.sequencer.step(to=step.watermark)
        assert again is not None
        assert (again.before, again.watermark) == (step.before, step.watermark)
        assert (again.reads, again.cursors) == (step.reads, step.cursors)
        return again

    def check(self, step: WatermarkStep, expected: tuple[list[Row], list[Row]]) -> None:
        assert step.before == self.reached <= step.watermark
        assert (rows_in(step.late), rows_in(step.released)) == expected
        for source in SOURCES:
            assert step.cursors[source] == self.model.cursor(SOURCES.index(source))
            assert step.cursors[source] <= step.reads[source]

    def run(self) -> None:
        for _ in range(self.random.randrange(60)):
            source = self.random.choice(SOURCES)
            match self.random.randrange(8):
                case 0 | 1 | 2 | 3:
                    if self.sequencer.wants(source):
                        self.push(source)
                case 4 | 5:
                    self.step()
                case 6:
                    self.now[source] += self.random.choice([1, 20, IDLE])
                case 7 if self.random.random() < 0.3:
                    self.crash()
        self.finish()

    def finish(self) -> None:
        """Every source is read to its end and the rest flushed; nobody waits for ever."""
        for _ in range(1_000):
            pushed = [self.push(source) for source in SOURCES if self.sequencer.wants(source)]
            if not self.step() and not any(pushed):
                if all(read == END for read in self.read.values()):
                    break
                for source in SOURCES:  # who has no room, but more to come, has no time either
                    if self.read[source] == END:
                        self.now[source] += IDLE
        self.step(flush=True)
        while self.sequencer.buffer.rows:  # the flush was done again, and more was read than it had
            assert self.step(flush=True)
        known = [row for rows in self.history for row in rows]
        if not self.kind.followers:
            known = [row for row in known if row.time != NO_TIME]
        assert sorted(self.delivered) == sorted(known), "nothing is lost, and nothing comes twice"
        assert all(self.sequencer.cursor(source) == END for source in SOURCES)


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.sampled_from([PLAIN, WINDOWS, LATER]))
def test_every_step_is_made_again_as_it_was_and_nothing_is_lost_or_repeated(
    seed: int, kind: Kind
) -> None:
    World(Random(seed), kind).run()

"""What waits, and when and in which order it leaves."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cdc.cursor import Cursor
from cdc.errors import ConfigError
from cdc.eventtime import NO_TIME
from cdc.eventtime.buffer import BYTES_MAX, CHUNKS_MAX, EventTimeBuffer
from tests.examples import examples
from tests.unit.eventtime.rows import Row, batch, rows_in

SOURCES = ("shop", "warehouse")
MUCH = 1 << 30


def add(buffer: EventTimeBuffer, rows: list[Row], *, later: int = 0) -> None:
    """Put rows of one source in, due ``later`` than their time."""
    given, times, codes = batch(rows)
    buffer.add(SOURCES[rows[0].source], given, times, times + later, codes)


def row(source: int, lsn: int, time: int, code: int = 0) -> Row:
    return Row(source, Cursor(lsn, 0), time, code)


def test_rows_leave_in_the_order_in_which_they_are_due_ties_by_source_and_cursor() -> None:
    buffer = EventTimeBuffer(SOURCES, max_bytes=MUCH)
    stock = [row(1, 1, 20), row(1, 2, 10)]
    orders = [row(0, 5, 30), row(0, 6, 20), row(0, 7, 10), row(0, 8, 20)]
    add(buffer, stock)
    add(buffer, orders[:2])
    add(buffer, orders[2:])
    assert buffer.release(9) is None
    assert rows_in(buffer.release(20)) == [orders[2], stock[1], orders[1], orders[3], stock[0]]
    assert buffer.release(29) is None
    assert buffer.rows == 1
    assert rows_in(buffer.release(30)) == [orders[0]]
    assert (buffer.rows, buffer.bytes, buffer.max_due) == (0, 0, NO_TIME)
    assert buffer.flush() is None


def test_the_due_time_is_not_the_event_time() -> None:
    buffer = EventTimeBuffer(SOURCES, max_bytes=MUCH)
    add(buffer, [row(0, 1, 20), row(0, 2, 10)], later=5)
    released = buffer.release(15)
    assert released is not None
    assert (released.times.tolist(), released.due.tolist()) == ([10], [15])
    assert buffer.max_due == 25


def test_a_look_takes_nothing_out_and_goes_by_time() -> None:
    buffer = EventTimeBuffer(SOURCES, max_bytes=MUCH)
    rows = [row(0, lsn, time) for lsn, time in enumerate((30, 10, 20, 10))]
    add(buffer, rows, later=100)
    assert rows_in(buffer.within(10, 30)) == [rows[1], rows[3], rows[2]]
    assert buffer.within(31, 90) is None
    assert buffer.rows == 4


def test_the_oldest_cursor_is_that_of_what_is_left() -> None:
    buffer = EventTimeBuffer(SOURCES, max_bytes=MUCH)
    assert buffer.oldest("shop") is None
    add(buffer, [row(0, lsn, time) for lsn, time in ((1, 10), (2, 30), (3, 20), (4, 40))])
    oldest = []
    for watermark in (5, 10, 20, 30, 40):
        buffer.release(watermark)
        oldest.append(buffer.oldest("shop"))
    assert oldest == [Cursor(1, 0), Cursor(2, 0), Cursor(2, 0), Cursor(4, 0), None]


def test_nothing_of_what_was_handed_over_is_held_once_it_has_to_wait() -> None:
    """It may be a file that is mapped, or a whole range."""
    buffer = EventTimeBuffer(SOURCES, max_bytes=MUCH)
    given, times, codes = batch([row(0, lsn, lsn) for lsn in range(1_000)])
    handed = {part.address for column in given for part in column.buffers() if part}
    buffer.add("shop", given.slice(10, 500), times[10:510], times[10:510], codes[10:510])
    buffer.add("warehouse", given, times, times, codes, keep=np.arange(2, 9))
    assert buffer.release(-1) is None
    for chunk in (*buffer._chunks["shop"], *buffer._chunks["warehouse"]):
        held = chain.from_iterable(column.buffers() for column in chunk._rows)
        assert handed.isdisjoint(part.address for part in held if part)
        for column in (chunk._times, chunk._due, chunk._codes):
            assert not np.shares_memory(column, times)
            assert not np.shares_memory(column, codes)
    assert buffer.rows == 507


def test_no_more_is_held_than_twice_what_waits() -> None:
    buffer = EventTimeBuffer(SOURCES, max_bytes=MUCH)
    before = pa.total_allocated_bytes()
    add(buffer, [row(0, lsn, lsn % 100) for lsn in range(10_000)])
    whole = buffer.bytes
    assert whole >= pa.total_allocated_bytes() - before
    assert buffer.release(60) is not None
    assert buffer.bytes < 0.45 * whole
    assert buffer.bytes >= pa.total_allocated_bytes() - before


def test_a_source_at_its_share_waits_and_the_other_does_not() -> None:
    rows = [row(0, lsn, lsn) for lsn in range(100)]
    probe = EventTimeBuffer(SOURCES, max_bytes=MUCH)
    add(probe, rows)
    buffer = EventTimeBuffer(SOURCES, max_bytes=2 * probe.bytes)
    add(buffer, rows[:99])
    assert buffer.has_room("shop")
    add(buffer, rows[99:])
    assert not buffer.has_room("shop")
    assert buffer.has_room("warehouse")
    assert buffer.bytes_of("shop") == buffer.bytes > buffer.bytes_of("warehouse") == 0
    assert buffer.release(80) is not None
    assert buffer.has_room("shop")


def test_a_bound_that_one_batch_could_not_hold_is_refused() -> None:
    EventTimeBuffer(SOURCES, max_bytes=BYTES_MAX)
    with pytest.raises(ConfigError, match="too large to be released at once") as refused:
        EventTimeBuffer(SOURCES, max_bytes=BYTES_MAX + 1)
    assert "max_buffer_bytes" in refused.value.fix


class WaitingRows(RuleBasedStateMachine):
    """The buffer against a list of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = EventTimeBuffer(SOURCES, max_bytes=MUCH)
        self.waiting: list[Row] = []
        self.lsn = 0

    def rows(self, source: int, values: list[tuple[int, int]]) -> list[Row]:
        first, self.lsn = self.lsn, self.lsn + len(values)
        return [row(source, first + at, *value) for at, value in enumerate(values)]

    values = st.lists(st.tuples(st.integers(0, 60), st.integers(-1, 3)), min_size=1, max_size=12)

    @rule(source=st.integers(0, 1), values=values, times=st.integers(1, 40))
    def add_several_times(self, source: int, values: list[tuple[int, int]], times: int) -> None:
        for _ in range(times):
            rows = self.rows(source, values)
            add(self.buffer, rows, later=3)
            self.waiting += rows

    @rule(source=st.integers(0, 1), values=values, data=st.data())
    def add_some_of_them(
        self, source: int, values: list[tuple[int, int]], data: st.DataObject
    ) -> None:
        rows = self.rows(source, values)
        keep = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1))))
        given, times, codes = batch(rows)
        self.buffer.add(
            SOURCES[source], given, times, times + 3, codes, np.array(keep, dtype=np.intp)
        )
        self.waiting += [rows[at] for at in keep]

    @rule(watermark=st.integers(-1, 70))
    def release(self, watermark: int) -> None:
        due = [row for row in self.waiting if row.time + 3 <= watermark]
        self.waiting = [row for row in self.waiting if row.time + 3 > watermark]
        assert rows_in(self.buffer.release(watermark)) == in_order(due)

    @rule()
    def flush(self) -> None:
        assert rows_in(self.buffer.flush()) == in_order(self.waiting)
        self.waiting = []

    @rule(start=st.integers(0, 60), size=st.integers(0, 30))
    def look(self, start: int, size: int) -> None:
        inside = [row for row in self.waiting if start <= row.time < start + size]
        assert rows_in(self.buffer.within(start, start + size)) == in_order(inside)

    @invariant()
    def it_knows_what_waits(self) -> None:
        assert self.buffer.rows == len(self.waiting)
        assert self.buffer.max_due == max((row.time + 3 for row in self.waiting), default=NO_TIME)
        counts = [sum(row.code == code for row in self.waiting) for code in range(4)]
        assert self.buffer.rows_of_partitions(4).tolist() == counts
        assert self.buffer.rows_of_partitions(2).tolist() == counts[:2]
        for source, named in enumerate(SOURCES):
            cursors = [row.cursor for row in self.waiting if row.source == source]
            assert self.buffer.oldest(named) == min(cursors, default=None)
            assert len(self.buffer._chunks[named]) <= CHUNKS_MAX


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.time, row.source, row.cursor))


TestWaitingRows = WaitingRows.TestCase
TestWaitingRows.settings = settings(
    max_examples=examples(30), stateful_step_count=25, deadline=None
)

"""Many sources in one order of event time: the rules, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import ProtocolError
from cdc.eventtime import NO_TIME, Times
from cdc.eventtime.sequencer import SavedPosition, Sequencer, WatermarkStep
from cdc.eventtime.tracker import WatermarkTracker
from tests.unit.eventtime.rows import Row, batch, rows_in

IDLE = 100
MUCH = 1 << 30
NEW = SavedPosition(ORIGIN, ORIGIN)


class Shop:
    """Two sources, ``shop`` with two tables and ``warehouse`` with one, and their clock."""

    def __init__(
        self,
        *,
        tolerance: int = 0,
        max_bytes: int = MUCH,
        watermark: int = NO_TIME,
        shop: SavedPosition = NEW,
        followers: bool = True,
        later: int = 0,
    ) -> None:
        self.now = 0
        self.tracker = WatermarkTracker(clock=lambda _: self.now, idle_timeout_us=IDLE)
        self.codes = [
            self.tracker.register(source, table, tolerance_us=tolerance)
            for source, table in (("shop", "orders"), ("shop", "items"), ("warehouse", "stock"))
        ]
        self.sequencer = Sequencer(
            {"shop": shop, "warehouse": NEW},
            self.tracker,
            max_bytes=max_bytes,
            watermark=watermark,
            followers=followers,
            due=lambda times: times + later,
        )

    def push(self, source: str, lsn: int, *rows: tuple[int, int]) -> list[Row]:
        """Rows of (code, time), one a transaction, from ``lsn`` on."""
        of = ["shop", "warehouse"].index(source)
        given = [Row(of, Cursor(lsn + at, 0), time, code) for at, (code, time) in enumerate(rows)]
        self.sequencer.push(source, *batch(given), Cursor(lsn + len(rows), 0))
        return given

    def step(self, *, to: int | None = None, flush: bool = False) -> WatermarkStep:
        step = self.sequencer.step(to=to, flush=flush)
        assert step is not None
        return step


ORDERS, ITEMS, STOCK = 0, 1, 2


def test_a_source_with_no_row_yet_holds_everyone_until_it_is_idle() -> None:
    shop = Shop()
    orders = shop.push("shop", 1, (ORDERS, 50), (ITEMS, 40))
    assert shop.sequencer.step() is None
    shop.now = IDLE
    more = shop.push("shop", 3, (ORDERS, 60), (ITEMS, 60))
    step = shop.step()
    assert (step.before, step.watermark, step.late) == (NO_TIME, 60, None)
    assert rows_in(step.released) == [orders[1], orders[0], *more]
    assert shop.sequencer.step() is None


def test_a_finished_source_holds_back_no_other() -> None:
    shop = Shop()
    orders = shop.push("shop", 1, (ORDERS, 50), (ITEMS, 40))
    shop.sequencer.complete("warehouse")
    step = shop.step()
    assert step.watermark == 40
    assert rows_in(step.released) == [orders[1]]
    assert step.cursors == {"shop": Cursor(1, 0), "warehouse": ORIGIN}
    assert step.reads == {"shop": Cursor(3, 0), "warehouse": ORIGIN}


def test_sources_become_one_order_with_ties_by_source_and_cursor() -> None:
    shop = Shop()
    stock = shop.push("warehouse", 1, (STOCK, 20), (STOCK, 10), (STOCK, 30))
    orders = shop.push("shop", 1, (ORDERS, 20), (ITEMS, 10), (ITEMS, 20), (ORDERS, 40))
    step = shop.step()
    assert step.watermark == 20
    assert rows_in(step.released) == [orders[1], stock[1], orders[0], orders[2], stock[0]]
    assert step.cursors == {"shop": Cursor(4, 0), "warehouse": Cursor(3, 0)}
    assert shop.sequencer.cursor("shop") == Cursor(4, 0)


def test_at_or_below_the_watermark_is_late_and_above_it_is_not() -> None:
    shop = Shop()
    shop.push("warehouse", 1, (STOCK, 20))
    shop.push("shop", 1, (ORDERS, 20), (ITEMS, 20))
    assert shop.step().watermark == 20
    stock = shop.push("warehouse", 2, (STOCK, 25), (STOCK, 20))
    orders = shop.push("shop", 3, (ITEMS, 19), (ORDERS, 21), (ORDERS, 3))
    step = shop.step()
    assert step.watermark == 20
    assert rows_in(step.late) == [orders[0], orders[2], stock[1]], "by source and cursor"
    assert step.released is None
    assert step.cursors == {"shop": Cursor(4, 0), "warehouse": Cursor(2, 0)}
    assert shop.sequencer.step() is None


def test_tolerance_gives_disorder_its_time() -> None:
    shop = Shop(tolerance=10)
    shop.sequencer.complete("warehouse")
    first = shop.push("shop", 1, (ORDERS, 100), (ITEMS, 100))
    assert shop.step().released is None
    second = shop.push("shop", 3, (ORDERS, 91), (ITEMS, 110), (ORDERS, 111))
    assert rows_in(shop.step().released) == [second[0], *first]


def test_at_the_end_the_rest_is_flushed_in_order() -> None:
    shop = Shop(tolerance=1_000)
    orders = shop.push("shop", 1, (ORDERS, 50), (ITEMS, 40))
    stock = shop.push("warehouse", 1, (STOCK, 45))
    assert rows_in(shop.step().released) == []
    step = shop.step(flush=True)
    assert (step.before, step.watermark) == (40 - 1_000, 50)
    assert rows_in(step.released) == [orders[1], stock[0], orders[0]]
    assert step.cursors == step.reads
    assert shop.sequencer.step(flush=True) is None


def test_a_change_without_a_time_follows_its_table() -> None:
    shop = Shop()
    rows = shop.push(
        "shop", 1, (ORDERS, 50), (ITEMS, 10), (ORDERS, NO_TIME), (ORDERS, 30), (ORDERS, NO_TIME),
        (ITEMS, NO_TIME), (ITEMS, 60), (ORDERS, 60),
    )  # fmt: skip
    shop.sequencer.complete("warehouse")
    step = shop.step()
    assert rows_in(step.released) == [
        rows[1], rows[5], rows[3], rows[0], rows[2], rows[4], rows[6], rows[7]
    ]  # fmt: skip


def test_a_change_of_no_table_follows_its_whole_source() -> None:
    shop = Shop()
    rows = shop.push("shop", 1, (ORDERS, 50), (ITEMS, 10), (-1, NO_TIME), (ITEMS, 20))
    shop.push("warehouse", 1, (STOCK, 90))
    assert rows_in(shop.step().released) == [rows[1], rows[3]]
    more = shop.push("shop", 5, (ITEMS, 70), (-1, NO_TIME))
    assert rows_in(shop.step().released) == [rows[0], rows[2]]
    shop.push("shop", 7, (ORDERS, 90), (ITEMS, 90))
    assert rows_in(shop.step().released)[:2] == more


def test_a_change_that_follows_nothing_that_waits_leaves_with_the_next_step() -> None:
    shop = Shop()
    first = shop.push("shop", 1, (ORDERS, NO_TIME))
    step = shop.step()
    assert (step.before, step.watermark) == (NO_TIME, NO_TIME)
    assert rows_in(step.released) == first
    shop.push("warehouse", 1, (STOCK, 20))
    shop.push("shop", 2, (ORDERS, 20), (ITEMS, 20))
    assert shop.step().watermark == 20
    later = shop.push("shop", 4, (ORDERS, NO_TIME), (ORDERS, 40))
    step = shop.step()
    assert step.late is None
    assert rows_in(step.released) == later[:1]


def test_windows_have_no_use_for_a_change_without_a_time() -> None:
    shop = Shop(followers=False)
    shop.push("shop", 1, (ORDERS, 10), (ORDERS, NO_TIME), (-1, NO_TIME))
    assert shop.sequencer.buffer.rows == 1
    shop.push("shop", 4, (ORDERS, NO_TIME))
    assert shop.sequencer.cursor("shop") == Cursor(1, 0)
    assert len(rows_in(shop.step(flush=True).released)) == 1
    assert shop.sequencer.cursor("shop") == Cursor(5, 0)


def test_the_due_time_may_be_later_than_the_event_time() -> None:
    """A window's rows leave when it ends, and are late when it has ended."""
    tracker = WatermarkTracker(clock=lambda _: 0, idle_timeout_us=IDLE)
    tracker.register("shop", "orders")

    def end_of_window(times: Times) -> Times:
        assert (times != NO_TIME).all(), "only what has a time is asked for"
        return np.asarray(times // 10 * 10 + 9, np.int64)

    sequencer = Sequencer({"shop": NEW}, tracker, max_bytes=MUCH, due=end_of_window)
    rows = [Row(0, Cursor(1, at), time, 0) for at, time in enumerate((5, 12, NO_TIME, 3, 19))]
    sequencer.push("shop", *batch(rows), Cursor(1, 9))
    step = sequencer.step()
    assert step is not None
    assert step.watermark == 19
    assert rows_in(step.released) == [rows[0], rows[3], rows[1], rows[2], rows[4]]
    late = [Row(0, Cursor(2, at), time, 0) for at, time in enumerate((19, 20, 11))]
    sequencer.push("shop", *batch(late), Cursor(2, 9))
    step = sequencer.step()
    assert step is not None
    assert rows_in(step.late) == [late[0], late[2]]
    assert step.released is None


def test_rows_that_a_settled_step_has_read_are_neither_repeated_nor_late() -> None:
    saved = SavedPosition(Cursor(2, 0), Cursor(6, 0), floor=50)
    shop = Shop(shop=saved, watermark=50)
    shop.sequencer.complete("warehouse")
    assert shop.sequencer.cursor("shop") == Cursor(2, 0)
    rows = shop.push("shop", 2, (ORDERS, 70), (ORDERS, 20), (ITEMS, NO_TIME))
    assert shop.sequencer.wants("shop")
    assert shop.sequencer.step() is None, "what was read once has not come yet"
    assert shop.sequencer.step(flush=True) is None
    rows += shop.push("shop", 5, (ORDERS, NO_TIME), (ORDERS, 30), (ITEMS, 90))
    step = shop.step()
    assert rows_in(step.late) == [rows[4]], "it came behind what was read"
    assert rows_in(step.released) == [rows[0], rows[3]]
    assert shop.sequencer.cursor("shop") == Cursor(7, 0)


def test_a_step_cannot_be_made_again_before_its_rows_are_there() -> None:
    shop = Shop(shop=SavedPosition(Cursor(2, 0), Cursor(6, 0), floor=50), watermark=50)
    shop.push("shop", 2, (ORDERS, 70))
    with pytest.raises(ProtocolError, match="before its rows were read again"):
        shop.sequencer.step(to=60)


def test_no_step_takes_the_watermark_back() -> None:
    shop = Shop(watermark=50)
    with pytest.raises(ProtocolError, match="back from 50 to 49"):
        shop.sequencer.step(to=49)
    assert shop.sequencer.step(to=50) is None


@pytest.mark.parametrize(
    ("first", "rows", "read"),
    [(1, [(ORDERS, 5)], 9), (3, [(ORDERS, 5)] * 3, 5), (3, [], 2)],
    ids=["below what was read", "beyond what is read", "back"],
)
def test_rows_out_of_cursor_order_are_refused(
    first: int, rows: Sequence[tuple[int, int]], read: int
) -> None:
    shop = Shop()
    shop.push("shop", 1, (ORDERS, 5), (ORDERS, 6))
    given = [Row(0, Cursor(first + at, 0), time, code) for at, (code, time) in enumerate(rows)]
    with pytest.raises(ProtocolError, match="rows of shop"):
        shop.sequencer.push("shop", *batch(given), Cursor(read, 0))


def test_reading_on_without_rows_moves_the_cursor() -> None:
    shop = Shop()
    shop.push("shop", 7)
    assert shop.sequencer.cursor("shop") == Cursor(7, 0)
    assert shop.sequencer.step() is None


def test_a_source_at_its_bound_waits_and_the_others_do_not() -> None:
    shop = Shop(max_bytes=4_000)
    assert shop.sequencer.wants("shop")
    shop.push("shop", 1, *[(ORDERS, 50)] * 100)
    assert not shop.sequencer.wants("shop")
    assert shop.sequencer.wants("warehouse")


def test_rows_read_before_a_restart_are_wanted_beyond_the_bound() -> None:
    shop = Shop(max_bytes=4_000, shop=SavedPosition(Cursor(1, 0), Cursor(201, 0), 0), watermark=0)
    shop.push("shop", 1, *[(ORDERS, 50)] * 100)
    assert shop.sequencer.wants("shop")
    shop.push("shop", 101, *[(ORDERS, 50)] * 100)
    assert not shop.sequencer.wants("shop")


def test_a_source_that_holds_everyone_and_is_at_its_bound_is_found_stuck() -> None:
    shop = Shop(max_bytes=8_000)
    shop.push("warehouse", 1, (STOCK, 500))
    shop.push("shop", 1, (ITEMS, 1), *((ORDERS, 100 + at) for at in range(100)))
    assert len(rows_in(shop.step().released)) == 1
    assert shop.sequencer.step() is None
    assert not shop.sequencer.wants("shop"), "the next row of items lies behind what has no room"
    assert shop.sequencer.stuck(["shop"])
    step = shop.step(to=149)
    assert len(rows_in(step.released)) == 50
    assert shop.sequencer.wants("shop")
    assert not shop.sequencer.stuck(["shop"])


def test_a_source_that_is_full_when_no_partition_holds_the_watermark_is_stuck() -> None:
    """Its last window would end with its next row, for which there is no room."""
    shop = Shop(max_bytes=4_000, later=1_000)
    shop.push("shop", 1, *[(ORDERS, 50), (ITEMS, 50)] * 100)
    shop.now = IDLE
    assert shop.step().watermark == 50
    assert shop.sequencer.step() is None
    assert not shop.sequencer.stuck([]), "there is nothing more to read"
    assert not shop.sequencer.stuck(["warehouse"])
    assert shop.sequencer.stuck(["shop"])


def test_a_source_that_waits_for_another_is_not_stuck() -> None:
    shop = Shop(max_bytes=4_000)
    shop.push("shop", 1, *[(ORDERS, 50), (ITEMS, 50)] * 100)
    assert shop.sequencer.step() is None
    assert not shop.sequencer.wants("shop")
    assert not shop.sequencer.stuck(["shop"]), "warehouse will come or be idle"

"""How much of the change log a consumer may hold: warnings, gaps, and bounds of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cdc.config import loads
from cdc.cursor import ORIGIN, Cursor
from cdc.errors import ConfigError, OperatorError
from cdc.log.writer import Retention, SegmentLimits
from cdc.replication.spill.spilled_transaction import BatchLimits
from cdc.state.backlog import BacklogBounds, LogExtent
from cdc.state.consumers import Described
from cdc.state.positions import register_source
from tests.fix_postgres import Database
from tests.slot_source import SlotSource, make_slot_source
from tests.waiting import until

pytestmark = pytest.mark.migrated

SEGMENT_BYTES = 20_000  # two batches of 50 rows, some more
KEPT = Retention(settled_s=3600, settled_bytes=1 << 30, bytes_max=1 << 30)
SMALL = {
    "segments": SegmentLimits(rows=100),
    "batch": BatchLimits(rows=50),
    "heartbeat_s": 0,
    "durability": "fsync",
    "retention": KEPT,
}


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> SlotSource:
    """A source with the consumers ``down``, which nobody serves, and ``others``."""
    database.execute("CREATE TABLE item (id serial PRIMARY KEY, name text)")
    return make_slot_source(database, tmp_path / "shop")


def register(
    shop: SlotSource, on_full: str | None = None, size: int = 5 * SEGMENT_BYTES
) -> SlotSource:
    bound = Described() if on_full is None else Described("webhook", 5, size, on_full)
    with shop.database.connect() as connection:
        term = register_source(
            connection,
            name="shop",
            slot=shop.settings.slot,
            publication="pub",
            system_identifier=shop.database.execute(
                "SELECT system_identifier FROM walbrook.sources"
            )[0][0],
            slot_lsn=0,
            consumers=["down", "others"],
            described={"down": bound},
        )
    return replace(shop, term=term, settings=replace(shop.settings, term=term))


def insert(shop: SlotSource, segments: int) -> None:
    """Changes for so many segments of the log; ``others`` gets all of them."""
    for _ in range(2 * segments):
        shop.database.execute(
            "INSERT INTO item (name) SELECT repeat('x', 100) FROM generate_series(1, 50)"
        )
    ((end,),) = shop.database.execute("SELECT pg_current_wal_lsn()::text")
    until(
        "SQL to show the log's end",
        lambda: rows(
            shop,
            "SELECT FROM walbrook.log_segments g, walbrook.sources s "
            f"WHERE g.high_lsn >= '{end}' AND s.log_lsn >= '{end}'",
        ),
    )
    shop.database.execute(
        "UPDATE walbrook.consumers c SET cursor_lsn = s.log_lsn, cursor_idx = s.log_idx "
        "FROM walbrook.sources s WHERE c.name = 'others' AND c.cursor_lsn < s.log_lsn"
    )


def rows(shop: SlotSource, statement: str) -> list[tuple[object, ...]]:
    return shop.database.execute(statement)


def gaps(shop: SlotSource) -> list[tuple[object, ...]]:
    """Consumer, whether the gap ends where the consumer stands, and the reason of each gap."""
    return rows(
        shop,
        "SELECT g.consumer, (g.to_lsn, g.to_idx) = (c.cursor_lsn, c.cursor_idx), g.reason "
        "FROM walbrook.gaps g JOIN walbrook.consumers c ON c.name = g.consumer ORDER BY g.id",
    )


def health(shop: SlotSource) -> list[tuple[object, ...]]:
    return rows(shop, "SELECT kind, consumer FROM walbrook.health ORDER BY kind")


def backlog(shop: SlotSource) -> int:
    ((size,),) = rows(shop, "SELECT bytes FROM walbrook.backlogs WHERE consumer = 'down'")
    return int(str(size))


def within_once(shop: SlotSource) -> None:
    until(
        "the bound to count",
        lambda: rows(
            shop,
            "SELECT FROM walbrook.consumers WHERE name = 'down' AND NOT backlog_excused",
        ),
    )


def test_a_paused_sink_has_its_gap_as_soon_as_the_log_evicts(shop: SlotSource) -> None:
    shop = register(shop)
    shop.database.execute("SELECT walbrook.pause('down')")
    shop.database.execute("UPDATE walbrook.consumers SET cursor_lsn = 'F/0' WHERE name = 'others'")
    evicting = replace(KEPT, bytes_max=4 * SEGMENT_BYTES, on_full="evict")
    with shop.reading(**{**SMALL, "retention": evicting}):
        insert(shop, 8)
        until("the gap", lambda: gaps(shop) == [("down", True, "evicted")])
        ((before,),) = rows(shop, "SELECT to_lsn FROM walbrook.gaps")
        insert(shop, 8)
        until(
            "the gap to grow", lambda: rows(shop, "SELECT to_lsn FROM walbrook.gaps") != [(before,)]
        )
        assert gaps(shop) == [("down", True, "evicted")], "one gap, not one for each eviction"
        assert rows(
            shop,
            "SELECT (c.cursor_lsn, c.cursor_idx) >= (s.evicted_lsn, s.evicted_idx), "
            "c.paused_at IS NOT NULL FROM walbrook.consumers c, walbrook.sources s "
            "WHERE c.name = 'down'",
        ) == [(True, True)]


def test_a_log_that_fills_names_the_consumer_that_holds_it(shop: SlotSource) -> None:
    shop = register(shop)
    with shop.reading(**{**SMALL, "retention": replace(KEPT, bytes_max=12 * SEGMENT_BYTES)}):
        insert(shop, 4)
        assert health(shop) == []
        while not health(shop):
            insert(shop, 1)
        assert health(shop) == [("log_filling", None)]
        ((what, fix),) = rows(shop, "SELECT what, fix FROM walbrook.health")
        assert "80%" in str(what)
        assert "consumer down" in str(what)
        assert "max_backlog" in str(fix)
        shop.settle_all()
        until("the warning to end", lambda: health(shop) == [])


def test_a_sink_over_its_bound_is_evicted_alone(shop: SlotSource) -> None:
    shop = register(shop, "evict")
    with shop.reading(**SMALL):
        insert(shop, 2)
        within_once(shop)
        insert(shop, 10)
        until("the gap", lambda: gaps(shop) == [("down", True, "backlog")])
        assert 0 < backlog(shop) <= 5 * SEGMENT_BYTES
        assert rows(shop, "SELECT evicted_lsn FROM walbrook.sources") == [("0/0",)]
        insert(shop, 10)
        until("it to be within its bound", lambda: backlog(shop) <= 5 * SEGMENT_BYTES)
        assert gaps(shop) == [("down", True, "backlog")], "what is not told yet is one gap"
        assert health(shop) == []


def test_a_sink_over_its_bound_is_disabled_alone_and_can_be_resumed(shop: SlotSource) -> None:
    shop = register(shop, "disable")
    little = replace(KEPT, settled_bytes=SEGMENT_BYTES)
    with shop.reading(**{**SMALL, "retention": little}):
        insert(shop, 2)
        within_once(shop)
        insert(shop, 10)
        until("it to be disabled", lambda: health(shop) == [("backlog_disabled", "down")])
        assert rows(
            shop,
            "SELECT name, disabled_reason, paused_at IS NOT NULL FROM walbrook.consumers "
            "WHERE disabled_at IS NOT NULL",
        ) == [("down", "backlog", True)]
        insert(shop, 10)
        until(
            "the log to let go of what it lacks", lambda: gaps(shop) == [("down", True, "disabled")]
        )
        until(
            "the restart cursor to pass the disabled sink",
            lambda: rows(
                shop,
                "SELECT FROM walbrook.sources s, walbrook.consumers c "
                "WHERE c.name = 'down' AND s.restart_lsn > c.cursor_lsn",
            ),
        )
        until("the log to keep little", lambda: backlog(shop) <= 5 * SEGMENT_BYTES)
        shop.database.execute("SELECT walbrook.resume('down')")
        until("the event to end", lambda: health(shop) == [])
        within_once(shop)
        assert rows(
            shop,
            "SELECT disabled_at, disabled_reason, paused_at FROM walbrook.consumers "
            "WHERE name = 'down'",
        ) == [(None, None, None)]
        insert(shop, 10)
        until("it to be disabled again", lambda: health(shop) == [("backlog_disabled", "down")])


def test_a_disabled_sink_alone_does_not_hold_the_restart_cursor(shop: SlotSource) -> None:
    shop = register(shop, "disable")
    shop.database.execute("UPDATE walbrook.consumers SET active = name = 'down'")
    with shop.reading(**SMALL):
        within_once(shop)
        insert(shop, 10)
        until(
            "the restart cursor to follow the log",
            lambda: rows(
                shop, "SELECT FROM walbrook.sources WHERE restart_lsn = log_lsn AND log_lsn > '0/0'"
            ),
        )


def test_a_reader_that_was_replaced_does_not_move_the_restart_cursor(shop: SlotSource) -> None:
    shop = register(shop)
    shop.database.execute(
        "UPDATE walbrook.consumers SET disabled_at = now(), disabled_reason = 'backlog'"
    )
    before = rows(shop, "SELECT restart_lsn FROM walbrook.sources")
    bounds = BacklogBounds("shop", shop.term - 1)
    with shop.database.connect() as connection, pytest.raises(OperatorError) as caught:
        bounds.keep(connection, LogExtent(ORIGIN, ORIGIN, Cursor(2**40, 0)))
    assert caught.value.kind == "fenced"
    assert rows(shop, "SELECT restart_lsn FROM walbrook.sources") == before


def test_a_sink_that_may_be_behind_is_only_warned_of(shop: SlotSource) -> None:
    shop = register(shop, "warn")
    with shop.reading(**SMALL):
        insert(shop, 2)
        within_once(shop)
        insert(shop, 10)
        until("the warning", lambda: health(shop) == [("backlog_over", "down")])
        assert gaps(shop) == []
        shop.settle_all()
        until("the warning to end", lambda: health(shop) == [])


def test_a_rewound_sink_is_not_evicted_for_what_it_was_moved_back_to(shop: SlotSource) -> None:
    shop = register(shop, "evict")
    with shop.reading(**SMALL):
        insert(shop, 12)
        shop.settle_all()
        within_once(shop)
        shop.database.execute("SELECT walbrook.rewind('down', to_earliest => true)")
        until("the warning", lambda: health(shop) == [("backlog_over", "down")])
        assert gaps(shop) == []


CONFIG = """
databases: [{name: shop, url: "postgres:///shop", slot: {name: s}, publication: {name: p}}]
sinks: [{name: one, max_backlog: %s, destination: {type: file, path: lines}}]
"""


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{size: 100MiB}", "2 × log.segment_bytes"),
        ("{on_full: evict}", "size"),
        ("{size: 1GiB, on_full: stop}", "on_full"),
    ],
)
def test_a_bound_that_cannot_be_kept_is_refused(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        loads(CONFIG % given, base=Path("/"))

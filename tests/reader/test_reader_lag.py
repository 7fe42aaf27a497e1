"""A reader that does not read is seen to be behind, whatever its log says."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.fix_postgres import Database
from tests.reader_health import SMALL, health, insert, keeping, source_row
from tests.slot_source import SlotSource, make_slot_source
from tests.waiting import until

pytestmark = pytest.mark.migrated

LAG = "SELECT lag_bytes FROM walbrook.cursors WHERE consumer = 'all'"


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> SlotSource:
    database.execute("CREATE TABLE item (id serial PRIMARY KEY, name text)")
    return make_slot_source(database, tmp_path / "log")


def test_a_reader_of_an_idle_source_reports_all_the_same(shop: SlotSource) -> None:
    with shop.reading(heartbeat_s=0):
        for _ in range(3):
            until_reported(shop)


def until_reported(shop: SlotSource) -> None:
    before = source_row(shop, "seen_at, current_at")

    def moved() -> bool:
        after = source_row(shop, "seen_at, current_at")
        return all(a is not None and a != b for a, b in zip(after, before, strict=True))

    until("another report", moved)


def test_a_full_log_counts_as_lag_by_the_clock_and_by_the_servers_position(
    shop: SlotSource,
) -> None:
    settings = {**SMALL, "retention": keeping(bytes_max=40_000), "heartbeat_s": 0.1}
    with shop.reading(**settings):
        insert(shop, 600)
        until("the pause", lambda: health(shop) == ["log_full"])
        until("the state", lambda: source_row(shop, "state") == ("paused",))
        current, ((lag,),) = source_row(shop, "current_at"), shop.database.execute(LAG)
        shop.database.execute(
            "INSERT INTO item SELECT n, repeat('x', 1000) FROM generate_series(1001, 2000) n"
        )
        more = lag + 1_000_000
        until("what waits at the server", lambda: shop.database.execute(LAG)[0][0] > more)
        assert source_row(shop, "current_at") == current
        shop.database.execute(
            "UPDATE walbrook.sources SET current_at = current_at - interval '1 minute'"
        )
        ((seconds,),) = shop.database.execute("SELECT min(lag_seconds) FROM walbrook.cursors")
        assert seconds >= 60


def test_a_full_log_is_logged_once_and_so_is_its_end(shop: SlotSource) -> None:
    settings = {**SMALL, "retention": keeping(bytes_max=40_000)}
    with capture_logs() as lines, shop.reading(**settings):
        insert(shop, 600)
        until("the pause", lambda: health(shop) == ["log_full"])

        def well_again() -> bool:
            shop.settle_all()
            return health(shop) == []

        until("room", well_again)
    said = [line["event"] for line in lines if line["event"].startswith("reader.")]
    pauses = [event for event in said if event in ("reader.paused", "reader.resumed")]
    assert pauses[:2] == ["reader.paused", "reader.resumed"]
    assert pauses == ["reader.paused", "reader.resumed"] * (len(pauses) // 2)

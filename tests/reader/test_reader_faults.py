"""A reader whose source or state database goes away: noticed in time, nothing lost or confirmed."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from demo.embedded_postgres import EmbeddedPostgres
from tests.fix_postgres import Database, embedded, fresh_database
from tests.proxy import Proxy
from tests.slot_source import SlotSource, make_slot_source
from tests.waiting import until

pytestmark = pytest.mark.migrated


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> SlotSource:
    database.execute("CREATE TABLE item (id serial PRIMARY KEY)")
    return make_slot_source(database, tmp_path / "shop")


@pytest.fixture
def proxy(shop: SlotSource) -> Iterator[Proxy]:
    with Proxy(shop.database.dsn) as running:
        yield running


def insert(shop: SlotSource) -> None:
    shop.database.execute("INSERT INTO item DEFAULT VALUES")


def feedback_at(shop: SlotSource) -> object:
    rows = shop.database.execute(
        "SELECT reply_time FROM pg_stat_replication "
        f"WHERE application_name = 'walbrook:{shop.settings.slot}'"
    )
    return rows[0][0] if rows else None


def until_feedback(shop: SlotSource) -> None:
    before = feedback_at(shop)
    until("another round of feedback", lambda: feedback_at(shop) != before)


def events(shop: SlotSource) -> list[str]:
    return [row[0] for row in shop.database.execute("SELECT kind FROM walbrook.health_events")]


def test_a_half_open_connection_is_noticed_and_taken_up_again(
    shop: SlotSource, proxy: Proxy
) -> None:
    dsn = proxy.dsn(shop.database.dsn)
    with shop.reading(dsn=dsn, silence_s=2.0, heartbeat_s=0):
        insert(shop)
        shop.until_logged(1)
        proxy.freeze()
        insert(shop)
        until("the silence to be noticed", lambda: "silent" in events(shop))
        proxy.thaw()
        shop.until_logged(2)
    assert len(shop.messages()) == 2


def test_an_idle_source_is_not_taken_for_a_silent_one(shop: SlotSource) -> None:
    with shop.reading(silence_s=2.5, heartbeat_s=0, idle_s=3600):
        insert(shop)
        shop.until_logged(1)
        quiet_since = time.monotonic()
        until("twice the bound", lambda: time.monotonic() - quiet_since > 5)
        insert(shop)
        shop.until_logged(2)
    assert events(shop) == []


def test_without_its_state_database_reading_goes_on_and_nothing_is_confirmed(
    shop: SlotSource, proxy: Proxy
) -> None:
    with shop.reading(state_dsn=proxy.dsn(shop.database.dsn), heartbeat_s=0):
        insert(shop)
        shop.until_logged(1)
        proxy.freeze()
        proxy.cut()
        for number in range(2, 6):
            insert(shop)
            shop.until_logged(number)
        end = shop.settle_all()
        until_feedback(shop)
        until_feedback(shop)
        assert shop.confirmed_lsn() < end.lsn, "it cannot know of the settlement"
        proxy.thaw()
        until("the slot to follow", lambda: shop.confirmed_lsn() >= end.lsn)


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    directory = Path(tempfile.mkdtemp(prefix="walbrook-test-restart-"))
    with ExitStack() as running:
        running.callback(shutil.rmtree, directory, ignore_errors=True)
        # Not the fast settings: what was committed must survive the crash.
        yield running.enter_context(embedded(directory))


def test_a_source_that_restarts_or_crashes_is_followed_at_once(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    with fresh_database(server.dsn) as database:
        database.execute("CREATE TABLE item (id serial PRIMARY KEY)")
        shop = make_slot_source(database, tmp_path / "shop")
        with shop.reading(heartbeat_s=0.5):
            for number, immediate in enumerate([False, True], start=1):
                insert(shop)
                shop.until_logged(2 * number - 1)
                stopping_at = time.monotonic()
                server.restart(immediate=immediate)
                assert time.monotonic() - stopping_at < 10, "the reader held up the shutdown"
                insert(shop)
                up_at = time.monotonic()
                shop.until_logged(2 * number)
                assert time.monotonic() - up_at < 5
        cursors = [cursor for cursor, _ in shop.messages()]
        assert cursors == sorted(set(cursors))

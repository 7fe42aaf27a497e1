"""A standby takes over, or is read itself: what goes on, what waits, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from cdc.cursor import parse_lsn
from cdc.errors import GapError, SourceError, TransientError
from cdc.replication.preflight import prepare_source
from cdc.replication.settings import ReaderSettings
from cdc.replication.source.source_watch import SourceWatch
from cdc.state.migrate import migrate
from cdc.state.positions import register_source
from tests.fix_postgres import Database
from tests.plain_reader import PlainReader
from tests.proxy import Proxy
from tests.slot_source import SlotSource
from tests.standby import Pair, execute, primary_and_standby, slot_name
from tests.waiting import until

pytestmark = pytest.mark.migrated


@pytest.fixture
def pair() -> Iterator[Pair]:
    with primary_and_standby() as servers:
        yield servers


@pytest.fixture(scope="module")
def standing() -> Iterator[Pair]:
    """A pair that no test breaks up."""
    with primary_and_standby() as servers:
        yield servers


@pytest.fixture
def proxy(pair: Pair) -> Iterator[Proxy]:
    with Proxy(pair.primary.dsn) as ours:
        yield ours


def reader_through(proxy: Proxy, pair: Pair, *, failover: bool = True) -> PlainReader:
    """A slot on the primary, and a reader that reaches it through the proxy."""
    slot, flag = slot_name(), "true" if failover else "false"
    ((lsn,),) = execute(
        pair.primary.dsn,
        f"SELECT lsn FROM pg_create_logical_replication_slot('{slot}', 'pgoutput', "
        f"failover => {flag})",
    )
    dsn = proxy.dsn(pair.primary.dsn)
    return PlainReader(dsn, slot, pair.recorded, at=parse_lsn(lsn))


def until_in_step(pair: Pair, slot: str) -> None:
    """The standby's copy of the slot can be used after a promotion."""
    ready = (
        "SELECT 1 FROM pg_replication_slots "
        f"WHERE slot_name = '{slot}' AND synced AND NOT temporary AND NOT conflicting"
    )

    def asked() -> bool:
        # The copy becomes usable once the primary's WAL has moved past its first snapshot.
        execute(pair.primary.dsn, "SELECT pg_log_standby_snapshot()")
        return bool(execute(pair.standby.dsn, ready))

    until("the standby to copy the slot", asked, timeout_s=60)


def test_a_promoted_standby_with_the_slot_goes_on_without_loss(pair: Pair, proxy: Proxy) -> None:
    reader = reader_through(proxy, pair)
    until_in_step(pair, reader.slot)
    pair.insert(1)
    reader.read("the first row", lambda: len(reader.inserts) == 1)
    pair.insert(2)
    pair.until_replayed()
    pair.promote()
    proxy.retarget(pair.standby.dsn)
    execute(pair.standby.dsn, "INSERT INTO item VALUES (3)")
    identity = reader.read("the other rows", lambda: len(reader.inserts) == 3)
    assert (identity.failed_over_from, identity.timeline) == (1, 2)
    assert len(set(reader.inserts)) == 3
    assert reader.look().failed_over_from is None, "the new timeline is the recorded one now"


@pytest.fixture
def shop(pair: Pair, proxy: Proxy, database: Database, tmp_path: Path) -> SlotSource:
    """A whole reader; its state is kept elsewhere, as it must be to survive a failover."""
    plain = reader_through(proxy, pair)
    until_in_step(pair, plain.slot)
    with database.connect() as connection:
        migrate(connection)
        term = register_source(
            connection,
            name="shop",
            slot=plain.slot,
            publication="pub",
            system_identifier=plain.recorded.system_identifier,
            slot_lsn=plain.resume.lsn,
            consumers=["all"],
        )
    settings = ReaderSettings(
        source="shop",
        term=term,
        dsn=plain.dsn,
        slot=plain.slot,
        publication="pub",
        state_dsn=database.dsn,
        log_directory=tmp_path / "log",
        durability="disk",
        heartbeat_s=0.5,
        idle_s=3600,
    )
    return SlotSource(database, settings, term)


def recorded_timeline(shop: SlotSource) -> int | None:
    ((timeline,),) = shop.database.execute("SELECT timeline FROM walbrook.sources")
    return None if timeline is None else int(timeline)


@pytest.mark.sinks
def test_the_reader_follows_a_failover_and_is_not_confused_by_a_cut_right_after(
    pair: Pair, proxy: Proxy, shop: SlotSource
) -> None:
    with shop.reading():
        pair.insert(1)
        shop.until_logged(1)
        until("the timeline to be recorded", lambda: recorded_timeline(shop) == 1)
        pair.until_replayed()
        pair.promote()
        proxy.retarget(pair.standby.dsn)
        for number in range(2, 6):
            execute(pair.standby.dsn, f"INSERT INTO item VALUES ({number})")
            shop.until_logged(number)
            proxy.cut()
        until("the new timeline to be recorded", lambda: recorded_timeline(shop) == 2)
    cursors = [cursor for cursor, _ in shop.messages()]
    assert cursors == sorted(set(cursors))


@pytest.mark.sinks
def test_a_crash_right_after_a_failover_is_not_taken_for_a_divergence(
    pair: Pair, proxy: Proxy, shop: SlotSource
) -> None:
    with shop.reading():
        pair.insert(1)
        shop.until_logged(1)
        until("the timeline to be recorded", lambda: recorded_timeline(shop) == 1)
    pair.until_replayed()
    pair.promote()
    proxy.retarget(pair.standby.dsn)
    with shop.reading():
        execute(pair.standby.dsn, "INSERT INTO item VALUES (2)")
        shop.until_logged(2)
        # What is in the log now is all that a reader killed here would leave.
        assert recorded_timeline(shop) == 2


@pytest.mark.sinks
def test_nothing_of_a_new_timeline_is_read_before_it_is_recorded(
    pair: Pair, proxy: Proxy, shop: SlotSource
) -> None:
    waiting = (
        "SELECT 1 FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND query LIKE '%timeline%' AND query NOT LIKE '%state%'"
    )
    with shop.reading():
        pair.insert(1)
        shop.until_logged(1)
        until("the timeline to be recorded", lambda: recorded_timeline(shop) == 1)
        pair.until_replayed()
        pair.promote()
        with shop.database.connect() as other, other.transaction():
            other.execute("SELECT 1 FROM walbrook.sources FOR UPDATE")
            proxy.retarget(pair.standby.dsn)
            execute(pair.standby.dsn, "INSERT INTO item VALUES (2)")
            until("the reader to wait", lambda: shop.database.execute(waiting))
            assert shop.count() == 1
        shop.until_logged(2)
        proxy.cut()
        execute(pair.standby.dsn, "INSERT INTO item VALUES (3)")
        shop.until_logged(3)


@pytest.mark.sinks
def test_a_divergence_stops_the_reader_and_is_a_health_event(
    pair: Pair, proxy: Proxy, shop: SlotSource
) -> None:
    pair.until_replayed()
    pair.standby.stop(immediate=True)
    with shop.reading():
        pair.insert(1)
        shop.until_logged(1)
        until("the timeline to be recorded", lambda: recorded_timeline(shop) == 1)
    pair.primary.stop(immediate=True)
    pair.standby.start()
    execute(pair.standby.dsn, "SELECT pg_promote()")
    proxy.retarget(pair.standby.dsn)
    events = "SELECT kind, severity, fix <> '' FROM walbrook.health"
    with pytest.raises(GapError) as caught, shop.reading():
        until("the reader to say why", lambda: shop.database.execute(events))
    assert caught.value.kind == "diverged"
    assert shop.database.execute(events) == [("diverged", "error", True)]
    assert len(shop.messages()) == 1


@pytest.mark.sinks
def test_a_promoted_standby_without_the_slot_stops_the_reader(pair: Pair, proxy: Proxy) -> None:
    reader = reader_through(proxy, pair, failover=False)
    pair.insert(1)
    reader.read("the first row", lambda: len(reader.inserts) == 1)
    pair.until_replayed()
    pair.promote()
    proxy.retarget(pair.standby.dsn)
    with pytest.raises(SourceError, match="no longer exists") as caught:
        reader.look()
    assert caught.value.kind == "slot_missing"


@pytest.mark.sinks
def test_a_standby_that_lacked_what_was_read_is_another_history(pair: Pair, proxy: Proxy) -> None:
    reader = reader_through(proxy, pair)
    until_in_step(pair, reader.slot)
    pair.until_replayed()
    pair.standby.stop(immediate=True)
    pair.insert(1)
    reader.read("a row that the standby has not", lambda: len(reader.inserts) == 1)
    pair.primary.stop(immediate=True)
    pair.standby.start()
    execute(pair.standby.dsn, "SELECT pg_promote()")
    # It even writes past the position that was read, so its end alone would not tell.
    while (
        parse_lsn(execute(pair.standby.dsn, "SELECT pg_current_wal_lsn()")[0][0])
        <= reader.resume.lsn
    ):
        execute(pair.standby.dsn, "INSERT INTO item SELECT count(*) + 100 FROM item")
        execute(pair.standby.dsn, "SELECT pg_switch_wal()")
    proxy.retarget(pair.standby.dsn)
    with pytest.raises(GapError, match="do not exist there") as caught:
        reader.look()
    assert caught.value.kind == "diverged"
    assert "empty log.directory" in caught.value.fix


@pytest.mark.sinks
def test_the_old_primary_that_comes_back_is_refused(pair: Pair, proxy: Proxy) -> None:
    reader = reader_through(proxy, pair)
    until_in_step(pair, reader.slot)
    pair.until_replayed()
    pair.promote()
    proxy.retarget(pair.standby.dsn)
    execute(pair.standby.dsn, "INSERT INTO item VALUES (1)")
    reader.read("a row of the new primary", lambda: len(reader.inserts) == 1)
    pair.primary.start()
    proxy.retarget(pair.primary.dsn)
    with pytest.raises(GapError, match="before a failover") as caught:
        reader.look()
    assert caught.value.kind == "older_timeline"


def test_a_copy_on_a_standby_waits_for_the_promotion(standing: Pair) -> None:
    with Proxy(standing.primary.dsn) as proxy:
        reader = reader_through(proxy, standing)
        until_in_step(standing, reader.slot)
        proxy.retarget(standing.standby.dsn)
        with pytest.raises(TransientError, match="once the standby is promoted") as caught:
            reader.look()
    assert caught.value.kind == "slot_synced"


@dataclass(frozen=True)
class SlotWanted:
    name: str
    create_if_not_exists: bool = True
    failover: bool = False
    two_phase: bool = False


@dataclass(frozen=True)
class PublicationWanted:
    name: str = "pub"
    create_if_not_exists: bool = False
    init_sql: str | None = None
    tables: tuple[str, ...] | None = None


@dataclass(frozen=True)
class SourceWanted:
    slot: SlotWanted
    name: str = "shop"
    publication: PublicationWanted = PublicationWanted()


def test_a_standby_is_read_with_heartbeats_through_its_primary(standing: Pair) -> None:
    standing.until_replayed()
    wanted = SourceWanted(SlotWanted(slot_name()))
    with closing(psycopg.connect(standing.standby.dsn, autocommit=True)) as connection:
        made = prepare_source(connection, wanted, ["public.item"], primary_dsn=standing.primary.dsn)
    assert made.slot_created
    slot = wanted.slot.name
    reader = PlainReader(standing.standby.dsn, slot, standing.recorded, at=made.slot_confirmed_lsn)
    watch = SourceWatch(
        standing.standby.dsn, slot, "pub", heartbeat_s=0.2, primary_dsn=standing.primary.dsn
    )
    with closing(watch):
        standing.insert(1)
        identity = reader.read(
            "a row and a heartbeat",
            lambda: reader.inserts and watch.sight().heartbeat_at,
            watch=watch,
        )
        assert identity.server.in_recovery
        assert watch.conditions() == []


def test_a_standby_that_has_not_replayed_to_our_cursor_is_waited_for(standing: Pair) -> None:
    standing.until_replayed()
    wanted = SourceWanted(SlotWanted(slot_name()))
    with closing(psycopg.connect(standing.standby.dsn, autocommit=True)) as connection:
        prepare_source(connection, wanted, [], primary_dsn=standing.primary.dsn)
    ((ahead,),) = execute(standing.primary.dsn, "SELECT pg_current_wal_insert_lsn() + 1000000")
    reader = PlainReader(
        standing.standby.dsn, wanted.slot.name, standing.recorded, at=parse_lsn(ahead)
    )
    with pytest.raises(TransientError, match="the standby has replayed to") as caught:
        reader.look()
    assert caught.value.kind == "standby_behind"


def test_a_standby_without_a_primary_url_tells_that_it_takes_no_heartbeats(standing: Pair) -> None:
    standing.until_replayed()
    with closing(SourceWatch(standing.standby.dsn, "none", "pub", heartbeat_s=0.2)) as watch:
        (condition,) = until("the watch to say so", watch.conditions)
    assert condition.kind == "heartbeat_refused"
    assert "primary_url" in condition.fix

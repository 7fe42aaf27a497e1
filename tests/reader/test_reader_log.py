"""The reader and its log over time: what is kept, given up, damaged, lost, taken over."""

from __future__ import annotations

import shutil
import time
from typing import Literal

import orjson
import pytest

from cdc.cursor import Cursor
from cdc.decoding import decode_changes
from cdc.errors import CorruptionError, GapError, OperatorError, SourceError
from cdc.log.damage_note import report_damage
from cdc.replication.log_keeper import LogKeeper
from cdc.replication.options import StreamOptions
from cdc.replication.spill.spilled_transaction import BatchLimits
from cdc.replication.wire.sealed import Sealed
from cdc.state.positions import register_source
from tests.proxy import Proxy
from tests.reader_health import SMALL, health, insert, keeping, segments, source_row
from tests.reader_health import shop as shop
from tests.reader_process import ReaderProcess
from tests.slot_source import PUBLISHED, SlotSource
from tests.waiting import until

pytestmark = pytest.mark.migrated


Harm = Literal["flip", "cut", "remove"]


def damage(shop: SlotSource, number: int, harm: Harm = "flip") -> None:
    """Harm the segment with this number: a byte in its middle, its tail, or all of it."""
    path = sorted(shop.settings.log_directory.glob("*.seg"))[number]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(data if harm == "flip" else data[: len(data) // 2])


def test_segments_and_floors_are_rows(shop: SlotSource) -> None:
    with shop.reading(**SMALL):
        insert(shop, 250)
        shop.until_logged(250)
        rows = until("all of it in SQL", lambda: segments(shop, 250))
    *before, last = [tier for tier, _, _ in rows]
    assert (set(before), last) == ({"hot"}, "active")
    assert {location for _, _, location in rows} == {str(shop.settings.log_directory)}
    log_bytes, earliest = source_row(shop, "log_bytes, earliest_lsn = restart_lsn")
    assert log_bytes == sum(p.stat().st_size for p in shop.settings.log_directory.glob("*.seg"))
    assert earliest


def test_settled_segments_stay_for_a_while_and_then_go(shop: SlotSource) -> None:
    with shop.reading(**SMALL, retention=keeping()):
        insert(shop, 300)
        shop.until_logged(300)
        shop.settle_all()
        confirmed = shop.confirmed_lsn()
        until("the slot to follow", lambda: shop.confirmed_lsn() > confirmed)
    assert shop.view.first_batch() == 0
    with shop.reading(**SMALL, retention=keeping(settled_bytes=0)):
        until("the settled ones to go", lambda: shop.view.first_batch() > 0)


def test_batches_that_a_rewound_consumer_still_needs_are_kept(shop: SlotSource) -> None:
    with shop.reading(**SMALL, retention=keeping()):
        insert(shop, 300)
        found = shop.until_logged(300)
        shop.settle_all()
        back = found[150][0]
        shop.database.execute(
            f"UPDATE walbrook.consumers SET cursor_lsn = '0/0'::pg_lsn + {back.lsn}, cursor_idx = 0"
        )
    with shop.reading(**SMALL, retention=keeping(settled_bytes=0)):
        until("those before to go", lambda: shop.view.first_batch() > 0)
        until("the floor in SQL", lambda: source_row(shop, "earliest_lsn > '0/0'")[0])
    assert found[150] in shop.messages()
    assert found[50] not in shop.messages()


_GAPS = "evicted_lsn = (SELECT max(to_lsn) FROM walbrook.gaps WHERE reason = 'evicted')"


def test_a_full_log_that_may_evict_gives_up_the_oldest_and_says_so(shop: SlotSource) -> None:
    with shop.reading(**SMALL, retention=keeping(bytes_max=40_000, on_full="evict")):
        insert(shop, 600)
        until("the last row", lambda: last_id(shop) == 600)
        until("the gap", lambda: source_row(shop, _GAPS) == (True,))
        assert source_row(shop, "state") == ("streaming",)
    assert shop.view.floors()[1] > Cursor(0, 0)


def last_id(shop: SlotSource) -> int:
    """The key of the last row in the log; keys are numbered as they were written."""
    for number in reversed(range(shop.view.first_batch(), shop.view.next_batch())):
        (frame,) = shop.view.frames(number, number + 1)
        if frame.raw.num_rows:
            (*_, last) = decode_changes(frame.raw, frame.schemas).column("record_pks")
            return int(orjson.loads(last.as_py())[0])
    return 0


def test_a_full_log_that_pauses_is_a_health_event_until_there_is_room(shop: SlotSource) -> None:
    with shop.reading(**SMALL, retention=keeping(bytes_max=40_000)):
        insert(shop, 600)
        until("the event", lambda: health(shop) == ["log_full"])

        def well_again() -> bool:
            shop.settle_all()
            return health(shop) == [] and last_id(shop) == 600

        until("room", well_again)


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_batch_that_is_not_settled_is_read_again_from_the_slot(
    shop: SlotSource, harm: Harm
) -> None:
    with shop.reading(**SMALL):
        insert(shop, 300)
        before = shop.until_logged(300)
    damage(shop, 1, harm)
    with pytest.raises((CorruptionError, GapError)):
        shop.messages()
    history = shop.view.history()
    with shop.reading(**SMALL):
        until("the log to be cut", lambda: shop.view.history() > history)
        assert shop.until_logged(300) == before


def test_damage_that_a_reader_of_the_log_met_is_mended_while_running(shop: SlotSource) -> None:
    with shop.reading(**SMALL):
        insert(shop, 300)
        before = shop.until_logged(300)
        history = shop.view.history()
        damage(shop, 1)
        report_damage(shop.settings.log_directory)
        until("the log to be cut", lambda: shop.view.history() > history)
        assert shop.until_logged(300) == before


def test_damage_that_the_slot_cannot_mend_concerns_the_consumers_before_it_alone(
    shop: SlotSource,
) -> None:
    with shop.reading(**SMALL, durability="fsync"):
        insert(shop, 300)
        found = shop.until_logged(300)
        until("the slot to follow the log", lambda: shop.confirmed_lsn() >= found[-1][0].lsn)
        shop.settle_all()
    shop.database.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/1', cursor_idx = 0")
    damage(shop, 1)
    history = shop.view.history()
    with shop.reading(**SMALL, durability="fsync"):
        until("the reader to say so", lambda: health(shop) == ["log_damaged"])
        insert(shop, 50)
        until("reading to go on", lambda: shop.count() == 350)
        report_damage(shop.settings.log_directory)
        insert(shop, 50)
        until("reading to go on", lambda: shop.count() == 400)
        ((fix,),) = shop.database.execute("SELECT fix FROM walbrook.health")
        behind = Cursor.parse(fix.split("'")[1])
        entries = shop.view.entries(0, shop.view.next_batch())
        ends = [Cursor(int(e["high_lsn"]), int(e["high_idx"])) for e in entries]
        assert behind in ends[1:-3], "the batch that is damaged, no more"
        shop.database.execute(f"SELECT walbrook.skip_to('all', '{behind}')")
        until("nobody to stand before it", lambda: health(shop) == ["log_damaged_past"])
        assert shop.database.execute("SELECT reason, reported_at FROM walbrook.gaps") == [
            ("skipped", None)
        ]
        assert shop.view.history() == history, "nothing was cut"


def test_a_lost_log_is_read_again_from_the_slot(shop: SlotSource) -> None:
    with shop.reading(**SMALL):
        insert(shop, 100)
        before = shop.until_logged(100)
    shutil.rmtree(shop.settings.log_directory)
    with shop.reading(**SMALL):
        assert shop.until_logged(100) == before


def test_a_lost_log_that_the_slot_has_forgotten_is_a_gap(shop: SlotSource) -> None:
    with shop.reading(**SMALL, durability="fsync"):
        insert(shop, 100)
        end = shop.until_logged(100)[-1][0]
        until("the slot to follow the log", lambda: shop.confirmed_lsn() >= end.lsn)
    shutil.rmtree(shop.settings.log_directory)
    with pytest.raises(GapError, match="the changes between are gone"), shop.reading(**SMALL):
        until("the reader to say so", lambda: health(shop) == ["slot_ahead"])


def test_in_memory_only_what_is_settled_is_confirmed(shop: SlotSource) -> None:
    start = shop.confirmed_lsn()
    with shop.reading(**SMALL, durability="memory", idle_s=3600):
        insert(shop, 100)
        shop.until_logged(100)
        seen = source_row(shop, "seen_at")[0]
        until("another report", lambda: source_row(shop, "seen_at")[0] != seen)
        assert shop.confirmed_lsn() == start
        end = shop.settle_all()
        until("the slot to follow", lambda: shop.confirmed_lsn() == end.lsn)


def test_a_reader_that_was_replaced_writes_nothing_more(shop: SlotSource) -> None:
    reading = shop.reading(**SMALL)
    reading.__enter__()
    insert(shop, 100)
    shop.until_logged(100)
    with shop.database.connect() as connection:
        register_source(
            connection,
            name="shop",
            slot=shop.settings.slot,
            publication="pub",
            system_identifier=str(source_row(shop, "system_identifier")[0]),
            slot_lsn=0,
            consumers=["all"],
        )
    until("the reader to let go", lambda: slot_is_free(shop))
    before = source_row(shop, "state, seen_at, log_lsn")
    with pytest.raises(OperatorError, match="taken over"):
        reading.__exit__(None, None, None)
    assert source_row(shop, "state, seen_at, log_lsn") == before


def slot_is_free(shop: SlotSource) -> bool:
    return shop.database.execute("SELECT 1 FROM pg_replication_slots WHERE active") == []


def test_a_log_that_is_full_and_damaged_is_mended(shop: SlotSource) -> None:
    with shop.reading(**SMALL, retention=keeping(bytes_max=40_000)):
        insert(shop, 600)
        until("the pause", lambda: health(shop) == ["log_full"])
        history = shop.view.history()
        damage(shop, 1)
        report_damage(shop.settings.log_directory)
        until("the log to be cut", lambda: shop.view.history() > history)

        def all_of_it() -> bool:
            shop.settle_all()
            return last_id(shop) == 600

        until("all of it", all_of_it)


def test_a_reader_that_cannot_open_its_log_says_so_in_sql(shop: SlotSource) -> None:
    shop.settings.log_directory.mkdir()
    (shop.settings.log_directory / "manifest.json").write_text("not a manifest")
    with ReaderProcess(shop) as reader:
        assert reader.until_dead() == 78
    assert health(shop) == ["reader_stopped"]
    assert "does not match its checksum" in str(source_row(shop, "last_error")[0])


def test_the_reason_why_a_source_is_away_is_reported_until_it_is_back(shop: SlotSource) -> None:
    with Proxy(shop.database.dsn) as proxy, shop.reading(dsn=proxy.dsn(shop.database.dsn)):
        insert(shop, 50)
        shop.until_logged(50)
        proxy.freeze()
        proxy.cut()
        until("the event", lambda: health(shop) == ["disconnected"])
        ((since, error),) = shop.database.execute(
            "SELECT h.since, s.last_error FROM walbrook.health h, walbrook.sources s"
        )
        assert error
        until("another attempt", lambda: source_row(shop, "state") == ("connecting",))
        rows = shop.database.execute("SELECT kind, since FROM walbrook.health")
        assert rows == [("disconnected", since)]
        proxy.thaw()
        until("it to end", lambda: health(shop) == [])


def test_a_publication_that_is_dropped_while_it_is_read_is_an_event(shop: SlotSource) -> None:
    with pytest.raises(SourceError, match="does not exist"), shop.reading(heartbeat_s=0.2):
        until("the reader to stop", lambda: dropped(shop) and state_is(shop, "stopped"))
    assert health(shop) == ["publication_missing"]


MADE_ANEW = (
    "DROP PUBLICATION pub; INSERT INTO item (name) VALUES ('lost'); "
    f"CREATE PUBLICATION pub {PUBLISHED}"
)


def test_a_publication_that_is_rebuilt_while_it_is_read_stops_the_reader(
    shop: SlotSource,
) -> None:
    with pytest.raises(GapError, match="created again"), shop.reading(heartbeat_s=0.2):
        replace_publication(shop)
    assert health(shop) == ["publication_replaced"]


def test_a_publication_that_was_rebuilt_is_a_gap_until_it_is_accepted(shop: SlotSource) -> None:
    with shop.reading():
        insert(shop, 50)
        shop.until_logged(50)
    shop.database.execute(MADE_ANEW)
    with pytest.raises(GapError, match="created again"), shop.reading():
        until("the reader to stop", lambda: state_is(shop, "stopped"))
    shop.database.execute("CHECKPOINT")  # the test's server does not flush at each commit
    shop.database.execute("SELECT walbrook.accept_gap('shop', pg_current_wal_flush_lsn())")
    assert source_row(shop, "last_error") == ("the gap is accepted; start the service",)
    with shop.reading():
        insert(shop, 50)
        until("what came since", lambda: last_id(shop) == 101)
        until("it to be well", lambda: health(shop) == [])
    assert shop.count() == 50


def replace_publication(shop: SlotSource) -> None:
    """Until the reader has stopped for it; its row says stopped before it has begun, too."""
    until("the publication to be replaced", lambda: made_anew(shop))
    until("the reader to stop", lambda: not made_anew(shop) and state_is(shop, "stopped"))


def made_anew(shop: SlotSource) -> bool:
    """Replace the publication, while the reader is at work and its watch has seen it; says so."""
    if state_is(shop, "streaming") and source_row(shop, "heartbeat_at IS NOT NULL") == (True,):
        shop.database.execute(MADE_ANEW)
        return True
    return False


def dropped(shop: SlotSource) -> bool:
    """The publication is gone, once the reader has seen it."""
    if state_is(shop, "streaming"):
        shop.database.execute("DROP PUBLICATION IF EXISTS pub")
    return shop.database.execute("SELECT 1 FROM pg_publication") == []


def state_is(shop: SlotSource, state: str) -> bool:
    return source_row(shop, "state") == (state,)


def test_a_transaction_that_takes_long_to_publish_is_not_taken_for_silence(
    shop: SlotSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.database.execute(
        f"ALTER DATABASE {shop.database.name} SET logical_decoding_work_mem = '64kB'"
    )
    append = LogKeeper.append

    def slowly(keeper: LogKeeper, sealed: Sealed) -> None:
        if sealed.raw.num_rows:
            time.sleep(0.2)
        append(keeper, sealed)

    monkeypatch.setattr(LogKeeper, "append", slowly)
    with shop.reading(
        stream=StreamOptions(stream_transactions=True),
        batch=BatchLimits(rows=500),
        silence_s=3.0,
        heartbeat_s=0,
    ):
        shop.database.execute(
            "INSERT INTO item (name) SELECT repeat('x', 100) FROM generate_series(1, 15000)"
        )
        shop.until_logged(15_000)
    events = shop.database.execute("SELECT kind, what FROM walbrook.health_events")
    assert events == []


def test_a_batch_that_a_stop_keeps_out_of_the_log_is_sent_again(shop: SlotSource) -> None:
    everything = keeping(bytes_max=1)
    with shop.reading(heartbeat_s=0):
        insert(shop, 50)
        shop.until_logged(50)
    for number in range(1, 4):
        with shop.reading(retention=everything, linger_ms=0, idle_s=0, heartbeat_s=0):
            insert(shop, 50)
            until("the pause", lambda: source_row(shop, "state") == ("paused",))
        with shop.reading(heartbeat_s=0):
            assert len(shop.until_logged(50 + 50 * number)) == 50 + 50 * number

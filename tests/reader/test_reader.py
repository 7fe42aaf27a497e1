"""The SlotReader against a real slot: what comes into the log, and what is confirmed."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.cursor import Cursor, free_place
from cdc.decoding import decode_changes
from cdc.errors import GapError, SourceError
from cdc.log.writer import Retention, SegmentLimits
from cdc.replication.spill.spilled_transaction import BatchLimits
from tests.fix_postgres import Database, on_both_versions, since
from tests.slot_source import SlotSource, make_slot_source
from tests.waiting import until

pytestmark = [pytest.mark.migrated, on_both_versions]


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> SlotSource:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    return make_slot_source(database, tmp_path / "log")


def test_rows_of_one_transaction_share_an_lsn_and_are_numbered_from_zero(shop: SlotSource) -> None:
    with shop.reading():
        shop.database.execute("INSERT INTO item SELECT i, 'x' FROM generate_series(1, 3) i")
        shop.database.execute("UPDATE item SET name = 'y' WHERE id = 1")
        found = shop.until_logged(4)
    first, second = found[0][0].lsn, found[3][0].lsn
    assert [(c.lsn, c.idx, kind) for c, kind in found] == [
        (first, 0, "I"), (first, 1, "I"), (first, 2, "I"), (second, 0, "U"),
    ]  # fmt: skip
    assert second > first


def test_logical_messages_take_a_number_and_survivors_of_a_savepoint_keep_theirs(
    shop: SlotSource,
) -> None:
    with shop.reading(), shop.database.connect() as connection:
        with connection.transaction():
            connection.execute("INSERT INTO item VALUES (1, 'a')")
            connection.execute("SELECT pg_logical_emit_message(true, 'note', 'hello')")
            with connection.transaction(force_rollback=True):
                connection.execute("INSERT INTO item VALUES (2, 'b')")
            connection.execute("INSERT INTO item VALUES (3, 'c')")
        found = shop.until_logged(3)
    assert [(c.idx, kind) for c, kind in found] == [(0, "I"), (1, "M"), (2, "I")]


def test_a_message_outside_a_transaction_has_a_place_between_its_neighbours(
    shop: SlotSource,
) -> None:
    with shop.reading():
        shop.database.execute("INSERT INTO item VALUES (1, 'a')")
        shop.database.execute("SELECT pg_logical_emit_message(false, 'note', 'loose')")
        shop.database.execute("INSERT INTO item VALUES (2, 'b')")
        found = shop.until_logged(3)
    assert [kind for _, kind in found] == ["I", "M", "I"]
    assert sorted(found) == found
    assert len({cursor for cursor, _ in found}) == 3


def test_a_truncate_of_two_tables_is_one_change_a_table(shop: SlotSource) -> None:
    shop.database.execute("CREATE TABLE part (id int PRIMARY KEY)")
    with shop.reading():
        shop.database.execute("TRUNCATE item, part")
        found = shop.until_logged(2)
        frames = list(shop.view.frames(0, shop.view.next_batch()))
    assert [(c.idx, kind) for c, kind in found] == [(0, "T"), (2, "T")]
    tables = [r["table_name"] for f in frames for r in decode_changes(f.raw, f.schemas).to_pylist()]
    assert sorted(tables) == ["item", "part"]


def test_every_row_is_kept_with_the_schema_it_was_written_with(shop: SlotSource) -> None:
    with shop.reading(), shop.database.connect() as connection:
        with connection.transaction():
            connection.execute("INSERT INTO item VALUES (1, 'a')")
            connection.execute("ALTER TABLE item ADD COLUMN extra int")
            connection.execute("INSERT INTO item VALUES (2, 'b', 7)")
            connection.execute("ALTER TABLE item RENAME COLUMN name TO label")
            connection.execute("INSERT INTO item VALUES (3, 'c', 8)")
        shop.until_logged(5)
        frames = list(shop.view.frames(0, shop.view.next_batch()))
    changes = [c for f in frames for c in decode_changes(f.raw, f.schemas).to_pylist()]
    assert [(c["commit_idx"], c["action"]) for c in changes] == [
        (0, "insert"), (1, "schema_change"), (2, "insert"), (3, "schema_change"), (4, "insert"),
    ]  # fmt: skip
    assert [c["record"] for c in changes if c["action"] == "insert"] == [
        '{"id":1,"name":"a"}',
        '{"id":2,"name":"b","extra":7}',
        '{"id":3,"label":"c","extra":8}',
    ]


def test_a_restart_neither_repeats_nor_skips(shop: SlotSource) -> None:
    with shop.reading():
        shop.database.execute("INSERT INTO item SELECT i, 'x' FROM generate_series(1, 5) i")
        before = shop.until_logged(5)
    shop.database.execute("INSERT INTO item VALUES (6, 'x')")
    with shop.reading():
        after = shop.until_logged(6)
    assert after[:5] == before
    assert len(set(after)) == 6


def test_a_restart_inside_a_large_transaction_goes_on_inside_it(shop: SlotSource) -> None:
    with shop.reading(batch=BatchLimits(rows=100)):
        shop.database.execute("INSERT INTO item SELECT i, 'x' FROM generate_series(1, 5000) i")
        shop.until_logged(100)
    partly = len(shop.messages())
    with shop.reading():
        found = shop.until_logged(5000)
    assert [c.idx for c, _ in found] == list(range(5000)), f"stopped after {partly}"


def test_nothing_is_confirmed_before_it_is_settled(shop: SlotSource) -> None:
    start = shop.confirmed_lsn()
    with shop.reading(idle_s=3600):
        shop.database.execute("INSERT INTO item VALUES (1, 'a')")
        ((cursor, _),) = shop.until_logged(1)
        until("two rounds of feedback", lambda: _feedback_after(shop, cursor))
        assert shop.confirmed_lsn() <= max(start, cursor.lsn)
        assert shop.confirmed_lsn() < cursor.lsn
        shop.settle_all()
        until("the slot to follow", lambda: shop.confirmed_lsn() == free_place(cursor).lsn)


def test_with_fsync_the_log_itself_lets_the_slot_move(shop: SlotSource) -> None:
    with shop.reading(durability="fsync", idle_s=3600):
        shop.database.execute("INSERT INTO item VALUES (1, 'a')")
        ((cursor, _),) = shop.until_logged(1)
        until("the slot to follow the log", lambda: shop.confirmed_lsn() == free_place(cursor).lsn)


@since(15)
def test_an_idle_source_still_moves_the_slot(shop: SlotSource) -> None:
    start = shop.confirmed_lsn()
    shop.database.execute("CREATE SCHEMA private; CREATE TABLE private.t (id int)")
    with shop.reading():
        shop.database.execute("INSERT INTO private.t SELECT generate_series(1, 1000)")
        until("a batch without rows", lambda: shop.view.next_batch() > 0)
        end = shop.settle_all()
        assert end.lsn > start
        until("the slot to move", lambda: shop.confirmed_lsn() >= end.lsn)
    assert shop.messages() == []


def test_our_own_tables_never_enter_the_stream(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    shop = make_slot_source(database, tmp_path / "log", publication="FOR ALL TABLES")
    with shop.reading(idle_s=3600):
        database.execute("INSERT INTO item VALUES (1, 'a')")
        shop.until_logged(1)
        shop.settle_all()
        database.execute("INSERT INTO item VALUES (2, 'b')")
        found = shop.until_logged(2)
    assert [kind for _, kind in found] == ["I", "I"]


def test_a_slot_beyond_our_cursor_stops_the_reader_and_says_so(shop: SlotSource) -> None:
    start = shop.confirmed_lsn()
    shop.database.execute("INSERT INTO item VALUES (1, 'lost')")
    advance = f"SELECT pg_replication_slot_advance('{shop.settings.slot}', pg_current_wal_lsn())"
    until(
        "the slot to move", lambda: shop.database.execute(advance) and shop.confirmed_lsn() > start
    )
    with pytest.raises(GapError, match="the changes between are gone"), shop.reading():
        error = until("the reader to say why", lambda: _error(shop))
    assert "the changes between are gone" in error
    assert _state(shop) == "stopped"


def test_a_source_whose_wal_ends_before_our_cursor_is_another_history(shop: SlotSource) -> None:
    shop.database.execute("UPDATE walbrook.sources SET restart_lsn = restart_lsn + 1000000000")
    with pytest.raises(GapError, match="an older state of the database"), shop.reading():
        until("the reader to say why", lambda: _error(shop))


def test_a_dropped_slot_stops_the_reader_and_is_not_created_again(shop: SlotSource) -> None:
    shop.database.execute(f"SELECT pg_drop_replication_slot('{shop.settings.slot}')")
    with pytest.raises(SourceError, match="no longer exists") as caught, shop.reading():
        until("the reader to say why", lambda: _error(shop))
    assert "SELECT walbrook.accept_gap('shop', lsn)" in caught.value.fix
    assert shop.database.execute("SELECT 1 FROM pg_replication_slots") == []


def test_a_cut_connection_is_taken_up_again(shop: SlotSource) -> None:
    with shop.reading():
        shop.database.execute("INSERT INTO item VALUES (1, 'a')")
        shop.until_logged(1)
        shop.database.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
            f"WHERE slot_name = '{shop.settings.slot}'"
        )
        shop.database.execute("INSERT INTO item VALUES (2, 'b')")
        found = shop.until_logged(2)
    assert len(set(found)) == 2


def test_a_full_log_pauses_reading_until_it_is_settled(shop: SlotSource) -> None:
    with shop.reading(
        retention=Retention(settled_s=3600, settled_bytes=1 << 30, bytes_max=200_000),
        segments=SegmentLimits(bytes=50_000),
        batch=BatchLimits(rows=100),
    ):
        shop.database.execute(
            "INSERT INTO item SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i"
        )
        until("the reader to pause", lambda: _state(shop) == "paused")
        paused_at = shop.view.next_batch()

        def goes_on() -> bool:
            shop.settle_all()
            return shop.view.next_batch() > paused_at

        until("settling to free the log", goes_on)


def test_a_second_reader_waits_for_the_slot(shop: SlotSource, tmp_path: Path) -> None:
    with shop.reading():
        until("the first to stream", lambda: _state(shop) == "streaming")
        with shop.reading(log_directory=tmp_path / "other"):
            error = until("the second to say why", lambda: _error(shop))
    assert "another service reads slot" in error


def _feedback_after(shop: SlotSource, cursor: Cursor) -> bool:
    rows = shop.database.execute(
        "SELECT flush_lsn >= restart_lsn AND reply_time > state_since + interval '2 s' "
        "FROM pg_stat_replication, walbrook.sources "
        f"WHERE application_name = 'walbrook:{shop.settings.slot}' AND state_since IS NOT NULL"
    )
    return bool(rows and rows[0][0])


def _state(shop: SlotSource) -> str:
    return str(shop.database.execute("SELECT state FROM walbrook.sources")[0][0])


def _error(shop: SlotSource) -> str:
    return str(shop.database.execute("SELECT last_error FROM walbrook.sources")[0][0] or "")


def test_the_key_is_the_primary_key_in_key_order_whatever_the_replica_identity(
    shop: SlotSource,
) -> None:
    shop.database.execute(
        "CREATE TABLE pair (a int, b int, c text, PRIMARY KEY (b, a));"
        "CREATE TABLE whole (v text, id int PRIMARY KEY); ALTER TABLE whole REPLICA IDENTITY FULL;"
        "CREATE TABLE chosen (id int PRIMARY KEY, code text NOT NULL UNIQUE);"
        "ALTER TABLE chosen REPLICA IDENTITY USING INDEX chosen_code_key;"
        "CREATE TABLE keyless (v int, w int); ALTER TABLE keyless REPLICA IDENTITY FULL"
    )
    with shop.reading():
        shop.database.execute("INSERT INTO pair VALUES (1, 2, 'x'); DELETE FROM pair")
        shop.database.execute("INSERT INTO whole VALUES ('x', 7); UPDATE whole SET v = 'y'")
        shop.database.execute("INSERT INTO chosen VALUES (3, 'code'); DELETE FROM chosen")
        shop.database.execute("INSERT INTO keyless VALUES (4, 5)")
        shop.until_logged(7)
        frames = list(shop.view.frames(0, shop.view.next_batch()))
    changes = [r for f in frames for r in decode_changes(f.raw, f.schemas).to_pylist()]
    assert [r["record_pks"] for r in changes] == [
        '["2","1"]', '["2","1"]', '["7"]', '["7"]', '["code"]', '["code"]', '["4","5"]',
    ]  # fmt: skip

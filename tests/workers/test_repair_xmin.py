"""Which rows a repair reads: all that were written since the horizon, whatever became of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cdc.backfill.newer_rows import written_since
from cdc.cursor import Cursor
from cdc.state.horizons import Horizon, horizon_at, note_horizon, remove_horizons_above
from tests import repairing
from tests.backfill_rig import Rig
from tests.fix_postgres import Database
from tests.repairing import drop_slot, repaired, until_repaired
from tests.waiting import until

pytestmark = pytest.mark.migrated

ROWS = 100
ROUND = 1 << 32
_NEXT = "pg_snapshot_xmax(pg_current_snapshot())::text::int8"


@pytest.fixture
def rig(database: Database, tmp_path: Path) -> Rig:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL)")
    return Rig(database, tmp_path)


def delivered(rig: Rig) -> None:
    """Rows are delivered, and a repair would read none of them."""
    with rig.running():
        rig.database.execute(f"INSERT INTO item SELECT i, 1 FROM generate_series(1, {ROWS}) AS i")
        rig.until_delivered()
    repairing.note_horizon(rig)


def read_rows(rig: Rig) -> set[int]:
    return {m["record"]["id"] for m in rig.messages() if m["action"] == "read"}


@pytest.mark.parametrize(
    "command",
    [
        "VACUUM FREEZE item",
        "VACUUM FULL item",
        pytest.param("CLUSTER item", marks=pytest.mark.chaos),
    ],
)
def test_rows_keep_their_xmin_when_they_are_frozen_or_moved(rig: Rig, command: str) -> None:
    """Freezing sets a flag beside xmin: a repair needs no whole table after it."""
    delivered(rig)
    drop_slot(rig)
    rig.database.execute(
        "UPDATE item SET version = 2 WHERE id <= 10; INSERT INTO item VALUES (1000, 2)"
    )
    rig.database.execute("ALTER TABLE item CLUSTER ON item_pkey")
    rig.database.execute(command)
    ((frozen,),) = rig.database.execute(
        "SELECT relfrozenxid = pg_snapshot_xmin(pg_current_snapshot())::xid "
        "FROM pg_class WHERE relname = 'item'"
    )
    assert frozen or command != "VACUUM FREEZE item"
    repaired(rig, "skip")
    with rig.running():
        done = until_repaired(rig)
    assert (done["rows"], done["tables_whole"]) == (11, 0)
    assert read_rows(rig) == {*range(1, 11), 1000}


def test_a_transaction_open_at_the_horizon_and_committed_without_a_slot_is_read(rig: Rig) -> None:
    delivered(rig)
    with rig.database.connect() as early:
        early.execute("BEGIN; UPDATE item SET version = 2 WHERE id = 1; SAVEPOINT a")
        early.execute("UPDATE item SET version = 2 WHERE id = 2; RELEASE a; SAVEPOINT b")
        rig.database.execute("UPDATE item SET version = 2 WHERE id = 5")
        with rig.running():  # horizons are noted while it is open
            rig.until_delivered()
        drop_slot(rig)
        early.execute("UPDATE item SET version = 2 WHERE id = 3; COMMIT")
    repaired(rig, "skip")
    with rig.running():
        until_repaired(rig)
    assert read_rows(rig) >= {1, 2, 3}
    assert len(read_rows(rig)) < 10


def test_without_a_horizon_the_whole_table_is_read_and_it_is_said(rig: Rig) -> None:
    delivered(rig)
    drop_slot(rig)
    rig.database.execute("DELETE FROM walbrook.horizons")
    repaired(rig, "skip")
    with rig.running():
        done = until_repaired(rig)
    assert (done["rows"], done["tables_whole"]) == (ROWS, 1)
    (gap,) = [m for m in rig.messages() if m["action"] == "gap"]
    (table,) = gap["record"]["bridged"]["tables"]
    why = "no horizon was noted at or below the consumer's cursor"
    assert (table["rows"], table["why_whole"]) == ("whole", why)
    assert rig.rows("SELECT whole_reason FROM walbrook.repaired_tables") == [(why,)]


def test_too_many_transactions_ago_the_whole_table_is_read(rig: Rig) -> None:
    delivered(rig)
    drop_slot(rig)
    rig.database.execute(f"UPDATE walbrook.horizons SET xid = xid - {1 << 31}")
    repaired(rig, "skip")
    with rig.running():
        done = until_repaired(rig)
    assert (done["rows"], done["tables_whole"]) == (ROWS, 1)
    ((why,),) = rig.rows("SELECT whole_reason FROM walbrook.repaired_tables")
    assert "xmin has 32 bits" in why


def test_the_condition_misses_no_row_at_any_distance(database: Database) -> None:
    """Horizon, next number and writers near every border of the 32 bits, as the server computes."""
    chance = random.Random(7)
    borders = [3, 1 << 31, ROUND - 1, ROUND, ROUND + (1 << 31), 5 * ROUND]
    with database.connect() as connection:
        for _ in range(300):
            since = max(3, chance.choice(borders) + chance.randrange(-50, 50))
            behind = chance.choice([0, 40, 1 << 20, 1 << 31, ROUND - 50, ROUND, 3 * ROUND])
            until = since + behind + chance.randrange(1, 50)
            newer = [chance.randrange(since, until) for _ in range(20)] + [since, until - 1]
            # Beyond a round every row counts as newer.
            lowest = max(0, until - ROUND)
            older = [chance.randrange(lowest, since) for _ in range(20 if lowest < since else 0)]
            condition = written_since(since).replace(_NEXT, str(until))
            query = f"SELECT array_agg({condition}) FROM unnest(%s::text[]::xid[]) AS t (xmin)"

            def told(xids: list[int], query: str = query) -> list[bool]:
                row = connection.execute(
                    query.encode(), ([str(xid % ROUND) for xid in xids],)
                ).fetchone()
                assert row is not None
                return list(row[0] or [])

            assert all(told(newer)), (since, until)
            assert not any(told(older)), (since, until)


def test_a_reader_that_attaches_removes_horizons_above_what_was_read(rig: Rig) -> None:
    """After a crash or a failover other transactions have these places and numbers."""
    delivered(rig)
    filler = "SELECT pg_logical_emit_message(false, 'filler', 'x')"
    ((lsn,),) = rig.database.execute(filler)
    rig.database.execute(
        "INSERT INTO walbrook.horizons (source, lsn, xid) "
        f"SELECT 'shop', '{lsn}', max(xid) FROM walbrook.horizons"
    )
    rig.database.execute(filler)
    with rig.source.reading():
        noted = f"SELECT count(*) > 0 FROM walbrook.horizons WHERE lsn > '{lsn}'"
        until("a new horizon", lambda: rig.rows(noted)[0][0])
    assert rig.rows(f"SELECT 1 FROM walbrook.horizons WHERE lsn = '{lsn}'") == []


def test_horizons_are_bounded_and_those_of_another_server_are_removed(database: Database) -> None:
    with database.connect() as state:
        state.execute(
            "INSERT INTO walbrook.sources (name, slot, publication, system_identifier, term, "
            "restart_lsn) VALUES ('shop', 's', 'p', '1', 1, '0/10')"
        )
        for number in range(1, 1_500):
            note_horizon(state, "shop", 1, Horizon(16 * number, 100 + number))
        note_horizon(state, "shop", 0, Horizon(1 << 20, 1 << 20))  # of a start before this one
        note_horizon(state, "shop", 0, Horizon(16, 101))
        remove_horizons_above(state, "shop", 0, 0)
        ((count,),) = state.execute("SELECT count(*) FROM walbrook.horizons").fetchall()
        assert 500 <= count <= 1_000
        assert horizon_at(state, "shop", Cursor(15, 0)) is None
        found = horizon_at(state, "shop", Cursor(16 * 777 + 1, 3))
        assert found is not None
        assert found.lsn <= 16 * 777
        assert found.xid == 100 + found.lsn // 16
        state.execute("UPDATE walbrook.sources SET restart_lsn = '0/2000'")
        note_horizon(state, "shop", 1, Horizon(16 * 1_500, 1_600))
        ((least,),) = state.execute("SELECT min(lsn) - '0/0' FROM walbrook.horizons").fetchall()
        assert 0x2000 - 64 <= least <= 0x2000
        note_horizon(state, "shop", 1, Horizon(16 * 1_600, 1_000))
        ((most,),) = state.execute("SELECT max(xid) FROM walbrook.horizons").fetchall()
        assert most == 1_000

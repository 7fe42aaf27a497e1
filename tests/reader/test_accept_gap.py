"""``walbrook.accept_gap`` moves nothing unless changes are lost, and never beyond the WAL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from cdc.connection import Connection
from cdc.errors import GapError
from cdc.state.migrate import migrate
from cdc.state.positions import register_source
from tests.fix_postgres import Database
from tests.lost_changes import note_lost_changes
from tests.slot_source import SlotSource, make_slot_source
from tests.waiting import until

pytestmark = pytest.mark.migrated

Refused = psycopg.errors.ObjectNotInPrerequisiteState

BEYOND = "SELECT walbrook.accept_gap('shop', 'F/FFFFFFFF')"
UP_TO_NOW = "SELECT walbrook.accept_gap('shop', pg_current_wal_flush_lsn())"
PLACES = """
SELECT s.restart_lsn, c.cursor_lsn, c.cursor_idx, (SELECT count(*) FROM walbrook.gaps)
  FROM walbrook.sources s JOIN walbrook.consumers c ON c.source = s.name
"""


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> SlotSource:
    database.execute("CREATE TABLE item (id serial PRIMARY KEY, name text)")
    return make_slot_source(database, tmp_path / "shop")


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    """The state of a source on another server, whose WAL was seen up to 0/900."""
    with database.connect() as connection:
        migrate(connection)
        register_source(
            connection,
            name="shop",
            slot="slot",
            publication="pub",
            system_identifier="1",
            slot_lsn=0x10,
            consumers=["lines"],
        )
        yield connection


def state_of(shop: SlotSource) -> str:
    ((state,),) = shop.database.execute("SELECT state FROM walbrook.sources")
    return str(state)


def logged(shop: SlotSource, rows: int) -> None:
    shop.database.execute(f"INSERT INTO item (name) SELECT 'x' FROM generate_series(1, {rows})")
    shop.until_logged(rows)


def test_a_source_that_is_read_and_well_has_no_gap_to_accept(shop: SlotSource) -> None:
    with shop.reading():
        logged(shop, 5)
        until("the reader to stream", lambda: state_of(shop) == "streaming")
        before = shop.database.execute(PLACES)
        for call in (BEYOND, UP_TO_NOW):
            with pytest.raises(Refused, match="is being read"):
                shop.database.execute(call)
    until("the reader to stop", lambda: state_of(shop) == "stopped")
    for call in (BEYOND, UP_TO_NOW):
        with pytest.raises(Refused, match="nothing says that source shop has lost changes"):
            shop.database.execute(call)
    assert shop.database.execute(PLACES) == before
    with shop.reading():
        shop.database.execute("INSERT INTO item (name) VALUES ('one more')")
        shop.until_logged(6)


def test_a_slot_that_was_rebuilt_is_a_gap_up_to_where_it_stands(shop: SlotSource) -> None:
    with shop.reading():
        logged(shop, 5)
    ((slot,),) = shop.database.execute("SELECT slot FROM walbrook.sources")
    shop.database.execute(
        f"SELECT pg_drop_replication_slot('{slot}'); "
        f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
    )
    with pytest.raises(GapError, match="stands at") as found, shop.reading():
        until("the reader to stop", lambda: state_of(shop) == "stopped")
    with pytest.raises(Refused, match="beyond the end of the WAL"):
        shop.database.execute(BEYOND)
    statement = found.value.fix[found.value.fix.index("SELECT") :]
    shop.database.execute(statement)
    ((gaps,),) = shop.database.execute("SELECT count(*) FROM walbrook.gaps")
    assert gaps == 1
    with shop.reading():
        shop.database.execute("INSERT INTO item (name) VALUES ('one more')")
        shop.until_logged(1)


def test_a_gap_beyond_the_wal_that_was_seen_is_not_accepted(state: Connection) -> None:
    note_lost_changes(state, "shop", end="0/900")
    before = state.execute(PLACES).fetchall()
    with pytest.raises(Refused, match="beyond the end of the WAL of source shop, which was last"):
        state.execute("SELECT walbrook.accept_gap('shop', '0/901')")
    assert state.execute(PLACES).fetchall() == before
    state.execute("SELECT walbrook.accept_gap('shop', '0/900')")
    assert state.execute("SELECT to_lsn::text FROM walbrook.gaps").fetchall() == [("0/900",)]


def test_a_restart_cursor_beyond_the_wal_empties_no_log(shop: SlotSource) -> None:
    with shop.reading():
        logged(shop, 5)
    shop.database.execute(
        "UPDATE walbrook.sources SET restart_lsn = 'F/FFFFFFFF', publication_oid = NULL; "
        "UPDATE walbrook.consumers SET cursor_lsn = 'F/FFFFFFFF'"
    )
    with pytest.raises(GapError, match="WAL ends at"), shop.reading():
        until("the reader to stop", lambda: state_of(shop) == "stopped")
    assert shop.count() == 5


@pytest.mark.parametrize(
    ("kind", "accepted"),
    [("spill_damaged", True), ("log_ends_early", True), ("log_damaged", False)],
)
def test_damage_is_a_gap_of_the_source_where_it_stops_its_reader(
    state: Connection, kind: str, accepted: bool
) -> None:
    note_lost_changes(state, "shop", end="0/900")
    state.execute("UPDATE walbrook.health_events SET kind = %s", (kind,))
    if not accepted:
        with pytest.raises(Refused, match="nothing says that source shop has lost changes"):
            state.execute("SELECT walbrook.accept_gap('shop', '0/900')")
        return
    state.execute("SELECT walbrook.accept_gap('shop', '0/900')")
    assert state.execute("SELECT to_lsn::text FROM walbrook.gaps").fetchall() == [("0/900",)]

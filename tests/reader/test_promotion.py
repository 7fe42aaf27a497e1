"""A standby that is promoted while it is being read: the history goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from cdc.replication.preflight.slot import create_slot
from cdc.replication.preflight.standby import StandbySnapshots
from cdc.replication.settings import ReaderSettings
from cdc.state.migrate import migrate
from cdc.state.positions import register_source
from tests.fix_postgres import Database
from tests.slot_source import SlotSource
from tests.standby import Pair, execute, primary_and_standby, slot_name


@dataclass(frozen=True)
class SlotWanted:
    name: str
    create_if_not_exists: bool = True
    failover: bool = False
    two_phase: bool = False


@pytest.fixture
def pair() -> Iterator[Pair]:
    with primary_and_standby() as servers:
        yield servers


@pytest.fixture
def shop(pair: Pair, database: Database, tmp_path: Path) -> SlotSource:
    """A reader of the standby, with its state in a database elsewhere."""
    pair.until_replayed()
    slot = slot_name()
    with closing(psycopg.connect(pair.standby.dsn, autocommit=True)) as connection:
        lsn = create_slot(
            connection, SlotWanted(slot), snapshots=StandbySnapshots(pair.primary.dsn)
        )
    with database.connect() as connection:
        migrate(connection)
        term = register_source(
            connection,
            name="shop",
            slot=slot,
            publication="pub",
            system_identifier=pair.recorded.system_identifier,
            slot_lsn=lsn,
            consumers=["all"],
        )
    settings = ReaderSettings(
        source="shop",
        term=term,
        dsn=pair.standby.dsn,
        slot=slot,
        publication="pub",
        state_dsn=database.dsn,
        log_directory=tmp_path / "log",
        heartbeat_s=0,
    )
    return SlotSource(database, settings, term)


def test_a_promotion_of_the_standby_that_is_read_is_not_a_divergence(
    pair: Pair, shop: SlotSource
) -> None:
    with shop.reading():
        pair.insert(1)
        shop.until_logged(1)
        pair.promote()
        execute(pair.standby.dsn, "INSERT INTO item VALUES (2)")
        shop.until_logged(2)
        # A reader that is killed here leaves this in the log and this in the state database.
        assert shop.database.execute("SELECT timeline FROM walbrook.sources") == [(2,)]
    with shop.reading():
        execute(pair.standby.dsn, "INSERT INTO item VALUES (3)")
        shop.until_logged(3)
    cursors = [cursor for cursor, _ in shop.messages()]
    assert cursors == sorted(set(cursors))

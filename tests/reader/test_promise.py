"""What the README promises of a slow or dead sink, with nothing but the defaults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cdc.config import loads
from cdc.cursor import parse_lsn
from cdc.replication.settings import settings_of
from tests.fix_postgres import Database
from tests.slot_source import SlotSource, make_slot_source
from tests.waiting import until

pytestmark = pytest.mark.migrated

DEFAULTS = """
databases:
  - name: shop
    url: %s
    slot: {name: %s}
    publication: {name: pub}
sinks:
  - name: all
    destination: {type: file, path: lines}
"""


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> SlotSource:
    """A source whose reader is configured by nothing but what has no default."""
    database.execute("CREATE TABLE item (id serial PRIMARY KEY, name text)")
    source = make_slot_source(database, tmp_path / "shop")
    url = f"postgres:///{database.name}"
    config = loads(DEFAULTS % (url, source.settings.slot), base=tmp_path)
    settings = settings_of(config, "shop", source.term)
    return replace(source, settings=replace(settings, dsn=database.dsn, state_dsn=database.dsn))


def test_a_paused_sink_pins_no_wal(shop: SlotSource) -> None:
    shop.database.execute("SELECT walbrook.pause('all')")
    with shop.reading():
        shop.database.execute(
            "INSERT INTO item (name) SELECT repeat('x', 1000) FROM generate_series(1, 2000)"
        )
        shop.until_logged(2000)
        ((end,),) = shop.database.execute("SELECT pg_current_wal_lsn()::text")
        shop.database.execute("INSERT INTO item (name) VALUES ('later')")
        until("the slot to let the WAL go", lambda: shop.confirmed_lsn() >= parse_lsn(end))
    ((cursor, restart),) = shop.database.execute(
        "SELECT c.cursor_lsn::text, s.restart_lsn::text "
        "FROM walbrook.consumers c JOIN walbrook.sources s ON s.name = c.source"
    )
    assert parse_lsn(cursor) == parse_lsn(restart) < parse_lsn(end), "it keeps its place"
    assert len(shop.messages()) == 2001, "and the log keeps what it lacks"

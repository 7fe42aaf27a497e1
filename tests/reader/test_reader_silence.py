"""A server that has nothing to send for long: busy, and not to be taken for dead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fix_postgres import Database, since
from tests.slot_source import make_slot_source

pytestmark = pytest.mark.migrated

# The server spends a long time on each row and sends none of them.
_SLOW_FILTER = "FOR TABLE item WHERE (md5(repeat(name, 20000)) = '')"


@since(15)  # row filters
def test_a_server_that_skips_a_large_transaction_is_not_taken_for_dead(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    shop = make_slot_source(database, tmp_path / "shop", publication=_SLOW_FILTER)
    database.execute("ALTER TABLE item REPLICA IDENTITY FULL")
    database.execute("CREATE TABLE last (id int PRIMARY KEY)")
    database.execute("ALTER PUBLICATION pub ADD TABLE last")
    database.execute("INSERT INTO item SELECT n, 'x' FROM generate_series(1, 8000) n")
    database.execute("INSERT INTO last VALUES (1)")
    with shop.reading(silence_s=1.5, heartbeat_s=0):
        shop.until_logged(1)
    kinds = database.execute("SELECT kind FROM walbrook.health_events")
    assert kinds == []

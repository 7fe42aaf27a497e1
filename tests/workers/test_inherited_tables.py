"""A table that inherits from another one: each has rows and changes of its own.

Rows of both may have the same keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.config import PostgresDestination
from tests.backfill_rig import Rig
from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.waiting import until
from tests.walbrook_service import _url

pytestmark = pytest.mark.migrated

_TABLES = """
CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, pad text, body text NOT NULL);
ALTER TABLE item ALTER body SET STORAGE EXTERNAL;
CREATE TABLE special (PRIMARY KEY (id)) INHERITS (item);
INSERT INTO item SELECT i, 1, repeat('p', 500), repeat('body ' || i || ' ', 1000)
  FROM generate_series(1, 200) AS i;
INSERT INTO special SELECT i, 9, '', 'special' FROM generate_series(1, 300) AS i
"""


@pytest.fixture
def there(postgres_server: PostgresServer) -> Iterator[Database]:
    with fresh_database(postgres_server.dsn) as made:
        yield made


def test_rows_that_are_read_by_their_keys_are_those_of_the_parent_alone(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_TABLES)
    database.execute("DELETE FROM ONLY item WHERE id <= 50")
    database.execute("VACUUM item")  # leaves room in the first blocks
    rig = Rig(database, tmp_path)
    with rig.running():
        backfill = rig.start("item", chunk_bytes=8192, rows_per_second=20, connections=1)
        until("some rows", rig.messages)
        database.execute("UPDATE ONLY item SET version = 2 WHERE id > 150")
        rig.hurry()
        rig.until_state(backfill)
    ((by_key,),) = rig.rows("SELECT sum(rows) FROM walbrook.backfill_chunks WHERE kind = 'keys'")
    assert by_key == 50
    assert {row["version"] for row in rig.table().values()} == {1, 2}


def test_a_parent_is_compared_and_repaired_without_its_children(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(_TABLES)
    mirror = PostgresDestination.model_validate({"type": "postgres", "url": _url(there.dsn)})
    rig = Rig(database, tmp_path, sink={"destination": mirror})
    with rig.running():
        rig.backfilled("item")
        # The key of the row that is too many is one of the child.
        there.execute("DELETE FROM item WHERE id = 7; INSERT INTO item VALUES (250, 1, '', '')")
        row = rig.verified(repair=True)
    assert (row.source_rows, row.missing, row.extra, row.different) == (200, 1, 1, 0)
    assert row.repaired == 2
    assert there.execute("SELECT count(*), max(version), max(id) FROM item") == [(200, 1, 200)]

"""A backfill while transaction numbers pass 2^32: changes have 32 bits of them, snapshots 64."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.embedded_postgres import EmbeddedPostgres
from demo.server_account import server_account
from tests.backfill_rig import Rig, stale
from tests.fix_postgres import VERSIONS, Database, embedded, fresh_database
from tests.standby import execute
from tests.waiting import until

_ROUND = 1 << 32
_BEFORE = 10_000  # transactions that are left when the server starts
_STATUS_BYTES = 32 * 8192  # of one file of pg_xact


@pytest.fixture
def database() -> Iterator[Database]:
    """On a server of its own, whose next transaction numbers are the last ones with 32 bits."""
    directory = Path(tempfile.mkdtemp(prefix="walbrook-test-wraparound-"))
    server = embedded(directory, VERSIONS[-1], fast=True, settings={"autovacuum": "off"})
    try:
        with server:
            execute(server.dsn, "VACUUM FREEZE")
        _set_next_xid(server, _ROUND - _BEFORE)
        with server, fresh_database(server.dsn) as found:
            yield found
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _set_next_xid(server: EmbeddedPostgres, xid: int) -> None:
    data, account = server.directory / "data", server_account()
    status = data / "pg_xact" / "0FFF"
    status.write_bytes(bytes(_STATUS_BYTES))
    if account is not None:
        shutil.chown(status, account, account)
    program = str(server.bin_directory / "pg_resetwal")
    subprocess.run(
        [program, "-x", str(xid), "-u", str(xid - _BEFORE), "-D", str(data)],
        user=account,
        check=True,
        capture_output=True,
        timeout=60,
    )


def _next_xid(database: Database) -> int:
    ((xid,),) = database.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text")
    return int(xid)


def _use_up(database: Database, count: int) -> None:
    """Give out so many numbers: each nested transaction that writes has one."""
    database.execute(
        f"DO $$ BEGIN FOR i IN 1..{count} LOOP BEGIN INSERT INTO other VALUES (i);"
        " EXCEPTION WHEN unique_violation THEN NULL; END; END LOOP; END $$"
    )


def test_rows_and_changes_keep_their_order_across_the_wraparound(
    database: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE other (id int);"
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL);"
        "INSERT INTO item SELECT i, 1 FROM generate_series(1, 10) AS i"
    )
    rig = Rig(database, tmp_path)
    with rig.running():
        rig.backfilled("other")  # which transactions are open is known from here on
        _use_up(database, _ROUND - _next_xid(database) - 100)
        with database.connect() as writer, writer.transaction():
            writer.execute("UPDATE item SET version = 2 WHERE id = 8")
            ((before,),) = writer.execute("SELECT pg_current_xact_id()::text").fetchall()
            _use_up(database, 200)
            database.execute("UPDATE item SET version = 2 WHERE id = 9")  # visible to the chunk
            backfill = rig.start("item", rows_per_second=2)
            until("the first rows", lambda: [m for m in rig.messages() if _is_read(m)])
        database.execute("UPDATE item SET version = 2 WHERE id = 10")  # newer than the chunk
        rig.until_delivered()
        rig.hurry()
        rig.until_state(backfill)
    assert int(before) < _ROUND < _next_xid(database)
    assert stale([m for m in rig.messages() if m["metadata"]["table_name"] == "item"]) == []
    versions = {row["id"]: row["version"] for row in rig.table().values() if "version" in row}
    assert versions == {number: 2 if number in (8, 9, 10) else 1 for number in range(1, 11)}
    assert rig.rows("SELECT sum(dropped) FROM walbrook.backfill_chunks") == [(2,)]


def _is_read(message: dict[str, object]) -> bool:
    return message["action"] == "read"

"""Backfill from a real standby, and through a pooler in transaction mode.

The pooler is PgBouncer: ``WALBROOK_TEST_PGBOUNCER`` names its program if it is not in the path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc.config import Config
from cdc.replication.preflight.slot import create_slot
from cdc.replication.preflight.standby import StandbySnapshots
from cdc.replication.settings import ReaderSettings
from cdc.service.process.repair import repair
from cdc.state.migrate import migrate
from cdc.state.positions import register_source
from demo.server_account import server_account
from tests.backfill_rig import SOURCE, Rig
from tests.fix_postgres import Database
from tests.reader.test_promotion import SlotWanted
from tests.slot_source import SlotSource
from tests.standalone import free_port
from tests.standby import Pair, execute, primary_and_standby, slot_name
from tests.waiting import until
from tests.walbrook_service import _url

pytestmark = pytest.mark.sinks

ROWS = 3_000


@dataclass
class StandbyRig(Rig):
    """Reads from a standby; its state is in a database elsewhere."""

    pair: Pair = field(kw_only=True)

    def _make_source(self) -> SlotSource:
        self.read_as, slot = self.pair.standby.dsn, slot_name()
        self.pair.until_replayed()
        snapshots = StandbySnapshots(self.pair.primary.dsn)
        with closing(psycopg.connect(self.read_as, autocommit=True)) as connection:
            lsn = create_slot(connection, SlotWanted(slot), snapshots=snapshots)
        with self.database.connect() as connection:
            migrate(connection)
            term = register_source(
                connection, name=SOURCE, slot=slot, publication="pub", slot_lsn=lsn,
                system_identifier=self.pair.recorded.system_identifier, consumers=["files"],
            )  # fmt: skip
        settings = ReaderSettings(
            source=SOURCE, term=term, dsn=self.read_as, slot=slot, publication="pub",
            state_dsn=self.database.dsn, log_directory=self.directory / "log", heartbeat_s=0,
        )  # fmt: skip
        return SlotSource(self.database, settings, term)

    def ids(self) -> set[int]:
        return {row["id"] for row in self.table().values()}

    def until_equal(self) -> None:
        """Until the messages leave the rows that the primary has."""
        rows = execute(self.pair.primary.dsn, "SELECT id FROM item")
        wanted = {number for (number,) in rows}
        until("the rows of the primary", lambda: self.ids() == wanted)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with primary_and_standby() as servers:
        yield servers


def test_rows_are_read_from_a_standby_while_its_primary_writes(
    pair: Pair, database: Database, tmp_path: Path
) -> None:
    execute(pair.primary.dsn, f"INSERT INTO item SELECT generate_series(1, {ROWS})")
    rig = StandbyRig(database, tmp_path, pair=pair)
    with rig.running():
        number = rig.start("item", chunk_bytes=1)
        for at in range(1, 40):
            execute(
                pair.primary.dsn,
                f"DELETE FROM item WHERE id = {at}; INSERT INTO item VALUES ({ROWS + at});"
                f"UPDATE item SET id = {10 * ROWS + at} WHERE id = {100 + at}",
            )
        rig.until_state(number)
        rig.until_equal()
    reads = [m for m in rig.messages() if m["action"] == "read"]
    assert len(reads) > ROWS // 2


def test_a_slot_that_a_standby_lost_is_repaired_there(
    pair: Pair, database: Database, tmp_path: Path
) -> None:
    rig = StandbyRig(database, tmp_path, pair=pair)
    with rig.running():
        execute(pair.primary.dsn, f"INSERT INTO item SELECT generate_series(1, {ROWS})")
        rig.until_equal()
    ((xid,),) = execute(pair.standby.dsn, "SELECT pg_snapshot_xmin(pg_current_snapshot())::text")
    with rig.running():
        noted = f"SELECT max(xid) >= {xid} FROM walbrook.horizons"
        until("a horizon", lambda: rig.rows(noted)[0][0])
        execute(pair.primary.dsn, "INSERT INTO item VALUES (0)")
        rig.until_equal()
    slot = rig.source.settings.slot
    execute(pair.standby.dsn, f"SELECT pg_drop_replication_slot('{slot}')")
    execute(pair.primary.dsn, "INSERT INTO item SELECT generate_series(-10, -1)")
    pair.until_replayed()
    config = Config.model_validate(
        {
            "databases": [
                {
                    "name": SOURCE, "url": _url(pair.standby.dsn),
                    "primary_url": _url(pair.primary.dsn), "slot": {"name": slot},
                    "publication": {"name": "pub"},
                }
            ],
            "sinks": [
                {
                    "name": "files", "database": SOURCE,
                    "destination": {"type": "file", "path": str(tmp_path / "files")},
                }
            ],
            "state": {"url": _url(database.dsn)},
        }
    )  # fmt: skip
    repair(config, SOURCE, deletes="skip")
    with rig.running():
        done = "SELECT state = 'done' FROM walbrook.repair_progress"
        until("the repair", lambda: rig.rows(done)[0][0])
        rig.until_equal()
    told = rig.rows("SELECT rows_read, rows FROM walbrook.repaired_tables")
    assert told[0][0] == "xmin"
    assert 10 <= told[0][1] <= 11


@contextmanager
def _pooled(database: Database) -> Iterator[str]:
    """The address of the database behind a pooler in transaction mode, with one connection."""
    program = os.environ.get("WALBROOK_TEST_PGBOUNCER") or shutil.which("pgbouncer")
    if program is None:
        pytest.skip("PgBouncer is not installed")
    to, port, account = conninfo_to_dict(database.dsn), free_port(), server_account()
    with tempfile.TemporaryDirectory(prefix="walbrook-test-pooler-") as directory:
        settings = Path(directory) / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n{to['dbname']} = host={to['host']} port={to['port']} "
            f"dbname={to['dbname']} user={to['user']} password={to['password']}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = any\n"
            "pool_mode = transaction\ndefault_pool_size = 4\nunix_socket_dir =\n"
        )
        if account is not None:
            for path in (Path(directory), settings):
                shutil.chown(path, account, account)
        process = subprocess.Popen(
            [program, str(settings)],
            user=account,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        dsn = make_conninfo(database.dsn, host="127.0.0.1", port=port)

        def answers() -> bool:
            try:
                execute(dsn, "SELECT 1")
            except psycopg.OperationalError:
                return False
            return True

        try:
            until("the pooler", answers)
            yield dsn
        finally:
            process.terminate()
            process.wait(10)


def test_chunks_are_read_through_a_pooler_in_transaction_mode(
    database: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL);"
        f"INSERT INTO item SELECT i, 1 FROM generate_series(1, {ROWS}) AS i"
    )
    with _pooled(database) as dsn:
        rig = Rig(database, tmp_path, read_as=dsn)
        with rig.running():
            database.execute("UPDATE item SET version = 2 WHERE id <= 100")
            rig.backfilled("item", chunk_bytes=1, connections=4)
            rig.until_delivered()
    rows = {row["id"]: row["version"] for row in rig.table().values()}
    assert rows == {number: 2 if number <= 100 else 1 for number in range(1, ROWS + 1)}

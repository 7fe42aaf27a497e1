"""A delivering process is killed ten times, also between rows and position: exactly once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.change import MessageBatch
from cdc.failpoints import VARIABLE
from demo.embedded_postgres import EmbeddedPostgres
from tests.conformance.test_postgres_histories import SCHEMA, TABLES, Writer, rows_of
from tests.fix_postgres import Database, embedded, fresh_database
from tests.slot_batches import slot_batches
from tests.waiting import until

pytestmark = pytest.mark.sinks

ROOT = Path(__file__).parents[2]
AT_STEPS = ["applied", "moved"] * 3
AT_RANDOM = ["kill"] * 3 + ["crash of the destination"]
POSITION = "SELECT commit_lsn::text, commit_idx FROM walbrook_sink.positions"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """A destination that may be crashed.

    It is not below pytest's own folder, which another run closes to the server's account.
    """
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-test-destination-") as name,
        embedded(Path(name), fast=True) as running,
    ):
        yield running


@pytest.fixture
def there(server: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(server.dsn) as made:
        yield made


def recorded(database: Database, seed: int, file: Path) -> MessageBatch:
    """A random history of three tables, also as a file for other processes."""
    database.execute(SCHEMA)
    writer = Writer(seed)
    with slot_batches(database) as source:
        for table in TABLES:
            source.run(f"INSERT INTO {table} VALUES (1)" if table != "pair" else
                       "INSERT INTO pair VALUES (1, 'x')")  # fmt: skip
        for _ in range(400):
            source.run(f"BEGIN; {writer.transaction()}; COMMIT")
        batch = source.taken()
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_file(out, batch.rows.schema) as stream:
        stream.write_batch(batch.rows)
    return batch


class Deliverer:
    """Starts the process, and makes something happen to it."""

    def __init__(self, there: Database, mode: str, file: Path, rng: random.Random) -> None:
        self._there, self._rng = there, rng
        self._arguments = (there.dsn, mode, str(file))

    def start(self, failpoint: str = "") -> subprocess.Popen[bytes]:
        seed = str(self._rng.randrange(1 << 30))
        return subprocess.Popen(
            [sys.executable, "-m", "tests.postgres_deliverer", *self._arguments, seed],
            cwd=ROOT,
            env=os.environ | {VARIABLE: failpoint},
        )

    def suffer(self, fault: str, server: EmbeddedPostgres) -> None:
        """One start that does not get to its end, or to it through a crash of its destination."""
        if fault in ("applied", "moved"):
            process = self.start(f"{fault}:{self._rng.randrange(1, 6)}")
            assert process.wait(120) < 0, "it ended before it came to its failpoint"
            return
        before = self._position()
        process = self.start()
        until("progress", lambda: self._position() != before or process.poll() is not None, 120)
        if fault != "kill":
            server.restart(immediate=True)
        process.kill()
        process.wait(60)

    def finish(self) -> None:
        assert self.start().wait(180) == 0

    def _position(self) -> list[tuple[object, ...]]:
        exists = self._there.execute("SELECT to_regclass('walbrook_sink.positions') IS NOT NULL")
        return self._there.execute(POSITION) if exists[0][0] else []


@pytest.mark.parametrize("mode", ["mirror", "append", "events"])
def test_every_change_is_there_once_and_in_order_after_ten_deaths(
    mode: str, database: Database, there: Database, server: EmbeddedPostgres, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    batch = recorded(database, seed, tmp_path / "changes.arrow")
    deliverer = Deliverer(there, mode, tmp_path / "changes.arrow", rng)
    # Steps first: behind a random moment too few deliveries may be left to come to one.
    for fault in [*rng.sample(AT_STEPS, 6), *rng.sample(AT_RANDOM, 4)]:
        deliverer.suffer(fault, server)
    deliverer.finish()
    last = batch.cursor(-1)
    ((lsn, idx),) = there.execute(POSITION.replace("commit_lsn::text", "commit_lsn - '0/0'"))
    assert (lsn, idx) == last
    if mode == "mirror":
        for table in TABLES:
            assert rows_of(there, table, "public") == rows_of(database, table, "public"), table
        return
    names = ("commit_lsn", "commit_idx", "action")
    expected = list(zip(*(batch.rows.column(name).to_pylist() for name in names), strict=True))
    cursor = "(walbrook_lsn - '0/0')::bigint, walbrook_idx, walbrook_action"
    query = " UNION ALL ".join(f"SELECT {cursor} FROM {table}" for table in TABLES)
    if mode == "events":
        query = "SELECT (commit_lsn - '0/0')::bigint, commit_idx, action FROM walbrook_events"
    assert there.execute(f"{query} ORDER BY 1, 2") == expected

"""Random histories into Parquet in an object store, by processes that are killed.

DuckDB then reads what the manifests name: every change once, and what they leave is the source.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pyarrow.compute as pc
import pytest

from cdc.change import MessageBatch
from cdc.failpoints import VARIABLE
from tests.conformance.test_postgres_histories import SCHEMA, Writer
from tests.fix_postgres import Database
from tests.fix_s3 import S3
from tests.lake_deliverer import write_batch
from tests.parquet_lake import ParquetLake
from tests.slot_batches import SlotBatches, slot_batches
from tests.waiting import until

PROJECT = Path(__file__).parents[2]
COLUMNS = {"item": ("id", "n", "big", "other"), "pair": ("a", "b", "big"), "bag": ("x", "y")}
KEYS = {"item": ("id",), "pair": ("b", "a")}
CURSORS = "SELECT walbrook_lsn, walbrook_idx, walbrook_action FROM t ORDER BY 1, 2"
ALTERS = {
    0.3: "ALTER TABLE item ADD COLUMN added int DEFAULT 7",
    0.5: "ALTER TABLE item ALTER COLUMN added TYPE bigint",
    0.7: "ALTER TABLE item RENAME COLUMN added TO renamed",
    0.9: "ALTER TABLE item DROP COLUMN renamed",
}


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    database.execute(SCHEMA)
    with slot_batches(database) as batches:
        yield batches


def _history(source: SlotBatches, writer: Writer, transactions: int) -> MessageBatch:
    alters = {int(transactions * at): statement for at, statement in ALTERS.items()}
    for at in range(transactions):
        source.run(f"BEGIN; {writer.transaction()}; COMMIT")
        if at in alters:
            source.run(alters[at])
    return source.taken()


class _Deliveries:
    """Processes that deliver the same changes into the same tables."""

    def __init__(self, lake: ParquetLake, s3: S3, file: Path, rng: random.Random) -> None:
        self._lake, self._s3, self._file, self._rng = lake, s3, file, rng

    def start(self, failpoint: str = "") -> subprocess.Popen[bytes]:
        options = orjson.dumps(self._lake.options).decode()
        seed = str(self._rng.randrange(1 << 30))
        return subprocess.Popen(
            [sys.executable, "-m", "tests.parquet_lake", self._lake.root, options,
             str(self._file), seed],
            cwd=PROJECT,
            env=os.environ | {VARIABLE: failpoint},
        )  # fmt: skip

    def die_at(self, step: str) -> None:
        process = self.start(f"{step}:{self._rng.randrange(1, 6)}")
        assert process.wait(120) < 0, "it ended before it came to its failpoint"

    def die_at_random(self) -> None:
        before, process = self._commits(), self.start()
        until("progress", lambda: self._commits() > before or process.poll() is not None, 120)
        process.kill()
        process.wait(60)

    def finish(self) -> None:
        assert self.start().wait(240) == 0

    def _commits(self) -> int:
        manifests = [name for name in self._s3.objects() if name.endswith("_manifest.json")]
        contents = [self._s3.read(f"s3://{self._s3.bucket}/{name}") for name in manifests]
        return sum(orjson.loads(content)["commit"] for content in contents)


def _assert_equal(database: Database, lake: ParquetLake, batch: MessageBatch) -> None:
    for table, columns in COLUMNS.items():
        mine = batch.rows.filter(pc.equal(batch.rows.column("table_name"), table))
        # A schema change is no change of a row.
        mine = mine.filter(pc.not_equal(mine.column("action"), "schema_change"))
        names = ("commit_lsn", "commit_idx", "action")
        sent = list(zip(*(mine.column(name).to_pylist() for name in names), strict=True))
        assert lake.query(CURSORS, f"public/{table}") == sent, table
        if table in KEYS:
            here = database.execute(
                f"SELECT {', '.join(f'{c}::text' for c in columns)} FROM {table}"
            )
            assert sorted(map(repr, _left(lake, table, columns))) == sorted(map(repr, here)), table


def _left(lake: ParquetLake, table: str, columns: tuple[str, ...]) -> list[tuple[object, ...]]:
    """The rows that a history leaves, applied change by change."""
    values = ", ".join(f"CAST({name} AS VARCHAR) AS {name}" for name in columns)
    rows: dict[tuple[object, ...], dict[str, object]] = {}
    for action, old_key, unchanged, *found in lake.query(
        "SELECT walbrook_action, walbrook_old_key, walbrook_unchanged, "
        f"{values} FROM t ORDER BY walbrook_lsn, walbrook_idx",
        f"public/{table}",
    ):
        if action == "truncate":
            rows.clear()
            continue
        row = dict(zip(columns, found, strict=True))
        key = tuple(row[name] for name in KEYS[table])
        before = rows.pop(tuple(orjson.loads(str(old_key))) if old_key else key, {})
        if action == "delete":
            continue
        kept = orjson.loads(str(unchanged)) if unchanged else []
        rows[key] = row | {name: before[name] for name in kept if name in columns}
    return [tuple(row.values()) for row in rows.values()]


def _seeded() -> Writer:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    return Writer(seed)


def test_every_change_is_in_the_store_once_after_two_deaths(
    database: Database, source: SlotBatches, s3: S3, tmp_path: Path
) -> None:
    writer = _seeded()
    batch = _history(source, writer, 60)
    write_batch(batch, tmp_path / "changes.arrow")
    lake = ParquetLake.in_store(s3, tmp_path / "copies")
    deliveries = _Deliveries(lake, s3, tmp_path / "changes.arrow", writer.rng)
    deliveries.die_at("written")
    deliveries.die_at("committed")
    deliveries.finish()
    _assert_equal(database, lake, batch)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_every_change_is_in_the_store_once_after_ten_deaths_under_load(
    database: Database, source: SlotBatches, s3: S3, tmp_path: Path
) -> None:
    writer = _seeded()
    batch = _history(source, writer, 400)
    write_batch(batch, tmp_path / "changes.arrow")
    lake = ParquetLake.in_store(s3, tmp_path / "copies")
    deliveries = _Deliveries(lake, s3, tmp_path / "changes.arrow", writer.rng)
    # Steps first: behind a random moment too few deliveries may be left to come to one.
    for step in writer.rng.sample(["written", "committed"] * 3, 6):
        deliveries.die_at(step)
    for _ in range(4):
        deliveries.die_at_random()
    deliveries.finish()
    _assert_equal(database, lake, batch)

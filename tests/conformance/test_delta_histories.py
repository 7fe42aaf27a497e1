"""Random histories in random cuts: merged tables equal the source, a history has every change."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from cdc.change import MessageBatch
from cdc.failpoints import VARIABLE
from sinks.lakehouse import LakehouseSink, LakeNames
from sinks.lakehouse.delta import delta_tables
from tests.conformance.test_postgres_histories import SCHEMA, Writer
from tests.fix_postgres import Database
from tests.lake import query
from tests.lake_deliverer import write_batch
from tests.slot_batches import SlotBatches, cut, slot_batches
from tests.waiting import until

PROJECT = Path(__file__).parents[2]
ROUNDS = 15
KEYED = {"item": "id, n::text, big, other", "pair": "a, b, big"}
AT_STEPS = ["written", "committed"] * 3
CURSORS = "SELECT walbrook_lsn, walbrook_idx, walbrook_action FROM {}"


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    database.execute(SCHEMA)
    with slot_batches(database) as batches:
        yield batches


def _keyed(batch: MessageBatch) -> MessageBatch:
    """Without the table that has no key."""
    return MessageBatch(
        batch.rows.filter(pc.not_equal(batch.rows.column("table_name"), "bag")), batch.shape
    )


def _assert_merged(database: Database, root: Path) -> None:
    for table, columns in KEYED.items():
        place = root / "public" / table
        there = query(f"SELECT {columns} FROM t", t=place) if place.exists() else []
        here = database.execute(f"SELECT {columns} FROM {table}")
        assert sorted(map(repr, there)) == sorted(map(repr, here)), table


def _cursors(batch: MessageBatch) -> list[tuple[object, ...]]:
    names = ("commit_lsn", "commit_idx", "action")
    return list(zip(*(batch.rows.column(name).to_pylist() for name in names), strict=True))


def test_merged_tables_equal_the_source_after_every_history_in_every_cut(
    database: Database, source: SlotBatches, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    writer = Writer(seed)
    sink = LakehouseSink(delta_tables(str(tmp_path), "shop/orders", {}), LakeNames(), mode="upsert")
    for _ in range(ROUNDS):
        for _ in range(writer.rng.randrange(1, 12)):
            source.run(f"BEGIN; {writer.transaction()}; COMMIT")
        batch = source.read()
        if batch is None or not len(_keyed(batch)):
            continue
        for piece in cut(_keyed(batch), writer.rng, writer.rng.choice([1, 2, 5])):
            delivery = sink.deliver(piece)
            assert delivery.error is None, delivery.error.full_text
        _assert_merged(database, tmp_path)


class _Optimizer(threading.Thread):
    """Somebody else who compacts and vacuums the tables all the time."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        self._root, self.ended, self.done = root, threading.Event(), 0

    def run(self) -> None:
        while not self.ended.wait(0.02):
            for log in self._root.glob("*/*/_delta_log"):
                try:
                    table = DeltaTable(log.parent)
                    found = table.optimize.compact()
                    self.done += found["numFilesRemoved"] > 0
                    table.vacuum(168, dry_run=False)
                except (DeltaError, OSError):
                    continue  # the sink was faster


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_somebody_elses_optimize_and_vacuum_beside_the_sink_are_survived(
    mode: str, database: Database, source: SlotBatches, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    writer = Writer(seed)
    for _ in range(150):
        source.run(f"BEGIN; {writer.transaction()}; COMMIT")
    batch = _keyed(source.taken())
    sink = LakehouseSink(
        delta_tables(str(tmp_path), "shop/orders", {}),
        LakeNames(),
        mode=mode,  # type: ignore[arg-type]
    )
    optimizer = _Optimizer(tmp_path)
    optimizer.start()
    start = 0
    while start < len(batch):
        delivery = sink.deliver(batch.slice(start, 20))
        start += delivery.settled
    until("a compaction", lambda: optimizer.done > 0, 30)
    optimizer.ended.set()
    optimizer.join(30)
    if mode == "upsert":
        _assert_merged(database, tmp_path)
        return
    tables = {name: tmp_path / "public" / name for name in KEYED}
    union = " UNION ALL ".join(CURSORS.format(name) for name in KEYED)
    assert query(f"{union} ORDER BY 1, 2", **tables) == _cursors(batch)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_every_change_is_there_once_after_ten_deaths_between_files_and_commit(
    mode: str, database: Database, source: SlotBatches, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    writer = Writer(seed)
    for at in range(400):
        source.run(f"BEGIN; {writer.transaction()}; COMMIT")
        if at == 150:
            source.run("ALTER TABLE item ADD COLUMN added int DEFAULT 7")
        if at == 250:
            source.run("ALTER TABLE item ALTER COLUMN added TYPE bigint")
    batch = _keyed(source.taken())
    file, root = tmp_path / "changes.arrow", tmp_path / "lake"
    write_batch(batch, file)

    def start(failpoint: str = "") -> subprocess.Popen[bytes]:
        arguments = [str(root), mode, str(file), str(writer.rng.randrange(1 << 30))]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.lake_deliverer", *arguments],
            cwd=PROJECT,
            env=os.environ | {VARIABLE: failpoint},
        )

    def commits() -> int:
        return len(list(root.glob("public/*/_delta_log/*.json")))

    # Steps first: behind a random moment too few deliveries may be left to come to one.
    for step in writer.rng.sample(AT_STEPS, 6):
        process = start(f"{step}:{writer.rng.randrange(1, 6)}")
        assert process.wait(120) < 0, "it ended before it came to its failpoint"
    for _ in range(4):
        before, process = commits(), start()
        until("progress", lambda b=before, p=process: commits() > b or p.poll() is not None, 120)  # type: ignore[misc]
        process.kill()
        process.wait(60)
    assert start().wait(180) == 0
    if mode == "upsert":
        _assert_merged(database, root)
        return
    tables = {name: root / "public" / name for name in KEYED}
    union = " UNION ALL ".join(CURSORS.format(name) for name in KEYED)
    assert query(f"{union} ORDER BY 1, 2", **tables) == _cursors(batch)

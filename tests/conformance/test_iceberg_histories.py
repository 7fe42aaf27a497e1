"""Random histories in random cuts: merged tables equal the source, a history has every change."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException

from cdc.change import MessageBatch
from cdc.failpoints import VARIABLE
from tests.conformance.test_delta_histories import AT_STEPS, CURSORS, KEYED, _cursors, _keyed
from tests.conformance.test_postgres_histories import SCHEMA, Writer
from tests.fix_postgres import Database
from tests.iceberg_lake import WAYS, IcebergLake, Way
from tests.lake_deliverer import write_batch
from tests.slot_batches import SlotBatches, cut, slot_batches
from tests.waiting import until

PROJECT = Path(__file__).parents[2]
ROUNDS = 8


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    database.execute(SCHEMA)
    with slot_batches(database) as batches:
        yield batches


@pytest.fixture
def lake(tmp_path: Path) -> IcebergLake:
    return IcebergLake(tmp_path / "lake")


@pytest.fixture
def writer() -> Writer:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    return Writer(seed)


def _assert_merged(database: Database, lake: IcebergLake) -> None:
    for table, columns in KEYED.items():
        there = lake.rows(f"SELECT {columns} FROM {table}", table) if lake.table(table) else []
        here = database.execute(f"SELECT {columns} FROM {table}")
        assert sorted(map(repr, there)) == sorted(map(repr, here)), table


def _assert_appended(batch: MessageBatch, lake: IcebergLake) -> None:
    union = " UNION ALL ".join(CURSORS.format(name) for name in KEYED)
    assert lake.rows(f"{union} ORDER BY 1, 2", *KEYED) == _cursors(batch)


@pytest.mark.parametrize("way", WAYS[1:])
def test_merged_tables_equal_the_source_after_every_history_in_every_cut(
    way: Way, writer: Writer, database: Database, source: SlotBatches, lake: IcebergLake
) -> None:
    sink = lake.sink(way)
    for _ in range(ROUNDS):
        for _ in range(writer.rng.randrange(1, 12)):
            source.run(f"BEGIN; {writer.transaction()}; COMMIT")
        batch = source.read()
        if batch is None or not len(_keyed(batch)):
            continue
        for piece in cut(_keyed(batch), writer.rng, writer.rng.choice([1, 2, 5])):
            delivery = sink.deliver(piece)
            assert delivery.error is None, delivery.error.full_text
        _assert_merged(database, lake)


class _Stranger(threading.Thread):
    """Somebody else who writes the tables all the time: no rows, but snapshots."""

    def __init__(self, lake: IcebergLake) -> None:
        super().__init__(daemon=True)
        self._lake, self.ended, self.done = lake, threading.Event(), 0

    def run(self) -> None:
        while not self.ended.wait(0.1):
            for name in KEYED:
                table = self._lake.table(name)
                if table is None:
                    continue
                nothing = pa.Table.from_pylist([], schema=table.schema().as_arrow())
                try:
                    table.append(nothing)
                    self.done += 1
                except CommitFailedException:
                    continue  # the sink was faster


@pytest.mark.parametrize("way", WAYS[:2])
def test_snapshots_of_another_writer_beside_the_sink_are_survived(
    way: Way, writer: Writer, database: Database, source: SlotBatches, lake: IcebergLake
) -> None:
    for _ in range(40):
        source.run(f"BEGIN; {writer.transaction()}; COMMIT")
    batch, sink = _keyed(source.taken()), lake.sink(way)
    stranger = _Stranger(lake)
    stranger.start()
    start = 0
    while start < len(batch):
        start += sink.deliver(batch.slice(start, 20)).settled
    until("a commit of the other", lambda: stranger.done > 0, 30)
    stranger.ended.set()
    stranger.join(30)
    if way == "append":
        _assert_appended(batch, lake)
    else:
        _assert_merged(database, lake)


@dataclass
class _Deliverers:
    """Processes that deliver a file of changes, and die where they are told to."""

    lake: IcebergLake
    way: Way
    file: Path
    rng: random.Random

    def start(self, failpoint: str = "") -> subprocess.Popen[bytes]:
        seed = str(self.rng.randrange(1 << 30))
        arguments = [str(self.lake.root), self.way, str(self.file), seed]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.iceberg_deliverer", *arguments],
            cwd=PROJECT,
            env=os.environ | {VARIABLE: failpoint},
        )

    def die_at(self, step: str, times: int) -> None:
        process = self.start(f"{step}:{times}")
        assert process.wait(120) < 0, "it ended before it came to its failpoint"

    def finish(self) -> None:
        assert self.start().wait(180) == 0


def test_every_change_is_there_once_after_a_death_on_either_side_of_a_commit(
    writer: Writer, database: Database, source: SlotBatches, lake: IcebergLake, tmp_path: Path
) -> None:
    for _ in range(40):
        source.run(f"BEGIN; {writer.transaction()}; COMMIT")
    write_batch(_keyed(source.taken()), tmp_path / "changes.arrow")
    deliverers = _Deliverers(lake, "merge_on_read", tmp_path / "changes.arrow", writer.rng)
    deliverers.die_at("written", 2)
    deliverers.die_at("committed", 1)
    deliverers.finish()
    _assert_merged(database, lake)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_every_change_is_there_once_after_ten_deaths_between_files_and_commit(
    way: Way, writer: Writer, database: Database, source: SlotBatches, lake: IcebergLake,
    tmp_path: Path,
) -> None:  # fmt: skip
    for at in range(400):
        source.run(f"BEGIN; {writer.transaction()}; COMMIT")
        if at == 150:
            source.run("ALTER TABLE item ADD COLUMN added int DEFAULT 7")
        if at == 250:
            source.run("ALTER TABLE item ALTER COLUMN added TYPE bigint")
    batch, file = _keyed(source.taken()), tmp_path / "changes.arrow"
    write_batch(batch, file)
    deliverers = _Deliverers(lake, way, file, writer.rng)

    def commits() -> int:
        return len(list(lake.root.glob("public/*/metadata/snap-*.avro")))

    # Steps first: behind a random moment too few deliveries may be left to come to one.
    for step in writer.rng.sample(AT_STEPS, 6):
        deliverers.die_at(step, writer.rng.randrange(1, 6))
    for _ in range(4):
        before, process = commits(), deliverers.start()
        until("progress", lambda b=before, p=process: commits() > b or p.poll() is not None, 120)  # type: ignore[misc]
        process.kill()
        process.wait(60)
    deliverers.finish()
    if way == "append":
        _assert_appended(batch, lake)
    else:
        _assert_merged(database, lake)

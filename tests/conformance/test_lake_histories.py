"""Random histories into Delta and Iceberg tables, by processes that are killed, beside others.

Merged tables equal the source, and a history has every change once, as DuckDB reads them.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow.compute as pc
import pytest

from cdc.change import MessageBatch
from cdc.failpoints import VARIABLE
from tests.conformance.test_postgres_histories import SCHEMA, Writer
from tests.fix_postgres import Database
from tests.lake_deliverer import write_batch
from tests.lakes import LAKES, MERGED, Lake
from tests.slot_batches import SlotBatches, cut, slot_batches
from tests.waiting import until

pytestmark = pytest.mark.sinks

PROJECT = Path(__file__).parents[2]
ROUNDS = 10
KEYED = {"item": "id, n::text, big, other", "pair": "a, b, big"}
AT_STEPS = ["written", "committed"] * 3
CURSORS = "SELECT walbrook_lsn, walbrook_idx, walbrook_action FROM {}"


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    database.execute(SCHEMA)
    with slot_batches(database) as batches:
        yield batches


@pytest.fixture
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return Lake.of(tmp_path / "lake", request.param)


@pytest.fixture
def writer() -> Writer:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    return Writer(seed)


def _keyed(batch: MessageBatch) -> MessageBatch:
    """Without the table that has no key."""
    return MessageBatch(
        batch.rows.filter(pc.not_equal(batch.rows.column("table_name"), "bag")), batch.shape
    )


def _assert_merged(database: Database, lake: Lake) -> None:
    for table, columns in KEYED.items():
        there = lake.rows(f"SELECT {columns} FROM {table}", table) if lake.has(table) else []
        here = database.execute(f"SELECT {columns} FROM {table}")
        assert sorted(map(repr, there)) == sorted(map(repr, here)), table


def _assert_whole(database: Database, lake: Lake, batch: MessageBatch) -> None:
    if lake.is_merged:
        _assert_merged(database, lake)
        return
    names = ("commit_lsn", "commit_idx", "action")
    sent = list(zip(*(batch.rows.column(name).to_pylist() for name in names), strict=True))
    union = " UNION ALL ".join(CURSORS.format(name) for name in KEYED)
    assert lake.rows(f"{union} ORDER BY 1, 2", *KEYED) == sent


@pytest.mark.parametrize("lake", MERGED, indirect=True)
def test_merged_tables_equal_the_source_after_every_history_in_every_cut(
    lake: Lake, writer: Writer, database: Database, source: SlotBatches
) -> None:
    sink = lake.sink()
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


@pytest.mark.parametrize("lake", LAKES, indirect=True)
def test_compactions_and_expiries_of_another_writer_beside_the_sink_are_survived(
    lake: Lake, writer: Writer, database: Database, source: SlotBatches
) -> None:
    for _ in range(60):
        source.run(f"BEGIN; {writer.transaction()}; COMMIT")
    batch, sink, start = _keyed(source.taken()), lake.sink(), 0
    with lake.stranger() as stranger:
        while start < len(batch):
            start += sink.deliver(batch.slice(start, 20)).settled
        until("a compaction", lambda: stranger.done > 0, 60)
    _assert_whole(database, lake, batch)


@dataclass
class _Deliverers:
    """Processes that deliver a file of changes, and die where they are told to."""

    lake: Lake
    file: Path
    rng: random.Random

    def start(self, failpoint: str = "") -> subprocess.Popen[bytes]:
        seed = str(self.rng.randrange(1 << 30))
        arguments = [str(self.lake.root), f"{self.lake.kind} {self.lake.way}", str(self.file), seed]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.lake_deliverer", *arguments],
            cwd=PROJECT,
            env=os.environ | {VARIABLE: failpoint},
        )

    def die_at(self, step: str, times: int) -> None:
        process = self.start(f"{step}:{times}")
        assert process.wait(120) < 0, "it ended before it came to its failpoint"

    def die_at_random(self) -> None:
        before, process = self.lake.commits(), self.start()
        until("progress", partial(self._went_on, process, before), 120)
        process.kill()
        process.wait(60)

    def finish(self) -> None:
        assert self.start().wait(180) == 0

    def _went_on(self, process: subprocess.Popen[bytes], before: int) -> bool:
        return self.lake.commits() != before or process.poll() is not None


@pytest.mark.parametrize("lake", ["delta copy_on_write", "iceberg merge_on_read"], indirect=True)
def test_every_change_is_there_once_after_a_death_on_either_side_of_a_commit(
    lake: Lake, writer: Writer, database: Database, source: SlotBatches, tmp_path: Path
) -> None:
    for _ in range(40):
        source.run(f"BEGIN; {writer.transaction()}; COMMIT")
    batch = _keyed(source.taken())
    write_batch(batch, tmp_path / "changes.arrow")
    deliverers = _Deliverers(lake, tmp_path / "changes.arrow", writer.rng)
    deliverers.die_at("written", 2)
    deliverers.die_at("committed", 1)
    deliverers.finish()
    _assert_whole(database, lake, batch)


@pytest.mark.chaos
@pytest.mark.parametrize("lake", LAKES, indirect=True)
def test_every_change_is_there_once_after_ten_deaths_beside_compactions_of_others(
    lake: Lake, writer: Writer, database: Database, source: SlotBatches, tmp_path: Path
) -> None:
    for at in range(400):
        source.run(f"BEGIN; {writer.transaction()}; COMMIT")
        if at == 150:
            source.run("ALTER TABLE item ADD COLUMN added int DEFAULT 7")
        if at == 250:
            source.run("ALTER TABLE item ALTER COLUMN added TYPE bigint")
    batch = _keyed(source.taken())
    write_batch(batch, tmp_path / "changes.arrow")
    deliverers = _Deliverers(lake, tmp_path / "changes.arrow", writer.rng)
    with lake.stranger() as stranger:
        # Steps first: behind a random moment too few deliveries may be left to come to one.
        for step in writer.rng.sample(AT_STEPS, 6):
            deliverers.die_at(step, writer.rng.randrange(1, 6))
        for _ in range(4):
            deliverers.die_at_random()
        deliverers.finish()
        until("a compaction", lambda: stranger.done > 0, 60)
    print(f"{stranger.done} compactions by somebody else")
    _assert_whole(database, lake, batch)

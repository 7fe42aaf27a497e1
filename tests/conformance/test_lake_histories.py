"""Random histories into tables of every format, by processes that are killed, beside others.

Merged tables equal the source; a history has every change once, and what it leaves is the source.
DuckDB reads both. ``WALBROOK_TEST_SEED`` repeats the choices of an earlier run.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import orjson
import pyarrow.compute as pc
import pytest

from cdc.change import MessageBatch
from cdc.failpoints import VARIABLE
from tests.conformance.test_postgres_histories import SCHEMA, Writer
from tests.fix_postgres import Database
from tests.fix_stores import StoreOf
from tests.lake_deliverer import write_batch
from tests.lakes import EVERY_LAKE, LAKES, MERGED, Lake
from tests.slot_batches import SlotBatches, cut, slot_batches
from tests.waiting import until

pytestmark = pytest.mark.sinks

PROJECT = Path(__file__).parents[2]
ROUNDS = 10
COLUMNS = {"item": ("id", "n", "big", "other"), "pair": ("a", "b", "big"), "bag": ("x", "y")}
KEYS = {"item": ("id",), "pair": ("b", "a")}
AT_STEPS = ["written", "committed"] * 3
CURSORS = "SELECT walbrook_lsn, walbrook_idx, walbrook_action FROM {} ORDER BY 1, 2"
ALTERS = {
    0.2: ("ALTER TABLE item ADD COLUMN added int, ADD COLUMN gone text",),
    0.4: ("ALTER TABLE item ALTER COLUMN added TYPE bigint",),
    0.6: ("ALTER TABLE item RENAME COLUMN added TO renamed",),
    0.8: ("ALTER TABLE item DROP COLUMN gone", "ALTER TABLE item ADD COLUMN late date"),
}
"""After which part of a history the source changes a table. A default would be in no change."""
ADDED = {"renamed": ("renamed", "added"), "late": ("late",)}
"""The columns that these add, with the names that they have had: older Parquet files keep them."""


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    database.execute(SCHEMA)
    with slot_batches(database) as batches:
        yield batches


@pytest.fixture
def lake(request: pytest.FixtureRequest, tmp_path: Path, store_of: StoreOf) -> Lake:
    """The lake that a parameter names, such as ``delta append`` or ``delta append in s3``."""
    name, _, kind = request.param.partition(" in ")
    return Lake.of(tmp_path / "lake", name, store=store_of(kind) if kind else None)


@pytest.fixture
def writer() -> Writer:
    seed = int(os.environ.get("WALBROOK_TEST_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"seed {seed}")
    return Writer(seed)


def _altered_history(
    database: Database, source: SlotBatches, writer: Writer, transactions: int
) -> MessageBatch:
    """Random changes, and changes of the columns of a table between them."""
    alters = {int(transactions * at): statements for at, statements in ALTERS.items()}
    there: list[str] = []
    for at in range(transactions):
        if at in alters:
            source.run(*alters[at])
            there = _columns_added(database)
        more = ""
        if there and writer.rng.random() < 0.5:
            value = "'2026-01-02'" if (name := writer.rng.choice(there)) == "late" else "7"
            more = f"; UPDATE item SET {name} = {value} WHERE id = {writer.rng.randrange(8)}"
        source.run(f"BEGIN; {writer.transaction()}{more}; COMMIT")
    return source.taken()


def _columns_added(database: Database) -> list[str]:
    found = database.execute(
        "SELECT column_name FROM information_schema.columns WHERE table_name = 'item'"
    )
    return sorted({name for (name,) in found} - set(COLUMNS["item"]))


def _keyed(batch: MessageBatch) -> MessageBatch:
    """Without the table that has no key."""
    return MessageBatch(
        batch.rows.filter(pc.not_equal(batch.rows.column("table_name"), "bag")), batch.shape
    )


def _assert_equal(database: Database, lake: Lake, batch: MessageBatch) -> None:
    """The lake holds what was delivered: the source's rows, and of a history every change."""
    for table, key in KEYS.items():
        columns = dict.fromkeys(COLUMNS[table], ())
        there = {name for (name, _) in lake.columns(table)} if lake.has(table) else set()
        added = {name: was for name, was in ADDED.items() if table == "item" and there & {*was}}
        names = [*columns, *added]
        here = database.execute(f"SELECT {_texts(names)} FROM {table}")
        if lake.is_merged:
            left = lake.rows(f"SELECT {_texts(names)} FROM {table}", table) if there else []
        else:
            left = _left(lake, table, key, names) if there else []
        assert sorted(map(repr, left)) == sorted(map(repr, here)), table
    if not lake.is_merged:
        _assert_whole(lake, batch)


def _texts(names: list[str]) -> str:
    return ", ".join(f"CAST({name} AS text)" for name in names)


def _assert_whole(lake: Lake, batch: MessageBatch) -> None:
    """Every change is there once."""
    for table in COLUMNS:
        mine = batch.rows.filter(pc.equal(batch.rows.column("table_name"), table))
        # A schema change is no change of a row.
        mine = mine.filter(pc.not_equal(mine.column("action"), "schema_change"))
        names = ("commit_lsn", "commit_idx", "action")
        sent = list(zip(*(mine.column(name).to_pylist() for name in names), strict=True))
        if sent or lake.has(table):
            assert lake.rows(CURSORS.format(table), table) == sent, table


def _left(
    lake: Lake, table: str, key: tuple[str, ...], names: list[str]
) -> list[tuple[object, ...]]:
    """The rows that a history leaves, applied change by change."""
    there = [name for (name, _) in lake.columns(table)]
    values = ", ".join(
        f"CAST(coalesce({', '.join(was for was in ADDED.get(name, (name,)) if was in there)}) "
        "AS text)"
        for name in names
    )
    rows: dict[tuple[object, ...], dict[str, object]] = {}
    for action, old_key, unchanged, *found in lake.rows(
        f"SELECT walbrook_action, walbrook_old_key, walbrook_unchanged, {values} FROM {table} "
        "ORDER BY walbrook_lsn, walbrook_idx",
        table,
    ):
        if action == "truncate":
            rows.clear()
            continue
        row = dict(zip(names, found, strict=True))
        now = tuple(row[name] for name in key)
        before = rows.pop(tuple(orjson.loads(str(old_key))) if old_key else now, {})
        if action == "delete":
            continue
        kept = orjson.loads(str(unchanged)) if unchanged else []
        rows[now] = row | {name: before[name] for name in kept if name in names}
    return [tuple(row.values()) for row in rows.values()]


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
        _assert_equal(database, lake, batch)


@pytest.mark.parametrize("lake", LAKES, indirect=True)
def test_compactions_and_expiries_of_another_writer_beside_the_sink_are_survived(
    lake: Lake, writer: Writer, database: Database, source: SlotBatches
) -> None:
    for _ in range(60):
        source.run(f"BEGIN; {writer.transaction()}; COMMIT")
    batch, sink, start = source.taken(), lake.sink(), 0
    batch = _keyed(batch) if lake.is_merged else batch
    with lake.stranger() as stranger:
        while start < len(batch):
            start += sink.deliver(batch.slice(start, 20)).settled
        until("a compaction", lambda: stranger.done > 0, 60)
    _assert_equal(database, lake, batch)


@dataclass
class _Deliverers:
    """Processes that deliver a file of changes, and die where they are told to."""

    lake: Lake
    file: Path
    rng: random.Random

    def start(self, failpoint: str = "") -> subprocess.Popen[bytes]:
        seed = str(self.rng.randrange(1 << 30))
        arguments = [self.lake.describe(), str(self.file), seed]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.lake_deliverer", *arguments],
            cwd=PROJECT,
            env=os.environ | {VARIABLE: failpoint},
        )

    def die_at(self, step: str, times: int) -> None:
        process = self.start(f"{step}:{times}")
        assert process.wait(180) < 0, "it ended before it came to its failpoint"

    def die_at_random(self) -> None:
        before, process = self.lake.commits(), self.start()
        until("progress", partial(self._went_on, process, before), 180)
        process.kill()
        process.wait(60)

    def finish(self) -> None:
        assert self.start().wait(300) == 0

    def _went_on(self, process: subprocess.Popen[bytes], before: int) -> bool:
        return self.lake.commits() != before or process.poll() is not None


@pytest.mark.parametrize(
    "lake",
    ["delta copy_on_write", "iceberg merge_on_read", "parquet append in s3"],
    indirect=True,
)
def test_every_change_is_there_once_after_a_death_on_either_side_of_a_commit(
    lake: Lake, writer: Writer, database: Database, source: SlotBatches, tmp_path: Path
) -> None:
    batch = _altered_history(database, source, writer, 50)
    batch = _keyed(batch) if lake.is_merged else batch
    write_batch(batch, tmp_path / "changes.arrow")
    deliverers = _Deliverers(lake, tmp_path / "changes.arrow", writer.rng)
    deliverers.die_at("written", 2)
    deliverers.die_at("committed", 1)
    deliverers.finish()
    _assert_equal(database, lake, batch)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lake", [*LAKES, *(f"{name} in s3" for name in EVERY_LAKE)], indirect=True)
def test_every_change_is_there_once_after_ten_deaths_beside_compactions_of_others(
    lake: Lake, writer: Writer, database: Database, source: SlotBatches, tmp_path: Path
) -> None:
    # The server of the tests that speaks S3 takes a second for a commit.
    batch = _altered_history(database, source, writer, 400 if lake.store is None else 150)
    batch = _keyed(batch) if lake.is_merged else batch
    write_batch(batch, tmp_path / "changes.arrow")
    deliverers = _Deliverers(lake, tmp_path / "changes.arrow", writer.rng)
    # Only the sink itself merges Parquet files.
    stranger = None if lake.kind == "parquet" else lake.stranger()
    with stranger or nullcontext():
        # Steps first: behind a random moment too few deliveries may be left to come to one.
        for step in writer.rng.sample(AT_STEPS, 6):
            deliverers.die_at(step, writer.rng.randrange(1, 6))
        for _ in range(4):
            deliverers.die_at_random()
        deliverers.finish()
        if stranger is not None:
            until("a compaction", lambda: stranger.done > 0, 60)
            print(f"{stranger.done} compactions by somebody else")
    _assert_equal(database, lake, batch)

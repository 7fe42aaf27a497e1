"""A reader that is killed at each of its steps, watched by a probe that trusts nobody.

The probe asserts all the while that the slot was never told more than what is safe: with ``fsync``
what is on disk, with ``disk`` what is on disk and settled.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import orjson
import pytest

from cdc.cursor import parse_lsn
from cdc.decoding import decode_changes
from cdc.errors import CorruptionError
from cdc.log.frame import Frame
from cdc.log.sync import read_durable
from tests.fix_postgres import Database
from tests.reader_process import ReaderProcess
from tests.slot_source import SlotSource, make_slot_source
from tests.waiting import until

pytestmark = pytest.mark.migrated

Durability = Literal["disk", "fsync"]

# Syncs take half a second, and the slot is told of what is not synced: the probe must see it.
CONFIRMS_BEFORE_SYNC = """
import os, sys, time
from cdc.replication.__main__ import main
from cdc.replication.log_keeper import LogKeeper
sync = os.fdatasync
os.fdatasync = lambda handle: (time.sleep(0.5), sync(handle))
LogKeeper.safe = lambda self, restart: self.log.end
sys.exit(main())
"""


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> SlotSource:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    return make_slot_source(database, tmp_path / "shop")


@contextmanager
def probing(shop: SlotSource, durability: Durability) -> Iterator[list[str]]:
    """Compare the slot with the log and the restart cursor, again and again; lists violations."""
    violations: list[str] = []
    done = threading.Event()
    start = shop.confirmed_lsn()

    def look() -> None:
        with shop.database.connect() as connection:
            while not done.is_set():
                # What is safe only grows: read after what was told, it excuses nothing.
                told = connection.execute(
                    "SELECT confirmed_flush_lsn::text FROM pg_replication_slots "
                    "WHERE slot_name = %s",
                    (shop.settings.slot,),
                ).fetchone()
                settled = connection.execute(
                    "SELECT restart_lsn::text FROM walbrook.sources"
                ).fetchone()
                assert told is not None
                assert settled is not None
                try:
                    durable = read_durable(shop.settings.log_directory).lsn
                except CorruptionError:
                    continue  # read while it was written
                safe = durable if durability == "fsync" else min(durable, parse_lsn(settled[0]))
                if parse_lsn(told[0]) > max(start, safe):
                    violations.append(f"told {told[0]}, safe {safe:X}, settled {settled[0]}")

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield violations
    finally:
        done.set()
        thread.join()


@contextmanager
def writing(shop: SlotSource) -> Iterator[None]:
    """Transactions of three rows, one after another, until the end of the block."""
    done = threading.Event()

    def write() -> None:
        with shop.database.connect() as connection:
            while not done.is_set():
                connection.execute(
                    "INSERT INTO item SELECT last + g, 'x' FROM generate_series(1, 3) g, "
                    "(SELECT coalesce(max(id), 0) AS last FROM item) item"
                )
                time.sleep(0.01)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def everything_once(shop: SlotSource) -> None:
    """All rows of the table are in the log, once, in order, without a hole in their numbers."""
    ((count,),) = shop.database.execute("SELECT count(*) FROM item")
    found = shop.until_logged(count)
    assert len(found) == count
    cursors = [cursor for cursor, _ in found]
    assert cursors == sorted(set(cursors))
    assert [cursor.idx for cursor in cursors] == [0, 1, 2] * (count // 3)


@pytest.mark.parametrize(
    ("step", "durability"),
    [
        ("received:3", "fsync"),
        pytest.param("appended:3", "fsync", marks=pytest.mark.chaos),
        ("synced:3", "fsync"),
        pytest.param("stored:3", "fsync", marks=pytest.mark.chaos),
        ("confirmed:3", "fsync"),
        ("appended:3", "disk"),
        pytest.param("synced:2", "disk", marks=pytest.mark.chaos),
        ("confirmed:3", "disk"),
    ],
)
def test_a_reader_killed_at_a_step_loses_and_repeats_nothing(
    shop: SlotSource, step: str, durability: Durability
) -> None:
    log = {"durability": durability}
    with probing(shop, durability) as violations, ExitStack() as running:
        with writing(shop):
            with ReaderProcess(shop, failpoint=step, log=log) as reader:
                assert reader.until_dead() == -signal.SIGKILL, reader.output()
            before = shop.view.next_batch()
            running.enter_context(ReaderProcess(shop, log=log))
            until("a new batch", lambda: shop.view.next_batch() > before)
        everything_once(shop)
        end = shop.settle_all()
        until("the slot to follow", lambda: shop.confirmed_lsn() >= end.lsn)
    assert not violations, violations[:3]


def test_the_probe_catches_a_reader_that_confirms_before_it_syncs(shop: SlotSource) -> None:
    with (
        probing(shop, "fsync") as violations,
        writing(shop),
        ReaderProcess(shop, program=CONFIRMS_BEFORE_SYNC, log={"durability": "fsync"}),
    ):
        until("the probe to see it", lambda: violations)


def test_an_unknown_failpoint_is_refused(shop: SlotSource) -> None:
    with ReaderProcess(shop, failpoint="someday") as reader:
        assert reader.until_dead() != 0
        assert "WALBROOK_FAILPOINT names no step" in reader.output()


def large_transactions(shop: SlotSource, first: int, count: int) -> None:
    """Transactions of 4,000 rows, each with a savepoint that is rolled back in its middle."""
    insert = "INSERT INTO item SELECT i, 'x' FROM generate_series(%s::int, %s::int) i"
    with shop.database.connect() as connection:
        for start in range(first, first + count * 10_000, 10_000):
            with connection.transaction():
                connection.execute(insert, (start, start + 1_999))
                with connection.transaction(force_rollback=True):
                    connection.execute(insert, (start + 5_000, start + 6_999))
                connection.execute(insert, (start + 2_000, start + 3_999))


@pytest.mark.parametrize("count", [8, pytest.param(25, marks=pytest.mark.chaos)])
def test_transactions_that_come_in_pieces_survive_kills(shop: SlotSource, count: int) -> None:
    """Of two writers at once."""
    seed = random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    print(f"seed {seed}")
    # The least there is: everything larger is streamed, in pieces of this size.
    shop.database.execute(
        f"ALTER DATABASE {shop.database.name} SET logical_decoding_work_mem = '64kB'"
    )
    database = {"stream_transactions": True}
    writers = [
        threading.Thread(target=large_transactions, args=(shop, first, count))
        for first in (1, 1_000_001)
    ]
    for writer in writers:
        writer.start()
    for _ in range(4):
        with ReaderProcess(shop, database=database) as reader:
            until_count(shop, shop.count() + rng.randrange(1, 800 * count))
            reader.process.kill()
            reader.until_dead()
    for writer in writers:
        writer.join()
    with ReaderProcess(shop, database=database):
        found = shop.until_logged(8_000 * count)
    ((pieces,),) = shop.database.execute("SELECT stream_txns FROM pg_stat_replication_slots")
    assert pieces > 0, "nothing was streamed"
    cursors = [cursor for cursor, _ in found]
    assert cursors == sorted(set(cursors)), seed
    assert [cursor.idx for cursor in cursors] == list(range(4_000)) * (2 * count), seed
    keys = [key for frame in shop.view.frames(0, shop.view.next_batch()) for key in keys_of(frame)]
    expected = shop.database.execute("SELECT id::text FROM item")
    assert sorted(keys) == sorted(key for (key,) in expected), seed


def until_count(shop: SlotSource, count: int) -> None:
    until(f"{count} changes", lambda: shop.count() >= count)


def keys_of(frame: Frame) -> list[str]:
    changes = decode_changes(frame.raw, frame.schemas)
    return [orjson.loads(pks)[0] for pks in changes.column("record_pks").to_pylist()]

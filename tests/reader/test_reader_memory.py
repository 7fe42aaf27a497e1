"""The reader's memory has a bound that does not depend on what the source does.

The bound: what an idle reader takes, and about five times the larger of a batch and the largest
message (libpq's buffer, the message, its batch, and the frame on its way into the file).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.fix_postgres import Database
from tests.reader_process import ReaderProcess
from tests.slot_source import SlotSource, make_slot_source
from tests.waiting import until

pytestmark = pytest.mark.migrated

MB = 1_000_000
BATCH_BYTES = 4 << 20
COPIES = 5
SLACK = 40 * MB  # what allocators keep


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> SlotSource:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    database.execute("ALTER TABLE item ALTER name SET STORAGE EXTERNAL")
    return make_slot_source(database, tmp_path / "shop")


def idle_bytes(shop: SlotSource, reader: ReaderProcess) -> int:
    """What the reader takes once everything in it has been used."""
    reader.until_streaming()
    shop.database.execute("INSERT INTO item VALUES (0, 'first')")
    shop.until_logged(1)
    return reader.peak_bytes()


def one_transaction(
    shop: SlotSource, rows: int, *, kill_at: int, timeout_s: float, slack: int = SLACK
) -> None:
    """A transaction of ``rows`` rows, its reader killed in the middle of it; all of it, once."""
    with ReaderProcess(shop) as reader:
        idle_bytes(shop, reader)
        shop.database.execute(
            f"INSERT INTO item SELECT i, 'row ' || i FROM generate_series(1, {rows}) i"
        )
        until("half of it", lambda: shop.count() > kill_at, timeout_s)
        reader.process.kill()
        reader.until_dead()
    with ReaderProcess(shop) as reader:
        until("all of it", lambda: shop.count() > rows, timeout_s)
        bound = 130 * MB + COPIES * BATCH_BYTES + slack
        assert reader.peak_bytes() < bound, f"{reader.peak_bytes() / MB:.0f} MB"
    view = shop.view
    frames = view.frames(view.first_batch() + 1, view.next_batch())
    numbers = [frame.raw.column("commit_idx").to_numpy() for frame in frames if frame.marker.rows]
    assert (np.concatenate(numbers) == np.arange(rows)).all()


def test_a_large_transaction_is_read_in_bounded_memory_and_resumed_inside(shop: SlotSource) -> None:
    one_transaction(shop, 400_000, kill_at=100_000, timeout_s=60)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_five_million_rows_in_one_transaction(shop: SlotSource) -> None:
    # Over so many batches the allocator keeps more: 187 to 191 MB were seen, and no more.
    one_transaction(shop, 5_000_000, kill_at=2_000_000, timeout_s=400, slack=SLACK + 20 * MB)


def test_a_row_of_a_hundred_megabytes_costs_a_few_times_its_size(shop: SlotSource) -> None:
    size = 100 * MB
    with ReaderProcess(shop) as reader:
        idle = idle_bytes(shop, reader)
        shop.database.execute(f"INSERT INTO item SELECT 1, repeat('x', {size})")
        until("the row", lambda: shop.count() == 2, 60)
        assert reader.peak_bytes() < idle + COPIES * size + SLACK
    *_, frame = (f for f in shop.view.frames(0, shop.view.next_batch()) if f.marker.rows)
    assert len(frame.raw.column("payload")[0].as_buffer()) > size


def test_a_log_that_is_full_holds_back_the_source_not_memory(shop: SlotSource) -> None:
    log = {"segment_bytes": "256KiB", "max_bytes": "1MiB"}
    with ReaderProcess(shop, log=log) as reader:
        idle = idle_bytes(shop, reader)
        shop.database.execute(
            "INSERT INTO item SELECT i, repeat('x', 10000) FROM generate_series(1, 20000) i"
        )
        until("the pause", lambda: state(shop) == "paused")
        since = feedback(shop)
        until("more feedback", lambda: feedback(shop) > since)
        assert state(shop) == "paused"
        assert reader.peak_bytes() < idle + COPIES * BATCH_BYTES + SLACK
        assert shop.view.entries(0, shop.view.next_batch())["bytes"].sum() < 8 << 20


def state(shop: SlotSource) -> str:
    return str(shop.database.execute("SELECT state FROM walbrook.sources")[0][0])


def feedback(shop: SlotSource) -> str:
    return str(
        shop.database.execute(
            "SELECT coalesce(max(reply_time)::text, '') FROM pg_stat_replication "
            f"WHERE application_name = 'walbrook:{shop.settings.slot}'"
        )[0][0]
    )

"""What a reader writes into the state database."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.log.writer import Retention, SegmentLimits
from cdc.replication.spill.spilled_transaction import BatchLimits
from tests.fix_postgres import Database
from tests.slot_source import SlotSource, make_slot_source

SMALL = {"segments": SegmentLimits(rows=100), "batch": BatchLimits(rows=50), "heartbeat_s": 0}


def keeping(**changes: object) -> Retention:
    kept: dict[str, object] = {"settled_s": 3600, "settled_bytes": 1 << 30, "bytes_max": 1 << 30}
    return Retention(**{**kept, **changes})  # type: ignore[arg-type]


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> SlotSource:
    database.execute("CREATE TABLE item (id serial PRIMARY KEY, name text)")
    return make_slot_source(database, tmp_path / "shop")


def insert(shop: SlotSource, rows: int) -> None:
    for _ in range(rows // 50):
        shop.database.execute(
            "INSERT INTO item (name) SELECT repeat('x', 100) FROM generate_series(1, 50)"
        )


def source_row(shop: SlotSource, columns: str) -> tuple[object, ...]:
    (row,) = shop.database.execute(f"SELECT {columns} FROM walbrook.sources")
    return row


def health(shop: SlotSource) -> list[str]:
    return [row[0] for row in shop.database.execute("SELECT kind FROM walbrook.health")]


def segments(shop: SlotSource, count: int) -> list[tuple[str, int, str]]:
    """The rows of ``walbrook.log_segments``, once they speak of ``count`` changes."""
    rows = shop.database.execute(
        "SELECT tier, rows, location FROM walbrook.log_segments ORDER BY first_batch"
    )
    return rows if sum(row[1] for row in rows) == count else []

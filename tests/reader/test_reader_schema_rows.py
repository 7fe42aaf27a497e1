"""Schema changes in the log of a real reader: once each, the same through kills and a lost log."""

from __future__ import annotations

import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from cdc.decoding import decode_changes
from tests.fix_postgres import Database
from tests.reader_process import ReaderProcess
from tests.slot_source import SlotSource, make_slot_source
from tests.waiting import until

pytestmark = pytest.mark.migrated

STATEMENTS = [
    "INSERT INTO item VALUES (1, 'a')",
    "ALTER TABLE item ADD b int; INSERT INTO item VALUES (2, 'a', 2)",
    "BEGIN; INSERT INTO other VALUES (1); INSERT INTO item VALUES (3, 'a', 3);"
    "ALTER TABLE item RENAME b TO c; INSERT INTO item VALUES (4, 'a', 4);"
    "ALTER TABLE other ADD d text; INSERT INTO other VALUES (2, 'd'); COMMIT",
    "ALTER TABLE item REPLICA IDENTITY FULL; INSERT INTO item VALUES (5, 'a', 5)",
]
# By their transactions: of each change its number, table, action, and id or version.
EXPECTED = [
    [(0, "item", "insert", 1)],
    [(1, "item", "schema_change", 2)],
    [(0, "item", "insert", 2)],
    [
        (0, "other", "insert", 1), (2, "item", "insert", 3), (3, "item", "schema_change", 3),
        (4, "item", "insert", 4), (5, "other", "schema_change", 2), (6, "other", "insert", 2),
    ],
    [(1, "item", "schema_change", 4)],
    [(0, "item", "insert", 5)],
]  # fmt: skip
COUNT = sum(map(len, EXPECTED))


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> SlotSource:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    database.execute("CREATE TABLE other (id int PRIMARY KEY)")
    return make_slot_source(database, tmp_path / "shop")


def write(shop: SlotSource) -> None:
    for statement in STATEMENTS:
        shop.database.execute(statement)


def in_log(shop: SlotSource) -> list[dict[str, Any]]:
    """Each row as the log has it, with what it decodes to."""
    view = shop.view
    found = []
    for frame in view.frames(0, view.next_batch()):
        changes = decode_changes(frame.raw, frame.schemas).to_pylist()
        rows = frame.raw.to_pylist()
        found += [{**change, **raw} for change, raw in zip(changes, rows, strict=True)]
    return found


def check(rows: list[dict[str, Any]]) -> None:
    cursors = [(row["commit_lsn"], row["commit_idx"]) for row in rows]
    assert cursors == sorted(set(cursors))
    by_lsn: dict[int, list[tuple[int, str, str, int]]] = {}
    for row in rows:
        record = orjson.loads(row["record"])
        number = record.get("id", record.get("version"))
        one = (row["commit_idx"], row["table_name"], row["action"], number)
        by_lsn.setdefault(row["commit_lsn"], []).append(one)
    assert list(by_lsn.values()) == EXPECTED


def stable(rows: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """What is the same on every replay; the schemas hold what the catalog says now."""
    names = ("commit_lsn", "commit_idx", "commit_ts", "xid", "kind", "payload")
    return [tuple(row[name] for name in names) for row in rows]


def arrived_or_dead(shop: SlotSource, reader: ReaderProcess, before: int) -> bool:
    return shop.count() > before or reader.process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("step", ["recorded:1", "recorded:2", "recorded:3", "appended:2"])
def test_a_reader_killed_around_a_schema_change_writes_it_once(shop: SlotSource, step: str) -> None:
    log = {"durability": "fsync"}
    with ReaderProcess(shop, failpoint=step, log=log) as reader:
        for number, statement in enumerate(STATEMENTS):
            if reader.process.status() == psutil.STATUS_ZOMBIE:
                break
            reader.until_streaming()
            shop.database.execute(statement)
            until("its batch, or a death", partial(arrived_or_dead, shop, reader, number))
        assert reader.until_dead() == -signal.SIGKILL, reader.output()
    done = shop.database.execute("SELECT count(*) FROM item")[0][0]
    for statement in STATEMENTS[{1: 1, 2: 2, 4: 3, 5: 4}[done] :]:
        shop.database.execute(statement)
    with ReaderProcess(shop, log=log):
        shop.until_logged(COUNT)
    check(in_log(shop))


def test_a_log_that_was_lost_is_written_again_the_same(shop: SlotSource) -> None:
    with shop.reading():
        write(shop)
        shop.until_logged(COUNT)
    before = in_log(shop)
    check(before)
    shutil.rmtree(shop.settings.log_directory)
    with shop.reading(linger_ms=0):
        shop.until_logged(COUNT)
    assert stable(in_log(shop)) == stable(before)
    changes = [row for row in in_log(shop) if row["action"] == "schema_change"]
    recorded = shop.database.execute(
        "SELECT announced_lsn - '0/0', announced_idx, change, schema FROM walbrook.schema_versions"
        " WHERE version > 1 ORDER BY announced_lsn, announced_idx"
    )
    assert [(int(lsn), idx, change) for lsn, idx, change, _ in recorded] == [
        (row["commit_lsn"], row["commit_idx"], orjson.loads(row["record"])) for row in changes
    ]

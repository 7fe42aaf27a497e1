"""Backfill through the whole service: rows that exist already, while changes flow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.fix_postgres import Database
from tests.service import running

_TABLE = """
CREATE TABLE item (id bigint PRIMARY KEY, note text NOT NULL, at timestamptz DEFAULT now());
INSERT INTO item (id, note) SELECT i, 'row ' || i FROM generate_series(-100, 19899) AS i
"""


def messages(path: Path) -> Iterator[dict[str, object]]:
    for file in sorted(path.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            yield json.loads(line)


def test_existing_rows_reach_a_new_consumer_once(database: Database, tmp_path: Path) -> None:
    database.execute(_TABLE)
    sink = {
        "name": "files",
        "database": "shop",
        "initial_backfill": True,
        "destination": {"type": "file", "path": str(tmp_path / "out")},
    }
    with running(database, tmp_path / "service", [sink]) as service:
        service.until(
            "the backfill", "SELECT state = 'done' FROM walbrook.backfills", timeout_s=120
        )
    found = list(messages(tmp_path / "out"))
    assert {each["action"] for each in found} == {"read"}
    assert sorted(each["record"]["id"] for each in found) == list(range(-100, 19900))  # type: ignore[index]

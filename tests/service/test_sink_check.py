"""A sink that does not fit its tables fails alone, and is served once it fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fix_postgres import Database
from tests.log_pipeline import arrived
from tests.waiting import until
from tests.walbrook_service import Service, running

_FAILED = """
SELECT count(*) = 1 FROM walbrook.consumers
 WHERE name = '{}' AND state = 'failed' AND state_reason LIKE '%{}%'
"""


def sinks() -> list[dict[str, object]]:
    def to_files(name: str) -> dict[str, object]:
        return {"name": name, "destination": {"type": "file", "path": name}}

    hook = {"type": "webhook", "url": "http://127.0.0.1:1/"}
    by_owner = [{"name": "public.item", "group_column_names": ["owner"]}]
    by_time = {"ordering": "event_time", "event_time": {"column": "at"}}
    return [
        to_files("well"),
        {"name": "grouped", "destination": hook, "tables": by_owner},
        {**to_files("timed"), **by_time},
    ]


def until_failed(service: Service, consumer: str, why: str) -> None:
    service.until(f"{consumer} to have failed", _FAILED.format(consumer, why))


@pytest.mark.sinks
def test_a_sink_that_names_a_column_that_its_table_lacks_fails_alone(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    with running(database, tmp_path, sinks()) as service:
        until_failed(service, "grouped", "public.item of database shop has no column owner")
        until_failed(service, "timed", "shows no column at in publication pub")
        database.execute("INSERT INTO item VALUES (1, 'one')")
        until("the other", lambda: [m["record"]["id"] for m in arrived(tmp_path / "well")] == [1])
        database.execute("ALTER TABLE item ADD owner int, ADD at timestamptz DEFAULT now()")
        database.execute("INSERT INTO item VALUES (2, 'two', 1)")
        service.until(
            "both to be served",
            "SELECT count(*) = 2 FROM walbrook.consumers WHERE name = 'timed' AND state = 'live' "
            "OR name = 'grouped' AND state_reason LIKE 'its sink failed%'",
        )

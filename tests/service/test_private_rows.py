"""Values of rows stay where they belong: no log, health event, metric or status quotes one.

A marker value goes through every way in which a change can fail. What failed is on record in full
in ``walbrook.dead_letters``, and only there, beside the rows of the queue themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.waiting import until
from tests.walbrook_service import Service

MARKER = "Gwendolen-4711"
STATUSES = (422, 500, 503)
_HERE = "python:tests.service.test_private_rows"
_SHOWN = (
    "SELECT to_json(h) FROM walbrook.health h",
    "SELECT to_json(e) FROM walbrook.health_events e",
    "SELECT to_json(c) FROM walbrook.consumers c",
    "SELECT to_json(s) FROM walbrook.sources s",
    "SELECT to_json(f) FROM walbrook.feeds f",
    "SELECT to_json(q) FROM walbrook.queues q",
)
_LETTERS = f"""
SELECT DISTINCT consumer FROM walbrook.dead_letters WHERE error LIKE '%{MARKER}%' ORDER BY 1
"""


def raising(rows: pa.RecordBatch) -> pa.Array:
    """A user's function whose error quotes a row."""
    notes = pc.struct_field(rows.column("record"), "note")
    if pc.any(pc.equal(notes, MARKER)).as_py():
        raise ValueError(f"cannot read {MARKER}")
    return notes


class VerboseService(Service):
    """Logs as much as it can."""

    def _configuration(self, sinks: list[dict[str, object]]) -> dict[str, object]:
        config: dict[str, Any] = super()._configuration(sinks)
        config["service"]["log_level"] = "debug"
        config["spark"]["log_level"] = "INFO"
        return config


@contextmanager
def echoing() -> Iterator[dict[int, Endpoint]]:
    """Endpoints that refuse the marker with a status each, and repeat what they were sent."""
    endpoints = {status: Endpoint() for status in STATUSES}
    for status, endpoint in endpoints.items():
        endpoint.faults = _refusing(status)
        endpoint.start()
    try:
        yield endpoints
    finally:
        for endpoint in endpoints.values():
            endpoint.stop()


def _refusing(status: int) -> Any:
    def answer(messages: list[dict[str, object]]) -> Scripted:
        body = orjson.dumps([message["record"] for message in messages])
        return Scripted(status, body=body) if MARKER.encode() in body else Scripted()

    return answer


def _sinks(endpoints: dict[int, Endpoint]) -> list[dict[str, object]]:
    def files(name: str, **given: object) -> dict[str, object]:
        return {"name": name, "destination": {"type": "file", "path": name}, **given}

    def hook(status: int) -> dict[str, object]:
        place = {"type": "webhook", "url": endpoints[status].url, "max_retries": 0}
        retry = {"first_ms": 1, "max_ms": 10}
        name = f"hook_{status}"
        return {"name": name, "destination": place, "retry": retry, "max_deliveries": 2}

    timed = {"column": "note", "type": "iso8601", "idle_timeout": "1s"}
    by_id = {"column": "id", "type": "unix_s", "idle_timeout": "1s"}
    window = {"size": "1s", "aggregates": {"n": "sum(cast(record.note AS int))"}}
    return [
        *(hook(status) for status in STATUSES),
        files("filtered", filter="cast(record.note AS int) > 0"),
        files("function", transform=f"{_HERE}:raising"),
        files("timed", ordering="event_time", event_time=timed),
        files("windowed", ordering="event_time", event_time=by_id, window=window),
    ]


def shown_by(service: Service) -> dict[str, str]:
    """All that the service shows of itself."""
    log = service.log.read_text(errors="replace")
    found = re.search(r"http.listening\s+port=(\d+)", log)
    assert found
    with httpx.Client(base_url=f"http://127.0.0.1:{found[1]}", timeout=10) as client:
        pages = {page: client.get(page).text for page in ("/health", "/metrics")}
    tables = {query: str(service.database.execute(query)) for query in _SHOWN}
    status = service.run("status")
    return {"log": log, "status": status.stdout + status.stderr, **pages, **tables}


@pytest.mark.sinks
def test_a_value_that_fails_is_quoted_by_its_dead_letter_alone(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id bigint PRIMARY KEY, note text)")
    with echoing() as endpoints:
        sinks = _sinks(endpoints)
        service = VerboseService(database, tmp_path / "service", sinks)
        dead = sorted(str(s["name"]) for s in sinks if s["name"] != "hook_503")
        service.start()
        try:
            service.until_serving()
            database.execute(f"INSERT INTO item VALUES (1, '{MARKER}')")
            database.execute("INSERT INTO item VALUES (9, '9')")
            until("dead letters", lambda: [n for (n,) in database.execute(_LETTERS)] == dead, 120)
            failing = "SELECT last_error LIKE '%503%' FROM walbrook.consumers WHERE name='hook_503'"
            service.until("the endpoint that is down to be shown", failing)
            shown = shown_by(service)
            assert service.stop() == 0, service.log_tail()
            shown["log"] = service.log.read_text(errors="replace")
        finally:
            service.kill()
    quoting = {
        where: [line[:300] for line in text.splitlines() if MARKER in line]
        for where, text in shown.items()
        if MARKER in text
    }
    assert not quoting
    for consumer in dead:
        assert consumer in shown["/health"]

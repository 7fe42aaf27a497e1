"""A source or a sink that fails, fails alone: the rest of the service goes on and says so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import yaml
from psycopg.conninfo import make_conninfo

from cdc.config import load
from cdc.service.process.prepare import prepare_database, prepare_state
from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.merged_service import MergedService
from tests.proxy import Proxy
from tests.waiting import until
from tests.walbrook_service import _url


def sink(name: str, database: str, *tables: str) -> dict[str, object]:
    source = {"source": {"include_tables": list(tables)}} if tables else {}
    destination = {"type": "file", "path": f"out/{name}"}
    return {"name": name, "database": database, **source, "destination": destination}


class Shops(MergedService):
    """The depot is reached through a proxy."""

    def delivered(self, name: str) -> str:
        files = (self.directory / "out" / name).glob("*.jsonl")
        return "".join(file.read_text() for file in files)

    def health(self) -> tuple[int, dict[str, Any]]:
        port = re.findall(r"http.listening\s.*port=(\d+)", self.log.read_text())[-1]
        answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=10)
        return answer.status_code, answer.json()

    def complaints(self) -> str:
        return "\n".join(self.health()[1]["complaints"])

    def until_complaint(self, text: str) -> None:
        until(text, lambda: text in self.complaints(), 60)

    def until_delivered(self, name: str, text: str) -> None:
        until(f"{text} at {name}", lambda: text in self.delivered(name), 60)


@pytest.mark.sinks
def test_a_source_or_a_sink_that_fails_leaves_all_others_served(
    database: Database, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    nowhere = make_conninfo(database.dsn, host="127.0.0.1", port="1")
    with (
        fresh_database(postgres_server.dsn) as depot,
        Proxy(nowhere) as proxy,
    ):
        database.execute(
            "CREATE TABLE item (id int PRIMARY KEY); CREATE TABLE old (id int PRIMARY KEY)"
        )
        depot.execute("CREATE TABLE part (id int PRIMARY KEY)")
        sinks = [
            sink("all", "shop"),
            sink("renamed", "shop", "public.item", "public.old"),
            sink("behind", "shop"),
            sink("parts", "depot"),
        ]
        service = Shops(database, depot, tmp_path, sinks)
        settings = yaml.safe_load(service.config.read_text())
        settings["databases"][1]["url"] = _url(proxy.dsn(depot.dsn))
        service.config.write_text(yaml.safe_dump(settings))

        # The shop was served before; meanwhile a table was renamed, and the log has moved on.
        config = load(service.config)
        prepare_state(config)
        prepare_database(config, config.database("shop"))
        database.execute("ALTER TABLE old RENAME TO new")
        database.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/1' WHERE name = 'behind'")
        service.start()
        try:
            served_while_others_fail(service)
            proxy.retarget(depot.dsn)
            served_once_it_answers(service, depot)
            served_while_a_slot_is_lost(service, depot)
            assert service.stop() == 0
        finally:
            service.kill()


def served_while_others_fail(service: Shops) -> None:
    service.until(
        "the reader of the shop",
        "SELECT state = 'streaming' FROM walbrook.sources WHERE name = 'shop'",
    )
    service.database.execute("INSERT INTO item VALUES (1)")
    for name in ("all", "renamed"):
        service.until_delivered(name, '"id":1')
    expected = (
        "reader depot does not run",
        "the reader of depot is stopped: database depot cannot be reached",
        "deliveries to behind fail",
        "renamed: renamed asks for what the source does not publish: The table public.old does",
    )
    for text in expected:
        service.until_complaint(text)
    rows = service.database.execute(
        "SELECT source, consumer, kind FROM walbrook.health WHERE severity = 'error' ORDER BY kind"
    )
    assert rows == [("depot", None, "source_not_ready"), ("shop", "renamed", "tables_missing")]


def served_once_it_answers(service: Shops, depot: Database) -> None:
    service.until(
        "the reader of the depot",
        "SELECT state = 'streaming' FROM walbrook.sources WHERE name = 'depot'",
    )
    depot.execute("INSERT INTO part VALUES (7)")
    service.until_delivered("parts", '"id":7')
    assert "depot" not in service.complaints()


def served_while_a_slot_is_lost(service: Shops, depot: Database) -> None:
    slot = f"slot_{depot.name}"
    until("the slot to be dropped", lambda: _dropped(depot, slot))
    service.until_complaint("replication slot")
    service.database.execute("INSERT INTO item VALUES (2)")
    service.until_delivered("all", '"id":2')
    state = "SELECT state, last_error LIKE '%no longer exists%' FROM walbrook.sources "
    rows = service.database.execute(state + "WHERE name = 'depot'")
    assert rows == [("stopped", True)]


def _dropped(database: Database, slot: str) -> bool:
    database.execute(
        "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots "
        f"WHERE slot_name = '{slot}' AND active_pid IS NOT NULL"
    )
    try:
        database.execute(f"SELECT pg_drop_replication_slot('{slot}')")
    except psycopg.errors.ObjectInUse:
        return False
    return True

"""A pull consumer of the whole service, over SQL and HTTP, across a restart; and its page."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx
import orjson
import pytest

from tests.fix_postgres import Database
from tests.pull_queue import Puller
from tests.service import ROOT, Service, running
from tests.waiting import until

PAGE = ROOT / "docs" / "pull.md"


@pytest.mark.timeout(400)
def test_messages_are_pulled_from_the_running_service_and_from_the_next(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, total numeric)")
    sinks: list[dict[str, object]] = [
        {
            "name": "jobs",
            "actions": ["insert", "update", "truncate"],
            "destination": {"type": "pull"},
        }
    ]
    with running(database, tmp_path / "service", sinks) as service:
        database.execute("INSERT INTO item SELECT n, n + 0.10 FROM generate_series(1, 5) n")
        puller = Puller(database)
        url = f"http://127.0.0.1:{_port(service)}/api/consumers/jobs"
        body = {"batch_size": 2, "wait_s": 60, "holder": "over http"}
        answer = until("the first", lambda: httpx.post(f"{url}/receive", json=body, timeout=90))
        first = answer.json()["messages"]
        assert [each["message"]["record"]["id"] for each in first] == [1, 2]
        assert '"total":1.10' in answer.text
        ids = [each["ack_id"] for each in first]
        assert httpx.post(f"{url}/ack", json={"ack_ids": ids}).json() == {"acked": 2}

        database.execute("UPDATE item SET total = 7 WHERE id = 3")
        database.execute("INSERT INTO item VALUES (6, 6)")
        service.until_settled()
        third = puller.receive(1)
        assert third[0].message["record"]["id"] == 3
        others = puller.receive()
        assert [each.message["record"]["id"] for each in others] == [4, 5, 6]
        puller.nack(others, delay="0")
        puller.ack(third)
        assert service.stop() == 0

        service.start()
        service.until_serving()
        database.execute("TRUNCATE item")
        service.until_settled()
        rest = puller.receive()
        assert [(each.action, each.deliveries) for each in rest] == [
            ("insert", 2), ("insert", 2), ("update", 1), ("insert", 2), ("truncate", 1),
        ]  # fmt: skip
        assert puller.ack(rest) == (5, [])
        assert puller.rows("SELECT FROM walbrook.records") == []

        _run_the_page(database, service)
        puller.close()


def _run_the_page(database: Database, service: Service) -> None:
    """Every snippet of docs/pull.md as it stands, but for the addresses."""
    text = PAGE.read_text(encoding="utf-8")
    snippets = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    assert {kind for kind, _ in snippets} == {"yaml", "sql", "python", "sh", "json"}
    address = f"127.0.0.1:{_port(service)}"
    for kind, snippet in snippets:
        database.execute("INSERT INTO item SELECT coalesce(max(id), 0) + 1, 1 FROM item")
        service.until_settled()
        if kind == "sql":
            database.execute(snippet)
        elif kind == "python":
            names: dict[str, object] = {}
            exec(snippet.replace('"dbname=shop"', repr(database.dsn)), names)
            assert names["fetched"]
        elif kind == "sh":
            for line in snippet.splitlines():
                command = line.replace("127.0.0.1:7376", address)
                done = subprocess.run(command, shell=True, check=True, capture_output=True)
                assert "error" not in orjson.loads(done.stdout)


def _port(service: Service) -> int:
    found = re.findall(r"http\.listening.*?port=(\d+)", _plain(service))
    return int(found[-1])


def _plain(service: Service) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", service.log.read_text(errors="replace"))

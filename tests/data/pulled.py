"""A pull consumer of the whole service, over SQL and HTTP, across a restart; and its page."""

from __future__ import annotations

import re
import subprocess

import httpx
import orjson

from tests.fix_postgres import Database
from tests.pull_queue import Puller
from tests.waiting import until
from tests.walbrook_service import ROOT, Service

PAGE = ROOT / "docs" / "pull.md"


class Pulled:
    """The consumer ``jobs`` of the table ``job``."""

    def __init__(self, database: Database) -> None:
        database.execute("CREATE TABLE job (id int PRIMARY KEY, total numeric)")
        self._database = database
        self.sinks: list[dict[str, object]] = [
            {
                "name": "jobs",
                "actions": ["insert", "update", "truncate"],
                "source": {"include_tables": ["public.job"]},
                "destination": {"type": "pull"},
            }
        ]

    def check_before(self, service: Service) -> None:
        self._database.execute("INSERT INTO job SELECT n, n + 0.10 FROM generate_series(1, 5) n")
        puller = Puller(service.state)
        url = f"http://127.0.0.1:{service.http_port()}/api/consumers/jobs"
        body = {"batch_size": 2, "wait_s": 60, "holder": "over http"}
        answer = until("the first", lambda: httpx.post(f"{url}/receive", json=body, timeout=90))
        first = answer.json()["messages"]
        assert [each["message"]["record"]["id"] for each in first] == [1, 2]
        assert '"total":1.10' in answer.text
        ids = [each["ack_id"] for each in first]
        assert httpx.post(f"{url}/ack", json={"ack_ids": ids}).json() == {"acked": 2}

        self._database.execute("UPDATE job SET total = 7 WHERE id = 3")
        self._database.execute("INSERT INTO job VALUES (6, 6)")
        service.until_settled(only=["jobs"])
        third = puller.receive(1)
        assert third[0].message["record"]["id"] == 3
        others = puller.receive()
        assert [each.message["record"]["id"] for each in others] == [4, 5, 6]
        puller.nack(others, delay="0")
        puller.ack(third)
        puller.close()

    def check_after(self, service: Service) -> None:
        """In the next run of the service."""
        puller = Puller(service.state)
        self._database.execute("TRUNCATE job")
        service.until_settled(only=["jobs"])
        rest = puller.receive()
        assert [(each.action, each.deliveries) for each in rest] == [
            ("insert", 2), ("insert", 2), ("update", 1), ("insert", 2), ("truncate", 1),
        ]  # fmt: skip
        assert puller.ack(rest) == (5, [])
        assert puller.rows("SELECT FROM walbrook.pull_messages") == []
        _run_the_page(service)
        puller.close()


def _run_the_page(service: Service) -> None:
    """Every snippet of docs/pull.md as it stands, but for addresses and the consumer's number."""
    text = PAGE.read_text(encoding="utf-8")
    snippets = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    assert {kind for kind, _ in snippets} == {"yaml", "sql", "python", "sh", "json"}
    address = f"127.0.0.1:{service.http_port()}"
    ((number,),) = service.state.execute("SELECT id FROM walbrook.consumers WHERE name = 'jobs'")
    for kind, snippet in snippets:
        service.database.execute("INSERT INTO job SELECT coalesce(max(id), 0) + 1, 1 FROM job")
        service.until_settled(only=["jobs"])
        if kind == "sql":
            service.state.execute(snippet)
        elif kind == "python":
            names: dict[str, object] = {}
            exec(snippet.replace('"dbname=shop"', repr(service.state.dsn)), names)
            assert names["fetched"]
        elif kind == "sh":
            for line in snippet.splitlines():
                command = line.replace("127.0.0.1:7376", address).replace('"1-1-', f'"{number}-1-')
                done = subprocess.run(command, shell=True, check=True, capture_output=True)
                assert "error" not in orjson.loads(done.stdout)

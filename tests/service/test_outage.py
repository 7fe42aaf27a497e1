"""One of five sinks hangs: nobody else notices for long, and it comes back by itself."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
import redis

from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.waiting import until
from tests.walbrook_service import Service

KEYS, ROUNDS = 50, 8
WITHIN_S = 15.0  # a change is everywhere else, and confirmed: much longer than it should take
Versions = dict[int, list[int]]
"""The versions of each key in the order they came."""


def whole_lines(directory: Path) -> list[bytes]:
    """What a file sink has written; not what it is just writing."""
    texts = [path.read_bytes() for path in sorted(directory.glob("changes-*.jsonl"))]
    return [line for text in texts for line in text[: text.rfind(b"\n") + 1].splitlines()]


class Stock:
    """A table whose rows all get their next version in each round, and the five who hear of it."""

    def __init__(self, service: Service, down: Endpoint, hook: Endpoint, client: redis.Redis):
        self.service, self.database = service, service.database
        self._folder = service.directory
        self._down, self._hook, self._client = down, hook, client
        self.rounds = 0

    def write(self) -> str:
        """One more version of every key; the answer is an LSN before its commit."""
        self.rounds += 1
        ((lsn,),) = self.database.execute("SELECT pg_current_wal_insert_lsn()::text")
        self.database.execute(
            f"INSERT INTO stock SELECT i, 1 FROM generate_series(1, {KEYS}) i "
            "ON CONFLICT (id) DO UPDATE SET version = stock.version + 1"
        )
        return str(lsn)

    def at(self, sink: str) -> Versions:
        records: list[Any]
        match sink:
            case "down":
                records = [message["record"] for message in self._down.written]
            case "hook":
                records = [message["record"] for message in self._hook.written]
            case "stream":
                entries: Any = self._client.xrange("stock")
                records = [orjson.loads(fields[b"record"]) for _, fields in entries]
            case "lake":
                files = sorted((self._folder / "lake").glob("table=*/**/*.parquet"))
                rows = [
                    pq.read_table(file, columns=["record"], partitioning=None) for file in files
                ]
                records = [orjson.loads(text) for r in rows for text in r["record"].to_pylist()]
            case _:
                records = [
                    orjson.loads(line)["record"] for line in whole_lines(self._folder / "files")
                ]
        found: Versions = defaultdict(list)
        for record in records:
            found[record["id"]].append(record["version"])
        return found

    def until_at(self, *sinks: str) -> None:
        """Until these have had all versions so far, each once and in order."""
        everything = {key: list(range(1, self.rounds + 1)) for key in range(1, KEYS + 1)}
        for sink in sinks:
            until(
                f"round {self.rounds} at {sink}",
                lambda sink=sink: self.at(sink) == everything,  # type: ignore[misc]
                WITHIN_S,
            )

    def until_confirmed_beyond(self, lsn: str) -> None:
        self.service.until(
            f"what follows {lsn} confirmed to Postgres",
            f"SELECT confirmed_flush_lsn > '{lsn}' FROM pg_replication_slots "
            f"WHERE slot_name = '{self.service.slot}'",
            WITHIN_S,
        )

    def until_down_is(self, condition: str) -> None:
        self.service.until(
            f"the sink that hangs to have {condition}",
            f"SELECT {condition} FROM walbrook.consumers WHERE name = 'down'",
            60,
        )


@pytest.fixture
def another_endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    server.start()
    yield server
    server.stop()


@pytest.mark.sinks
def test_while_one_sink_hangs_the_others_go_on_and_it_comes_back_with_everything_in_order(
    database: Database,
    endpoint: Endpoint,
    another_endpoint: Endpoint,
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
) -> None:
    database.execute("CREATE TABLE stock (id int PRIMARY KEY, version int NOT NULL)")
    down = {"type": "webhook", "url": endpoint.url, "timeout_ms": 1000, "max_retries": 1}
    destinations: dict[str, dict[str, object]] = {
        "down": down,
        "hook": {"type": "webhook", "url": another_endpoint.url},
        "stream": {"type": "redis_stream", "url": redis_url, "stream_key": "stock"},
        "lake": {"type": "parquet", "columns": "json", "max_delay_ms": 0, "path": "lake"},
        "files": {"type": "file", "path": "files"},
    }
    others = [name for name in destinations if name != "down"]
    sinks: list[dict[str, object]] = [
        {"name": name, "destination": each} for name, each in destinations.items()
    ]
    service = Service(database, tmp_path / "service", sinks)
    assert service.config.read_text().count("durability") == 0  # the defaults hold the promise
    service.start()
    try:
        service.until_serving()
        stock = Stock(service, endpoint, another_endpoint, redis_client)
        stock.write()
        service.until_settled()
        stock.until_at(*destinations)

        back = threading.Event()
        endpoint.faults = lambda _messages: Scripted(after=back, hang_up=True)
        before = len(endpoint.requests)
        for _ in range(ROUNDS):
            lsn = stock.write()
            stock.until_at(*others)
            stock.until_confirmed_beyond(lsn)
        # By then it is out of the others' way, and is tried again and again.
        stock.until_down_is("breaker <> 'closed' AND state IS DISTINCT FROM 'live'")
        until("another try", lambda: len(endpoint.requests) > before + 2, 30)
        lsn = stock.write()
        stock.until_at(*others)
        stock.until_confirmed_beyond(lsn)
        assert [len(versions) for versions in stock.at("down").values()] == [1] * KEYS
        assert database.execute(
            "SELECT name FROM walbrook.consumers WHERE breaker <> 'closed'"
        ) == [("down",)]

        endpoint.faults = None
        back.set()
        stock.until_down_is("state = 'live' AND breaker = 'closed'")
        stock.write()
        stock.until_at(*destinations)
        assert database.execute("SELECT count(*) FROM walbrook.dead_letters") == [(0,)]
    finally:
        service.kill()

"""Sinks that fail, stall, answer late or half-write, restarts included: nothing is lost.

Three consumers of different health take the same changes: one whose endpoint does everything wrong
that an endpoint can, one behind a connection that is cut and frozen, one that is well. What arrived
is recorded before anything is answered.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
import redis

from tests.checker import SCHEMA, Arrival, Writers, compare
from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.proxy import Proxy
from tests.service import Service, running
from tests.waiting import until

Message = dict[str, Any]
RESTARTS = ["spark_pipeline", None]
FAULTS = {"503", "429", "lost answer", "half", "stall"}


class Trouble:
    """What the bad endpoint does with each request; each message is refused a few times at most."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._refusals: dict[str, int] = {}
        self.over = False
        self.seen: set[str] = set()

    def __call__(self, messages: list[Message]) -> Scripted:
        if self.over:
            return Scripted()
        for message in messages:
            left = self._refusals.setdefault(_key(message), self._chosen())
            if left:
                self._refusals[_key(message)] = left - 1
                self.seen.add("refused")
                return Scripted(self._rng.choice([422, 400, 500]))
        # Each of them soon, then now and then.
        missing = sorted(FAULTS - self.seen)
        often = missing or sorted(FAULTS - {"stall"})
        fault = self._rng.choice([*often, *["none"] * (3 if missing else 60)])
        self.seen.add(fault)
        if fault == "503":
            return Scripted(503)
        if fault == "429":
            return Scripted(429, headers={"Retry-After": "0"})
        if fault == "lost answer":
            return Scripted(hang_up=True, writes=len(messages))
        if fault == "half":
            return Scripted(503, writes=len(messages) // 2)
        if fault == "stall":
            return Scripted(after=threading.Event(), writes=len(messages))
        return Scripted()

    def _chosen(self) -> int:
        """Most messages are taken; a few are refused in some requests before."""
        return self._rng.choices([0, 4, 12], [97, 2, 1])[0]


@pytest.fixture
def bad() -> Iterator[Endpoint]:
    server = Endpoint()
    server._AFTER_MAX_S = 4.0
    server.start()
    yield server
    server.stop()


@pytest.mark.timeout(400)
def test_whatever_sinks_do_nothing_is_lost_reordered_made_up_or_altered(
    database: Database,
    redis_client: redis.Redis,
    redis_url: str,
    endpoint: Endpoint,
    bad: Endpoint,
    tmp_path: Path,
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    bad.faults = trouble = Trouble(seed)
    database.execute(SCHEMA)
    stream = f"faults-{database.name}"
    parts = redis_url.removeprefix("redis://").partition("/")
    host, _, port = parts[0].partition(":")
    with Proxy(f"host={host} port={port}") as wire:
        through = f"redis://127.0.0.1:{wire.port}/{parts[2]}"
        quick = {"first_ms": 50, "max_ms": 500}
        sinks: list[dict[str, object]] = [
            {
                "name": "bad",
                "batch_size": 20,
                "retry": quick,
                "destination": {"type": "webhook", "url": bad.url, "timeout_ms": 2000},
            },
            {
                "name": "cut",
                "destination": {
                    "type": "redis_stream", "url": through, "stream_key": stream,
                    "timeout_ms": 1000,
                },
            },
            {"name": "well", "destination": {"type": "webhook", "url": endpoint.url}},
        ]  # fmt: skip
        with running(database, tmp_path / "service", sinks) as service:
            # The first change warms everything up: what follows meets the trouble as it comes.
            database.execute("INSERT INTO counter VALUES (-1, 1, '', '')")
            _until_more(endpoint, bad, 1)
            with Writers(database, seed=seed, pause_s=0.1) as writers:
                for victim in RESTARTS:
                    _until_more(endpoint, bad, 300)
                    wire.cut()
                    _until_more(endpoint, bad, 100)
                    wire.freeze()
                    _until_more(endpoint, bad, 100)
                    wire.thaw()
                    _until_more(endpoint, bad, rng.randrange(1, 200))
                    service.kill(victim)
                    if victim is None:
                        service.start()
                _until_more(endpoint, bad, 100)
            trouble.over = True
            service.until_settled()
            service.until("empty queues", "SELECT count(*) = 0 FROM walbrook.events")
            _counts_are_right(service)
            assert service.stop() == 0, service.log_tail()

    ledger = writers.ledger()
    arrived = {
        "bad": [_arrival(m["record"]) for m in _upserts(bad.written)],
        "well": [_arrival(m["record"]) for m in _upserts(endpoint.written)],
        "cut": _from_redis(redis_client, stream),
    }
    for sink, arrivals in arrived.items():
        findings = compare(ledger, arrivals)
        print(f"{sink}: {findings.written} written, {findings.duplicates} repeated")
        assert not findings, (sink, seed, findings)
        assert findings.written > 1000
        if sink == "cut":
            assert findings.duplicates == 0, (sink, seed)
    assert {"refused", *FAULTS} <= trouble.seen, seed


def _until_more(well: Endpoint, bad: Endpoint, more: int) -> None:
    """Until so many more messages came to the one that is well, and something to the other."""
    target, requests = len(well.written) + more, len(bad.requests)
    until(f"{target} messages at the one that is well", lambda: len(well.written) >= target, 90)
    until("a request at the bad one", lambda: len(bad.requests) > requests, 90)


def _counts_are_right(service: Service) -> None:
    """Nothing became a dead letter, and every consumer was given the same."""
    rows = service.database.execute("SELECT name, dead FROM walbrook.consumers ORDER BY name")
    assert rows == [("bad", 0), ("cut", 0), ("well", 0)]
    assert service.database.execute("SELECT * FROM walbrook.dead_letters") == []


def _key(message: Message) -> str:
    return str(message["metadata"]["idempotency_key"])


def _upserts(messages: list[Message]) -> list[Message]:
    return [m for m in messages if m["action"] != "delete" and m["record"]["key"] >= 0]


def _arrival(record: Message) -> Arrival:
    return Arrival(int(record["key"]), int(record["n"]), record["payload"], record["digest"])


def _from_redis(client: redis.Redis, stream: str) -> list[Arrival]:
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(stream))
    return [
        _arrival(orjson.loads(fields[b"record"]))
        for _, fields in entries
        if fields[b"action"] != b"delete" and orjson.loads(fields[b"record"])["key"] >= 0
    ]

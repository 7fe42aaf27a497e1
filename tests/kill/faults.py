"""Sinks that fail, stall, answer late or half-write, through restarts: nothing is lost.

Three consumers of different health take the same changes: one whose endpoint does everything wrong
that an endpoint can, one behind a connection that is cut and frozen, one that is well. What arrived
is recorded before anything is answered.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import redis

from tests.checker import Arrival, Writers, compare, schema_of
from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.kill.counters import entries_of
from tests.proxy import Proxy
from tests.waiting import until

TABLE = "slow_counter"
Message = dict[str, Any]
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


class Faults:
    """The three consumers and the writers of their table."""

    def __init__(
        self, database: Database, client: redis.Redis, wire: Proxy, bad: Endpoint, well: Endpoint,
        *, seed: int, redis_number: str,
    ) -> None:  # fmt: skip
        database.execute(schema_of(TABLE))
        self.database, self._client, self._seed = database, client, seed
        self._wire, self._bad, self._well = wire, bad, well
        self._rng = random.Random(seed)
        self._stream = f"faults-{database.name}"
        self._through = f"redis://127.0.0.1:{wire.port}/{redis_number}"
        self.trouble = bad.faults = Trouble(seed)
        self.writers = Writers(database, seed=seed, pause_s=0.1, table=TABLE)

    def sinks(self) -> list[dict[str, object]]:
        only = {"source": {"include_tables": [f"public.{TABLE}"]}}
        stream = {
            "type": "redis_stream", "url": self._through, "stream_key": self._stream,
            "timeout_ms": 1000,
        }  # fmt: skip
        return [
            {
                "name": "bad",
                "batch_size": 20,
                "retry": {"first_ms": 50, "max_ms": 500},
                "destination": {"type": "webhook", "url": self._bad.url, "timeout_ms": 2000},
                **only,
            },
            {"name": "cut", "destination": stream, **only},
            {"name": "well", "destination": {"type": "webhook", "url": self._well.url}, **only},
        ]

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """By the consumer that they are the destination of."""
        return {"bad": self._bad, "well": self._well}

    def warm_up(self) -> None:
        """The first change starts everything: what follows meets the trouble as it comes."""
        self.database.execute(f"INSERT INTO {TABLE} VALUES (-1, 1, '', '')")
        self.until_more(1)

    def disturb(self) -> None:
        """The connection of one is cut, then frozen for a while, at a random moment's distance."""
        self.until_more(300)
        self._wire.cut()
        self.until_more(100)
        self._wire.freeze()
        self.until_more(100)
        self._wire.thaw()
        self.until_more(self._rng.randrange(1, 200))

    def until_more(self, more: int) -> None:
        """Until so many more messages came to the one that is well, and one to the other."""
        target, requests = len(self._well.written) + more, len(self._bad.requests)
        until(f"{target} messages at the well one", lambda: len(self._well.written) >= target, 180)
        until("a request at the bad one", lambda: len(self._bad.requests) > requests, 180)

    def check(self) -> None:
        ledger = self.writers.ledger()
        arrived = {
            "bad": _upserts(self._bad.written),
            "well": _upserts(self._well.written),
            "cut": [one for one in entries_of(self._client, self._stream) if one.key >= 0],
        }
        for sink, arrivals in arrived.items():
            findings = compare(ledger, arrivals)
            print(f"{sink}: {findings.written} written, {findings.duplicates} repeated")
            assert not findings, (sink, self._seed, findings)
            assert findings.written > 1000
            if sink == "cut":
                assert findings.duplicates == 0, (sink, self._seed)
        assert {"refused", *FAULTS} <= self.trouble.seen, self._seed


def _key(message: Message) -> str:
    return str(message["metadata"]["idempotency_key"])


def _upserts(messages: list[Message]) -> list[Arrival]:
    records = [message["record"] for message in messages if message["action"] != "delete"]
    return [Arrival.of(record) for record in records if record["key"] >= 0]

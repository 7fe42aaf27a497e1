"""Counters under load: every committed change arrives in order and once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import cast

import orjson
import redis

from tests.checker import Arrival, Writers, compare, schema_of
from tests.fix_postgres import Database
from tests.log_pipeline import arrived
from tests.waiting import until

TABLE = "counter"


class Counters:
    """A Redis stream and files that take all changes of a table under load."""

    def __init__(
        self, database: Database, client: redis.Redis, redis_url: str, out: Path, seed: int
    ) -> None:
        database.execute(schema_of(TABLE))
        self._client, self._out, self._seed = client, out, seed
        self._rng = random.Random(seed)
        self._stream = f"kill-{database.name}"
        self._url = redis_url
        self.writers = Writers(database, seed=seed, pause_s=0.04, table=TABLE)

    def sinks(self) -> list[dict[str, object]]:
        only = {"source": {"include_tables": [f"public.{TABLE}"]}}
        stream = {"type": "redis_stream", "url": self._url, "stream_key": self._stream}
        return [
            {"name": "entries", "destination": stream, **only},
            {"name": "lines", "destination": {"type": "file", "path": str(self._out)}, **only},
        ]

    def until_random_moment(self) -> None:
        """A random moment of the work, not of the wait for it."""
        target = self._length() + self._rng.randrange(1, 400)
        until(f"{target} entries", lambda: self._length() >= target, 180)

    def check(self) -> None:
        found = {"redis": entries_of(self._client, self._stream), "file": lines_of(self._out)}
        for sink, arrivals in found.items():
            findings = compare(self.writers.ledger(), arrivals)
            assert not findings, (sink, self._seed, findings)
            assert findings.duplicates == 0, (sink, self._seed, findings.duplicates)
            assert findings.written > 100

    def _length(self) -> int:
        return int(str(self._client.xlen(self._stream)))


def entries_of(client: redis.Redis, stream: str) -> list[Arrival]:
    """The inserts and updates in a stream, in order."""
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(stream))
    return [
        Arrival.of(orjson.loads(fields[b"record"]))
        for _, fields in entries
        if fields[b"action"] != b"delete"
    ]


def lines_of(directory: Path) -> list[Arrival]:
    """The inserts and updates in the files of a folder, in order."""
    return [Arrival.of(m["record"]) for m in arrived(directory) if m["action"] != "delete"]

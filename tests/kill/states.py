"""Consumers of one table in every state a worker can be in, and what each of them must have got.

Consumers that are always well, consumers that are paused in turn, a slow one that is behind, two
whose destinations fail or hang, two that are rewound, one in event-time order, one with a filter.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import orjson
import psycopg
import pyarrow.parquet as pq
import redis

from tests.checker import Arrival, Writers, compare, schema_of
from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.log_pipeline import arrived
from tests.proxy import Proxy
from tests.pull_queue import Puller
from tests.waiting import until
from tests.walbrook_service import Service

TABLE = "state_counter"
PAUSED = ("files", "lake", "jobs", "even", "timed", "entries_too")
"""Paused in turn; each is behind for a while when it is resumed."""
WAITING = ("cut", "bad")
REWOUND = ("again", "jobs_again")
ONCE = ("entries", "entries_too", "files", "lake", "even", "timed", "cut", "jobs")
"""Where nothing may arrive twice."""
BY_CURSOR = ("entries", "entries_too", "files", "even", "cut")
"""Where everything arrives in the order of cursors."""

_STATES = "SELECT name, state FROM walbrook.consumers WHERE active"
_PAUSED = "SELECT name FROM walbrook.consumers WHERE paused_at IS NOT NULL ORDER BY name"
_STATES_S = 240.0  # a driver may have to start before, on a busy machine
_SLOW_S = 0.4
_HANGS_S = 3.0
Message = dict[str, Any]
_AS_JSON = {"columns": "json", "max_delay_ms": 0}


@dataclass
class Claimer:
    """Receives and acknowledges everything of one pull consumer, in a thread."""

    database: Database
    consumer: str
    messages: list[Message] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with closing(Puller(self.database, self.consumer)) as puller:
            while not self.over.wait(0.01):
                try:
                    taken = puller.receive(500, wait="200 ms")
                except psycopg.DatabaseError as error:
                    if "is paused" not in str(error):
                        raise
                    continue
                self.messages += [one.message for one in taken]
                if taken:
                    self.refused += puller.ack(taken)[1]


class States:
    """The table under load, its consumers, and their states."""

    def __init__(
        self, database: Database, client: redis.Redis, redis_url: str, directory: Path, seed: int
    ) -> None:
        database.execute(schema_of(TABLE))
        self._database, self._client, self._url = database, client, redis_url
        self._directory, self._seed = directory, seed
        self._rng = random.Random(seed)
        self._rounds = 0
        self.writers = Writers(database, seed=seed, pause_s=0.1, table=TABLE)

    @contextmanager
    def destinations(self) -> Iterator[None]:
        """The servers that the consumers deliver to."""
        address, _, self._number = self._url.removeprefix("redis://").partition("/")
        host, _, port = address.partition(":")
        with ExitStack() as opened:
            self._wire = opened.enter_context(Proxy(f"host={host} port={port}"))
            self._slow, self._bad, self._again = (
                opened.enter_context(Endpoint.running()) for _ in range(3)
            )
            self._bad._AFTER_MAX_S = _HANGS_S
            yield

    def sinks(self) -> list[dict[str, object]]:
        through = f"redis://127.0.0.1:{self._wire.port}/{self._number}"
        quick = {"retry": {"first_ms": 50, "max_ms": 500}}
        timed = {
            "ordering": "event_time",
            "event_time": {
                "column": "commit_timestamp",
                "late_tolerance": "1s",
                "idle_timeout": "1s",
                "late_policy": "drop",
            },
        }
        return [
            self._sink("entries", self._stream("entries", self._url)),
            self._sink("entries_too", self._stream("entries_too", self._url)),
            self._sink("cut", self._stream("cut", through) | {"timeout_ms": 1000}),
            self._sink("files", self._folder("file", "files")),
            self._sink("lake", self._folder("parquet", "lake") | _AS_JSON),
            self._sink("even", self._folder("file", "even"), filter="record.key % 2 = 0"),
            self._sink("timed", self._folder("file", "timed"), **timed),
            self._sink("jobs", {"type": "pull"}),
            self._sink("jobs_again", {"type": "pull"}),
            self._sink("slow", self._hook(self._slow), batch_size=20, partition_count=1),
            self._sink("bad", self._hook(self._bad), **quick),
            self._sink("again", self._hook(self._again)),
        ]

    @contextmanager
    def claimers(self) -> Iterator[None]:
        """Those who fetch what the pull consumers have stored."""
        self._claimers = {name: Claimer(self._database, name) for name in ("jobs", "jobs_again")}
        threads = [threading.Thread(target=each.run) for each in self._claimers.values()]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for each in self._claimers.values():
                each.over.set()
            for thread in threads:
                thread.join(30)

    def until_all_states(self, service: Service) -> str:
        """Bring one consumer into each state, up to a random moment; returns who is in which."""
        self.heal()
        service.until("nobody to be left paused", f"SELECT count(*) = 0 FROM ({_PAUSED}) p")
        paused = PAUSED[(self._seed + self._rounds) % len(PAUSED)]
        waiting = WAITING[self._rounds % len(WAITING)]
        rewound = REWOUND[self._rng.randrange(2)]
        self._rounds += 1
        self._call("pause", "slow")
        self._call("pause", paused)
        self._spoil(waiting)
        self._until_states(service, {"slow": "paused", paused: "paused", waiting: "waiting"})
        self._until_more(self._rng.randrange(100, 300))
        self._slow.takes_s = _SLOW_S
        self._call("resume", "slow")
        states = {"slow": "catching_up", paused: "paused", waiting: "waiting", "entries": "live"}
        self._until_states(service, states)
        self._rewind(rewound)
        self._until_more(self._rng.randrange(1, 100))
        return f"live entries, behind slow, waiting {waiting}, paused {paused}, rewound {rewound}"

    def heal(self) -> None:
        """Every destination is well, and nobody is paused."""
        self._slow.takes_s = 0.0
        self._bad.faults = None
        self._wire.thaw()
        for (name,) in self._database.execute(_PAUSED):
            self._call("resume", name)

    def until_drained(self, service: Service) -> None:
        """Until all is delivered that is not held back in event-time order."""
        service.until_settled(180, besides="timed")
        for table in ("events", "pull_messages"):
            service.until(f"no {table}", f"SELECT count(*) = 0 FROM walbrook.{table}")
        assert service.database.execute("SELECT * FROM walbrook.dead_letters") == []
        assert service.database.execute("SELECT * FROM walbrook.gaps") == []

    def check(self) -> None:
        """Hold what came to each consumer against what was written."""
        ledger = self.writers.ledger()
        even = {at: text for at, text in ledger.items() if at[0] % 2 == 0}
        expected = {_cursor(message) for message in self._arrived("entries")}
        wrong: list[tuple[str, object]] = []
        for name in [str(sink["name"]) for sink in self.sinks()]:
            messages = self._arrived(name)
            upserts = [Arrival.of(m["record"]) for m in messages if m["action"] != "delete"]
            findings = compare(even if name == "even" else ledger, upserts)
            cursors = [_cursor(message) for message in messages]
            repeated = len(cursors) - len(set(cursors))
            print(
                f"{name}: {len(messages)} messages, lost {len(findings.lost)}, "
                f"out of order {len(findings.reordered)}, repeated {repeated}"
            )
            if findings or not upserts:
                wrong.append((name, findings))
            if name in ONCE and repeated:
                wrong.append((name, f"{repeated} came twice"))
            if name in BY_CURSOR and any(one >= other for one, other in pairwise(cursors)):
                wrong.append((name, "it is not in the order of cursors"))
            if name != "even" and set(cursors) != expected:
                differ = sorted(set(cursors) ^ expected)
                wrong.append((name, f"{len(differ)} changes differ from entries: {differ[:5]}"))
            if _idempotency_keys(messages) != len(set(cursors)):
                wrong.append((name, "a repeat has another idempotency key"))
        if self._claimers["jobs"].refused:
            wrong.append(("jobs", "what was handed out could not be acknowledged"))
        assert not wrong, (self._seed, wrong)

    def _until_states(self, service: Service, wanted: dict[str, str]) -> None:
        def differ() -> dict[str, object]:
            found = dict(self._database.execute(_STATES))
            return {name: found[name] for name, state in wanted.items() if found[name] != state}

        try:
            until(f"states {wanted}", lambda: not differ(), _STATES_S)
        except AssertionError as error:
            raise AssertionError(f"{error}, but {differ()}\n{service.log_tail()}") from None

    def _until_more(self, more: int) -> None:
        """Until so many more entries have come to one that is always well."""
        target = self._length() + more
        until(f"{target} entries", lambda: self._length() >= target, 180)

    def _length(self) -> int:
        return int(str(self._client.xlen(self._key("entries"))))

    def _spoil(self, consumer: str) -> None:
        """Let its destination fail or hang until it is healed."""
        if consumer == "cut":
            self._wire.freeze()
        elif self._rng.random() < 0.5:
            self._bad.faults = lambda _: Scripted(503)
        else:
            self._bad.faults = lambda messages: Scripted(
                after=threading.Event(), hang_up=True, writes=len(messages)
            )

    def _rewind(self, consumer: str) -> None:
        ((earliest,),) = self._database.execute(
            "SELECT earliest_lsn::text || ':' || earliest_idx FROM walbrook.sources"
        )
        self._database.execute(f"SELECT walbrook.rewind('{consumer}', to_cursor => '{earliest}')")

    def _call(self, act: str, consumer: str) -> None:
        self._database.execute(f"SELECT walbrook.{act}('{consumer}')")

    def _sink(self, name: str, destination: object, **given: object) -> dict[str, object]:
        source = {"include_tables": [f"public.{TABLE}"]}
        return {"name": name, "source": source, "destination": destination, **given}

    def _stream(self, name: str, url: str) -> dict[str, object]:
        return {"type": "redis_stream", "url": url, "stream_key": self._key(name)}

    def _folder(self, kind: str, name: str) -> dict[str, object]:
        return {"type": kind, "path": str(self._directory / name)}

    def _hook(self, endpoint: Endpoint) -> dict[str, object]:
        return {"type": "webhook", "url": endpoint.url, "timeout_ms": 1000, "max_retries": 0}

    def _key(self, name: str) -> str:
        return f"states-{self._database.name}-{name}"

    def _arrived(self, name: str) -> Sequence[Message]:
        match name:
            case "entries" | "entries_too" | "cut":
                entries = cast(
                    "list[tuple[bytes, dict[bytes, bytes]]]", self._client.xrange(self._key(name))
                )
                return [_of_entry(fields) for _, fields in entries]
            case "lake":
                return _rows_of(self._directory / name)
            case "jobs" | "jobs_again":
                return self._claimers[name].messages
            case "slow" | "bad" | "again":
                hooks = {"slow": self._slow, "bad": self._bad, "again": self._again}
                return hooks[name].written
            case _:
                return arrived(self._directory / name)


def _of_entry(fields: dict[bytes, bytes]) -> Message:
    parts = {name: orjson.loads(fields[name.encode()]) for name in ("record", "metadata")}
    return {"action": fields[b"action"].decode(), **parts}


def _rows_of(lake: Path) -> list[Message]:
    """The rows of a Parquet folder in the order of their cursors; it keeps no order of its own."""
    names = ["commit_lsn", "commit_idx", "action", "record"]
    rows: list[dict[str, Any]] = []
    for file in lake.glob("table=*/**/*.parquet"):
        rows += pq.read_table(file, columns=names, partitioning=None).to_pylist()
    rows.sort(key=lambda row: (row["commit_lsn"], row["commit_idx"]))
    return [
        {"action": row["action"], "record": orjson.loads(row["record"]), "metadata": row}
        for row in rows
    ]


def _cursor(message: Message) -> tuple[int, int]:
    metadata = message["metadata"]
    return int(metadata["commit_lsn"]), int(metadata["commit_idx"])


def _idempotency_keys(messages: Sequence[Message]) -> int:
    """How many different ones there are; of those who show none, as many as cursors."""
    keys = {(_cursor(m), m["metadata"].get("idempotency_key")) for m in messages}
    return len(keys)

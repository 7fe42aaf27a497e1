"""The checker: writers that say what they did, and a comparison with what arrived.

Each writer bumps a counter per key and, in the same transaction, notes ``(key, n, digest)`` in a
ledger outside the publication. Some transactions roll back, some delete a row and insert it again.
Afterwards: lost = ledger − arrived, phantom = arrived − ledger, corrupt = the digest differs,
reordered = a first arrival below the highest seen of its key. Duplicates are counted.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg

from tests.fix_postgres import Database


def schema_of(table: str) -> str:
    """The statements for a table that writers count in, and its ledger."""
    return f"""
CREATE TABLE {table} (key int PRIMARY KEY, n int NOT NULL, payload text NOT NULL, digest text);
CREATE SCHEMA IF NOT EXISTS ledger;
CREATE TABLE ledger.{table} (key int, n int, digest text, PRIMARY KEY (key, n));
"""


SCHEMA = schema_of("counter")

_UPSERT = """
INSERT INTO {table} VALUES (%(k)s, %(n)s, %(p)s, %(d)s)
    ON CONFLICT (key) DO UPDATE SET n = %(n)s, payload = %(p)s, digest = %(d)s
"""


@dataclass(frozen=True)
class Arrival:
    """One insert or update of ``counter`` as a sink got it."""

    key: int
    n: int
    payload: str
    digest: str

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Arrival:
        return cls(
            int(record["key"]), int(record["n"]), str(record["payload"]), str(record["digest"])
        )


@dataclass
class Findings:
    """What the comparison found; everything but ``duplicates`` must be empty, always."""

    written: int = 0
    lost: list[tuple[int, int]] = field(default_factory=list)
    phantom: list[tuple[int, int]] = field(default_factory=list)
    corrupt: list[tuple[int, int]] = field(default_factory=list)
    reordered: list[tuple[int, int]] = field(default_factory=list)
    duplicates: int = 0

    def __bool__(self) -> bool:
        return bool(self.lost or self.phantom or self.corrupt or self.reordered)


def digest(key: int, n: int, payload: str) -> str:
    return hashlib.sha256(f"{key}:{n}:{payload}".encode()).hexdigest()[:16]


def compare(ledger: dict[tuple[int, int], str], arrivals: Iterable[Arrival]) -> Findings:
    """Hold what arrived, in its order, against the ledger."""
    findings = Findings(written=len(ledger))
    seen: Counter[tuple[int, int]] = Counter()
    highest: dict[int, int] = {}
    for arrival in arrivals:
        at = (arrival.key, arrival.n)
        seen[at] += 1
        if at not in ledger:
            findings.phantom.append(at)
        elif not ledger[at] == arrival.digest == digest(arrival.key, arrival.n, arrival.payload):
            findings.corrupt.append(at)
        if seen[at] == 1:
            if arrival.n < highest.get(arrival.key, 0):
                findings.reordered.append(at)
            highest[arrival.key] = max(arrival.n, highest.get(arrival.key, 0))
    findings.lost = sorted(ledger.keys() - seen.keys())
    findings.duplicates = sum(seen.values()) - len(seen)
    return findings


class Writers:
    """Threads that write until stopped; survive nothing but their own rollbacks."""

    def __init__(
        self,
        database: Database,
        *,
        seed: int,
        threads: int = 2,
        keys: int = 20,
        pause_s: float = 0.0025,  # between two transactions of a thread, on average
        table: str = "counter",
    ) -> None:
        self._database = database
        self._pause_s = pause_s
        self._table = table
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(seed + number, number, threads, keys))
            for number in range(threads)
        ]

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        if self._failures:
            raise self._failures[0]

    def ledger(self) -> dict[tuple[int, int], str]:
        rows = self._database.execute(f"SELECT key, n, digest FROM ledger.{self._table}")
        return {(key, n): text for key, n, text in rows}

    def _run(self, seed: int, number: int, threads: int, keys: int) -> None:
        rng = random.Random(seed)
        mine = range(number, keys * threads, threads)
        counts = dict.fromkeys(mine, 0)
        try:
            with self._database.connect() as connection:
                while not self._stop.wait(rng.random() * 2 * self._pause_s):
                    self._transaction(connection, rng, counts)
        except BaseException as error:
            self._failures.append(error)

    def _transaction(
        self,
        connection: psycopg.Connection[tuple[object, ...]],
        rng: random.Random,
        counts: dict[int, int],
    ) -> None:
        chosen = rng.choices(list(counts), k=rng.choice([1, 1, 2, 5, 40]))
        rollback = rng.random() < 0.1
        trial = dict(counts)
        delete = f"DELETE FROM {self._table} WHERE key = %s".encode()
        upsert = _UPSERT.format(table=self._table).encode()
        note = f"INSERT INTO ledger.{self._table} VALUES (%s, %s, %s)".encode()
        with connection.transaction(force_rollback=rollback):
            for key in chosen:
                trial[key] += 1
                payload = "".join(rng.choices('abc "\\\n{}é😀', k=rng.randrange(1, 80)))
                text = digest(key, trial[key], payload)
                if rng.random() < 0.1:
                    connection.execute(delete, (key,))
                given = {"k": key, "n": trial[key], "p": payload, "d": text}
                connection.execute(upsert, given)
                connection.execute(note, (key, trial[key], text))
        if not rollback:
            counts.update(trial)

"""The service delivers to Kafka while processes, the broker and points between are killed.

A sink that delivers exactly once and one that delivers at least once take the same changes. A
reader of committed messages finds every change once and in the order of its key in the first, and
every change at least once, first arrivals in order, in the second.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import orjson
import pytest

from cdc.failpoints import VARIABLE
from tests.checker import Arrival, Writers, compare, schema_of
from tests.fix_kafka import Kafka
from tests.fix_postgres import Database
from tests.waiting import until
from tests.walbrook_service import Service, started

pytestmark = pytest.mark.sinks

TABLE = "counter"
PARTITIONS = 3
POINTS = ("produced", "enclosed", "committed")


class Load:
    """Writers of a table, and a service that delivers its changes to two topics."""

    def __init__(self, database: Database, kafka: Kafka, directory: Path, seed: int) -> None:
        database.execute(schema_of(TABLE))
        self.seed = seed
        self.rng = random.Random(seed)
        self.kafka = kafka
        self.writers = Writers(database, seed=seed, pause_s=0.02, table=TABLE)
        self.service = Service(database, directory, [self._sink(True), self._sink(False)])

    def topic(self, exactly_once: bool) -> str:
        return f"{self.kafka.prefix}.{'once' if exactly_once else 'atleast'}"

    def _sink(self, exactly_once: bool) -> dict[str, object]:
        destination: dict[str, object] = {
            "type": "kafka",
            "bootstrap_servers": [self.kafka.servers],
            "topic": self.topic(exactly_once),
            "exactly_once": exactly_once,
            "create_topics": {"partitions": PARTITIONS},
            "timeout_ms": 5000,
        }
        if exactly_once:
            destination["cursor_topic"] = f"{self.kafka.prefix}.cursor"
        name = "once" if exactly_once else "atleast"
        only = {"include_tables": [f"public.{TABLE}"]}
        return {"name": name, "destination": destination, "source": only}

    def delivered(self) -> int:
        rows = self.service.database.execute(
            "SELECT delivered + absorbed FROM walbrook.consumers WHERE name = 'once'"
        )
        return int(rows[0][0]) if rows else 0

    def until_more(self, count: int) -> None:
        """Until so many changes more than now are settled."""
        target = self.delivered() + count
        until(f"{target} changes", lambda: self.delivered() >= target, 180)

    def arrivals(self, exactly_once: bool) -> list[Arrival]:
        found = []
        for message in self.kafka.read(self.topic(exactly_once)):
            change = orjson.loads(message.value() or b"")
            if change["action"] != "delete":
                found.append(Arrival.of(change["record"]))
        return found

    def check(self) -> None:
        for exactly_once in (True, False):
            findings = compare(self.writers.ledger(), self.arrivals(exactly_once))
            assert not findings, (exactly_once, self.seed, findings)
            assert findings.written > 100
            if exactly_once:
                assert findings.duplicates == 0, (self.seed, findings.duplicates)

    def finish(self) -> None:
        """Settle everything, stop in order, and compare."""
        self.service.until_settled()
        assert self.service.stop() == 0, self.service.log_tail()
        assert self.service.database.execute("SELECT count(*) FROM walbrook.dead_letters") == [(0,)]
        self.check()


@pytest.fixture
def load(database: Database, kafka: Kafka, tmp_path: Path) -> Load:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    return Load(database, kafka, tmp_path / "service", seed)


def _die_at(load: Load, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the service with the point armed until its driver has died there, then kill the rest."""
    load.service.kill()
    monkeypatch.setenv(VARIABLE, f"{point}:{load.rng.randrange(3, 9)}")
    before = _deaths(load.service)
    load.service.start()
    monkeypatch.delenv(VARIABLE)
    until(f"a death at {point}", lambda: _deaths(load.service) > before, 120)
    load.service.kill()
    load.service.start()


def _deaths(service: Service) -> int:
    """How often a process of the service has died of SIGKILL, by its log."""
    return service.log.read_text(errors="replace").count("status=-9")


def test_deaths_between_the_messages_and_their_cursor_lose_and_repeat_nothing(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "enclosed:8")
    with started(load.service):
        monkeypatch.delenv(VARIABLE)
        with load.writers:
            until("a death", lambda: _deaths(load.service) > 0, 120)
            load.service.kill()
            load.service.start()
            load.until_more(100)
            load.kafka.broker.restart(immediate=True)
            load.until_more(100)
        load.finish()


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_ten_random_deaths_of_processes_and_of_the_broker_lose_and_repeat_nothing(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole_service() -> None:
        load.service.kill()
        load.service.start()

    def broker() -> None:
        load.kafka.broker.restart(immediate=True)

    deaths: dict[str, Callable[[], object]] = {
        "the service": whole_service,
        "the driver": lambda: load.service.kill("spark_pipeline"),
        "the broker": broker,
        **{point: partial(_die_at, load, point, monkeypatch) for point in POINTS},
    }
    with started(load.service):
        with load.writers:
            load.until_more(100)
            chosen = [*deaths, *load.rng.choices(list(deaths), k=4)]
            load.rng.shuffle(chosen)
            for who in chosen:
                print(f"death of {who}")
                deaths[who]()
                load.until_more(load.rng.randrange(20, 300))
        load.finish()

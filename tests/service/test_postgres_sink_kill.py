"""The service is killed while it writes to Postgres: every mode has each change once, in order.

It dies at random moments, and at the steps between rows and position; the destination is restarted
as well. All three modes share the kills.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cdc.failpoints import VARIABLE
from demo.embedded_postgres import EmbeddedPostgres
from tests.checker import Arrival, Writers, compare, schema_of
from tests.fix_postgres import Database, PostgresServer, embedded, fresh_database
from tests.waiting import until
from tests.walbrook_service import Service, _url

pytestmark = pytest.mark.timeout(1800)

TABLE = "counter"
COUNT = f"SELECT count(*) FROM history.{TABLE}"
EXISTS = f"SELECT to_regclass('history.{TABLE}') IS NOT NULL"


@dataclass
class Run:
    """A source under load, a service that is killed, and a destination of its own."""

    source: Database
    service: Service
    server: EmbeddedPostgres
    destination: Database
    writers: Writers
    seed: int

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def until_random_moment(self) -> None:
        target = self.arrived() + self.rng.randrange(1, 100)
        until(f"{target} rows", lambda: self.arrived() >= target, 180)

    def arrived(self) -> int:
        try:
            exists = self.destination.execute(EXISTS)[0][0]
            return int(self.destination.execute(COUNT)[0][0]) if exists else 0
        except Exception:  # it is being restarted
            return 0

    def kill(self) -> None:
        self.until_random_moment()
        print(f"killed {self.service.kill()}")
        self.service.start()

    def kill_driver(self) -> None:
        self.until_random_moment()
        print(f"killed the driver {self.service.kill('spark_pipeline')}")

    def restart_destination(self) -> None:
        self.until_random_moment()
        self.server.restart(immediate=True)  # a crash

    def die_at(self, step: str) -> Callable[[], None]:
        """The process that delivers dies at a step, some deliveries after the start."""

        def die() -> None:
            self.until_random_moment()
            self.service.kill()
            said = len(self.service.log.read_text())
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(VARIABLE, f"{step}:{self.rng.randrange(1, 4)}")
                self.service.start()
            # The driver, or a worker of Spark where there is much to deliver.
            until("a death", lambda: "died" in self.service.log.read_text()[said:], 300)
            self.service.kill()
            self.service.start()

        return die

    def check(self) -> None:
        rows = self.source.execute(f"SELECT * FROM {TABLE} ORDER BY key")
        assert self.destination.execute(f"SELECT * FROM mirror.{TABLE} ORDER BY key") == rows
        found = {
            "append": "SELECT to_jsonb(t) FROM history.counter t WHERE walbrook_action <> 'delete' "
            "ORDER BY walbrook_lsn, walbrook_idx",
            "events": "SELECT record FROM public.walbrook_events WHERE action <> 'delete' "
            "ORDER BY commit_lsn, commit_idx",
        }
        for mode, query in found.items():
            arrivals = [Arrival.of(row[0]) for row in self.destination.execute(query)]
            findings = compare(self.writers.ledger(), arrivals)
            assert not findings, (mode, self.seed, findings)
            assert findings.duplicates == 0, (mode, self.seed, findings.duplicates)
            assert findings.written > 100
        generations = "SELECT DISTINCT generation FROM walbrook_sink.positions"
        assert self.destination.execute(generations) == [(1,)]


@contextmanager
def under_load(postgres_server: PostgresServer, directory: Path) -> Iterator[Run]:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    with (
        fresh_database(postgres_server.dsn) as source,
        embedded(directory / "destination", fast=True) as server,
        fresh_database(server.dsn) as destination,
    ):
        source.execute(schema_of(TABLE))
        to = {"type": "postgres", "url": _url(destination.dsn)}
        only = {"source": {"include_tables": [f"public.{TABLE}"]}}
        sinks: list[dict[str, object]] = [
            {"name": "mirror", "destination": {**to, "target_schema": "mirror"}, **only},
            {
                "name": "history",
                "destination": {**to, "mode": "append", "target_schema": "history"},
                **only,
            },
            {"name": "events", "destination": {**to, "mode": "events"}, **only},
        ]
        service = Service(source, directory / "service", sinks)
        writers = Writers(source, seed=seed, pause_s=0.15)
        run = Run(source, service, server, destination, writers, seed)
        service.start()
        try:
            service.until_serving()
            yield run
        finally:
            service.kill()


def finish(run: Run) -> None:
    run.service.until_settled(300)
    for table in ("dead_letters", "gaps"):
        assert run.service.database.execute(f"SELECT * FROM walbrook.{table}") == []
    lost = "SELECT name FROM walbrook.consumers WHERE lost_at IS NOT NULL"
    assert run.service.database.execute(lost) == []
    assert run.service.stop() == 0, run.service.log_tail()
    run.check()


@pytest.mark.chaos
def test_every_mode_has_each_change_once_through_kills_and_a_restart_of_the_destination(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    with under_load(postgres_server, tmp_path) as run:
        with run.writers:
            run.kill()
            run.die_at("applied")()
            run.restart_destination()
        finish(run)


@pytest.mark.chaos
def test_every_mode_has_each_change_once_through_ten_random_kills(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    with under_load(postgres_server, tmp_path) as run:
        faults = [
            *[run.kill] * 3,
            *[run.kill_driver] * 3,
            *[run.restart_destination] * 2,
            *[run.die_at("applied")] * 2,
            *[run.die_at("moved")] * 2,
        ]
        run.rng.shuffle(faults)
        with run.writers:
            for fault in faults:
                fault()
        finish(run)

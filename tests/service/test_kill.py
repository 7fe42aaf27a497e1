"""The service is killed at random moments under load, again and again; every promise is kept.

All parts share one service and its kills: the whole service, its driver, the whole service again.
Readers are killed by test_reader_crash.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from cdc.trace.conclusion import Conclusion
from tests.fix_http import Endpoint
from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.kill import counters, faults, held
from tests.kill.counters import Counters
from tests.kill.faults import Faults
from tests.kill.held import Held
from tests.kill.traces import check_traces
from tests.kill.versions import AFTER, APART, WITHIN, Versions
from tests.proxy import Proxy
from tests.walbrook_service import Service, running

pytestmark = pytest.mark.timeout(900)

MANY_KILLS = ["whole service", "cdc.replication", "spark_pipeline", "whole service"] * 3
FOREVER_S = 4.0  # how long the bad endpoint takes for an answer that never comes


@dataclass(frozen=True)
class Parts:
    counters: Counters
    versions: Versions
    held: Held
    faults: Faults
    config: Path

    def sinks(self) -> list[dict[str, object]]:
        others = [counters.TABLE, faults.TABLE, held.TABLE]
        return [
            *self.counters.sinks(),
            *self.versions.sinks(besides=others),
            *self.held.sinks(),
            *self.faults.sinks(),
        ]


@pytest.fixture(scope="module")
def killed(
    postgres_server: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Parts]:
    """What is left to check after the kills and an orderly stop."""
    seed = _seed()
    directory = tmp_path_factory.mktemp("kill")
    with ExitStack() as open_now:
        database = open_now.enter_context(fresh_database(postgres_server.dsn))
        client = open_now.enter_context(redis.Redis.from_url(redis_url))
        address, _, number = redis_url.removeprefix("redis://").partition("/")
        host, _, port = address.partition(":")
        wire = open_now.enter_context(Proxy(f"host={host} port={port}"))
        slow, bad, well = (open_now.enter_context(Endpoint.running()) for _ in range(3))
        bad._AFTER_MAX_S = FOREVER_S
        parts = Parts(
            Counters(database, client, redis_url, directory / "lines", seed),
            Versions(database, client, redis_url, directory),
            Held(database, slow),
            Faults(database, client, wire, bad, well, seed=seed, redis_number=number),
            directory / "service" / "walbrook.yaml",
        )
        service = open_now.enter_context(running(database, directory / "service", parts.sinks()))
        _kill(service, parts)
        yield parts


def _kill(service: Service, parts: Parts) -> None:
    parts.faults.warm_up()
    with parts.faults.writers:
        with parts.counters.writers:
            parts.counters.until_random_moment()
            parts.versions.execute(APART)
            service.until(
                "the first version",
                "SELECT count(*) > 0 FROM walbrook.schema_versions WHERE table_name = 'item'",
            )
            print(f"killed the service: {service.kill()}")
            service.start()
            parts.faults.disturb()
            parts.counters.until_random_moment()
            parts.versions.execute(WITHIN)
            service.until(
                "a version within the transaction",
                "SELECT count(*) > 0 FROM walbrook.schema_versions WHERE version = 7",
            )
            driver = service.kill("spark_pipeline")
            assert driver
            print(f"killed the driver: {driver}")
            parts.versions.execute(AFTER)
        parts.faults.disturb()
        parts.held.until_under_way()
        print(f"killed the service again: {service.kill()}")
        parts.held.answer()
        service.start()
        parts.faults.until_more(100)
    parts.faults.trouble.over = True
    service.until_settled()
    service.until("empty queues", "SELECT count(*) = 0 FROM walbrook.events")
    assert service.database.execute("SELECT name FROM walbrook.consumers WHERE dead > 0") == []
    assert service.database.execute("SELECT * FROM walbrook.dead_letters") == []
    assert service.stop() == 0, service.log_tail()


def _seed() -> int:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    return seed


def test_every_committed_change_arrives_in_order_and_once_through_kills(killed: Parts) -> None:
    killed.counters.check()


def test_each_row_has_its_version_and_each_change_is_announced_once_through_kills(
    killed: Parts,
) -> None:
    killed.versions.check()


def test_a_service_that_is_killed_in_mid_delivery_repeats_only_the_request_that_was_under_way(
    killed: Parts,
) -> None:
    killed.held.check()


def test_whatever_sinks_do_nothing_is_lost_reordered_made_up_or_altered(killed: Parts) -> None:
    killed.faults.check()


def test_the_trace_of_random_changes_says_what_their_endpoints_saw_through_kills(
    killed: Parts,
) -> None:
    with killed.faults.database.connect() as state:
        ends = killed.faults.endpoints
        conclusions = check_traces(killed.config, state, ends, count=200, seed=_seed())
    assert conclusions == {Conclusion.DELIVERED: 400}


@pytest.mark.chaos
def test_every_committed_change_arrives_in_order_and_once_through_many_kills(
    database: Database, redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    load = Counters(database, redis_client, redis_url, tmp_path / "lines", _seed())
    with running(database, tmp_path / "service", load.sinks()) as service:
        with load.writers:
            for victim in MANY_KILLS:
                load.until_random_moment()
                whole = victim == "whole service"
                stopped = service.kill(None if whole else victim)
                print(f"killed {victim}: {stopped}")
                assert stopped
                if whole:
                    service.start()
        service.until_settled()
        assert service.stop() == 0, service.log_tail()
    load.check()

"""A webhook behind a ledger: crashes, moves and a lost Redis, on a hand-written log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from cdc.config import SinkConfig, WebhookDestination
from cdc.config.secrets import SecretText
from cdc.connection import Connection
from cdc.queue.ledger.open import LedgerAddress
from cdc.state.active_consumers import read_active_consumers
from demo.embedded_redis import EmbeddedRedis
from spark_pipeline.delivery.ledgers import Ledgers
from tests import pgoutput
from tests.conformance.crash import Killed
from tests.fix_http import Endpoint
from tests.fix_ledger import SOURCE, KnownLedger
from tests.fix_postgres import Database
from tests.ledger_rows import ITEM
from tests.log_pipeline import LogPipeline
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

COUNTS = "SELECT delivered, absorbed FROM walbrook.consumers WHERE name = 'hook'"
HEALTH = "SELECT consumer, kind, severity FROM walbrook.health"


class Hooked(LogPipeline):
    """One webhook, ten messages a request."""

    def __init__(
        self, state: Connection, directory: Path, endpoint: Endpoint, ledger: LedgerAddress
    ) -> None:
        self.ledger = ledger
        self._next = 1
        to = WebhookDestination(url=endpoint.url, max_retries=0)
        super().__init__(state, directory, hook={"destination": to, "batch_size": 10})

    def do_without(self) -> None:
        """From the next start on there is no ledger."""
        (sink,) = self.sinks
        plain = sink.destination.model_copy(update={"ledger": False})
        self.sinks = [sink.model_copy(update={"destination": plain})]

    def write_rows(self, rows: int) -> None:
        """One transaction of this many rows, in one batch."""
        numbers = range(self._next, self._next + rows)
        inserts = [pgoutput.insert(1, [str(n), "n"]) for n in numbers]
        self.write(ITEM, *transaction(0x1000 * self._next, *inserts))
        self._next += rows


def ids(endpoint: Endpoint) -> list[int]:
    records: list[Any] = [m["record"] for r in endpoint.accepted for m in r.messages]
    return [record["id"] for record in records]


@pytest.fixture
def in_postgres(database: Database) -> LedgerAddress:
    return LedgerAddress("postgres", SecretText(database.dsn))


@pytest.fixture
def in_redis(redis_client: redis.Redis, redis_url: str) -> LedgerAddress:
    return LedgerAddress("redis", SecretText(redis_url), timeout_s=10)


def die_before_settling(pipeline: LogPipeline, patch: pytest.MonkeyPatch) -> None:
    """Deliver a micro-batch, and die before its transaction."""

    def died(*_given: object, **_named: object) -> None:
        raise Killed

    with patch.context() as within:
        within.setattr("spark_pipeline.workers.settler.settle", died)
        with pytest.raises(Killed):
            pipeline.take()


def test_messages_delivered_before_a_crash_count_as_absorbed_and_are_not_sent_again(
    state: Connection,
    tmp_path: Path,
    endpoint: Endpoint,
    in_postgres: LedgerAddress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = Hooked(state, tmp_path, endpoint, in_postgres)
    pipeline.write_rows(35)
    die_before_settling(pipeline, monkeypatch)
    assert ids(endpoint) == list(range(1, 36))
    assert pipeline.rows("SELECT sum(length(cursors)) FROM walbrook.ledger") == [(35 * 16,)]
    pipeline.write_rows(7)
    pipeline.start()
    pipeline.take()
    assert ids(endpoint) == list(range(1, 43))
    assert pipeline.rows(COUNTS) == [(7, 35)]
    assert pipeline.rows("SELECT count(*) FROM walbrook.ledger") == [(0,)], "all of it is settled"
    assert pipeline.rows(HEALTH) == []
    pipeline.close()


def test_a_sink_that_fails_in_mid_batch_is_sent_only_what_it_lacks(
    state: Connection, tmp_path: Path, endpoint: Endpoint, in_postgres: LedgerAddress
) -> None:
    pipeline = Hooked(state, tmp_path, endpoint, in_postgres)
    pipeline.write_rows(35)
    endpoint.refuses = lambda messages: any(m["record"]["id"] == 17 for m in messages)  # type: ignore[index]
    endpoint.refusal = 503
    with pytest.raises(Exception, match="503"):
        pipeline.take()
    endpoint.refuses = None
    assert pipeline.rows("SELECT count(*) FROM walbrook.ledger") == [(0,)], (
        "what is safe is settled"
    )
    pipeline.start_pipeline_again()
    pipeline.take()
    assert ids(endpoint) == list(range(1, 36))
    pipeline.close()


@pytest.mark.parametrize("place", ["in_postgres", "in_redis"])
def test_messages_delivered_from_the_queue_before_a_crash_are_not_sent_again(
    place: str,
    request: pytest.FixtureRequest,
    state: Connection,
    tmp_path: Path,
    endpoint: Endpoint,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = Hooked(state, tmp_path, endpoint, request.getfixturevalue(place))
    pipeline.settings = replace(pipeline.settings, state_dsn=database.dsn)
    pipeline.write_rows(5)
    endpoint.refuses = lambda messages: any(m["record"]["id"] == 2 for m in messages)  # type: ignore[index]
    pipeline.take()
    endpoint.refuses = None
    state.execute("UPDATE walbrook.events SET due_at = clock_timestamp()")

    def redeliver() -> None:
        pipeline.deliver_due(claims=1)

    def died(*_given: object, **_named: object) -> None:
        raise Killed

    with monkeypatch.context() as within:
        within.setattr("spark_pipeline.workers.retries.settle_claim", died)
        with pytest.raises(Killed):
            redeliver()
    assert ids(endpoint) == [1, 3, 4, 5, 2]
    state.execute("UPDATE walbrook.events SET lease_until = clock_timestamp() - interval '1 s'")
    redeliver()
    assert ids(endpoint) == [1, 3, 4, 5, 2]
    assert pipeline.rows("SELECT count(*) FROM walbrook.events") == [(0,)]
    assert pipeline.rows(COUNTS) == [(4, 1)]
    assert pipeline.rows("SELECT count(*) FROM walbrook.ledger") == [(0,)]
    pipeline.close()


@pytest.mark.parametrize("place", ["in_postgres", "in_redis"])
def test_a_consumer_that_is_moved_back_gets_everything_again(
    place: str,
    request: pytest.FixtureRequest,
    state: Connection,
    tmp_path: Path,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = Hooked(state, tmp_path, endpoint, request.getfixturevalue(place))
    pipeline.write_rows(20)
    pipeline.take()
    pipeline.write_rows(20)
    die_before_settling(pipeline, monkeypatch)
    state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/8', cursor_idx = 0")
    pipeline.start()
    pipeline.take()
    assert ids(endpoint) == [*range(1, 41), *range(1, 41)]
    pipeline.close()


def test_a_consumer_that_is_moved_back_while_it_is_served_gets_everything_again(
    state: Connection, tmp_path: Path, endpoint: Endpoint, in_postgres: LedgerAddress
) -> None:
    pipeline = Hooked(state, tmp_path, endpoint, in_postgres)
    pipeline.write_rows(20)
    pipeline.take()
    pipeline.write_rows(20)
    state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/8', cursor_idx = 0")
    pipeline.take()  # by a worker that has not heard of it, and cannot settle
    assert pipeline.settler.was_moved("hook")
    pipeline.start_pipeline_again()
    pipeline.take()
    assert ids(endpoint) == [*range(1, 41), *range(1, 41)]
    pipeline.close()


def test_without_a_ledger_a_crash_repeats_the_micro_batch(
    state: Connection,
    tmp_path: Path,
    endpoint: Endpoint,
    in_postgres: LedgerAddress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = Hooked(state, tmp_path, endpoint, in_postgres)
    pipeline.do_without()
    pipeline.start()
    pipeline.write_rows(5)
    die_before_settling(pipeline, monkeypatch)
    pipeline.start()
    pipeline.take()
    assert ids(endpoint) == [*range(1, 6), *range(1, 6)]
    assert pipeline.rows(COUNTS) == [(5, 0)]
    pipeline.close()


def test_a_redis_that_is_lost_in_mid_run_costs_repeats_at_most_and_is_reported(
    state: Connection,
    tmp_path: Path,
    endpoint: Endpoint,
    own_redis: EmbeddedRedis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cdc.queue.ledger.redis.PAUSE_S", 0.0)
    monkeypatch.setattr("spark_pipeline.delivery.ledgers._TELL_S", 0.0)
    address = LedgerAddress("redis", SecretText(own_redis.url), timeout_s=5)
    pipeline = Hooked(state, tmp_path, endpoint, address)
    pipeline.write_rows(25)
    die_before_settling(pipeline, monkeypatch)
    pipeline.start()
    pipeline.take()
    assert ids(endpoint) == list(range(1, 26)), "a crash repeats nothing while Redis is there"
    assert pipeline.rows(HEALTH) == []

    own_redis.stop()
    pipeline.write_rows(25)
    pipeline.take()
    assert ids(endpoint) == list(range(1, 51)), "delivery goes on"
    assert pipeline.rows(HEALTH) == [("hook", "ledger_lost", "warning")]
    ((what,),) = pipeline.rows("SELECT what FROM walbrook.health")
    assert "25 messages were delivered without being noted" in what
    pipeline.write_rows(5)
    die_before_settling(pipeline, monkeypatch)
    pipeline.start()
    pipeline.take()
    assert ids(endpoint) == [*range(1, 56), *range(51, 56)], "repeated, and nothing lost"

    own_redis.start()
    pipeline.write_rows(5)
    pipeline.take()
    assert pipeline.rows(HEALTH) == []
    pipeline.write_rows(5)
    die_before_settling(pipeline, monkeypatch)
    pipeline.start()
    pipeline.take()
    assert ids(endpoint)[60:] == list(range(56, 66))
    with redis.Redis.from_url(own_redis.url) as client:
        (key,) = client.keys("walbrook:ledger:*")
        assert int(str(client.zcard(key))) <= 15, "what is settled is trimmed"
    pipeline.close()


def test_a_consumer_without_a_ledger_from_now_on_has_not_lost_it(
    state: Connection,
    tmp_path: Path,
    endpoint: Endpoint,
    own_redis: EmbeddedRedis,
) -> None:
    address = LedgerAddress("redis", SecretText(own_redis.url), timeout_s=5)
    pipeline = Hooked(state, tmp_path, endpoint, address)
    own_redis.stop()
    pipeline.write_rows(5)
    pipeline.take()
    assert pipeline.rows(HEALTH) == [("hook", "ledger_lost", "warning")]
    pipeline.do_without()
    pipeline.start()
    pipeline.write_rows(5)
    pipeline.take()
    assert pipeline.rows(HEALTH) == []
    pipeline.close()


def test_a_consumer_that_is_moved_back_keeps_its_ledgers_name_until_it_joins_again(
    postgres_ledger: KnownLedger, ledger_database: Database
) -> None:
    to = WebhookDestination(url="http://127.0.0.1:1/")
    hook = SinkConfig.model_validate({"name": "orders", "database": SOURCE, "destination": to})
    ledgers = Ledgers(SOURCE, 1, postgres_ledger.address)

    def name() -> str | None:
        place = ledgers.place(hook, None)
        return None if place is None else place.ledger

    with ledger_database.connect() as state:
        ledgers.join(read_active_consumers(state, SOURCE), ["orders", "others"])
        state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/1' WHERE name = 'orders'")
        ledgers.join(read_active_consumers(state, SOURCE), ["others"])
        assert name() == postgres_ledger.name
        ledgers.join(read_active_consumers(state, SOURCE), ["orders"])
        assert name() not in (None, postgres_ledger.name, postgres_ledger.other)

"""Ledgers on real servers: where each is, and a name that it may be used under."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis

from cdc.config.secrets import SecretText
from cdc.queue.ledger.open import LedgerAddress
from cdc.state.active_consumers import read_active_consumers
from cdc.state.positions import register_source
from tests.fix_postgres import Database, PostgresServer, PostgresServers, fresh_database

SOURCE = "shop"


@dataclass(frozen=True)
class KnownLedger:
    """An empty ledger."""

    address: LedgerAddress
    name: str
    other: str  # the name of another one in the same place


@pytest.fixture(scope="session")
def ledger_database(
    postgres_servers: PostgresServers, postgres_server: PostgresServer
) -> Iterator[Database]:
    """A state database; whoever wants a ledger in it has it alone."""
    dsn = postgres_server.dsn
    with fresh_database(dsn, copied=postgres_servers.migrated(dsn)) as made:
        yield made


@pytest.fixture
def postgres_ledger(ledger_database: Database) -> KnownLedger:
    with ledger_database.connect() as state:
        state.execute("DELETE FROM walbrook.sources")
        register_source(
            state,
            name=SOURCE,
            slot="slot",
            publication="pub",
            system_identifier="1",
            slot_lsn=8,
            consumers=["orders", "others"],
        )
        known = read_active_consumers(state, SOURCE).ledgers
    address = LedgerAddress("postgres", SecretText(ledger_database.dsn))
    return KnownLedger(address, known["orders"], known["others"])


@pytest.fixture
def redis_ledger(redis_client: redis.Redis, redis_url: str) -> KnownLedger:
    address = LedgerAddress("redis", SecretText(redis_url), timeout_s=10)
    return KnownLedger(address, str(uuid.uuid4()), str(uuid.uuid4()))


@pytest.fixture(params=["postgres", "redis"])
def known_ledger(request: pytest.FixtureRequest) -> KnownLedger:
    found: KnownLedger = request.getfixturevalue(f"{request.param}_ledger")
    return found

"""The section ``ledger``, and what of it reaches the process that delivers."""

from __future__ import annotations

import pickle

import pytest

from cdc.config import SinkConfig, show
from cdc.queue.ledger.open import LedgerAddress
from spark_pipeline.delivery.ledgers import needs_ledger
from tests.unit.config.config_texts import FILE, databases, read, refusal, sink

HOOK = "destination: {type: webhook, url: 'https://example.com/'%s}"


def one(body: str) -> SinkConfig:
    return read(sink(body)).sinks[0]


def test_the_ledger_is_in_the_state_database_unless_another_place_is_named() -> None:
    config = read(databases() + "state: {url: 'postgres://u:s3cret@db/state'}\n")
    address = LedgerAddress.of(config)
    assert (address.type, address.url.get_secret_value()) == ("postgres", config.state_dsn())
    assert "s3cret" not in repr(address)


def test_a_ledger_in_redis_has_a_url_that_is_secret_and_a_short_timeout() -> None:
    config = read(databases() + "ledger: {type: redis, url: 'redis://u:s3cret@cache:6379/1'}\n")
    address = pickle.loads(pickle.dumps(LedgerAddress.of(config)))
    assert address == LedgerAddress.of(config)
    assert address.url.get_secret_value() == "redis://u:s3cret@cache:6379/1"
    assert (address.type, address.timeout_s) == ("redis", 0.5)
    assert "s3cret" not in repr(config) + repr(address) + show(config)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("{type: redis}", "ledger: needs url with type: redis"),
        ("{url: 'redis://cache'}", "ledger: has a url, which is for type: redis"),
        ("{type: redis, url: 'http://cache'}", "ledger.url: should be a URL such as rediss://"),
        ("{type: kafka}", "ledger.type"),
        ("{type: redis, url: 'redis://cache', timeout_ms: 0}", "ledger.timeout_ms"),
    ],
)
def test_a_url_that_is_no_place_for_a_ledger_is_refused(section: str, says: str) -> None:
    assert says in refusal(databases() + f"ledger: {section}\n")


def test_a_webhook_has_a_ledger_unless_it_is_turned_off_and_the_others_need_none() -> None:
    assert needs_ledger(one(HOOK % ""))
    assert not needs_ledger(one(HOOK % ", ledger: false"))
    assert not needs_ledger(one(FILE))

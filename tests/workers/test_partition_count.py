"""A webhook whose groups are spread over several requests at once, on a hand-written log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc.config import WebhookDestination
from cdc.config.secrets import SecretText
from cdc.connection import Connection
from cdc.queue.ledger.base import Integers
from cdc.queue.ledger.open import LedgerAddress
from cdc.queue.ledger.postgres import PostgresLedger
from sinks.ledgered import NOTED_MESSAGES
from tests import pgoutput
from tests.conformance.crash import Killed
from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.ledger_rows import ITEM
from tests.log_pipeline import LogPipeline
from tests.waiting import until
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

PARTS, PER_REQUEST = 4, 5


class Spread(LogPipeline):
    """One webhook behind a ledger, sent several requests at once."""

    def __init__(
        self, state: Connection, directory: Path, endpoint: Endpoint, database: Database
    ) -> None:
        self.ledger = LedgerAddress("postgres", SecretText(database.dsn))
        to = WebhookDestination(url=endpoint.url, max_retries=0)
        settings = {"destination": to, "batch_size": PER_REQUEST, "partition_count": PARTS}
        super().__init__(state, directory, hook=settings)


@pytest.fixture
def pipeline(
    state: Connection, database: Database, endpoint: Endpoint, tmp_path: Path
) -> Iterator[LogPipeline]:
    made = Spread(state, tmp_path, endpoint, database)
    yield made
    made.close()


def write(pipeline: LogPipeline, keys: int, versions: int) -> None:
    """One transaction: every key in its first version, then every key in its second, and so on."""
    inserts = [
        pgoutput.insert(1, [str(key), str(version)])
        for version in range(versions)
        for key in range(keys)
    ]
    pipeline.write(ITEM, *transaction(0x1000, *inserts))


def versions_by_key(endpoint: Endpoint) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for request in endpoint.accepted:
        messages: list[Any] = request.messages
        for message in messages:
            record = message["record"]
            found.setdefault(record["id"], []).append(int(record["name"]))
    return found


def test_a_slow_endpoint_gets_requests_at_once_and_each_key_in_order(
    pipeline: LogPipeline, endpoint: Endpoint
) -> None:
    keys, versions = 20, 6
    write(pipeline, keys, versions)
    answer = threading.Event()
    endpoint.script.extend([Scripted(after=answer)] * PARTS)
    taking = threading.Thread(target=pipeline.take)
    taking.start()
    try:
        until("requests at once", lambda: len(endpoint.requests) == PARTS)
    finally:
        answer.set()
        taking.join()
    assert versions_by_key(endpoint) == {key: list(range(versions)) for key in range(keys)}
    assert endpoint.connections == PARTS
    assert pipeline.rows("SELECT delivered FROM walbrook.consumers") == [(keys * versions,)]


def test_a_crash_repeats_what_was_under_way_or_not_noted_yet_and_no_more(
    pipeline: LogPipeline, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, notes_before = 600, 3
    write(pipeline, keys, 1)
    noted, notes = PostgresLedger.note, list[int]()

    def dies(
        ledger: PostgresLedger, name: str, lsn: Integers, idx: Integers, *, queued: bool = False
    ) -> None:
        if len(notes) == notes_before:
            raise Killed
        noted(ledger, name, lsn, idx, queued=queued)
        notes.append(len(lsn))

    with monkeypatch.context() as patch:
        patch.setattr(PostgresLedger, "note", dies)
        with pytest.raises(Killed):
            pipeline.take()
    before = sum(len(request.messages) for request in endpoint.accepted)
    pipeline.start()
    pipeline.take()
    arrivals = versions_by_key(endpoint)
    assert set(arrivals) == set(range(keys))
    repeated = sum(len(versions) - 1 for versions in arrivals.values())
    assert repeated == before - sum(notes)
    assert 0 < repeated < PARTS * (NOTED_MESSAGES + PER_REQUEST)

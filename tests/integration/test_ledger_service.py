"""The running service with a webhook: killed in mid-delivery, it repeats one request at most."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fix_http import Endpoint, Received, Scripted
from tests.fix_postgres import Database
from tests.service import running
from tests.waiting import until

ROWS, IN_A_REQUEST, HELD = 1000, 50, 7


def ids(request: Received) -> list[int]:
    records: list[Any] = [message["record"] for message in request.messages]
    return [record["id"] for record in records]


@pytest.mark.timeout(300)
def test_a_service_that_is_killed_in_mid_delivery_repeats_only_the_request_that_was_under_way(
    database: Database, endpoint: Endpoint, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    sinks: list[dict[str, object]] = [
        {
            "name": "hook",
            "batch_size": IN_A_REQUEST,
            "destination": {"type": "webhook", "url": endpoint.url, "timeout_ms": 60000},
        }
    ]
    answered = threading.Event()
    endpoint.script.extend([*[Scripted()] * (HELD - 1), Scripted(after=answered)])
    with running(database, tmp_path / "service", sinks) as service:
        # One transaction and one micro-batch, in which the endpoint has a request and says nothing.
        database.execute(f"INSERT INTO item SELECT generate_series(1, {ROWS})")
        until("the request under way", lambda: len(endpoint.requests) == HELD, 120)
        assert database.execute("SELECT delivered FROM walbrook.consumers") == [(0,)]
        assert database.execute("SELECT count(*) FROM walbrook.ledger") == [(HELD - 1,)]
        service.kill()
        answered.set()
        service.start()
        service.until_settled()

    arrived = Counter(number for request in endpoint.requests for number in ids(request))
    assert sorted(arrived) == list(range(1, ROWS + 1)), "something was lost"
    repeated = sorted(number for number, times in arrived.items() if times > 1)
    assert repeated == ids(endpoint.requests[HELD - 1])
    before = (HELD - 1) * IN_A_REQUEST
    assert database.execute("SELECT delivered, absorbed FROM walbrook.consumers") == [
        (ROWS - before, before)
    ]
    assert database.execute("SELECT count(*) FROM walbrook.ledger") == [(0,)]

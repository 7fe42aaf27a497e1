"""A webhook with a request under way when the service is killed: it alone is repeated.

All that was accepted before is noted by then.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from tests.fix_http import Endpoint, Received, Scripted
from tests.fix_postgres import Database
from tests.waiting import until

TABLE = "parcel"
ROWS, IN_A_REQUEST, HELD = 1000, 50, 7
_COUNTS = "SELECT delivered, absorbed FROM walbrook.consumers WHERE name = 'held'"
_LEDGER = """
SELECT coalesce(sum(length(l.cursors)), 0)::int / 16
  FROM walbrook.ledger l JOIN walbrook.consumers c ON c.ledger = l.ledger
 WHERE c.name = 'held'
"""


class Held:
    """An endpoint that has a request and says nothing."""

    def __init__(self, database: Database, endpoint: Endpoint) -> None:
        database.execute(f"CREATE TABLE {TABLE} (id int PRIMARY KEY)")
        self._database, self._endpoint = database, endpoint
        self._answered = threading.Event()
        self._absorbed = 0  # in the ledger, not settled, when the service is killed
        endpoint.script.extend([*[Scripted()] * (HELD - 1), Scripted(after=self._answered)])

    def sinks(self) -> list[dict[str, object]]:
        hook = {"type": "webhook", "url": self._endpoint.url, "timeout_ms": 60000}
        return [
            {
                "name": "held",
                "batch_size": IN_A_REQUEST,
                "partition_count": 1,
                "source": {"include_tables": [f"public.{TABLE}"]},
                "destination": hook,
            }
        ]

    def until_under_way(self) -> None:
        """One transaction, in whose delivery the endpoint has a request and says nothing.

        The reader may have cut the transaction into batches: then the first of them are settled.
        """
        self._database.execute(f"INSERT INTO {TABLE} SELECT generate_series(1, {ROWS})")
        until("the request under way", lambda: len(self._endpoint.requests) == HELD, 120)
        until("the note of all that was accepted", self._is_noted)

    def _is_noted(self) -> bool:
        accepted = [_ids(request) for request in self._endpoint.requests[: HELD - 1]]
        ((settled, absorbed),) = self._database.execute(_COUNTS)
        assert absorbed == 0
        self._absorbed = sum(len(ids) for ids in accepted if ids[-1] > settled)
        return self._database.execute(_LEDGER) == [(self._absorbed,)]

    def answer(self) -> None:
        self._answered.set()

    def check(self) -> None:
        requests = self._endpoint.requests
        arrived = Counter(number for request in requests for number in _ids(request))
        assert sorted(arrived) == list(range(1, ROWS + 1)), "something was lost"
        repeated = sorted(number for number, times in arrived.items() if times > 1)
        assert repeated == _ids(requests[HELD - 1])
        assert self._database.execute(_COUNTS) == [(ROWS - self._absorbed, self._absorbed)]
        assert self._database.execute(_LEDGER) == [(0,)]


def _ids(request: Received) -> list[int]:
    records: list[Any] = [message["record"] for message in request.messages]
    return [record["id"] for record in records]

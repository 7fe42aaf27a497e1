"""The checker counts because it catches builds that are broken on purpose."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.state import positions
from cdc.state.blocked_groups import BlockedGroups
from spark_pipeline.workers import settler
from tests import pgoutput
from tests.checker import Arrival, Findings, compare, digest
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.log_pipeline import LogPipeline
from tests.waiting import until
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

COUNTER = pgoutput.relation(1, "public", "counter", [("key", 23, True), ("n", 23), ("d", 25)])


@pytest.fixture
def findings(
    state: Connection, database: Database, endpoint: Endpoint, tmp_path: Path
) -> Callable[[], Findings]:
    """A run over an endpoint that refuses some messages for a while, with restarts."""

    class Pipeline(LogPipeline):
        state_dsn = database.dsn

    def run() -> Findings:
        rng = random.Random(7)
        hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0}
        quick = {"first_ms": 1, "max_ms": 5}
        pipeline = Pipeline(state, tmp_path, hook={"destination": hook, "retry": quick})
        counts = dict.fromkeys(range(5), 0)
        ledger: dict[tuple[int, int], str] = {}
        refused: dict[tuple[int, int], int] = {}

        def refuses(messages: list[dict[str, Any]]) -> bool:
            for message in messages:
                at = (message["record"]["key"], message["record"]["n"])
                if refused.setdefault(at, rng.choices([0, 12], [9, 1])[0]):
                    refused[at] -= 1
                    return True
            return False

        endpoint.refuses = refuses
        for number in range(1, 13):
            rows = []
            for _ in range(rng.randrange(1, 12)):
                key = rng.randrange(5)
                counts[key] += 1
                ledger[key, counts[key]] = digest(key, counts[key], "p")
                rows.append([str(key), str(counts[key]), ledger[key, counts[key]]])
            inserts = [pgoutput.insert(1, row) for row in rows]
            # A transaction may be cut by a batch, and a micro-batch may end there.
            whole = transaction(0x100 * number, *inserts)
            cut = rng.randrange(1, len(whole))
            for piece in ([COUNTER, *whole[:cut]], whole[cut:]):
                if pipeline.write_if_any(*piece):
                    pipeline.take()
            _redeliver(pipeline)
            if not number % 4:
                pipeline.start()
        until("an empty queue", lambda: _redeliver(pipeline))
        pipeline.close()
        arrivals = [
            Arrival(m["record"]["key"], m["record"]["n"], "p", m["record"]["d"])  # type: ignore[index]
            for m in endpoint.written
        ]
        return compare(ledger, arrivals)

    return run


def _redeliver(pipeline: LogPipeline) -> bool:
    pipeline.deliver_due(claims=1)
    return not pipeline.rows("SELECT 1 FROM walbrook.events")


def test_as_it_is_built_the_checker_finds_nothing(findings: Callable[[], Findings]) -> None:
    found = findings()
    assert not found
    assert found.written > 50


def test_a_retry_out_of_order_is_caught(
    findings: Callable[[], Findings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockedGroups, "holds", lambda _self, rows: np.zeros(rows.num_rows, bool))
    assert findings().reordered


def test_a_cursor_without_its_index_is_caught(
    findings: Callable[[], Findings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction counts as settled with its first part."""

    def settle(connection: Connection, **given: Any) -> None:
        given["consumers"] = {
            name: replace(each, cursor=Cursor(each.cursor.lsn + 1, 0))
            for name, each in given["consumers"].items()
        }
        positions.settle(connection, **given)

    monkeypatch.setattr(settler, "settle", settle)
    assert findings().lost


def test_queued_messages_and_never_stored_are_caught(
    findings: Callable[[], Findings], monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(connection: Connection, **given: Any) -> None:
        given["consumers"] = {
            name: replace(each, queued=None) for name, each in given["consumers"].items()
        }
        positions.settle(connection, **given)

    monkeypatch.setattr(settler, "settle", settle)
    assert findings().lost

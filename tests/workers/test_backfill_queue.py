"""Existing rows through the retry queue, the dead letters and a pull consumer, like any message."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config import SinkConfig
from cdc.queue.pull_consumers import register_pulls
from spark_pipeline.workers.settler import Settler
from tests.backfill_rig import SOURCE, Rig
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.waiting import until

pytestmark = pytest.mark.migrated

_ITEMS = """
CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL);
INSERT INTO item SELECT i, 1 FROM generate_series(1, 30) AS i
"""


def _ids(endpoint: Endpoint) -> list[int]:
    return [message["record"]["id"] for message in endpoint.written]  # type: ignore[index]


def test_a_row_that_is_refused_waits_and_holds_back_only_changes_of_itself(
    database: Database, tmp_path: Path, endpoint: Endpoint
) -> None:
    database.execute(_ITEMS)
    hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0, "batch": False}
    rig = Rig(
        database,
        tmp_path,
        sink={
            "destination": hook,
            "retry": {"first_ms": 50, "max_ms": 100},
            "max_deliveries": 1000,
        },
    )
    endpoint.refuses = lambda messages: any(m["record"]["id"] == 7 for m in messages)  # type: ignore[index]
    with rig.running():
        rig.backfilled("item")
        database.execute("UPDATE item SET version = 2 WHERE id IN (7, 8)")
        rig.until_delivered()
        assert 7 not in _ids(endpoint)
        assert _ids(endpoint).count(8) == 2
        endpoint.refuses = lambda _messages: False
        until("the refused row and its change", lambda: _ids(endpoint).count(7) == 2)
    versions = [
        message["record"]["version"]  # type: ignore[index]
        for message in endpoint.written
        if message["record"]["id"] == 7  # type: ignore[index]
    ]
    assert versions == [1, 2]
    assert sorted(set(_ids(endpoint))) == list(range(1, 31))


def test_a_row_that_is_refused_too_often_is_a_dead_letter(
    database: Database, tmp_path: Path, endpoint: Endpoint
) -> None:
    database.execute(_ITEMS)
    hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0, "batch": False}
    rig = Rig(database, tmp_path, sink={"destination": hook, "max_deliveries": 1})
    endpoint.refuses = lambda messages: any(m["record"]["id"] == 7 for m in messages)  # type: ignore[index]
    with rig.running():
        rig.backfilled("item")
    assert rig.rows("SELECT action, table_name FROM walbrook.dead_letters") == [("read", "item")]
    assert len(set(_ids(endpoint))) == 29


def test_rows_that_a_destination_without_a_position_has_accepted_are_left_out_of_a_repeat(
    database: Database, tmp_path: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends before they are settled; the ledger has the cursors that they get again."""
    database.execute(_ITEMS)
    hook = {"type": "webhook", "url": endpoint.url, "batch": False}
    rig = Rig(database, tmp_path, sink={"destination": hook})
    with rig.source.reading():
        with monkeypatch.context() as unsettled, rig.serving():
            unsettled.setattr(Settler, "report", lambda *_given, **_named: None)
            backfill = rig.start("item")
            until("all rows", lambda: set(_ids(endpoint)) == set(range(1, 31)))
            noted = "SELECT count(*) FROM walbrook.ledger"
            until("the ledger", lambda: rig.rows(noted)[0][0] > 0)
        with rig.serving():
            rig.until_state(backfill)
    assert sorted(_ids(endpoint)) == list(range(1, 31))
    keys = [message["metadata"]["idempotency_key"] for message in endpoint.written]  # type: ignore[index]
    assert len(set(keys)) == 30


def test_a_pull_consumer_receives_existing_rows(database: Database, tmp_path: Path) -> None:
    database.execute(_ITEMS)
    rig = Rig(database, tmp_path, sink={"destination": {"type": "pull"}})
    with database.connect() as state:
        sink = SinkConfig.model_validate(
            {"name": "files", "database": SOURCE, "destination": {"type": "pull"}}
        )
        state.execute("UPDATE walbrook.consumers SET destination = 'pull' WHERE name = 'files'")
        state.execute("SELECT walbrook.make_queue(id) FROM walbrook.consumers WHERE active")
        register_pulls(state, SOURCE, [sink], hostname="h", database="d")
    with rig.running():
        rig.backfilled("item")
    rows = rig.rows("SELECT message FROM walbrook.receive('files', 100)")
    assert sorted(row[0]["record"]["id"] for row in rows) == list(range(1, 31))
    assert {row[0]["action"] for row in rows} == {"read"}

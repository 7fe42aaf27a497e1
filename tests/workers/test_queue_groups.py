"""What waits behind a refused message: its group, and no more of its table than must."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import pgoutput
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.log_pipeline import LogPipeline
from tests.queue_pipeline import names, queue, redeliver, refusing, serve_once
from tests.waiting import until
from tests.wire_messages import transaction

COLUMNS: list[tuple[str, int] | tuple[str, int, bool]] = [
    ("id", 1184, True),
    ("name", 25),
    ("n", 23),
]
FULL = pgoutput.relation(1, "public", "item", COLUMNS, identity="f")
ONE, TWO, THREE = (f"2024-01-0{day} 00:00:00+00" for day in (1, 2, 3))


@pytest.fixture
def pipeline(database: Database, endpoint: Endpoint, tmp_path: Path) -> Iterator[LogPipeline]:
    hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0}
    retry = {"first_ms": 1, "max_ms": 10}

    class Pipeline(LogPipeline):
        state_dsn = database.dsn

    with database.connect() as state:
        made = Pipeline(state, tmp_path, hook={"destination": hook, "retry": retry})
        yield made
        made.close()


def test_updates_of_other_rows_pass_a_refused_message_under_replica_identity_full(
    pipeline: LogPipeline, endpoint: Endpoint
) -> None:
    refusing(endpoint, lambda record: record["name"] == "bad")
    bad = pgoutput.insert(1, [ONE, "bad", "1"])
    # A key that stands in the record in another form, and a value that reads as the key does.
    other = pgoutput.update(1, [TWO, "b2", "8"], old=[TWO, "b1", "7"])
    alike = pgoutput.update(1, [THREE, THREE, "9"], old=[THREE, "c1", "9"])
    pipeline.write(FULL, *transaction(0x100, bad, other, alike))
    pipeline.take()
    assert names(endpoint) == ["b2", THREE]
    assert [name for name, *_ in queue(pipeline)] == ["bad"]


def test_an_update_that_changes_its_key_keeps_its_place_among_its_table_from_queue_to_sink(
    pipeline: LogPipeline, endpoint: Endpoint
) -> None:
    refusing(endpoint, lambda record: record["name"] in ("bad", "moved"))
    bad = pgoutput.insert(1, [ONE, "bad", "1"])
    moved = pgoutput.update(1, [TWO, "moved", "1"], old=[ONE, "bad", "1"])
    other = pgoutput.insert(1, [THREE, "c1", "9"])
    pipeline.write(FULL, *transaction(0x100, bad, moved, other))
    pipeline.take()
    assert names(endpoint) == []
    assert [name for name, *_ in queue(pipeline)] == ["bad", "moved", "c1"]

    # The update is refused once more, now as the first of the queue.
    refusing(endpoint, lambda record: record["name"] == "moved")
    pipeline.state.execute("UPDATE walbrook.events SET due_at = now() WHERE due_at IS NOT NULL")

    def refused_again() -> bool:
        serve_once(pipeline)
        return queue(pipeline) == [("moved", 1, True), ("c1", 0, False)]

    until("a second refusal", refused_again, 30)
    assert names(endpoint) == ["bad"]
    endpoint.refuses = None
    redeliver(pipeline)
    assert names(endpoint) == ["bad", "moved", "c1"]

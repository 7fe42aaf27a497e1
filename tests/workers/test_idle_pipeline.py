"""A pipeline over a log in which nothing happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.connection import Connection
from spark_pipeline.source.stream import LogStreamReader
from tests import pgoutput
from tests.log_pipeline import LogPipeline, arrived
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True)])


def test_a_first_micro_batch_without_changes_is_no_failure(
    state: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_pipeline.feed.body._FOLLOWS_S", 0.0)
    pipeline = LogPipeline(state, tmp_path, all={})
    pipeline.idle(0x100)
    pipeline.take()
    # Spark begins every query with a micro-batch, also where the log has nothing for it.
    reader = LogStreamReader.in_process(pipeline.directory / "log", pipeline.exchange.directory)
    start = reader.initialOffset() | {"batch": pipeline.next_batch}
    assert reader.partitions(start, start) == []
    pipeline.body.take(None, 0)
    assert pipeline.body.failure is None
    pipeline.write(ITEM, *transaction(0x1000, pgoutput.insert(1, ["7"])))
    pipeline.take()
    assert [message["record"]["id"] for message in arrived(tmp_path / "all")] == [7]
    pipeline.close()

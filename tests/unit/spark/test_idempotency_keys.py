"""A change has one idempotency key, whoever tells of it, and of two databases never the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdc.config import FileDestination, SinkConfig
from cdc.decoding import decode_changes
from spark_pipeline.delivery.deliver import Origin, shape_of
from spark_pipeline.expressions.visible_rows import seen_rows
from spark_pipeline.slices.raw_rows import RawRows
from tests import pgoutput
from tests.unit.decoding.frames import OID, Frame, table


@pytest.mark.parametrize(("databases", "begins"), [(["shop"], ""), (["shop", "crm"], "crm:")])
def test_messages_and_expressions_say_the_same_key(databases: list[str], begins: str) -> None:
    sink = SinkConfig.model_validate(
        {
            "name": "merged",
            "databases": databases,
            "ordering": "event_time",
            "event_time": {"column": "at"},
            "destination": FileDestination(path=Path("/nowhere")),
        }
    )
    relation = table(("id", 20, True))
    frame = Frame().add(pgoutput.insert(OID, ["1"]), relation)
    origin = Origin(databases[-1], "h", "db")
    shape = shape_of(sink, origin)  # also for what is tried again from a queue
    (text,) = shape.messages(shape.rows(decode_changes(frame.batch(), frame.schemas)))
    said = json.loads(text.as_py())["metadata"]
    assert said["idempotency_key"] == f"{begins}{said['commit_lsn']}:{said['commit_idx']}"
    (seen,) = seen_rows(sink, origin, RawRows(frame.batch(), frame.schemas))
    (metadata,) = seen.rows.column("metadata").to_pylist()
    assert metadata["idempotency_key"] == said["idempotency_key"]

"""A service with a consumer in event-time order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cdc.connection import Connection
from tests.event_pipeline import NAME, EventPipeline
from tests.fix_postgres import Database
from tests.log_pipeline import arrived

DeliveredRows = list[tuple[Any, ...]]


def delivered_rows(pipeline: EventPipeline) -> DeliveredRows:
    """Of each message its database, its id or action, and whether it was late."""
    return [
        (
            m["metadata"]["database_name"],
            m["record"].get("id", m["action"]),
            m["metadata"].get("late", False),
        )
        for m in arrived(pipeline.directory / NAME)
    ]


@pytest.fixture
def source(event_database: Database) -> Iterator[Connection]:
    """The tables behind the logs, as their database shows them."""
    with event_database.connect() as connection:
        connection.execute("CREATE TABLE item (id int PRIMARY KEY, at bigint)")
        connection.execute("CREATE PUBLICATION pub FOR TABLE item")
        yield connection
        connection.execute("DROP PUBLICATION pub")
        connection.execute("DROP TABLE item")
        connection.execute("DROP TABLE IF EXISTS other")

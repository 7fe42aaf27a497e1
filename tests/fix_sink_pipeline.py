"""Sinks that a process keeps open, and the state database of the workers that use them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc.connection import Connection
from tests.fix_postgres import Database


@pytest.fixture
def closed_sinks() -> Iterator[None]:
    """A process keeps its sinks; a test must leave neither a thread nor a connection behind."""
    from spark_pipeline.delivery.deliver import _open_sinks  # not for tests without a pipeline

    yield
    while _open_sinks:
        _open_sinks.popitem()[1][2].close()


@pytest.fixture
def pipeline_state(database: Database, closed_sinks: None) -> Iterator[Connection]:
    with database.connect() as connection:
        yield connection

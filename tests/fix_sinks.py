"""Sinks that a process keeps open between deliveries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spark_pipeline.delivery.deliver import _open_sinks


@pytest.fixture
def no_open_sinks() -> Iterator[None]:
    """A process keeps its sinks; a test must not leave one, or its thread, behind."""
    yield
    while _open_sinks:
        _open_sinks.popitem()[1][2].close()

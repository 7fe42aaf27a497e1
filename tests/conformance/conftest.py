"""Set-up that most sinks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fix_postgres import Database
from tests.slot_batches import SlotBatches, slot_batches


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    """Batches of messages out of a slot of the test's database."""
    with slot_batches(database) as batches:
        yield batches

"""A source database whose changes a test hands to a sink itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fix_postgres import Database
from tests.slot_batches import SlotBatches, slot_batches


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    with slot_batches(database) as batches:
        yield batches

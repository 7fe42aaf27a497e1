"""Rows that a pipeline of the tests of workers writes."""

from __future__ import annotations

from pathlib import Path

from tests import pgoutput
from tests.log_pipeline import LogPipeline, arrived
from tests.wire_messages import transaction

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])


def write(pipeline: LogPipeline, *numbers: int, name: str = "n") -> None:
    """A row in a transaction and a batch of its own for each number."""
    for number in numbers:
        row = pgoutput.insert(1, [str(number), name])
        pipeline.write(ITEM, *transaction(0x100 * number, row))


def ids(directory: Path) -> list[int]:
    return [message["record"]["id"] for message in arrived(directory)]

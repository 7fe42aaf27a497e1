"""A sink behind a worker that reads a written log, with the table ``public.item``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cdc.connection import Connection
from tests.log_pipeline import LogPipeline
from tests.queue_pipeline import insert


def pipeline_to(
    state: Connection, directory: Path, destination: dict[str, Any], **given: Any
) -> LogPipeline:
    """The only sink of a pipeline, whose name is ``out``."""
    pipeline = LogPipeline(state, directory, out={"destination": destination, **given})
    state.execute("UPDATE walbrook.consumers SET destination = %s", (destination["type"],))
    return pipeline


def deliver(pipeline: LogPipeline, *numbers: int) -> None:
    """Rows with these ids, each in a transaction of its own."""
    for number in numbers:
        pipeline.write(*insert(number, (number, f"row {number}")))
        pipeline.take()

"""What a consumer's destination holds of a table, read over a sink of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pyarrow as pa

from cdc.backfill.reading import ChunkRead
from cdc.backfill.table import PublishedTable
from cdc.config import SinkConfig
from cdc.config.table import TableName
from cdc.connection import Connection
from cdc.errors import OperatorError
from cdc.generation import Generation
from cdc.queue.groups import Grouping
from cdc.state.active_consumers import read_active_consumers
from cdc.verify.gone_rows import GoneTask, read_gone
from sinks import open_sink
from sinks.base import ReadsBack
from spark_pipeline.feed.stage_settings import StageSettings


def open_to_read(
    consumer: SinkConfig, source: str, generation: Generation, state_dsn: str
) -> ReadsBack:
    """A sink of a consumer that can be read back."""
    sink = open_sink(
        consumer.destination,
        consumer=consumer.name,
        batch_size=consumer.effective_batch_size,
        source=source,
        grouping=Grouping.of(consumer),
        generation=generation,
        state_dsn=state_dsn,
    )
    if not isinstance(sink, ReadsBack):
        raise OperatorError(
            f"the destination of consumer {consumer.name} cannot be read back",
            fix="skip what needs it: rows that were deleted stay at the destination",
            kind="not_readable",
        )
    return sink


def rows_held_by(
    consumer: SinkConfig,
    source: str,
    generation: Generation,
    state_dsn: str,
    table: PublishedTable,
) -> Iterator[pa.RecordBatch]:
    """The rows that the destination of a consumer holds (``HELD_SCHEMA``)."""
    with closing(open_to_read(consumer, source, generation, state_dsn)) as sink:
        yield from sink.read_back(table)


def gone_reader(
    state: Connection, settings: StageSettings, consumer: SinkConfig, table: TableName, path: Path
) -> Callable[[], ChunkRead]:
    """What compares the keys of a consumer's destination with those of the table."""
    task = GoneTask(settings.source_dsn, settings.source, settings.publication, table, path)
    generation = read_active_consumers(state, settings.source).generations[consumer.name]
    held = partial(rows_held_by, consumer, settings.source, generation, settings.state_dsn)
    return lambda: read_gone(task, held)

"""Which sinks have destinations that can be read back, row by row, so that rows can be compared."""

from __future__ import annotations

from collections.abc import Iterable

from cdc.config.destination import (
    KafkaDestination,
    PostgresDestination,
    RedisStreamDestination,
)
from cdc.config.expression import NONE
from cdc.config.lakehouse import LakeDestination
from cdc.config.parquet import ParquetDestination
from cdc.config.sink import SinkConfig
from cdc.config.table import TableName
from cdc.config.table_template import target_name


def unreadable_reason(
    sink: SinkConfig, table: TableName, published: Iterable[TableName]
) -> str | None:
    """Why it is not known which rows of a table a sink's destination holds; None: it can be asked.

    A target that several of the published tables share is not asked either: the rows of one would
    count as extra rows of the others.
    """
    destination = sink.destination
    readable = (
        PostgresDestination
        | RedisStreamDestination
        | ParquetDestination
        | KafkaDestination
        | LakeDestination
    )
    if not isinstance(destination, readable):
        return f"a destination of the type {destination.type} cannot be read back"
    if sink.transform != NONE or sink.routing != NONE:
        return "a transform or routing changes what its messages are or where they go"
    if sink.claims is not None:
        return "large messages are kept elsewhere (oversize: claim_check)"
    if sink.shape != "sequin":
        return f"its messages have the shape {sink.shape}"
    if isinstance(destination, RedisStreamDestination):
        trimmed = destination.max_length is not None or destination.max_age_s is not None
        return "its stream is trimmed (max_length, max_age_s)" if trimmed else None
    if isinstance(destination, PostgresDestination):
        if destination.mode != "mirror":
            return f"mode: {destination.mode} holds a history, not the rows that are there"
        if "{table}" not in (destination.table or "{table}"):
            return "its tables share one target"
    if (other := sharing(sink, table, published)) is not None:
        return f"table {other} has the same target"
    return None


def sharing(sink: SinkConfig, table: TableName, published: Iterable[TableName]) -> TableName | None:
    """Another table of the sink whose rows go to the same target."""
    to = sink.destination
    if not isinstance(to, PostgresDestination | LakeDestination | ParquetDestination):
        return None
    template = to.table or "{schema}.{table}"
    schema = to.target_schema if isinstance(to, PostgresDestination) else None

    def target(of: TableName) -> TableName:
        return target_name(template, schema, of)

    own = target(table)
    for other in published:
        if other != table and sink.source.takes(other.schema, other.table) and target(other) == own:
            return other
    return None

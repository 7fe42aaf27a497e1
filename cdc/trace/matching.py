"""Why a sink takes a change or leaves it out, by its configuration as it is now. Pure.

Only the first rule that leaves it out is named. Expressions are not looked at here.
"""

from __future__ import annotations

from typing import Final

from cdc.config.sink import SinkConfig
from cdc.trace.change import TracedChange

_UNASKED: Final = ("gap",)


def left_out_by(sink: SinkConfig, change: TracedChange) -> str | None:
    """The rule of the configuration that leaves a change out; None if the sink takes it."""
    if sink.status == "disabled":
        return "status: it is disabled"
    if change.action not in (*sink.actions, *_UNASKED):
        return f"actions: {change.action} is not among {', '.join(sink.actions)}"
    if change.action == "message" or change.table is None:
        return None
    source, schema, table = sink.source, change.table_schema, change.table
    if source.include_schemas is not None and schema not in source.include_schemas:
        return f"source.include_schemas: {schema} is not in it"
    if schema in (source.exclude_schemas or ()):
        return f"source.exclude_schemas: {schema} is in it"
    if source.include_tables is not None and table not in source.include_tables:
        return f"source.include_tables: {table} is not in it"
    if table in (source.exclude_tables or ()):
        return f"source.exclude_tables: {table} is in it"
    return None

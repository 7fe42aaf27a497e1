"""Tables that a sink takes since its configuration, or the publication, was changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cdc.config import Config, SinkConfig, TableName
from cdc.connection import Connection
from cdc.errors import OperatorError
from cdc.replication.preflight.tables import CatalogName
from cdc.service.live_config.publications import PublishedChange
from cdc.state.backfill_operators import start_backfill


def newly_taken(
    before: Config, after: Config, published: Mapping[str, PublishedChange]
) -> list[tuple[str, str]]:
    """Sinks with the tables whose existing rows they are to get, beside those of new sinks.

    A new sink gets its rows as at a start.
    """
    known = {sink.name: sink for sink in before.sinks if sink.status == "active"}
    found = []
    for sink in after.sinks:
        earlier = known.get(sink.name)
        if earlier is None or sink.status != "active" or not sink.initial_backfill:
            continue
        for source in sink.sources:
            if source in published and source in earlier.sources:
                change = published[source]
                had = {table for table in change.before if earlier.source.takes(*table)}
                has = {table for table in change.after if _asks_for(sink, table)}
                found += [(sink.name, TableName(*table).written()) for table in sorted(has - had)]
    return found


def start_backfills(state: Connection, tables: Sequence[tuple[str, str]]) -> list[str]:
    """Ask for the existing rows. Returns what was asked for, and what was refused."""
    notes = []
    for sink, table in tables:
        try:
            start_backfill(state, sink, table)
            notes.append(f"sink {sink} gets the existing rows of {table}")
        except OperatorError as error:
            notes.append(f"the existing rows of {table} for sink {sink}: {error}")
    return notes


def _asks_for(sink: SinkConfig, table: CatalogName) -> bool:
    """Whether it takes the table, and is to get its existing rows first."""
    if not sink.source.takes(*table):
        return False
    wanted = sink.initial_backfill
    return wanted is True or (not isinstance(wanted, bool) and TableName(*table) in wanted)

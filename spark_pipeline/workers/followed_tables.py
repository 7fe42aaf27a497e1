"""The tables of a consumer that its configuration names, also once they are called otherwise.

A consumer follows a table by its oid: of a table that was renamed, changes under the new name are
taken, or left out, like those under the name that the configuration has. If another table bears
that name meanwhile, the name counts. Invariant: a name is looked up before the first change under
it is delivered, as the reader writes it down before that change is in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cdc.config import SinkConfig, TableName
from cdc.connection_pool import ConnectionPool
from cdc.state.schema_versions import renamed_tables
from spark_pipeline.delivery.matching import Match
from spark_pipeline.slices.exchange import SliceMarker


class FollowedTables:
    """Belongs to the thread of its worker."""

    def __init__(self, consumer: SinkConfig, source: str, connections: ConnectionPool) -> None:
        self.consumer = consumer
        """As configured, with the names that its tables have had since."""
        self.match = Match.of(consumer)
        """Which changes are its own, by those names."""
        self._configured = consumer
        self._source = source
        self._connections = connections
        self._known: set[tuple[str, str]] = set()
        self._named = named_tables(consumer)

    def look(self, slices: Iterable[SliceMarker]) -> bool:
        """Look up tables that were not met before; returns whether ``consumer`` is another."""
        new = self._new(slices) if self._named else None
        if new is None:
            return False
        with self._connections.connection() as state:
            renamed = renamed_tables(state, self._source, self._named)
        self._known |= new  # only now: a look that failed is made again
        before, self.consumer = self.consumer, followed(self._configured, renamed)
        if self.consumer == before:
            return False
        self.match = Match.of(self.consumer)
        return True

    def _new(self, slices: Iterable[SliceMarker]) -> set[tuple[str, str]] | None:
        """The tables of slices that are not known yet; None: nothing is to be looked up."""
        new: set[tuple[str, str]] | None = None
        for piece in slices:
            if not piece.rows:
                continue
            if piece.tables is None:  # too many to be named
                new = new or set()
            elif not self._known.issuperset(piece.tables):
                new = (new or set()).union(piece.tables)
        return new


def named_tables(consumer: SinkConfig) -> list[TableName]:
    """All tables that its configuration names to take or to leave out."""
    source = consumer.source
    return [*(source.include_tables or ()), *(source.exclude_tables or ())]


def followed(consumer: SinkConfig, renamed: Mapping[TableName, Sequence[TableName]]) -> SinkConfig:
    """The consumer with the names that its tables have had since. Pure."""
    if not renamed:
        return consumer
    source = consumer.source

    def also(names: Sequence[TableName] | None) -> tuple[TableName, ...] | None:
        if names is None:
            return None
        since = [new for name in names for new in renamed.get(name, ())]
        return tuple(dict.fromkeys([*names, *since]))

    groups = [
        group.model_copy(update={"name": new})
        for group in consumer.tables
        for new in renamed.get(group.name, ())
    ]
    update = {
        "include_tables": also(source.include_tables),
        "exclude_tables": also(source.exclude_tables),
    }
    return consumer.model_copy(
        update={
            "source": source.model_copy(update=update),
            "tables": (*consumer.tables, *groups),
        }
    )

"""The tables of a consumer that its configuration names, also once they are called otherwise.

A consumer follows a table by its oid: of a table that was renamed, changes under the new name are
taken, or left out, like those under the name that the configuration has. If another table bears
that name meanwhile, the name counts. Invariant: a name is looked up before the first change under
it is delivered, as the reader writes it down before that change is in the log.
"""

from __future__ import annotations

from collections.abc import Iterable

from cdc.config import SinkConfig
from cdc.config.renamed import followed, named_tables
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

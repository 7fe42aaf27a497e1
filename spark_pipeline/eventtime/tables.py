"""The tables that a consumer in event-time order may get changes of, as their databases show them.

Invariant: a database that does not answer has the tables that it had. Only a table that is new, and
of which changes have come, cannot do without its answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import psycopg
import structlog

from cdc.config import SinkConfig
from cdc.connection import Connection, connect
from cdc.decoding.plan import plan_for
from cdc.replication.source.partition_roots import partition_roots
from cdc.replication.source.published import published_relations
from cdc.state.event_partitions import known_tables
from spark_pipeline.delivery.matching import Match
from spark_pipeline.eventtime.windows.due import SparkWindows, Windows
from spark_pipeline.workers.context import WorkerContext

_logger = structlog.get_logger("walbrook.event_time")
_STATEMENT_S: Final = 5


class SourceTables:
    """Those of one consumer; ``contexts`` by source."""

    def __init__(self, consumer: SinkConfig, contexts: Mapping[str, WorkerContext]) -> None:
        self._consumer = consumer
        self._contexts = contexts
        self.roots: dict[str, dict[str, str]] = {}
        """Published tables with the tables that they are partitions of, by source."""
        self._unknown: dict[str, set[str]] = {name: set() for name in contexts}
        self._relations: dict[str, list[bytes]] = {}  # for windows alone

    def add_unknown(self, source: str, table: str) -> None:
        """Changes have come of a table that is not among those that were found."""
        self._unknown[source].add(table)

    def find(self, state: Connection) -> bool:
        """Ask the databases; returns whether windows have to be made again for what they say."""
        before = dict(self._relations)
        for name, context in self._contexts.items():
            self._find(state, name, context)
        return self._relations != before

    def windows(self) -> Windows | None:
        """The consumer's windows over the tables as they were found; None if it has none."""
        home = next(iter(self._contexts.values()))
        window, match = self._consumer.window, Match.of(self._consumer)
        if window is None or home.session is None:
            return None
        tables = {
            name: [
                plan
                for plan in map(plan_for, self._relations.get(name, []))
                if match.takes(plan.relation.namespace, plan.relation.name)
            ]
            for name in self._contexts
        }
        origins = [each.settings.origin for each in self._contexts.values()]
        return SparkWindows(home.session, self._consumer.name, window, tables, origins)

    def _find(self, state: Connection, name: str, context: WorkerContext) -> None:
        database, unknown = context.settings.database, self._unknown[name]
        assert database is not None
        try:
            with connect(
                database.dsn(), name=f"{name}:event_time", statement_s=_STATEMENT_S
            ) as source:
                found = partition_roots(source, database.publication.name)
                if self._consumer.window is not None:
                    published = published_relations(source, database.publication.name)
                    self._relations[name] = published
        except psycopg.Error as error:
            found = self.roots.get(name) or known_tables(state, self._consumer.name, name)
            if unknown - found.keys():
                raise
            _logger.warning("event_time.tables_unknown", source=name, error=error)
        # Changes may still come of a table that is no longer there.
        self.roots[name] = {table: table for table in unknown} | found

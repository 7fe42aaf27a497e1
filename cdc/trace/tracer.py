"""Traces changes of a configuration's sources: reads the log, the records and SQL, and concludes.

Nothing is written. The log and the records are those on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from cdc.config import Config, PullDestination, SinkConfig
from cdc.config.renamed import followed, named_tables
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.errors import OperatorError
from cdc.log.manifest import read_manifest
from cdc.log.view import LogView
from cdc.state.schema_versions import renamed_tables
from cdc.state.traces import KnownStep, known_steps
from cdc.trace.change import (
    Missing,
    NotFound,
    RowKey,
    TracedChange,
    find_by_key,
    find_change,
)
from cdc.trace.conclusion import Evidence, Filtering, conclude
from cdc.trace.matching import left_out_by
from cdc.trace.recorded import RecordedDeliveries, RecordsOfSource
from cdc.trace.story import ChangeTrace, ConsumerTrace, steps_of_consumer, steps_of_source, why

_JUDGED = ("insert", "update", "delete")
"""The actions that a filter sees."""


class Tracer:
    """For one thread; keeps what it has read of the records."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._records: dict[str, RecordsOfSource] = {}

    def source(self, name: str | None) -> str:
        """The name of the source that is meant."""
        names = [database.name for database in self._config.databases]
        if name is None and len(names) > 1:
            raise OperatorError(
                "there are several databases", fix=f"name the source, one of {', '.join(names)}"
            )
        return self._config.database(name or names[0]).name

    def changes_of(
        self, source: str, key: RowKey, limit: int, start: Cursor | None = None
    ) -> list[TracedChange]:
        """The latest changes of a row that the log has, the latest first."""
        directory = self._directory(source)
        if read_manifest(directory) is None:
            raise OperatorError(
                f"there is no log in {directory}",
                fix="run this on the machine of the service, or correct log.directory",
            )
        with closing(LogView(directory)) as log:
            return list(find_by_key(log, key, limit, start))

    def trace(
        self,
        state: Connection,
        source: str,
        cursor: Cursor,
        filters: Mapping[str, Filtering] | None = None,
    ) -> ChangeTrace:
        """What became of the change at a cursor; ``filters`` are those that were evaluated."""
        found = self._find(source, cursor)
        change = found if isinstance(found, TracedChange) else None
        missing = found if isinstance(found, NotFound) else None
        # The records first: what they miss is in the rows that are read after them.
        recorded = self._records_of(source).about(cursor)
        known = known_steps(state, source, str(cursor))
        consumers: list[ConsumerTrace] = []
        if missing is None or missing.why is not Missing.NEVER:
            sinks = {sink.name: sink for sink in self._sinks_of(state, source)}
            names = {each.consumer for each in known if each.consumer is not None} | sinks.keys()
            for name in sorted(names):
                evaluated = (filters or {}).get(name)
                mine = [each for each in known if each.consumer == name]
                consumers.append(
                    consumer_trace(cursor, name, sinks.get(name), change, mine, recorded, evaluated)
                )
        return ChangeTrace(
            source,
            cursor,
            change,
            missing,
            steps_of_source(change, known),
            consumers,
            recorded.incomplete,
        )

    def _sinks_of(self, state: Connection, source: str) -> list[SinkConfig]:
        """The sinks as they are served: in commit order they follow renamed tables."""
        return [
            sink
            if sink.in_time_order
            else followed(sink, renamed_tables(state, source, named_tables(sink)))
            for sink in self._config.sinks_of(source)
        ]

    def _find(self, source: str, cursor: Cursor) -> TracedChange | NotFound:
        directory = self._directory(source)
        if read_manifest(directory) is None:
            return NotFound(cursor, Missing.NO_LOG, str(directory))
        with closing(LogView(directory)) as log:
            return find_change(log, cursor)

    def _directory(self, source: str) -> Path:
        return self._config.log.directory / source

    def _records_of(self, source: str) -> RecordsOfSource:
        if source not in self._records:
            self._records[source] = RecordsOfSource(self._directory(source))
        return self._records[source]


def consumer_trace(
    cursor: Cursor,
    name: str,
    sink: SinkConfig | None,
    change: TracedChange | None,
    known: Sequence[KnownStep],
    recorded: RecordedDeliveries,
    evaluated: Filtering | None = None,
) -> ConsumerTrace:
    """What became of a change for one consumer; ``known`` are the rows about it."""
    filtering = filtering_of(sink, change) if evaluated is None else evaluated
    rule = None if sink is None or change is None else left_out_by(sink, change)
    evidence = Evidence(
        cursor,
        known,
        rule,
        filtering,
        [each for each in recorded.deliveries if each.consumer == name],
        [each for each in recorded.retries if each.consumer == name],
        sink is not None and isinstance(sink.destination, PullDestination),
    )
    conclusion = conclude(evidence)
    since_us = None if change is None else change.logged_us or change.committed_us
    steps = steps_of_consumer(cursor, name, known, recorded, since_us)
    notes = ["the configuration does not name it any more"] if sink is None else []
    return ConsumerTrace(name, conclusion, why(conclusion, rule, filtering, known), steps, notes)


def filtering_of(sink: SinkConfig | None, change: TracedChange | None) -> Filtering:
    """What is known of a sink's filter without evaluating it."""
    if sink is None or change is None:
        return Filtering.UNKNOWN
    if "filter" in sink.expressions and change.action in _JUDGED:
        return Filtering.NOT_EVALUATED
    if sink.window is not None:
        return Filtering.AGGREGATES
    if sink.event_time is not None and sink.event_time.late_policy == "drop":
        return Filtering.DROPS_LATE
    return Filtering.NONE

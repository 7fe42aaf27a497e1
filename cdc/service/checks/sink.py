"""Whether one sink can be served as it is configured: what is wrong with it concerns it alone.

The columns that it names are looked for in the tables of its sources, and its order must be the one
that its cursor was written in. A source that does not answer is not looked at: its reader says so.
"""

from __future__ import annotations

import psycopg

from cdc.config import Config, SinkConfig
from cdc.connection import Connection
from cdc.errors import OperatorError
from cdc.reach import UnreachableError, reach
from cdc.service.checks.event_time import event_time_problem
from cdc.service.checks.groups import group_problem
from cdc.state.event_time import in_event_time


def require_fit(config: Config, sink: SinkConfig, state: Connection) -> None:
    """OperatorError for a sink that cannot be served before an operator changes something."""
    _require_order(sink, state)
    if sink.event_time is not None and (problem := event_time_problem(config, sink)) is not None:
        raise problem
    for database in config.databases:
        if sink.tables and database.name in sink.sources:
            try:
                with reach(database.dsn(), f"database {database.name}") as source:
                    unfit = group_problem(config, database, sink, source)
            except (UnreachableError, psycopg.Error):
                continue
            if unfit is not None:
                raise unfit


def _require_order(sink: SinkConfig, state: Connection) -> None:
    """What was delivered out of commit order cannot be described by a cursor."""
    if sink.ordering == "commit" and sink.name in in_event_time(state):
        raise OperatorError(
            f"sink {sink.name} was in event-time order and is to be in commit order: of the "
            "changes behind its cursor some were delivered and others held back, and its "
            "cursor cannot tell them apart",
            fix="give it ordering: event_time again, or a new name and a new destination, or "
            f"delete its rows of walbrook.consumers (WHERE name = '{sink.name}') and give it "
            "an empty destination: it then starts over",
        )

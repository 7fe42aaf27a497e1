"""Whether a table can be backfilled, asked of the source before its backfill is begun.

The state database does not know which tables a source publishes: a backfill that SQL begins fails
when it is planned. The command has the configuration, so it can look at once.
"""

from __future__ import annotations

import psycopg

from cdc.backfill.table import sent_as
from cdc.config import Config
from cdc.config.table import TableName
from cdc.errors import OperatorError
from cdc.reach import UnreachableError, reach

_PARSED = "SELECT parse_ident(%s)"


def require_table(config: Config, consumer: str, table: str) -> None:
    """OperatorError for a table of which no change comes, or none to this consumer.

    What cannot be looked at is passed: the function of the state database, or the service, says
    what is wrong with the consumer, with the writing of the name, or with the source.
    """
    source, _, name = consumer.rpartition("/")
    sinks = [each for each in config.sinks if each.name == name]
    if len(sinks) != 1 or (source or sinks[0].sources[0]) not in sinks[0].sources:
        return
    if not source and len(sinks[0].sources) > 1:
        return
    database = config.database(source or sinks[0].sources[0])
    try:
        with reach(database.dsn(), f"database {database.name}") as connection:
            row = connection.execute(_PARSED, (table,)).fetchone()
            parts = [] if row is None else [str(part) for part in row[0]]  # type: ignore[attr-defined]
            if len(parts) > 2:
                return
            named = TableName(*["public", *parts][-2:])
            sent = sent_as(connection, database.publication.name, named)
    except (psycopg.Error, UnreachableError):
        return
    takes = sinks[0].source.takes
    if not any(takes(each.schema, each.table) for each in sent):
        raise OperatorError(
            f"consumer {consumer} takes no changes of {named}",
            fix="add the table to its source in the configuration, and start the service again",
            kind="not_taken",
        )

"""Whether the columns that sinks group by are there, in the source."""

from __future__ import annotations

import difflib

from psycopg import sql

from cdc.config import Config, Database, SinkConfig
from cdc.connection import Connection
from cdc.errors import ConfigError, OperatorError
from cdc.reach import reach

_COLUMNS = """
SELECT a.attname::text FROM pg_attribute a
 WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""


def group_problem(
    config: Config, database: Database, sink: SinkConfig, source: Connection
) -> ConfigError | None:
    """The first column that its table has not; a table that is not there yet may come with it."""
    i = config.sinks.index(sink)
    for j, table in enumerate(sink.tables):
        name = sql.Identifier(table.name.schema, table.name.table).as_string(source)
        known = [str(row[0]) for row in source.execute(_COLUMNS, (name,)).fetchall()]
        for column in table.group_column_names:
            if known and column not in known:
                near = difflib.get_close_matches(column, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
                return ConfigError(
                    f"sinks[{i}].tables[{j}].group_column_names: {table.name} of database "
                    f"{database.name} has no column {column}",
                    fix=f"correct it: {hint}",
                )
    return None


def check_groups(config: Config) -> list[str]:
    """What could not be checked, because a database does not answer.

    ConfigError with the first wrong column of each sink.
    """
    unchecked, problems = [], []
    for database in config.databases:
        sinks = [s for s in config.sinks_of(database.name) if s.tables and s.status == "active"]
        if not sinks:
            continue
        try:
            with reach(database.dsn(), f"database {database.name}") as source:
                found = [group_problem(config, database, sink, source) for sink in sinks]
                problems += [str(problem) for problem in found if problem is not None]
        except OperatorError as error:
            unchecked.append(f"the columns that sinks group by: {error.what}")
    if problems:
        raise ConfigError("\n".join(problems))
    return unchecked

"""Whether the columns that sinks group by are there, in the source."""

from __future__ import annotations

import difflib

from psycopg import sql

from cdc.config import Config, Database
from cdc.connection import Connection
from cdc.errors import ConfigError, OperatorError
from cdc.service.start import reach

_COLUMNS = """
SELECT a.attname::text FROM pg_attribute a
 WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""


def check_group_columns(config: Config, database: Database, source: Connection) -> None:
    """ConfigError for the first column that its table has not; a table that is not there yet may
    come with it."""
    for i, sink in enumerate(config.sinks):
        if database.name not in sink.sources or sink.status != "active":
            continue
        for j, table in enumerate(sink.tables):
            name = sql.Identifier(table.name.schema, table.name.table).as_string(source)
            known = [str(row[0]) for row in source.execute(_COLUMNS, (name,)).fetchall()]
            for column in table.group_column_names:
                if known and column not in known:
                    near = difflib.get_close_matches(column, known, n=1)
                    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
                    raise ConfigError(
                        f"sinks[{i}].tables[{j}].group_column_names: {table.name} of database "
                        f"{database.name} has no column {column}",
                        fix=f"correct it: {hint}",
                    )


def check_groups(config: Config) -> list[str]:
    """The same for all databases; what could not be checked, because one does not answer."""
    unchecked = []
    for database in config.databases:
        if not any(sink.tables for sink in config.sinks_of(database.name)):
            continue
        try:
            with reach(database.dsn(), f"database {database.name}") as source:
                check_group_columns(config, database, source)
        except ConfigError:
            raise
        except OperatorError as error:
            unchecked.append(f"the columns that sinks group by: {error.what}")
    return unchecked

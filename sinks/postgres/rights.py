"""Whether the sink's account may make what a first delivery makes; nothing is written."""

from __future__ import annotations

from cdc.connection import Connection
from cdc.errors import OperatorError
from sinks.postgres.position import Positions

_RIGHTS = """
SELECT current_database()::text, has_database_privilege(current_database(), 'CREATE'),
       format('GRANT CREATE ON DATABASE %%I TO %%I', current_database(), current_user),
       target.oid IS NOT NULL,
       coalesce(has_schema_privilege(target.oid, 'USAGE')
                AND has_schema_privilege(target.oid, 'CREATE'), true),
       format('GRANT USAGE, CREATE ON SCHEMA %%I TO %%I', target.name, current_user)
  FROM (SELECT %(target)s::text AS name,
               (SELECT oid FROM pg_namespace WHERE nspname = %(target)s::text) AS oid) target
"""


def rights_found(connection: Connection, own: Positions, target_schema: str | None) -> str:
    """What the account may do; an error if the sink could not start with it.

    ``target_schema`` is the one schema of all targets, if there is one.
    """
    row = connection.execute(_RIGHTS, {"target": target_schema}).fetchone()
    assert row is not None
    database, may_create, grant, has_target, may_use, grant_target = row
    to_make = [] if own.exists(connection) else ["the schema of its positions (own_schema)"]
    if target_schema is not None and not has_target:
        to_make.append(f"the schema {target_schema}")
    if to_make and not may_create:
        raise OperatorError(
            f"the account may not create schemas in the database {database}, and the sink has yet "
            f"to make {' and '.join(to_make)}",
            fix=str(grant),
        )
    if not may_use:
        raise OperatorError(
            f"the account may not make tables in the schema {target_schema} of the database "
            f"{database}",
            fix=str(grant_target),
        )
    may = "may" if may_create else "may not"
    return f"connected to the database {database}; the account {may} create schemas in it"

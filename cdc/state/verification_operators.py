"""What operators do with verifications, from Python: the SQL functions, refusals as errors."""

from __future__ import annotations

from typing import Final

from psycopg.rows import dict_row

from cdc.connection import Connection
from cdc.state.operators import State, refusals

OPEN: Final = ("waiting", "reading", "comparing", "repairing")
LISTED_MAX: Final = 1_000
"""Most verifications that are listed at once, the latest first; of one request all are."""

_START = "SELECT * FROM walbrook.start_verification(%s, %s, %s)"
_CANCEL = "SELECT * FROM walbrook.cancel_verification(%s)"
_LIST = """
SELECT id, request, source, consumer, table_schema, table_name, repair, state, reason, error,
       parts, parts_done, position::text AS position, source_rows, destination_rows, missing, extra,
       different, changing, backfill, repaired, requested_at, started_at, finished_at
  FROM walbrook.verifications
 WHERE (%(named)s::text IS NULL OR consumer = %(named)s OR source || '/' || consumer = %(named)s)
   AND (%(request)s::bigint IS NULL OR request = %(request)s)
 ORDER BY id DESC LIMIT %(most)s
"""


def start_verification(
    connection: Connection, consumer: str, table: str | None = None, *, repair: bool = False
) -> State:
    """Compare a destination with its source. Returns the row of the verification."""
    with refusals():
        found = connection.cursor(row_factory=dict_row)
        row = found.execute(_START, (consumer, table, repair)).fetchone()
    assert row is not None
    return row


def cancel_verification(connection: Connection, verification: int) -> State:
    """End a verification. Returns its row."""
    with refusals():
        found = connection.cursor(row_factory=dict_row)
        row = found.execute(_CANCEL, (verification,)).fetchone()
    assert row is not None
    return row


def verifications(
    connection: Connection, consumer: str | None = None, request: int | None = None
) -> list[State]:
    """Verifications of one consumer, of one request, or all, the latest first."""
    with refusals():
        most = LISTED_MAX if request is None else None
        given = {"named": consumer, "request": request, "most": most}
        return connection.cursor(row_factory=dict_row).execute(_LIST, given).fetchall()


def differences(row: State) -> int:
    """How many rows differ, or still differ after a repair."""
    counts = (row["missing"], row["extra"], row["different"])
    return sum(int(str(count or 0)) for count in counts) - int(str(row["repaired"] or 0))


def is_equal(row: State) -> bool:
    """Whether every row was compared and is equal, if need be after a repair."""
    return row["state"] == "done" and not differences(row) and not row["changing"]

"""What an error of the destination means for delivery, by its SQLSTATE.

Invariant: ``what`` quotes no value of a row. The server's own words, which may, are the detail;
where they name objects and accounts alone, they are shown.
"""

from __future__ import annotations

import psycopg

from cdc.error_text import one_line
from cdc.errors import OperatorError, PoisonError, TransientError, WalbrookError

# Classes of SQLSTATE, or whole ones, that pass by themselves.
_TRANSIENT = ("08", "40", "53", "55", "57", "58", "25P03", "25P04")
# A value that the destination does not take: data, a constraint, a limit, a trigger's refusal.
_OF_A_ROW = ("21", "22", "23", "27", "44", "54", "P0")
_ACCOUNT = ("28", "42501", "3D000")
_READ_ONLY = "25006"
# The server's words when it ends a connect: psycopg knows no SQLSTATE then.
_FOR_AN_OPERATOR = (
    "authentication failed",
    "no pg_hba.conf entry",
    "permission denied",
    "does not exist",
    "is not permitted to log in",
    "certificate verify failed",
    "does not support SSL",
    "server certificate for",
    "no password supplied",
)


def is_of_a_row(error: psycopg.Error) -> bool:
    """Whether a message is to blame, so that the others can be delivered without it."""
    return (error.sqlstate or "").startswith(_OF_A_ROW)


def from_postgres(error: psycopg.Error, place: str) -> WalbrookError:
    """The error of a delivery; ``place`` names the destination without its secrets."""
    state, said = error.sqlstate or "", str(error).strip()
    if not state:
        return _without_state(error, place, said)
    condition = f"{type(error).__name__}, SQLSTATE {state}"
    if state == _READ_ONLY:
        return TransientError(
            f"{place} is read only ({condition})",
            fix="it is retried; name the primary as the destination",
            detail=said,
        )
    if state.startswith(_TRANSIENT):
        return TransientError(
            f"{place} could not take the changes now ({condition})",
            fix="it is retried",
            detail=said,
        )
    if state.startswith(_OF_A_ROW):
        return PoisonError(
            f"{place} refused a row{_named(error)} ({condition})",
            fix="it becomes a dead letter; bring the destination up to date by hand",
            detail=said,
        )
    if state.startswith(_ACCOUNT):
        return OperatorError(
            f"{place} does not let the sink's account do this{_objects(error)} ({condition})",
            fix="check database, username and password, and grant what docs/sinks/postgres.md "
            "lists",
            detail=said,
        )
    return OperatorError(
        f"{place} refused a statement{_named(error)} ({condition})",
        fix="if somebody altered a target table, put it back as it was, or drop it together with "
        "its row in the table tables of own_schema and rewind",
        detail=said,
    )


def _without_state(error: psycopg.Error, place: str, said: str) -> WalbrookError:
    if any(words in said for words in _FOR_AN_OPERATOR):
        return OperatorError(
            f"{place} refused the connection: {one_line(said)}",
            fix="check hostname, database, username, password and sslmode of the destination",
            detail=said,
        )
    return TransientError(
        f"{place} cannot be reached ({type(error).__name__})", fix="it is retried", detail=said
    )


def _objects(error: psycopg.Error) -> str:
    """What the server says of an account's rights: it names objects. A trigger may say anything."""
    diagnosis = error.diag
    by_hand = diagnosis.source_function == "exec_stmt_raise"
    return "" if by_hand or not diagnosis.message_primary else f": {diagnosis.message_primary}"


def _named(error: psycopg.Error) -> str:
    """Table, column and constraint, as far as the server named them; never a value."""
    diagnosis = error.diag
    table = ".".join(filter(None, (diagnosis.schema_name, diagnosis.table_name)))
    named = [
        f"{kind} {name}"
        for kind, name in (
            ("table", table),
            ("column", diagnosis.column_name),
            ("constraint", diagnosis.constraint_name),
        )
        if name
    ]
    return f" ({', '.join(named)})" if named else ""

"""A table for each type on a real server, and what a slot says of it.

Besides a column of the type, each table has arrays of it, of one and of two dimensions, and a
composite of it and its array. All of them are read back at once, so that usual and odd values stand
in one column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from tests.reader.type_values import Case
from tests.slot_decoder import Connection

_AVAILABLE = "SELECT name FROM pg_available_extensions"


# A scale below zero, or above the precision.
_SINCE_15 = ("numeric(3,-2)", "numeric(2,5)", "numeric(38,-1)")


def usable(connection: Connection, cases: Sequence[Case]) -> list[Case]:
    """Those that this server can have; their extensions are made."""
    available = {str(name) for (name,) in connection.execute(_AVAILABLE).fetchall()}
    for name in sorted({case.needs for case in cases if case.needs in available} - {""}):
        connection.execute(sql.SQL("CREATE EXTENSION {}").format(sql.Identifier(name)))
    if connection.info.server_version < 150000:
        cases = [case for case in cases if case.type not in _SINCE_15]
    if any(case.type == "xml" for case in cases):
        try:
            connection.execute("SELECT xml '<a/>'")
        except psycopg.errors.FeatureNotSupported:
            cases = [case for case in cases if case.type != "xml"]
    return [case for case in cases if not case.needs or case.needs in available]


@dataclass(frozen=True)
class Column:
    """A row's column: the text to write, and of which values by their places it is made."""

    name: str
    text: str
    of: Any  # an int, None, or lists and dicts of them


def rows_of(case: Case, values: Sequence[str]) -> list[Column]:
    """One value a row, alone and in every nest."""
    places: list[int | None] = [*range(len(values)), None]

    def array(of: Sequence[int | None]) -> str:
        inside = [_in_array(values[at]) if at is not None else "NULL" for at in of]
        return "{" + case.delimiter.join(inside) + "}"

    rows = [Column("v", value, at) for at, value in enumerate(values)]
    rows.append(Column("list", array(places), places))
    rows.append(Column("list", f"[-1:{len(values) - 1}]={array(places)}", places))
    rows.append(Column("list", "{}", []))
    rows += [Column("list", array([at]), [at]) for at in places]
    last = len(values) - 1
    square: list[list[int | None]] = [[0, None], [last, 0]]
    inner = case.delimiter.join(array(row) for row in square)
    rows.append(Column("square", "{" + inner + "}", square))
    rows.append(Column("square", "[0:1][3:4]={" + inner + "}", square))
    for at in places:
        one = _in_record(values[at]) if at is not None else ""
        text = f"({one},{_in_record(array([at, 0]))},)"
        rows.append(Column("nest", text, {"a": at, "b c": [at, 0], "d": None}))
    rows.append(Column("nest", "(,,)", {"a": None, "b c": None, "d": None}))
    return rows


def _in_array(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _in_record(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '""') + '"'


def make_table(connection: Connection, name: str, case: Case) -> None:
    connection.execute(
        f'CREATE TYPE nest_{name} AS (a {case.type}, "b c" {case.type}[], d text);'
        f"CREATE TABLE {name} (id serial, v {case.type}, list {case.type}[],"
        f" square {case.type}[][], nest nest_{name})".encode()
    )


def write_rows(connection: Connection, name: str, rows: Sequence[Column]) -> None:
    """One row for each, and one that is all null; as one transaction."""
    with connection.transaction():
        for row in rows:
            connection.execute(
                sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
                    sql.Identifier(name), sql.Identifier(row.name), sql.Literal(row.text)
                )
            )
        connection.execute(f"INSERT INTO {name} (v) VALUES (NULL)".encode())


def filled_in(of: Any, values: Sequence[Any]) -> Any:
    """A nest of places with the values that they name."""
    if isinstance(of, list):
        return [filled_in(one, values) for one in of]
    if isinstance(of, dict):
        return {name: filled_in(one, values) for name, one in of.items()}
    return None if of is None else values[of]

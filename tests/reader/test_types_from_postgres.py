"""Every type, from a real server through a real slot: the value is the one that the server has.

Our JSON is what ``to_json`` says, to the letter, and so equal to ``to_jsonb``. Where it is not, on
purpose:

======================  ======================  ===========================================
type                    ``to_json``             here
======================  ======================  ===========================================
timestamptz             ``…+00:00``             ``…Z``
oid                     a string                a number
vector, halfvec         a string                an array of numbers
int2vector, oidvector   an array                their text
======================  ======================  ===========================================

NaN and the infinities are strings in both; bytea, money, intervals, ranges, geometric types,
network addresses, bit strings, text search and xml are their texts in both. ``to_jsonb`` alone
forgets the sign of a float's -0, and the spacing and the repeated keys of json; here they stay.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.exact_json import Object, as_values, parse
from tests.fix_postgres import (
    FROM_WHEEL,
    INSTALLED,
    VERSIONS,
    Database,
    on_both_versions,
    on_version,
)
from tests.reader.type_values import (
    CATALOG,
    DOCUMENTS,
    NUMBERS,
    PLACES,
    RANGES,
    TEXTS,
    TIMES,
    Case,
)
from tests.reader.type_values_custom import CONTRIB, CUSTOM, SETUP, VECTORS
from tests.reader.types_source import (
    Column,
    filled_in,
    make_table,
    rows_of,
    usable,
    write_rows,
)
from tests.slot_decoder import Connection, as_the_reader, open_slot, read_slot
from tests.unit.decoding.columns_of import plain

GROUPS = {
    "numbers": NUMBERS,
    "texts": TEXTS,
    "documents": DOCUMENTS,
    "times": TIMES,
    "places": PLACES,
    "catalog": CATALOG,
    "ranges": RANGES,
    "custom": CUSTOM,
    "vectors": VECTORS,
    "contrib": CONTRIB,
}


@pytest.mark.parametrize(
    ("database", "group"),
    [
        on_version(version, group)
        for version in (*VERSIONS, INSTALLED)
        for group in GROUPS
        if group != ("contrib" if version in FROM_WHEEL else "vectors")
    ],
    indirect=["database"],
)
def test_every_value_is_exact_alone_and_in_arrays_and_composites(
    database: Database, group: str
) -> None:
    with as_the_reader(database) as connection:
        connection.execute(SETUP.encode())
        tables = {f"t{at}": case for at, case in enumerate(usable(connection, GROUPS[group]))}
        assert tables
        for name, case in tables.items():
            make_table(connection, name, case)
        open_slot(connection)
        rows = {name: rows_of(case, case.values) for name, case in tables.items()}
        for name, columns in rows.items():
            write_rows(connection, name, columns)
        decoded = read_slot(connection)
        wrong: list[str] = []
        for name, case in tables.items():
            wrong += _json_differences(connection, name, case, rows[name], decoded.changes)
        typed = {table.relation.name: table.rows for table in decoded.tables}
        for name, case in tables.items():
            wrong += _typed_differences(connection, name, case, rows[name], typed[name])
    assert wrong == []


@on_both_versions
def test_a_value_that_its_arrow_type_cannot_hold_is_exact_in_json_and_an_error_when_typed(
    database: Database,
) -> None:
    cases = [case for group in GROUPS.values() for case in group if case.beyond]
    with as_the_reader(database) as connection:
        connection.execute(SETUP.encode())
        tables = {f"t{at}": case for at, case in enumerate(cases)}
        for name, case in tables.items():
            make_table(connection, name, case)
        open_slot(connection)
        rows = {name: rows_of(case, case.beyond) for name, case in tables.items()}
        for name, columns in rows.items():
            write_rows(connection, name, columns)
        decoded = read_slot(connection)
        for name, case in tables.items():
            assert not _json_differences(connection, name, case, rows[name], decoded.changes)
        for table in decoded.tables:
            errors = table.rows.column("error").to_pylist()[
                : len(tables[table.relation.name].beyond)
            ]
            assert all("column 'v': " in str(error) for error in errors)
            assert table.rows.column("error")[-1].as_py() is None


def _said(connection: Connection, name: str, count: int, expression: str) -> list[Any]:
    """What the server says of the first rows, which have one value each."""
    found = connection.execute(
        f"SELECT {expression} FROM {name} WHERE id <= {count} ORDER BY id".encode()
    ).fetchall()
    return [value for (value,) in found]


def _json_differences(
    connection: Connection, name: str, case: Case, rows: Sequence[Column], changes: Any
) -> list[str]:
    ours = [
        change["record"]
        for change in changes.to_pylist()
        if change["table_name"] == name and change["error"] is None
    ]
    if len(ours) != len(rows) + 1:
        errors = {change["error"] for change in changes.to_pylist() if change["error"]}
        return [f"{case.type}: {len(ours)} of {len(rows) + 1} rows: {errors}"]
    count = sum(row.name == "v" for row in rows)
    exact = [case.ours(parse(one)) for one in _said(connection, name, count, "to_json(v)::text")]
    values = _said(connection, name, count, "to_jsonb(v)::text")
    wrong = []
    for at, (row, record) in enumerate(zip(rows, ours, strict=False)):
        found = parse(record)[row.name]
        expected = _as_json(filled_in(row.of, exact))
        if found != expected:
            wrong.append(f"{case.type}: {row.text!r} is {found!r}, not {expected!r}")
        if row.name == "v" and as_values(found) != as_values(case.ours(parse(values[at]))):
            wrong.append(f"{case.type}: {row.text!r} is not {values[at]} of to_jsonb")
    everything = json.loads(ours[-1])
    if everything.pop("id") != len(rows) + 1 or set(everything.values()) != {None}:
        wrong.append(f"{case.type}: nulls are {ours[-1]}")
    return wrong


def _as_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_json(one) for one in value]
    if isinstance(value, dict):
        return Object(tuple((name, _as_json(one)) for name, one in value.items()))
    return value


def _typed_differences(
    connection: Connection, name: str, case: Case, rows: Sequence[Column], typed: Any
) -> list[str]:
    typed.validate(full=True)
    errors = [error for error in typed.column("error").to_pylist() if error]
    if errors:
        return [f"{case.type}: {errors}"]
    count = sum(row.name == "v" for row in rows)
    values = [case.python(said) for said in _said(connection, name, count, f"({case.sql})::text")]
    records, wrong = typed.column("record"), []
    for at, row in enumerate(rows):
        found, expected = plain(records[at][row.name]), filled_in(row.of, values)
        if found != expected or type(found) is not type(expected):
            wrong.append(f"{case.type}: {row.text!r} is typed {found!r}, not {expected!r}")
    nothing = {**plain(records[len(rows)]), "id": None}
    return wrong if set(nothing.values()) == {None} else [*wrong, f"{case.type}: {nothing}"]

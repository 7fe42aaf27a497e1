"""Types are called as Postgres itself calls them."""

from __future__ import annotations

from cdc.decoding.types.names import describe_type
from tests.fix_postgres import DEFAULT_VERSION, Database, on_both_versions

pytestmark = on_both_versions

# Pseudo-types cannot be columns, and row types of the catalog are nobody's columns either.
_BUILT_IN = """
SELECT t.oid::int8, format_type(t.oid, -1)
  FROM pg_type t LEFT JOIN pg_type element ON element.oid = t.typelem AND t.typcategory = 'A'
 WHERE t.oid < 10000 AND coalesce(element.typtype, t.typtype) IN ('b', 'r', 'm')
"""
_SPELLED = [
    "numeric(10,4)", "numeric(5)", "numeric(2,-3)", "numeric(1000,0)", "varchar(20)", "char(4)",
    "char", "bpchar", "bit(3)", "bit", "varbit(9)", "time(0)", "timetz(2)", "timestamp(3)",
    "timestamptz(6)", "interval", "interval(3)", "interval year", "interval year to month",
    "interval day to second", "interval day to second(2)", "interval second(1)",
    "interval hour to minute", "interval month", "text[]", "numeric(6,2)[]", "varchar(7)[][]",
    "timestamp(1)[]", "bit(2)[]", "interval day[]",
]  # fmt: skip


def test_every_built_in_type_has_its_name(database: Database) -> None:
    rows = database.execute(_BUILT_IN)
    assert len(rows) > 150
    assert {oid: describe_type(oid, -1) for oid, _ in rows} == dict(rows)


def test_lengths_precisions_and_fields_are_written_as_postgres_does(database: Database) -> None:
    # Before 15 a numeric's scale was never negative.
    known = [one for one in _SPELLED if DEFAULT_VERSION >= 15 or "-" not in one]
    columns = ", ".join(f"c{at} {spelled}" for at, spelled in enumerate(known))
    database.execute(f"CREATE TABLE item ({columns})")
    rows = database.execute(
        "SELECT atttypid::int8, atttypmod, format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = 'item'::regclass AND attnum > 0 ORDER BY attnum"
    )
    assert [describe_type(oid, typmod) for oid, typmod, _ in rows] == [name for *_, name in rows]

"""The tables of a lake as somebody reads them who has none of our code: DuckDB.

Invariant: its extension comes from a wheel and is loaded by its path, so nothing is fetched.
"""

from __future__ import annotations

from pathlib import Path

import duckdb
import duckdb_extension_delta


def query(sql: str, **tables: Path) -> list[tuple[object, ...]]:
    """The rows of a query over Delta tables, each a view of the name given."""
    with duckdb.connect(config={"allow_unsigned_extensions": "true"}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        (extension,) = Path(duckdb_extension_delta.__file__).parent.rglob("*.duckdb_extension")
        connection.execute(f"LOAD '{extension}'")
        for name, place in tables.items():
            connection.execute(f"CREATE VIEW {name} AS SELECT * FROM delta_scan('{place}')")
        # Through Arrow, because DuckDB's own tuples need one more package for time zones.
        found = connection.execute(sql).to_arrow_table().to_pylist()
        return [tuple(row.values()) for row in found]

"""The tables of a lake as somebody reads them who has none of our code: DuckDB.

Invariant: its extension comes from a wheel and is loaded by its path, so nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import duckdb
import duckdb_extension_avro
import duckdb_extension_delta
import duckdb_extension_iceberg


def query(sql: str, **tables: Path) -> list[tuple[object, ...]]:
    """The rows of a query over Delta tables, each a view of the name given."""
    return _query(sql, "delta_scan", (duckdb_extension_delta,), tables)


def query_iceberg(sql: str, *, moved: bool = False, **tables: str) -> list[tuple[object, ...]]:
    """The rows of a query over Iceberg tables, each a view of the metadata file given.

    ``moved``: the files are copies, beside that metadata file, of those that it names.
    """
    extensions = (duckdb_extension_avro, duckdb_extension_iceberg)
    return _query(sql, "iceberg_scan", extensions, tables, ", allow_moved_paths = true" * moved)


def _query(
    sql: str,
    scan: str,
    extensions: Sequence[ModuleType],
    tables: Mapping[str, object],
    options: str = "",
) -> list[tuple[object, ...]]:
    with duckdb.connect(config={"allow_unsigned_extensions": "true"}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for package in extensions:
            (extension,) = Path(str(package.__file__)).parent.rglob("*.duckdb_extension")
            connection.execute(f"LOAD '{extension}'")
        for name, place in tables.items():
            table = f"{scan}('{place}'{options})"
            connection.execute(f'CREATE VIEW "{name}" AS SELECT * FROM {table}')
        # Through Arrow, because DuckDB's own tuples need one more package for time zones.
        found = connection.execute(sql).to_arrow_table().to_pylist()
        return [tuple(row.values()) for row in found]

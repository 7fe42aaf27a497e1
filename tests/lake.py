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
    scans = {name: f"delta_scan('{place}')" for name, place in tables.items()}
    return _query(sql, (duckdb_extension_delta,), scans)


def query_iceberg(sql: str, *, moved: bool = False, **tables: str) -> list[tuple[object, ...]]:
    """The rows of a query over Iceberg tables, each a view of the metadata file given.

    ``moved``: the files are copies, beside that metadata file, of those that it names.
    """
    scan = _moved_scan if moved else "iceberg_scan('{}')".format
    scans = {name: scan(place) for name, place in tables.items()}
    return _query(sql, (duckdb_extension_avro, duckdb_extension_iceberg), scans)


def _moved_scan(metadata: str) -> str:
    file = Path(metadata)
    version = file.name.removesuffix(".metadata.json")
    return (
        f"iceberg_scan('{file.parents[1]}', allow_moved_paths = true, version = '{version}', "
        "version_name_format = '%s%s.metadata.json')"
    )


def _query(
    sql: str, extensions: Sequence[ModuleType], scans: Mapping[str, str]
) -> list[tuple[object, ...]]:
    with duckdb.connect(config={"allow_unsigned_extensions": "true"}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for package in extensions:
            (extension,) = Path(str(package.__file__)).parent.rglob("*.duckdb_extension")
            connection.execute(f"LOAD '{extension}'")
        for name, scan in scans.items():
            connection.execute(f'CREATE VIEW "{name}" AS SELECT * FROM {scan}')
        # Through Arrow, because DuckDB's own tuples need one more package for time zones.
        found = connection.execute(sql).to_arrow_table().to_pylist()
        return [tuple(row.values()) for row in found]

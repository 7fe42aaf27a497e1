"""Typed Parquet tables as somebody reads them who has none of our code: DuckDB, by the manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb

from cdc.generation import FIRST, Generation
from sinks.lakehouse import LakeNames, MaintenancePlan
from sinks.lakehouse.names import LakeTarget
from sinks.lakehouse.parquet import TypedParquetSink, parquet_tables
from sinks.lakehouse.parquet.table import ParquetTable
from tests.stores import Store

DATE = ("walbrook_date",)


@dataclass(frozen=True)
class ParquetLake:
    """The tables below a folder, or in a store, of which the folder then has copies."""

    folder: Path
    store: Store | None = None

    @property
    def root(self) -> str:
        return str(self.folder) if self.store is None else self.store.url

    def tables(
        self, generation: Generation = FIRST, owner: str = "shop/orders"
    ) -> Callable[[LakeTarget], ParquetTable]:
        options = {} if self.store is None else dict(self.store.options)
        root = generation.named(self.root)
        return parquet_tables(root, owner, options, generation=generation)

    def sink(
        self,
        *,
        generation: Generation = FIRST,
        owner: str = "shop/orders",
        partition_by: Sequence[str] = DATE,
        maintenance: MaintenancePlan | None = None,
    ) -> TypedParquetSink:
        return TypedParquetSink(
            self.tables(generation, owner),
            LakeNames(),
            partition_by=partition_by,
            maintenance=maintenance,
        )

    def objects(self, table: str = "public/t", generation: Generation = FIRST) -> list[str]:
        """The names of all that is in the folder of a table."""
        if self.store is not None:
            return self._stored(self.store, table, generation).names()
        folder = Path(generation.named(self.root)) / table
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def manifest(self, table: str = "public/t", generation: Generation = FIRST) -> Path | None:
        """The manifest of a table, beside which are the files that it names."""
        folder = Path(generation.named(str(self.folder))) / table
        if self.store is not None:
            self._stored(self.store, table, generation).copied(folder)
        found = folder / "_manifest.json"
        return found if found.exists() else None

    @staticmethod
    def _stored(store: Store, table: str, generation: Generation) -> Store:
        return replace(store, url=generation.named(store.url)) / table

    def query(
        self,
        sql: str,
        table: str = "public/t",
        generation: Generation = FIRST,
        where: str = "true",
        view: str = "t",
    ) -> list[tuple[object, ...]]:
        """The rows of a query over a view of the table, whose files the manifest names."""
        manifest = self.manifest(table, generation)
        assert manifest is not None, f"{table} has no manifest"
        with duckdb.connect() as connection:
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute(
                "SET VARIABLE files = (SELECT list(? || '/' || file.path) FROM "
                f"(SELECT unnest(files) AS file FROM read_json(?)) WHERE {where})",
                [str(manifest.parent), str(manifest)],
            )
            (some,) = connection.execute("SELECT getvariable('files') IS NOT NULL").fetchall()[0]
            if not some:
                return []
            connection.execute(
                f"CREATE VIEW {view} AS SELECT * FROM read_parquet(getvariable('files'), "
                "union_by_name = true, hive_partitioning = true)"
            )
            found = connection.execute(sql).to_arrow_table().to_pylist()
            return [tuple(row.values()) for row in found]

"""A lake of Iceberg tables on this disk with a catalog in SQLite, as tests write and read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.table import Table

from sinks.lakehouse import LakehouseSink, LakeNames, MaintenancePlan
from sinks.lakehouse.iceberg import Catalogs, MergesOnRead, iceberg_tables
from sinks.lakehouse.sink import OpenTable
from sinks.lakehouse.writing import Merges
from tests.lake import query_iceberg

Way = Literal["append", "merge_on_read", "copy_on_write"]
WAYS: tuple[Way, ...] = ("append", "merge_on_read", "copy_on_write")


@dataclass(frozen=True)
class IcebergLake:
    """Tables below ``root``, and the database with the catalog beside it."""

    root: Path

    def catalog(self) -> Catalog:
        uri = f"sqlite:///{self.root}.catalog.db"
        return Catalogs("lake", {"type": "sql", "uri": uri}, str(self.root), {}).open()

    def tables(self, owner: str = "shop/orders") -> OpenTable:
        return iceberg_tables(self.catalog, str(self.root), owner)

    def sink(
        self, way: Way = "append", owner: str = "shop/orders", plan: MaintenancePlan | None = None
    ) -> LakehouseSink:
        return LakehouseSink(
            self.tables(owner),
            LakeNames(),
            mode="append" if way == "append" else "upsert",
            merges=MergesOnRead() if way == "merge_on_read" else Merges(),
            maintenance=plan,
        )

    def table(self, name: str = "t", namespace: str = "public") -> Table | None:
        try:
            return self.catalog().load_table((namespace, name))
        except (NoSuchTableError, NoSuchNamespaceError):
            return None

    def rows(self, sql: str, *names: str, namespace: str = "public") -> list[tuple[object, ...]]:
        """The rows of a query over tables, by an engine that has none of our code."""
        tables = {name: self.table(name, namespace) for name in names or ("t",)}
        places = {name: table.metadata_location for name, table in tables.items() if table}
        return query_iceberg(sql, **places)

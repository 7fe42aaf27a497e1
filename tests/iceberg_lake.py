"""A lake of Iceberg tables with a catalog in SQLite, as tests write and read it."""

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
from tests.stores import Store

Way = Literal["append", "merge_on_read", "copy_on_write"]
WAYS: tuple[Way, ...] = ("append", "merge_on_read", "copy_on_write")


@dataclass(frozen=True)
class IcebergLake:
    """Tables below ``root`` or in a store; the database with the catalog is beside ``root``."""

    root: Path
    store: Store | None = None

    @property
    def place(self) -> str:
        return str(self.root) if self.store is None else self.store.url

    def catalog(self) -> Catalog:
        properties = {"type": "sql", "uri": f"sqlite:///{self.root}.catalog.db"}
        options = {} if self.store is None else {**self.store.options, **self.store.iceberg}
        return Catalogs("lake", properties, self.place, options).open()

    def tables(self, owner: str = "shop/orders") -> OpenTable:
        return iceberg_tables(self.catalog, self.place, owner)

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
        places = {name: self._here(table) for name, table in tables.items() if table}
        return query_iceberg(sql, moved=self.store is not None, **places)

    def _here(self, table: Table) -> str:
        """The metadata file of a table, on this disk with all that it names."""
        if self.store is None:
            return table.metadata_location
        folder = table.location().removeprefix(f"{self.store.url}/")
        copy = (self.store / folder).copied(self.root / folder)
        return str(copy / "metadata" / table.metadata_location.rpartition("/")[2])

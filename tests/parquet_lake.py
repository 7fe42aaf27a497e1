"""Typed Parquet tables as somebody reads them who has none of our code: DuckDB, by the manifest.

``python -m tests.parquet_lake ROOT OPTIONS FILE SEED`` delivers recorded changes from the first on;
it ends with 0 when all of it is settled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import duckdb
import orjson

from cdc.generation import FIRST, Generation
from sinks.lakehouse import LakeNames, MaintenancePlan
from sinks.lakehouse.names import LakeTarget
from sinks.lakehouse.parquet import TypedParquetSink, parquet_tables
from sinks.lakehouse.parquet.table import ParquetTable
from tests.fix_s3 import S3
from tests.lake_deliverer import deliver_all

DATE = ("walbrook_date",)


class ParquetLake:
    """The tables below a folder, or below a URL of an S3 server."""

    def __init__(self, root: str, options: dict[str, str], copies: Path, s3: S3 | None) -> None:
        self.root, self.options = root, options
        self._copies, self._s3 = copies, s3

    @classmethod
    def on_disk(cls, folder: Path) -> ParquetLake:
        return cls(str(folder), {}, folder, None)

    @classmethod
    def in_store(cls, s3: S3, copies: Path) -> ParquetLake:
        options = {
            "AWS_ENDPOINT_URL": f"http://{s3.endpoint}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "eu-central-1",
        }
        return cls(f"s3://{s3.bucket}/lake", options, copies, s3)

    def tables(
        self, generation: Generation = FIRST, owner: str = "shop/orders"
    ) -> Callable[[LakeTarget], ParquetTable]:
        root = generation.named(self.root)
        return parquet_tables(root, owner, self.options, generation=generation)

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
        if self._s3 is None:
            folder = Path(generation.named(self.root)) / table
            return sorted(
                str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
            )
        prefix = f"{generation.named('lake')}/{table}/"
        return sorted(
            name.removeprefix(prefix) for name in self._s3.objects() if name.startswith(prefix)
        )

    def manifest(self, table: str = "public/t", generation: Generation = FIRST) -> Path | None:
        """The manifest of a table, beside which are the files that it names."""
        folder = Path(generation.named(self.root)) / table
        if self._s3 is not None:
            url, folder = f"{generation.named(self.root)}/{table}", self._copies / table
            if "_manifest.json" not in self.objects(table, generation):
                return None
            content = self._s3.read(f"{url}/_manifest.json")
            for file in orjson.loads(content)["files"]:
                copy = folder / file["path"]
                if not copy.exists():
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_bytes(self._s3.read(f"{url}/{file['path']}"))
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "_manifest.json").write_bytes(content)
        found = folder / "_manifest.json"
        return found if found.exists() else None

    def query(
        self,
        sql: str,
        table: str = "public/t",
        generation: Generation = FIRST,
        where: str = "true",
    ) -> list[tuple[object, ...]]:
        """The rows of a query over the table ``t``, whose files the manifest names."""
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
                "CREATE VIEW t AS SELECT * FROM read_parquet(getvariable('files'), "
                "union_by_name = true, hive_partitioning = true)"
            )
            found = connection.execute(sql).to_arrow_table().to_pylist()
            return [tuple(row.values()) for row in found]


def main(root: str, options: str, file: str, seed: str) -> None:
    lake = ParquetLake(root, orjson.loads(options), Path(), None)
    plan = MaintenancePlan(interval_s=0.2, target_file_bytes=1 << 20, retain_hours=1)
    deliver_all(lake.sink(maintenance=plan), Path(file), int(seed))


if __name__ == "__main__":
    main(*sys.argv[1:])

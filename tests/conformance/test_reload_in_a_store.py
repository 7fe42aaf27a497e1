"""A reload of tables in an object store: nothing of its shadow is left there."""

from __future__ import annotations

from pathlib import Path

import pytest

from sinks.lakehouse import LakehouseSink, LakeNames
from sinks.lakehouse.delta import delta_tables
from sinks.lakehouse.iceberg import Catalogs, MergesOnRead, iceberg_tables
from sinks.lakehouse.names import LakeTarget
from sinks.lakehouse.sink import OpenTable
from tests.fix_postgres import Database
from tests.fix_s3 import S3
from tests.reload_deliverer import deliver_all
from tests.reload_history import recorded


def _tables(kind: str, s3: S3, directory: Path) -> OpenTable:
    root = f"s3://{s3.bucket}/lake"
    options = {"AWS_ENDPOINT_URL": f"http://{s3.endpoint}", "AWS_REGION": "eu-central-1"}
    if kind == "delta":
        return delta_tables(root, "shop/orders", options | {"AWS_ALLOW_HTTP": "true"})
    catalog = {"type": "sql", "uri": f"sqlite:///{directory}/catalog.db"}
    return iceberg_tables(Catalogs("lake", catalog, root, options).open, root, "shop/orders")


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_table_in_a_store_becomes_what_its_shadow_is(
    kind: str, database: Database, s3: S3, tmp_path: Path
) -> None:
    recorded(database, tmp_path / "changes.arrow")
    merges = MergesOnRead() if kind == "iceberg" else None
    tables = _tables(kind, s3, tmp_path)
    for _ in range(2):  # the second sink brings again what the first one had
        sink = LakehouseSink(tables, LakeNames(), mode="upsert", merges=merges)
        deliver_all(sink, tmp_path / "changes.arrow")
    table = tables(LakeTarget("public", "t"))
    assert table.load() is not None
    found = [row for file in table.files() for row in table.read(file).to_pylist()]
    expected = database.execute("SELECT id, v FROM t ORDER BY id")
    assert sorted((row["id"], row["v"]) for row in found) == expected
    assert [key for key in s3.objects() if "/reload-" in key] == []

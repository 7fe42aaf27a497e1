"""Catalogs behind a server: a real REST catalog, and Glue as moto serves it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sinks.lakehouse import LakehouseSink, LakeNames
from sinks.lakehouse.iceberg import Catalogs, MergesOnRead, iceberg_tables
from sinks.lakehouse.names import LakeTarget
from sinks.lakehouse.sink import Mode
from sinks.lakehouse.table import ConflictError
from tests.fix_postgres import Database
from tests.fix_s3 import S3
from tests.iceberg_rest import rest_catalog
from tests.lake import query_iceberg
from tests.slot_batches import SlotBatches, slot_batches

KINDS = ("rest", "glue")
TARGET = LakeTarget("public", "t")


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    with slot_batches(database) as batches:
        yield batches


@pytest.fixture(scope="module")
def rest_url() -> Iterator[str]:
    with rest_catalog() as url:
        yield url


@pytest.fixture
def catalogs(request: pytest.FixtureRequest, tmp_path: Path) -> Catalogs:
    properties = {"type": request.param}
    if request.param == "rest":
        properties["uri"] = request.getfixturevalue("rest_url")
    else:
        s3: S3 = request.getfixturevalue("s3")
        properties |= {"glue.endpoint": f"http://{s3.endpoint}", "glue.region": "eu-central-1"}
    return Catalogs("lake", properties, str(tmp_path / "lake"), {})


def _rows(catalogs: Catalogs, sql: str, namespace: str) -> list[tuple[object, ...]]:
    table = catalogs.open().load_table((namespace, "t"))
    return query_iceberg(sql, t=table.metadata_location)


@pytest.mark.parametrize("catalogs", KINDS, indirect=True)
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_every_change_is_there_once_and_columns_follow(
    mode: Mode, catalogs: Catalogs, source: SlotBatches
) -> None:
    names = LakeNames(f"{mode}_{{schema}}.{{table}}")
    tables = iceberg_tables(catalogs.open, catalogs.root, f"shop/{mode}")
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "INSERT INTO t SELECT g, g FROM generate_series(1, 9) g",
        "UPDATE t SET n = -1 WHERE id = 4",
        "ALTER TABLE t ADD COLUMN more text",
        "ALTER TABLE t ALTER COLUMN n TYPE bigint",
        "UPDATE t SET n = 5000000000, more = 'm' WHERE id = 3",
        "DELETE FROM t WHERE id = 5",
    )
    batch = source.taken()
    for start in (0, 2):  # the second sink brings again what the first one had
        sink = LakehouseSink(tables, names, mode=mode, merges=MergesOnRead())
        for piece in batch.slice(0, start + 8).slices(4):
            assert sink.deliver(piece).error is None
    delivery = sink.deliver(batch)
    assert (delivery.error, delivery.settled, delivery.absorbed) == (None, len(batch), 10)
    found = _rows(catalogs, "SELECT id, n, more FROM t", f"{mode}_public")
    if mode == "upsert":
        expected = [(at, at, None) for at in (1, 2, 6, 7, 8, 9)] + [
            (3, 5000000000, "m"),
            (4, -1, None),
        ]
        assert sorted(found, key=repr) == sorted(expected, key=repr)
    else:
        assert len(found) == 12


@pytest.mark.parametrize("catalogs", KINDS, indirect=True)
def test_a_process_that_has_an_old_position_commits_nothing(
    catalogs: Catalogs, source: SlotBatches
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    tables = iceberg_tables(catalogs.open, catalogs.root, "shop/orders")
    sink = LakehouseSink(tables, LakeNames(), mode="upsert")
    assert sink.deliver(source.taken()).error is None
    first, second = tables(TARGET), tables(TARGET)
    states = first.load(), second.load()
    assert states[0] is not None
    assert states[0] == states[1]
    rows = first.read(first.files()[0])
    first.commit(first.write(rows), [], states[0].moved(states[0].cursor))
    with pytest.raises(ConflictError):
        second.commit(second.write(rows), [], states[0].moved(states[0].cursor))
    assert len(_rows(catalogs, "SELECT id FROM t", "public")) == 2

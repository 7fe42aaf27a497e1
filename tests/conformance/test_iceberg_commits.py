"""What a commit of the iceberg sink rests on: lost answers, old processes, stores and catalogs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.update import TableRequirement, TableUpdate

from cdc.config import IcebergDestination
from cdc.cursor import ORIGIN
from cdc.errors import OperatorError, TransientError
from sinks import open_sink
from sinks.lakehouse import LakehouseSink, LakeNames
from sinks.lakehouse.iceberg import Catalogs, MergesOnRead, iceberg_tables
from sinks.lakehouse.names import LakeTarget
from sinks.lakehouse.table import ConflictError, TableState
from tests.conformance.test_iceberg_sink import delivered
from tests.fix_postgres import Database
from tests.fix_s3 import S3
from tests.iceberg_lake import IcebergLake
from tests.lake import query_iceberg
from tests.slot_batches import SlotBatches, slot_batches

pytestmark = pytest.mark.sinks

TARGET = LakeTarget("public", "t")


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    with slot_batches(database) as batches:
        yield batches


@pytest.fixture
def lake(tmp_path: Path) -> IcebergLake:
    return IcebergLake(tmp_path / "lake")


class _Lossy:
    """A catalog whose answers to commits of rows are lost, before or after they are done."""

    def __init__(self, catalog: Catalog, *, done: bool) -> None:
        self._catalog, self._done, self.lost = catalog, done, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._catalog, name)

    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        if self.lost:
            return self._catalog.commit_table(table, requirements, updates)
        self.lost += 1
        if self._done:
            self._catalog.commit_table(table, requirements, updates)
        raise ConnectionError("no answer")


@pytest.mark.parametrize("done", [True, False])
def test_a_commit_whose_answer_is_lost_is_there_once(
    done: bool, source: SlotBatches, lake: IcebergLake
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    batch = source.taken()
    delivered(lake.sink(), batch.slice(0, 1))
    lossy = _Lossy(lake.catalog(), done=done)
    tables = iceberg_tables(lambda: lossy, str(lake.root), "shop/orders")  # type: ignore[arg-type,return-value]
    sink = LakehouseSink(tables, LakeNames(), mode="append")
    delivery = sink.deliver(batch)
    assert lossy.lost == 1
    if done:
        assert delivery.error is None
    else:
        assert isinstance(delivery.error, TransientError)
        delivered(sink, batch, absorbed=1)
    assert lake.rows("SELECT id FROM t ORDER BY id") == [(1,), (2,)]


def test_a_process_that_has_an_old_position_commits_nothing(
    source: SlotBatches, lake: IcebergLake
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    batch = source.taken()
    delivered(lake.sink(), batch.slice(0, 1))
    old = lake.tables()(TARGET)
    state = old.load()
    assert state is not None
    added = old.write(old.read(old.files()[0]))
    delivered(lake.sink(), batch, absorbed=1)
    with pytest.raises(ConflictError):
        old.commit(added, [], state.moved(batch.cursor(1)))
    assert lake.rows("SELECT id FROM t ORDER BY id") == [(1,), (2,)]


def test_a_table_that_another_process_has_made_meanwhile_is_a_conflict(lake: IcebergLake) -> None:
    schema = pa.schema([pa.field("id", pa.int32())])
    lake.tables()(TARGET).create(schema, (), TableState())
    with pytest.raises(ConflictError):
        lake.tables()(TARGET).create(schema, (), TableState())
    assert lake.tables()(TARGET).load() == TableState(cursor=ORIGIN)


def test_an_object_store_holds_every_change_once(
    source: SlotBatches, s3: S3, tmp_path: Path
) -> None:
    root = f"s3://{s3.bucket}/lake"
    options = {"AWS_ENDPOINT_URL": f"http://{s3.endpoint}", "AWS_REGION": "eu-central-1"}
    uri = f"sqlite:///{tmp_path}/catalog.db"
    catalogs = Catalogs("lake", {"type": "sql", "uri": uri}, root, options)
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "INSERT INTO t SELECT g, g FROM generate_series(1, 9) g",
        "UPDATE t SET n = -1 WHERE id = 4",
        "DELETE FROM t WHERE id = 5",
    )
    batch = source.taken()
    tables = iceberg_tables(catalogs.open, root, "shop/orders")
    for start in (0, 2):  # the second sink brings again what the first one had
        sink = LakehouseSink(tables, LakeNames(), mode="upsert", merges=MergesOnRead())
        for piece in batch.slice(0, start + 8).slices(4):
            assert sink.deliver(piece).error is None
    delivered(sink, batch, absorbed=10)
    table = tables(TARGET)
    assert table.load() is not None
    found = [row for file in table.files() for row in table.read(file).to_pylist()]
    expected = [{"id": at, "n": -1 if at == 4 else at} for at in range(1, 10) if at != 5]
    assert sorted(found, key=lambda row: int(row["id"])) == expected
    before = len(s3.objects())
    s3.write("lake/public/t/data/left-by-a-crash.parquet", b"PAR1")
    assert table.vacuum(0) > 0
    assert len(s3.objects()) <= before
    assert "lake/public/t/data/left-by-a-crash.parquet" not in s3.objects()
    assert [row for file in table.files() for row in table.read(file).to_pylist()] == found


def test_a_store_that_refuses_the_account_is_an_operator_error_without_secrets(
    source: SlotBatches, s3: S3, tmp_path: Path
) -> None:
    root = f"s3://{s3.bucket}/lake"
    options = {
        "AWS_ENDPOINT_URL": f"http://{s3.endpoint}",
        "AWS_REGION": "eu-central-1",
        "AWS_ACCESS_KEY_ID": s3.stranger.key,
        "AWS_SECRET_ACCESS_KEY": s3.stranger.secret,
    }
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    uri = f"sqlite:///{tmp_path}/catalog.db"
    catalogs = Catalogs("lake", {"type": "sql", "uri": uri}, root, options)
    assert s3.stranger.secret not in repr(catalogs)
    tables = iceberg_tables(catalogs.open, root, "shop/orders")
    delivery = LakehouseSink(tables, LakeNames(), mode="append").deliver(source.taken())
    assert isinstance(delivery.error, OperatorError), delivery.error
    assert "storage_options" in delivery.error.fix
    assert s3.stranger.secret not in delivery.error.full_text


@pytest.mark.migrated
def test_a_catalog_without_a_place_lies_in_the_state_database_and_never_enters_the_stream(
    source: SlotBatches, database: Database, tmp_path: Path
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    destination = IcebergDestination(path=tmp_path / "lake", mode="upsert")
    sink = open_sink(
        destination, consumer="orders", batch_size=1, source="shop", state_dsn=database.dsn
    )
    delivered(sink, source.taken())
    sink.close()
    found = database.execute(
        "SELECT table_namespace, table_name FROM walbrook.iceberg_tables ORDER BY 1, 2"
    )
    assert found == [("_walbrook_orders", "tables"), ("public", "t")]
    assert source.read() is None
    ((place,),) = database.execute(
        "SELECT metadata_location FROM walbrook.iceberg_tables WHERE table_name = 't'"
    )
    assert query_iceberg("SELECT id FROM t", t=str(place)) == [(1,)]


def test_a_missing_package_is_reported_by_the_name_of_its_extra() -> None:
    code = (
        "import sys; sys.modules['pyiceberg'] = None\n"
        "from cdc.config.destination import IcebergDestination\n"
        "from sinks import open_sink\n"
        "open_sink(IcebergDestination(path='x'), consumer='c', batch_size=1)"
    )
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'walbrook[lakehouse]'" in failed.stderr

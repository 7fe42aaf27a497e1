"""What a commit of the iceberg sink rests on: lost answers, old processes, stores and catalogs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.update import TableRequirement, TableUpdate

from cdc.config import IcebergDestination
from cdc.cursor import ORIGIN
from cdc.errors import TransientError
from sinks import open_sink
from sinks.lakehouse import LakehouseSink, LakeNames
from sinks.lakehouse.iceberg import iceberg_tables
from sinks.lakehouse.table import ConflictError, TableState
from tests.fix_postgres import Database
from tests.iceberg_lake import IcebergLake
from tests.lake import query_iceberg
from tests.lake_checks import T, delivered
from tests.slot_batches import SlotBatches

pytestmark = pytest.mark.sinks


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
    old = lake.tables()(T)
    state = old.load()
    assert state is not None
    added = old.write(old.read(old.files()[0]))
    delivered(lake.sink(), batch, absorbed=1)
    with pytest.raises(ConflictError):
        old.commit(added, [], state.moved(batch.cursor(1)))
    assert lake.rows("SELECT id FROM t ORDER BY id") == [(1,), (2,)]


def test_a_table_that_another_process_has_made_meanwhile_is_a_conflict(lake: IcebergLake) -> None:
    schema = pa.schema([pa.field("id", pa.int32())])
    lake.tables()(T).create(schema, (), TableState())
    with pytest.raises(ConflictError):
        lake.tables()(T).create(schema, (), TableState())
    assert lake.tables()(T).load() == TableState(cursor=ORIGIN)


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

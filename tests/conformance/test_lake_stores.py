"""Lakes in object stores: of S3, of Azure and of Google, each behind a server that speaks it.

No server for tests speaks what delta-rs and obstore say to Google's store, so of ``gs://`` only
Iceberg is here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cdc.errors import OperatorError
from sinks.lakehouse.table import ConflictError
from tests.fix_s3 import S3
from tests.fix_stores import StoreOf, s3_store
from tests.lake_checks import EVOLUTION, T, delivered
from tests.lakes import EVERY_LAKE, Lake
from tests.slot_batches import SlotBatches

pytestmark = pytest.mark.sinks

IN_STORES = [
    *(f"{name} in {kind}" for kind in ("s3", "azure") for name in EVERY_LAKE),
    *(f"{name} in gcs" for name in EVERY_LAKE if "iceberg" in name),
]
ONE_OF_EACH = [name for name in IN_STORES if "append" in name]


@pytest.fixture
def lake(request: pytest.FixtureRequest, tmp_path: Path, store_of: StoreOf) -> Lake:
    name, _, kind = request.param.partition(" in ")
    return Lake.of(tmp_path / "lake", name, store=store_of(kind))


def _elsewhere(lake: Lake) -> Lake:
    """The same in a bucket that is not there."""
    assert lake.store is not None
    scheme, _, rest = lake.store.url.partition("://")
    return replace(lake, store=replace(lake.store, url=f"{scheme}://nobodys{rest[7:]}"))


@pytest.mark.parametrize("lake", IN_STORES, indirect=True)
def test_a_store_holds_every_change_once_and_no_file_of_a_crash(
    lake: Lake, source: SlotBatches
) -> None:
    source.run(*EVOLUTION)
    batch = source.taken()
    for start in (0, 2):  # the second sink brings again what the first one had
        sink = lake.sink()
        for piece in batch.slice(0, start + 3).slices(2):
            assert sink.deliver(piece).error is None
    delivered(lake.sink(), batch, absorbed=5)
    store = lake.store
    assert store is not None
    mine = [name for name in store.names() if name.startswith("public/t/")]
    folder = next(name for name in mine if name.endswith(".parquet")).rpartition("/")[0]
    left_by_a_crash = f"{folder}/part-00000000-0000-0000-0000-000000000000.parquet"
    store.write(left_by_a_crash, b"PAR1")
    table = lake.tables()(T)
    table.load()
    assert table.vacuum(0) > 0
    assert left_by_a_crash not in store.names()
    if lake.is_merged:
        assert lake.rows("SELECT id, a, label, small FROM t ORDER BY id") == [
            (1, 10, "uno", 70000), (3, 3_000_000_000, "three", None),
        ]  # fmt: skip
    else:
        changes = lake.rows("SELECT walbrook_action, id FROM t ORDER BY walbrook_lsn")
        actions = ["insert", "insert", "update", "insert", "delete", "update"]
        assert changes == list(zip(actions, [1, 2, 1, 3, 2, 1], strict=True))


@pytest.mark.parametrize("lake", ONE_OF_EACH, indirect=True)
def test_of_two_processes_with_the_same_changes_one_is_refused_and_absorbs_them(
    lake: Lake, source: SlotBatches
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch = source.taken()
    delivered(lake.sink(), batch)
    stale, fresh = lake.tables()(T), lake.tables()(T)
    state = stale.load()
    fresh.load()
    assert state is not None
    rows = fresh.read(fresh.files()[0])
    fresh.commit(fresh.write(rows), [], state.moved(state.cursor))
    with pytest.raises(ConflictError):
        stale.commit(stale.write(rows), [], state.moved(state.cursor))
    assert lake.rows("SELECT count(*) FROM t") == [(2,)]
    delivered(lake.sink(), batch, absorbed=len(batch))


@pytest.mark.parametrize("lake", [n for n in ONE_OF_EACH if "gcs" not in n], indirect=True)
def test_a_bucket_that_is_not_there_is_an_operator_error(lake: Lake, source: SlotBatches) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    error = _elsewhere(lake).sink().deliver(source.taken()).error
    assert isinstance(error, OperatorError), error
    assert "storage_options" in error.fix


@pytest.mark.parametrize("name", [name for name in EVERY_LAKE if "append" in name])
def test_a_store_that_refuses_the_account_is_an_operator_error_without_secrets(
    name: str, source: SlotBatches, s3: S3, tmp_path: Path
) -> None:
    login = {"AWS_ACCESS_KEY_ID": s3.stranger.key, "AWS_SECRET_ACCESS_KEY": s3.stranger.secret}
    store = s3_store(s3)
    lake = Lake.of(
        tmp_path / "lake", name, store=replace(store, options={**store.options, **login})
    )
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    error = lake.sink().deliver(source.taken()).error
    assert isinstance(error, OperatorError), error
    assert "storage_options" in error.fix
    assert s3.stranger.secret not in error.full_text

"""A process that was replaced in the middle of a reload and goes on takes no row from the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from cdc.change import READ, MessageBatch
from cdc.decoding.shapes import Context, shape_for
from sinks.base import Reloads
from sinks.lakehouse.reloading import Reloader
from tests.fix_postgres import Database
from tests.iceberg_lake import IcebergLake
from tests.lake import query
from tests.parquet_lake import ParquetLake
from tests.reload_deliverer import pieces, sink_of
from tests.reload_history import RELOAD, recorded

_IDS = "SELECT DISTINCT id FROM t WHERE id < 60 ORDER BY id"


def _sink(way: str, root: Path) -> Reloads:
    return ParquetLake(root).sink() if way == "parquet" else sink_of(way, str(root))


def _ids(way: str, root: Path) -> list[tuple[object, ...]]:
    if way == "parquet":
        return ParquetLake(root).query(_IDS)
    if way.startswith("delta"):
        return query(_IDS, t=root / "public" / "t")
    return IcebergLake(root).rows(_IDS, "t")


def _deliver(sink: Reloads, rows: pa.RecordBatch) -> None:
    is_read = pc.any(pc.equal(rows.column("action"), READ)).as_py()
    sink.loading(RELOAD if is_read else None)
    shape = shape_for("sequin", Context("orders", "shop", "h", "app", now_ns=0))
    delivery = sink.deliver(MessageBatch(rows, shape))
    assert delivery.error is None, delivery.error


@pytest.mark.parametrize("way", ["parquet", "delta append", "delta upsert", "iceberg on_read"])
@pytest.mark.parametrize("step", ["_begin", "_swap"])
def test_a_mark_that_comes_late_changes_nothing(
    way: str, step: str, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, root = tmp_path / "changes.arrow", tmp_path / "lake"
    recorded(database, file)
    (rows,) = pa.ipc.open_file(file).read_all().combine_chunks().to_batches()
    first, begin, *reads, during, swap, behind = pieces(rows)
    old, new = _sink(way, root), _sink(way, root)
    takes: Callable[..., None] = getattr(Reloader, step)

    def late(reloader: Reloader, *given: Any) -> None:
        """The other one does it, and goes on, while this one knows the table as it was."""
        monkeypatch.undo()
        for each in [begin, *reads] if step == "_begin" else [swap]:
            _deliver(new, each)
        takes(reloader, *given)

    for each in [first] if step == "_begin" else [first, begin, *reads, during]:
        _deliver(old, each)
    monkeypatch.setattr(Reloader, step, late)
    _deliver(old, begin if step == "_begin" else swap)
    for each in [during, swap, behind] if step == "_begin" else [behind]:
        _deliver(new, each)
    assert _ids(way, root) == database.execute(_IDS)
    old.close()
    new.close()

"""What a merge of a table costs, by its format, its size and where the changes lie in it.

One process hands the sink changes as they come from decode, without a service around it. CPU time
counts, because the machine may be busy.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.sizes import progress
from cdc.change import MessageBatch
from cdc.decoding.joins import joined
from cdc.decoding.row_texts import version_text
from cdc.decoding.shapes import Context, shape_for
from sinks.base import Delivery
from sinks.lakehouse import LakehouseSink, LakeNames
from sinks.lakehouse.delta import delta_tables
from sinks.lakehouse.iceberg import Catalogs, MergesOnRead, iceberg_tables
from tests.pgoutput import relation

_COLUMNS: list[tuple[str, int] | tuple[str, int, bool]] = [
    ("id", 20, True), ("n", 23), ("price", 701), ("status", 25), ("note", 25), ("at", 1184),
]  # fmt: skip
_VERSION = version_text(relation(1, "public", "orders", _COLUMNS))
_AT_ONCE, _FEW = 100_000, 10_000
_SIZES = {"200k": 200_000, "1m": 1_000_000, "3m": 3_000_000}

_Ids = npt.NDArray[np.int64]
_OpenSink = Callable[[Path], LakehouseSink]


def run() -> dict[str, object]:
    """CPU seconds of one commit, for each size of the table and each kind of changes."""
    return {**_by_size("", _delta, _SIZES), **_by_size("iceberg_", _iceberg, _SIZES)}


def _by_size(form: str, open_sink: _OpenSink, sizes: dict[str, int]) -> dict[str, object]:
    figures: dict[str, object] = {}
    for name, rows in sizes.items():
        for kind, used_s in _merges(rows, open_sink).items():
            figures[f"{form}merge_cpu_s_{name}_{kind}"] = round(used_s, 2)
        progress(f"lakehouse, {form}merges: a table of {rows:,} rows")
    return figures


def _delta(directory: Path) -> LakehouseSink:
    tables = delta_tables(str(directory), "bench/merge", {})
    return LakehouseSink(tables, LakeNames(), mode="upsert")


def _iceberg(directory: Path) -> LakehouseSink:
    uri = f"sqlite:///{directory}/catalog.db"
    catalogs = Catalogs("bench", {"type": "sql", "uri": uri}, str(directory), {})
    tables = iceberg_tables(catalogs.open, str(directory), "bench/merge")
    return LakehouseSink(tables, LakeNames(), mode="upsert", merges=MergesOnRead())


def _merges(rows: int, open_sink: _OpenSink) -> dict[str, float]:
    rng = np.random.default_rng(1)
    random = np.unique(rng.integers(0, rows, rows + _AT_ONCE))
    kinds = {
        "100k_random": np.sort(rng.choice(random, _AT_ONCE, replace=False)),
        "10k_random": np.sort(rng.choice(random, _FEW, replace=False)),
        "10k_newest": np.arange(rows - _FEW, rows),
    }
    with tempfile.TemporaryDirectory(prefix="walbrook-merge-") as directory:
        sink = open_sink(Path(directory))
        lsn = 8
        for start in range(0, rows, _AT_ONCE):
            lsn += 8
            _require(sink.deliver(_changes(np.arange(start, start + _AT_ONCE), "insert", lsn)))
        used: dict[str, float] = {}
        for kind, ids in kinds.items():
            lsn += 8
            batch = _changes(ids, "update", lsn)
            before = time.process_time()
            _require(sink.deliver(batch))
            used[kind] = time.process_time() - before
    return used


def _require(delivery: Delivery) -> None:
    if delivery.error is not None:
        raise delivery.error


def _changes(ids: _Ids, action: str, lsn: int) -> MessageBatch:
    """One transaction that changes these rows."""
    count = len(ids)
    key = pa.array(ids).cast(pa.string())
    rest = "\t7\t1.5\tpacked\tleft with the neighbour at number "
    nothing = pa.nulls(count, pa.string())

    def same(value: object, kind: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, kind), count)

    columns = {
        "commit_lsn": same(lsn, pa.int64()),
        "commit_idx": pa.array(np.arange(count)),
        "commit_timestamp": same(1_790_000_000_000_000, pa.timestamp("us", tz="UTC")),
        "table_schema": same("public", pa.string()),
        "table_name": same("orders", pa.string()),
        "action": same(action, pa.string()),
        "record_pks": joined('["', key, '"]'),
        "old_record_pks": nothing,
        "unchanged": nothing,
        "row_text": joined(key, rest, pc.utf8_reverse(key), "\t2026-01-01 00:00:00.123456+00"),
        "old_row_text": nothing,
        "table_version": same(_VERSION, pa.string()),
    }
    shape = shape_for("sequin", Context("bench", "bench", "h", "d", now_ns=0))
    return MessageBatch(pa.RecordBatch.from_pydict(columns), shape)

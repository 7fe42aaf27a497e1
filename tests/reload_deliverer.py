"""A process that delivers a recorded history with a reload in it, from the first message on.

``python -m tests.reload_deliverer WAY PLACE FILE``: the marks of the reload and the rows that it
read stand among the changes. It ends with 0 when all is settled.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import READ, MessageBatch
from cdc.decoding.shapes import Context, shape_for
from cdc.errors import TransientError
from sinks.base import Reloads
from sinks.lakehouse import LakehouseSink, LakeNames
from sinks.lakehouse.delta import delta_tables
from sinks.postgres import PostgresSink
from tests.iceberg_lake import IcebergLake
from tests.reload_history import RELOAD

_TRIES_MAX = 100
_ROWS_MAX = 100


def sink_of(way: str, place: str) -> Reloads:
    """One of ``reload_rig.WAYS``, at a conninfo string or in a folder."""
    kind, mode = way.split()
    if kind == "postgres":
        sink = PostgresSink(place, source="shop", consumer="orders", mode=mode)  # type: ignore[arg-type]
        sink.follow("one")
        return sink
    if kind == "delta":
        tables = delta_tables(place, "shop/orders", {})
        return LakehouseSink(tables, LakeNames(), mode=mode)  # type: ignore[arg-type]
    lake_way = "merge_on_read" if mode == "on_read" else mode
    return IcebergLake(Path(place)).sink(lake_way)  # type: ignore[arg-type]


def pieces(rows: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Rows as a worker hands them over: marks alone, and read rows apart from changes."""
    actions = rows.column("action").to_pylist()
    kinds = [each if each in ("reload", READ) else "" for each in actions]
    found, start = [], 0
    for at in range(1, len(kinds) + 1):
        whole = at < len(kinds) and kinds[at] == kinds[start] != "reload" and at - start < _ROWS_MAX
        if not whole:
            found.append(rows.slice(start, at - start))
            start = at
    return found


def deliver_all(sink: Reloads, file: Path) -> None:
    """All of it, from the first message on."""
    rows = pa.ipc.open_file(pa.py_buffer(file.read_bytes())).read_all().combine_chunks()
    shape = shape_for("sequin", Context("orders", "shop", "h", "app", now_ns=0))
    for piece in pieces(rows.to_batches()[0]):
        is_read = pc.any(pc.equal(piece.column("action"), READ)).as_py()
        sink.loading(RELOAD if is_read else None)
        for _ in range(_TRIES_MAX):
            delivery = sink.deliver(MessageBatch(piece, shape))
            if delivery.error is None:
                break
            if not isinstance(delivery.error, TransientError):
                raise delivery.error
            time.sleep(0.1)
        assert delivery.error is None, delivery.error
        assert delivery.settled == piece.num_rows
    sink.close()


if __name__ == "__main__":
    deliver_all(sink_of(sys.argv[1], sys.argv[2]), Path(sys.argv[3]))

"""A process that delivers recorded changes to a lake from the first on.

``python -m tests.lake_deliverer LAKE FILE SEED``: cut at random, and tried again while another
writer is faster, with maintenance all the time. It ends with 0 when all of it is settled.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pyarrow as pa

from cdc.change import MessageBatch
from cdc.decoding.shapes import Context, shape_for
from cdc.errors import TransientError
from sinks.lakehouse import LakehouseSink, MaintenancePlan
from tests.lakes import Lake

_TRIES_MAX = 600
_PAUSE_S = 0.1
_ROWS_MAX = 60


def read_batch(file: Path) -> MessageBatch:
    """What ``write_batch`` wrote."""
    rows = pa.ipc.open_file(pa.py_buffer(file.read_bytes())).read_all().combine_chunks()
    shape = shape_for("sequin", Context("orders", "shop", "h", "app", now_ns=0))
    return MessageBatch(rows.to_batches()[0], shape)


def write_batch(batch: MessageBatch, file: Path) -> None:
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_file(out, batch.rows.schema) as stream:
        stream.write_batch(batch.rows)


def deliver_all(sink: LakehouseSink, file: Path, seed: int) -> None:
    """All of it, from the first on."""
    rng = random.Random(seed)
    batch = read_batch(file)
    start = tries = 0
    while start < len(batch):
        delivery = sink.deliver(batch.slice(start, rng.randrange(1, _ROWS_MAX)))
        start += delivery.settled
        if delivery.error is None:
            continue
        tries += 1
        if not isinstance(delivery.error, TransientError) or tries > _TRIES_MAX:
            raise delivery.error
        time.sleep(_PAUSE_S)
    sink.close()


def main(lake: str, file: str, seed: str) -> None:
    plan = MaintenancePlan(interval_s=0.2, target_file_bytes=1 << 20, retain_hours=1)
    found = Lake.read(lake)
    # Two compactions of a Delta history at once are what its page warns of.
    alone = found.kind == "delta" and not found.is_merged
    deliver_all(found.sink(None if alone else plan), Path(file), int(seed))


if __name__ == "__main__":
    main(*sys.argv[1:])

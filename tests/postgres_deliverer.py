"""A process that delivers recorded changes to a postgres sink from the first on, again and again.

``python -m tests.postgres_deliverer DSN MODE FILE SEED``: cut at random, retried while the
destination is away; it ends with 0 when all of it is settled.
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
from sinks.postgres import PostgresSink

_TRIES_MAX = 600
_PAUSE_S = 0.1
_ROWS_MAX = 60


def main(dsn: str, mode: str, file: str, seed: str) -> None:
    rng = random.Random(int(seed))
    rows = pa.ipc.open_file(pa.py_buffer(Path(file).read_bytes())).read_all().combine_chunks()
    shape = shape_for("sequin", Context("orders", "shop", "h", "app", now_ns=0))
    batch = MessageBatch(rows.to_batches()[0], shape)
    sink = PostgresSink(dsn, source="shop", consumer="orders", mode=mode)  # type: ignore[arg-type]
    sink.follow("one")
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


if __name__ == "__main__":
    main(*sys.argv[1:])

"""How many rows a second one core decodes, against a row-by-row decoder.

Inserts of 8 columns and about 160 bytes, in frames of 20,000 rows. ``python -m benchmarks.decode``
prints the result as JSON on its last line.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import orjson
import pyarrow as pa
import xxhash

from benchmarks import row_decoder
from cdc.decoding import decode_changes
from cdc.decoding.columns import offsets_of
from cdc.decoding.plan import plan_for
from cdc.decoding.raw import RAW_SCHEMA
from cdc.decoding.rows import read_rows
from cdc.decoding.shapes import Context, ShapeName, shape_for
from cdc.decoding.tuples import Payloads
from tests import pgoutput

ROWS = 200_000
FRAME_ROWS = 20_000
BASELINE_ROWS = 40_000
OID = 16400
RELATION = pgoutput.relation(
    OID,
    "public",
    "orders",
    [
        ("id", 20, True),
        ("customer_id", 20),
        ("status", 25),
        ("amount", 1700),
        ("paid", 16),
        ("created_at", 1184),
        ("document", 3802),
        ("note", 25),
    ],
)
SCHEMA_ID = xxhash.xxh3_64_intdigest(RELATION)
SCHEMAS = {SCHEMA_ID: RELATION}


def frames(rows: int) -> list[pa.RecordBatch]:
    """Synthetic frames of inserts, 100 a transaction."""
    return [_frame(first, min(FRAME_ROWS, rows - first)) for first in range(0, rows, FRAME_ROWS)]


def _frame(first: int, count: int) -> pa.RecordBatch:
    numbers = np.arange(first, first + count)
    return pa.RecordBatch.from_arrays(
        [
            pa.array((numbers // 100 + 1) * 65536),
            pa.array(numbers % 100),
            pa.array(1_760_000_000_000_000 + numbers // 100 * 1371),
            pa.array(numbers // 100 + 1000),
            pa.array(np.full(count, ord("I"), np.uint8)),
            pa.array(np.full(count, OID, np.uint32)),
            pa.array(np.full(count, SCHEMA_ID, np.uint64)),
            pa.array([_insert(number) for number in numbers.tolist()], pa.binary()),
        ],
        schema=RAW_SCHEMA,
    )


def _insert(number: int) -> bytes:
    return pgoutput.insert(
        OID,
        [
            str(number),
            str(number * 7919 % 100_003),
            ("new", "packed", "sent", "returned")[number % 4],
            f"{number % 5000}.{number % 100:02}",
            "tf"[number % 2],
            f"2026-01-{number % 28 + 1:02} 12:30:45.{number % 1_000_000:06}+00",
            f'{{"sku": "A-{number % 977}", "count": {number % 9}}}',
            f"left at the door of number {number % 131}",
        ],
    )


def _columns(frame: pa.RecordBatch) -> None:
    payload = frame.column("payload")
    bounds = offsets_of(payload).astype(np.int64)
    payloads = Payloads(payload.buffers()[2])
    read_rows(plan_for(RELATION), payloads, bounds[:-1], bounds[1:], kind="I", tag="N")


def _messages(frame: pa.RecordBatch, shape_name: ShapeName = "sequin") -> None:
    context = Context("orders", "main", "localhost", "shop", now_ns=0)
    shape = shape_for(shape_name, context)
    shape.messages(shape.rows(decode_changes(frame, SCHEMAS)))


def _rows_per_s(step: Callable[[pa.RecordBatch], object], data: list[pa.RecordBatch]) -> int:
    rows: int = sum(frame.num_rows for frame in data)
    step(data[0])
    rates: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        for frame in data:
            step(frame)
        rates.append(rows / (time.perf_counter() - start))
    return round(median(rates))


def run() -> dict[str, object]:
    """Measure each stage; medians of 3."""
    data = frames(ROWS)
    changes = _rows_per_s(lambda frame: decode_changes(frame, SCHEMAS), data)
    baseline = _rows_per_s(
        lambda frame: row_decoder.decode_frame(frame, SCHEMAS), data[: BASELINE_ROWS // FRAME_ROWS]
    )
    payload_bytes = sum(frame.column("payload").nbytes for frame in data)
    return {
        "rows": ROWS,
        "bytes_per_row": round(payload_bytes / ROWS),
        "rows_per_s_arrow": _rows_per_s(_columns, data),
        "rows_per_s_changes": changes,
        "rows_per_s_messages": _rows_per_s(_messages, data),
        "rows_per_s_debezium": _rows_per_s(lambda frame: _messages(frame, "debezium"), data),
        "baseline_rows_per_s": baseline,
        "speedup": round(changes / baseline, 1),
    }


if __name__ == "__main__":
    print(orjson.dumps(run()).decode())

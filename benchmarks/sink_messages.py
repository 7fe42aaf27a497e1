"""Messages for the sinks' benchmark: rows of 8 columns, as the other benchmarks write them."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pyarrow as pa

from cdc.change import CHANGE_SCHEMA, MessageBatch
from cdc.decoding.shapes import Context, shape_for

_FIRST_LSN = 1 << 40
_NOW_US = 1_790_000_000_000_000
_STATES = ("new", "packed", "sent", "returned")


def message_batches(messages: int, piece: int, *, first: int = 1) -> Iterator[MessageBatch]:
    """Inserts in pieces, each a transaction; ``first`` is the number of the first of them."""
    shape = shape_for("sequin", Context("bench", "bench", "localhost", "bench", _NOW_US * 1000))
    for start in range(first, first + messages, piece):
        numbers = range(start, min(start + piece, first + messages))
        count = len(numbers)
        texts = [None] * count
        columns = [
            [_FIRST_LSN + 1000 * start] * count,
            list(range(count)),
            [_NOW_US] * count,
            [start] * count,
            ["public"] * count,
            ["orders"] * count,
            ["insert"] * count,
            [orjson.dumps(_order(number)).decode() for number in numbers],
            texts,
            [f'["{number}"]' for number in numbers],
            *[texts] * 4,
        ]
        changes = pa.RecordBatch.from_arrays(
            [pa.array(c, f.type) for c, f in zip(columns, CHANGE_SCHEMA, strict=True)],
            schema=CHANGE_SCHEMA,
        )
        yield MessageBatch(shape.rows(changes), shape)


def _order(number: int) -> dict[str, object]:
    return {
        "id": number,
        "quantity": number % 100,
        "amount": number % 100_000 / 100,
        "status": _STATES[number % 4],
        "note": f"left with the neighbour at number {number % 131}",
        "created_at": "2026-01-01T00:00:00.123456Z",
        "paid": number % 2 == 0,
        "details": {"sku": f"A-{number % 977}", "count": number % 9},
    }

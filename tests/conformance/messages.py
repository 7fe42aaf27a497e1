"""Messages for the sinks' tests, and what of them a destination must hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson
import pyarrow as pa

from cdc.change import CHANGE_SCHEMA, MessageBatch
from cdc.cursor import Cursor
from cdc.decoding.shapes.sequin import shape

CONSUMER = "orders"
_NOON = 1_790_000_000_000_000  # microseconds; a transaction a minute
_ROWS_A_TRANSACTION = 7


@dataclass(frozen=True)
class Held:
    """One message as a destination holds it."""

    cursor: Cursor
    action: str
    record: object
    changes: object


@dataclass(frozen=True)
class Sample:
    """A change to deliver, in the order of the list it stands in."""

    record: dict[str, object]
    changes: dict[str, object] | None = None
    action: str = "insert"
    table: str = "users"


def cursor_of(number: int) -> Cursor:
    """Seven messages a transaction; LSNs beyond 32 bits, as real ones are."""
    transaction, idx = divmod(number, _ROWS_A_TRANSACTION)
    return Cursor((0x16 << 32) + 1000 * (transaction + 1), idx)


def numbered(start: int, end: int) -> list[Sample]:
    """Samples of two tables and three actions, all different."""
    kinds = ("insert", "update", "delete")
    return [
        Sample(
            {"id": n, "name": f"row {n}"},
            {"name": f"before {n}"} if kinds[n % 3] == "update" else None,
            kinds[n % 3],
            "users" if n % 5 else "orders",
        )
        for n in range(start, end)
    ]


def batch_of(samples: Sequence[Sample], *, start: int = 0) -> MessageBatch:
    """The samples as a batch whose first message has the cursor of ``start``."""
    numbers = range(start, start + len(samples))
    cursors = [cursor_of(n) for n in numbers]
    transactions = [n // _ROWS_A_TRANSACTION for n in numbers]
    columns = [
        [cursor.lsn for cursor in cursors],
        [cursor.idx for cursor in cursors],
        [_NOON + 60_000_000 * transaction for transaction in transactions],
        transactions,
        ["public"] * len(samples),
        [sample.table for sample in samples],
        [sample.action for sample in samples],
        [orjson.dumps(sample.record).decode() for sample in samples],
        [orjson.dumps(s.changes).decode() if s.changes is not None else None for s in samples],
        [f'["{n}"]' for n in numbers],
        *[[None] * len(samples)] * 3,
    ]
    changes = pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, CHANGE_SCHEMA, strict=True)],
        schema=CHANGE_SCHEMA,
    )
    return MessageBatch(
        shape(changes, consumer=CONSUMER, database_name="d", hostname="h", database="app")
    )


def batch(start: int, end: int) -> MessageBatch:
    """The messages numbered from ``start`` up to ``end``."""
    return batch_of(numbered(start, end), start=start)


def expected(samples: Sequence[Sample], *, start: int = 0) -> list[Held]:
    """What a destination holds once it was handed the samples."""
    return [
        Held(cursor_of(start + at), sample.action, sample.record, sample.changes)
        for at, sample in enumerate(samples)
    ]


def held(message: dict[str, object]) -> Held:
    """A message in the default shape, as read back."""
    metadata = message["metadata"]
    assert isinstance(metadata, dict)
    return Held(
        Cursor(metadata["commit_lsn"], metadata["commit_idx"]),
        str(message["action"]),
        message["record"],
        message["changes"],
    )

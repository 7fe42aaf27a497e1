"""Messages for the sinks' tests, and what of them a destination must hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa

from cdc.change import CHANGE_SCHEMA, MessageBatch
from cdc.cursor import Cursor
from cdc.decoding.shapes import Context, ShapeName, shape_for

CONSUMER = "orders"
NOON_US = 1_790_000_000_000_000  # a transaction a minute
_ROWS_A_TRANSACTION = 7
_ACTIONS = {"c": "insert", "u": "update", "d": "delete"}


@dataclass(frozen=True)
class Held:
    """One message as a destination holds it, as far as its shape says."""

    cursor: Cursor | None
    action: str | None
    record: object
    changes: object  # in the debezium shape, the whole row before an update


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


def batch_of(
    samples: Sequence[Sample], *, start: int = 0, shape: ShapeName = "sequin"
) -> MessageBatch:
    """The samples as a batch whose first message has the cursor of ``start``."""
    numbers = range(start, start + len(samples))
    cursors = [cursor_of(n) for n in numbers]
    transactions = [n // _ROWS_A_TRANSACTION for n in numbers]
    columns = [
        [cursor.lsn for cursor in cursors],
        [cursor.idx for cursor in cursors],
        [NOON_US + 60_000_000 * transaction for transaction in transactions],
        transactions,
        ["public"] * len(samples),
        [sample.table for sample in samples],
        [sample.action for sample in samples],
        [orjson.dumps(sample.record).decode() for sample in samples],
        [orjson.dumps(s.changes).decode() if s.changes is not None else None for s in samples],
        [f'["{n}"]' for n in numbers],
        *[[None] * len(samples)] * 4,
    ]
    changes = pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, CHANGE_SCHEMA, strict=True)],
        schema=CHANGE_SCHEMA,
    )
    if shape == "debezium":
        rows = [_before(sample) for sample in samples]
        texts = [None if row is None else orjson.dumps(row).decode() for row in rows]
        changes = changes.append_column("before", pa.array(texts, pa.string()))
    made = shape_for(shape, Context(CONSUMER, "d", "h", "app", now_ns=NOON_US * 1000))
    return MessageBatch(made.rows(changes), made)


def _before(sample: Sample) -> dict[str, object] | None:
    return None if sample.changes is None else {**sample.record, **sample.changes}


def batch(start: int, end: int, shape: ShapeName = "sequin") -> MessageBatch:
    """The messages numbered from ``start`` up to ``end``."""
    return batch_of(numbered(start, end), start=start, shape=shape)


def expected(
    samples: Sequence[Sample], *, start: int = 0, shape: ShapeName = "sequin"
) -> list[Held]:
    """What a destination holds once it was handed the samples."""
    if shape == "record":
        return [Held(None, None, sample.record, None) for sample in samples]
    return [
        Held(
            cursor_of(start + at),
            sample.action,
            sample.record,
            _before(sample) if shape == "debezium" else sample.changes,
        )
        for at, sample in enumerate(samples)
    ]


def held(message: dict[str, Any], shape: ShapeName = "sequin") -> Held:
    """A message of this shape, as read back."""
    if shape == "record":
        return Held(None, None, message, None)
    if shape == "debezium":
        source, before, after = message["source"], message["before"], message["after"]
        action = _ACTIONS[message["op"]]
        return Held(
            Cursor(source["lsn"], source["commit_idx"]),
            action,
            before if action == "delete" else after,
            before if action == "update" else None,
        )
    metadata = message["metadata"]
    return Held(
        Cursor(metadata["commit_lsn"], metadata["commit_idx"]),
        message["action"],
        message["record"],
        message["changes"],
    )

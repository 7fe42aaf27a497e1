"""A postgres sink on a server of the test, and what arrives at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from cdc.change import MessageBatch
from sinks.postgres import PostgresSink
from tests.fix_postgres import Database

Open = Callable[..., PostgresSink]


@pytest.fixture
def opened(there: Database) -> Iterator[Open]:
    sinks: list[PostgresSink] = []

    def open_one(mode: str = "mirror", *, epoch: str = "", **given: Any) -> PostgresSink:
        named = {"source": "shop", "consumer": "orders", **given}
        sink = PostgresSink(named.pop("dsn", there.dsn), mode=mode, **named)  # type: ignore[arg-type]
        sink.follow(epoch)
        sinks.append(sink)
        return sink

    yield open_one
    for sink in sinks:
        sink.close()


def delivered(sink: PostgresSink, batch: MessageBatch, *, absorbed: int = 0) -> None:
    delivery = sink.deliver(batch)
    assert delivery.error is None, delivery.error.full_text
    assert (delivery.settled, delivery.absorbed) == (len(batch), absorbed)


def columns_of(database: Database, table: str) -> list[tuple[str, str]]:
    return [
        (name, kind)
        for name, kind in database.execute(
            "SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_attribute "
            f"WHERE attrelid = '{table}'::regclass AND attnum > 0 AND NOT attisdropped "
            "ORDER BY attnum"
        )
    ]


def id_of(row: tuple[str]) -> int:
    return int(row[0].strip("(").partition(",")[0])


def as_gap(message: MessageBatch) -> MessageBatch:
    """A gap in the place of a message, with the content of its record."""
    rows = message.rows.drop_columns(["row_text", "old_row_text", "table_version"])
    at = rows.schema.get_field_index("action")
    return MessageBatch(rows.set_column(at, "action", pa.array(["gap"])), message.shape)

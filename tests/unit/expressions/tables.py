"""A table and changes of it, for tests of expressions."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from cdc.config import SinkConfig
from spark_pipeline.delivery.deliver import Origin
from spark_pipeline.slices.raw_rows import RawRows
from tests import pgoutput
from tests.unit.decoding.frames import OID, Frame, table

ORIGIN = Origin("shop", "db.example", "shopdb")
ORDERS = table(("id", 20, True), ("amount", 23), ("note", 25), ("at", 1184))
FULL = table(("id", 20, True), ("amount", 23, True), ("note", 25, True), identity="f")
FILE = {"type": "file", "path": "out"}
REDIS = {"type": "redis_stream", "host": "h"}
WEBHOOK = {"type": "webhook", "url": "http://h/base"}


def consumer(destination: dict[str, Any] = REDIS, **given: Any) -> SinkConfig:
    return SinkConfig.model_validate(
        {"name": "orders", "database": "shop", "destination": destination, **given}
    )


def order(number: int, amount: str | None, note: str | None = "n", at: str | None = None) -> bytes:
    return pgoutput.insert(OID, [str(number), amount, note, at])


def raw(frame: Frame, annotations: list[str | None] | None = None) -> RawRows:
    texts = None if annotations is None else pa.array(annotations, pa.string())
    return RawRows(frame.batch(), frame.schemas, texts)


def orders(*amounts: str | None) -> Frame:
    """Inserts of these amounts, numbered from 0."""
    frame = Frame()
    for number, amount in enumerate(amounts):
        frame.add(order(number, amount), ORDERS)
    return frame

"""What tests expect of a delivery into a lake, and histories of tables that several of them use."""

from __future__ import annotations

from cdc.change import MessageBatch
from sinks.base import Delivery, Sink, StoppedTable
from sinks.lakehouse.names import LakeTarget
from tests.slot_batches import SlotBatches

T = LakeTarget("public", "t")

EVOLUTION = (
    "CREATE TABLE t (id int PRIMARY KEY, a int, b text, gone text, small smallint)",
    "INSERT INTO t VALUES (1, 10, 'one', 'x', 1)",
    "ALTER TABLE t ADD COLUMN c date",
    "INSERT INTO t VALUES (2, 20, 'two', 'y', 2, '2026-01-01')",
    "ALTER TABLE t RENAME COLUMN b TO label",
    "ALTER TABLE t DROP COLUMN gone",
    "UPDATE t SET label = 'uno' WHERE id = 1",
    "ALTER TABLE t ALTER COLUMN a TYPE bigint",
    "INSERT INTO t (id, a, label) VALUES (3, 3000000000, 'three')",
    "DELETE FROM t WHERE id = 2",
    "ALTER TABLE t ALTER COLUMN small TYPE int",
    "UPDATE t SET small = 70000 WHERE id = 1",
)
"""Columns that are new, dropped, renamed and widened, with changes between them."""

UNLIKE = (
    "CREATE TABLE t (id int PRIMARY KEY, noon timestamp)",
    "INSERT INTO t VALUES (1, '2026-01-02 03:04:05')",
    "ALTER TABLE t ALTER COLUMN noon TYPE text USING 'noon'",
    "INSERT INTO t VALUES (2, 'later')",
    "ALTER TABLE t ALTER COLUMN noon TYPE int USING 5",
    "INSERT INTO t VALUES (3, 7)",
)
"""A column that gets types which its older values do not have."""


def delivered(sink: Sink, batch: MessageBatch, *, absorbed: int = 0) -> None:
    """Deliver all of it; so many messages were there already."""
    delivery = sink.deliver(batch)
    assert delivery.error is None, delivery.error.full_text
    assert (delivery.settled, delivery.absorbed) == (len(batch), absorbed)
    assert not delivery.stopped


def stopped_by(delivery: Delivery, size: int) -> StoppedTable:
    """The one table whose changes wait, of a delivery that settled all ``size`` messages."""
    assert delivery.error is None, delivery.error.full_text
    assert delivery.settled == size
    assert delivery.stopped is not None
    (stopped,) = delivery.stopped
    return stopped


def deliver_in_pieces(source: SlotBatches, sink: Sink, count: int) -> None:
    """Ten rows per commit into a table of its own."""
    source.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    for number in range(count):
        source.run(f"INSERT INTO t SELECT {number} * 10 + g, 0 FROM generate_series(0, 9) g")
    for piece in source.taken().slices(10):
        delivered(sink, piece)

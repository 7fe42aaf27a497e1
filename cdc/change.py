"""What a decoded change looks like, and what a sink is handed.

Both are Arrow: one row per change, whole columns at a time. ``CHANGE_SCHEMA`` is what decode yields
and what ``spark.readStream.format("walbrook")`` shows its users. A ``MessageBatch`` is the same
rows, matched for one consumer, in cursor order, together with the shape it wants them in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from cdc.bisection import E, T, bisect
from cdc.cursor import ORIGIN, Cursor
from cdc.cursor_columns import cursor_at

if TYPE_CHECKING:
    from cdc.decoding.shapes.base import Shape

ACTIONS = ("insert", "update", "delete", "truncate", "message", "schema_change")
"""What a consumer can ask for. A message of the action ``gap`` comes unasked."""

READ = "read"
"""The action of a row that a backfill read: only the consumer of the backfill gets it."""

RELOAD = "reload"
"""The action of a mark of a reload, which only sinks that can be reloaded are sent."""

CHANGE_SCHEMA = pa.schema(
    [
        pa.field("commit_lsn", pa.int64(), nullable=False),
        pa.field("commit_idx", pa.int64(), nullable=False),
        pa.field("commit_timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("xid", pa.int64(), nullable=False),
        pa.field("table_schema", pa.string(), nullable=False),
        pa.field("table_name", pa.string(), nullable=False),
        pa.field("action", pa.string(), nullable=False),
        # JSON object: the row after the change; for a delete, what the source said of the old row.
        # Null only where there is an error.
        pa.field("record", pa.string()),
        # JSON object of the old values of changed columns; null except for updates.
        pa.field("changes", pa.string()),
        # JSON array of the primary key's values as text, in key order; with the table, the group.
        pa.field("record_pks", pa.string(), nullable=False),
        # JSON array: the key that an update took from its row; null where the key stayed the same.
        pa.field("old_record_pks", pa.string()),
        # JSON array of column names whose TOAST value the source did not send; null if none.
        pa.field("unchanged", pa.string()),
        # JSON: what the transaction said of itself before this change; null if nothing.
        pa.field("annotations", pa.string()),
        # Why this change could not be decoded; null for all others. It names table and column.
        pa.field("error", pa.string()),
    ]
)
"""One row per change. Signed 64-bit numbers, because Spark has no others; an LSN fits."""

MESSAGE_SCHEMA = CHANGE_SCHEMA.remove(CHANGE_SCHEMA.get_field_index("error"))
"""What the rows of every message begin with: a change that has an error never becomes one."""


PLACED_SCHEMA = pa.schema(
    [
        # Where the change stands in its source.
        pa.field("origin_lsn", pa.int64(), nullable=False),
        pa.field("origin_idx", pa.int64(), nullable=False),
        # JSON: its event time, null if it has none.
        pa.field("event_time", pa.string()),
        # JSON: true if it came after its time, else null.
        pa.field("late", pa.string()),
    ]
)
"""What messages that go out in another order than their cursors' have besides.

Their ``commit_lsn`` and ``commit_idx`` are their places in the order in which they go out, which is
all that sinks need to know of it.
"""


def origin(rows: pa.RecordBatch) -> tuple[pa.Int64Array, pa.Int64Array]:
    """Where each row stands in its source."""
    if "origin_lsn" in rows.schema.names:
        return rows.column("origin_lsn"), rows.column("origin_idx")
    return rows.column("commit_lsn"), rows.column("commit_idx")


def synthetic_rows(
    action: str,
    records: Sequence[str],
    committed: datetime,
    *,
    cursor: Cursor = ORIGIN,
    table: tuple[str, str] = ("", ""),
) -> pa.RecordBatch:
    """Messages that are no changes of the source: rows of CHANGE_SCHEMA at one cursor."""
    given: dict[str, object] = {
        "commit_lsn": cursor.lsn,
        "commit_idx": cursor.idx,
        "commit_timestamp": committed,
        "xid": 0,
        "table_schema": table[0],
        "table_name": table[1],
        "action": action,
        "record_pks": "[]",
    }
    columns = [
        pa.array(records, field.type)
        if field.name == "record"
        else pa.repeat(pa.scalar(given.get(field.name), field.type), len(records))
        for field in CHANGE_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA)


ROUTE = "route"
"""The column that says where each message goes, null for the sink's own place."""


@dataclass(frozen=True)
class MessageBatch:
    """Messages of one consumer in cursor order, never empty.

    A consumer in event-time order has places in place of cursors: see ``PLACED_SCHEMA``.
    """

    rows: pa.RecordBatch  # MESSAGE_SCHEMA, what the shape added, and ROUTE if there is routing
    shape: Shape

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def messages(self, end: str = "") -> pa.StringArray:
        """The whole text of each message, and ``end``."""
        return self.shape.messages(self.rows, end)

    def fields(self) -> dict[str, pa.StringArray]:
        """The messages as fields of an entry, in their order; null stands for JSON's null."""
        return self.shape.fields(self.rows)

    def cursor(self, position: int) -> Cursor:
        """The cursor of the message at ``position``; negative counts from the end."""
        return cursor_at(self.rows, position)

    def slice(self, start: int, size: int | None = None) -> MessageBatch:
        """At most ``size`` messages from ``start`` on; without a size, all the rest."""
        return MessageBatch(self.rows.slice(start, size), self.shape)

    def slices(self, size: int) -> Iterator[MessageBatch]:
        """Cut into batches of at most ``size`` messages, in order."""
        for start in range(0, len(self), size):
            yield self.slice(start, size)

    def bisect(
        self,
        attempt: Callable[[MessageBatch], T],
        refused: type[E],
    ) -> Iterator[tuple[MessageBatch, T | E]]:
        """Parts in order, each with the result of ``attempt``; an error is of one message."""
        for start, stop, result in bisect(
            len(self), lambda start, stop: attempt(self.slice(start, stop - start)), refused
        ):
            yield self.slice(start, stop - start), result

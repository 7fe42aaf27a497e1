"""The marks of a reload as messages, in their places among the changes.

Between ``begin`` and ``swap`` a sink keeps a shadow of the table. Every change goes into both; rows
that the reload read go into the shadow alone. So at the swap the shadow has all that the source had
at that place, and readers of the table see either what was there before it, or all of that.

A mark is a message like a gap: it belongs to no filter and no route, is sent alone, comes again
after a crash with the same cursor, and is absorbed by the position of a sink that has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import orjson
import pyarrow as pa

from cdc.backfill.ranges import ReloadStep
from cdc.change import RELOAD, synthetic_rows
from cdc.config.table import TableName
from cdc.cursor import Cursor


@dataclass(frozen=True)
class ReloadMark:
    """One step of a reload, as its sink gets it."""

    reload: int
    step: ReloadStep
    table: TableName  # as the source calls it


def mark_change(mark: ReloadMark, place: Cursor) -> pa.RecordBatch:
    """The mark as one row of CHANGE_SCHEMA."""
    record = orjson.dumps({"reload": mark.reload, "step": str(mark.step)}).decode()
    table = (mark.table.schema, mark.table.table)
    return synthetic_rows(RELOAD, [record], datetime.now(UTC), cursor=place, table=table)


def mark_in(rows: pa.RecordBatch) -> ReloadMark | None:
    """The mark that a batch is; None for any other batch."""
    if rows.num_rows != 1 or rows.column("action")[0].as_py() != RELOAD:
        return None
    said = orjson.loads(rows.column("record")[0].as_py())
    names = (rows.column(name)[0].as_py() for name in ("table_schema", "table_name"))
    return ReloadMark(int(said["reload"]), ReloadStep(said["step"]), TableName(*names))

"""A recorded history with a reload in it: its marks and the rows that it read among changes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from cdc.backfill.ranges import ReloadStep
from cdc.backfill.reload import ReloadMark, mark_change
from cdc.change import READ, MessageBatch
from cdc.config.table import TableName
from cdc.cursor import Cursor, free_place
from tests.fix_postgres import Database
from tests.slot_batches import slot_batches

RELOAD = 3


def _as_reads(batch: MessageBatch) -> pa.RecordBatch:
    """Updates of all rows as if a reload had read them."""
    rows = batch.rows
    at = rows.schema.get_field_index("action")
    rows = rows.set_column(at, rows.schema.field(at), pa.array([READ] * rows.num_rows))
    for name in ("old_row_text", "changes"):
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), pa.nulls(rows.num_rows, pa.string()))
    return rows


def _mark(step: ReloadStep, behind: MessageBatch) -> tuple[ReloadMark, Cursor]:
    lsn, idx = behind.cursor(-1)
    return ReloadMark(RELOAD, step, TableName("public", "t")), free_place(Cursor(lsn, idx + 1))


def recorded(database: Database, file: Path) -> None:
    """A history whose destination keeps rows up to 5 and lacks rows above 50 until the swap."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v int)")
    with slot_batches(database) as source:
        source.run("INSERT INTO t SELECT i, 1 FROM generate_series(1, 50) AS i")
        first = source.taken()
        source.run(
            "DELETE FROM t WHERE id <= 5; INSERT INTO t SELECT i, 1 FROM generate_series(51, 90) i"
        )
        source.taken()  # nobody hears of it
        source.run("UPDATE t SET v = 2")
        read = source.taken()
        source.run("UPDATE t SET v = 3 WHERE id % 10 = 0", "DELETE FROM t WHERE id = 77")
        during = source.taken()
        source.run("UPDATE t SET v = 4 WHERE id % 20 = 0", "INSERT INTO t VALUES (100, 4)")
        behind = source.taken()
    marks = [
        mark_change(*_mark(ReloadStep.BEGIN, first)),
        mark_change(*_mark(ReloadStep.SWAP, during)),
    ]
    tables = [first.rows, marks[0], _as_reads(read), during.rows, marks[1], behind.rows]
    wanted = first.rows.schema
    together = pa.concat_tables(
        [_in_schema(pa.Table.from_batches([rows]), wanted) for rows in tables]
    )
    (batch,) = together.combine_chunks().to_batches()
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_file(out, batch.schema) as stream:
        stream.write_batch(batch)


def _in_schema(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        rows.column(each.name) if each.name in rows.column_names
        else pa.nulls(rows.num_rows, each.type)
        for each in schema
    ]  # fmt: skip
    return pa.Table.from_arrays(columns, schema=schema)

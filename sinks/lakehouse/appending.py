"""Changes as rows of their table's history, in the order of their cursors. Pure, whole columns."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.format import ROW_TEXT
from cdc.decoding.lossless_cast import conform
from cdc.errors import PoisonError
from sinks.lakehouse.columns import DATE, OWN
from sinks.tables.typed import plan_of, typed_rows


def history_rows(rows: pa.RecordBatch, version: str, schema: pa.Schema) -> pa.Table:
    """The changes in the columns of a history; columns that the version lacks are null."""
    plan = plan_of(version)
    texts = [field.name for field in schema if field.type == pa.string()]
    values = typed_rows(rows.column(ROW_TEXT), version, as_text=texts) if plan.names else None
    committed = rows.column("commit_timestamp")
    own = {
        "walbrook_action": rows.column("action"),
        "walbrook_lsn": rows.column("commit_lsn"),
        "walbrook_idx": rows.column("commit_idx"),
        "walbrook_committed_at": committed,
        "walbrook_old_key": rows.column("old_record_pks"),
        "walbrook_unchanged": rows.column("unchanged"),
        DATE: committed.cast(pa.date32()),
    }
    columns = []
    for field in schema:
        if field.name in OWN.names:
            columns.append(own[field.name])
        elif values is not None and field.name in plan.names:
            columns.append(fitted(values.column(field.name), field, str(plan.relation)))
        else:
            columns.append(pa.nulls(rows.num_rows, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def fitted(values: pa.ChunkedArray, field: pa.Field, table: str) -> pa.Array:
    """The values in the type of a table's column.

    Raises PoisonError for a value that it cannot have without loss.
    """
    whole = values.combine_chunks()
    found, bad = conform(whole, field.type)
    if bad.any():
        raise PoisonError(
            f"column {field.name} of {table} holds a value that {field.type} cannot have",
            fix="it becomes a dead letter",
            detail=str(pc.filter(whole, pa.array(bad))[0].as_py()),
        )
    return found

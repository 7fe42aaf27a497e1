"""The ``record`` shape: the bare row, for every action what ``record`` holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from cdc.decoding.format import ROW_TEXT
from cdc.decoding.joins import joined
from cdc.decoding.shapes.base import Context, Parts, message_rows
from cdc.decoding.shapes.metadata import METADATA_BYTES, idempotency_keys, metadata
from cdc.decoding.shapes.text import referring, replaced


@dataclass(frozen=True)
class RecordShape:
    """Adds nothing. A message does not say its action or its table; an entry does."""

    context: Context
    message_parts: ClassVar[Parts] = Parts(("record",), 2)
    entry_parts: ClassVar[Parts] = Parts(("record", "record_pks"), METADATA_BYTES)

    def rows(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        return message_rows(changes)

    def messages(self, rows: pa.RecordBatch, end: str = "") -> pa.StringArray:
        return joined(rows.column("record"), end) if end else rows.column("record")

    def fields(self, rows: pa.RecordBatch) -> dict[str, pa.StringArray]:
        return {
            "record": rows.column("record"),
            "action": rows.column("action"),
            "metadata": metadata(rows, self.context),
        }

    def keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return rows.column("record_pks")

    def old_keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return rows.column("old_record_pks")

    def key_changes(self, _rows: pa.RecordBatch) -> None:
        return None

    def idempotency_keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return idempotency_keys(rows, self.context)

    def refer(self, rows: pa.RecordBatch, references: pa.StringArray) -> pa.RecordBatch:
        return replaced(rows, {"record": referring(rows.column("record"), references)})


@dataclass(frozen=True)
class RowTextShape(RecordShape):
    """The same for sinks that write the texts of rows, whose ``record`` may never be written."""

    message_parts: ClassVar[Parts] = Parts((ROW_TEXT,), 2)

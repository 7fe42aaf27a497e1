"""The ``sequin`` shape, the default: record, changes, action, metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from cdc.decoding.joins import joined
from cdc.decoding.shapes.base import Context, Parts, message_rows
from cdc.decoding.shapes.metadata import idempotency_keys, metadata
from cdc.decoding.shapes.text import replaced, with_member, without


@dataclass(frozen=True)
class SequinShape:
    """Adds ``metadata``."""

    context: Context
    message_parts: ClassVar[Parts] = Parts(("record", "changes", "metadata"), 64)
    entry_parts: ClassVar[Parts] = message_parts

    def rows(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        plain = message_rows(changes)
        return plain.append_column("metadata", metadata(plain, self.context))

    def messages(self, rows: pa.RecordBatch, end: str = "") -> pa.StringArray:
        return joined(
            '{"record":',
            rows.column("record"),
            ',"changes":',
            rows.column("changes"),
            ',"action":"',
            rows.column("action"),
            '","metadata":',
            rows.column("metadata"),
            "}" + end,
            null="null",
        )

    def fields(self, rows: pa.RecordBatch) -> dict[str, pa.StringArray]:
        return {name: rows.column(name) for name in ("record", "changes", "action", "metadata")}

    def keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return rows.column("record_pks")

    def old_keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return rows.column("old_record_pks")

    def key_changes(self, _rows: pa.RecordBatch) -> None:
        return None

    def idempotency_keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return idempotency_keys(rows, self.context)

    def refer(self, rows: pa.RecordBatch, references: pa.StringArray) -> pa.RecordBatch:
        columns = {name: without(rows.column(name), references) for name in ("record", "changes")}
        columns["metadata"] = with_member(rows.column("metadata"), "claim_check", references)
        return replaced(rows, columns)

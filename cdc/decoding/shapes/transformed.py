"""The shape of a consumer with a transform: what its expression made of each change.

What was not transformed, such as a truncate or a gap, has the shape that the consumer asks for
otherwise. Invariant: ``message`` is the whole text of every row, never null.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.joins import joined
from cdc.decoding.shapes.base import Context, Parts, Shape, message_rows
from cdc.decoding.shapes.metadata import METADATA_BYTES, idempotency_keys, metadata
from cdc.decoding.shapes.text import referring, replaced

MESSAGE = "message"
"""The column of the transformed texts, null where there is none; rows without it have none."""


@dataclass(frozen=True)
class TransformedShape:
    """Adds ``message``; ``plain`` writes what has no transformed text."""

    context: Context
    plain: Shape
    message_parts: ClassVar[Parts] = Parts((MESSAGE,), 2)
    entry_parts: ClassVar[Parts] = Parts((MESSAGE, "record_pks"), METADATA_BYTES)

    def rows(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        texts = (
            changes.column(MESSAGE)
            if MESSAGE in changes.schema.names
            else pa.nulls(changes.num_rows, pa.string())
        )
        if texts.null_count:
            missing = texts.is_null()
            shaped = self.plain.rows(changes.filter(missing))
            texts = pc.replace_with_mask(texts, missing, self.plain.messages(shaped))
        return message_rows(changes).append_column(MESSAGE, texts)

    def messages(self, rows: pa.RecordBatch, end: str = "") -> pa.StringArray:
        return joined(rows.column(MESSAGE), end) if end else rows.column(MESSAGE)

    def fields(self, rows: pa.RecordBatch) -> dict[str, pa.StringArray]:
        return {MESSAGE: rows.column(MESSAGE), "metadata": metadata(rows, self.context)}

    def keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return rows.column("record_pks")

    def old_keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return rows.column("old_record_pks")

    def key_changes(self, _rows: pa.RecordBatch) -> None:
        return None

    def idempotency_keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return idempotency_keys(rows, self.context)

    def refer(self, rows: pa.RecordBatch, references: pa.StringArray) -> pa.RecordBatch:
        return replaced(rows, {MESSAGE: referring(rows.column(MESSAGE), references)})

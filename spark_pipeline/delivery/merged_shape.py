"""Messages of several sources in one batch: each as the shape of its own source writes it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from cdc.decoding.shapes import Parts, Shape

SOURCE: Final = "origin_source"
"""The column that says which of the consumer's sources a row is of, counted from 0."""

_REFERENCE: Final = "claim_check"


@dataclass(frozen=True)
class MergedShape:
    """One shape per source; all are of one kind, and differ in what they say of the source."""

    shapes: Sequence[Shape]

    @property
    def message_parts(self) -> Parts:
        return self.shapes[0].message_parts

    @property
    def entry_parts(self) -> Parts:
        return self.shapes[0].entry_parts

    def rows(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        made = _by_source(changes, lambda shape, rows: shape.rows(rows), self.shapes)
        return made.append_column(SOURCE, changes.column(SOURCE))

    def messages(self, rows: pa.RecordBatch, end: str = "") -> pa.StringArray:
        return self._texts(rows, lambda shape, some: shape.messages(some, end))

    def keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return self._texts(rows, lambda shape, some: shape.keys(some))

    def old_keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return self._texts(rows, lambda shape, some: shape.old_keys(some))

    def key_changes(self, _rows: pa.RecordBatch) -> None:
        return None

    def idempotency_keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        return self._texts(rows, lambda shape, some: shape.idempotency_keys(some))

    def _texts(
        self, rows: pa.RecordBatch, write: Callable[[Shape, pa.RecordBatch], pa.StringArray]
    ) -> pa.StringArray:
        def made(shape: Shape, some: pa.RecordBatch) -> pa.RecordBatch:
            return pa.RecordBatch.from_pydict({"text": write(shape, some)})

        return _by_source(rows, made, self.shapes).column("text")

    def fields(self, rows: pa.RecordBatch) -> dict[str, pa.StringArray]:
        def made(shape: Shape, some: pa.RecordBatch) -> pa.RecordBatch:
            return pa.RecordBatch.from_pydict(shape.fields(some))

        whole = _by_source(rows, made, self.shapes)
        return {name: whole.column(name) for name in whole.schema.names}

    def refer(self, rows: pa.RecordBatch, references: pa.StringArray) -> pa.RecordBatch:
        def made(shape: Shape, some: pa.RecordBatch) -> pa.RecordBatch:
            return shape.refer(some.drop_columns([_REFERENCE]), some.column(_REFERENCE))

        return _by_source(rows.append_column(_REFERENCE, references), made, self.shapes)


def _by_source(
    rows: pa.RecordBatch,
    make: Callable[[Shape, pa.RecordBatch], pa.RecordBatch],
    shapes: Sequence[Shape],
) -> pa.RecordBatch:
    """What the shape of each source makes of its own rows, put back in their order."""
    codes = rows.column(SOURCE).to_numpy()
    there = np.unique(codes).tolist()
    if len(there) == 1:
        return make(shapes[there[0]], rows)
    places = [np.flatnonzero(codes == code) for code in there]
    made = [
        make(shapes[code], rows.take(pa.array(at))) for code, at in zip(there, places, strict=True)
    ]
    order = np.concatenate(places)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return pa.concat_batches(made).take(pa.array(back))

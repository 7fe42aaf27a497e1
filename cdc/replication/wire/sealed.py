"""A batch that is ready for the log: its rows, and what goes with them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import pyarrow as pa

from cdc.cursor import Cursor
from cdc.cursor_columns import cursor_at
from cdc.decoding.annotations import AnnotationRun, carried_bytes, cut_runs
from cdc.decoding.raw import RAW_SCHEMA
from cdc.decoding.table_version import TableVersion
from cdc.replication.wire.annotations import RefusedAnnotation

_CARRIED_BYTES_MAX: Final = 32 << 20
_NO_ROWS: Final = pa.RecordBatch.from_pylist([], schema=RAW_SCHEMA)


@dataclass(frozen=True)
class Sealed:
    """A batch ready for the log."""

    raw: pa.RecordBatch
    schemas: Mapping[int, bytes]
    first: Cursor
    high: Cursor
    annotations: Sequence[AnnotationRun] = ()  # which of its rows carry one
    refused: Sequence[RefusedAnnotation] = ()  # those of its rows that should have been one
    versions: Sequence[TableVersion] = ()  # to be recorded before it goes into the log

    @classmethod
    def without_rows(cls, position: Cursor) -> Self:
        """A batch that only says that a source stands at ``position``: idle progress."""
        return cls(_NO_ROWS, {}, position, position)

    def parts(self) -> Iterator[Sealed]:
        """The same rows in batches whose texts, once a row has its own, stay within bounds.

        A text is here once, but each change that carries it is as much longer for everyone behind.
        """
        if carried_bytes(self.annotations) <= _CARRIED_BYTES_MAX:
            yield self
            return
        size = np.zeros(self.raw.num_rows, dtype=np.int64)
        for run in self.annotations:
            size[run.start : run.stop] = len(run.text)
        number = (np.cumsum(size) - size) // _CARRIED_BYTES_MAX
        cuts = (np.flatnonzero(np.diff(number)) + 1).tolist()
        for start, stop in itertools.pairwise([0, *cuts, self.raw.num_rows]):
            part = sealed_of(
                self.raw.slice(start, stop - start),
                self.schemas,
                tuple(cut_runs(self.annotations, start, stop)),
                self.refused if start == 0 else (),
            )
            yield replace(part, versions=self.versions) if start == 0 else part


def sealed_of(
    raw: pa.RecordBatch,
    schemas: Mapping[int, bytes],
    annotations: Sequence[AnnotationRun],
    refused: Sequence[RefusedAnnotation],
) -> Sealed:
    """A batch of RAW_SCHEMA with its bounds, and of ``schemas`` those that its rows need."""
    used = set(np.unique(raw.column("schema_id").to_numpy()).tolist())
    last = cursor_at(raw, -1)
    return Sealed(
        raw,
        {key: message for key, message in schemas.items() if key in used},
        cursor_at(raw, 0),
        Cursor(last.lsn, last.idx + 1),
        annotations,
        refused,
    )

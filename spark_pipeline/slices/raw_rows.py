"""Raw rows of the log: slices of batches, and several of them joined for one decode.

A decode has a cost of its own, whatever its rows, so small slices are joined; and it is bounded,
because Arrow's text columns are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from cdc.decoding.annotations import AnnotationRun, annotations_of, carried_bytes, joined_runs

ROWS_PER_DECODE_MAX = 16_384
BYTES_PER_DECODE_MAX = 32 << 20


class LogSlice(NamedTuple):
    """Rows ``[start, stop)`` of a batch of the log: part ``part`` of ``parts``."""

    batch_idx: int
    start: int
    stop: int
    part: int = 0
    parts: int = 1

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class RawRows:
    """Rows of log frames as the log keeps them: RAW_SCHEMA, their schemas, an annotation each."""

    raw: pa.RecordBatch
    schemas: Mapping[int, bytes]
    annotations: pa.StringArray | None = None


class JoinedRows:
    """Raw rows of slices that follow each other, for one decode."""

    def __init__(self) -> None:
        self._raws: list[pa.RecordBatch] = []
        self._schemas: dict[int, bytes] = {}
        self._annotations: list[tuple[Sequence[AnnotationRun], int]] = []
        self._rows = 0
        self._bytes = 0

    def fits(self, rows: int, size: int) -> bool:
        """Whether one decode may take that much more; the first slice always fits."""
        return not self._raws or (
            self._rows + rows <= ROWS_PER_DECODE_MAX and self._bytes + size <= BYTES_PER_DECODE_MAX
        )

    def add(
        self,
        raw: pa.RecordBatch,
        schemas: Mapping[int, bytes],
        runs: Sequence[AnnotationRun],
        size: int,
    ) -> None:
        self._raws.append(raw)
        self._schemas |= schemas
        self._annotations.append((runs, raw.num_rows))
        self._rows += raw.num_rows
        self._bytes += size

    def __bool__(self) -> bool:
        return bool(self._raws)

    def raw_rows(self) -> RawRows:
        """All of them as one batch."""
        bare = [raw.replace_schema_metadata(None) for raw in self._raws]
        raw = bare[0] if len(bare) == 1 else pa.concat_batches(bare)
        runs = joined_runs(self._annotations)
        return RawRows(raw, self._schemas, annotations_of(runs, raw.num_rows))


def size_of(raw: pa.RecordBatch, runs: Sequence[AnnotationRun]) -> int:
    """What a decode of the rows has to hold, with the annotation that each of them carries."""
    return int(raw.nbytes) + carried_bytes(runs)

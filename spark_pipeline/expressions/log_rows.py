"""Raw rows out of the log, slice by slice, joined where they are small.

A decode has a cost of its own, whatever its rows; and it is bounded, because Arrow's text columns
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from cdc.decoding.annotations import AnnotationRun, annotations_of, cut_runs, joined_runs
from cdc.log.open import open_log
from cdc.log.view import LogReader
from spark_pipeline.expressions.visible_rows import RawRows
from spark_pipeline.slices.exchange import SliceMarker

_ROWS_MAX = 16_384
_BYTES_MAX = 32 << 20


class LogSlice(NamedTuple):
    """The rows ``[start, stop)`` of a batch of the log."""

    batch_idx: int
    start: int
    stop: int


def pieces_of(slices: Sequence[SliceMarker]) -> list[LogSlice]:
    """The pieces that ordered slices of whole batches are; a cut batch stays cut."""
    found: list[LogSlice] = []
    for piece in slices:
        goes_on = bool(found) and found[-1].batch_idx == piece.batch_idx
        start = found[-1].stop if goes_on else 0
        if piece.rows:
            found.append(LogSlice(piece.batch_idx, start, start + piece.rows))
    return found


def raw_rows(log: str | Path, history: int | None, pieces: Sequence[LogSlice]) -> Iterator[RawRows]:
    """The rows of the pieces, in their order, in parts that are worth a decode each."""
    with closing(open_log(log, history=history)) as view:
        raws: list[pa.RecordBatch] = []
        schemas: dict[int, bytes] = {}
        runs: list[tuple[tuple[AnnotationRun, ...], int]] = []
        for raw, known, said in _each(view, pieces):
            if raws and not _fits(raws, raw):
                yield _joined(raws, schemas, runs)
                raws, schemas, runs = [], {}, []
            raws.append(raw)
            schemas |= known
            runs.append((said, raw.num_rows))
        if raws:
            yield _joined(raws, schemas, runs)


def unjoined_rows(
    log: str | Path, history: int | None, pieces: Sequence[LogSlice]
) -> Iterator[RawRows]:
    """The same rows, piece by piece and without annotations: for a look, not for a decode."""
    with closing(open_log(log, history=history)) as view:
        for raw, known, _ in _each(view, pieces):
            yield RawRows(raw, known)


def _each(
    view: LogReader, pieces: Sequence[LogSlice]
) -> Iterator[tuple[pa.RecordBatch, Mapping[int, bytes], tuple[AnnotationRun, ...]]]:
    """Neighbours in the log are read together."""
    by_batch = [(batch, list(run)) for batch, run in groupby(pieces, key=lambda p: p.batch_idx)]
    for _, side_by_side in groupby(enumerate(by_batch), key=lambda at: at[1][0] - at[0]):
        batches = [entry for _, entry in side_by_side]
        frames = view.frames(batches[0][0], batches[-1][0] + 1)
        for (_, within), frame in zip(batches, frames, strict=True):
            for piece in within:
                said = tuple(cut_runs(frame.annotations, piece.start, piece.stop))
                rows = frame.raw.slice(piece.start, piece.stop - piece.start)
                yield rows, frame.schemas, said


def _joined(
    raws: list[pa.RecordBatch],
    schemas: dict[int, bytes],
    runs: list[tuple[tuple[AnnotationRun, ...], int]],
) -> RawRows:
    raw = pa.concat_batches([one.replace_schema_metadata(None) for one in raws])
    return RawRows(raw, schemas, annotations_of(joined_runs(runs), raw.num_rows))


def _fits(raws: list[pa.RecordBatch], raw: pa.RecordBatch) -> bool:
    rows = sum(one.num_rows for one in [*raws, raw])
    return bool(rows <= _ROWS_MAX and sum(one.nbytes for one in [*raws, raw]) <= _BYTES_MAX)

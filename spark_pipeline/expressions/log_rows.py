"""Raw rows out of the log, slice by slice, joined where they are small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path

import pyarrow as pa

from cdc.decoding.annotations import AnnotationRun, cut_runs
from cdc.log.open import open_log
from cdc.log.view import LogReader
from spark_pipeline.slices.exchange import SliceMarker
from spark_pipeline.slices.raw_rows import JoinedRows, LogSlice, RawRows, size_of


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
        joined = JoinedRows()
        for raw, known, said in _each(view, pieces):
            size = size_of(raw, said)
            if not joined.fits(raw.num_rows, size):
                yield joined.raw_rows()
                joined = JoinedRows()
            joined.add(raw, known, said, size)
        if joined:
            yield joined.raw_rows()


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

"""The Python data source ``walbrook``: the change log as a stream of rows.

Offsets are batch numbers of the log, within one history of it. With the option ``exchange`` (the
product's own lanes) a partition leaves its decoded slices in that directory and yields their
markers; without it (anyone's own Spark job) it yields the decoded rows. ``wanted`` says in which
forms values are written; without it there is one, the default.

``path`` is a log's directory or, where the log is served over the network, its address. Spark runs
the constructor in two processes, so it does no I/O; every range that was handed out can be read
again until its changes are settled.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from cdc.cursor import Cursor
from cdc.decoding.annotations import Run, annotations_of, carried_bytes, cut_runs, joined_runs
from cdc.decoding.careful import decode_carefully
from cdc.decoding.format import PLAIN, Wanted
from cdc.decoding.versions import encode_transitions
from cdc.errors import ConfigError, GapError
from cdc.log.open import open_log
from cdc.log.view import LogReader
from spark_pipeline.exchange import (
    MARKER_SCHEMA,
    PlannedRange,
    SliceMarker,
    leave,
    markers_to_arrow,
    note_planned,
)
from spark_pipeline.slicing import Slice, cut

_LONG_POLL_S = 0.2
_ROWS_PER_PARTITION_MIN = 5_000
_ROWS_PER_DECODE_MAX = 16_384
_BYTES_PER_DECODE_MAX = 32 << 20

_DEFAULTS = {
    "path": "",
    "startingbatch": "",
    "startinghistory": "",
    "startingcursor": "earliest",
    "exchange": "",
    "maxrows": "200000",
    "maxbytes": str(128 << 20),
    "partitions": "2",
    "wanted": PLAIN.to_text(),
}


class WalbrookDataSource(DataSource):
    """``spark.readStream.format("walbrook").option("path", <log directory of a source>)``."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = {key.lower(): value for key, value in options.items()}

    @classmethod
    def name(cls) -> str:
        return "walbrook"

    def schema(self) -> StructType:
        if self._given.get("exchange"):
            return from_arrow_schema(MARKER_SCHEMA)
        return from_arrow_schema(Wanted.from_text((_DEFAULTS | self._given)["wanted"]).schema)

    def streamReader(self, schema: StructType) -> LogStreamReader:  # noqa: N802
        unknown = set(self._given) - set(_DEFAULTS)
        if unknown:
            raise ConfigError(
                f"the source walbrook has no option {sorted(unknown)}",
                fix=f"use some of {sorted(_DEFAULTS)}",
            )
        if not self._given.get("path"):
            raise ConfigError(
                "the source walbrook was given no path",
                fix='add .option("path", "<log.directory>/<database name>")',
            )
        return LogStreamReader(_DEFAULTS | self._given)


@dataclass
class LogPartition(InputPartition):
    """The slices that one task decodes."""

    range_start: int
    range_end: int
    history: int
    slices: list[Slice]


class LogStreamReader(DataSourceStreamReader):
    """The driver side answers from the log's index; the executor side maps and decodes."""

    def __init__(self, options: dict[str, str]) -> None:
        self._path = options["path"]
        self._exchange = options["exchange"]
        self._starting_batch = options["startingbatch"]
        self._starting_history = options["startinghistory"]
        self._starting_cursor = options["startingcursor"]
        self._rows_max = int(options["maxrows"])
        self._bytes_max = int(options["maxbytes"])
        self._partitions = int(options["partitions"])
        self._rows_per_partition = _ROWS_PER_PARTITION_MIN
        self._wanted = Wanted.from_text(options["wanted"])
        self._view: LogReader | None = None

    @classmethod
    def for_lane(cls, log: Path, exchange: Path, wanted: Wanted = PLAIN) -> LogStreamReader:
        """A reader for use outside Spark: one partition, decoded slices by reference."""
        given = {"path": str(log), "exchange": str(exchange), "partitions": "1"}
        return cls(_DEFAULTS | given | {"wanted": wanted.to_text()})

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        view = self._log(int(self._starting_history) if self._starting_history else None)
        if self._starting_batch:
            return {"batch": int(self._starting_batch), "history": view.history()}
        return {"batch": self._starting(view), "history": view.history()}

    def _starting(self, view: LogReader) -> int:
        if self._starting_cursor == "earliest":
            return view.first_batch()
        if self._starting_cursor == "latest":
            return view.next_batch()
        return view.seek(Cursor.parse(self._starting_cursor))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._rows_max)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of what one micro-batch may take; waits a little when there is nothing."""
        first, history = int(start["batch"]), int(start["history"])
        view = self._log(history)
        end = view.wait(first, _LONG_POLL_S)
        if end < first:
            # Batches would be numbered again from there, and those below ``first`` never be read.
            raise GapError(
                f"the log at {self._path} ends at batch {end}, before batch {first}",
                fix="the stream must start again from a cursor; a lane does so by itself",
            )
        if end <= first or isinstance(limit, ReadAllAvailable):
            return {"batch": max(first, end), "history": history}
        # At most as many batches as fit can have the rows: no need to look at all of a backlog.
        entries = view.entries(first, min(end, first + self._rows_max))
        fits = (np.cumsum(entries["rows"]) <= self._rows_max) & (
            np.cumsum(entries["bytes"]) <= self._bytes_max
        )
        return {"batch": first + max(1, int(fits.sum())), "history": history}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        first, last, history = int(start["batch"]), int(end["batch"]), int(end["history"])
        if first == last:
            return []
        rows = [int(count) for count in self._log(history).entries(first, last)["rows"]]
        if self._exchange:
            note_planned(Path(self._exchange), PlannedRange(first, last, sum(rows)))
        wanted = min(self._partitions, max(1, sum(rows) // self._rows_per_partition))
        return [LogPartition(first, last, history, slices) for slices in cut(first, rows, wanted)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LogPartition)
        if not self._exchange:
            yield from (changes for _, changes in self._decoded(partition))
            return
        markers: list[SliceMarker] = []

        def batches() -> Iterator[pa.RecordBatch]:
            for position, (pieces, changes) in enumerate(self._decoded(partition)):
                markers.extend(_markers(partition, pieces, position, changes))
                yield changes

        path = str(leave(Path(self._exchange), batches(), self._wanted.schema))
        yield markers_to_arrow([replace(marker, path=path) for marker in markers])

    def _decoded(self, partition: LogPartition) -> Iterator[tuple[list[_Piece], pa.RecordBatch]]:
        """Slices, decoded several at a time.

        A decode has a cost of its own, whatever its rows: small batches are joined for it.
        """
        slices = partition.slices
        view = self._log(partition.history)
        frames = view.frames(slices[0].batch_idx, slices[-1].batch_idx + 1)
        pieces: list[_Piece] = []
        raws: list[pa.RecordBatch] = []
        schemas: dict[int, bytes] = {}
        annotations: list[Sequence[Run]] = []
        for piece, frame in zip(slices, frames, strict=True):
            raw = frame.raw.slice(piece.start, piece.stop - piece.start)
            runs = tuple(cut_runs(frame.annotations, piece.start, piece.stop))
            if raws and not _fits(raws, raw, [*annotations, runs]):
                yield pieces, self._decode(raws, schemas, annotations)
                pieces, raws, schemas, annotations = [], [], {}, []
            commit_us = raw.column("commit_ts")[-1].as_py() if raw.num_rows else 0
            versions = encode_transitions(raw)
            pieces.append(_Piece(piece, frame.marker.high, commit_us, versions))
            raws.append(raw)
            schemas |= frame.schemas
            annotations.append(runs)
        yield pieces, self._decode(raws, schemas, annotations)

    def _decode(
        self,
        raws: list[pa.RecordBatch],
        schemas: dict[int, bytes],
        annotations: list[Sequence[Run]],
    ) -> pa.RecordBatch:
        bare = [raw.replace_schema_metadata(None) for raw in raws]
        raw = bare[0] if len(bare) == 1 else pa.concat_batches(bare)
        counts = [one.num_rows for one in raws]
        runs = joined_runs(zip(annotations, counts, strict=True))
        texts = annotations_of(runs, raw.num_rows)
        return decode_carefully(raw, schemas, annotations=texts, wanted=self._wanted)

    def _log(self, history: int | None) -> LogReader:
        """The log, in the history that offsets speak of; None takes the one it is in."""
        if self._view is None:
            self._view = open_log(self._path, history=history)
        return self._view

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_view": None}


@dataclass(frozen=True)
class _Piece:
    """A slice with what its marker must say of its batch."""

    slice: Slice
    high: Cursor
    commit_us: int
    versions: bytes


def _markers(
    partition: LogPartition, pieces: list[_Piece], position: int, changes: pa.RecordBatch
) -> Iterator[SliceMarker]:
    offset = 0
    errors = changes.column("error")
    for piece in pieces:
        rows = piece.slice.stop - piece.slice.start
        yield SliceMarker(
            range_start=partition.range_start,
            range_end=partition.range_end,
            batch_idx=piece.slice.batch_idx,
            part=piece.slice.part,
            parts=piece.slice.parts,
            rows=rows,
            high=piece.high,
            commit_us=piece.commit_us,
            path="",
            position=position,
            offset=offset,
            errors=rows - errors.slice(offset, rows).null_count,
            versions=piece.versions,
        )
        offset += rows


def _fits(
    raws: list[pa.RecordBatch], raw: pa.RecordBatch, annotations: list[Sequence[Run]]
) -> bool:
    """Whether a decode may take one more: bounded, because Arrow's text columns are."""
    rows = sum(one.num_rows for one in [*raws, raw])
    size = sum(one.nbytes for one in [*raws, raw]) + sum(map(carried_bytes, annotations))
    return bool(rows <= _ROWS_PER_DECODE_MAX and size <= _BYTES_PER_DECODE_MAX)

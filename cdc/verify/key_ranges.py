"""Both sides of a comparison, laid side by side by ranges of key hashes.

Rows of both sides arrive in any order and are written to one file per side and range. A range has
the same keys on both sides, whatever the type, order and collation of the key. So one range after
another is loaded and compared: first its count of rows and its checksum, and only where these
differ its rows.

Invariants: memory is bounded by the rows of one range, and files hold keys and digests, no other
values. Equal content has equal digests; different content has the same one by accident only (64
bits).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from cdc.backfill.table import Leaf

RANGE_ROWS: Final = 250_000
"""About how many rows a range has."""

RANGES_MAX: Final = 256
"""Also the number for messages, of which a key may have any number."""

_ROW_BYTES: Final = 64  # rows of a table that was never analyzed are hardly smaller
_SPILLED_ROWS: Final = 65_536  # are written at once
_HASH_BITS: Final = 64

_FILE_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("digest", pa.uint64()),  # null: the row is gone
        pa.field("lsn", pa.int64()),
        pa.field("idx", pa.int64()),
    ]
)

Hashes = npt.NDArray[np.uint64]


def ranges_for(rows: int) -> int:
    """In how many ranges a table of about so many rows is compared: a power of two."""
    wanted = max(1, -(-rows // RANGE_ROWS))
    return int(min(RANGES_MAX, 1 << (wanted - 1).bit_length()))


def ranges_of(leaves: Iterable[Leaf]) -> int:
    """In how many ranges a table is compared that has these leaves."""
    return ranges_for(sum(max(leaf.rows, leaf.bytes // _ROW_BYTES) for leaf in leaves))


def hashes_of(values: pa.Array) -> Hashes:
    """A hash of each value; null counts as empty."""
    binary = pc.fill_null(values.cast(pa.binary()), b"")
    return np.fromiter(map(xxhash.xxh3_64_intdigest, binary.to_pylist()), np.uint64, len(binary))


class HeldSide:
    """The rows of one side, in one file per range below ``directory``; close it before reading."""

    def __init__(self, directory: Path, ranges: int) -> None:
        directory.mkdir(mode=0o700)
        self._directory = directory
        self._shift = np.uint64(_HASH_BITS - (ranges - 1).bit_length())
        self._ranges = ranges
        self._files = ExitStack()
        self._writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
        self._waiting: list[pa.RecordBatch] = []  # not written yet
        self._waiting_rows = 0
        self._emptied = (-1, -1)  # the place of the last message that emptied the table

    def add(self, held: pa.RecordBatch) -> None:
        """More rows (``HELD_SCHEMA``)."""
        rows = held.filter(held.column("key").is_valid())
        if rows.num_rows < held.num_rows:
            emptying = held.filter(pc.invert(held.column("key").is_valid()))
            places = zip(
                *(emptying.column(name).to_pylist() for name in ("lsn", "idx")), strict=True
            )
            self._emptied = max(self._emptied, *places)
        if not rows.num_rows:
            return
        content = rows.column("content")
        digests = pa.array(hashes_of(content), mask=~content.is_valid().to_numpy(False))
        arrays = [rows.column("key"), digests, rows.column("lsn"), rows.column("idx")]
        self._waiting.append(pa.RecordBatch.from_arrays(arrays, schema=_FILE_SCHEMA))
        self._waiting_rows += rows.num_rows
        if self._waiting_rows >= _SPILLED_ROWS:
            self._spill()

    def _spill(self) -> None:
        """Write what waits to the files of its ranges."""
        if not self._waiting:
            return
        kept = pa.concat_batches(self._waiting)
        self._waiting, self._waiting_rows = [], 0
        if self._ranges == 1:
            self._writer(0).write_batch(kept)
            return
        numbers = hashes_of(kept.column("key")) >> self._shift
        order = np.argsort(numbers, kind="stable")
        kept, numbers = kept.take(pa.array(order)), numbers[order]
        starts = np.flatnonzero(np.diff(numbers, prepend=self._ranges)).tolist()
        for start, end in zip(starts, [*starts[1:], len(numbers)], strict=True):
            self._writer(int(numbers[start])).write_batch(kept.slice(start, end - start))

    def close(self) -> None:
        """Nothing more is added."""
        self._spill()
        self._files.close()
        self._writers.clear()

    def range(self, number: int) -> RangeRows:
        """The rows of a range as the last message of each key left them."""
        path = self._path(number)
        if not path.exists():
            return RangeRows(pa.array([], pa.string()), np.array([], np.uint64))
        with pa.memory_map(str(path)) as file, closing(pa.ipc.open_stream(file)) as reader:
            return _last_of_each(reader.read_all().combine_chunks(), self._emptied)

    def _writer(self, number: int) -> pa.ipc.RecordBatchStreamWriter:
        if number not in self._writers:
            file = self._files.enter_context(pa.OSFile(str(self._path(number)), "wb"))
            self._writers[number] = self._files.enter_context(pa.ipc.new_stream(file, _FILE_SCHEMA))
        return self._writers[number]

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}.arrow"


@dataclass(frozen=True)
class RangeRows:
    """The rows of one side of a range: ``keys`` are distinct."""

    keys: pa.StringArray
    digests: Hashes

    @property
    def checksum(self) -> int:
        """The same for the same rows in any order."""
        return int(self.digests.sum(dtype=np.uint64))


@dataclass(frozen=True)
class RangeDifferences:
    """The keys of a range whose rows are not the same on both sides."""

    source_rows: int
    destination_rows: int
    keys: list[str]


def compare(source: RangeRows, destination: RangeRows) -> RangeDifferences:
    """Compare both sides of a range, by count and checksum first."""
    counts = len(source.keys), len(destination.keys)
    if counts[0] == counts[1] and source.checksum == destination.checksum:
        return RangeDifferences(*counts, [])
    places = pc.index_in(source.keys, value_set=destination.keys)
    found = places.is_valid().to_numpy(zero_copy_only=False)
    at = pc.fill_null(places, 0).to_numpy(zero_copy_only=False)
    equal = np.zeros(counts[0], bool)
    if counts[1]:
        equal = found & (destination.digests[at] == source.digests)
    extra = pc.invert(pc.is_in(destination.keys, value_set=source.keys))
    differing = source.keys.filter(pa.array(~equal)).to_pylist()
    return RangeDifferences(*counts, differing + destination.keys.filter(extra).to_pylist())


def _last_of_each(rows: pa.Table, emptied: tuple[int, int]) -> RangeRows:
    encoded = rows.column("key").combine_chunks().dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    lsn, idx = (rows.column(name).to_numpy() for name in ("lsn", "idx"))
    order = np.lexsort((np.arange(len(codes)), idx, lsn, codes))
    last = order[np.flatnonzero(np.diff(codes[order], append=-1))]
    digests = rows.column("digest").combine_chunks()
    there = digests.is_valid().to_numpy(zero_copy_only=False)
    there &= (lsn > emptied[0]) | ((lsn == emptied[0]) & (idx > emptied[1]))
    kept = last[there[last]]
    values = pc.fill_null(digests, 0).to_numpy(zero_copy_only=False)
    return RangeRows(encoded.dictionary.take(pa.array(codes[kept])), values[kept])

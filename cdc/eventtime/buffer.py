"""Rows of several sources that wait until the watermark reaches them. Arrow in, Arrow out.

Invariants: a row that was added is released once, by the first watermark at or above its
due; what is released together is ordered by due, ties by source and cursor. The memory is bounded:
a source has its share, and waits when it has used it up. Nothing is ever dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cdc.cursor import Cursor
from cdc.errors import ConfigError
from cdc.eventtime.released import Places, Released, gathered_by_due
from cdc.eventtime.times import NO_TIME, Codes, Times
from cdc.eventtime.waiting_rows import WaitingRows

BYTES_MAX = 1 << 30
"""The largest bound: everything must fit into one batch, and a text column of Arrow ends at 2 GiB.
Half of that leaves room for the last batches of the sources, which may go beyond the bound."""
CHUNKS_MAX = 16
"""Chunks of a source: what a release looks at."""
_MERGED_AT_ONCE = 8


class EventTimeBuffer:
    """Chunks of each source in cursor order."""

    def __init__(self, sources: Sequence[str], *, max_bytes: int) -> None:
        if max_bytes > BYTES_MAX:
            raise ConfigError(
                f"a buffer of {max_bytes} bytes for event time is too large to be released at once",
                fix="set event_time.max_buffer_bytes to at most 1GiB",
            )
        self._chunks: dict[str, list[WaitingRows]] = {source: [] for source in sources}
        self._share = max_bytes // max(1, len(self._chunks))

    @property
    def bytes(self) -> int:
        return sum(chunk.bytes for _, chunk in self._all())

    @property
    def rows(self) -> int:
        return sum(len(chunk) for _, chunk in self._all())

    @property
    def max_due(self) -> int:
        """The highest due of what is there, ``NO_TIME`` if there is nothing."""
        return max((chunk.max_due for _, chunk in self._all()), default=NO_TIME)

    def bytes_of(self, source: str) -> int:
        return sum(chunk.bytes for chunk in self._chunks[source])

    def has_room(self, source: str, *, besides: int = 0) -> bool:
        """Whether a source is below its share, with so many bytes elsewhere; a batch that goes
        beyond it is taken whole."""
        return self.bytes_of(source) + besides < self._share

    def rows_of_partitions(self, partitions: int) -> NDArray[np.int64]:
        """How many rows of each partition wait, by code, for the first ``partitions`` codes."""
        counts: NDArray[np.int64] = np.zeros(partitions, np.int64)
        for _, chunk in self._all():
            codes = chunk.left_codes()
            codes = codes[(codes >= 0) & (codes < partitions)]
            counts += np.bincount(codes, minlength=partitions)
        return counts

    def oldest(self, source: str) -> Cursor | None:
        """The lowest cursor of a source that waits."""
        chunks = self._chunks[source]
        return chunks[0].oldest if chunks else None

    def add(
        self,
        source: str,
        rows: pa.RecordBatch,
        times: Times,
        due: Times,
        codes: Codes,
        keep: Places | None = None,
    ) -> None:
        """Rows in cursor order, above all of the source that came before; ``keep``: only these.

        They are copied when something was released, or by ``keep_left``, if they still wait then.
        """
        if not len(due if keep is None else keep):
            return
        chunks = self._chunks[source]
        chunks.append(WaitingRows.of(rows, times, due, codes, keep))
        if len(chunks) > CHUNKS_MAX:
            _merge_smallest(chunks)

    def release(self, watermark: int) -> Released | None:
        """Everything that is due at or below the watermark."""
        parts = [chunk.release(watermark, code) for code, chunk in self._all()]
        released = gathered_by_due([part for part in parts if part is not None])
        self.keep_left()
        return released

    def keep_left(self) -> None:
        """Hold what waits in memory of its own: where it came from may go."""
        for source, chunks in self._chunks.items():
            self._chunks[source] = [chunk.kept() for chunk in chunks if len(chunk)]

    def flush(self) -> Released | None:
        """Everything."""
        return self.release(self.max_due)

    def within(self, start: int, end: int) -> Released | None:
        """What waits with ``start <= time < end``, ordered as a release; nothing is taken out."""
        parts = [chunk.within(start, end, code) for code, chunk in self._all()]
        return gathered_by_due([part for part in parts if part is not None])

    def _all(self) -> Iterator[tuple[int, WaitingRows]]:
        """In the order of sources, and of cursors in each: what a stable sort keeps of ties."""
        for code, chunks in enumerate(self._chunks.values()):
            for chunk in chunks:
                yield code, chunk


def _merge_smallest(chunks: list[WaitingRows]) -> None:
    """The neighbours with the fewest rows become one, so each row is copied a few times only."""
    sizes = np.array([len(chunk) for chunk in chunks])
    totals = np.convolve(sizes, np.ones(_MERGED_AT_ONCE, sizes.dtype), "valid")
    at = int(np.argmin(totals))
    chunks[at : at + _MERGED_AT_ONCE] = [WaitingRows.merged(chunks[at : at + _MERGED_AT_ONCE])]

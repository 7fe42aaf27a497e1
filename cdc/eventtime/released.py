"""Rows that leave the buffer, or were late, with what is known of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cdc.eventtime.times import Codes, Times

Sources = NDArray[np.int16]


@dataclass(frozen=True)
class Released:
    """Never empty; every column has one entry a row."""

    rows: pa.RecordBatch
    times: Times  # NO_TIME for a change that has none
    due: Times
    codes: Codes  # the partition, -1 for none
    sources: Sources  # place in the sources that the buffer was made with

    def __len__(self) -> int:
        return len(self.due)

    def in_order_of_due(self) -> Released:
        """By due; what is due at the same time stays as it is."""
        if not (self.due[1:] < self.due[:-1]).any():
            return self
        return self.take(np.argsort(self.due, kind="stable"))

    def take(self, places: NDArray[np.intp]) -> Released:
        return Released(
            self.rows.take(pa.array(places)),
            self.times[places],
            self.due[places],
            self.codes[places],
            self.sources[places],
        )


def joined(pieces: Sequence[Released]) -> Released | None:
    """One after the other; None if there are none."""
    if len(pieces) <= 1:
        return pieces[0] if pieces else None
    return Released(
        pa.concat_batches([piece.rows for piece in pieces]),
        np.concatenate([piece.times for piece in pieces]),
        np.concatenate([piece.due for piece in pieces]),
        np.concatenate([piece.codes for piece in pieces]),
        np.concatenate([piece.sources for piece in pieces]),
    )

"""Where segments and their indexes lie, and what an index entry says.

A segment is named by its first batch, so that a listing is in order and finds a batch by
bisection. An index is a plain array of fixed-size entries: its length in bytes says how many
batches are readable, and NumPy searches it without parsing.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cdc.log.frame import Marker

INDEX_DTYPE = np.dtype(
    [
        ("batch_idx", "<i8"),
        ("offset", "<i8"),
        ("bytes", "<i8"),
        ("rows", "<i8"),
        ("first_lsn", "<i8"),
        ("first_idx", "<i8"),
        ("high_lsn", "<i8"),
        ("high_idx", "<i8"),
    ]
)
Index = npt.NDArray[np.void]

_DATA, _INDEX = ".seg", ".idx"


def data_path(directory: Path, first_batch: int) -> Path:
    return directory / f"{first_batch:020d}{_DATA}"


def index_path(directory: Path, first_batch: int) -> Path:
    return directory / f"{first_batch:020d}{_INDEX}"


def list_segments(directory: Path) -> list[int]:
    """The first batch of every segment file, in order."""
    return _listed(directory, _DATA)


def list_readable(directory: Path) -> list[int]:
    """The first batch of every segment that has an index: trimming removes the index first."""
    return _listed(directory, _INDEX)


def _listed(directory: Path, suffix: str) -> list[int]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(name.removesuffix(suffix)) for name in names if name.endswith(suffix))


def index_length(path: Path) -> int:
    """How many whole entries an index has, without reading them."""
    try:
        return path.stat().st_size // INDEX_DTYPE.itemsize
    except FileNotFoundError:
        return 0


def index_entry(marker: Marker, offset: int) -> tuple[int, ...]:
    """What the index says of the frame at ``offset``, in ``INDEX_DTYPE``'s order."""
    return (
        marker.batch_idx,
        offset,
        marker.frame_bytes,
        marker.rows,
        *marker.first,
        *marker.high,
    )


def pack_index(entries: list[tuple[int, ...]]) -> bytes:
    return np.array(entries, dtype=INDEX_DTYPE).tobytes() if entries else b""


def load_index(path: Path) -> Index:
    """All whole entries; empty when the file is not there yet or any more."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    return np.frombuffer(data, dtype=INDEX_DTYPE, count=len(data) // INDEX_DTYPE.itemsize)

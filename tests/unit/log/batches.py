"""Small batches, and writers that end as processes do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.cursor import Cursor
from cdc.decoding.annotations import AnnotationRun
from cdc.decoding.raw import RAW_SCHEMA
from cdc.log.manifest import Manifest, read_manifest
from cdc.log.segment import data_path, index_path
from cdc.log.view import LogView
from cdc.log.writer import LogWriter, Retention, SegmentLimits, TierSettings

SCHEMAS = {7: b"R-seven"}
SMALL = SegmentLimits(bytes=3_000)
KEEP_ALL = Retention(settled_s=1e9, settled_bytes=1 << 40, bytes_max=1 << 40)
KEEP_NONE = Retention(settled_s=1e9, settled_bytes=0, bytes_max=1 << 40)


def rows(lsn: int, count: int, size: int = 10) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "commit_lsn": [lsn] * count,
            "commit_idx": list(range(count)),
            "commit_ts": [lsn * 1_000 + i for i in range(count)],
            "xid": [1] * count,
            "kind": [ord("I")] * count,
            "relation": [1] * count,
            "schema_id": [7] * count,
            "payload": [bytes([65 + i % 26]) * size for i in range(count)],
        },
        schema=RAW_SCHEMA,
    )


def append(log: LogWriter, lsn: int, count: int = 3, size: int = 10) -> None:
    log.append(
        rows(lsn, count, size),
        SCHEMAS,
        first=Cursor(lsn, 0),
        high=Cursor(lsn, count),
        annotations=runs(lsn, count),
    )


def runs(lsn: int, count: int) -> tuple[AnnotationRun, ...]:
    """All rows but the first carry one."""
    return (AnnotationRun(1, count, b"%d" % lsn),) if count > 1 else ()


def lsns(directory: Path, history: int | None = None) -> list[int]:
    """The commit LSN of every readable batch, in order.

    None may be skipped, and each must have what ``append`` put beside its rows.
    """
    view = LogView(directory, history=history)
    frames = list(view.frames(view.first_batch(), view.next_batch()))
    numbers = [frame.marker.batch_idx for frame in frames]
    assert numbers == list(range(view.first_batch(), view.next_batch()))
    found = [frame.raw.column("commit_lsn")[0].as_py() for frame in frames]
    for lsn, frame in zip(found, frames, strict=True):
        assert frame.schemas == SCHEMAS
        assert frame.annotations == runs(lsn, frame.raw.num_rows)
    return found


def sealed_log(directory: Path, *, tier: TierSettings | None = None) -> LogWriter:
    """Batches 10 to 39 in several sealed segments and an active one."""
    log = LogWriter(directory, limits=SMALL, tier=tier)
    for lsn in range(10, 40):
        append(log, lsn, size=200)
    assert len(log.manifest.segments) > 3
    return log


def healed(log: LogWriter, unsettled_from: Cursor, refetchable_from: Cursor) -> Cursor | None:
    """Inspect the log to the end, and heal it by what was found."""
    inspection = log.inspect(unsettled_from, refetchable_from)
    assert inspection.wait(30)
    assert inspection.found is not None
    return log.heal(inspection.found, unsettled_from, refetchable_from)


def crash(log: LogWriter) -> None:
    """End the writer as a killed process ends: nothing is synced, nothing is tidied up."""
    log._mover.close()
    log._syncer.close()
    if log._active is not None:
        log._active.close()
    os.close(log._lock)


def manifest_of(directory: Path) -> Manifest:
    manifest = read_manifest(directory)
    assert manifest is not None
    return manifest


def sealed_data(directory: Path, position: int = 0) -> Path:
    return data_path(directory, manifest_of(directory).segments[position].name)


def sealed_index(directory: Path, position: int = 0) -> Path:
    return index_path(directory, manifest_of(directory).segments[position].name)


def active_data(directory: Path) -> Path:
    return data_path(directory, manifest_of(directory).active_name)


def active_index(directory: Path) -> Path:
    return index_path(directory, manifest_of(directory).active_name)


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@contextmanager
def no_space_for(suffix: str) -> Iterator[None]:
    """Files with ``suffix`` cannot be made."""
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith(suffix) and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        yield

"""A disk that refuses: nothing half-written is left, and it goes on later."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cdc.errors import TransientError
from cdc.log.writer import LogWriter, SegmentLimits
from tests.unit.log.batches import active_data, active_index, append, lsns, no_space_for


def test_a_full_disk_leaves_what_was_whole_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    real = os.writev

    def half(handle: int, parts: list[memoryview]) -> int:
        if not half_written:
            half_written.append(True)
            return real(handle, [parts[0][:10]])
        raise OSError(errno.ENOSPC, "No space left on device")

    half_written: list[bool] = []
    monkeypatch.setattr(os, "writev", half)
    with pytest.raises(TransientError, match="No space left"):
        append(log, 20)
    monkeypatch.setattr(os, "writev", real)
    assert lsns(tmp_path) == [10]
    append(log, 20)
    log.close()
    assert lsns(tmp_path) == [10, 20]


def test_an_entry_that_was_written_in_part_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    real = os.writev

    def refuse_entries(handle: int, parts: list[memoryview]) -> int:
        if len(parts) == 1:
            real(handle, [parts[0][:40]])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, parts)

    monkeypatch.setattr(os, "writev", refuse_entries)
    with pytest.raises(TransientError, match="No space left"):
        append(log, 20)
    assert lsns(tmp_path) == [10]
    monkeypatch.undo()
    append(log, 20)
    log.close()
    assert lsns(tmp_path) == [10, 20]


@pytest.mark.parametrize("suffix", [".seg", ".idx"])
def test_a_roll_on_a_full_disk_is_tried_again(tmp_path: Path, suffix: str) -> None:
    log = LogWriter(tmp_path, limits=SegmentLimits(bytes=1_000))
    append(log, 10, size=1_000)
    with no_space_for(suffix):
        for _ in range(2):
            with pytest.raises(TransientError, match="No space left"):
                append(log, 20)
            assert lsns(tmp_path) == [10]
    append(log, 20)
    append(log, 30)
    log.close()
    assert lsns(tmp_path) == [10, 20, 30]


def test_a_manifest_that_cannot_be_written_leaves_the_segment_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path, limits=SegmentLimits(bytes=1_000))
    append(log, 10, size=1_000)

    real = os.fsync

    def refuse_files(handle: int) -> None:
        if not os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse_files)
        for _ in range(2):
            with pytest.raises(TransientError, match="No space left"):
                append(log, 20)
    assert not log.manifest.segments
    append(log, 20)
    assert len(log.manifest.segments) == 1
    log.close()
    assert lsns(tmp_path) == [10, 20]


def test_a_manifest_that_may_not_stay_asks_for_a_reopen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path, limits=SegmentLimits(bytes=1_000))
    append(log, 10, size=1_000)
    real = os.fsync

    def refuse_directories(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EIO, "Input/output error")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse_directories)
        with pytest.raises(TransientError, match="Input/output"):
            append(log, 20)
    assert log.needs_reopen
    with pytest.raises(TransientError, match="opened anew"):
        append(log, 20)
    log.close()
    log = LogWriter(tmp_path)
    append(log, 20)
    log.close()
    assert lsns(tmp_path) == [10, 20]


def test_what_a_failed_write_left_is_cut_before_the_next_or_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    for path in (active_data(tmp_path), active_index(tmp_path)):
        with path.open("ab") as file:
            file.write(b"half a frame")

    def refuse(_handle: int, _size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(TransientError, match="Input/output"):
            append(log, 20)
    append(log, 20)
    log.close()
    assert lsns(tmp_path) == [10, 20]


@pytest.mark.parametrize("suffix", [".seg", ".idx"])
def test_failed_rolls_leave_no_descriptor_open(tmp_path: Path, suffix: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    log = LogWriter(tmp_path, limits=SegmentLimits(bytes=1_000))
    append(log, 10, size=1_000)
    opened = len(os.listdir("/proc/self/fd"))
    with no_space_for(suffix):
        for _ in range(5):
            with pytest.raises(TransientError):
                append(log, 20)
    assert len(os.listdir("/proc/self/fd")) <= opened
    log.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("suffix", [".seg", ".idx", "durable"])
def test_an_open_that_fails_leaves_no_descriptor_and_no_lock(tmp_path: Path, suffix: str) -> None:
    LogWriter(tmp_path).close()
    before = len(os.listdir("/proc/self/fd"))
    with no_space_for(suffix), pytest.raises(TransientError, match="No space left"):
        LogWriter(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    LogWriter(tmp_path, lock_timeout_s=0.1).close()

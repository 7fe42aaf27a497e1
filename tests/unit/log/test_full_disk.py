"""A disk that refuses: nothing half-written is left, and it goes on later."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import TransientError
from cdc.log.damage_note import report_damage, take_damage_report
from cdc.log.frame import encode_frame
from cdc.log.sync import read_durable
from cdc.log.writer import LogWriter, SegmentLimits
from tests.unit.log.batches import (
    KEEP_NONE,
    active_data,
    active_index,
    append,
    lsns,
    no_space_for,
    rows,
    sealed_log,
)


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
    with pytest.raises(TransientError, match="reopened"):
        append(log, 20)
    log.close()
    log = LogWriter(tmp_path)
    append(log, 20)
    log.close()
    assert lsns(tmp_path) == [10, 20]


def test_the_rest_of_a_failed_write_is_cut_before_the_next_or_there_is_none(
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


def test_a_part_of_a_frame_does_not_keep_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    whole, real = active_data(tmp_path).stat().st_size, os.writev

    def half(handle: int, parts: list[memoryview]) -> int:
        real(handle, [parts[0][:10]])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", half)
        with pytest.raises(TransientError, match="No space left"):
            append(log, 20)
    assert active_data(tmp_path).stat().st_size == whole
    log.close()


def test_retention_makes_room_on_a_disk_without_a_block_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = sealed_log(tmp_path)
    spare, real = tmp_path / "spare", os.fsync
    assert spare.stat().st_blocks * 512 >= 64 << 10

    def no_block(handle: int) -> None:
        if spare.exists() and not os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_block)
        assert log.retain(log.end, KEEP_NONE).removed > 3
    assert not list(tmp_path.glob("*.tmp"))
    log.retain(log.end, KEEP_NONE)
    assert spare.exists(), "there is room again"
    log.close()


@pytest.mark.parametrize("name", ["writer.lock", "mkdir"])
def test_a_disk_that_cannot_hold_a_log_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(_self: Path, *_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if name == "mkdir":
        monkeypatch.setattr(Path, "mkdir", refuse)
    with no_space_for(name), pytest.raises(TransientError, match="No space left"):
        LogWriter(tmp_path / "log" if name == "mkdir" else tmp_path)


def test_a_durable_file_that_cannot_be_written_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_handle: int, _data: bytes, _offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    log = LogWriter(tmp_path)
    assert read_durable(tmp_path) == ORIGIN
    log.close()


def test_a_durable_file_that_cannot_be_cut_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LogWriter(tmp_path).close()
    with (tmp_path / "durable").open("ab") as file:
        file.write(b"more")

    def refuse(_handle: int, _size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(TransientError, match="Input/output"):
        LogWriter(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_damage_is_reported_or_not_but_never_raises(tmp_path: Path) -> None:
    report_damage(tmp_path / "nowhere")
    assert not take_damage_report(tmp_path / "nowhere")
    report_damage(tmp_path)
    assert take_damage_report(tmp_path)


def test_rows_that_cannot_be_described_are_not_published(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    marker, header, body = encode_frame(1, rows(20, 1), {}, first=Cursor(20, 0), high=Cursor(20, 1))
    assert log._active is not None
    with pytest.raises(TypeError):
        log._active.write(marker, header, body, pa.array([{"not": "a time"}]))
    assert lsns(tmp_path) == [10]
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

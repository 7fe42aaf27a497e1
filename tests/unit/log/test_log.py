"""The change log: what was appended is there, what is damaged is never taken for whole."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.cursor import ORIGIN, Cursor
from cdc.decode.raw import RAW_SCHEMA
from cdc.errors import CorruptionError, GapError, ProtocolError, TransientError
from cdc.log.segment import data_path, index_path, list_segments
from cdc.log.view import LogView
from cdc.log.writer import LogWriter

SCHEMAS = {7: b"R-seven"}


def rows(lsn: int, count: int, size: int = 10) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "commit_lsn": [lsn] * count,
            "commit_idx": list(range(count)),
            "commit_ts": [0] * count,
            "xid": [1] * count,
            "kind": [ord("I")] * count,
            "relation": [1] * count,
            "schema_id": [7] * count,
            "payload": [bytes([65 + i % 26]) * size for i in range(count)],
        },
        schema=RAW_SCHEMA,
    )


def append(log: LogWriter, lsn: int, count: int = 3, size: int = 10) -> None:
    log.append(rows(lsn, count, size), SCHEMAS, first=Cursor(lsn, 0), high=Cursor(lsn, count))


def no_space_for(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on files with ``suffix`` cannot be opened."""
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith(suffix):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


def lsns(directory: Path) -> list[int]:
    view = LogView(directory)
    frames = view.frames(view.first_batch(), view.next_batch())
    return [frame.raw.column("commit_lsn")[0].as_py() for frame in frames]


def test_what_was_appended_is_read_back_with_its_schemas(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    append(log, 20, count=5)
    frames = list(LogView(tmp_path).frames(0, 2))
    log.close()
    assert [frame.raw.num_rows for frame in frames] == [3, 5]
    assert frames[1].raw.equals(rows(20, 5))
    assert frames[1].schemas == SCHEMAS
    assert frames[1].marker.high == Cursor(20, 5)


def test_a_reader_sees_a_batch_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    log, view = LogWriter(tmp_path), LogView(tmp_path)
    assert view.wait(0, 0.0) == 0
    thread = threading.Thread(target=append, args=(log, 10))
    thread.start()
    assert view.wait(0, 10.0) == 1
    thread.join()
    view.close()
    log.close()


def test_segments_roll_and_a_cursor_is_found_across_them(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, segment_bytes=5_000)
    for lsn in range(10, 60):
        append(log, lsn, size=200)
    log.close()
    view = LogView(tmp_path)
    assert len(list_segments(tmp_path)) > 3
    assert [view.seek(Cursor(lsn, 0)) for lsn in (10, 34, 59)] == [0, 24, 49]
    assert view.seek(Cursor(34, 2)) == 24
    assert view.seek(Cursor(34, 3)) == 25, "the high watermark is exclusive"
    assert view.seek(ORIGIN) == 0
    assert view.seek(Cursor(99, 0)) == 50


def test_an_empty_log_starts_at_batch_zero(tmp_path: Path) -> None:
    view = LogView(tmp_path / "none")
    assert (view.first_batch(), view.next_batch(), view.seek(Cursor(5, 5))) == (0, 0, 0)


def test_a_reopened_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, segment_bytes=3_000)
    for lsn in range(10, 20):
        append(log, lsn, size=200)
    end, following = log.end, log.next_batch
    log.close()
    log = LogWriter(tmp_path, segment_bytes=3_000)
    assert (log.end, log.next_batch) == (end, following)
    append(log, 20)
    log.close()
    assert lsns(tmp_path) == list(range(10, 21))


def test_a_batch_below_the_end_is_refused(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    append(log, 20)
    with pytest.raises(ProtocolError, match="cannot follow"):
        append(log, 10)
    log.close()


def test_trimming_keeps_what_is_not_settled(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, segment_bytes=3_000)
    for lsn in range(10, 40):
        append(log, lsn, size=200)
    before = log.size_bytes
    assert log.trim(Cursor(25, 0)) > 0
    assert log.size_bytes < before
    assert lsns(tmp_path)[-15:] == list(range(25, 40))
    view = LogView(tmp_path)
    assert 0 < view.first_batch() <= view.seek(Cursor(25, 0))
    with pytest.raises(GapError, match="not all in the log"):
        view.entries(0, 5)
    log.close()


def test_a_second_writer_is_kept_out(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    with pytest.raises(TransientError, match="another process writes"):
        LogWriter(tmp_path, lock_timeout_s=0.1)
    log.close()
    LogWriter(tmp_path).close()


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
    append(log, 20)
    log.close()
    assert lsns(tmp_path) == [10, 20]


def test_a_flipped_bit_in_a_sealed_segment_is_reported_not_skipped(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, segment_bytes=1_000)
    for lsn in range(10, 15):
        append(log, lsn, size=400)
    log.close()
    path = data_path(tmp_path, 0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="does not match its checksum"):
        lsns(tmp_path)


def sealed_log(directory: Path) -> None:
    log = LogWriter(directory, segment_bytes=1_000)
    for lsn in range(10, 15):
        append(log, lsn, size=400)
    log.close()


@pytest.mark.parametrize("index", [None, b"", b"\0" * 64, b"\0" * 30])
def test_a_sealed_segment_without_its_index_is_read_all_the_same(
    tmp_path: Path, index: bytes | None
) -> None:
    sealed_log(tmp_path)
    index_path(tmp_path, 0).unlink()
    if index is not None:
        index_path(tmp_path, 0).write_bytes(index)
    LogWriter(tmp_path).close()
    assert lsns(tmp_path) == list(range(10, 15))


def test_a_damaged_sealed_segment_is_reported_and_left_as_it_is(tmp_path: Path) -> None:
    sealed_log(tmp_path)
    data = bytearray(data_path(tmp_path, 0).read_bytes())
    data[200] ^= 1
    data_path(tmp_path, 0).write_bytes(data)
    index_path(tmp_path, 0).unlink()
    with pytest.raises(CorruptionError, match="is damaged at byte 0"):
        LogWriter(tmp_path)
    assert data_path(tmp_path, 0).read_bytes() == data


def test_a_roll_on_a_full_disk_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path, segment_bytes=1_000)
    append(log, 10, size=1_000)
    no_space_for(".seg", monkeypatch)
    for _ in range(2):
        with pytest.raises(TransientError, match="No space left"):
            append(log, 20)
    monkeypatch.undo()
    append(log, 20)
    append(log, 30)
    log.close()
    assert lsns(tmp_path) == [10, 20, 30]


def test_what_a_failed_write_left_is_cut_before_the_next_or_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    with data_path(tmp_path, 0).open("ab") as file:
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


def test_failed_rolls_leave_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path, segment_bytes=1_000)
    append(log, 10, size=1_000)
    before = len(os.listdir("/proc/self/fd"))
    no_space_for(".idx", monkeypatch)
    for _ in range(5):
        with pytest.raises(TransientError):
            append(log, 20)
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == before
    log.close()


def test_what_an_earlier_process_left_unsynced_is_synced_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    os.close(log._lock)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda handle: synced.append(os.fstat(handle).st_size))
    again = LogWriter(tmp_path)
    assert again.end == Cursor(10, 3)
    assert synced[0] == data_path(tmp_path, 0).stat().st_size


@pytest.fixture(scope="module")
def three_batches() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        log = LogWriter(Path(directory))
        for lsn in (10, 20, 30):
            append(log, lsn)
        log.close()
        return data_path(Path(directory), 0).read_bytes()


def reopened(data: bytes, index: bytes | None = None) -> list[int]:
    """What a writer, and then a reader, make of a segment with these bytes."""
    directory = Path(tempfile.mkdtemp())
    try:
        data_path(directory, 0).write_bytes(data)
        if index is not None:
            index_path(directory, 0).write_bytes(index)
        log = LogWriter(directory)
        append(log, 40)
        log.close()
        return lsns(directory)
    finally:
        shutil.rmtree(directory)


@settings(max_examples=150, deadline=None)
@given(cut=st.floats(0, 1))
def test_a_torn_tail_is_cut_at_the_last_whole_batch(three_batches: bytes, cut: float) -> None:
    kept = int(cut * len(three_batches))
    whole = kept * 3 // len(three_batches)
    assert reopened(three_batches[:kept]) == [*[10, 20, 30][:whole], 40]


@settings(max_examples=150, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_active_segment_cuts_from_the_damaged_batch_on(
    three_batches: bytes, place: float, bit: int
) -> None:
    data = bytearray(three_batches)
    at = int(place * len(data))
    data[at] ^= 1 << bit
    damaged = at * 3 // len(data)
    found = reopened(bytes(data))
    # The reserved bytes of a header are the only ones that may differ without harm.
    if found != [10, 20, 30, 40]:
        assert found == [*[10, 20, 30][:damaged], 40]
    else:
        assert 4 <= at % (len(data) // 3) < 8


def test_an_index_that_ran_ahead_of_its_data_is_made_anew(three_batches: bytes) -> None:
    assert reopened(three_batches[: len(three_batches) // 2], index=b"\0" * 192) == [10, 40]

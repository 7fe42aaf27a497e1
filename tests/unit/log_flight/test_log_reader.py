"""What every reader of the log promises, mapped or remote."""

from __future__ import annotations

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.annotations import AnnotationRun
from cdc.errors import CorruptionError, GapError
from cdc.log.retention import Retention
from cdc.log.tier.tier import TierSettings
from cdc.log.view import LogReader, LogView
from cdc.log.writer import LogWriter, SegmentLimits
from tests.unit.log_flight.batches import SCHEMAS, append, rows
from tests.unit.log_flight.conftest import OpenReader
from tests.waiting import until

KEEP_ALL = Retention(settled_s=1e9, settled_bytes=1 << 40, bytes_max=1 << 40, on_full="pause")
KEEP_NOTHING = Retention(settled_s=0, settled_bytes=0, bytes_max=1 << 40, on_full="pause")


def test_appended_batches_are_read_with_all_that_stands_beside_their_rows(
    writer: LogWriter, log_reader: LogReader
) -> None:
    append(writer, 10, 20, 30)
    frames = list(log_reader.frames(1, 3))
    assert [frame.marker.batch_idx for frame in frames] == [1, 2]
    assert frames[0].raw.equals(rows(20))
    assert frames[0].schemas == SCHEMAS
    assert frames[0].annotations == (AnnotationRun(1, 3, b"20"),)
    assert frames[1].marker.high == Cursor(30, 3)
    assert list(log_reader.frames(3, 3)) == []


def test_a_log_that_does_not_exist_yet_is_empty(log_reader: LogReader) -> None:
    assert (log_reader.first_batch(), log_reader.next_batch()) == (0, 0)
    assert log_reader.seek(Cursor(5, 5)) == 0
    assert log_reader.floors() == (ORIGIN, ORIGIN)


def test_a_waiting_reader_is_woken_by_the_batch(writer: LogWriter, log_reader: LogReader) -> None:
    woken_after_s = []
    for batch in range(7):
        appended: list[float] = []

        def later(appended: list[float] = appended, lsn: int = 10 + batch) -> None:
            appended.append(time.monotonic())
            append(writer, lsn)

        timer = threading.Timer(0.1, later)
        timer.start()
        assert log_reader.wait(batch, 30.0) == batch + 1
        woken_after_s.append(time.monotonic() - appended[0])
        timer.join()
    assert statistics.median(woken_after_s) < 0.1, "the reader polled, or was not woken"


def test_a_wait_ends_with_its_timeout(writer: LogWriter, log_reader: LogReader) -> None:
    append(writer, 10)
    started = time.monotonic()
    assert log_reader.wait(1, 0.3) == 1
    assert 0.3 <= time.monotonic() - started < 5.0


def test_a_batch_that_is_there_is_not_waited_for(writer: LogWriter, log_reader: LogReader) -> None:
    append(writer, 10, 20)
    started = time.monotonic()
    assert log_reader.wait(1, 30.0) == 2
    assert time.monotonic() - started < 5.0


def test_a_cursor_is_found_in_any_segment(writer: LogWriter, log_reader: LogReader) -> None:
    append(writer, *range(10, 60), size=200)
    assert len(writer.manifest.segments) > 3
    assert [log_reader.seek(Cursor(lsn, 0)) for lsn in (10, 34, 59)] == [0, 24, 49]
    assert log_reader.seek(Cursor(34, 3)) == 25, "the high watermark is exclusive"
    assert (log_reader.seek(ORIGIN), log_reader.seek(Cursor(99, 0))) == (0, 50)


def test_entries_are_those_of_the_index(
    writer: LogWriter, log_reader: LogReader, directory: Path
) -> None:
    append(writer, *range(10, 40), size=200)
    with closing(LogView(directory)) as view:
        assert log_reader.entries(3, 27).tolist() == view.entries(3, 27).tolist()
    assert log_reader.entries(3, 27)["first_lsn"].tolist() == list(range(13, 37))
    assert len(log_reader.entries(5, 5)) == 0


def test_frames_cross_segments_in_order(writer: LogWriter, log_reader: LogReader) -> None:
    append(writer, *range(10, 60), size=200)
    found = [frame.raw.column("commit_lsn")[0].as_py() for frame in log_reader.frames(0, 50)]
    assert found == list(range(10, 60))


def test_a_trimmed_range_is_a_gap_and_the_floor_says_where_it_ends(
    writer: LogWriter, log_reader: LogReader
) -> None:
    append(writer, *range(10, 60), size=200)
    assert list(log_reader.frames(0, 2)), "a reader that has read before notices too"
    assert writer.retain(Cursor(30, 0), KEEP_NOTHING).removed
    first = log_reader.first_batch()
    earliest, evicted = log_reader.floors()
    assert 0 < first <= 20
    assert earliest == Cursor(10 + first - 1, 3)
    assert evicted == ORIGIN
    for read in (log_reader.entries, lambda a, b: list(log_reader.frames(a, b))):
        with pytest.raises(GapError, match="not all in the log") as caught:
            read(0, 5)
        assert caught.value.fix
    assert len(list(log_reader.frames(first, 50))) == 50 - first


def test_batches_that_are_not_written_yet_are_a_gap(
    writer: LogWriter, log_reader: LogReader
) -> None:
    append(writer, 10)
    with pytest.raises(GapError):
        list(log_reader.frames(0, 2))


def test_a_reader_of_a_history_that_was_cut_is_refused_with_the_reason(
    writer: LogWriter, open_reader: OpenReader
) -> None:
    append(writer, 10, 20)
    before = open_reader().history()
    reader = open_reader(history=before)
    assert reader.next_batch() == 2
    writer.restart_at(Cursor(15, 0))
    assert open_reader().history() == before + 1
    for look in (reader.next_batch, lambda: reader.wait(2, 5.0), lambda: reader.seek(ORIGIN)):
        with pytest.raises(GapError):
            look()
    with pytest.raises(GapError):
        list(reader.frames(0, 1))


def test_a_flipped_byte_on_disk_is_corruption(
    writer: LogWriter, log_reader: LogReader, directory: Path
) -> None:
    append(writer, 10, 20, 30)
    path = next(directory.glob("*.seg"))
    data = bytearray(path.read_bytes())
    entry = log_reader.entries(1, 2)[0]
    data[int(entry["offset"] + entry["bytes"]) - 90] ^= 1
    path.write_bytes(data)
    frames = log_reader.frames(0, 3)
    assert next(frames).marker.batch_idx == 0
    with pytest.raises(CorruptionError, match="checksum"):
        next(frames)


def test_segments_in_the_tier_are_read_like_others(
    directory: Path, open_reader: OpenReader, tmp_path: Path
) -> None:
    tier = TierSettings(str(tmp_path / "cold"), hot_bytes=0)
    with closing(LogWriter(directory, limits=SegmentLimits(bytes=5_000), tier=tier)) as log:
        append(log, *range(10, 60), size=200)
        reader = open_reader()
        before = [frame.raw for frame in reader.frames(0, 50)]

        def moved() -> bool:
            log.retain(ORIGIN, KEEP_ALL)
            return all(info.place for info in log.manifest.segments)

        until("segments in the tier", moved)
        assert [frame.raw for frame in reader.frames(0, 50)] == before
        assert reader.seek(Cursor(12, 0)) == 2


def test_a_frame_of_forty_megabytes_passes(writer: LogWriter, log_reader: LogReader) -> None:
    append(writer, 10, size=14 << 20)
    append(writer, 20)
    frames = list(log_reader.frames(0, 2))
    assert frames[0].marker.frame_bytes > 40 << 20
    assert frames[0].raw.equals(rows(10, 14 << 20))
    assert frames[1].raw.equals(rows(20))


def test_many_readers_read_and_wait_at_once(writer: LogWriter, open_reader: OpenReader) -> None:
    append(writer, *range(10, 60), size=200)
    readers = [open_reader() for _ in range(16)]
    with ThreadPoolExecutor(16) as threads:
        waits = [threads.submit(reader.wait, 50, 30.0) for reader in readers[:8]]
        reads = threads.map(lambda reader: len(list(reader.frames(0, 50))), readers[8:])
        assert list(reads) == [50] * 8
        append(writer, 60)
        assert [wait.result() for wait in waits] == [51] * 8

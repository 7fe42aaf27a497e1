"""The change log: what was appended is there, in order, as soon as it is appended."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.raw import RAW_SCHEMA
from cdc.errors import ProtocolError, TransientError
from cdc.log.open import open_log
from cdc.log.view import LogView
from cdc.log.writer import LogWriter, SegmentLimits
from tests.unit.log.batches import KEEP_ALL, SCHEMAS, lsns, manifest_of, rows, sealed_log
from tests.unit.log.batches import append as append


def test_appended_batches_are_read_back_with_their_schemas(tmp_path: Path) -> None:
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
    log = LogWriter(tmp_path, limits=SegmentLimits(bytes=5_000))
    for lsn in range(10, 60):
        append(log, lsn, size=200)
    log.close()
    view = LogView(tmp_path)
    assert len(manifest_of(tmp_path).segments) > 3
    assert [view.seek(Cursor(lsn, 0)) for lsn in range(10, 60)] == list(range(50))
    assert view.seek(Cursor(34, 2)) == 24
    assert view.seek(Cursor(34, 3)) == 25, "the high watermark is exclusive"
    assert view.seek(ORIGIN) == 0
    assert view.seek(Cursor(99, 0)) == 50


def test_an_empty_log_starts_at_batch_zero(tmp_path: Path) -> None:
    view = LogView(tmp_path / "none")
    assert (view.first_batch(), view.next_batch(), view.seek(Cursor(5, 5))) == (0, 0, 0)
    assert (view.history(), view.floors()) == (0, (ORIGIN, ORIGIN))


def test_a_view_opened_before_there_was_a_log_reads_the_first_there_is(tmp_path: Path) -> None:
    view = LogView(tmp_path, history=LogView(tmp_path).history())
    log = LogWriter(tmp_path)
    append(log, 10)
    assert view.history() == log.manifest.history > 0
    assert len(list(view.frames(0, view.next_batch()))) == 1
    log.close()


def test_a_reopened_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    end, following, history = log.end, log.next_batch, log.manifest.history
    log.close()
    log = LogWriter(tmp_path)
    assert (log.end, log.next_batch, log.manifest.history) == (end, following, history)
    append(log, 40)
    log.close()
    assert lsns(tmp_path) == list(range(10, 41))


def test_a_batch_below_the_end_is_refused(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    append(log, 20)
    with pytest.raises(ProtocolError, match="cannot follow"):
        append(log, 10)
    with pytest.raises(ProtocolError, match="cannot follow"):
        log.append(rows(30, 1), SCHEMAS, first=Cursor(30, 1), high=Cursor(30, 0))
    log.close()


def test_a_second_writer_is_kept_out(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    with pytest.raises(TransientError, match="another process writes"):
        LogWriter(tmp_path, lock_timeout_s=0.1)
    log.close()
    LogWriter(tmp_path).close()


@pytest.mark.parametrize(
    "limits", [SegmentLimits(rows=6), SegmentLimits(bytes=3_000), SegmentLimits(age_s=0.0)]
)
def test_a_segment_is_sealed_by_rows_bytes_or_age(tmp_path: Path, limits: SegmentLimits) -> None:
    log = LogWriter(tmp_path, limits=limits)
    for lsn in (10, 20, 30):
        append(log, lsn, size=600)
    assert log.manifest.segments
    assert log.active.first_batch == log.manifest.next_batch
    log.close()
    assert lsns(tmp_path) == [10, 20, 30]


def test_an_old_segment_is_sealed_without_a_new_batch(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, limits=SegmentLimits(age_s=0.0))
    append(log, 10)
    log.retain(ORIGIN, KEEP_ALL)
    assert [segment.batches for segment in log.manifest.segments] == [1]
    log.retain(ORIGIN, KEEP_ALL)
    assert len(log.manifest.segments) == 1, "an empty segment is not sealed"
    log.close()


def test_the_manifest_says_what_a_segment_holds(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, term=4)
    append(log, 10)
    log.append(
        pa.RecordBatch.from_pylist([], schema=RAW_SCHEMA),
        {},
        first=Cursor(15, 0),
        high=Cursor(15, 0),
    )
    append(log, 20, count=5)
    active = log.active
    log.close()
    LogWriter(tmp_path, term=5).close()
    (sealed,) = manifest_of(tmp_path).segments
    assert (sealed.first_batch, sealed.batches, sealed.rows) == (0, 3, 8)
    assert (sealed.first, sealed.high) == (Cursor(10, 0), Cursor(20, 5))
    assert (sealed.commit_from_us, sealed.commit_to_us) == (10_000, 20_004)
    assert (sealed.term, sealed.place) == (4, "")
    assert (active.rows, active.bytes, active.index_xxh3) == (8, sealed.bytes, sealed.index_xxh3)


def test_a_directory_is_opened_by_name(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    reader = open_log(str(tmp_path), history=log.manifest.history)
    assert reader.next_batch() == 30
    reader.close()
    log.close()

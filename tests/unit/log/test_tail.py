"""A reader that follows the log: its files are held open, and nothing escapes it all the same."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from cdc.errors import CorruptionError, GapError
from cdc.log.segment import ENTRY_BYTES, data_path, index_path
from cdc.log.tail import LogTail
from cdc.log.view import LogView
from cdc.log.writer import LogWriter
from tests.unit.log.batches import SMALL, append, crash, rows

CURSORS = range(10, 60)


def test_a_follower_reads_every_batch_once_across_segments(tmp_path: Path) -> None:
    log, view = LogWriter(tmp_path, limits=SMALL), LogView(tmp_path)

    def write() -> None:
        for lsn in CURSORS:
            append(log, lsn, size=200)

    thread = threading.Thread(target=write)
    thread.start()
    found: list[int] = []
    while len(found) < len(CURSORS):
        end = view.wait(len(found), 10.0)
        assert end > len(found), "a batch was appended, and nobody woke"
        found += [frame.raw["commit_lsn"][0].as_py() for frame in view.frames(len(found), end)]
    thread.join()
    assert found == list(CURSORS)
    assert len(log.manifest.segments) > 3
    view.close()
    log.close()


def test_a_batch_between_two_waits_ends_the_second_at_once(tmp_path: Path) -> None:
    log, view = LogWriter(tmp_path), LogView(tmp_path)
    append(log, 10)
    assert view.wait(0, 10.0) == 1
    append(log, 20)
    assert view.wait(1, 10.0) == 2
    assert view.wait(0, 10.0) == 2, "what was seen already is not waited for"
    append(log, 30)
    assert view.wait(2, 0.0) == 3, "a wait without patience still looks"
    view.close()
    log.close()


def test_frames_with_the_same_tables_are_read_alike_whatever_came_before(tmp_path: Path) -> None:
    log, view = LogWriter(tmp_path), LogView(tmp_path)
    for lsn in (10, 20, 30):
        append(log, lsn, count=4)
    frames = list(view.frames(0, view.next_batch()))
    assert all(
        frame.raw.equals(rows(lsn, 4)) for lsn, frame in zip((10, 20, 30), frames, strict=True)
    )
    view.close()
    log.close()


def test_damage_in_the_segment_that_is_held_is_reported(tmp_path: Path) -> None:
    log, view = LogWriter(tmp_path), LogView(tmp_path)
    append(log, 10)
    assert len(list(view.frames(0, view.next_batch()))) == 1
    append(log, 20)
    path = data_path(tmp_path, log.manifest.active_name)
    with path.open("r+b") as file:
        file.seek(-20, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(CorruptionError, match="does not match its checksum"):
        list(view.frames(1, view.next_batch()))
    view.close()
    log.close()


def test_a_log_that_was_cut_is_not_read_on_under_the_same_numbers(tmp_path: Path) -> None:
    log, view = LogWriter(tmp_path), LogView(tmp_path)
    append(log, 10)
    assert view.wait(0, 10.0) == 1
    assert len(list(view.frames(0, 1))) == 1
    log.restart_at(log.end)
    append(log, 20)
    with pytest.raises(GapError):
        view.wait(1, 10.0)
    view.close()
    log.close()


def test_a_follower_goes_on_behind_a_writer_that_was_killed_and_started_again(
    tmp_path: Path,
) -> None:
    log, view = LogWriter(tmp_path, term=1), LogView(tmp_path)
    append(log, 10)
    assert view.wait(0, 10.0) == 1
    assert len(list(view.frames(0, 1))) == 1
    crash(log)
    again = LogWriter(tmp_path, term=1)  # the reader alone: the term is that of the service
    append(again, 20)
    assert view.wait(1, 10.0) == 2
    (frame,) = view.frames(1, 2)
    assert frame.raw["commit_lsn"][0].as_py() == 20
    view.close()
    again.close()


def test_a_segment_without_an_entry_is_not_held(tmp_path: Path) -> None:
    tail, index = LogTail(tmp_path), index_path(tmp_path, "segment")
    assert tail.length("segment") is None, "it is not there"
    data_path(tmp_path, "segment").touch()
    index.touch()
    assert tail.length("segment") is None, "its writer may begin it anew"
    index.unlink()
    index.write_bytes(bytes(ENTRY_BYTES))
    assert tail.length("segment") == 1
    tail.close()


def test_a_tail_that_is_closed_holds_no_file(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    log, view = LogWriter(tmp_path / "log"), LogView(tmp_path / "log")
    append(log, 10)
    assert view.wait(0, 10.0) == 1
    assert len(list(view.frames(0, 1))) == 1
    view.close()
    log.close()
    assert len(os.listdir("/proc/self/fd")) == before

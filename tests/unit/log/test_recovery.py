"""Opening a log that was not closed well, or that was damaged while nobody looked."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError, GapError, OperatorError
from cdc.log.manifest import FILE_NAME, swap_manifest
from cdc.log.recovery import active_scan, recover, segment_check
from cdc.log.segment import list_segments, map_file
from cdc.log.view import LogView
from cdc.log.writer import LogWriter, Retention
from tests.unit.log.batches import (
    KEEP_NONE,
    active_data,
    active_index,
    append,
    crash,
    flip,
    healed,
    lsns,
    manifest_of,
    sealed_data,
    sealed_index,
    sealed_log,
)


def three_batches(directory: Path) -> LogWriter:
    log = LogWriter(directory, durability="memory")
    for lsn in (10, 20, 30):
        append(log, lsn)
    return log


def test_a_killed_writer_loses_nothing_it_appended(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    history = log.manifest.history
    crash(log)
    log = LogWriter(tmp_path)
    assert log.manifest.history == history, "readers go on where they are"
    log.close()
    assert lsns(tmp_path, history) == list(range(10, 40))


def test_batches_left_unsynced_by_an_earlier_process_are_on_disk_before_they_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(three_batches(tmp_path))
    whole = active_data(tmp_path).stat()
    synced: dict[int, int] = {}
    real = os.fsync

    def note(handle: int) -> None:
        real(handle)
        synced[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    monkeypatch.setattr(os, "fsync", note)
    log = LogWriter(tmp_path)
    assert log.durable_end == Cursor(30, 3)
    written = active_data(tmp_path).stat()
    # Written afresh: syncing the old file again would say nothing of a sync that failed before.
    assert written.st_ino != whole.st_ino
    assert synced[written.st_ino] == whole.st_size
    assert synced[active_index(tmp_path).stat().st_ino] == 3 * 64
    log.close()


def test_a_log_that_was_closed_well_is_not_written_again(tmp_path: Path) -> None:
    three_batches(tmp_path).close()
    before = active_data(tmp_path).stat().st_ino
    LogWriter(tmp_path).close()
    assert active_data(tmp_path).stat().st_ino == before


def test_frames_without_their_entries_are_found_again(tmp_path: Path) -> None:
    log = three_batches(tmp_path)
    history = log.manifest.history
    crash(log)
    os.truncate(active_index(tmp_path), 100)
    LogWriter(tmp_path).close()
    assert lsns(tmp_path, history) == [10, 20, 30]


def test_an_index_that_ran_ahead_of_its_data_is_cut_in_a_new_history(tmp_path: Path) -> None:
    log = three_batches(tmp_path)
    view = LogView(tmp_path)
    assert view.next_batch() == 3
    history = log.manifest.history
    crash(log)
    os.truncate(active_data(tmp_path), active_data(tmp_path).stat().st_size // 2)
    log = LogWriter(tmp_path)
    assert (log.end, log.next_batch) == (Cursor(10, 3), 1)
    assert log.manifest.history == history + 1
    with pytest.raises(GapError, match="was cut"):
        view.next_batch()
    with pytest.raises(GapError, match="was cut"):
        LogView(tmp_path, history=history).seek(ORIGIN)
    append(log, 40)
    log.close()
    assert lsns(tmp_path, history + 1) == [10, 40]


def test_after_a_crash_of_the_machine_readers_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = three_batches(tmp_path)
    history = log.manifest.history
    crash(log)
    monkeypatch.setattr(recover, "_boot", lambda: "the next one")
    log = LogWriter(tmp_path)
    assert log.manifest.history == history + 1
    log.close()
    monkeypatch.setattr(recover, "_boot", lambda: "the one after it")
    LogWriter(tmp_path).close()
    assert lsns(tmp_path, history + 1) == [10, 20, 30], "closed well, it survives a reboot"


def test_a_view_that_mapped_what_is_cut_keeps_reading_it(tmp_path: Path) -> None:
    log = three_batches(tmp_path)
    frames = LogView(tmp_path).frames(0, 3)
    assert next(frames).marker.batch_idx == 0
    crash(log)
    flip(active_data(tmp_path), 10)
    os.truncate(active_index(tmp_path), 64)
    crash(LogWriter(tmp_path))
    assert lsns(tmp_path) == []
    assert next(frames).marker.batch_idx == 1, "of the history it began with"


@pytest.mark.parametrize("index", [None, b"", b"\0" * 64, b"\0" * 30])
def test_a_sealed_segment_without_its_index_is_read_all_the_same(
    tmp_path: Path, index: bytes | None
) -> None:
    sealed_log(tmp_path).close()
    sealed_index(tmp_path).unlink()
    if index is not None:
        sealed_index(tmp_path).write_bytes(index)
    LogWriter(tmp_path).close()
    assert lsns(tmp_path) == list(range(10, 40))


def test_a_damaged_sealed_segment_is_reported_and_left_as_it_is(tmp_path: Path) -> None:
    sealed_log(tmp_path).close()
    flip(sealed_data(tmp_path), 200)
    data = sealed_data(tmp_path).read_bytes()
    sealed_index(tmp_path).unlink()
    with pytest.raises(CorruptionError, match="is damaged at byte 0"):
        LogWriter(tmp_path)
    assert sealed_data(tmp_path).read_bytes() == data


@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_sealed_segment_that_is_too_short_is_reported(tmp_path: Path, left: int) -> None:
    sealed_log(tmp_path).close()
    data = sealed_data(tmp_path).read_bytes()
    sealed_data(tmp_path).write_bytes(data[:left])
    with pytest.raises(CorruptionError, match="is damaged at byte"):
        LogWriter(tmp_path)
    sealed_data(tmp_path).write_bytes(data)
    LogWriter(tmp_path).close()
    assert lsns(tmp_path) == list(range(10, 40))


def test_a_sealed_segment_that_is_missing_is_reported(tmp_path: Path) -> None:
    sealed_log(tmp_path).close()
    sealed_data(tmp_path, 1).unlink()
    with pytest.raises(CorruptionError, match="is damaged at byte 0"):
        LogWriter(tmp_path)


def test_sealed_data_is_not_read_on_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed_log(tmp_path).close()
    mapped: list[Path] = []

    def noted(path: Path) -> pa.Buffer:
        mapped.append(path)
        return map_file(path)

    for module in (active_scan, segment_check):
        monkeypatch.setattr(module, "map_file", noted)
    LogWriter(tmp_path).close()
    assert set(mapped) == {active_data(tmp_path)}


def test_a_damaged_manifest_is_reported_and_rebuilt_once_removed(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    before = log.manifest
    log.close()
    flip(tmp_path / FILE_NAME, 100)
    with pytest.raises(CorruptionError, match="is rebuilt from the segments"):
        LogWriter(tmp_path)
    with pytest.raises(CorruptionError, match="is rebuilt from the segments"):
        LogView(tmp_path).next_batch()
    (tmp_path / FILE_NAME).unlink()
    log = LogWriter(tmp_path)
    assert lsns(tmp_path) == list(range(10, 40))
    assert log.manifest.history > before.history
    without_times = [replace(one, sealed_at=0.0) for one in log.manifest.segments]
    assert without_times == [replace(one, sealed_at=0.0) for one in before.segments]
    append(log, 40)
    log.close()
    assert lsns(tmp_path) == list(range(10, 41))


def test_a_manifest_rebuilt_begins_where_the_log_was_trimmed(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    log.retain(Cursor(25, 0), KEEP_NONE)
    first_batch, earliest = log.manifest.first_batch, log.manifest.earliest
    assert earliest < log.manifest.segments[0].first
    log.close()
    (tmp_path / FILE_NAME).unlink()
    log = LogWriter(tmp_path)
    assert (log.manifest.first_batch, log.manifest.earliest) == (first_batch, earliest)
    log.retain(log.end, KEEP_NONE)
    assert not log.manifest.segments
    earliest = log.manifest.earliest
    log.close()
    (tmp_path / FILE_NAME).unlink()
    log = LogWriter(tmp_path)
    assert log.manifest.earliest == earliest < log.active.first == Cursor(lsns(tmp_path)[0], 0)
    log.close()


def test_without_its_floors_a_manifest_rebuilt_begins_at_its_first_batch(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    log.retain(Cursor(25, 0), KEEP_NONE)
    first = log.manifest.segments[0].first
    log.close()
    for name in (FILE_NAME, "floors"):
        (tmp_path / name).unlink()
    log = LogWriter(tmp_path)
    assert log.manifest.earliest == first
    log.close()


def test_floors_survive_a_lost_manifest(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, term=3)
    log.restart_at(Cursor(100, 0))
    append(log, 200)
    log_id = log.manifest.log_id
    log.close()
    LogWriter(tmp_path, term=9).close()
    (tmp_path / FILE_NAME).unlink()
    with pytest.raises(OperatorError, match="term 9; this is term 3"):
        LogWriter(tmp_path, term=3)
    log = LogWriter(tmp_path, term=9)
    assert log.manifest.earliest == Cursor(100, 0)
    assert log.manifest.log_id == log_id
    evict = Retention(settled_s=1e9, settled_bytes=0, bytes_max=1, on_full="evict")
    assert log.retain(ORIGIN, evict).evicted
    floor = Cursor(200, 3)
    assert log.manifest.evicted == floor
    log.close()
    (tmp_path / FILE_NAME).unlink()
    log = LogWriter(tmp_path, term=9)
    assert (log.manifest.earliest, log.manifest.evicted, log.end) == (floor, floor, floor)
    log.close()


def test_a_segment_missing_between_others_is_not_passed_over(tmp_path: Path) -> None:
    sealed_log(tmp_path).close()
    sealed_data(tmp_path, 1).unlink()
    (tmp_path / FILE_NAME).unlink()
    with pytest.raises(CorruptionError, match="or one behind it is missing"):
        LogWriter(tmp_path)


def test_a_manifest_rebuilt_takes_nothing_from_before_a_cut(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    left_over = tmp_path.with_name("left_over")
    shutil.copytree(tmp_path, left_over)
    flip(sealed_data(tmp_path, 1), 100)
    assert healed(log, ORIGIN, ORIGIN) is not None
    first = log.next_batch
    # Smaller ones, so that segments begin elsewhere than those that are left over.
    for lsn in range(50, 50 + len(list_segments(left_over)) * 3):
        append(log, lsn, size=1)
    expected = lsns(tmp_path)
    assert expected == [*range(10, 10 + first), *range(50, expected[-1] + 1)]
    log.close()
    (tmp_path / FILE_NAME).unlink()
    for path in left_over.iterdir():
        if not (tmp_path / path.name).exists() and path.suffix in (".seg", ".idx"):
            shutil.copy(path, tmp_path)
    LogWriter(tmp_path).close()
    assert lsns(tmp_path) == expected


def test_a_log_that_was_removed_is_another_history(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    log = LogWriter(directory)
    append(log, 10)
    view = LogView(directory)
    assert view.next_batch() == 1
    log.close()
    shutil.rmtree(directory)
    log = LogWriter(directory)
    append(log, 20)
    with pytest.raises(GapError, match="was cut or restarted"):
        list(view.frames(0, 1))
    log.close()


def test_files_that_no_manifest_names_are_removed(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    before = log.manifest
    log.close()
    shutil.copytree(tmp_path, tmp_path / "kept")
    log = LogWriter(tmp_path)
    log.retain(Cursor(25, 0), KEEP_NONE)
    log.close()
    for path in (tmp_path / "kept").iterdir():
        if not (tmp_path / path.name).exists():
            shutil.copy(path, tmp_path)
    (tmp_path / f"{FILE_NAME}.tmp").touch()
    LogWriter(tmp_path).close()
    left = {path.name for path in tmp_path.iterdir()}
    assert before.segments[0].name + ".seg" not in left
    assert f"{FILE_NAME}.tmp" not in left
    assert lsns(tmp_path)[-15:] == list(range(25, 40))


def test_a_manifest_with_fewer_segments_never_brings_them_back(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    kept = log.manifest.segments[2:]
    log.close()
    earliest = manifest_of(tmp_path).segments[1].high
    swap_manifest(tmp_path, replace(manifest_of(tmp_path), segments=kept, earliest=earliest))
    LogWriter(tmp_path).close()
    assert LogView(tmp_path).first_batch() == kept[0].first_batch
    assert len(list_segments(tmp_path)) == len(kept) + 1

"""Views: few files opened, nothing believed unchecked, and what moved is found again."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from cdc.cursor import Cursor
from cdc.errors import CorruptionError, GapError
from cdc.log import view as view_module
from cdc.log.manifest import (
    FILE_NAME,
    Manifest,
    ManifestFile,
    SegmentInfo,
    encode_manifest,
    swap_manifest,
)
from cdc.log.segment import INDEX_DTYPE, index_path
from cdc.log.tier import segment_reader
from cdc.log.view import LogView
from cdc.log.writer import LogWriter
from tests.unit.log.batches import (
    KEEP_NONE,
    active_data,
    active_index,
    append,
    flip,
    healed,
    lsns,
    sealed_data,
    sealed_index,
    sealed_log,
)


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The name of every file that is opened from now on."""
    names: list[str] = []
    watching = True

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open":
            names.append(os.path.basename(str(arguments[0])))

    sys.addaudithook(note)  # for good: hooks cannot be removed
    yield names
    watching = False


def many_segments(directory: Path, count: int) -> None:
    """A log of ``count`` sealed segments with ten batches each; only indexes, no data."""
    segments = []
    for position in range(count):
        index = np.zeros(10, dtype=INDEX_DTYPE)
        index["batch_idx"] = np.arange(position * 10, position * 10 + 10)
        index["high_lsn"] = index["batch_idx"] + 1
        info = SegmentInfo(
            first_batch=position * 10,
            batches=10,
            rows=0,
            bytes=0,
            first=Cursor(position * 10, 0),
            high=Cursor(position * 10 + 10, 0),
            commit_from_us=0,
            commit_to_us=0,
            sealed_at=0.0,
            term=0,
            history=1,
            index_xxh3=xxhash.xxh3_64_intdigest(index.tobytes()),
        )
        index_path(directory, info.name).write_bytes(index.tobytes())
        segments.append(info)
    swap_manifest(directory, Manifest(history=1, segments=tuple(segments)))


def test_seeking_among_a_thousand_segments_opens_only_what_it_needs(
    tmp_path: Path, opened: list[str]
) -> None:
    many_segments(tmp_path, 1_000)
    view = LogView(tmp_path)
    opened.clear()
    assert view.seek(Cursor(5_005, 0)) == 5_005
    assert len([name for name in opened if name.endswith(".idx")]) == 1
    assert view.seek(Cursor(5_006, 0)) == 5_006
    assert len(view.entries(5_000, 5_010)) == 10
    assert len([name for name in opened if name.endswith(".idx")]) == 1, "it is kept"
    assert view.seek(Cursor(10_000, 0)) == 10_000
    assert len(view.entries(4_995, 5_015)) == 20
    assert len([name for name in opened if name.endswith(".idx")]) == 3


def test_all_indexes_are_never_kept_at_once(tmp_path: Path) -> None:
    many_segments(tmp_path, 200)
    view = LogView(tmp_path)
    assert view.entries(0, 2_000)["batch_idx"].tolist() == list(range(2_000))
    assert len(view._indexes._kept) <= 64


def test_the_active_index_is_read_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path)
    for lsn in range(1, 301):
        append(log, lsn, count=1)
    read: list[int] = []
    real = os.pread

    def noted(handle: int, size: int, offset: int) -> bytes:
        read.append(size)
        return real(handle, size, offset)

    monkeypatch.setattr(os, "pread", noted)
    view = LogView(tmp_path)
    assert view.next_batch() == 300
    assert view.seek(Cursor(200, 0)) == 199
    assert len(read) <= 10
    assert len(view.entries(100, 102)) == 2
    assert sum(read) <= 12 * 64
    log.close()


def test_a_flipped_bit_in_a_sealed_segment_is_reported_not_skipped(tmp_path: Path) -> None:
    sealed_log(tmp_path).close()
    flip(sealed_data(tmp_path), sealed_data(tmp_path).stat().st_size // 2, bit=4)
    with pytest.raises(CorruptionError, match="does not match its checksum"):
        lsns(tmp_path)


def test_a_frame_that_is_whole_but_not_the_one_of_its_entry_is_reported(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    append(log, 20)
    data = active_data(tmp_path).read_bytes()
    half = len(data) // 2
    active_data(tmp_path).write_bytes(data[half:] + data[:half])
    with pytest.raises(CorruptionError, match="or its index"):
        lsns(tmp_path)
    log.close()


@pytest.mark.parametrize("at", [0, 8, 16, 24, 32, 40, 48, 56])
def test_a_damaged_entry_of_the_active_index_is_reported(tmp_path: Path, at: int) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    flip(active_index(tmp_path), at)
    with pytest.raises(CorruptionError, match="index"):
        lsns(tmp_path)
    log.close()


def test_a_damaged_sealed_index_is_reported(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    flip(sealed_index(tmp_path), 56)
    with pytest.raises(CorruptionError, match=r"the index of segment \S+ does not match"):
        LogView(tmp_path).seek(Cursor(11, 0))
    log.close()


def test_bytes_behind_a_sealed_segment_in_its_file_are_not_read(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    for path in (sealed_data(tmp_path), sealed_index(tmp_path)):
        with path.open("ab") as file:
            file.write(path.read_bytes()[:512])
    assert lsns(tmp_path) == list(range(10, 40))
    log.close()
    LogWriter(tmp_path).close()
    assert lsns(tmp_path) == list(range(10, 40))


def test_a_view_follows_the_log_through_seals_and_trims(tmp_path: Path) -> None:
    log, view = sealed_log(tmp_path), LogView(tmp_path)
    for lsn in range(40, 60):
        append(log, lsn, size=200)
        assert view.next_batch() == lsn - 9
        assert view.seek(Cursor(lsn, 0)) == lsn - 10
        assert [frame.marker.batch_idx for frame in view.frames(lsn - 12, lsn - 9)] == [
            lsn - 12,
            lsn - 11,
            lsn - 10,
        ]
    log.retain(Cursor(50, 0), KEEP_NONE)
    with pytest.raises(GapError, match="not all in the log"):
        list(view.frames(0, 5))
    assert len(list(view.frames(view.first_batch(), 50))) == 50 - view.first_batch()
    log.close()


def test_batches_beyond_the_end_are_a_gap(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    with pytest.raises(GapError, match="batches 20 to 31 are not all in the log"):
        LogView(tmp_path).entries(20, 31)
    log.close()


def test_a_segment_trimmed_between_listing_and_opening_is_looked_up_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = sealed_log(tmp_path)
    view = LogView(tmp_path)
    real = segment_reader.open_data

    def trimmed_first(directory: Path, name: str, place: str) -> segment_reader.SegmentData:
        log.retain(log.end, KEEP_NONE)
        return real(directory, name, place)

    monkeypatch.setattr(view_module, "open_data", trimmed_first)
    with pytest.raises(GapError, match="batches 0 to 2 are not all in the log"):
        list(view.frames(0, 2))
    log.close()


@pytest.mark.parametrize("path", [sealed_data, sealed_index, lambda at, _: active_data(at)])
def test_a_file_that_the_manifest_names_and_that_was_not_removed_is_damage(
    tmp_path: Path, path: Callable[[Path, int], Path]
) -> None:
    log = sealed_log(tmp_path)
    path(tmp_path, 1).unlink()
    with pytest.raises(CorruptionError, match="a file is missing"):
        lsns(tmp_path)
    log.close()


@pytest.mark.parametrize("at", [30, 2**40, 2**62, -(2**62)])
def test_batches_far_beyond_the_log_are_a_gap(tmp_path: Path, at: int) -> None:
    log = sealed_log(tmp_path)
    for call in (LogView(tmp_path).entries, lambda *r: list(LogView(tmp_path).frames(*r))):
        with pytest.raises(GapError, match="not all in the log"):
            call(at, at + 2**61)
    log.close()


def test_a_swap_costs_a_reader_little_however_many_segments_there_are(tmp_path: Path) -> None:
    one = Manifest(history=1).begun
    segments = tuple(replace(one, first_batch=at, batches=1) for at in range(10_000))
    manifest = Manifest(history=1, segments=segments)
    swap_manifest(tmp_path, manifest)
    file, took = ManifestFile(tmp_path), []
    known = file.read()
    for at in range(10_000, 10_005):
        more = (*manifest.segments[1:], replace(one, first_batch=at, batches=1))
        manifest = replace(manifest, segments=more)
        swap_manifest(tmp_path, manifest)
        begun = time.perf_counter()
        found = file.read_anew()
        took.append(time.perf_counter() - begun)
        assert found == manifest
    assert found.segments[0] is known.segments[5], "what is unchanged is not made again"
    # About 7 ms here, 80 when all are made again; a loaded machine is given time.
    assert min(took) < 0.04


def test_damage_that_is_a_cut_is_reported_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = sealed_log(tmp_path)
    view = LogView(tmp_path)
    view.next_batch()
    real = segment_reader.open_data

    def cut_first(directory: Path, name: str, place: str) -> segment_reader.SegmentData:
        healed(log, Cursor(0, 0), Cursor(0, 0))
        return real(directory, name, place)

    flip(sealed_data(tmp_path, 1), 100)
    monkeypatch.setattr(view_module, "open_data", cut_first)
    first = log.manifest.segments[1].first_batch
    with pytest.raises(GapError, match="was cut"):
        list(view.frames(first, first + 1))
    log.close()


def test_a_view_notices_a_manifest_swapped_within_a_clock_tick(tmp_path: Path) -> None:
    swap_manifest(tmp_path, Manifest(history=1, start_batch=10))
    view, path = LogView(tmp_path), tmp_path / FILE_NAME
    assert view.first_batch() == 10
    # Another manifest that looks the same from outside: inode, size and time.
    written = path.stat().st_mtime_ns
    path.write_bytes(encode_manifest(Manifest(history=1, start_batch=11)))
    os.utime(path, ns=(written, written))
    assert view.first_batch() == 11


def test_an_old_manifest_is_not_read_again(tmp_path: Path, opened: list[str]) -> None:
    swap_manifest(tmp_path, Manifest(history=1, start_batch=10))
    os.utime(tmp_path / FILE_NAME, (1, 1))
    view = LogView(tmp_path)
    opened.clear()
    assert [view.first_batch() for _ in range(10)] == [10] * 10
    assert opened == [FILE_NAME]


def test_views_leave_no_descriptor_open(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        view = LogView(tmp_path)
        view.wait(0, 0.0)
        list(view.frames(0, 30))
        view.close()
    assert len(os.listdir("/proc/self/fd")) == before
    log.close()

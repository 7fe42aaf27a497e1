"""Fencing: a writer of an older term can do no harm, whatever it still believes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import OperatorError
from cdc.log import writer
from cdc.log.frame import encode_frame
from cdc.log.manifest import swap_manifest
from cdc.log.writer import LogWriter, SegmentLimits
from tests.unit.log.batches import (
    KEEP_ALL,
    KEEP_NONE,
    active_data,
    append,
    crash,
    lsns,
    manifest_of,
    rows,
    sealed_data,
)


@pytest.fixture
def no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a filesystem that forgets its locks."""

    def pretend(directory: Path, _timeout_s: float) -> int:
        return os.open(directory / "writer.lock", os.O_RDWR | os.O_CREAT)

    monkeypatch.setattr(writer, "take_lock", pretend)


def test_an_older_term_is_refused(tmp_path: Path) -> None:
    LogWriter(tmp_path, term=3).close()
    with pytest.raises(OperatorError, match="term 3; this is term 2") as raised:
        LogWriter(tmp_path, term=2)
    assert raised.value.kind == "fenced"
    LogWriter(tmp_path, term=3, lock_timeout_s=0.1).close()


def test_a_newer_term_seals_what_it_finds_and_begins_its_own_segment(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, term=1)
    append(log, 10)
    crash(log)
    log = LogWriter(tmp_path, term=2)
    assert [segment.term for segment in log.manifest.segments] == [1]
    append(log, 20)
    log.close()
    assert active_data(tmp_path).stat().st_size > 0
    assert lsns(tmp_path) == [10, 20]


@pytest.mark.usefixtures("no_lock")
def test_a_stale_writer_can_neither_append_nor_swap_the_manifest(tmp_path: Path) -> None:
    stale = LogWriter(tmp_path, term=1, limits=SegmentLimits(bytes=1))
    append(stale, 10)
    current = LogWriter(tmp_path, term=2)
    append(current, 20)
    before = manifest_of(tmp_path)
    for attempt in (
        lambda: append(stale, 15),
        lambda: stale.retain(Cursor(99, 0), KEEP_NONE),
        lambda: stale.restart_at(Cursor(99, 0)),
        lambda: stale._seal(),
    ):
        with pytest.raises(OperatorError, match="term 2; this is term 1"):
            attempt()
    stale.close()
    assert manifest_of(tmp_path) == before
    assert lsns(tmp_path) == [10, 20]
    current.close()


@pytest.mark.usefixtures("no_lock")
def test_batches_of_a_stale_writer_are_never_read(tmp_path: Path) -> None:
    stale = LogWriter(tmp_path, term=1)
    append(stale, 10)
    data, active = active_data(tmp_path), stale._active
    assert active is not None
    current = LogWriter(tmp_path, term=2)
    # In the moment between its check and its write: both of its files, as it knows them.
    raw = rows(15, 3)
    frame = encode_frame(1, raw, {}, first=Cursor(15, 0), high=Cursor(15, 3))
    active.write(*frame, raw["commit_ts"])
    with data.open("ab") as file:
        file.write(frame[1])
    assert lsns(tmp_path) == [10]
    append(current, 20)
    assert lsns(tmp_path) == [10, 20]
    crash(current)
    crash(stale)
    LogWriter(tmp_path, term=3).close()
    assert lsns(tmp_path) == [10, 20]
    assert sealed_data(tmp_path).stat().st_size >= manifest_of(tmp_path).segments[0].bytes


@pytest.mark.usefixtures("no_lock")
def test_a_manifest_that_a_stale_writer_swapped_in_is_put_back(tmp_path: Path) -> None:
    stale = LogWriter(tmp_path, term=1)
    append(stale, 10)
    current = LogWriter(tmp_path, term=2)
    append(current, 20)
    # A check that passed before the new term came, and a swap after it.
    swap_manifest(tmp_path, stale.manifest)
    append(current, 30)
    assert manifest_of(tmp_path) == current.manifest
    assert lsns(tmp_path) == [10, 20, 30]
    current.close()
    crash(stale)


def test_a_manifest_that_was_removed_is_put_back(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    (tmp_path / "manifest.json").unlink()
    log.retain(ORIGIN, KEEP_ALL)
    assert lsns(tmp_path) == [10]
    log.close()

"""Damage in the active segment: what was on disk is never cut by opening alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError
from cdc.log.sync import read_durable
from cdc.log.view import LogView
from cdc.log.writer import LogWriter
from tests.unit.log.batches import (
    active_data,
    active_index,
    append,
    crash,
    flip,
    healed,
    lsns,
)


def three_batches(directory: Path) -> LogWriter:
    log = LogWriter(directory, durability="memory")
    for lsn in (10, 20, 30):
        append(log, lsn)
    return log


def test_synced_batches_that_are_gone_with_their_entries_end_the_history(tmp_path: Path) -> None:
    log = three_batches(tmp_path)
    history = log.manifest.history
    log.close()
    assert read_durable(tmp_path) == Cursor(30, 3)
    os.truncate(active_data(tmp_path), active_data(tmp_path).stat().st_size // 3)
    os.truncate(active_index(tmp_path), 64)
    with pytest.raises(CorruptionError, match="was on disk up to 0/1E:3, and reads back only up"):
        LogWriter(tmp_path)
    log = LogWriter(tmp_path, to_heal=True)
    assert healed(log, ORIGIN, Cursor(10, 0)) == Cursor(10, 3)
    assert (log.manifest.history, log.end) == (history + 1, Cursor(10, 3))
    log.close()
    assert read_durable(tmp_path) == Cursor(10, 3)


def test_whole_batches_behind_a_damage_are_kept_when_it_is_cut(tmp_path: Path) -> None:
    log = three_batches(tmp_path)
    history = log.manifest.history
    crash(log)
    os.truncate(active_index(tmp_path), 64)
    data = active_data(tmp_path)
    flip(data, data.stat().st_size // 2)
    left = data.read_bytes()
    log = LogWriter(tmp_path)
    assert (log.end, log.manifest.history) == (Cursor(10, 3), history + 1)
    assert ".seg.damaged" in (log.kept or "")
    (kept,) = tmp_path.glob("*.damaged")
    assert kept.read_bytes() == left
    append(log, 20)
    log.close()
    log = LogWriter(tmp_path)
    assert log.kept is None
    log.close()
    assert kept.exists(), "it stays for a person to look at"
    assert lsns(tmp_path) == [10, 20]


def synced_and_damaged(directory: Path, at: int) -> bytes:
    """Ten batches on disk, as Postgres was told; then a bit of one of them flips."""
    log = LogWriter(directory, durability="fsync")
    for lsn in range(10, 20):
        append(log, lsn)
    log._syncer.flush()
    crash(log)
    flip(active_data(directory), at)
    return active_data(directory).read_bytes()


def test_synced_batches_behind_a_damage_are_never_cut_by_opening(tmp_path: Path) -> None:
    left = synced_and_damaged(tmp_path, 1500)
    path = active_data(tmp_path)
    with pytest.raises(CorruptionError, match="was on disk up to"):
        LogWriter(tmp_path, durability="fsync")
    assert path.read_bytes() == left
    for term in (0, 1):
        log = LogWriter(tmp_path, durability="fsync", term=term, to_heal=True)
        assert (log.end, log.next_batch) == (Cursor(19, 3), 10), "nothing is cut yet"
        assert healed(log, Cursor(10, 0), Cursor(19, 0)) is None
        assert len(log.damaged) == 1
        assert path.read_bytes() == left
        log.close()
    log = LogWriter(tmp_path, durability="fsync", term=1, to_heal=True)
    history = log.manifest.history
    assert healed(log, Cursor(10, 0), Cursor(10, 0)) == log.end < Cursor(19, 0)
    assert log.manifest.history == history + 1
    again = list(range(log.end.lsn + 1, 20))
    for lsn in again:
        append(log, lsn)
    log.close()
    assert lsns(tmp_path) == list(range(10, 20))


def test_synced_batches_behind_a_settled_damage_are_all_kept(tmp_path: Path) -> None:
    synced_and_damaged(tmp_path, 1500)
    log = LogWriter(tmp_path, durability="fsync", to_heal=True)
    assert healed(log, Cursor(15, 0), Cursor(19, 3)) is None
    append(log, 20)
    log.close()
    view = LogView(tmp_path)
    assert [frame.marker.first.lsn for frame in view.frames(5, 11)] == list(range(15, 21))
    with pytest.raises(CorruptionError):
        list(view.frames(0, 11))


@pytest.mark.parametrize("left", [0, 1, 5])
def test_synced_batches_of_which_nothing_is_left_are_reported_as_lost(
    tmp_path: Path, left: int
) -> None:
    synced_and_damaged(tmp_path, 0)
    data, index = active_data(tmp_path), active_index(tmp_path)
    flip(data, 0)
    os.truncate(data, data.stat().st_size // 10 * left)
    index.unlink()
    end = Cursor(9 + left, 3) if left else ORIGIN
    for _ in range(2):
        log = LogWriter(tmp_path, to_heal=True)
        assert log.end == end
        with pytest.raises(CorruptionError, match="was on disk up to"):
            append(log, 30)
        with pytest.raises(CorruptionError, match="the source has them only from"):
            healed(log, ORIGIN, Cursor(19, 0))
        assert read_durable(tmp_path) == Cursor(19, 3), "it is not forgotten"
        log.close()
    log = LogWriter(tmp_path, to_heal=True)
    assert healed(log, ORIGIN, ORIGIN) == end
    append(log, 30)
    log.close()
    assert lsns(tmp_path) == [*range(10, 10 + left), 30]

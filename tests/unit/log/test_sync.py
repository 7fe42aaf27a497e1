"""Durability: published at once, confirmed only after a sync has ended."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError, TransientError
from cdc.log import sync
from cdc.log.sync import read_durable
from cdc.log.writer import LogWriter, SegmentLimits
from tests.unit.log.batches import append, flip, lsns


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


class SlowDisk:
    """Holds every sync until it is released, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = threading.Semaphore(0)
        self.release = threading.Event()
        self.calls = 0
        self._real = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def _sync(self, handle: int) -> None:
        self.calls += 1
        self.started.release()
        assert self.release.wait(10.0)
        self._real(handle)


def test_many_appends_share_few_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogWriter(tmp_path, durability="fsync")
    disk = SlowDisk(monkeypatch)
    append(log, 10)
    assert disk.started.acquire(timeout=10.0)
    for lsn in range(11, 111):
        append(log, lsn)
    assert lsns(tmp_path) == list(range(10, 111)), "readers need not wait for the disk"
    assert log.durable_end == ORIGIN, "nothing is confirmed while the first sync runs"
    disk.release.set()
    until(lambda: log.durable_end == log.end)
    assert disk.calls <= 3 * 2, "a sync is one call for the data and one for the index"
    log.close()


def test_the_durable_end_never_passes_what_the_sync_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path, durability="memory")
    append(log, 10)
    disk = SlowDisk(monkeypatch)
    syncing = threading.Thread(target=log._syncer.flush)
    syncing.start()
    assert disk.started.acquire(timeout=10.0)
    append(log, 20)
    disk.release.set()
    syncing.join()
    assert log.durable_end == Cursor(10, 3)
    assert read_durable(tmp_path) == Cursor(10, 3)
    log.close()
    assert read_durable(tmp_path) == Cursor(20, 3)


def test_disk_syncs_by_itself_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "_DISK_INTERVAL_S", 0.05)
    log = LogWriter(tmp_path, durability="disk")
    append(log, 10)
    until(lambda: read_durable(tmp_path) == Cursor(10, 3))
    assert log.durable_end == Cursor(10, 3)
    log.close()


def test_memory_syncs_only_what_it_seals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    log = LogWriter(tmp_path, durability="memory", limits=SegmentLimits(rows=6))
    append(log, 10)
    append(log, 20)
    assert (synced, log.durable_end) == ([], ORIGIN)
    append(log, 30)
    assert len(synced) == 2
    assert log.durable_end == Cursor(20, 3)
    log.close()


@pytest.mark.parametrize("durability", ["fsync", "memory"])
def test_a_failed_sync_stops_the_log_until_it_is_reopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: sync.Durability
) -> None:
    log = LogWriter(tmp_path, durability=durability)
    append(log, 10)
    log._syncer.flush()

    def refuse(_handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse)
        append(log, 20)
        if durability == "memory":
            with pytest.raises(TransientError, match="Input/output"):
                log._syncer.flush()
        until(lambda: log.needs_reopen)
    with pytest.raises(TransientError, match="reopened") as raised:
        append(log, 30)
    assert raised.value.kind == "log_sync_failed"
    assert log.durable_end == Cursor(10, 3), "the disk works again, but what it dropped is gone"
    log.close()
    assert read_durable(tmp_path) == Cursor(10, 3)
    log = LogWriter(tmp_path)
    assert log.durable_end == log.end == Cursor(20, 3)
    append(log, 30)
    log.close()
    assert lsns(tmp_path) == [10, 20, 30]


def test_a_last_sync_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path, durability="memory")
    append(log, 10)

    def refuse(_handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse)
        with pytest.raises(TransientError, match="Input/output"):
            log.close()
    LogWriter(tmp_path, lock_timeout_s=0.1).close()


def test_a_log_that_was_never_synced_is_durable_to_the_origin(tmp_path: Path) -> None:
    assert read_durable(tmp_path) == ORIGIN
    (tmp_path / "durable").touch()
    assert read_durable(tmp_path) == ORIGIN


@pytest.mark.parametrize("at", [0, 9, 23])
def test_a_damaged_durable_file_is_reported_and_written_again(tmp_path: Path, at: int) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    log.close()
    assert (tmp_path / "durable").stat().st_size == 24
    flip(tmp_path / "durable", at)
    with pytest.raises(CorruptionError, match="does not match its checksum"):
        read_durable(tmp_path)
    LogWriter(tmp_path).close()
    assert read_durable(tmp_path) == Cursor(10, 3)

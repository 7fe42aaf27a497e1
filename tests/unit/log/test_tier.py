"""The tier: nothing is lost wherever a move is interrupted, and reading does not notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError, GapError
from cdc.log import tier_mover, writer
from cdc.log.manifest import FILE_NAME
from cdc.log.segment import list_segments
from cdc.log.tier.tier import Folder, TierSettings
from cdc.log.view import LogView
from cdc.log.writer import LogWriter
from tests.unit.log.batches import (
    KEEP_ALL,
    KEEP_NONE,
    SMALL,
    append,
    crash,
    flip,
    healed,
    lsns,
    manifest_of,
    sealed_log,
)
from tests.unit.log.tiers import ALL, move_all, moved, until


def test_segments_beyond_the_limit_move_and_are_read_as_before(
    directory: Path, cold: Path, tier: TierSettings
) -> None:
    log = sealed_log(directory, tier=tier)
    view = LogView(directory)
    size = log.size_bytes
    before = [frame.raw for frame in view.frames(0, 30)]
    move_all(log)
    assert log.tier_problem is None
    assert log.size_bytes == size
    names = [segment.name for segment in log.manifest.segments if segment.place]
    assert len(names) > 2
    assert sorted(path.name for path in cold.iterdir()) == sorted(
        name + suffix for name in names for suffix in (".seg", ".idx")
    )
    assert not set(names) & set(list_segments(directory))
    after = [frame.raw for frame in view.frames(0, 30)]
    assert all(one.equals(other) for one, other in zip(before, after, strict=True))
    assert [LogView(directory).seek(Cursor(lsn, 0)) for lsn in ALL] == list(range(30))
    append(log, 40)
    log.close()
    assert lsns(directory) == [*ALL, 40]


def test_a_reader_in_the_middle_of_a_segment_does_not_notice_its_move(
    directory: Path, tier: TierSettings
) -> None:
    log = sealed_log(directory, tier=tier)
    frames = LogView(directory).frames(0, 30)
    assert next(frames).marker.batch_idx == 0
    move_all(log)
    assert [frame.marker.batch_idx for frame in frames] == list(range(1, 30))
    log.close()


def test_trimmed_segments_go_from_the_tier(directory: Path, cold: Path, tier: TierSettings) -> None:
    log = sealed_log(directory, tier=tier)
    move_all(log)
    log.retain(log.end, KEEP_NONE)
    until(lambda: not list(cold.iterdir()))
    with pytest.raises(GapError, match="not all in the log"):
        list(LogView(directory).frames(0, 2))
    log.close()


def test_cold_segments_go_even_without_a_tier_in_the_configuration(
    directory: Path, cold: Path, tier: TierSettings
) -> None:
    log = sealed_log(directory, tier=tier)
    move_all(log)
    log.close()
    log = LogWriter(directory)
    assert lsns(directory) == ALL
    log.retain(log.end, KEEP_NONE)
    until(lambda: not list(cold.iterdir()))
    log.close()


def test_a_move_interrupted_before_the_switch_leaves_the_segment_here(
    directory: Path, cold: Path, tier: TierSettings
) -> None:
    log = sealed_log(directory, tier=tier)
    log.retain(ORIGIN, KEEP_ALL)
    until(lambda: log._mover._copied is not None)
    crash(log)
    assert len(list(cold.iterdir())) == 2
    (cold / f"{manifest_of(directory).segments[1].name}.seg.tmp").touch()
    (cold / "of-somebody-else.txt").touch()
    assert not any(segment.place for segment in manifest_of(directory).segments)
    assert lsns(directory) == ALL
    log = LogWriter(directory, tier=tier)
    until(lambda: [path.name for path in cold.iterdir()] == ["of-somebody-else.txt"])
    move_all(log)
    log.close()
    assert lsns(directory) == ALL


def test_a_move_interrupted_after_the_switch_leaves_the_segment_there(
    directory: Path, cold: Path, tier: TierSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = sealed_log(directory, tier=tier)
    log.retain(ORIGIN, KEEP_ALL)
    until(lambda: log._mover._copied is not None)

    def killed(_self: LogWriter, _segments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer.LogWriter, "_unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            log.retain(ORIGIN, KEEP_ALL)
    crash(log)
    (first, *_) = manifest_of(directory).segments
    assert first.place
    assert first.name in list_segments(directory)
    assert lsns(directory) == ALL
    LogWriter(directory, tier=tier).close()
    assert first.name not in list_segments(directory)
    assert lsns(directory) == ALL


def test_a_segment_trimmed_during_its_copy_does_not_stay_in_the_tier(
    directory: Path, cold: Path, tier: TierSettings
) -> None:
    log = sealed_log(directory, tier=tier)
    log.retain(ORIGIN, KEEP_ALL)
    until(lambda: log._mover._copied is not None)
    asked = log._mover._copying
    assert asked is not None
    log._drop(writer.RetentionResult(removed=1, evicted=0, full=False))
    assert asked not in log.manifest.segments
    log.retain(ORIGIN, KEEP_ALL)
    until(lambda: not (cold / f"{asked.name}.seg").exists())
    log.close()
    assert lsns(directory) == ALL[-len(lsns(directory)) :]


def test_a_tier_that_cannot_be_written_is_a_problem_and_tried_again(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_mover, "_BACKOFF_FIRST_S", 0.02)
    blocked = tmp_path / "cold"
    blocked.write_text("a file where the folder should be")
    log = sealed_log(directory, tier=TierSettings(str(blocked), hot_bytes=3_000))
    log.retain(ORIGIN, KEEP_ALL)
    until(lambda: log.tier_problem is not None)
    assert lsns(directory) == ALL
    blocked.unlink()
    move_all(log)
    assert log.tier_problem is None
    log.close()
    assert lsns(directory) == ALL


def test_a_copy_that_does_not_match_is_not_switched_to(
    directory: Path, tier: TierSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_mover, "_BACKOFF_FIRST_S", 0.02)
    real = os.replace

    def damaging(source: str, target: str) -> None:
        flip(Path(source), 100)
        real(source, target)

    log = sealed_log(directory, tier=tier)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", damaging)
        log._mover.copy(log.manifest.segments[0])
        until(lambda: "does not match" in (log.tier_problem or ""))
        assert log._mover.collect() is None
    move_all(log)
    log.close()
    assert lsns(directory) == ALL


def test_every_directory_that_was_made_is_synced_in_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    real = os.fsync

    def note(handle: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", note)
    log = sealed_log(
        tmp_path / "a" / "b" / "shop", tier=TierSettings(str(tmp_path / "c"), hot_bytes=3_000)
    )
    move_all(log)
    log.close()
    assert {str(tmp_path / one) for one in (".", "a", "a/b", "c")} <= synced


def test_segments_of_the_tier_keep_their_age_when_the_manifest_is_rebuilt(
    directory: Path, tier: TierSettings
) -> None:
    log = sealed_log(directory, tier=tier)
    move_all(log)
    log.close()
    (directory / FILE_NAME).unlink()
    log = LogWriter(directory, tier=tier)
    assert all(abs(one.sealed_at - time.time()) < 60 for one in log.manifest.segments)
    assert log.retain(log.end, replace(KEEP_ALL, settled_s=300)).removed == 0
    log.close()


def test_damage_in_the_tier_is_reported_and_healed(
    directory: Path, cold: Path, tier: TierSettings
) -> None:
    log = sealed_log(directory, tier=tier)
    move_all(log)
    second = log.manifest.segments[1]
    flip(cold / f"{second.name}.seg", 100)
    with pytest.raises(CorruptionError, match="does not match its checksum"):
        lsns(directory)
    assert healed(log, ORIGIN, ORIGIN) == log.manifest.segments[0].high
    append(log, 50)
    until(lambda: not (cold / f"{second.name}.seg").exists())
    log.close()
    assert lsns(directory) == [*range(10, second.first.lsn), 50]


def test_a_lost_manifest_is_rebuilt_from_both_places(directory: Path, tier: TierSettings) -> None:
    log = sealed_log(directory, tier=tier)
    move_all(log)
    places = [segment.place for segment in log.manifest.segments]
    log.close()
    (directory / FILE_NAME).unlink()
    log = LogWriter(directory, tier=tier)
    assert [segment.place for segment in log.manifest.segments] == places
    log.close()
    assert lsns(directory) == ALL


def test_logs_of_one_tier_have_folders_of_their_own() -> None:
    log = Path("/var/lib/walbrook/shop")
    assert (
        TierSettings("s3://bucket/logs?region=eu").place_of(log)
        == "s3://bucket/logs/shop?region=eu"
    )
    assert TierSettings("/mnt/cold/").place_of(log) == "/mnt/cold/shop"


_KILLED = """
import sys
from pathlib import Path
from cdc.cursor import ORIGIN
from cdc.log.tier.tier import TierSettings
from cdc.log.writer import LogWriter
from tests.unit.log.batches import KEEP_ALL, SMALL, append
log = LogWriter(Path(sys.argv[1]), limits=SMALL, tier=TierSettings(sys.argv[2], hot_bytes=0))
lsn = log.end.lsn
while True:
    lsn += 1
    append(log, lsn, size=200)
    print(lsn, flush=True)
    log.retain(ORIGIN, KEEP_ALL)
"""


def test_a_process_killed_at_any_moment_of_moving_loses_nothing(
    directory: Path, cold: Path
) -> None:
    appended = 0
    for lines in (3, 40, 17, 80):
        process = subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(directory), str(cold.parent)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for _ in range(lines):
            appended = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        appended = max([appended, *map(int, process.stdout.read().split())])
        process.wait()
        process.stdout.close()
        found = lsns(directory)
        assert found[:appended] == list(range(1, appended + 1))
        appended = found[-1]
    log = LogWriter(directory, limits=SMALL, tier=TierSettings(str(cold.parent), hot_bytes=0))
    until(lambda: moved(log) == len(log.manifest.segments))
    known = {segment.name + end for segment in log.manifest.segments for end in (".seg", ".idx")}
    until(lambda: {path.name for path in cold.iterdir()} == known)
    log.close()
    assert lsns(directory) == list(range(1, appended + 1))
    assert len(list_segments(directory)) == 1


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert Folder(str(tmp_path / "none")).names() == []

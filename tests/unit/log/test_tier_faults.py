"""What can go wrong with a tier: damage, other owners, other names, nothing mounted there."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.cursor import ORIGIN
from cdc.errors import CorruptionError, OperatorError, TransientError
from cdc.log.damage_note import take_damage_report
from cdc.log.manifest import Manifest
from cdc.log.recovery import owned_manifest
from cdc.log.tier.tier import Folder, TierSettings
from cdc.log.writer import LogWriter
from tests.unit.log.batches import (
    KEEP_ALL,
    flip,
    healed,
    lsns,
    sealed_data,
    sealed_index,
    sealed_log,
)
from tests.unit.log.tiers import ALL, move_all, moved, until


def test_a_damaged_segment_is_reported_and_not_moved_and_keeps_no_other_waiting(
    directory: Path, cold: Path, tier: TierSettings
) -> None:
    log = sealed_log(directory, tier=tier)
    damaged = log.manifest.segments[0]
    flip(sealed_data(directory), 100)
    until(lambda: moved(log) > 2)
    assert not log.manifest.segments[0].place
    assert f"{damaged.name} is damaged and was not moved" in (log.tier_problem or "")
    assert not (cold / f"{damaged.name}.seg").exists()
    assert take_damage_report(directory)
    until(lambda: moved(log) > 0 and log._mover.idle)
    assert not take_damage_report(directory), "it is told once"
    healed(log, ORIGIN, ORIGIN)
    log.retain(ORIGIN, KEEP_ALL)
    assert log.tier_problem is None
    log.close()


def test_a_failing_removal_keeps_no_copy_waiting(
    directory: Path, tier: TierSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = sealed_log(directory, tier=tier)
    gone = replace(
        log.manifest.segments[0], first_batch=999, place=str(directory / "manifest.json")
    )

    def refuse(_self: Folder, _name: str) -> None:
        raise PermissionError("not allowed")

    monkeypatch.setattr(Folder, "delete", refuse)
    log._mover.remove([gone])
    move_all(log)
    assert "not allowed" in (log.tier_problem or "")
    log.close()


def test_a_segment_without_its_index_is_moved_with_one(
    directory: Path, cold: Path, tier: TierSettings
) -> None:
    log = sealed_log(directory, tier=tier)
    sealed_index(directory).unlink()
    first = log.manifest.segments[0]
    move_all(log)
    assert (cold / f"{first.name}.idx").stat().st_size == first.batches * 64
    log.close()
    assert lsns(directory) == ALL


def test_a_segment_whose_data_is_gone_is_never_switched_to_a_copy(
    directory: Path, tier: TierSettings
) -> None:
    log = sealed_log(directory, tier=tier)
    sealed_data(directory).unlink()
    until(lambda: moved(log) > 2)
    assert not log.manifest.segments[0].place
    assert take_damage_report(directory)
    log.close()


def test_a_copy_is_made_once_however_often_the_switch_fails(
    directory: Path, tier: TierSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = sealed_log(directory, tier=tier)
    put: list[str] = []
    real = Folder.put

    def noted(self: Folder, name: str, chunks: Iterator[pa.Buffer]) -> None:
        put.append(name)
        real(self, name, chunks)

    def refuse(_directory: Path, _manifest: Manifest) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Folder, "put", noted)
    log.retain(ORIGIN, KEEP_ALL)
    until(lambda: log._mover._copied is not None)
    with monkeypatch.context() as patch:
        patch.setattr(owned_manifest, "swap_manifest", refuse)
        for _ in range(3):
            with pytest.raises(TransientError, match="No space left"):
                log.retain(ORIGIN, KEEP_ALL)
    assert moved(log) == 1
    assert put.count(log.manifest.segments[0].name + ".seg") == 1
    log.close()


@pytest.mark.parametrize("url", [False, True])
def test_cold_segments_survive_another_spelling_of_their_place(
    directory: Path, cold: Path, url: bool
) -> None:
    spellings = [str(cold.parent), f"file://{cold.parent}"]
    first, other = reversed(spellings) if url else spellings
    log = sealed_log(directory, tier=TierSettings(first, hot_bytes=3_000))
    move_all(log)
    before = sorted(path.name for path in cold.iterdir())
    log.close()
    log = LogWriter(directory, tier=TierSettings(other, hot_bytes=1 << 30))
    until(lambda: not log._mover._jobs)
    assert sorted(path.name for path in cold.iterdir()) == before
    log.close()
    assert lsns(directory) == ALL


@pytest.mark.parametrize("spelling", ["{}", "file://{}", "{}/../{name}", "{}/shop"])
def test_a_tier_in_the_logs_own_directory_is_refused(directory: Path, spelling: str) -> None:
    sealed_log(directory).close()
    url = spelling.format(directory.parent, name=directory.parent.name)
    with pytest.raises(OperatorError, match="lies in the log's own directory"):
        LogWriter(directory, tier=TierSettings(url))
    assert lsns(directory) == ALL


def test_a_tier_of_another_log_is_refused_and_left_alone(
    directory: Path, tmp_path: Path, cold: Path, tier: TierSettings
) -> None:
    log = sealed_log(directory, tier=tier)
    move_all(log)
    before = sorted(path.name for path in cold.iterdir())
    other = tmp_path / "other" / "shop"
    with pytest.raises(OperatorError, match="belongs to another log"):
        LogWriter(other, tier=tier)
    LogWriter(other).close()
    second = LogWriter(other, tier=tier)
    until(lambda: second.tier_problem is not None)
    with pytest.raises(OperatorError, match="belongs to another log"):
        second.retain(ORIGIN, KEEP_ALL)
    second.close()
    assert sorted(path.name for path in cold.iterdir()) == before
    log.close()
    assert lsns(directory) == ALL


def test_a_tier_that_is_not_mounted_is_not_damage(
    directory: Path, cold: Path, tier: TierSettings
) -> None:
    log = sealed_log(directory, tier=tier)
    move_all(log)
    away = cold.parent.with_name("away")
    cold.parent.rename(away)
    inspection = log.inspect(ORIGIN, ORIGIN)
    assert inspection.wait(30)
    assert inspection.left_out
    assert not inspection.tail_is_whole
    assert inspection.found is not None
    assert inspection.found.damaged == ()
    assert healed(log, log.end, ORIGIN) is None, "nothing that is settled is waited for"
    log.close()
    log = LogWriter(directory, tier=tier, to_heal=True)
    until(lambda: log.tier_problem is not None)
    assert not cold.parent.exists()
    away.rename(cold.parent)
    assert healed(log, ORIGIN, ORIGIN) is None
    log.close()
    assert lsns(directory) == ALL


@pytest.mark.parametrize("how", ["missing", "flipped"])
def test_a_cold_index_is_rebuilt(directory: Path, cold: Path, tier: TierSettings, how: str) -> None:
    log = sealed_log(directory, tier=tier)
    move_all(log)
    for position, settled in ((0, log.manifest.segments[0].high), (1, ORIGIN)):
        index = cold / f"{log.manifest.segments[position].name}.idx"
        index.unlink() if how == "missing" else flip(index, 20)
        with pytest.raises(CorruptionError):
            lsns(directory)
        assert healed(log, settled, ORIGIN) is None
        assert lsns(directory) == ALL
    log.close()

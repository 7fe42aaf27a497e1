"""A log is read back beside its work: nobody waits for it, and nothing is confirmed before it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cdc.cursor import Cursor
from cdc.errors import TransientError
from cdc.log import writer
from cdc.log.damage_note import report_damage
from cdc.log.recovery import owned_manifest
from cdc.log.writer import Durability, TierSettings
from cdc.replication import log_keeper
from cdc.replication.log_keeper import LogKeeper
from tests.unit.log.batches import (
    KEEP_ALL,
    SMALL,
    active_data,
    append,
    flip,
    sealed_data,
    sealed_index,
    sealed_log,
)
from tests.unit.log.tiers import move_all, until


def keeper(
    directory: Path, *, durability: Durability = "fsync", tier: TierSettings | None = None
) -> LogKeeper:
    return LogKeeper(
        directory, term=1, durability=durability, limits=SMALL, retention=KEEP_ALL, tier=tier
    )


def inspected(kept: LogKeeper, lowest: Cursor) -> None:
    def done() -> bool:
        kept.tend(lowest)
        return kept._inspection is None

    until(done)


def test_a_reader_connects_while_the_tier_is_away(tmp_path: Path) -> None:
    tier = TierSettings(str(tmp_path / "tier"), hot_bytes=3_000)
    log = sealed_log(tmp_path / "log", tier=tier)
    move_all(log)
    log.close()
    (tmp_path / "tier").rename(tmp_path / "away")
    kept = keeper(tmp_path / "log", tier=tier)
    lowest, end = Cursor(10, 0), Cursor(39, 3)
    assert kept.resume(lowest, lowest, end.lsn, reset=False) == end
    inspected(kept, lowest)
    assert not kept.suspect
    assert kept.safe(lowest) == end, "what the slot no longer has is not waited for"
    kept.close()


def test_nothing_is_confirmed_that_the_source_can_still_send_and_was_not_read_back(
    tmp_path: Path,
) -> None:
    sealed_log(tmp_path).close()
    flip(sealed_data(tmp_path, 2), 100)
    kept = keeper(tmp_path)
    lowest = kept.log.manifest.segments[0].high
    assert kept.resume(lowest, lowest, lowest.lsn, reset=False) == Cursor(39, 3)
    assert kept.safe(lowest).lsn == lowest.lsn
    inspected(kept, lowest)
    assert kept.suspect
    assert kept.safe(lowest).lsn == lowest.lsn, "the damage can be read again"
    damaged_from = kept.log.manifest.segments[1].high
    assert kept.resume(lowest, lowest, lowest.lsn, reset=False) == damaged_from
    assert not kept.suspect
    assert kept.safe(lowest) == damaged_from
    kept.close()


@pytest.mark.parametrize("told", [1, 5])
def test_damage_in_the_past_makes_no_reader_connect_again(tmp_path: Path, told: int) -> None:
    sealed_log(tmp_path).close()
    flip(sealed_data(tmp_path, 0), 100)
    kept = keeper(tmp_path)
    end = kept.log.end
    assert kept.resume(end, end, end.lsn, reset=False) == end
    for _ in range(told):
        report_damage(tmp_path)
        inspected(kept, end)
        assert not kept.suspect
    kept.close()


def test_damage_before_a_consumer_that_was_moved_back_is_no_reason_to_stop(tmp_path: Path) -> None:
    sealed_log(tmp_path).close()
    flip(sealed_data(tmp_path, 1), 100)
    kept = keeper(tmp_path)
    end, moved_back = kept.log.end, Cursor(10, 0)
    assert kept.resume(end, moved_back, end.lsn, reset=False) == end
    inspected(kept, moved_back)
    assert not kept.suspect
    (condition,) = kept.conditions("search")
    assert (condition.kind, condition.severity) == ("log_damaged", "error")
    assert "walbrook.skip_to" in condition.fix
    kept.tend(end)
    assert [one.kind for one in kept.conditions("search")] == ["log_damaged_past"]
    kept.close()


def full_disk(*_arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_cut_that_a_full_disk_refuses_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed_log(tmp_path).close()
    flip(sealed_data(tmp_path, 2), 100)
    kept = keeper(tmp_path)
    lowest = kept.log.manifest.segments[0].high
    kept.resume(lowest, lowest, lowest.lsn, reset=False)
    inspected(kept, lowest)
    with monkeypatch.context() as patch:
        patch.setattr(owned_manifest, "swap_manifest", full_disk)
        with pytest.raises(TransientError, match="No space left"):
            kept.resume(lowest, lowest, lowest.lsn, reset=False)
    damaged_from = kept.log.manifest.segments[1].high
    assert kept.resume(lowest, lowest, lowest.lsn, reset=False) == damaged_from
    kept.close()


def test_damage_is_reported_after_a_full_disk_kept_an_index_from_being_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_keeper, "_INSPECTION_PAUSE_S", 0.0)
    sealed_log(tmp_path).close()
    kept = keeper(tmp_path)
    flip(sealed_data(tmp_path, 1), 100)
    sealed_index(tmp_path, 2).unlink()
    end, moved_back = kept.log.end, Cursor(10, 0)
    kept.resume(end, moved_back, end.lsn, reset=False)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "mend_index", full_disk)
        with pytest.raises(TransientError, match="No space left"):
            inspected(kept, moved_back)
    inspected(kept, moved_back)
    assert sealed_index(tmp_path, 2).exists()
    assert [one.kind for one in kept.conditions("search")] == ["log_damaged"]
    kept.close()


def test_damage_in_the_past_does_not_hide_damage_that_a_consumer_waits_for(tmp_path: Path) -> None:
    sealed_log(tmp_path).close()
    kept = keeper(tmp_path)
    sealed_data(tmp_path, 0).write_bytes(b"")
    flip(sealed_data(tmp_path, 1), 100)
    lowest, end = kept.log.manifest.segments[0].high, kept.log.end
    kept.resume(lowest, lowest, end.lsn, reset=False)
    inspected(kept, lowest)
    kinds = {one.kind for one in kept.conditions("search")}
    assert kinds == {"log_damaged_past", "log_damaged"}
    kept.close()


def test_a_past_that_cannot_be_read_does_not_keep_damage_from_being_cut(tmp_path: Path) -> None:
    sealed_log(tmp_path).close()
    kept = keeper(tmp_path)
    lowest = kept.log.manifest.segments[0].high
    sealed_index(tmp_path, 0).unlink()
    sealed_index(tmp_path, 0).mkdir()
    flip(sealed_data(tmp_path, 2), 100)
    kept.resume(lowest, lowest, lowest.lsn, reset=False)
    inspected(kept, lowest)
    assert kept.suspect
    kept.close()


@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_batches_that_a_rewound_consumer_needs_are_read_back_before_they_are_confirmed(
    tmp_path: Path, durability: Durability
) -> None:
    sealed_log(tmp_path).close()
    flip(sealed_data(tmp_path, 2), 100)
    kept = keeper(tmp_path, durability=durability)
    settled, moved_back = kept.log.end, Cursor(10, 0)
    kept.resume(settled, moved_back, moved_back.lsn, reset=False)
    assert kept.safe(settled) == moved_back
    inspected(kept, moved_back)
    assert kept.suspect, "the source still has it"
    kept.close()


def test_damage_that_is_met_while_reading_is_looked_at_before_more_is_confirmed(
    tmp_path: Path,
) -> None:
    sealed_log(tmp_path).close()
    kept = keeper(tmp_path)
    end = kept.log.end
    kept.resume(end, end, end.lsn, reset=False)
    inspected(kept, end)
    append(kept.log, 50)
    flip(active_data(tmp_path), 100)
    report_damage(tmp_path)
    kept.tend(end)
    assert kept.safe(end).lsn == end.lsn
    inspected(kept, end)
    assert kept.suspect
    kept.close()

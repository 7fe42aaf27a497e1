"""Damage among what is not settled: cut and fetched again where the source still has it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError, GapError, TransientError
from cdc.log.manifest import Manifest
from cdc.log.recovery import owned_manifest
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


def last_of_first_segment(log: LogWriter) -> Cursor:
    return log.manifest.segments[0].high


def test_an_undamaged_log_needs_no_healing(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    history = log.manifest.history
    assert healed(log, ORIGIN, ORIGIN) is None
    log.close()
    assert lsns(tmp_path, history) == list(range(10, 40))


def test_damage_is_cut_where_the_source_can_send_it_again(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    view = LogView(tmp_path)
    second = log.manifest.segments[1]
    history, end = log.manifest.history, last_of_first_segment(log)
    assert view.history() == history
    flip(sealed_data(tmp_path, 1), 100)
    assert healed(log, end, end) == end
    assert (log.end, log.next_batch) == (end, second.first_batch)
    assert log.durable_end == end
    assert log.manifest.history == history + 1
    with pytest.raises(GapError, match="was cut"):
        view.entries(0, 1)
    for lsn in range(end.lsn + 1, 60):
        append(log, lsn)
    log.close()
    LogWriter(tmp_path).close()
    assert lsns(tmp_path, history + 1) == list(range(10, 60))


@pytest.mark.parametrize("position", [0, 1, 3])
def test_batches_before_the_damage_in_its_segment_stay(tmp_path: Path, position: int) -> None:
    log = sealed_log(tmp_path)
    segment = log.manifest.segments[position]
    flip(sealed_data(tmp_path, position), segment.bytes - 10)
    again_from = healed(log, ORIGIN, ORIGIN)
    assert again_from == Cursor(segment.high.lsn - 1, 3)
    assert lsns(tmp_path) == list(range(10, segment.high.lsn))
    append(log, 50)
    log.close()
    LogWriter(tmp_path).close()
    assert lsns(tmp_path) == [*range(10, segment.high.lsn), 50]


def test_damage_in_the_active_segment_is_cut(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    for lsn in (10, 20, 30):
        append(log, lsn)
    flip(active_data(tmp_path), active_data(tmp_path).stat().st_size // 2)
    assert healed(log, ORIGIN, ORIGIN) == Cursor(10, 3)
    append(log, 20)
    log.close()
    assert lsns(tmp_path) == [10, 20]


def test_damage_in_the_first_batch_of_all_empties_the_log(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    flip(active_data(tmp_path), 100)
    assert healed(log, ORIGIN, ORIGIN) == ORIGIN
    append(log, 10)
    log.close()
    assert lsns(tmp_path) == [10]


def test_damage_that_the_source_cannot_replace_stays_and_is_named(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    history, second = log.manifest.history, log.manifest.segments[1]
    flip(sealed_data(tmp_path, 1), 100)
    assert healed(log, ORIGIN, Cursor(38, 0)) is None
    assert (log.manifest.history, log.next_batch) == (history, 30), "nothing was cut"
    (damage,) = log.damaged
    assert damage.lost == (second.first, Cursor(second.first.lsn, 3)), "one batch, no more"
    append(log, 50)
    view = LogView(tmp_path)
    behind = view.seek(damage.lost[1])
    assert [frame.marker.first.lsn for frame in view.frames(behind, view.next_batch())] == [
        *range(second.first.lsn + 1, 40),
        50,
    ]
    with pytest.raises(CorruptionError, match=rf"skip_to\(…, '{damage.lost[1]}'\)"):
        list(view.frames(behind - 1, behind))
    log.close()


def test_damage_that_the_source_has_is_cut_behind_damage_that_it_no_longer_has(
    tmp_path: Path,
) -> None:
    log = sealed_log(tmp_path)
    first, third = log.manifest.segments[0], log.manifest.segments[2]
    flip(sealed_data(tmp_path, 0), 100)
    flip(sealed_data(tmp_path, 2), 100)
    end = log.manifest.segments[1].high
    assert healed(log, ORIGIN, third.first) == end
    assert log.end == end
    assert [one.segment.name for one in log.damaged] == [first.name]
    log.close()


def test_settled_damage_is_left_alone(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    flip(sealed_data(tmp_path, 0), 100)
    assert healed(log, last_of_first_segment(log), ORIGIN) is None
    assert log.next_batch == 30
    log.close()


def test_settled_damage_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    sealed_log(tmp_path).close()
    sealed_data(tmp_path, 0).unlink()
    sealed_index(tmp_path, 1).unlink()
    log = LogWriter(tmp_path, to_heal=True)
    assert not log.damaged
    assert healed(log, log.manifest.segments[1].high, log.end) is None
    assert [one.segment.name for one in log.damaged] == [log.manifest.segments[0].name]
    assert len(list(LogView(tmp_path).frames(2, 30))) == 28, "the index beside it was mended"
    with pytest.raises(CorruptionError):
        lsns(tmp_path)
    log.retain(log.manifest.segments[0].high, KEEP_NONE)
    assert not log.damaged, "it is gone"
    log.close()


def test_a_settled_frame_in_a_segment_with_unsettled_ones_is_left_alone(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    segment = log.manifest.segments[1]
    flip(sealed_data(tmp_path, 1), 200)
    assert healed(log, Cursor(segment.high.lsn, 0), log.end) is None
    assert log.next_batch == 30
    flip(sealed_data(tmp_path, 1), segment.bytes - 10)
    assert healed(log, Cursor(segment.high.lsn, 0), ORIGIN) == Cursor(segment.high.lsn, 0)
    log.close()


def test_an_active_index_is_rebuilt_only_once_it_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    append(log, 20)
    flip(active_index(tmp_path), 70)

    def refuse(_directory: Path, _manifest: Manifest) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(owned_manifest, "swap_manifest", refuse)
        with pytest.raises(TransientError, match="No space left"):
            healed(log, ORIGIN, ORIGIN)
    append(log, 30)
    assert LogView(tmp_path).next_batch() == 3, "what is appended is seen"
    assert healed(log, ORIGIN, ORIGIN) is None
    append(log, 40)
    log.close()
    assert lsns(tmp_path) == [10, 20, 30, 40]


def test_damage_below_a_cursor_within_its_batch_gives_up_the_settled_past(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    flip(sealed_data(tmp_path, 1), 100)
    second = log.manifest.segments[1].first
    restart = Cursor(second.lsn, 2)
    following = log.next_batch
    assert healed(log, restart, restart) == restart
    assert (log.end, log.manifest.earliest, log.next_batch) == (restart, restart, following)
    log.close()


def test_a_damaged_index_is_rebuilt(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    history = log.manifest.history
    flip(sealed_index(tmp_path, 1), 20)
    flip(active_index(tmp_path), 20)
    with pytest.raises(CorruptionError, match="index"):
        lsns(tmp_path)
    assert healed(log, ORIGIN, ORIGIN) is None
    append(log, 40)
    log.close()
    assert lsns(tmp_path, history) == list(range(10, 41))


def test_a_log_can_begin_again_at_a_cursor(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    history = log.manifest.history
    log.restart_at(Cursor(100, 0))
    assert (log.end, log.durable_end, log.next_batch) == (Cursor(100, 0), Cursor(100, 0), 30)
    assert log.manifest.history == history + 1
    assert LogView(tmp_path).floors()[0] == Cursor(100, 0)
    assert lsns(tmp_path) == []
    log.close()
    log = LogWriter(tmp_path)
    assert (log.end, log.next_batch) == (Cursor(100, 0), 30)
    append(log, 100)
    log.close()
    assert lsns(tmp_path, history + 1) == [100]


def test_an_index_of_a_segment_that_was_removed_is_not_written_again(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    index, second = sealed_index(tmp_path, 0), log.manifest.segments[1]
    index.unlink()
    inspection = log.inspect(ORIGIN, ORIGIN)
    assert inspection.wait(30)
    assert inspection.found is not None
    log.retain(second.high, KEEP_NONE)
    log.heal(inspection.found, second.high, ORIGIN)
    assert not index.exists()
    log.close()

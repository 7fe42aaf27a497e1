"""What goes, when it goes, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import GapError
from cdc.log.manifest import SegmentInfo
from cdc.log.retention import OnFull, decide
from cdc.log.view import LogView
from cdc.log.writer import LogWriter, Retention, RetentionResult, SegmentLimits
from tests.unit.log.batches import KEEP_ALL, KEEP_NONE, append, lsns, sealed_log

NEVER = 1 << 40


def segments(count: int, size: int = 100) -> list[SegmentInfo]:
    """Segment ``i`` ends at cursor ``(i + 1, 0)`` and was sealed at second ``i``."""
    return [
        SegmentInfo(
            first_batch=i,
            batches=1,
            rows=1,
            bytes=size,
            first=Cursor(i, 0),
            high=Cursor(i + 1, 0),
            commit_from_us=0,
            commit_to_us=0,
            sealed_at=float(i),
            term=0,
            history=1,
            index_xxh3=0,
        )
        for i in range(count)
    ]


def test_settled_segments_go_by_age() -> None:
    retention = Retention(settled_s=5.0, settled_bytes=NEVER, bytes_max=NEVER)
    assert decide(segments(10), 0, Cursor(10, 0), 9.5, retention).removed == 5
    assert decide(segments(10), 0, Cursor(3, 0), 100.0, retention).removed == 3


def test_settled_segments_go_by_size() -> None:
    retention = Retention(settled_s=NEVER, settled_bytes=250, bytes_max=NEVER)
    assert decide(segments(10), 0, Cursor(10, 0), 0.0, retention).removed == 8
    assert decide(segments(10), 0, Cursor(4, 0), 0.0, retention).removed == 2


def test_a_segment_that_is_not_settled_to_its_end_stays() -> None:
    retention = Retention(settled_s=0.0, settled_bytes=0, bytes_max=NEVER)
    assert decide(segments(3), 0, Cursor(0, 9), 100.0, retention) == RetentionResult(0, 0, False)
    assert decide(segments(3), 0, Cursor(1, 0), 100.0, retention) == RetentionResult(1, 0, False)


def test_a_full_log_gives_up_what_is_settled_before_it_says_so() -> None:
    retention = Retention(settled_s=NEVER, settled_bytes=NEVER, bytes_max=1_000)
    assert decide(segments(9), 99, Cursor(9, 0), 0.0, retention) == RetentionResult(0, 0, False)
    assert decide(segments(10), 99, Cursor(9, 0), 0.0, retention) == RetentionResult(1, 0, False)
    assert decide(segments(12), 0, Cursor(2, 0), 0.0, retention) == RetentionResult(2, 0, True)


def test_only_evict_gives_up_what_is_not_settled() -> None:
    pause = Retention(settled_s=NEVER, settled_bytes=NEVER, bytes_max=500)
    evict = replace(pause, on_full="evict")
    assert decide(segments(10), 0, Cursor(2, 0), 0.0, pause) == RetentionResult(2, 0, True)
    assert decide(segments(10), 0, Cursor(2, 0), 0.0, evict) == RetentionResult(2, 4, False)
    assert decide(segments(10), 500, Cursor(2, 0), 0.0, evict) == RetentionResult(2, 8, True)


@given(
    sizes=st.lists(st.integers(1, 50), max_size=12),
    active=st.integers(0, 100),
    settled=st.integers(0, 12),
    now=st.floats(0, 20),
    settled_s=st.floats(0, 20),
    settled_bytes=st.integers(0, 300),
    bytes_max=st.integers(1, 400),
    on_full=st.sampled_from(["pause", "evict"]),
)
def test_no_more_goes_than_must(
    sizes: list[int],
    active: int,
    settled: int,
    now: float,
    settled_s: float,
    settled_bytes: int,
    bytes_max: int,
    on_full: OnFull,
) -> None:
    log = [replace(one, bytes=size) for one, size in zip(segments(12), sizes, strict=False)]
    retention = Retention(settled_s, settled_bytes, bytes_max, on_full)
    result = decide(log, active, Cursor(settled, 0), now, retention)
    gone, kept = result.removed + result.evicted, log[result.removed + result.evicted :]
    total = active + sum(one.bytes for one in kept)
    assert all(one.high <= Cursor(settled, 0) for one in log[: result.removed])
    assert result.full == (total >= bytes_max)
    if result.evicted:
        assert on_full == "evict"
        assert total + log[gone - 1].bytes >= bytes_max, "the last one given up had to be"
    if result.full:
        assert not kept or (on_full == "pause" and kept[0].high > Cursor(settled, 0))
    settled_kept = [one for one in kept if one.high <= Cursor(settled, 0)]
    assert sum(one.bytes for one in settled_kept) <= settled_bytes
    assert all(now - one.sealed_at <= settled_s for one in settled_kept[:1])


def test_trimming_keeps_what_is_not_settled(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    before = log.size_bytes
    result = log.retain(Cursor(25, 0), KEEP_NONE)
    assert result.removed > 0
    assert (result.evicted, result.full) == (0, False)
    assert log.size_bytes < before
    assert lsns(tmp_path)[-15:] == list(range(25, 40))
    view = LogView(tmp_path)
    assert 0 < view.first_batch() <= view.seek(Cursor(25, 0))
    assert view.seek(ORIGIN) == view.first_batch()
    earliest, evicted = view.floors()
    assert ORIGIN < earliest <= Cursor(25, 0)
    assert evicted == ORIGIN, "what is settled is not missed"
    with pytest.raises(GapError, match="not all in the log"):
        view.entries(0, 5)
    log.close()


def test_nothing_goes_that_need_not(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    assert log.retain(log.end, KEEP_ALL) == RetentionResult(0, 0, False)
    assert lsns(tmp_path) == list(range(10, 40))
    log.close()


def test_a_trimmed_segment_stays_readable_while_it_is_mapped(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    frames = LogView(tmp_path).frames(0, 2)
    first = next(frames)
    assert log.retain(log.end, KEEP_NONE).removed > 0
    assert first.raw.column("commit_lsn")[0].as_py() == 10
    assert next(frames).marker.batch_idx == 1
    log.close()


def test_all_segments_may_go_and_numbers_go_on(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, limits=SegmentLimits(rows=1))
    append(log, 10)
    append(log, 20)
    append(log, 30)
    log._seal()
    log.retain(log.end, KEEP_NONE)
    assert not log.manifest.segments
    log.close()
    log = LogWriter(tmp_path)
    assert (log.next_batch, log.end, log.manifest.earliest) == (3, Cursor(30, 3), Cursor(30, 3))
    append(log, 40)
    log.close()
    assert lsns(tmp_path) == [40]


def test_a_full_log_pauses_until_something_is_settled(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    full = replace(KEEP_ALL, bytes_max=log.size_bytes)
    assert log.retain(ORIGIN, full) == RetentionResult(0, 0, True)
    assert lsns(tmp_path) == list(range(10, 40))
    assert not log.retain(Cursor(15, 0), full).full
    log.close()


def test_a_full_log_whose_last_segment_is_settled_lets_go_of_it(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    full = replace(KEEP_ALL, bytes_max=1)
    assert log.retain(ORIGIN, full) == RetentionResult(0, 0, True)
    assert log.retain(log.end, full) == RetentionResult(1, 0, False)
    append(log, 20)
    log.close()
    assert lsns(tmp_path) == [20]


def test_evicting_says_below_which_cursor_changes_are_missing(tmp_path: Path) -> None:
    log = sealed_log(tmp_path)
    size = log.size_bytes
    evict = Retention(settled_s=1e9, settled_bytes=NEVER, bytes_max=size // 2, on_full="evict")
    result = log.retain(Cursor(12, 0), evict)
    assert result.evicted > 0
    assert not result.full
    view = LogView(tmp_path)
    earliest, evicted = view.floors()
    assert earliest == evicted == log.manifest.earliest > Cursor(12, 0)
    assert lsns(tmp_path) == list(range(evicted.lsn + 1, 40))
    log.close()
    log = LogWriter(tmp_path)
    assert log.manifest.evicted == evicted
    log.retain(log.end, KEEP_NONE)
    assert log.manifest.evicted == evicted < log.manifest.earliest
    log.close()

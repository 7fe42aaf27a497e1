"""Counts, levels, distributions and clocks, by numbers that can be checked."""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_left
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.metrics import snapshot
from cdc.metrics.catalogue import BUSY_RATIO, INGEST_SECONDS, PHASE_SECONDS
from cdc.metrics.cells import Distribution
from cdc.metrics.clock import PhaseClock, read_clocks
from cdc.metrics.families import SERIES_MAX, counter
from cdc.metrics.snapshot import read_snapshots, write_snapshot
from cdc.service.http.live_metrics import live_metrics

BOUNDS = (0.1, 1.0, 10.0)
NOW_US = 1_800_000_000_000_000


@given(st.lists(st.integers(-2_000_000, 20_000_000), min_size=1, max_size=200))
def test_the_ages_of_a_column_are_counted_as_if_each_were_observed(ages_us: list[int]) -> None:
    at_once, one_by_one = Distribution(BOUNDS), [0] * (len(BOUNDS) + 1)
    times = np.array(sorted(NOW_US - age for age in ages_us), dtype=np.int64)
    at_once.observe_ages(times, NOW_US)
    for age in ages_us:
        one_by_one[bisect_left(BOUNDS, age / 1e6)] += 1
    assert at_once.counts == one_by_one
    assert at_once.total == pytest.approx(max(0.0, sum(ages_us) / 1e6))


def test_a_measure_has_a_bounded_number_of_series() -> None:
    family = counter("many", "Many.", "name")
    for number in range(SERIES_MAX + 10):
        family.of(str(number)).add()
    assert len(family.cells) == SERIES_MAX
    with pytest.raises(ValueError, match="has the labels"):
        family.of("two", "labels")


def test_time_that_no_phase_took_is_the_rest_and_a_step_within_another_is_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = PhaseClock("worker", "clock-test", "all")
    now += 6
    with clock.during("delivery"), clock.during("read"):
        now += 3
    clock.begin("delivery")
    now += 1
    clock.read()
    spent = {
        labels[-1]: cell.value
        for labels, cell in PHASE_SECONDS.cells.items()
        if labels[1] == "clock-test"
    }
    assert spent == {"delivery": 4.0, "wait": 6.0}
    assert BUSY_RATIO.of("worker", "clock-test", "all").value == pytest.approx(0.4)
    clock.end("delivery")
    clock.close()
    assert BUSY_RATIO.of("worker", "clock-test", "all").value is None


def test_clocks_are_read_while_those_of_other_threads_begin_and_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PhaseClock, "read", lambda _clock: None)
    known = [PhaseClock("worker", "clocks-test", str(number)) for number in range(200)]
    ended = threading.Event()

    def begin_and_end() -> None:
        while not ended.is_set():
            for clock in [PhaseClock("worker", "clocks-test", "all") for _ in range(20)]:
                clock.close()

    thread, before = threading.Thread(target=begin_and_end), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # what takes hours of a service comes at once
    try:
        thread.start()
        for _ in range(20_000):
            read_clocks()
    finally:
        sys.setswitchinterval(before)
        ended.set()
        thread.join()
    for clock in known:
        clock.close()


def test_a_snapshot_is_read_as_it_was_written_and_levels_of_a_dead_process_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    INGEST_SECONDS.of("snapshot-test").observe(0.02, 3)
    BUSY_RATIO.of("reader", "snapshot-test", "").set(0.5)
    write_snapshot(tmp_path / "reader.json")
    (tmp_path / "broken.json").write_bytes(b"{")

    def shown(name: str) -> dict[str, float]:
        (family,) = [each for each in live_metrics(tmp_path) if each.name == f"walbrook_{name}"]
        return {
            sample.name + sample.labels.get("le", ""): sample.value
            for sample in family.samples
            if sample.labels["source"] == "snapshot-test"
        }

    buckets = shown("ingest_seconds")
    assert buckets["walbrook_ingest_seconds_bucket0.01"] == 0
    assert buckets["walbrook_ingest_seconds_bucket0.025"] == 3
    assert buckets["walbrook_ingest_seconds_bucket+Inf"] == 3
    assert buckets["walbrook_ingest_seconds_sum"] == pytest.approx(0.06)
    assert shown("busy_ratio") == {"walbrook_busy_ratio": 0.5}

    monkeypatch.setattr(snapshot, "_OLD_S", -1.0)
    assert shown("busy_ratio") == {}
    assert shown("ingest_seconds") == buckets, "counts of a dead process stay"
    assert len(read_snapshots(tmp_path)) == 1
    assert orjson.loads((tmp_path / "reader.json").read_bytes())


def test_without_any_process_each_family_is_there_and_has_no_series() -> None:
    assert all(not family.samples for family in live_metrics(None))

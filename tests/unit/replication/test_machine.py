"""What the machine has left, and when that is too little."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.replication import machine
from cdc.replication.machine import Left, MachineBounds, MachineWatch, disk_left, memory_left

MIB = 1 << 20


def kinds(watch: MachineWatch) -> list[str]:
    return [condition.kind for condition in watch.conditions()]


@pytest.fixture(autouse=True)
def _each_look_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PACE_S", 0.0)


def test_a_warning_begins_below_its_bound_and_ends_a_quarter_above(tmp_path: Path) -> None:
    left = Left(memory=1000 * MIB, disk=1000 * MIB)
    watch = MachineWatch(tmp_path, MachineBounds(memory=100, disk=400 * MIB), lambda: left)
    assert kinds(watch) == []
    left = Left(memory=1000 * MIB, disk=399 * MIB)
    assert kinds(watch) == ["disk_low"]
    (condition,) = watch.conditions()
    assert "less than 400 MiB are free" in condition.what
    left = Left(memory=1000 * MIB, disk=450 * MIB)
    assert kinds(watch) == ["disk_low"], "it must not come and go"
    left = Left(memory=99, disk=501 * MIB)
    assert kinds(watch) == ["memory_low"]
    left = Left()
    assert kinds(watch) == [], "where nobody knows, nothing is warned of"


def test_a_container_counts_its_own_limit_and_not_its_file_cache(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8000 kB\nMemAvailable:   4000 kB\n")
    assert memory_left(meminfo, tmp_path) == 4000 * 1024
    for name, text in (
        ("memory.max", "2000000\n"),
        ("memory.current", "1500000\n"),
        ("memory.stat", "anon 1\ninactive_file 100000\n"),
    ):
        (tmp_path / name).write_text(text)
    assert memory_left(meminfo, tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_left(meminfo, tmp_path) == 4000 * 1024


def test_this_machine_says_what_it_has_left(tmp_path: Path) -> None:
    assert (disk_left(tmp_path) or 0) > 0
    assert disk_left(tmp_path / "missing") is None
    watch = MachineWatch(tmp_path, MachineBounds(memory=0, disk=0))
    assert watch.conditions() == []
    assert watch.left.disk is not None

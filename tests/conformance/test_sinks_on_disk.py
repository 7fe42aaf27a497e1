"""What the sinks that write to disk promise when the process, the disk or a person interferes."""

from __future__ import annotations

import fcntl
import os
import shutil
from itertools import count
from pathlib import Path

import orjson
import pyarrow as pa
import pytest

from cdc.change import MessageBatch
from cdc.errors import CorruptionError, OperatorError, TransientError
from sinks.base import Sink
from sinks.file import FileSink
from sinks.parquet import ParquetSink
from sinks.position import cursor_name
from tests.conformance.crash import Killed, death_at, disk_that_fills_up, recorded_steps
from tests.conformance.harness import FileHarness, Harness, ParquetHarness
from tests.conformance.messages import (
    CONSUMER,
    Sample,
    batch,
    batch_of,
    cursor_of,
    expected,
    held,
    numbered,
)

DISK = pytest.mark.parametrize("kind", [FileHarness, ParquetHarness])
STEPS_MAX = 60


def _dies_at(harness: Harness, step: int, *, torn: bool, start: int, end: int) -> bool:
    """Deliver in a process that dies at that step; whether it came so far."""
    return _sink_dies_at(harness.open(), step, torn=torn, start=start, end=end)


def _sink_dies_at(sink: Sink, step: int, *, torn: bool, start: int, end: int) -> bool:
    try:
        with death_at(step, torn=torn):
            sink.deliver(batch(start, end))
    except Killed:
        return True
    return False


@DISK
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("before", [pytest.param(0, marks=pytest.mark.sinks), 90])
def test_a_death_at_any_step_loses_and_doubles_nothing(
    kind: type[FileHarness | ParquetHarness], torn: bool, before: int, tmp_path: Path
) -> None:
    for step in count(1):
        assert step < STEPS_MAX
        harness = kind(tmp_path / str(step))
        harness.directory.mkdir(parents=True)
        if before:
            harness.open().deliver(batch(0, before))
        died = _dies_at(harness, step, torn=torn, start=before, end=150)
        sink = harness.open()
        assert sink.deliver(batch(before, 120)).error is None
        assert sink.deliver(batch(120, 200)).error is None
        assert harness.held() == expected(numbered(0, 200)), f"died at step {step}"
        if not died:
            break
    assert step > 5


def test_a_file_that_was_never_committed_goes_even_if_other_messages_follow(tmp_path: Path) -> None:
    for step in count(1):
        assert step < STEPS_MAX
        harness = FileHarness(tmp_path / str(step))
        harness.directory.mkdir(parents=True)
        died = _dies_at(harness, step, torn=False, start=0, end=20)
        # As after a filter that now leaves out the first ones.
        delivery = harness.open().deliver(batch(5, 30))
        if delivery.absorbed:
            break
        assert died
        assert harness.held() == expected(numbered(5, 30), start=5)


@DISK
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize(
    "before", [30, pytest.param(90, marks=pytest.mark.sinks)]
)  # within a file, and where the next one begins
def test_a_sink_that_stays_open_clears_away_what_another_process_left(
    kind: type[FileHarness | ParquetHarness], torn: bool, before: int, tmp_path: Path
) -> None:
    for step in count(1):
        assert step < STEPS_MAX
        harness = kind(tmp_path / str(step))
        harness.directory.mkdir(parents=True)
        survivor, other = harness.open(), harness.open()
        assert survivor.deliver(batch(0, 10)).error is None
        assert other.deliver(batch(10, 20)).error is None
        assert survivor.deliver(batch(20, before)).error is None
        died = _sink_dies_at(other, step, torn=torn, start=before, end=150)
        assert survivor.deliver(batch(before, 120)).error is None
        assert survivor.deliver(batch(120, 200)).error is None
        assert harness.open().deliver(batch(190, 210)).error is None
        assert harness.held() == expected(numbered(0, 210)), f"died at step {step}"
        if not died:
            break
    assert step > 5


def test_a_new_file_that_another_process_left_goes_even_if_other_messages_follow(
    tmp_path: Path,
) -> None:
    for step in count(1):
        assert step < STEPS_MAX
        directory = tmp_path / str(step)
        survivor = FileSink(directory, consumer=CONSUMER, rotate_bytes=100)
        survivor.deliver(batch(0, 10))
        died = _sink_dies_at(
            FileSink(directory, consumer=CONSUMER, rotate_bytes=100),
            step,
            torn=False,
            start=10,
            end=20,
        )
        if survivor.deliver(batch(15, 30)).absorbed:
            break
        assert died
        lines = [
            held(orjson.loads(line))
            for file in sorted(directory.glob("changes-*.jsonl"))
            for line in file.read_bytes().splitlines()
        ]
        assert lines == expected(numbered(0, 10)) + expected(numbered(15, 30), start=15)


def test_a_commit_of_another_process_in_an_emptied_folder_is_put_in_its_place(
    tmp_path: Path,
) -> None:
    for step in count(1):
        assert step < STEPS_MAX
        harness = ParquetHarness(tmp_path / str(step))
        harness.directory.mkdir(parents=True)
        survivor = harness.open()
        survivor.deliver(batch(0, 30))
        shutil.rmtree(harness.directory / "changes")
        died = _dies_at(harness, step, torn=False, start=0, end=30)
        assert survivor.deliver(batch(0, 40)).error is None
        assert harness.held() == expected(numbered(0, 40)), f"died at step {step}"
        if not died:
            break


@DISK
def test_a_death_during_recovery_loses_and_doubles_nothing(
    kind: type[FileHarness | ParquetHarness], tmp_path: Path
) -> None:
    for first in range(1, 14, 2):
        for second in range(1, 12, 3):
            harness = kind(tmp_path / f"{first}-{second}")
            harness.directory.mkdir(parents=True)
            harness.open().deliver(batch(0, 30))
            _dies_at(harness, first, torn=True, start=30, end=60)
            _dies_at(harness, second, torn=True, start=30, end=70)
            assert harness.open().deliver(batch(30, 80)).error is None
            assert harness.held() == expected(numbered(0, 80)), f"died at {first}, then {second}"


@pytest.mark.parametrize(
    ("kind", "at_write"),
    [(FileHarness, 1), (FileHarness, 2), *((ParquetHarness, at_write) for at_write in (1, 2, 3))],
)
def test_a_full_disk_settles_nothing_and_works_when_there_is_room(
    kind: type[FileHarness | ParquetHarness], at_write: int, tmp_path: Path
) -> None:
    harness = kind(tmp_path)
    sink = harness.open()
    assert sink.deliver(batch(0, 50)).settled == 50
    with disk_that_fills_up(at_write=at_write):
        delivery = sink.deliver(batch(50, 120))
    assert delivery.settled == 0
    assert isinstance(delivery.error, TransientError)
    assert "free space" in delivery.error.fix
    assert sink.deliver(batch(50, 120)).error is None
    assert harness.held() == expected(numbered(0, 120))


@pytest.mark.parametrize("rolls", [False, True])
def test_lines_and_new_names_are_synced_before_the_position_that_counts_them(
    rolls: bool, tmp_path: Path
) -> None:
    sink = FileSink(tmp_path, consumer=CONSUMER, rotate_bytes=100 if rolls else 100_000)
    sink.deliver(batch(0, 5))
    with recorded_steps() as steps:
        sink.deliver(batch(5, 9))
    data = str(tmp_path / f"changes-{cursor_name(cursor_of(5 if rolls else 0))}.jsonl")
    draft, position = str(tmp_path / "..position.new"), str(tmp_path / ".position")
    assert steps == [
        ("write", data),
        ("fdatasync", data),
        *([("fsync", str(tmp_path))] if rolls else []),
        ("write", draft),
        ("fsync", draft),
        ("replace", position),
        ("fsync", str(tmp_path)),
    ]


def test_a_parquet_file_is_synced_before_its_position_and_placed_after_it(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path, consumer=CONSUMER, partition_by=())
    sink.deliver(batch(0, 5))
    with recorded_steps() as steps:
        sink.deliver(batch(5, 9))
    own = tmp_path / "_walbrook"
    name = f"{cursor_name(cursor_of(5))}_{cursor_name(cursor_of(8))}.parquet"
    staged = steps[0][1]
    assert Path(staged).parent == own / "staging"
    assert steps == [
        ("write", staged),
        ("fsync", staged),
        ("fsync", str(own / "staging")),
        ("write", str(own / ".position.new")),
        ("fsync", str(own / ".position.new")),
        ("replace", str(own / "position")),
        ("fsync", str(own)),
        ("replace", str(tmp_path / name)),
        ("fsync", str(tmp_path)),
    ]


@DISK
def test_a_position_that_another_process_renamed_is_made_durable_before_it_counts(
    kind: type[FileHarness | ParquetHarness], tmp_path: Path
) -> None:
    harness = kind(tmp_path)
    harness.open().deliver(batch(0, 20))
    (position,) = [*tmp_path.rglob(".position"), *tmp_path.rglob("position")]
    with recorded_steps() as steps:
        delivery = harness.open().deliver(batch(0, 20))
    assert delivery.absorbed == 20
    assert ("fsync", str(position.parent)) in steps


@DISK
def test_a_lock_that_stays_taken_is_reported_after_a_bounded_wait(
    kind: type[FileHarness | ParquetHarness], tmp_path: Path
) -> None:
    sink: FileSink | ParquetSink
    if kind is FileHarness:
        sink, lock = (
            FileSink(tmp_path, consumer=CONSUMER, rotate_bytes=1000, lock_wait_s=0.05),
            tmp_path / ".lock",
        )
    else:
        sink, lock = (
            ParquetSink(tmp_path, consumer=CONSUMER, lock_wait_s=0.05),
            tmp_path / "_walbrook" / "lock",
        )
    sink.deliver(batch(0, 5))
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        delivery = sink.deliver(batch(5, 9))
    assert delivery.settled == 0
    assert isinstance(delivery.error, TransientError)
    assert sink.deliver(batch(5, 9)).settled == 4


@DISK
def test_a_damaged_position_is_refused(
    kind: type[FileHarness | ParquetHarness], tmp_path: Path
) -> None:
    harness = kind(tmp_path)
    harness.open().deliver(batch(0, 5))
    (position,) = [*tmp_path.rglob(".position"), *tmp_path.rglob("position")]
    position.write_bytes(position.read_bytes().replace(b'"16/', b'"17/'))
    delivery = harness.open().deliver(batch(5, 9))
    assert delivery.settled == 0
    assert isinstance(delivery.error, CorruptionError)
    assert "move all" in delivery.error.fix
    (harness.directory / "changes").rename(tmp_path / "elsewhere")
    assert harness.open().deliver(batch(5, 9)).settled == 4
    assert harness.held() == expected(numbered(5, 9), start=5)


@DISK
def test_data_without_a_position_is_never_written_over(
    kind: type[FileHarness | ParquetHarness], tmp_path: Path
) -> None:
    harness = kind(tmp_path)
    harness.open().deliver(batch(0, 5))
    (position,) = [*tmp_path.rglob(".position"), *tmp_path.rglob("position")]
    position.unlink()
    delivery = harness.open().deliver(batch(0, 9))
    assert delivery.settled == 0
    assert isinstance(delivery.error, OperatorError)
    assert harness.held() == expected(numbered(0, 5))


def test_committed_bytes_that_are_gone_are_reported(tmp_path: Path) -> None:
    FileSink(tmp_path, consumer=CONSUMER, rotate_bytes=100_000).deliver(batch(0, 50))
    (data,) = tmp_path.glob("changes-*.jsonl")
    os.truncate(data, 100)
    delivery = FileSink(tmp_path, consumer=CONSUMER, rotate_bytes=100_000).deliver(batch(50, 60))
    assert delivery.settled == 0
    assert isinstance(delivery.error, CorruptionError)


def test_a_file_that_lost_bytes_may_be_moved_away_to_go_on_without_it(tmp_path: Path) -> None:
    harness = FileHarness(tmp_path)
    sink = harness.open()
    sink.deliver(batch(0, 50))
    (data,) = (harness.directory / "changes").glob("changes-*.jsonl")
    os.truncate(data, 100)
    delivery = sink.deliver(batch(50, 60))
    assert isinstance(delivery.error, CorruptionError)
    assert "move it away" in delivery.error.fix
    data.rename(tmp_path / "damaged")
    assert sink.deliver(batch(50, 60)).settled == 10
    assert harness.held() == expected(numbered(50, 60), start=50)


def test_files_roll_at_their_size_and_sort_in_order(tmp_path: Path) -> None:
    harness = FileHarness(tmp_path)
    sink = harness.open()
    for start in range(0, 300, 10):
        sink.deliver(batch(start, start + 10))
    files = sorted((harness.directory / "changes").glob("changes-*.jsonl"))
    assert len(files) > 3
    assert all(file.stat().st_size >= 20_000 for file in files[:-1])
    assert harness.held() == expected(numbered(0, 300))


@pytest.mark.parametrize("pattern", ["changes-*.jsonl", "table=*"])
def test_data_that_an_operator_moved_away_is_not_missed(pattern: str, tmp_path: Path) -> None:
    harness = FileHarness(tmp_path) if "jsonl" in pattern else ParquetHarness(tmp_path)
    harness.open().deliver(batch(0, 30))
    archive = tmp_path / "archive"
    archive.mkdir()
    for path in (harness.directory / "changes").glob(pattern):
        path.rename(archive / path.name)
    assert harness.open().deliver(batch(20, 60)).absorbed == 10
    assert harness.held() == expected(numbered(30, 60), start=30)


def test_a_json_value_with_line_breaks_stays_on_one_line(tmp_path: Path) -> None:
    one = batch(0, 1)
    spaced = pa.array(['{"id":0,\r\n "name":\n"row 0"}'])
    rows = one.rows.set_column(7, one.rows.schema.field(7), spaced)
    harness = FileHarness(tmp_path)
    harness.open().deliver(MessageBatch(rows, one.shape))
    assert harness.held() == expected(numbered(0, 1))


def test_partitions_are_named_for_table_and_utc_date(tmp_path: Path) -> None:
    ParquetSink(tmp_path, consumer=CONSUMER).deliver(batch(0, 12_000))
    folders = {
        str(path.parent.relative_to(tmp_path)) for path in tmp_path.glob("table=*/*/*.parquet")
    }
    assert folders == {
        f"table=public.{table}/date={date}"
        for table in ("users", "orders")
        for date in ("2026-09-21", "2026-09-22")
    }


@pytest.mark.parametrize(
    ("table", "folder"),
    [
        ("a/../../b", "table=public.a%2F%2E%2E%2F%2E%2E%2Fb"),
        ("ü=%41 x", "table=public.%C3%BC%3D%2541%20x"),
        ("👾" * 15, "table=public." + "%F0%9F%91%BE" * 15),
    ],
)
def test_hostile_table_names_stay_inside_the_folder(
    table: str, folder: str, tmp_path: Path
) -> None:
    root = tmp_path / "lake"
    delivery = ParquetSink(root, consumer=CONSUMER, partition_by=["table"]).deliver(
        batch_of([Sample({"id": 1}, table=table)])
    )
    assert delivery.error is None
    (file,) = root.glob("*/*.parquet")
    assert file.parent.name.startswith(folder[:150])
    assert len(file.parent.name) < 255
    assert [path.name for path in tmp_path.iterdir()] == ["lake"]


def test_a_column_that_is_a_partition_is_read_from_the_path(tmp_path: Path) -> None:
    harness = ParquetHarness(tmp_path)
    ParquetSink(
        harness.directory / "changes", consumer=CONSUMER, partition_by=["action", "date"]
    ).deliver(batch(0, 50))
    assert {path.name for path in (harness.directory / "changes").glob("action=*")} == {
        "action=insert",
        "action=update",
        "action=delete",
    }
    assert harness.held() == expected(numbered(0, 50))

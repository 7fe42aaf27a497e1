"""A consumer whose destination writes files waits for enough of them, and for a bounded time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.config import DeltaDestination, FileDestination, ParquetDestination, SinkConfig
from cdc.log.open import open_log
from cdc.log.view import LogReader
from spark_pipeline.workers.gathering import Gathering
from tests.queue_pipeline import insert
from tests.written_log import WrittenLog

DELAY_S = 10.0


@pytest.fixture
def written(tmp_path: Path) -> Iterator[WrittenLog]:
    log = WrittenLog(tmp_path)
    yield log
    log.close()


@pytest.fixture
def log(written: WrittenLog) -> Iterator[LogReader]:
    view = open_log(written.directory)
    yield view
    view.close()


def _append(written: WrittenLog, number: int) -> None:
    written.append(*insert(number, (number, "row")))


def test_nothing_is_due_before_there_are_enough_rows(written: WrittenLog, log: LogReader) -> None:
    gathering = Gathering(3, 1 << 20, DELAY_S)
    assert gathering.wait_s(log, 0, now=100.0) == DELAY_S
    for number in (1, 2):
        _append(written, number)
        assert gathering.wait_s(log, 0, now=101.0) > 0
    _append(written, 3)
    assert gathering.wait_s(log, 0, now=101.0) == 0.0


def test_a_few_rows_are_due_once_the_first_of_them_has_waited_long_enough(
    written: WrittenLog, log: LogReader
) -> None:
    gathering = Gathering(1_000, 1 << 20, DELAY_S)
    _append(written, 1)
    assert gathering.wait_s(log, 0, now=100.0) == DELAY_S
    _append(written, 2)
    assert gathering.wait_s(log, 0, now=107.0) == pytest.approx(3.0)
    assert gathering.wait_s(log, 0, now=110.0) == 0.0


def test_all_that_was_due_is_taken_and_what_came_later_waits_again(
    written: WrittenLog, log: LogReader
) -> None:
    gathering = Gathering(2, 1 << 20, DELAY_S)
    for number in (1, 2):
        _append(written, number)
    assert gathering.wait_s(log, 0, now=100.0) == 0.0
    _append(written, 3)
    assert gathering.wait_s(log, 1, now=100.0) == 0.0  # of two batches one is left
    assert gathering.wait_s(log, 2, now=100.0) == DELAY_S


def test_many_bytes_are_due_whatever_their_rows(written: WrittenLog, log: LogReader) -> None:
    gathering = Gathering(1_000, 1, DELAY_S)
    _append(written, 1)
    assert gathering.wait_s(log, 0, now=100.0) == 0.0


def test_everything_is_due_when_the_service_stops(written: WrittenLog, log: LogReader) -> None:
    gathering = Gathering(1_000, 1 << 20, DELAY_S)
    _append(written, 1)
    assert gathering.wait_s(log, 0, now=100.0) > 0
    gathering.drain()
    assert gathering.wait_s(log, 0, now=100.0) == 0.0


def test_only_a_destination_that_writes_files_waits(tmp_path: Path) -> None:
    lake = DeltaDestination(path=tmp_path)
    for destination, gathers in (
        (lake, True),
        (lake.model_copy(update={"max_delay_ms": 0}), False),
        (ParquetDestination(path=tmp_path), True),
        (ParquetDestination(path=tmp_path, columns="json"), True),
        (FileDestination(path=tmp_path), False),
    ):
        sink = SinkConfig(name="lake", database="shop", destination=destination)
        assert (Gathering.of(sink, 1 << 20) is not None) == gathers

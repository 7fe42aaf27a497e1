"""Records of delivery: what was written is found again by cursor, within a bound on disk."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest

from cdc.cursor import Cursor
from cdc.errors import TransientError
from cdc.trace.record_files import FOLDER, RecordWriter, list_files
from cdc.trace.record_log import RecordLog
from cdc.trace.recorded import RecordsOfSource
from cdc.trace.records import DeliveryRecord, DeliveryTiming, Refusal, RetryClaim, settled_line

MANY = 4_000


def delivery(start: int, end: int, **given: object) -> DeliveryRecord:
    first, last = Cursor(start, 0), Cursor(end, 0)
    values = {
        "reached": last,
        "timing": DeliveryTiming(10, 20, 5, 6, 3, 4),
        "rows": 2,
        "delivered": 1,
    }
    return DeliveryRecord("hook", first, last, **{**values, **given})  # type: ignore[arg-type]


def test_a_delivery_is_found_by_any_cursor_that_it_covers(tmp_path: Path) -> None:
    records = RecordLog("shop", tmp_path)
    refusal = Refusal(Cursor(0x10, 1), 2, "poison", "it answered 422", dead=True)
    first = delivery(0x10, 0x20, absorbed=3, queued=4, dead=5, refusals=(refusal,), unnamed=6)
    settlement = records.begin([first, delivery(0x20, 0x30)])
    records.settled(settlement, [first])
    about = RecordsOfSource(tmp_path)
    (found,) = about.about(Cursor(0x1F, 9)).deliveries
    assert found.settled_us > 0
    assert (found.settlement, found.covers(Cursor(0x20, 0))) == (settlement, False)
    assert (found.absorbed, found.queued, found.dead, found.unnamed) == (3, 4, 5, 6)
    assert (found.refusals, found.timing, found.passed) == ((refusal,), first.timing, 13)
    assert about.about(Cursor(0x30, 0)).deliveries == ()


def test_a_delivery_that_was_never_settled_says_so(tmp_path: Path) -> None:
    records = RecordLog("shop", tmp_path)
    records.begin([delivery(0x10, 0x20)])  # and the process is killed
    moved = records.begin([delivery(0x10, 0x20)])
    records.settled(moved, [delivery(0x10, 0x20)], moved=["hook"])
    found = RecordsOfSource(tmp_path).about(Cursor(0x10, 0)).deliveries
    assert [each.settled_us for each in found] == [0, 0]


def test_an_attempt_that_ended_before_a_change_is_found_by_it(tmp_path: Path) -> None:
    records = RecordLog("shop", tmp_path)
    records.begin([delivery(0x10, 0x10, reached=Cursor(0x20, 0), error="it answered 503")])
    (found,) = RecordsOfSource(tmp_path).about(Cursor(0x18, 0)).deliveries
    assert (found.covers(Cursor(0x18, 0)), found.tried(Cursor(0x18, 0))) == (False, True)
    assert found.error == "it answered 503"


def test_retries_and_failures_are_found_by_the_messages_that_they_concern(tmp_path: Path) -> None:
    records = RecordLog("shop", tmp_path)
    at, left = Cursor(0x10, 0), Cursor(0x11, 0)
    refusal = Refusal(Cursor(0x12, 0), 1, "poison", "it answered 400")
    records.retried(RetryClaim("hook", 7, (at,), (refusal,), (left,), "it answered 503"))
    records.failed("hook", at, TransientError("nobody listens there"))
    about = RecordsOfSource(tmp_path)
    for cursor in (at, left, refusal.cursor):
        found = about.about(cursor)
        assert found.retries == (
            RetryClaim("hook", 7, (at,), (refusal,), (left,), "it answered 503"),
        )
        assert [each.error for each in found.failures] == ["nobody listens there"]
    assert about.about(Cursor(0x0F, 0)).retries == ()
    assert about.about(Cursor(0x0F, 0)).failures == ()


def test_a_stretch_without_changes_leaves_no_record(tmp_path: Path) -> None:
    records = RecordLog("shop", tmp_path)
    assert records.begin([delivery(0x10, 0x20, rows=0, delivered=0)]) == 0
    assert list_files(tmp_path / FOLDER) == []


def test_the_oldest_records_go_and_the_trace_says_so(tmp_path: Path) -> None:
    records = RecordLog("shop", tmp_path, bytes_max=20_000)
    for lsn in range(MANY):
        one = delivery(lsn, lsn + 1)
        records.settled(records.begin([one]), [one])
    files = list_files(tmp_path / FOLDER)
    assert sum(file.size for file in files) <= 20_000
    assert files[0].number > 0
    about = RecordsOfSource(tmp_path)
    for lsn in (MANY - 1, MANY - 50, MANY - 200):
        (found,) = about.about(Cursor(lsn, 0)).deliveries
        assert (found.start, found.settled_us > 0) == (Cursor(lsn, 0), True)
    gone = about.about(Cursor(0, 0))
    assert gone.deliveries == ()
    assert gone.incomplete == ("older records of delivery were removed to make room",)


def test_records_of_an_earlier_process_are_gone_on_with(tmp_path: Path) -> None:
    for lsn in (0x10, 0x20, 0x30):
        records = RecordLog("shop", tmp_path)
        records.begin([delivery(lsn, lsn + 8)])
        records.close()
        (file,) = list_files(tmp_path / FOLDER)
        with file.path.open("ab") as torn:
            torn.write(b'{"kind":"deli')  # as a kill leaves it
    about = RecordsOfSource(tmp_path)
    found = about.about(Cursor(0x24, 0))
    assert [each.start for each in found.deliveries] == [Cursor(0x20, 0)]
    assert found.incomplete == ("3 records cannot be read",)


def test_a_disk_that_takes_nothing_stops_nobody_and_what_is_missing_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, write = RecordLog("shop", tmp_path), os.write

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for lsn in (1, 2):
        records.begin([delivery(lsn, lsn + 1)])
    monkeypatch.setattr(os, "write", write)
    records.begin([delivery(3, 4)])
    found = RecordsOfSource(tmp_path).about(Cursor(3, 0))
    assert [each.start for each in found.deliveries] == [Cursor(3, 0)]
    assert found.incomplete == ("2 records could not be written, because the disk refused them",)


def test_records_are_for_the_account_of_the_service_alone(tmp_path: Path) -> None:
    RecordLog("shop", tmp_path).begin([delivery(1, 2)])
    (file,) = list_files(tmp_path / FOLDER)
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_nothing_is_kept_where_the_bound_is_zero(tmp_path: Path) -> None:
    RecordWriter(tmp_path, 0).append([settled_line(1, 2, [])])
    assert not (tmp_path / FOLDER).exists()


def test_a_line_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    RecordLog("shop", tmp_path).begin([delivery(1, 2)])
    (file,) = list_files(tmp_path / FOLDER)
    (line,) = file.path.read_bytes().splitlines()
    read = orjson.loads(line)
    assert (read["kind"], read["consumer"], read["start"]) == ("delivery", "hook", [1, 0])


def test_a_record_that_cannot_be_written_stops_no_settlement(tmp_path: Path) -> None:
    records = RecordLog("shop", tmp_path)
    one = delivery(0x10, 0x20, error="half a character: \udc80")
    assert records.begin([one])
    records.begin([delivery(0x20, 0x30)])
    about = RecordsOfSource(tmp_path)
    assert about.about(Cursor(0x10, 0)).deliveries == ()
    (found,) = about.about(Cursor(0x20, 0)).deliveries
    assert found.start == Cursor(0x20, 0)
    records.close()

"""What the records say of one change: who was to be sent it, when, and with what result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cdc.cursor import Cursor
from cdc.trace.record_files import RecordLines, RecordReader
from cdc.trace.records import (
    DeliveryRecord,
    Failure,
    Line,
    RetryClaim,
    read_delivery,
    read_failure,
    read_retry,
)


@dataclass(frozen=True)
class RecordedDeliveries:
    """The records of one change, in the order in which they were written.

    ``incomplete`` says why there may have been others.
    """

    deliveries: tuple[DeliveryRecord, ...]
    retries: tuple[RetryClaim, ...]
    failures: tuple[Failure, ...]
    incomplete: tuple[str, ...] = ()


class RecordsOfSource:
    """Those of one source; what was read once is kept, so one object serves many changes."""

    def __init__(self, log_directory: Path) -> None:
        self._reader = RecordReader(log_directory)

    def about(self, cursor: Cursor) -> RecordedDeliveries:
        files, older_gone = self._reader.about(cursor)
        settled = _settlements(files)
        here = [line for file in files for line in file.lines if _concerns(line, cursor)]
        deliveries = tuple(
            _with_settlement(read_delivery(line), settled)
            for line in here
            if line["kind"] == "delivery"
        )
        retries = tuple(read_retry(line) for line in here if line["kind"] == "retry")
        failures = tuple(read_failure(line) for line in here if line["kind"] == "failure")
        return RecordedDeliveries(deliveries, retries, failures, _incomplete(files, older_gone))


def _concerns(line: Line, cursor: Cursor) -> bool:
    at = list(cursor)
    match line["kind"]:
        case "delivery":
            start, end = line["start"], line.get("reached", line["end"])
            assert isinstance(start, list)
            assert isinstance(end, list)
            return start <= at < end
        case "retry":
            refusals = line["refusals"]
            assert isinstance(refusals, list)
            named = [line["delivered"], line.get("undelivered", [])]
            return any(at in each for each in named if isinstance(each, list)) or any(
                refusal[0] == at for refusal in refusals
            )
        case "failure":
            start = line["start"]
            assert isinstance(start, list)
            return start <= at
    return False


def _settlements(files: Sequence[RecordLines]) -> dict[int, tuple[int, list[str]]]:
    """When each settlement was written, and whose cursors it found moved."""
    return {
        int(str(line["settlement"])): (int(str(line["at"])), _names(line.get("moved")))
        for file in files
        for line in file.lines
        if line["kind"] == "settled"
    }


def _with_settlement(
    delivery: DeliveryRecord, settled: dict[int, tuple[int, list[str]]]
) -> DeliveryRecord:
    at_us, moved = settled.get(delivery.settlement, (0, []))
    return delivery if delivery.consumer in moved else replace(delivery, settled_us=at_us)


def _incomplete(files: Sequence[RecordLines], older_gone: bool) -> tuple[str, ...]:
    missing = sum(
        int(str(line["records"])) for file in files for line in file.lines
        if line["kind"] == "missing"
    )  # fmt: skip
    damaged = sum(file.damaged for file in files)
    found = []
    if older_gone:
        found.append("older records of delivery were removed to make room")
    if missing:
        found.append(f"{missing} records could not be written, because the disk refused them")
    if damaged:
        found.append(f"{damaged} records cannot be read")
    return tuple(found)


def _names(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []

"""Where a stage reports its deliveries: to the files of records, and as spans where configured.

Recording stops nothing: what cannot be recorded is counted, and delivery goes on.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path

from cdc.cursor import Cursor
from cdc.errors import WalbrookError
from cdc.trace.record_files import RECORDS_BYTES, RecordWriter
from cdc.trace.records import (
    DeliveryRecord,
    Failure,
    RetryClaim,
    delivery_line,
    failure_line,
    retry_line,
    settled_line,
    shown,
)
from cdc.trace.spans import Spans, open_spans


class RecordLog:
    """That of one source. All methods may be called from any thread."""

    def __init__(
        self, source: str, log_directory: Path | None, bytes_max: int = RECORDS_BYTES
    ) -> None:
        """Without a directory nothing is recorded."""
        self._writer = None if log_directory is None else RecordWriter(log_directory, bytes_max)
        self._spans: Spans | None = None if log_directory is None else open_spans(source)

    def begin(self, deliveries: Sequence[DeliveryRecord]) -> int:
        """Record deliveries that are about to be settled; returns the settlement's number.

        The number is 0 if there is nothing to record.
        """
        some = [each for each in deliveries if _has_news(each)]
        if self._writer is None or not some:
            return 0
        settlement = time.time_ns()
        self._writer.append([delivery_line(each, settlement) for each in some])
        return settlement

    def settled(
        self, settlement: int, deliveries: Sequence[DeliveryRecord], moved: Collection[str] = ()
    ) -> None:
        """The settlement was written, but for consumers whose cursors an operator had moved."""
        if self._writer is None or not settlement:
            return
        at_us = time.time_ns() // 1000
        self._writer.append([settled_line(settlement, at_us, sorted(moved))])
        if self._spans is not None:
            for each in deliveries:
                if _has_news(each) and each.consumer not in moved:
                    self._spans.delivered(each, settlement // 1000, at_us)

    def retried(self, claim: RetryClaim) -> None:
        if self._writer is not None:
            self._writer.append([retry_line(claim)])

    def failed(self, consumer: str, start: Cursor, error: WalbrookError) -> None:
        """An attempt ended before it delivered anything."""
        if self._writer is not None:
            failure = Failure(consumer, time.time_ns() // 1000, start, shown(error))
            self._writer.append([failure_line(failure)])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _has_news(delivery: DeliveryRecord) -> bool:
    """A stretch without changes, as of an idle source, is not worth a record."""
    return bool(delivery.rows or delivery.passed or delivery.error)

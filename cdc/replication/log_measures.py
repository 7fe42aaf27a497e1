"""What is measured of a reader and its log."""

from __future__ import annotations

import time

import pyarrow as pa

from cdc.metrics import catalogue
from cdc.replication.machine import Left


class LogMeasures:
    """Those of one source."""

    def __init__(self, source: str) -> None:
        self.received = catalogue.RECEIVED_BYTES.of(source)
        self.synced = catalogue.LOG_SYNC_SECONDS.of(source).observe
        self._ingest = catalogue.INGEST_SECONDS.of(source)
        self._messages = catalogue.INGESTED_MESSAGES.of(source)
        self._batches = catalogue.LOG_BATCHES.of(source)
        self._bytes = catalogue.LOG_WRITTEN_BYTES.of(source)
        self._segments = catalogue.LOG_SEGMENTS.of(source)
        self._disk = catalogue.LOG_DISK_FREE.of(source)
        self._memory = catalogue.MEMORY_FREE.of(source)

    def appended(self, raw: pa.RecordBatch, size: int) -> None:
        """A batch is in the log."""
        self._batches.add()
        self._bytes.add(size)
        rows = raw.num_rows
        if rows:
            self._messages.add(rows)
            self._ingest.observe_ages(raw["commit_ts"].to_numpy(), time.time_ns() // 1000)

    def kept(self, segments: int, left: Left) -> None:
        """What there is of the log, and what the machine has left."""
        self._segments.set(segments)
        self._disk.set(left.disk)
        self._memory.set(left.memory)

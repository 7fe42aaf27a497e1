"""What a slot confirms and holds back, looked at all the time while something is measured."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

import psycopg

from benchmarks.source import BenchmarkSource

_SAMPLE_S = 0.25
_MB = 1 << 20
_LOOK = """
SELECT (confirmed_flush_lsn - '0/0')::bigint,
       (pg_current_wal_lsn() - restart_lsn)::bigint,
       (pg_current_wal_lsn() - confirmed_flush_lsn)::bigint
  FROM pg_replication_slots WHERE slot_name = %s
"""


class SlotWatch:
    """Samples in a thread, on a connection of its own, from ``with`` to its end."""

    def __init__(self, source: BenchmarkSource, slot: str) -> None:
        self._dsn, self._slot = source.postgres.dsn, slot
        self._samples: list[tuple[float, int, int, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, daemon=True)

    def figures(self) -> dict[str, float]:
        """How long ``confirmed_flush_lsn`` stood still at most, and what WAL the slot held back."""
        stood_still_s, since, moves = 0.0, 0.0, 0
        before: int | None = None
        for at, confirmed, _, _ in self._samples:
            if confirmed != before:
                moves += before is not None
                before, since = confirmed, at
            stood_still_s = max(stood_still_s, at - since)
        _, _, retained, unconfirmed = zip(*self._samples, strict=True)
        return {
            "samples": len(self._samples),
            "moves": moves,
            "stood_still_s_max": round(stood_still_s, 2),
            "retained_mb_max": round(max(retained) / _MB, 1),
            "unconfirmed_mb_max": round(max(unconfirmed) / _MB, 1),
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample_until_stopped(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while True:
                row = connection.execute(_LOOK, (self._slot,)).fetchone()
                assert row is not None
                confirmed, retained, unconfirmed = (int(str(number)) for number in row)
                self._samples.append((time.monotonic(), confirmed, retained, unconfirmed))
                if self._stop.wait(_SAMPLE_S):
                    return

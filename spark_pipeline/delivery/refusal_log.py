"""Log lines for messages that a destination refused, and for those that became dead letters.

Invariants: a line names tables and cursors and no value of a row; a consumer has at most one line
of each kind in ``_EVERY_S``, which counts what happened since the one before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import structlog

from cdc.cursor import Cursor
from spark_pipeline.delivery.outcome import Outcome

_logger = structlog.get_logger("walbrook.queue")

_EVERY_S: Final = 10.0


@dataclass
class _NextReport:
    """What is to be said next of one consumer, and when that may be."""

    count: int = 0
    not_before: float = 0.0


class RefusalLog:
    """For the consumers of one source; may be called from any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, str], _NextReport] = {}

    def note(self, outcome: Outcome) -> None:
        """Log what a settled outcome put into the retry queue or gave up."""
        dead = len(outcome.dead)
        first_dead: dict[str, object] = {}
        if outcome.dead:
            first_dead = {"cursor": str(outcome.dead[0].cursor)}
        if outcome.queued is not None:
            is_dead = outcome.queued.column("dead").fill_null(False)
            tried = outcome.queued.column("error").is_valid()
            refused = outcome.queued.filter(pc.and_not(tried, is_dead))
            if refused.num_rows:
                self._say("queue.refused", outcome.consumer, refused.num_rows, _first(refused))
            buried = outcome.queued.filter(is_dead)
            dead += buried.num_rows
            first_dead = first_dead or (_first(buried) if buried.num_rows else {})
        if dead:
            self._say("queue.dead_letter", outcome.consumer, dead, first_dead)

    def _say(self, event: str, consumer: str, count: int, first: dict[str, object]) -> None:
        now = self._now()
        with self._lock:
            line = self._lines.setdefault((event, consumer), _NextReport())
            line.count += count
            if now < line.not_before:
                return
            counted, line.count, line.not_before = line.count, 0, now + _EVERY_S
        _logger.warning(event, consumer=consumer, messages=counted, **first)


def _first(rows: pa.RecordBatch) -> dict[str, object]:
    """Where the first of some rows of the queue stands, and why it is there."""
    row = rows.slice(0, 1).select(
        ["commit_lsn", "commit_idx", "table_schema", "table_name", "error_kind", "deliveries"]
    ).to_pylist()[0]  # fmt: skip
    return {
        "cursor": str(Cursor(row["commit_lsn"], row["commit_idx"])),
        "table": f"{row['table_schema']}.{row['table_name']}",
        "kind": row["error_kind"],
        "deliveries": row["deliveries"],
    }

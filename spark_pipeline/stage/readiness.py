"""``service.ready``: said once per source, when its first change can be delivered."""

from __future__ import annotations

import time
from collections.abc import Mapping

import structlog

from cdc.connection import Connection
from cdc.state.workers import WorkerState, WorkerStatus

_logger = structlog.get_logger("walbrook.stage")

_STREAMS = """
SELECT state = 'streaming' AND seen_at > clock_timestamp() - interval '30 seconds'
  FROM walbrook.sources WHERE name = %s AND term = %s
"""
_SERVED = (WorkerState.LIVE, WorkerState.CATCHING_UP)


class ReadyNotice:
    """Looks until the reader streams and the workers are there; then it has nothing to do."""

    def __init__(self, source: str, term: int) -> None:
        self._source = source
        self._term = term
        self._began = time.monotonic()
        self._said = False

    def look(self, state: Connection, statuses: Mapping[str, WorkerStatus]) -> None:
        """A sink that is paused or fails is counted, and holds the notice back no longer."""
        if self._said or any(each.state is None for each in statuses.values()):
            return
        row = state.execute(_STREAMS, (self._source, self._term)).fetchone()
        if row is None or not row[0]:
            return
        self._said = True
        served = sum(each.state in _SERVED for each in statuses.values())
        _logger.info(
            "service.ready",
            source=self._source,
            sinks=len(statuses),
            served=served,
            after_s=round(time.monotonic() - self._began, 1),
        )

"""What each consumer may hold of the change log: floors of the log, and bounds of its own.

Invariants: a consumer's cursor passes what the log gave up, or what is beyond its bound, only in
the transaction that records the gap, whether or not it is paused or served. A bound acts on its own
consumer alone. A disabled consumer holds neither the log nor the restart cursor.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from cdc.connection import Connection
from cdc.cursor import Cursor, cursor_of, format_lsn
from cdc.state.fence import FENCE_TO_MOVE, fenced
from cdc.state.gaps import GapReason, Loss, pass_over
from cdc.state.health import Condition, report_conditions
from cdc.state.positions import move_restart

# The health event of a condition that lasts is kept fresh at this pace.
_REFRESH_S = 10.0

_READ = """
SELECT c.name, c.cursor_lsn::text, c.cursor_idx, c.backlog_max, c.backlog_on_full,
       c.backlog_excused, c.disabled_at IS NOT NULL,
       CASE WHEN c.backlog_max IS NULL THEN 0
            ELSE walbrook.backlog(c.source, c.cursor_lsn, c.cursor_idx) END
  FROM walbrook.consumers c
 WHERE c.source = %(source)s AND c.active
   AND (c.backlog_max IS NOT NULL OR c.disabled_at IS NOT NULL
        OR (c.cursor_lsn, c.cursor_idx) < (%(lsn)s::pg_lsn, %(idx)s)
        OR EXISTS (SELECT FROM walbrook.health h
                    WHERE h.source = c.source AND h.consumer = c.name
                      AND h.kind LIKE 'backlog\\_%%'))
 ORDER BY c.name
"""
_PLACE = "SELECT p.lsn::text, p.idx FROM walbrook.place_within(%s, %s) p"
_DISABLE = """
UPDATE walbrook.consumers
   SET disabled_at = clock_timestamp(), disabled_reason = 'backlog',
       paused_at = coalesce(paused_at, clock_timestamp())
 WHERE source = %s AND name = ANY (%s) AND active AND disabled_at IS NULL
"""
_WITHIN = (
    "UPDATE walbrook.consumers SET backlog_excused = false WHERE source = %s AND name = ANY (%s)"
)


class OnFull(StrEnum):
    """What happens to a consumer with more before it than its bound."""

    WARN = "warn"
    EVICT = "evict"
    DISABLE = "disable"


@dataclass(frozen=True)
class LogExtent:
    """What the log of a source holds: from ``earliest`` to ``end``; ``evicted`` is a floor too."""

    earliest: Cursor
    evicted: Cursor
    end: Cursor


@dataclass(frozen=True)
class Backlog:
    """What one consumer has before it, and its bound."""

    consumer: str
    cursor: Cursor
    bytes: int
    bytes_max: int | None
    on_full: OnFull | None
    excused: bool
    disabled: bool

    @property
    def over(self) -> bool:
        return self.bytes_max is not None and self.bytes > self.bytes_max and not self.disabled

    @property
    def acts(self) -> bool:
        """Whether the bound is to act now."""
        return self.over and not self.excused and self.on_full is not OnFull.WARN

    def lost(self, log: LogExtent) -> Loss | None:
        """What the log no longer has of what this consumer lacks, if that is a gap."""
        if self.disabled and self.cursor < log.earliest:
            return Loss(self.consumer, log.earliest, GapReason.DISABLED)
        if self.cursor < log.evicted:
            return Loss(self.consumer, log.evicted, GapReason.EVICTED)
        if self.on_full in (OnFull.EVICT, OnFull.DISABLE) and self.cursor < log.earliest:
            # It was resumed, or rewound, while the log let go of what it stood before.
            return Loss(self.consumer, log.earliest, GapReason.BACKLOG)
        return None

    def conditions(self) -> Iterator[Condition]:
        if self.disabled:
            yield Condition(
                "backlog_disabled",
                "warning",
                f"{self.consumer} is disabled: it had more of the change log before it than its "
                "max_backlog. It gets nothing, and nothing is kept for it",
                fix=f"mend its destination, then walbrook resume {self.consumer}; what the log no "
                "longer has then is a row of walbrook.gaps and a message at the sink",
            )
        elif self.over:
            yield Condition(
                "backlog_over",
                "warning",
                f"{self.consumer} has {self.bytes} bytes of the change log before it, more than "
                f"its max_backlog ({self.bytes_max})",
                fix="mend its destination, or raise its max_backlog",
            )


class BacklogBounds:
    """Keeps the consumers of one source to the log's floors and to their own bounds."""

    def __init__(self, source: str, term: int) -> None:
        self._source = source
        self._term = term
        self._reported: dict[str, tuple[list[Condition], float]] = {}

    def keep(self, connection: Connection, log: LogExtent) -> None:
        """Record what was lost, act on consumers that are over their bound, and report it.

        While nothing is lost and no consumer is over its bound, nothing is written.
        """
        found = self._read(connection, log)
        lost = {each.consumer: loss for each in found if (loss := each.lost(log)) is not None}
        over = [each for each in found if each.acts and each.consumer not in lost]
        within = [e.consumer for e in found if e.excused and e.bytes_max and not e.over]
        if lost or over or within:
            self._act(connection, list(lost.values()), over, within)
            found = self._read(connection, log)
        if any(each.disabled for each in found):
            move_restart(connection, self._source, log.end, term=self._term)
        self._report(connection, found)

    def _read(self, connection: Connection, log: LogExtent) -> list[Backlog]:
        place = {"source": self._source, "lsn": format_lsn(log.evicted.lsn), "idx": log.evicted.idx}
        return [
            Backlog(
                str(name),
                cursor_of(lsn, idx),
                int(str(size)),
                None if bytes_max is None else int(str(bytes_max)),
                None if on_full is None else OnFull(str(on_full)),
                bool(excused),
                bool(disabled),
            )
            for name, lsn, idx, bytes_max, on_full, excused, disabled, size in connection.execute(
                _READ, place
            ).fetchall()
        ]

    def _act(
        self, connection: Connection, losses: list[Loss], over: list[Backlog], within: list[str]
    ) -> None:
        with connection.transaction():
            if connection.execute(FENCE_TO_MOVE, (self._source, self._term)).fetchone() is None:
                raise fenced(self._source)
            evicted = [each for each in over if each.on_full is OnFull.EVICT]
            losses = [*losses, *(self._beyond(connection, each) for each in evicted)]
            pass_over(connection, self._source, losses)
            disabled = [each.consumer for each in over if each.on_full is OnFull.DISABLE]
            connection.execute(_DISABLE, (self._source, disabled))
            connection.execute(_WITHIN, (self._source, within))
            if losses:
                move_restart(connection, self._source, max(loss.end for loss in losses))

    def _beyond(self, connection: Connection, each: Backlog) -> Loss:
        row = connection.execute(_PLACE, (self._source, each.bytes_max)).fetchone()
        assert row is not None, "a backlog is made of segments"
        return Loss(each.consumer, cursor_of(row[0], row[1]), GapReason.BACKLOG)

    def _report(self, connection: Connection, found: list[Backlog]) -> None:
        now = time.monotonic()
        for each in found:
            conditions = list(each.conditions())
            before, at = self._reported.get(each.consumer, (None, 0.0))
            if conditions == before and (not conditions or now - at < _REFRESH_S):
                continue
            report_conditions(
                connection,
                self._source,
                self._term,
                conditions,
                consumer=each.consumer,
                scope="backlog_",
            )
            self._reported[each.consumer] = conditions, now

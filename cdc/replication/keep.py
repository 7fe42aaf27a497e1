"""The reader's log over the reader's lifetime: opened, kept within bounds, opened anew.

What must always hold: nothing is called safe that is not on disk as the durability asks; the log
has no hole, so what it lost and the slot still has is read again, and where the slot no longer has
it the log begins anew where everyone stands.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from cdc.cursor import ORIGIN, Cursor
from cdc.log.damage import take_damage_report
from cdc.log.manifest import Manifest, SegmentInfo
from cdc.log.writer import Durability, LogWriter, Retention, SegmentLimits, Tier
from cdc.replication.seal import Sealed
from cdc.state.health import Condition
from cdc.state.reader_state import SegmentRow

_logger = structlog.get_logger("walbrook.reader")


class LogKeeper:
    """One log and how it is to be kept."""

    def __init__(
        self,
        directory: Path,
        *,
        term: int,
        durability: Durability,
        limits: SegmentLimits,
        retention: Retention,
        tier: Tier | None,
    ) -> None:
        self._directory = directory
        self._term = term
        self._durability = durability
        self._limits = limits
        self._retention = retention
        self._tier = tier
        self._to_verify = True
        self._shown: tuple[Manifest | None, tuple[SegmentRow, ...]] = (None, ())
        self.full = False
        self.log = self._open()

    def resume(self, restart: Cursor, lowest: Cursor, confirmed_lsn: int, *, anew: bool) -> Cursor:
        """From where to read: the log's end, unless it is behind what the slot still has.

        ``lowest`` is where the last consumer stands, which may have been moved back;
        ``confirmed_lsn`` is where the slot stands: it gives nothing below. With ``anew`` what lies
        between was given up, and the source may not even be able to send it.
        """
        if self.log.needs_reopen:
            self.log.close()
            self.log, self._to_verify = self._open(), True
        if self._to_verify:
            healed = self.log.heal(lowest, Cursor(confirmed_lsn, 0))
            if healed is not None:
                _logger.warning("reader.log_damaged", read_again_from=str(healed))
            self._to_verify = False
        end = self.log.end
        if end >= restart or (not anew and end != ORIGIN and confirmed_lsn <= end.lsn):
            return end
        if end != ORIGIN:
            _logger.warning("reader.log_restarted", log_end=str(end), at=str(restart))
        self.log.restart_at(restart)
        return restart

    def append(self, sealed: Sealed) -> None:
        self.log.append(
            sealed.raw,
            sealed.schemas,
            first=sealed.first,
            high=sealed.high,
            annotations=sealed.annotations,
        )

    def tend(self, lowest: Cursor) -> None:
        """Let go of what everyone below ``lowest`` has had; about once a second."""
        result = self.log.retain(lowest, self._retention)
        if result.evicted:
            _logger.warning("reader.evicted", segments=result.evicted, to=str(self.evicted))
        self.full = result.full
        if take_damage_report(self._directory):
            self._to_verify = True

    def at_limit(self) -> bool:
        """Whether one more batch must wait until something has gone."""
        return self.log.size_bytes >= self._retention.bytes_max

    @property
    def suspect(self) -> bool:
        """Somebody met damage in it: it is looked at before the next connection."""
        return self._to_verify

    @property
    def end(self) -> Cursor:
        return self.log.end

    @property
    def evicted(self) -> Cursor:
        return self.log.manifest.evicted

    def safe(self, restart: Cursor) -> Cursor:
        """Up to where Postgres may forget; ``restart`` is up to where everyone is served."""
        if self._durability == "memory":
            return min(restart, self.log.end)
        durable = self.log.durable_end
        return durable if self._durability == "fsync" else min(restart, durable)

    def conditions(self) -> list[Condition]:
        found = []
        if self.full:
            found.append(
                Condition(
                    "log_full",
                    "error",
                    f"the log has reached log.max_bytes ({self._retention.bytes_max} bytes) of "
                    "undelivered changes; reading waits, and the source keeps its WAL",
                    "find the consumer that is behind (walbrook status), or raise log.max_bytes",
                )
            )
        if self.log.damage is not None:
            found.append(
                Condition(
                    "log_damaged_past",
                    "warning",
                    f"something in the log does not read back: {self.log.damage}",
                    "nothing that anyone waits for is missing; walbrook log verify lists it all",
                )
            )
        if self.log.tier_problem is not None:
            found.append(
                Condition(
                    "tier_failing",
                    "warning",
                    f"segments do not move to log.tier: {self.log.tier_problem}",
                    "check log.tier.url and its credentials; it is tried again",
                )
            )
        return found

    def segments(self) -> tuple[SegmentRow, ...]:
        """The segments as SQL shows them."""
        here, manifest = str(self._directory), self.log.manifest
        if manifest is not self._shown[0]:
            rows = tuple(_row(s, s.place or here, s.sealed_at) for s in manifest.segments)
            self._shown = (manifest, rows)
        active = self.log.active
        if not active.batches:
            return self._shown[1]
        return (*self._shown[1], _row(active, here, 0.0, active=True))

    def close(self) -> None:
        self.log.close()

    def _open(self) -> LogWriter:
        return LogWriter(
            self._directory,
            term=self._term,
            durability=self._durability,
            limits=self._limits,
            tier=self._tier,
            to_heal=True,
        )


def _row(
    segment: SegmentInfo, location: str, sealed_at: float, *, active: bool = False
) -> SegmentRow:
    return SegmentRow(
        first_batch=segment.first_batch,
        batches=segment.batches,
        rows=segment.rows,
        bytes=segment.bytes,
        first=segment.first,
        high=segment.high,
        commit_from_us=segment.commit_from_us,
        commit_to_us=segment.commit_to_us,
        sealed_at=sealed_at,
        tier="active" if active else "cold" if segment.place else "hot",
        location=location,
    )

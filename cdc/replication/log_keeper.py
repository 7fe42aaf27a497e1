"""The reader's log over the reader's lifetime: opened, kept within bounds, reopened.

Invariants: nothing is called safe that is not on disk as the durability asks; the log
has no hole, so what it lost and the slot still has is read again, and where the slot no longer has
it the log begins again where everyone stands.
"""

from __future__ import annotations

import time
from pathlib import Path

import structlog

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import TransientError
from cdc.log.damage_note import take_damage_report
from cdc.log.manifest import Manifest, SegmentInfo
from cdc.log.recovery.damage_scan import Findings
from cdc.log.recovery.inspection import Inspection
from cdc.log.recovery.segment_check import CheckedSegment
from cdc.log.writer import Durability, LogWriter, Retention, SegmentLimits, TierSettings
from cdc.metrics.clock import PhaseClock
from cdc.replication.log_measures import LogMeasures
from cdc.replication.machine import MachineBounds, MachineWatch
from cdc.replication.wire.sealed import Sealed
from cdc.state.health import Condition
from cdc.state.reader_state import SegmentRow

_logger = structlog.get_logger("walbrook.reader")

# Share of log.max_bytes from which on a warning says who fills it.
_FILLING = 0.8
# Least time between two inspections that readers of a running log asked for. It grows while part of
# the log cannot be reached, because each inspection reads all the rest.
_INSPECTION_PAUSE_S, _INSPECTION_PAUSE_MAX_S = 60.0, 3600.0


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
        tier: TierSettings | None,
        machine: MachineBounds | None = None,
        source: str = "",
    ) -> None:
        """``machine``: from where on it warns of too little memory, and disk for the log.

        ``source`` names it in metrics.
        """
        self.clock = PhaseClock("reader", source, rest="read")
        """Of the reader's own thread."""
        self._measures = LogMeasures(source)
        self._directory = directory
        self._machine = MachineWatch(directory, machine or MachineBounds())
        self._term = term
        self._durability = durability
        self._limits = limits
        self._retention = retention
        self._tier = tier
        self._to_inspect = True
        self._inspection: Inspection | None = None
        self._inspected_at = float("-inf")
        self._inspection_pause_s = _INSPECTION_PAUSE_S
        self._to_cut: Findings | None = None  # damage to be cut before the next connection
        self._confirmed = ORIGIN  # what was confirmed to the slot, as far as is known
        self._hold: Cursor | None = None  # beyond which nothing is confirmed yet
        self._lowest = ORIGIN
        self._shown: tuple[Manifest | None, tuple[SegmentRow, ...]] = (None, ())
        self.full = False
        self._needed_bytes = 0  # of what a consumer still lacks
        self.log = self._open()

    def resume(self, restart: Cursor, lowest: Cursor, confirmed_lsn: int, *, reset: bool) -> Cursor:
        """From where to read: the log's end, unless it is behind what the slot still has.

        ``lowest`` is where the last consumer stands, which may have been moved back;
        ``confirmed_lsn`` is where the slot stands: it gives nothing below. With ``reset`` what lies
        between was given up, and the source may not even be able to send it.
        """
        if self.log.needs_reopen:
            self._end_inspection()
            self.log.close()
            self.log, self._to_inspect = self._open(), True
        has_from = Cursor(confirmed_lsn, 0)
        if self._to_cut is not None or self.log.ended_early:
            self._end_inspection()
            healed = self.log.heal(self._to_cut or Findings(), lowest, has_from)
            self._to_cut = self._hold = None
            if healed is not None:
                _logger.warning("reader.log_damaged", read_again_from=str(healed))
        self._confirmed = has_from
        if self._to_inspect:
            self._inspect(lowest)
        end = self.log.end
        if end >= restart or (not reset and end != ORIGIN and confirmed_lsn <= end.lsn):
            return end
        if end != ORIGIN:
            _logger.warning("reader.log_restarted", log_end=str(end), at=str(restart))
        self.log.restart_at(restart)
        return restart

    def received(self, size: int) -> None:
        """The source has sent so many bytes."""
        self._measures.received.add(size)

    def append(self, sealed: Sealed) -> None:
        with self.clock.during("append"):
            marker = self.log.append(
                sealed.raw,
                sealed.schemas,
                first=sealed.first,
                high=sealed.high,
                annotations=sealed.annotations,
            )
        self._measures.appended(sealed.raw, marker.frame_bytes)

    def tend(self, lowest: Cursor) -> None:
        """Let go of what everyone below ``lowest`` has had; about once a second."""
        self._lowest = lowest
        result = self.log.retain(lowest, self._retention)
        kept = [segment.bytes for segment in self.log.manifest.segments if segment.high > lowest]
        self._needed_bytes = sum(kept) + self.log.active.bytes
        if result.evicted:
            _logger.warning("reader.evicted", segments=result.evicted, to=str(self.evicted))
        self.full = result.full
        self._measures.kept(len(self.log.manifest.segments), self._machine.left)
        if take_damage_report(self._directory):
            self._to_inspect = True
        self._look_at_inspection(lowest)

    @property
    def _evicts(self) -> bool:
        return self._retention.on_full == "evict"

    def at_limit(self) -> bool:
        """Whether one more batch must wait until something has gone."""
        return self.log.size_bytes >= self._retention.bytes_max

    @property
    def suspect(self) -> bool:
        """Something is damaged that the source can send again, from a new connection."""
        return self._to_cut is not None

    @property
    def end(self) -> Cursor:
        return self.log.end

    @property
    def evicted(self) -> Cursor:
        return self.log.manifest.evicted

    def safe(self, restart: Cursor) -> Cursor:
        """Returns what may be confirmed to the slot: its ``confirmed_flush_lsn``.

        ``restart`` is the restart cursor: up to there every consumer is served.
        """
        safe = self.kept(restart)
        if self._durability == "disk":
            safe = min(restart, safe)
        self._confirmed = max(self._confirmed, safe)
        return safe

    def kept(self, restart: Cursor) -> Cursor:
        """Up to where the log outlives a crash, or it is no longer needed."""
        kept = min(restart, self.end) if self._durability == "memory" else self.log.durable_end
        return kept if self._hold is None else min(kept, self._hold)

    def _inspect(self, lowest: Cursor) -> None:
        self._end_inspection()
        self._inspection = self.log.inspect(lowest, self._confirmed)
        self._to_inspect = False
        # What the source could still send is not confirmed before it was read back.
        self._hold = self._confirmed

    def _look_at_inspection(self, lowest: Cursor) -> None:
        """Take what an inspection found; begin another where one is due."""
        inspection = self._inspection
        if inspection is None:
            if self._to_inspect and self._since_inspection_s() >= self._inspection_pause_s:
                self._inspected_at = time.monotonic()
                self._inspect(lowest)
            return
        if inspection.tail_is_whole:
            self._hold = None
        ended = inspection.wait(0)
        found = inspection.found
        if found is None:
            if ended:  # an error ended it, so another one follows
                self._inspection, self._to_inspect = None, True
            return
        self._inspection = None
        self._to_inspect |= inspection.left_out
        self._inspection_pause_s = (
            min(self._inspection_pause_s * 2, _INSPECTION_PAUSE_MAX_S)
            if inspection.left_out
            else _INSPECTION_PAUSE_S
        )
        if found.refetchable(lowest, self._confirmed) is not None:
            self._to_cut = found
            return
        if not inspection.left_out:
            self._hold = None
        try:
            self.log.heal(found, lowest, self._confirmed)
        except TransientError:
            self._to_inspect = True
            raise

    def _since_inspection_s(self) -> float:
        return time.monotonic() - self._inspected_at

    def _end_inspection(self) -> None:
        if self._inspection is not None:
            self._inspection.close()
            self._inspection = None

    def conditions(self, held_by: str | None) -> list[Condition]:
        """What is wrong with the log and its machine.

        ``held_by`` is the consumer that the log keeps the most for.
        """
        found, bytes_max = self._machine.conditions(), self._retention.bytes_max
        holder = "no consumer" if held_by is None else f"consumer {held_by}"
        fix = (
            f"mend, resume or remove {holder}, give it a max_backlog, or raise log.max_bytes; "
            "walbrook.backlogs shows what each consumer has before it"
        )
        if self.full:
            found.append(
                Condition(
                    "log_full",
                    "error",
                    f"the log has reached log.max_bytes ({bytes_max} bytes) of undelivered "
                    f"changes, because of {holder}; reading waits, and the source keeps its WAL",
                    fix,
                )
            )
        elif self._needed_bytes >= _FILLING * bytes_max:
            at_limit = "evicts the oldest" if self._evicts else "stops reading, for all consumers"
            found.append(
                Condition(
                    "log_filling",
                    "warning",
                    f"undelivered changes take more than {_FILLING:.0%} of log.max_bytes "
                    f"({bytes_max} bytes), because of {holder}; at the limit the log {at_limit}",
                    fix,
                )
            )
        if self.log.kept is not None:
            found.append(
                Condition(
                    "log_damaged_past",
                    "warning",
                    f"something in the log did not read back: {self.log.kept}",
                    "nothing that anyone waits for is missing; walbrook log verify lists it all",
                )
            )
        found += [_damage(one, self._lowest) for one in self.log.damaged]
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
        self._end_inspection()
        self.log.close()

    def _open(self) -> LogWriter:
        return LogWriter(
            self._directory,
            term=self._term,
            durability=self._durability,
            limits=self._limits,
            tier=self._tier,
            to_heal=True,
            on_synced=self._measures.synced,
        )


def _damage(found: CheckedSegment, lowest: Cursor) -> Condition:
    first, high = found.lost
    if high <= lowest:
        return Condition(
            "log_damaged_past",
            "warning",
            f"something in the log does not read back: {found.what}",
            "nothing that anyone waits for is missing; walbrook log verify lists it all",
        )
    return Condition(
        "log_damaged",
        "error",
        f"{found.what}: changes from {first} to {high} do not read back, and the source no longer "
        "has them. Consumers that stand before them stop there; the others go on",
        "restore the file from a copy; or, for each consumer that stops there, go on without: "
        f"SELECT walbrook.skip_to(consumer, '{high}'); walbrook log verify lists all damage",
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

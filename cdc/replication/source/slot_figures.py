"""What a slot costs its server, and which transaction pins it.

A slot cannot let go of the WAL since the beginning of the oldest transaction that has written.
The query text of that transaction is never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from cdc.cursor import parse_lsn
from cdc.metrics import catalogue
from cdc.state.health import Condition

READ_FIGURES: Final = """
SELECT to_jsonb(s), to_jsonb(t),
       CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
            ELSE pg_current_wal_lsn() END::text
  FROM pg_replication_slots s LEFT JOIN pg_stat_replication_slots t USING (slot_name)
 WHERE s.slot_name = %s
"""
READ_OLDEST: Final = """
SELECT pid, gid, owner, application, state, xid,
       extract(epoch FROM clock_timestamp() - began_at)::float8, query_start
  FROM (SELECT pid, NULL::text AS gid, usename::text AS owner, application_name AS application,
               state, backend_xid::text AS xid, xact_start AS began_at, query_start
          FROM pg_stat_activity WHERE backend_xid IS NOT NULL
         UNION ALL
        SELECT NULL, gid, owner::text, NULL, 'prepared', transaction::text, prepared, NULL
          FROM pg_prepared_xacts) AS writing
 ORDER BY age(xid::xid) DESC LIMIT 1
"""
"""The oldest transaction that has written; its times are null for a role that may not see them."""

_COUNTED: Final = (
    "spill_txns",
    "spill_count",
    "spill_bytes",
    "stream_txns",
    "stream_count",
    "stream_bytes",
    "total_txns",
    "total_bytes",
)
WAL_STATUSES: Final = ("reserved", "extended", "unreserved", "lost")


@dataclass(frozen=True)
class SlotFigures:
    """Distances in bytes of WAL, and what decoding for the slot has done since the last reset."""

    confirmed_to_current: int
    restart_to_confirmed: int
    retained: int
    wal_status: str | None
    safe_bytes: int | None
    counted: Mapping[str, int]


@dataclass(frozen=True)
class OldestTransaction:
    """The oldest transaction of the server that has written; ``pid`` or ``gid`` names it."""

    pid: int | None
    gid: str | None
    owner: str | None
    application: str | None
    state: str | None
    xid: int
    age_s: float | None  # None: this role may not see it
    query_start: datetime | None

    def pins(self, age_s: float) -> Condition:
        """A warning that it has pinned the slot for longer than ``age_s``."""
        who = f"pid {self.pid}" if self.gid is None else f"prepared as {self.gid!r}"
        about = [who] + [f"{name} {value}" for name, value in self._known() if value]
        end = (
            f"SELECT pg_terminate_backend({self.pid})"
            if self.gid is None
            else f"COMMIT PREPARED or ROLLBACK PREPARED {self.gid!r}"
        )
        return Condition(
            "slot_pinned",
            "warning",
            f"a transaction that is open for more than {age_s:.0f} s pins the slot: the source "
            f"keeps all WAL since it began ({', '.join(about)})",
            f"let it end, or end it: {end}; service.health.long_transaction_s is the bound",
        )

    def _known(self) -> list[tuple[str, str | None]]:
        began = None if self.query_start is None else f"{self.query_start:%Y-%m-%d %H:%M:%S %z}"
        return [
            ("user", self.owner),
            ("application", self.application),
            ("state", self.state),
            ("last query begun", began),
        ]


def figures_of(row: tuple[object, ...] | None) -> SlotFigures | None:
    """Read a row of ``READ_FIGURES``; None while there is no slot, or it has no place."""
    if row is None or not row[2] or not isinstance(row[0], Mapping):
        return None
    slot: Mapping[str, Any] = row[0]
    statistics: Mapping[str, Any] = row[1] if isinstance(row[1], Mapping) else {}
    if not slot.get("confirmed_flush_lsn") or not slot.get("restart_lsn"):
        return None
    current = parse_lsn(str(row[2]))
    confirmed, restart = (parse_lsn(slot[name]) for name in ("confirmed_flush_lsn", "restart_lsn"))
    safe = slot.get("safe_wal_size")
    return SlotFigures(
        confirmed_to_current=max(0, current - confirmed),
        restart_to_confirmed=max(0, confirmed - restart),
        retained=max(0, current - restart),
        wal_status=slot.get("wal_status"),
        safe_bytes=None if safe is None else int(safe),
        counted={name: int(statistics[name]) for name in _COUNTED if statistics.get(name)},
    )


def oldest_of(row: tuple[Any, ...] | None) -> OldestTransaction | None:
    """Read a row of ``READ_OLDEST``."""
    if row is None:
        return None
    pid, gid, owner, application, state, xid, age_s, query_start = row
    return OldestTransaction(pid, gid, owner, application, state, int(xid), age_s, query_start)


def show_figures(source: str, figures: SlotFigures | None, oldest_s: float | None) -> None:
    """As metrics; what is not known is absent, and without a transaction the age is 0."""
    known = figures is not None
    if figures is not None:
        catalogue.SLOT_CONFIRMED_TO_CURRENT.of(source).set(figures.confirmed_to_current)
        catalogue.SLOT_RESTART_TO_CONFIRMED.of(source).set(figures.restart_to_confirmed)
        catalogue.SLOT_RETAINED.of(source).set(figures.retained)
        catalogue.SLOT_SAFE.of(source).set(figures.safe_bytes)
        for name in _COUNTED:
            catalogue.SLOT_DECODED.of(source, name).set(figures.counted.get(name, 0))
    status = figures.wal_status if figures is not None else None
    for each in WAL_STATUSES:
        catalogue.SLOT_WAL_STATUS.of(source, each).set(float(each == status) if known else None)
    catalogue.OLDEST_TRANSACTION.of(source).set((oldest_s or 0.0) if known else None)


class PinWatch:
    """Since when the oldest transaction is known, for a role that may not see when it began."""

    def __init__(self, bound_s: float) -> None:
        """``bound_s`` 0 gives no warning."""
        self._bound_s = bound_s
        self._xid: int | None = None
        self._since = 0.0  # monotonic
        self.age_s: float | None = None
        self.condition: Condition | None = None

    def note(self, oldest: OldestTransaction | None, now: float) -> None:
        """The oldest transaction as it was just seen."""
        if oldest is None:
            self._xid = self.age_s = self.condition = None
            return
        if oldest.xid != self._xid:
            self._xid, self._since = oldest.xid, now
        self.age_s = max(oldest.age_s or 0.0, now - self._since)
        pins = self._bound_s > 0 and self.age_s >= self._bound_s
        # In steps of the bound: a text that changes at each look would be written at each look.
        steps = self.age_s // self._bound_s if pins else 0
        self.condition = oldest.pins(steps * self._bound_s) if pins else None

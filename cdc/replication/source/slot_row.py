"""A row of ``pg_replication_slots``, whatever the version, and what is wrong with it.

The row is read as JSON, because each major version has other columns. Preflight and the reader
share the judgement; what they make of it differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cdc.cursor import parse_lsn

PLUGIN: Final = "pgoutput"
READ_SLOT: Final = """
SELECT to_jsonb(s), current_database()::text,
       (SELECT setting::bigint FROM pg_settings WHERE name = 'max_slot_wal_keep_size'),
       pg_is_in_recovery()
  FROM pg_replication_slots s WHERE slot_name = %s
"""
_MIB: Final = 1 << 20
_SAFE_BYTES: Final = 256 * _MIB


@dataclass(frozen=True)
class Fault:
    """Why a slot cannot be read: a short name and a sentence."""

    kind: str
    what: str


@dataclass(frozen=True)
class SlotRow:
    """A slot as the server shows it."""

    name: str
    slot_type: str
    plugin: str | None
    database: str | None
    temporary: bool
    confirmed_lsn: int
    active_pid: int | None
    wal_status: str | None
    safe_bytes: int | None
    limit_bytes: int | None  # max_slot_wal_keep_size; nothing without a limit
    invalidation: str | None
    two_phase: bool
    failover: bool
    synced: bool

    @property
    def lost(self) -> bool:
        return self.wal_status == "lost" or self.invalidation is not None

    @property
    def at_risk(self) -> bool:
        """Whether the server will soon remove WAL that the slot still needs."""
        if self.wal_status == "unreserved":
            return True
        if self.lost or self.safe_bytes is None or self.limit_bytes is None:
            return False
        # With a limit below the usual margin, half of it is the margin.
        return self.safe_bytes < max(
            self.limit_bytes // 10, min(_SAFE_BYTES, self.limit_bytes // 2)
        )


def slot_row(name: str, row: Mapping[str, Any], limit_mib: int | None) -> SlotRow:
    """Read the JSON form of a row; columns that the version lacks count as not set."""
    confirmed, safe = row.get("confirmed_flush_lsn"), row.get("safe_wal_size")
    return SlotRow(
        name=name,
        slot_type=row["slot_type"],
        plugin=row["plugin"],
        database=row["database"],
        temporary=row["temporary"],
        confirmed_lsn=parse_lsn(confirmed) if confirmed else 0,
        active_pid=row.get("active_pid"),
        wal_status=row["wal_status"],
        safe_bytes=None if safe is None else int(safe),
        limit_bytes=None if limit_mib is None or limit_mib < 0 else limit_mib * _MIB,
        invalidation=row.get("invalidation_reason")
        or ("conflict with recovery" if row.get("conflicting") else None),
        two_phase=bool(row.get("two_phase")),
        failover=bool(row.get("failover")),
        synced=bool(row.get("synced")),
    )


def slot_fault(slot: SlotRow, database: str) -> Fault | None:
    """The first reason why the slot cannot serve ``database``."""
    name = slot.name
    if slot.slot_type != "logical":
        return Fault("slot_physical", f"The slot {name} is a physical one; a logical one is needed")
    if slot.database != database:
        where = slot.database
        return Fault(
            "slot_database", f"The slot {name} belongs to the database {where}, not {database}"
        )
    if slot.plugin != PLUGIN:
        return Fault(
            "slot_plugin", f"The slot {name} uses the plugin {slot.plugin}; {PLUGIN} is needed"
        )
    if slot.temporary and not slot.synced:
        return Fault("slot_temporary", f"The slot {name} is temporary and ends with its connection")
    if slot.lost:
        return Fault(
            "slot_lost",
            f"The slot {name} is lost ({slot.invalidation or 'its WAL was removed'}): changes "
            "after its position cannot be read any more",
        )
    return None


def repair(source: str) -> str:
    """What bridges changes that a slot has lost."""
    return f"walbrook repair {source} makes a new slot and bridges what was lost"


def recreate(source: str) -> str:
    """What to do about a slot that is lost."""
    return (
        f"{repair(source)}; or, to let it go, drop the slot if it is there, create it again and "
        f"accept the gap: SELECT walbrook.accept_gap('{source}', lsn) with its "
        "confirmed_flush_lsn, the service being stopped"
    )

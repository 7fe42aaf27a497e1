"""Is this the server, the history and the slot that we were reading? Asked at every connect.

Positions mean something within one history only: one cluster, and one line of timelines. A standby
that was promoted starts a new timeline at a fork; what was read below the fork is the same in both
histories, what was read above it exists in the old one alone. Invariant: every answer
that a decision rests on comes over one connection, so that it describes one server, and only rights
of a role with REPLICATION are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from cdc.cursor import Cursor, format_lsn, parse_lsn
from cdc.errors import GapError, SourceError, TransientError
from cdc.replication.source.slot_row import SlotRow, repair

_SERVER = """
SELECT current_setting('server_version_num')::int, pg_is_in_recovery(),
       CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
            ELSE pg_current_wal_flush_lsn() END::text,
       extract(epoch FROM pg_postmaster_start_time())::text
"""
_START_ANEW = (
    "start anew: empty log.directory, delete the source's row in walbrook.sources, recreate the "
    "slot, and give the sinks empty destinations"
)


@dataclass(frozen=True)
class Recorded:
    """What ``walbrook.sources`` says we were reading; no timeline: none was recorded yet."""

    system_identifier: str
    timeline: int | None
    publication_oid: int | None = None
    source: str = "source"  # its name, for the fix in an error


@dataclass(frozen=True)
class Server:
    """Which server answers, and where its history stands."""

    system_identifier: str
    timeline: int
    database: str
    version: int  # as Postgres numbers them: 180001
    in_recovery: bool
    end_lsn: int  # of its WAL; on a standby, of what it has replayed
    started_at: str  # tells one server from another with the same history


@dataclass(frozen=True)
class ServerHistory:
    """A server of the cluster that is recorded, and how its history goes on from there."""

    server: Server
    failed_over_from: int | None  # the recorded timeline, if the server is on a later one
    fork_lsn: int | None  # where that timeline ended in this server's history


@dataclass(frozen=True)
class Identity(ServerHistory):
    """A server that is the one recorded, with a slot that can be read."""

    slot: SlotRow
    publication_oid: int
    source: str

    @property
    def system_identifier(self) -> str:
        return self.server.system_identifier

    @property
    def timeline(self) -> int:
        return self.server.timeline

    @property
    def confirmed(self) -> int:
        """The LSN below which the slot gives nothing any more."""
        return self.slot.confirmed_lsn


def identify(replication: psycopg.Connection[Any]) -> Server:
    """Ask the server over a replication connection, which alone knows its timeline for certain."""
    system = replication.execute("IDENTIFY_SYSTEM").fetchone()
    facts = replication.execute(_SERVER).fetchone()
    assert system is not None
    assert facts is not None
    version, in_recovery, end, started_at = facts
    return Server(
        system_identifier=str(system[0]),
        timeline=int(system[1]),
        database=str(system[3]),
        version=int(version),
        in_recovery=bool(in_recovery),
        end_lsn=parse_lsn(str(end)) if end else 0,
        started_at=str(started_at),
    )


def identify_timeline(replication: psycopg.Connection[Any]) -> int:
    """The timeline that the server is on; a standby, what it has replayed of."""
    system = replication.execute("IDENTIFY_SYSTEM").fetchone()
    assert system is not None
    return int(system[1])


def check_cluster(server: Server, recorded: Recorded) -> None:
    """Refuse another cluster, and a timeline older than the one that was read."""
    if server.system_identifier != recorded.system_identifier:
        raise SourceError(
            f"another cluster answers (system identifier {server.system_identifier}, recorded "
            f"{recorded.system_identifier}), whose positions mean nothing here",
            fix=f"point the source back at its own server, or {_START_ANEW}",
            kind="other_cluster",
        )
    if recorded.timeline is not None and server.timeline < recorded.timeline:
        raise GapError(
            f"the server is on timeline {server.timeline}, but timeline {recorded.timeline} was "
            "read already: this is the server from before a failover, or an old backup",
            fix="point the source at the server that took over",
            kind="older_timeline",
        )


def find_fork(
    replication: psycopg.Connection[Any], server: Server, recorded: Recorded
) -> int | None:
    """Where the recorded timeline ended in the server's history; nothing if it is still on it."""
    if recorded.timeline is None or recorded.timeline == server.timeline:
        return None
    row = replication.execute(f"TIMELINE_HISTORY {server.timeline:d}".encode()).fetchone()
    content = row[1] if row else b""
    text = content.decode(errors="replace") if isinstance(content, bytes) else str(content)
    fork = parse_history(text).get(recorded.timeline)
    if fork is None:
        raise _diverged(
            f"timeline {recorded.timeline}, which was read, is no ancestor of timeline "
            f"{server.timeline}, on which the server is"
        )
    return fork


def parse_history(text: str) -> dict[int, int]:
    """Timeline → the LSN at which it ended, from a timeline history file."""
    ends: dict[int, int] = {}
    for line in text.splitlines():
        fields = line.split("#", 1)[0].split()
        if len(fields) >= 2 and fields[0].isdigit():
            ends[int(fields[0])] = parse_lsn(fields[1])
    return ends


def check_history(history: ServerHistory, resume: Cursor) -> None:
    """Refuse a position, below which everything was read, that this history does not have."""
    server = history.server
    if history.fork_lsn is not None and resume > (history.fork_lsn, 0):
        raise _diverged(
            f"the server that took over has the history of timeline {history.failed_over_from} "
            f"only up to {format_lsn(history.fork_lsn)}, but {resume} was read: the changes "
            "between were delivered and do not exist there, and what it writes now under the same "
            "positions would be taken for known"
        )
    if server.end_lsn < resume.lsn:
        end = format_lsn(server.end_lsn)
        if server.in_recovery:
            raise TransientError(
                f"the standby has replayed to {end}, not yet to {resume}", kind="standby_behind"
            )
        raise GapError(
            f"the source's WAL ends at {end}, before {resume}, up to which it was read: "
            "this is an older state of the database (a restore, or a standby that was behind), "
            "and what it writes now under the same positions would be taken for known",
            fix=_START_ANEW,
            kind="older_history",
        )


def check_resume(identity: Identity, resume: Cursor) -> None:
    """Refuse to go on from ``resume`` where that would repeat, mix up or silently skip changes.

    Everything below ``resume`` was read; nothing at or above it.
    """
    check_history(identity, resume)
    slot = identity.slot
    if slot.confirmed_lsn > resume.lsn:
        confirmed = format_lsn(slot.confirmed_lsn)
        raise GapError(
            f"slot {slot.name} stands at {confirmed}, beyond {resume}, the first change we "
            "still need: the changes between are gone from the source",
            fix=f"{repair(identity.source)}; or, to let these changes go, stop the service and "
            f"call SELECT walbrook.accept_gap('{identity.source}', '{confirmed}')",
            kind="slot_ahead",
        )


def _diverged(what: str) -> GapError:
    return GapError(what, fix=_START_ANEW, kind="diverged")

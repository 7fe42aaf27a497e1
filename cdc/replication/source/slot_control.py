"""The reader's ordinary connection to the source: the lock on the slot, and what the catalog says.

The lock is a session advisory lock, so that of two readers of one slot the second waits and says
why. Before anything is read, ``look`` and ``check`` ask whether server, history and slot are those
that were read before; ``check_again`` asks it of the connection that streams. Invariant: no answer
is waited for longer than a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg

from cdc.connection import LIVENESS, connect, with_options
from cdc.cursor import Cursor, format_lsn
from cdc.decoding.catalog import CatalogNote
from cdc.decoding.relation import Relation
from cdc.errors import GapError, SourceError, TransientError
from cdc.replication.deadline import deadline
from cdc.replication.source.catalog import ask_catalog
from cdc.replication.source.identity import (
    Identity,
    Recorded,
    Server,
    ServerHistory,
    check_cluster,
    check_history,
    check_resume,
    find_fork,
    identify,
    identify_timeline,
)
from cdc.replication.source.slot_row import (
    READ_SLOT,
    SlotRow,
    recreate,
    repair,
    slot_fault,
    slot_row,
)

_ANSWER_S = 15.0  # a little above the server's own bound on a statement

_LOCK = "SELECT pg_try_advisory_lock(hashtextextended('walbrook.slot.' || %s, 0))"
_STARTED_AT = "SELECT extract(epoch FROM pg_postmaster_start_time())::text"
_PUBLICATION = "SELECT oid FROM pg_publication WHERE pubname = %s"

_FIXES = {
    "slot_physical": "configure a logical slot",
    "slot_database": "configure a slot of this database, or the database of the slot",
    "slot_plugin": "configure a slot that was created with pgoutput",
    "slot_temporary": "configure a slot that is not temporary",
}


class SlotControl:
    """The ordinary connection to the source: lock first, then look at the slot."""

    def __init__(self, dsn: str, slot: str, publication: str) -> None:
        self._dsn = dsn
        self._slot = slot
        self._publication = publication
        self._standby: psycopg.Connection[tuple[Any, ...]] | None = None
        with _answering():
            self._connection = connect(dsn, name=f"{slot}:lock", statement_s=10)
        try:
            self._lock()
        except BaseException:
            self._connection.close()
            raise

    def _lock(self) -> None:
        slot = self._slot
        with _answering(), deadline(self._connection, _ANSWER_S):
            row = self._connection.execute(_LOCK, (slot,)).fetchone()
        if row is None or not row[0]:
            raise TransientError(
                f"another service reads slot {slot}",
                fix="stop the other one; this one goes on by itself once the slot is free",
                kind="slot_busy",
            )

    def look(self, recorded: Recorded) -> Identity:
        """Who answers and where its slot stands; refuses what no position could make right."""
        with _answering(), self._replication() as replication:
            server = identify(replication)
            check_cluster(server, recorded)
            self.end_lsn = server.end_lsn
            row = replication.execute(READ_SLOT, (self._slot,)).fetchone()
            published = replication.execute(_PUBLICATION, (self._publication,)).fetchone()
            fork = find_fork(replication, server, recorded)
            self._check_same(server.started_at)
        slot = None if row is None else slot_row(self._slot, row[0], row[2])
        usable = _usable(self._slot, slot, server, recorded.source)
        if published is None:
            raise publication_missing(self._publication)
        if recorded.publication_oid not in (None, published[0]):
            raise GapError(
                f"the publication {self._publication} was dropped and created again: what was "
                "committed between never comes through the slot",
                fix=f"{repair(recorded.source)}; or, to let these changes go, stop the service and "
                f"accept the gap up to now: SELECT walbrook.accept_gap('{recorded.source}', "
                f"'{format_lsn(server.end_lsn)}')",
                kind="publication_replaced",
            )
        return Identity(
            server=server,
            slot=usable,
            publication_oid=int(published[0]),
            source=recorded.source,
            failed_over_from=None if fork is None else recorded.timeline,
            fork_lsn=fork,
        )

    def check_server(self, recorded: Recorded, reached: Cursor) -> Server:
        """The server, if its history has all that was read, whatever has become of the slot."""
        with _answering(), self._replication() as replication:
            server = identify(replication)
            check_cluster(server, recorded)
            fork = find_fork(replication, server, recorded)
            self._check_same(server.started_at)
        check_history(ServerHistory(server, recorded.timeline, fork), reached)
        return server

    def check_settled(self, identity: Identity, restart: Cursor) -> None:
        """Refuse a restart cursor that this server's history does not reach.

        Asked before the log is touched, which a restart cursor above its end would empty.
        """
        check_history(identity, restart)

    def check(self, identity: Identity, resume: Cursor) -> None:
        """Refuse a position from which going on would skip or mix up changes."""
        check_resume(identity, resume)

    def check_again(
        self, replication: psycopg.Connection[Any], identity: Identity, resume: Cursor
    ) -> None:
        """Whether the connection that will stream leads to the server that was looked at.

        Behind one address a failover can happen between two connections; and the last words of an
        earlier reader may have moved the slot since.
        """
        seen = identity.server
        with _answering(), deadline(replication, _ANSWER_S):
            server = identify(replication)
            if (server.started_at, server.timeline) != (seen.started_at, seen.timeline):
                raise _another_server()
            simple = psycopg.ClientCursor(replication)
            row = simple.execute(READ_SLOT, (self._slot,)).fetchone()
        slot = None if row is None else slot_row(self._slot, row[0], row[2])
        usable = _usable(self._slot, slot, server, identity.source)
        check_resume(replace(identity, slot=usable), resume)

    def require_timeline(self, identity: Identity) -> None:
        """Raise TransientError once a standby that is being read is on another timeline.

        A promotion does not end the stream. Invariant: what was read of a timeline goes into the
        log only after the timeline was recorded, which the next connection does first. Asked after
        changes were received and before they are kept, this holds for them. A primary stays on its
        timeline for as long as it runs, so only a standby is asked.
        """
        if not identity.server.in_recovery:
            return
        with _answering():
            if self._standby is None:
                self._standby = self._connect_replication()
            with deadline(self._standby, _ANSWER_S):
                timeline = identify_timeline(self._standby)
        if timeline != identity.timeline:
            raise TransientError(
                f"the standby that is being read went from timeline {identity.timeline} to "
                f"{timeline}: it was promoted, or follows a server that was",
                fix="it connects again and notes the new timeline",
                kind="promoted",
            )

    def catalog_of(self, relation: Relation, xid: int) -> CatalogNote:
        """What the catalog says of a table now, for a row of transaction ``xid``."""
        try:
            with _answering(), deadline(self._connection, _ANSWER_S):
                return ask_catalog(self._connection, relation, xid)
        except psycopg.Error as error:
            raise TransientError(
                f"the source's catalog cannot be asked about {relation}: {error}".strip(),
                kind="catalog",
            ) from error

    def close(self) -> None:
        self._connection.close()
        if self._standby is not None:
            self._standby.close()

    def _check_same(self, started_at: str) -> None:
        with deadline(self._connection, _ANSWER_S):
            row = self._connection.execute(_STARTED_AT).fetchone()
        if row is None or row[0] != started_at:
            raise _another_server()

    def _connect_replication(self) -> psycopg.Connection[tuple[Any, ...]]:
        """A replication connection, which speaks the simple protocol only."""
        return psycopg.connect(
            self._dsn,
            replication="database",
            autocommit=True,
            options=with_options(self._dsn, {"statement_timeout": "10s"}),
            application_name=f"walbrook:{self._slot}:look",
            cursor_factory=psycopg.ClientCursor,
            **LIVENESS,
        )

    @contextmanager
    def _replication(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """A short replication connection."""
        connection = self._connect_replication()
        try:
            with deadline(connection, _ANSWER_S):
                yield connection
        finally:
            connection.close()


def _usable(name: str, slot: SlotRow | None, server: Server, source: str) -> SlotRow:
    if slot is None:
        raise SourceError(
            f"replication slot {name} no longer exists, and with it every change that is not in "
            "the log" + ("; it was not on the standby" if server.in_recovery else ""),
            fix=recreate(source),
            kind="slot_missing",
        )
    if server.in_recovery and slot.synced:
        raise TransientError(
            f"slot {name} is a copy that this standby keeps in step with its primary; it can be "
            "read once the standby is promoted",
            fix="point the source at the primary",
            kind="slot_synced",
        )
    fault = slot_fault(slot, server.database)
    if fault is not None:
        fix = _FIXES.get(fault.kind) or recreate(source)
        raise SourceError(fault.what, fix=fix, kind=fault.kind)
    return slot


def publication_missing(name: str) -> SourceError:
    return SourceError(
        f"the publication {name} does not exist; what is committed without it never comes through "
        "the slot",
        fix="create it again as it was; changes committed meanwhile are lost to all sinks",
        kind="publication_missing",
    )


def _another_server() -> TransientError:
    return TransientError(
        "two connections to the source's address were answered by two servers",
        fix="it is tried again; if it stays, let the address lead to one server only",
        kind="two_servers",
    )


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except psycopg.OperationalError as error:
        raise TransientError(f"the source does not answer: {error}".strip()) from error

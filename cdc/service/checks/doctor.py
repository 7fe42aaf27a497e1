"""What is wrong with a source as seen from outside, and what will be, each with its fix.

The preflight says what keeps a reader from starting. Beside it stands what only shows after months:
large values that updates leave out, WAL that fills a disk, time-outs, transactions that stay open.
Invariant: nothing is changed at the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import psycopg
from psycopg import sql

from cdc.config import Config, Database
from cdc.errors import SourceError
from cdc.reach import reach
from cdc.replication.preflight import check_source
from cdc.replication.preflight.problem import SourceNotReadyError, SourceProblem, statement
from cdc.replication.preflight.tables import CatalogName
from cdc.service.checks.connections import is_backfilled
from cdc.service.process.prepare import tables_wanted

Connection = psycopg.Connection[tuple[Any, ...]]

_TABLES_MAX: Final = 20
_OPEN_S: Final = 900
_SENDER_TIMEOUT_MS: Final = 10_000

# Values of these columns may be stored apart; an update that leaves them alone does not send them.
_LARGE: Final = """
SELECT n.nspname, c.relname, array_agg(a.attname::text ORDER BY a.attnum)
  FROM pg_publication_tables p
  JOIN pg_namespace n ON n.nspname = p.schemaname
  JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
   AND a.attstorage IN ('x', 'e')
 WHERE p.pubname = %s AND c.relreplident <> 'f' AND c.reltoastrelid <> 0
   AND pg_relation_size(c.reltoastrelid) > 0
 GROUP BY 1, 2 ORDER BY 1, 2
"""
_SLOTS: Final = """
SELECT slot_name::text, active, wal_status, safe_wal_size,
       pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
                            ELSE pg_current_wal_lsn() END, restart_lsn)::bigint
  FROM pg_replication_slots WHERE restart_lsn IS NOT NULL ORDER BY 5 DESC
"""
_SETTINGS: Final = """
SELECT (SELECT setting::bigint FROM pg_settings WHERE name = 'max_slot_wal_keep_size'),
       (SELECT setting::bigint FROM pg_settings WHERE name = 'wal_sender_timeout'),
       (SELECT setting::bigint FROM pg_settings WHERE name = 'idle_replication_slot_timeout'),
       (SELECT setting FROM pg_settings WHERE name = 'synchronous_standby_names'),
       (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum'))
"""
_OPEN: Final = """
SELECT pid, usename::text, extract(epoch FROM clock_timestamp() - xact_start)::bigint,
       query_start::text, backend_xid IS NOT NULL
  FROM pg_stat_activity
 WHERE xact_start < clock_timestamp() - make_interval(secs => %s) AND pid <> pg_backend_pid()
   AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL) AND backend_type = 'client backend'
 ORDER BY xact_start LIMIT 5
"""
_PREPARED: Final = """
SELECT gid, extract(epoch FROM clock_timestamp() - prepared)::bigint FROM pg_prepared_xacts
 WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => %s)
 ORDER BY prepared LIMIT 5
"""


class Severity(StrEnum):
    """How much a finding matters."""

    PROBLEM = "problem"  # the source cannot be read as it is
    WARNING = "warning"  # it will become a problem, or changes arrive incomplete


@dataclass(frozen=True)
class Finding:
    """What was found, and the statement or the step that helps."""

    severity: Severity
    what: str
    fix: str


def examine(config: Config, database: Database) -> list[Finding]:
    """All findings about a source, the problems first."""
    wanted, schemas = tables_wanted(config, database)
    with reach(database.dsn(), f"database {database.name}") as connection:
        try:
            warnings = check_source(
                connection,
                database,
                wanted,
                schemas_wanted=schemas,
                reads=lambda schema, name: is_backfilled(config, database, schema, name),
            )
            problems: list[SourceProblem] = []
        except SourceNotReadyError as error:
            problems, warnings = list(error.problems), []
        except SourceError as error:
            problems, warnings = [SourceProblem(error.what, error.fix)], []
        warnings += _large_values(connection, database.publication.name)
        warnings += _settings(connection)
        warnings += _slots(connection, database.slot.name)
        warnings += _open_transactions(connection)
    return [
        *(Finding(Severity.PROBLEM, each.what, each.fix) for each in problems),
        *(Finding(Severity.WARNING, each.what, each.fix) for each in warnings),
    ]


def _large_values(connection: Connection, publication: str) -> Iterator[SourceProblem]:
    rows = connection.execute(_LARGE, (publication,)).fetchall()
    for schema, name, columns in rows[:_TABLES_MAX]:
        table = CatalogName(schema, name)
        yield SourceProblem(
            f"Updates of {table} leave out large values that did not change "
            f"({', '.join(columns)}): messages name them in metadata.unchanged",
            statement("ALTER TABLE {table} REPLICA IDENTITY FULL;", table=table.identifier)
            + " -- writes more WAL; only if consumers need the whole row",
        )
    if len(rows) > _TABLES_MAX:
        yield SourceProblem(
            f"The same holds of {len(rows) - _TABLES_MAX} more tables", "see above, table by table"
        )


def _settings(connection: Connection) -> Iterator[SourceProblem]:
    row = connection.execute(_SETTINGS).fetchone()
    assert row is not None
    keep_mb, sender_ms, idle_slot, standbys, synchronous = row
    if keep_mb == -1:
        yield SourceProblem(
            "max_slot_wal_keep_size is -1: a slot that nobody reads keeps WAL until the disk of "
            "the server is full",
            "ALTER SYSTEM SET max_slot_wal_keep_size = '100GB'; -- less than what is free\n"
            "SELECT pg_reload_conf();",
        )
    if sender_ms == 0:
        yield SourceProblem(
            "wal_sender_timeout is 0: after a cut connection the server holds the slot as active",
            "ALTER SYSTEM SET wal_sender_timeout = '60s'; SELECT pg_reload_conf();",
        )
    elif sender_ms < _SENDER_TIMEOUT_MS:
        yield SourceProblem(
            f"wal_sender_timeout is {sender_ms} ms: a short pause of the network ends the stream",
            "ALTER SYSTEM SET wal_sender_timeout = '60s'; SELECT pg_reload_conf();",
        )
    if idle_slot:
        yield SourceProblem(
            "idle_replication_slot_timeout is set: the server gives up a slot that is not read "
            "for that long, and its changes are lost",
            "ALTER SYSTEM SET idle_replication_slot_timeout = 0; SELECT pg_reload_conf();",
        )
    if standbys and not synchronous:
        yield SourceProblem(
            f"synchronous_standby_names is {standbys}, and no standby is synchronous: commits wait",
            "SELECT application_name, sync_state FROM pg_stat_replication; -- start the standby",
        )


def _slots(connection: Connection, ours: str) -> Iterator[SourceProblem]:
    for name, active, status, safe_bytes, retained in connection.execute(_SLOTS).fetchall():
        kept = f"the slot {name} keeps {retained / 2**30:,.1f} GiB of WAL"
        if status in ("unreserved", "lost"):
            yield SourceProblem(
                f"{kept}, and its wal_status is {status}",
                "walbrook repair brings back what a lost slot has lost"
                if name == ours
                else statement("SELECT pg_drop_replication_slot({s});", s=sql.Literal(name)),
            )
        elif safe_bytes is not None and safe_bytes < retained:
            yield SourceProblem(
                f"{kept}; after {max(safe_bytes, 0) / 2**30:,.1f} GiB more the server drops it",
                "start the service that reads it, or raise max_slot_wal_keep_size",
            )
        elif not active and name != ours and retained > 2**30:
            yield SourceProblem(
                f"{kept}, and nobody reads it",
                statement("SELECT pg_drop_replication_slot({s});", s=sql.Literal(name))
                + " -- if it is not needed any more",
            )


def _open_transactions(connection: Connection) -> Iterator[SourceProblem]:
    for pid, role, age_s, since, writes in connection.execute(_OPEN, (_OPEN_S,)).fetchall():
        held = "the slot keeps WAL from its start on" if writes else "it holds vacuum back"
        yield SourceProblem(
            f"A transaction of {role} (pid {pid}) has been open for {age_s:,} s, its last query "
            f"began {since}: {held}",
            f"SELECT pg_terminate_backend({int(pid)});",
        )
    for gid, age_s in connection.execute(_PREPARED, (_OPEN_S,)).fetchall():
        yield SourceProblem(
            f"The prepared transaction {gid} has waited for {age_s:,} s: the slot keeps its WAL",
            statement("ROLLBACK PREPARED {gid};", gid=sql.Literal(gid)) + " -- or COMMIT PREPARED",
        )

"""What is wrong, as rows of ``walbrook.health_events``: opened, kept fresh, resolved.

A reporter reports all that is wrong from where it stands, and what it no longer tells is resolved.
The reader reports for the source, under any name but those of the others; ``scope`` is how the
names begin under which another part reports. What concerns one consumer names it. Invariant: at
most one event of a kind is open for a source and consumer, and only the latest start of the service
(its term) writes any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from cdc.connection import Connection
from cdc.state.fence import IS_LATEST, fenced

Severity = Literal["warning", "error"]
Scope = Literal[
    "",
    "worker_",
    "feed_",
    "dead_letters",
    "queue_",
    "backfill_",
    "ledger_",
    "records_",
    "backlog_",
    "tables_",
    "destination_",
]

# Most of the time nothing changes; reading alone then keeps an idle source free of our writes.
_OPEN = """
SELECT kind, severity, what, fix, seen_at < clock_timestamp() - interval '10 seconds'
  FROM walbrook.health_events
 WHERE source = %s AND consumer IS NOT DISTINCT FROM %s AND resolved_at IS NULL
"""
_OPEN_OF_KIND = """
SELECT consumer, kind, severity, what, fix FROM walbrook.health_events
 WHERE source = %s AND kind = %s AND consumer IS NOT NULL AND resolved_at IS NULL
"""
_OPEN_OR_TOUCH = """
INSERT INTO walbrook.health_events (source, consumer, kind, severity, what, fix)
VALUES (%s, %s, %s, %s, %s, %s)
    ON CONFLICT (source, coalesce(consumer, ''), kind) WHERE resolved_at IS NULL
    DO UPDATE SET severity = excluded.severity, what = excluded.what, fix = excluded.fix,
                  seen_at = clock_timestamp()
"""
_RESOLVE = """
UPDATE walbrook.health_events SET resolved_at = clock_timestamp()
 WHERE source = %s AND consumer IS NOT DISTINCT FROM %s AND resolved_at IS NULL
   AND kind = ANY (%s::text[])
"""
# A condition that comes and goes must not fill the database.
_FORGET = """
DELETE FROM walbrook.health_events WHERE id IN (
    SELECT id FROM walbrook.health_events
     WHERE source = %s AND resolved_at IS NOT NULL ORDER BY id DESC OFFSET 1000)
"""
# Several services may share the state database: who holds the lock of a source serves it.
_UNSERVED = """
SELECT name FROM walbrook.sources
 WHERE name <> ALL (%s::text[])
   AND pg_try_advisory_xact_lock(hashtextextended('walbrook.source.' || name, 0))
"""
_RESOLVE_SOURCES = """
UPDATE walbrook.health_events SET resolved_at = clock_timestamp()
 WHERE source = ANY (%s::text[]) AND resolved_at IS NULL
"""
_STOP_SOURCES = """
UPDATE walbrook.sources SET state = 'stopped', state_since = clock_timestamp(), last_error = NULL
 WHERE name = ANY (%s::text[]) AND (state <> 'stopped' OR last_error IS NOT NULL)
"""
_RESOLVE_INACTIVE = """
UPDATE walbrook.health_events e SET resolved_at = clock_timestamp()
 WHERE e.source = %s AND e.consumer IS NOT NULL AND e.resolved_at IS NULL
   AND NOT EXISTS (SELECT FROM walbrook.consumers c
                    WHERE c.source = e.source AND c.name = e.consumer AND c.active)
"""


@dataclass(frozen=True)
class Condition:
    """Something that is wrong now: its short name, how bad, what, and what to do."""

    kind: str
    severity: Severity
    what: str
    fix: str = ""


def report_conditions(
    connection: Connection,
    source: str,
    term: int,
    conditions: Iterable[Condition],
    consumer: str | None = None,
    scope: Scope = "",
) -> None:
    """Make the open events of this source and consumer, within ``scope``, equal to ``conditions``.

    Of two conditions of one kind the first counts. Raises the fenced error if the term is not
    the latest any more; while nothing changes nothing is written.
    """
    reported: dict[str, Condition] = {}
    for condition in conditions:
        reported.setdefault(condition.kind, condition)
    rows = [
        row
        for row in connection.execute(_OPEN, (source, consumer)).fetchall()
        if _scope_of(str(row[0])) == scope
    ]
    fresh = {Condition(*row[:4]) for row in rows if not row[4]}  # type: ignore[arg-type]
    news = [condition for condition in reported.values() if condition not in fresh]
    gone = [str(row[0]) for row in rows if row[0] not in reported]
    if not news and not gone:
        return
    with connection.transaction():
        if connection.execute(IS_LATEST, (source, term)).fetchone() is None:
            raise fenced(source)
        for c in news:
            connection.execute(
                _OPEN_OR_TOUCH, (source, consumer, c.kind, c.severity, c.what, c.fix)
            )
        if gone:
            connection.execute(_RESOLVE, (source, consumer, gone))
            connection.execute(_FORGET, (source,))


def open_of_kind(connection: Connection, source: str, kind: str) -> dict[str, Condition]:
    """The open events of one kind by consumer, as an earlier process left them."""
    found = connection.execute(_OPEN_OF_KIND, (source, kind)).fetchall()
    return {str(row[0]): Condition(*row[1:]) for row in found}  # type: ignore[arg-type]


def resolve_inactive(connection: Connection, source: str) -> None:
    """Resolve the events of consumers that the configuration no longer names."""
    connection.execute(_RESOLVE_INACTIVE, (source,))


def resolve_unserved(connection: Connection, served: Sequence[str]) -> None:
    """Resolve the events of sources that no service serves; ``served`` are those of this one."""
    with connection.transaction():
        rows = connection.execute(_UNSERVED, (list(served),)).fetchall()
        if names := [name for (name,) in rows]:
            connection.execute(_RESOLVE_SOURCES, (names,))
            connection.execute(_STOP_SOURCES, (names,))


def _scope_of(kind: str) -> str:
    scopes = (scope for scope in get_args(Scope) if scope and kind.startswith(scope))
    return next(scopes, "")

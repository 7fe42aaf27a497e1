"""Cursors as rows: registering a source and its consumers, reading positions, settling.

Invariants: a consumer's cursor and the restart cursor never go back by our doing; the
restart cursor never passes an active consumer; only the latest start of the service (its term) may
settle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime

import orjson
import pyarrow as pa

from cdc.connection import Connection
from cdc.cursor import Cursor, cursor_of, format_lsn
from cdc.error_text import public_text
from cdc.errors import OperatorError, SourceError, TransientError
from cdc.failpoints import reached
from cdc.generation import Generation
from cdc.state.backfill_chunks import PIECE_DONE, PieceDone
from cdc.state.dead_letters import DeadLetter, bury
from cdc.state.feeds import FeedFigures, require_latest, show_feed
from cdc.state.fence import DURABLY, FENCE_TO_MOVE, fenced
from cdc.state.health import Condition, report_conditions, resolve_inactive
from cdc.state.ledgers import TRIM, sweep_ledgers
from cdc.state.queued_messages import let_wait, store

_READ_SOURCE = """
SELECT system_identifier, restart_lsn::text, restart_idx, slot
  FROM walbrook.sources WHERE name = %s FOR UPDATE
"""
_ADD_SOURCE = """
INSERT INTO walbrook.sources AS s
       (name, slot, publication, system_identifier, restart_lsn, term)
VALUES (%s, %s, %s, %s, %s::pg_lsn, 1)
    ON CONFLICT (name) DO UPDATE
   SET slot = excluded.slot, publication = excluded.publication, term = s.term + 1,
       system_identifier = excluded.system_identifier, restart_lsn = excluded.restart_lsn
RETURNING term
"""
_TAKE_OVER = """
UPDATE walbrook.sources SET slot = %s, publication = %s, term = term + 1
 WHERE name = %s RETURNING term
"""
# A source that was never ready has a row too, with the reason: without a system identifier.
_NOT_READY = """
INSERT INTO walbrook.sources AS s
       (name, slot, publication, system_identifier, restart_lsn, last_error)
VALUES (%s, %s, %s, '', '0/0', %s)
    ON CONFLICT (name) DO UPDATE
   SET state = 'stopped', last_error = excluded.last_error,
       state_since = CASE WHEN s.state = 'stopped' THEN s.state_since ELSE clock_timestamp() END
RETURNING term
"""
# One that comes back goes on at its cursor, a new one begins where its configuration says.
_ADD_CONSUMERS = """
INSERT INTO walbrook.consumers
       (source, name, initial_backfill, cursor_lsn, cursor_idx, begun_lsn, begun_idx)
SELECT source, name, backfill, lsn, idx, lsn, idx
  FROM (
    SELECT s.name AS source, n.name,
           (SELECT array_agg(t) FROM jsonb_array_elements_text(%(backfills)s::jsonb -> n.name) AS t)
           AS backfill,
           CASE n.start WHEN 'restart' THEN s.restart_lsn
                        WHEN 'earliest' THEN coalesce(s.earliest_lsn, s.restart_lsn)
                        WHEN 'latest' THEN greatest(s.log_lsn, s.restart_lsn, e.lsn)
                        ELSE split_part(n.start, ':', 1)::pg_lsn END AS lsn,
           CASE n.start WHEN 'restart' THEN s.restart_idx
                        WHEN 'earliest' THEN coalesce(s.earliest_idx, s.restart_idx)
                        WHEN 'latest' THEN CASE greatest(s.log_lsn, s.restart_lsn, e.lsn)
                                                WHEN s.log_lsn THEN s.log_idx
                                                WHEN s.restart_lsn THEN s.restart_idx
                                                ELSE 0 END
                        ELSE split_part(n.start, ':', 2)::bigint END AS idx
      FROM walbrook.sources s, (SELECT %(wal_end)s::pg_lsn AS lsn) e,
           unnest(%(names)s::text[], %(starts)s::text[]) AS n (name, start)
     WHERE s.name = %(source)s) AS starts
    ON CONFLICT (source, name) DO NOTHING
"""
_CONSUMER_ERROR = """
UPDATE walbrook.consumers SET last_error = %s, error_at = clock_timestamp()
 WHERE source = %s AND name = %s
"""
_DESCRIBE = """
UPDATE walbrook.consumers c
   SET destination = n.destination, priority = n.priority, backlog_max = n.backlog_max,
       backlog_on_full = n.on_full, place = n.place,
       rewind_ways = string_to_array(n.rewind_ways, ' '),
       reload_refusal = nullif(n.reload_refusal, ''),
       takes = n.takes::jsonb, repeats_by_key = n.repeats_by_key,
       -- Another destination lacks nothing of what this one was sent.
       top_lsn = CASE WHEN c.place = n.place THEN c.top_lsn END,
       top_idx = CASE WHEN c.place = n.place THEN c.top_idx END,
       lost_at = CASE WHEN c.place = n.place THEN c.lost_at END
  FROM unnest(%s::text[], %s::text[], %s::int[], %s::bigint[], %s::text[], %s::text[],
              %s::text[], %s::text[], %s::text[], %s::bool[])
         AS n (name, destination, priority, backlog_max, on_full, place, rewind_ways,
               reload_refusal, takes, repeats_by_key)
 WHERE c.source = %s AND c.name = n.name
"""
_MAKE_QUEUES = "SELECT walbrook.make_queue(id) FROM walbrook.consumers WHERE source = %s AND active"
_SET_ACTIVE = "UPDATE walbrook.consumers SET active = name = ANY (%s::text[]) WHERE source = %s"
_LEFT_BEHIND = """
SELECT c.name, c.cursor_lsn || ':' || c.cursor_idx
  FROM walbrook.consumers c
 WHERE c.source = %s AND c.active AND c.disabled_at IS NULL
   AND (c.cursor_lsn, c.cursor_idx) < (%s::pg_lsn, %s)
"""
_REGISTERED_SLOT = """
SELECT slot FROM walbrook.sources WHERE name = %s AND system_identifier <> ''
"""
_READ_RESTART = "SELECT restart_lsn::text, restart_idx FROM walbrook.sources WHERE name = %s"
_READ_POSITION = """
SELECT s.restart_lsn::text, s.restart_idx, low.lsn::text, low.idx, low.name, s.system_identifier,
       s.timeline, s.publication_oid,
       EXISTS (SELECT FROM walbrook.backfills b WHERE b.source = s.name AND b.state = 'running')
  FROM walbrook.sources s
  LEFT JOIN LATERAL (
       SELECT cursor_lsn AS lsn, cursor_idx AS idx, c.name FROM walbrook.consumers c
        WHERE c.source = s.name AND c.active AND c.disabled_at IS NULL
        ORDER BY 1, 2, 3 LIMIT 1) low ON true
 WHERE s.name = %s
"""
_READ_CONSUMERS = """
SELECT name, cursor_lsn::text, cursor_idx FROM walbrook.consumers WHERE source = %s AND active
"""
_SETTLE_CONSUMER = """
UPDATE walbrook.consumers
   SET cursor_lsn = %(lsn)s::pg_lsn, cursor_idx = %(idx)s,
       moved_at = CASE WHEN (cursor_lsn, cursor_idx) = (%(lsn)s::pg_lsn, %(idx)s) THEN moved_at
                       ELSE clock_timestamp() END,
       settled_commit = coalesce(%(commit)s, settled_commit), attempts = 0,
       deliver_ms = coalesce(%(deliver_ms)s, deliver_ms),
       delivered = delivered + %(delivered)s, absorbed = absorbed + %(absorbed)s,
       dead = dead + %(dead)s,
       lost_at = CASE WHEN (top_lsn, top_idx) > (%(before_lsn)s::pg_lsn, %(before_idx)s::bigint)
                      THEN coalesce(lost_at, clock_timestamp()) ELSE lost_at END,
       top_lsn = CASE WHEN (top_lsn, top_idx) >= (%(top_lsn)s::pg_lsn, %(top_idx)s::bigint)
                      THEN top_lsn ELSE coalesce(%(top_lsn)s::pg_lsn, top_lsn) END,
       top_idx = CASE WHEN (top_lsn, top_idx) >= (%(top_lsn)s::pg_lsn, %(top_idx)s::bigint)
                      THEN top_idx ELSE coalesce(%(top_idx)s::bigint, top_idx) END,
       last_error = %(error)s,
       error_at = CASE WHEN %(error)s::text IS NULL THEN NULL ELSE clock_timestamp() END
 WHERE source = %(source)s AND name = %(consumer)s
   AND cursor_lsn = %(since_lsn)s::pg_lsn AND cursor_idx = %(since_idx)s
   AND (%(generation)s::int IS NULL OR (generation, truncation) = (%(generation)s, %(truncation)s))
"""
# Without consumers nothing is held back: the restart cursor follows what was read.
_MOVE_RESTART = """
WITH low AS (
    SELECT cursor_lsn AS lsn, cursor_idx AS idx FROM walbrook.consumers
     WHERE source = %(source)s AND active AND disabled_at IS NULL
     UNION ALL SELECT %(lsn)s::pg_lsn, %(idx)s
     ORDER BY lsn, idx LIMIT 1)
UPDATE walbrook.sources s
   SET restart_lsn = low.lsn, restart_idx = low.idx, restart_at = clock_timestamp()
  FROM low
 WHERE s.name = %(source)s AND s.term = coalesce(%(term)s, s.term)
   AND (s.restart_lsn, s.restart_idx) < (low.lsn, low.idx)
"""


class MovedError(TransientError):
    """Somebody moved a consumer's cursor, or its destination, while its worker was serving it."""

    def __init__(self, consumer: str, since: Cursor) -> None:
        super().__init__(
            f"the cursor of consumer {consumer} is no longer at {since}: somebody moved it; it is "
            "served again from where it is now"
        )
        self.consumer = consumer


@dataclass(frozen=True)
class Settlement:
    """What one micro-batch did for one consumer: everything from ``since`` to ``cursor``.

    ``dead`` are the changes between the two that it goes on without; they are taken one by one.
    ``ledger`` is the name of its ledger, if it has one here. ``top_before`` and ``top`` are the
    last message that its destination had before, and that it has now; None if that is not known.
    """

    since: Cursor
    cursor: Cursor
    delivered: int = 0
    absorbed: int = 0
    last_commit: datetime | None = None
    error: str | None = None
    dead: Iterable[DeadLetter] = ()
    aside: pa.RecordBatch | None = None  # EVENT_SCHEMA, between the two: they wait in its queue
    ledger: str | None = None
    top_before: Cursor | None = None
    top: Cursor | None = None
    deliver_ms: float | None = None
    generation: Generation | None = None  # that it was delivered to; None: its caller has checked
    piece: PieceDone | None = None  # of a backfill: it ends at ``cursor``


@dataclass(frozen=True)
class Described:
    """What SQL is to know of a consumer from its configuration."""

    destination: str = ""
    priority: int = 5
    backlog_max: int | None = None
    backlog_on_full: str | None = None
    place: str = ""  # where its destination is, if that keeps a position
    rewind_ways: tuple[str, ...] = ()  # what a rewind can do with what its destination holds
    reload_refusal: str | None = None  # why its tables cannot be reloaded; None: they can
    takes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by key of its source
    repeats_by_key: bool = False  # whether it cannot repeat changes of a table without a key


def register_source(
    connection: Connection,
    *,
    name: str,
    slot: str,
    publication: str,
    system_identifier: str,
    slot_lsn: int,
    consumers: Iterable[str],
    starts: Mapping[str, str] | None = None,
    wal_end_lsn: int | None = None,
    described: Mapping[str, Described] | None = None,
    backfills: Mapping[str, list[str]] | None = None,
) -> int:
    """Make the rows of a source and its consumers, and their queues. Returns the new term.

    ``starts`` says where a consumer begins that has no row yet: ``restart`` (as where nothing is
    said), ``earliest``, ``latest`` (the end of the source's WAL, ``wal_end_lsn``) or a cursor.
    ``backfills`` says which tables' existing rows such a consumer gets; ``*`` stands for all.
    """
    with connection.transaction():
        row = connection.execute(_READ_SOURCE, (name,)).fetchone()
        if row is None or not row[0]:
            answer = connection.execute(
                _ADD_SOURCE, (name, slot, publication, system_identifier, format_lsn(slot_lsn))
            )
        else:
            _check_same_source(name, str(row[0]), system_identifier)
            answer = connection.execute(_TAKE_OVER, (slot, publication, name))
        term = answer.fetchone()
        names = list(consumers)
        connection.execute(_SET_ACTIVE, (names, name))
        begin = [(starts or {}).get(consumer, "restart") for consumer in names]
        connection.execute(
            _ADD_CONSUMERS,
            {
                "names": names,
                "starts": begin,
                "backfills": orjson.dumps(backfills or {}).decode(),
                "source": name,
                "wal_end": None if wal_end_lsn is None else format_lsn(wal_end_lsn),
            },
        )
        told = {consumer: (described or {}).get(consumer, Described()) for consumer in names}
        connection.execute(
            _DESCRIBE,
            (
                names,
                [each.destination for each in told.values()],
                [each.priority for each in told.values()],
                [each.backlog_max for each in told.values()],
                [each.backlog_on_full for each in told.values()],
                [each.place for each in told.values()],
                [" ".join(each.rewind_ways) for each in told.values()],
                [each.reload_refusal or "" for each in told.values()],
                [orjson.dumps(dict(each.takes)).decode() for each in told.values()],
                [each.repeats_by_key for each in told.values()],
                name,
            ),
        )
        connection.execute(_MAKE_QUEUES, (name,))
        sweep_ledgers(connection)
        resolve_inactive(connection, name)
    return int(str(term[0])) if term else 0


def registered_slot(connection: Connection, source: str) -> str | None:
    """The slot of a source that a service has served from this state database."""
    row = connection.execute(_REGISTERED_SLOT, (source,)).fetchone()
    return None if row is None else str(row[0])


def report_not_ready(
    connection: Connection, *, name: str, slot: str, publication: str, condition: Condition
) -> None:
    """Show in SQL why a source cannot be served; its reader does not run."""
    why = f"{condition.what}. To fix it: {condition.fix}" if condition.fix else condition.what
    row = connection.execute(_NOT_READY, (name, slot, publication, why)).fetchone()
    assert row is not None
    report_conditions(connection, name, int(str(row[0])), [condition])


def restart_cursor(connection: Connection, source: str) -> Cursor:
    """Everything below is settled for every consumer."""
    row = connection.execute(_READ_RESTART, (source,)).fetchone()
    if row is None:
        raise _no_row(source)
    return cursor_of(row[0], row[1])


@dataclass(frozen=True)
class SourcePosition:
    """What the reader must know of its source: where everyone stands, and whose history it is."""

    restart: Cursor
    lowest: Cursor  # of the active consumers: one that was moved back stands below the restart
    held_by: str | None  # the consumer that stands there: the log keeps what it lacks
    system_identifier: str
    timeline: int | None
    publication_oid: int | None
    is_backfilled: bool  # rows that are read wait for the log to pass where they were read


def source_position(connection: Connection, source: str) -> SourcePosition:
    """The position of a source, in one look."""
    row = connection.execute(_READ_POSITION, (source,)).fetchone()
    if row is None:
        raise _no_row(source)
    restart = cursor_of(row[0], row[1])
    lowest = restart if row[2] is None else cursor_of(row[2], row[3])
    held_by = None if row[4] is None else str(row[4])
    timeline, publication = (None if value is None else int(str(value)) for value in row[6:8])
    low = min(restart, lowest)
    return SourcePosition(restart, low, held_by, str(row[5]), timeline, publication, bool(row[8]))


def consumer_cursors(connection: Connection, source: str) -> dict[str, Cursor]:
    """The cursor of each active consumer of a source."""
    rows = connection.execute(_READ_CONSUMERS, (source,)).fetchall()
    return {str(name): cursor_of(lsn, idx) for name, lsn, idx in rows}


def settle(
    connection: Connection,
    *,
    source: str,
    term: int,
    run: int | None = None,
    read_to: Cursor,
    consumers: Mapping[str, Settlement],
    figures: FeedFigures | None = None,
) -> None:
    """Move the cursors of consumers in one transaction; ``read_to`` is how far the log was read.

    ``run`` is the process that settles, ``figures`` are those of its feed. Raises MovedError if
    somebody else moved a cursor meanwhile; nothing is settled then.
    """
    with connection.transaction():
        # Many take seconds, in which nothing is locked that others need: that comes after them.
        dead = {
            consumer: bury(connection, source, consumer, settlement.dead)
            for consumer, settlement in consumers.items()
        }
        stored = {
            consumer: store(connection, source, consumer, settlement.aside)
            for consumer, settlement in consumers.items()
            if settlement.aside is not None
        }
        if stored:
            # Sources before consumers, as everyone locks them.
            connection.execute(FENCE_TO_MOVE, (source, term))
            for consumer, rows in stored.items():
                let_wait(connection, source, consumer, rows)
        with connection.pipeline():
            # Sent together, answered together: what the server says is looked at before COMMIT.
            connection.execute(DURABLY)
            held = connection.execute(FENCE_TO_MOVE, (source, term))
            shown = None if run is None else show_feed(connection, source, run, figures)
            moved = {
                consumer: connection.execute(
                    _SETTLE_CONSUMER, _columns(source, consumer, settlement, dead[consumer])
                )
                for consumer, settlement in consumers.items()
            }
            for settlement in consumers.values():
                if settlement.ledger is not None:
                    connection.execute(TRIM, _place(settlement))
                if settlement.piece is not None:
                    connection.execute(PIECE_DONE, asdict(settlement.piece))
            move_restart(connection, source, read_to)
        if held.fetchone() is None:
            raise fenced(source)
        if run is not None and shown is not None:
            require_latest(source, run, shown)
        for consumer, answer in moved.items():
            if answer.rowcount != 1:
                raise MovedError(consumer, consumers[consumer].since)
    reached("settled")


def _columns(source: str, consumer: str, settlement: Settlement, dead: int) -> dict[str, object]:
    return {
        "source": source,
        "consumer": consumer,
        "since_lsn": format_lsn(settlement.since.lsn),
        "since_idx": settlement.since.idx,
        "generation": settlement.generation and settlement.generation.number,
        "truncation": settlement.generation and settlement.generation.truncation,
        **_place(settlement),
        "commit": settlement.last_commit,
        "delivered": settlement.delivered,
        "absorbed": settlement.absorbed,
        "dead": dead,
        "error": settlement.error,
        "deliver_ms": settlement.deliver_ms,
        **_cursor("before", settlement.top_before),
        **_cursor("top", settlement.top if settlement.top_before is not None else None),
    }


def _cursor(name: str, cursor: Cursor | None) -> dict[str, object]:
    lsn, idx = (None, None) if cursor is None else (format_lsn(cursor.lsn), cursor.idx)
    return {f"{name}_lsn": lsn, f"{name}_idx": idx}


def _place(settlement: Settlement) -> dict[str, object]:
    lsn, idx = settlement.cursor
    return {"ledger": settlement.ledger, "lsn": format_lsn(lsn), "idx": idx}


def move_restart(
    connection: Connection, source: str, read_to: Cursor, *, term: int | None = None
) -> None:
    """The restart cursor follows the lowest consumer, at most to ``read_to``; never back.

    A caller whose transaction holds the fence need not give its ``term``.
    """
    place = {"lsn": format_lsn(read_to.lsn), "idx": read_to.idx}
    connection.execute(_MOVE_RESTART, {"source": source, "term": term, **place})


def _no_row(source: str) -> OperatorError:
    return OperatorError(
        f"source {source} has no row in walbrook.sources", fix="start it with walbrook run"
    )


def _check_same_source(name: str, recorded: str, found: str) -> None:
    if recorded != found:
        raise SourceError(
            f"source {name} is another cluster than before (system identifier {found}, "
            f"recorded {recorded}), so its LSNs mean nothing here",
            fix=f"point it back, or start anew: delete the row '{name}' of walbrook.sources, empty "
            "log.directory, and give the sinks empty destinations, which remember old positions",
        )


def left_behind(connection: Connection, source: str, earliest: Cursor) -> dict[str, OperatorError]:
    """The consumers below what the log still holds: what they need next is gone.

    ``earliest`` is what the log itself says, once evicted changes were passed.
    """
    rows = connection.execute(
        _LEFT_BEHIND, (source, format_lsn(earliest.lsn), earliest.idx)
    ).fetchall()
    return {
        str(consumer): OperatorError(
            f"consumer {consumer} of source {source} stands at cursor {cursor}, and what follows "
            f"up to {earliest} is no longer kept",
            fix=f"to accept that gap, move its cursor to {earliest}, or delete the row "
            f"('{source}', '{consumer}') of walbrook.consumers and start again",
            kind="left_behind",
        )
        for consumer, cursor in rows
    }


def report_consumer(connection: Connection, source: str, consumer: str, error: Exception) -> None:
    """Note what keeps a consumer from being served; its next settlement takes it away."""
    connection.execute(_CONSUMER_ERROR, (public_text(error), source, consumer))

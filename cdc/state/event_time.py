"""How far consumers in event-time order have come, as rows: what was released, read and planned.

Such a consumer delivers out of its log's order, so its cursor alone does not say what it has. What
must always hold: of the changes from its cursor up to ``read``, exactly those due at or below
``floor`` are settled; and before a release is sent its bounds are stored (``plan_release``), so
that after a crash the same messages go out once more, in the same order and under the same numbers,
and whoever has some of them knows them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import numpy as np
import numpy.typing as npt

from cdc.connection import Connection
from cdc.cursor import Cursor, format_lsn, parse_lsn
from cdc.errors import OperatorError
from cdc.state.fence import FENCE, FENCE_TO_MOVE, fenced
from cdc.state.positions import MovedError

Integers = npt.NDArray[np.int64]

_PLACES_BITS: Final = 30
OUR_LSN: Final = 3
"""What is left of our numbers by eight: commit LSNs are multiples of it, so no change has one."""

_BEGIN = """
INSERT INTO walbrook.event_time (consumer, base_lsn) VALUES (%s, %s::pg_lsn) ON CONFLICT DO NOTHING
"""
_READ = """
SELECT base_lsn::text, sequence, watermark, planned, planned_from, planned_to
  FROM walbrook.event_time WHERE consumer = %s
"""
_READ_SOURCES = """
SELECT c.source, c.id, c.ledger::text, c.cursor_lsn::text, c.cursor_idx, c.paused_at IS NOT NULL,
       e.read_lsn::text, e.read_idx, e.settled_to, e.planned_lsn::text, e.planned_idx,
       e.finished_at IS NOT NULL, e.ledger <> c.ledger, e.ledger IS NULL,
       coalesce(s.log_lsn, s.restart_lsn)::text
  FROM walbrook.consumers c
  JOIN walbrook.sources s ON s.name = c.source
  LEFT JOIN walbrook.event_sources e ON e.consumer = c.id
 WHERE c.name = %s AND c.source = ANY (%s) AND c.active
"""
_STANDING = """
SELECT c.source, c.cursor_lsn::text, c.cursor_idx, c.ledger::text, c.paused_at IS NOT NULL,
       e.finished_at IS NOT NULL,
       EXISTS (SELECT FROM walbrook.gaps g
                WHERE g.source = c.source AND g.consumer = c.name AND g.told_at IS NULL)
  FROM walbrook.consumers c LEFT JOIN walbrook.event_sources e ON e.consumer = c.id
 WHERE c.name = %s AND c.source = ANY (%s) AND c.active
"""
_START_ANEW = """
UPDATE walbrook.event_time
   SET watermark = NULL, planned = false, planned_from = NULL, planned_to = NULL, sequence = %s
 WHERE consumer = %s
"""
_FORGET_EVENTS = "UPDATE walbrook.event_partitions SET last_event = NULL WHERE consumer = %s"
_FORGET_PLAN = """
UPDATE walbrook.event_sources SET planned_lsn = NULL, planned_idx = NULL WHERE consumer = %s
"""
_PUT_SOURCE = """
INSERT INTO walbrook.event_sources AS e (consumer, ledger, read_lsn, read_idx, settled_to)
SELECT c.id, %(ledger)s::uuid, %(lsn)s::pg_lsn, %(idx)s, %(settled_to)s
  FROM walbrook.consumers c WHERE c.id = %(id)s AND c.ledger = %(ledger)s::uuid
    ON CONFLICT (consumer) DO UPDATE
   SET ledger = excluded.ledger, read_lsn = excluded.read_lsn, read_idx = excluded.read_idx,
       settled_to = excluded.settled_to, planned_lsn = NULL, planned_idx = NULL
"""
_PLAN = """
UPDATE walbrook.event_time
   SET planned = true, planned_from = %(before)s, planned_to = %(to)s WHERE consumer = %(consumer)s
"""
_PLAN_SOURCE = """
UPDATE walbrook.event_sources e SET planned_lsn = %(lsn)s::pg_lsn, planned_idx = %(idx)s
  FROM walbrook.consumers c
 WHERE e.consumer = %(id)s AND c.id = e.consumer AND c.ledger = %(ledger)s::uuid
"""
_RELEASED = """
UPDATE walbrook.event_time
   SET watermark = %(watermark)s, sequence = %(sequence)s, planned = false, planned_from = NULL,
       planned_to = NULL, moved_at = clock_timestamp()
 WHERE consumer = %(consumer)s
"""
_NUMBERED = "UPDATE walbrook.event_time SET sequence = %s WHERE consumer = %s"
_SHOW = """
INSERT INTO walbrook.event_partitions AS p
       (consumer, table_name, watermark, idle_since, buffered, late)
SELECT %(id)s, n.* FROM unnest(%(table)s::text[], %(watermark)s::bigint[],
                               %(idle_since)s::timestamptz[], %(buffered)s::bigint[],
                               %(late)s::bigint[]) n
    ON CONFLICT (consumer, table_name) DO UPDATE
   SET watermark = excluded.watermark, idle_since = excluded.idle_since,
       buffered = excluded.buffered, late = excluded.late, shown_at = clock_timestamp()
"""
_KEEP_EVENTS = """
INSERT INTO walbrook.event_partitions AS p (consumer, table_name, last_event)
SELECT %(id)s, n.* FROM unnest(%(table)s::text[], %(last_event)s::bigint[]) n
    ON CONFLICT (consumer, table_name) DO UPDATE SET last_event = excluded.last_event
"""
_FORGET_PARTITIONS = """
DELETE FROM walbrook.event_partitions WHERE consumer = %s AND NOT table_name = ANY (%s::text[])
"""
_READ_PARTITIONS = """
SELECT table_name, last_event, late FROM walbrook.event_partitions WHERE consumer = %s
"""


@dataclass(frozen=True)
class SourceStanding:
    """Where a consumer stands in one of its databases."""

    id: int
    ledger: str
    cursor: Cursor
    paused: bool
    read: Cursor
    floor: int | None
    planned: Cursor | None
    finished: bool
    moved_back: bool  # since it was last written
    new: bool


@dataclass(frozen=True)
class Numbering:
    """The numbers of a consumer's messages: cursors that no change has, one after another."""

    base: int
    sequence: int

    def place(self, position: int) -> Cursor:
        """That of the message ``position`` from here on."""
        number = self.sequence + position
        high = number >> _PLACES_BITS
        return Cursor(self.base + 8 * high, number & ((1 << _PLACES_BITS) - 1))

    def positions(self, lsn: Integers, idx: Integers) -> Integers:
        """Of messages with these numbers, which they are from here on."""
        high = (lsn - self.base) // 8
        return (high << _PLACES_BITS) + idx - self.sequence

    def places(self, count: int) -> tuple[Integers, Integers]:
        """Those of the next ``count`` messages."""
        numbers = np.arange(self.sequence, self.sequence + count, dtype=np.int64)
        return self.base + 8 * (numbers >> _PLACES_BITS), numbers & ((1 << _PLACES_BITS) - 1)

    def after(self, messages: int) -> Numbering:
        return Numbering(self.base, self.sequence + messages)

    def beyond_all(self) -> Numbering:
        """Past every number that a release under way may have used."""
        return Numbering(self.base, ((self.sequence >> _PLACES_BITS) + 1) << _PLACES_BITS)


@dataclass(frozen=True)
class Planned:
    """The bounds of a release that was under way."""

    before: int | None
    to: int
    reads: dict[str, Cursor]


@dataclass(frozen=True)
class EventStanding:
    """All that is known of a consumer when it is served again."""

    numbering: Numbering
    watermark: int | None
    planned: Planned | None
    sources: dict[str, SourceStanding]


@dataclass(frozen=True)
class Look:
    """What an operator may have changed."""

    cursor: Cursor
    ledger: str
    paused: bool
    finished: bool
    untold: bool


@dataclass(frozen=True)
class PartitionRow:
    """What SQL shows of a partition."""

    table: str
    watermark: int | None
    idle_since: datetime | None
    buffered: int
    late: int


def take_up(connection: Connection, consumer: str, sources: Iterable[str]) -> EventStanding:
    """Where a consumer goes on; what it had in a database whose cursor was moved back is undone."""
    names = list(sources)
    with connection.transaction():
        rows = connection.execute(_READ_SOURCES, (consumer, names)).fetchall()
        found = {str(row[0]): _source(row) for row in rows}
        missing = [name for name in names if name not in found]
        if missing:
            raise OperatorError(
                f"consumer {consumer} has no active row for {', '.join(missing)} in "
                "walbrook.consumers",
                fix="start the service again: it makes it",
            )
        log_end = max(parse_lsn(str(row[14])) for row in rows)
        cursors = max(each.cursor.lsn for each in found.values())
        base = format_lsn((max(log_end, cursors) & ~7) | OUR_LSN)
        connection.execute(_BEGIN, (consumer, base))
        row = connection.execute(_READ, (consumer,)).fetchone()
        assert row is not None
        numbering = Numbering(parse_lsn(str(row[0])), int(str(row[1])))
        watermark = _number(row[2])
        planned = None
        if row[3]:
            reads = {n: each.planned for n, each in found.items() if each.planned is not None}
            planned = Planned(_number(row[4]), int(str(row[5])), reads)
        if any(each.moved_back for each in found.values()):
            # Its watermark begins anew: what comes again is not late. What a release under way has
            # sent may come again under other numbers.
            numbering, watermark, planned = numbering.beyond_all(), None, None
            connection.execute(_START_ANEW, (numbering.sequence, consumer))
            for each in found.values():
                connection.execute(_FORGET_PLAN, (each.id,))
        for each in found.values():
            if each.moved_back or each.new:
                connection.execute(_FORGET_EVENTS, (each.id,))
                _put_source(connection, each, each.cursor, None)
    return EventStanding(numbering, watermark, planned, found)


def _source(row: tuple[object, ...]) -> SourceStanding:
    cursor = Cursor(parse_lsn(str(row[3])), int(str(row[4])))
    moved = bool(row[12]) or bool(row[13])
    read = cursor if moved or row[6] is None else Cursor(parse_lsn(str(row[6])), int(str(row[7])))
    planned = None
    if not moved and row[9] is not None:
        planned = Cursor(parse_lsn(str(row[9])), int(str(row[10])))
    return SourceStanding(
        id=int(str(row[1])),
        ledger=str(row[2]),
        cursor=cursor,
        paused=bool(row[5]),
        read=max(cursor, read),
        floor=None if moved else _number(row[8]),
        planned=planned,
        finished=bool(row[11]),
        moved_back=bool(row[12]),
        new=bool(row[13]),
    )


def look(connection: Connection, consumer: str, sources: Iterable[str]) -> dict[str, Look]:
    """Where a consumer's rows stand now."""
    rows = connection.execute(_STANDING, (consumer, list(sources))).fetchall()
    return {
        str(source): Look(
            Cursor(parse_lsn(str(lsn)), int(str(idx))),
            str(ledger), bool(paused), bool(finished), bool(untold),
        )
        for source, lsn, idx, ledger, paused, finished, untold in rows
    }  # fmt: skip


def plan_release(
    connection: Connection,
    consumer: str,
    *,
    terms: Mapping[str, int],
    sources: Mapping[str, SourceStanding],
    before: int | None,
    to: int,
    reads: Mapping[str, Cursor],
) -> None:
    """Store what is about to be sent; MovedError if somebody has moved a cursor back."""
    with connection.transaction():
        fence(connection, terms)
        connection.execute(_PLAN, {"consumer": consumer, "before": before, "to": to})
        for name, each in sources.items():
            lsn, idx = reads[name]
            answer = connection.execute(
                _PLAN_SOURCE,
                {"id": each.id, "ledger": each.ledger, "lsn": format_lsn(lsn), "idx": idx},
            )
            if answer.rowcount != 1:
                raise MovedError(consumer, each.cursor)


def note_released(
    connection: Connection,
    consumer: str,
    *,
    numbering: Numbering,
    watermark: int | None,
    sources: Mapping[str, SourceStanding],
    reads: Mapping[str, Cursor],
    events: Mapping[str, Mapping[str, int]],
) -> None:
    """What was released is settled; inside the transaction that moves the consumer's cursors.

    ``events`` are the largest event times of each database's tables, of all that was read: no
    others may be taken up later, or what is read again would be late by itself.
    """
    connection.execute(
        _RELEASED,
        {"consumer": consumer, "sequence": numbering.sequence, "watermark": watermark},
    )
    for name, each in sources.items():
        _put_source(connection, each, reads[name], watermark)
        if seen := events[name]:
            columns = {"table": list(seen), "last_event": list(seen.values())}
            connection.execute(_KEEP_EVENTS, {"id": each.id, **columns})


def note_numbering(connection: Connection, consumer: str, numbering: Numbering) -> None:
    """Messages were sent that no cursor moves over."""
    connection.execute(_NUMBERED, (numbering.sequence, consumer))


def _put_source(
    connection: Connection, source: SourceStanding, read: Cursor, settled_to: int | None
) -> None:
    connection.execute(
        _PUT_SOURCE,
        {
            "id": source.id,
            "ledger": source.ledger,
            "lsn": format_lsn(read.lsn),
            "idx": read.idx,
            "settled_to": settled_to,
        },
    )


def fence(connection: Connection, terms: Mapping[str, int], *, to_move: bool = False) -> None:
    """Raise if another start of the service has taken over one of these sources.

    Those who then move cursors lock all of them first, in one order: a lock that is raised later
    can wait for one who waits for us.
    """
    for source in sorted(terms):
        query = FENCE_TO_MOVE if to_move else FENCE
        if connection.execute(query, (source, terms[source])).fetchone() is None:
            raise fenced(source)


def show_partitions(connection: Connection, consumer: int, rows: list[PartitionRow]) -> None:
    """Let SQL say what each partition of a consumer in one database is at."""
    with connection.transaction():
        connection.execute(_FORGET_PARTITIONS, (consumer, [row.table for row in rows]))
        if rows:
            names = ("table", "watermark", "idle_since", "buffered", "late")
            columns = {name: [getattr(row, name) for row in rows] for name in names}
            connection.execute(_SHOW, {"id": consumer, **columns})


def read_partitions(connection: Connection, consumer: int) -> dict[str, tuple[int | None, int]]:
    """Of each partition the largest event time that was seen, and how many came late."""
    rows = connection.execute(_READ_PARTITIONS, (consumer,)).fetchall()
    return {str(table): (_number(last), int(str(late))) for table, last, late in rows}


def _number(value: object) -> int | None:
    return None if value is None else int(str(value))

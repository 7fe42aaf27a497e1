"""How far consumers in event-time order have come, as rows: what was released, read and planned.

Such a consumer delivers out of its log's order, so its cursor alone does not say what it has.
Invariant: of the changes from its cursor up to ``read``, exactly those due at or below ``floor``
are settled; and before a release is sent its bounds are stored (``plan_release``), so that after a
crash the same messages go out once more, in the same order and under the same numbers, so a
destination recognises repeats. Where they would not be the same, because cursors or the
configuration were changed since, numbers begin that were never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import psycopg
import structlog
from psycopg.types.json import Jsonb

from cdc.connection import Connection
from cdc.cursor import Cursor, cursor_of, format_lsn, parse_lsn
from cdc.errors import OperatorError
from cdc.eventtime.arrival import Bound
from cdc.generation import FIRST, Generation
from cdc.state.event_fingerprint import EventFingerprint, mark_of
from cdc.state.event_numbers import OUR_LSN, Numbering
from cdc.state.event_partitions import Seen, forget_events, keep_seen
from cdc.state.feeds import require_latest, show_feed
from cdc.state.fence import FENCE, FENCE_TO_MOVE, fenced
from cdc.state.gaps import Gap
from cdc.state.positions import MovedError

_logger = structlog.get_logger("walbrook.event_time")

_BEGIN = """
INSERT INTO walbrook.event_time (consumer, base_lsn, order_mark, ordering)
VALUES (%s, %s::pg_lsn, %s, %s) ON CONFLICT DO NOTHING
"""
_READ = """
SELECT base_lsn::text, sequence, watermark, planned, planned_from, planned_to, order_mark, sent_mark
  FROM walbrook.event_time WHERE consumer = %s
"""
_ALL = "SELECT consumer FROM walbrook.event_time"
_READ_SOURCES = """
SELECT c.source, c.id, c.ledger::text, c.cursor_lsn::text, c.cursor_idx, c.paused_at IS NOT NULL,
       e.read_lsn::text, e.read_idx, e.settled_to, e.planned_lsn::text, e.planned_idx,
       e.finished_at IS NOT NULL, e.ledger <> c.ledger, e.ledger IS NULL,
       coalesce(s.log_lsn, s.restart_lsn)::text,
       (c.cursor_lsn, c.cursor_idx) > (e.cursor_lsn, e.cursor_idx), e.arrived,
       c.generation, c.truncation
  FROM walbrook.consumers c
  JOIN walbrook.sources s ON s.name = c.source
  LEFT JOIN walbrook.event_sources e ON e.consumer = c.id
 WHERE c.name = %s AND c.source = ANY (%s) AND c.active
"""
_RESUME = """
SELECT c.source, c.cursor_lsn::text, c.cursor_idx, c.ledger::text, c.paused_at IS NOT NULL,
       e.finished_at IS NOT NULL,
       EXISTS (SELECT FROM walbrook.gaps g
                WHERE g.source = c.source AND g.consumer = c.name AND g.reported_at IS NULL)
  FROM walbrook.consumers c LEFT JOIN walbrook.event_sources e ON e.consumer = c.id
 WHERE c.name = %s AND c.source = ANY (%s) AND c.active
"""
_START_ANEW = """
UPDATE walbrook.event_time
   SET watermark = %(watermark)s, planned = false, planned_from = NULL, planned_to = NULL,
       sequence = %(sequence)s, order_mark = %(order_mark)s, ordering = %(ordering)s,
       sent_mark = NULL
 WHERE consumer = %(consumer)s
"""
_FORGET_PLAN = """
UPDATE walbrook.event_sources SET planned_lsn = NULL, planned_idx = NULL WHERE consumer = %s
"""
_PUT_SOURCE = """
INSERT INTO walbrook.event_sources AS e
       (consumer, ledger, cursor_lsn, cursor_idx, read_lsn, read_idx, settled_to, arrived)
SELECT c.id, %(ledger)s::uuid, c.cursor_lsn, c.cursor_idx, %(lsn)s::pg_lsn, %(idx)s, %(settled_to)s,
       %(arrived)s
  FROM walbrook.consumers c WHERE c.id = %(id)s AND c.ledger = %(ledger)s::uuid
    ON CONFLICT (consumer) DO UPDATE
   SET ledger = excluded.ledger, cursor_lsn = excluded.cursor_lsn,
       cursor_idx = excluded.cursor_idx, read_lsn = excluded.read_lsn, read_idx = excluded.read_idx,
       settled_to = excluded.settled_to, arrived = excluded.arrived, planned_lsn = NULL,
       planned_idx = NULL
"""
_PLAN = """
UPDATE walbrook.event_time
   SET planned = true, planned_from = %(before)s, planned_to = %(to)s, sent_mark = %(mark)s
 WHERE consumer = %(consumer)s
"""
_PLAN_SOURCE = """
UPDATE walbrook.event_sources e
   SET planned_lsn = %(lsn)s::pg_lsn, planned_idx = %(idx)s, arrived = %(arrived)s
  FROM walbrook.consumers c
 WHERE e.consumer = %(id)s AND c.id = e.consumer AND c.ledger = %(ledger)s::uuid
"""
_RELEASED = """
UPDATE walbrook.event_time
   SET watermark = %(watermark)s, sequence = %(sequence)s, planned = false, planned_from = NULL,
       planned_to = NULL, sent_mark = NULL, moved_at = clock_timestamp()
 WHERE consumer = %(consumer)s
"""
_NUMBERED = "UPDATE walbrook.event_time SET sequence = %s, sent_mark = NULL WHERE consumer = %s"
_FORGET_PUSHED = "UPDATE walbrook.event_time SET pushed_to = NULL WHERE consumer = %s"
_FORGET_PUSHED_SOURCE = "UPDATE walbrook.event_sources SET pushed_to = NULL WHERE consumer = %s"
_TELL = "UPDATE walbrook.event_time SET sent_mark = %s WHERE consumer = %s"


@dataclass(frozen=True)
class SourceResumeState:
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
    cut: bool  # moved forward since then
    arrived: tuple[Bound, ...] = ()  # in processing-time order
    generation: Generation = FIRST  # of its destination; that of the first database counts

    def reset(self) -> SourceResumeState:
        """From its cursor on, as if nothing behind it had been read."""
        return replace(
            self, read=self.cursor, floor=None, planned=None, moved_back=True, arrived=()
        )


@dataclass(frozen=True)
class Planned:
    """The bounds of a release that was under way."""

    before: int | None
    to: int
    reads: dict[str, Cursor]


@dataclass(frozen=True)
class ResumeState:
    """All that is known of a consumer when it is served again."""

    numbering: Numbering
    watermark: int | None
    planned: Planned | None
    sources: dict[str, SourceResumeState]


@dataclass(frozen=True)
class Look:
    """What an operator may have changed."""

    cursor: Cursor
    ledger: str
    paused: bool
    finished: bool
    unreported: bool


def read_resume_state(
    connection: Connection,
    consumer: str,
    terms: Mapping[str, int],
    marks: EventFingerprint,
    *,
    gaps: Sequence[Gap] = (),
    log_end: Callable[[], int] = lambda: 0,
) -> ResumeState:
    """Where a consumer goes on; what it had in a database whose cursor was moved back is undone.

    ``terms`` are those of its databases, ``gaps`` those of which its sink gets a message first. Its
    numbers begin above ``log_end``, the last LSN of all of its logs: above every cursor that it can
    have had in commit order.
    """
    names = list(terms)
    with connection.transaction():
        fence(connection, terms)
        rows = connection.execute(_READ_SOURCES, (consumer, names)).fetchall()
        found = {str(row[0]): _source(row) for row in rows}
        missing = [name for name in names if name not in found]
        if missing:
            raise OperatorError(
                f"consumer {consumer} has no active row for {', '.join(missing)} in "
                "walbrook.consumers",
                fix="start the service again: it makes it",
            )
        found = {name: found[name] for name in names}
        row = connection.execute(_READ, (consumer,)).fetchone()
        if row is None:
            reported_end = max(parse_lsn(str(row[14])) for row in rows)
            highest = max(reported_end, log_end(), *(each.cursor.lsn for each in found.values()))
            base = format_lsn((highest & ~7) | OUR_LSN)
            connection.execute(_BEGIN, (consumer, base, marks.order, marks.ordering))
            row = connection.execute(_READ, (consumer,)).fetchone()
        assert row is not None
        return _taken_up(connection, consumer, row, found, marks, gaps)


def _taken_up(
    connection: Connection,
    consumer: str,
    row: tuple[object, ...],
    found: dict[str, SourceResumeState],
    marks: EventFingerprint,
    gaps: Sequence[Gap],
) -> ResumeState:
    numbering = Numbering(parse_lsn(str(row[0])), int(str(row[1])))
    watermark, planned = _number(row[2]), None
    if row[3]:
        reads = {n: each.planned for n, each in found.items() if each.planned is not None}
        planned = Planned(_number(row[4]), int(str(row[5])), reads)
    if row[6] != marks.order:
        # Other times of the same rows: which of them were released is not known any more.
        _logger.warning("event_time.begins_anew", consumer=consumer)
        found = {name: each.reset() for name, each in found.items()}
        connection.execute(_FORGET_PUSHED, (consumer,))
        for each in found.values():
            connection.execute(_FORGET_PUSHED_SOURCE, (each.id,))
    moved_back = any(each.moved_back for each in found.values())
    sent = mark_of_release(marks, found) if planned is not None else mark_of_gaps(gaps)
    if moved_back or row[7] not in (None, sent):
        # What is on its way may come again, under other numbers. Where something was moved back the
        # watermark begins again, too: what comes again is not late.
        watermark, planned = None if moved_back else watermark, None
        numbering = numbering.beyond_used()
        connection.execute(
            _START_ANEW,
            {"consumer": consumer, "watermark": watermark, "sequence": numbering.sequence,
             "order_mark": marks.order, "ordering": marks.ordering},
        )  # fmt: skip
        for each in found.values():
            connection.execute(_FORGET_PLAN, (each.id,))
    for each in found.values():
        if each.moved_back or each.new:
            forget_events(connection, each.id)
            _put_source(connection, each, each.cursor, None, ())
    return ResumeState(numbering, watermark, planned, found)


def mark_of_release(marks: EventFingerprint, sources: Mapping[str, SourceResumeState]) -> str:
    """What the messages of a release hang on: if it is the same, so are they."""
    places = [[name, each.id, each.ledger, str(each.cursor)] for name, each in sources.items()]
    return mark_of([marks.release, places])


def mark_of_gaps(gaps: Sequence[Gap]) -> str:
    """The same for telling of gaps."""
    return mark_of(["gaps", [[gap.id, str(gap.end)] for gap in gaps]])


def _source(row: tuple[object, ...]) -> SourceResumeState:
    cursor = cursor_of(row[3], row[4])
    moved = bool(row[12]) or bool(row[13])
    read = cursor if moved or row[6] is None else cursor_of(row[6], row[7])
    planned = None
    if not moved and row[9] is not None:
        planned = cursor_of(row[9], row[10])
    return SourceResumeState(
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
        cut=bool(row[15]) and not moved,
        arrived=() if moved else _bounds(row[16]),
        generation=Generation(int(str(row[17])), int(str(row[18]))),
    )


def _bounds(stored: object) -> tuple[Bound, ...]:
    assert isinstance(stored, list)
    return tuple(Bound(Cursor(lsn, idx), time) for lsn, idx, time in stored)


def _stored(bounds: Iterable[Bound]) -> Jsonb:
    return Jsonb([[*each.start, each.time] for each in bounds])


def in_event_time(connection: Connection) -> set[str]:
    """The consumers that were ever served in event-time order."""
    return {str(name) for (name,) in connection.execute(_ALL).fetchall()}


def look(
    connection: Connection, consumer: str, sources: Iterable[str], *, to_move: bool = False
) -> dict[str, Look]:
    """Where a consumer's rows stand now; who is about to move them locks them."""
    query = f"{_RESUME} ORDER BY c.source FOR NO KEY UPDATE OF c" if to_move else _RESUME
    rows = connection.execute(query, (consumer, list(sources))).fetchall()
    return {
        str(source): Look(
            cursor_of(lsn, idx),
            str(ledger), bool(paused), bool(finished), bool(unreported),
        )
        for source, lsn, idx, ledger, paused, finished, unreported in rows
    }  # fmt: skip


def plan_release(
    connection: Connection,
    consumer: str,
    *,
    terms: Mapping[str, int],
    runs: Mapping[str, int],
    sources: Mapping[str, SourceResumeState],
    marks: EventFingerprint,
    before: int | None,
    to: int,
    reads: Mapping[str, Cursor],
    arrived: Mapping[str, Iterable[Bound]],
) -> None:
    """Store what is about to be sent; MovedError if a cursor was moved back.

    ``runs`` are the processes that serve the sources, as ``walbrook.feeds`` counts them; one that
    another has replaced plans nothing. ``arrived`` is what the times of the rows up to there hang
    on, in processing-time order.
    """
    mark = mark_of_release(marks, sources)
    with connection.pipeline() as pipeline, connection.transaction():
        # Sent together, answered together: what the server says is looked at before COMMIT.
        held = _ask_fence(connection, terms)
        shown = {name: show_feed(connection, name, run, None) for name, run in runs.items()}
        connection.execute(_PLAN, {"consumer": consumer, "before": before, "to": to, "mark": mark})
        stored = {
            name: connection.execute(
                _PLAN_SOURCE,
                {"id": each.id, "ledger": each.ledger, "lsn": format_lsn(reads[name].lsn),
                 "idx": reads[name].idx, "arrived": _stored(arrived.get(name, ()))},
            )
            for name, each in sources.items()
        }  # fmt: skip
        pipeline.sync()
        _require(held)
        for name, latest in shown.items():
            require_latest(name, runs[name], latest)
        for name, answer in stored.items():
            if answer.rowcount != 1:
                raise MovedError(consumer, sources[name].cursor)


def plan_gaps(
    connection: Connection, consumer: str, terms: Mapping[str, int], gaps: Sequence[Gap]
) -> None:
    """Store the gaps of which a sink is about to get a message."""
    with connection.transaction():
        fence(connection, terms)
        connection.execute(_TELL, (mark_of_gaps(gaps), consumer))


def note_released(
    connection: Connection,
    consumer: str,
    *,
    numbering: Numbering,
    watermark: int | None,
    sources: Mapping[str, SourceResumeState],
    reads: Mapping[str, Cursor],
    seen: Mapping[str, Mapping[str, Seen]],
    arrived: Mapping[str, Iterable[Bound]],
) -> None:
    """What was released is settled; inside the transaction that moves the consumer's cursors.

    ``seen`` is what was seen of each database's tables, of all that was read. A database of which
    more was released once than the watermark says keeps what it has.
    """
    connection.execute(
        _RELEASED,
        {"consumer": consumer, "sequence": numbering.sequence, "watermark": watermark},
    )
    for name, each in sources.items():
        floors = [floor for floor in (watermark, each.floor) if floor is not None]
        settled_to = max(floors, default=None)
        _put_source(connection, each, reads[name], settled_to, arrived.get(name, ()))
        keep_seen(connection, each.id, seen[name])


def note_numbering(connection: Connection, consumer: str, numbering: Numbering) -> None:
    """Messages were sent that no cursor moves over."""
    connection.execute(_NUMBERED, (numbering.sequence, consumer))


def _put_source(
    connection: Connection,
    source: SourceResumeState,
    read: Cursor,
    settled_to: int | None,
    arrived: Iterable[Bound],
) -> None:
    connection.execute(
        _PUT_SOURCE,
        {
            "id": source.id,
            "ledger": source.ledger,
            "lsn": format_lsn(read.lsn),
            "idx": read.idx,
            "settled_to": settled_to,
            "arrived": _stored(arrived),
        },
    )


def fence(connection: Connection, terms: Mapping[str, int], *, to_move: bool = False) -> None:
    """Raise if another start of the service has taken over one of these sources.

    Those who then move cursors lock all of them first, in one order: a lock that is raised later
    can wait for one who waits for us.
    """
    _require(_ask_fence(connection, terms, to_move=to_move))


Asked = dict[str, psycopg.Cursor[tuple[object, ...]]]


def _ask_fence(connection: Connection, terms: Mapping[str, int], *, to_move: bool = False) -> Asked:
    query = FENCE_TO_MOVE if to_move else FENCE
    return {name: connection.execute(query, (name, terms[name])) for name in sorted(terms)}


def _require(held: Asked) -> None:
    for source, answer in held.items():
        if answer.fetchone() is None:
            raise fenced(source)


def _number(value: object) -> int | None:
    return None if value is None else int(str(value))

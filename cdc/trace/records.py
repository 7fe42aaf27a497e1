"""What is recorded of deliveries: values, and the lines of JSON that they are written as.

A delivery is recorded per consumer and settlement, as the stretch of cursors that it covers, never
per row. Single messages are recorded where something happened to them alone: a refusal, and a
retry. Invariant: no record holds a value of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.cursor import Cursor
from cdc.error_text import one_line, public_text
from cdc.errors import WalbrookError

MESSAGES_MAX: Final = 1_000
"""How many single messages one record names; ``unnamed`` counts the others."""

Line = dict[str, object]


@dataclass(frozen=True)
class Refusal:
    """That a destination refused one message, and what it answered."""

    cursor: Cursor
    deliveries: int
    kind: str
    answer: str
    dead: bool = False


@dataclass(frozen=True)
class DeliveryTiming:
    """When the parts of a delivery took place, in Unix microseconds; 0 where that is unknown.

    ``committed_us`` is of the last change. Decoding and delivering began and ended so.
    """

    began_us: int = 0
    ended_us: int = 0
    decoded_from_us: int = 0
    decoded_us: int = 0
    committed_us: int = 0
    logged_us: int = 0

    def after(self, before: DeliveryTiming) -> DeliveryTiming:
        """Of both, where this one followed ``before``."""
        return DeliveryTiming(
            before.began_us or self.began_us,
            self.ended_us,
            before.decoded_from_us or self.decoded_from_us,
            self.decoded_us,
            self.committed_us or before.committed_us,
            self.logged_us or before.logged_us,
        )


UNKNOWN_TIMES: Final = DeliveryTiming()


@dataclass(frozen=True)
class DeliveryRecord:
    """What a consumer was delivered, from ``start`` up to ``end``, before it is settled.

    ``reached`` is how far the attempt was to go: beyond ``end`` where it was stopped by ``error``.
    ``rows`` are those of the ranges, whatever the consumer takes of them.
    """

    consumer: str
    start: Cursor
    end: Cursor
    reached: Cursor
    timing: DeliveryTiming
    ranges: int = 1
    rows: int = 0
    delivered: int = 0
    absorbed: int = 0
    queued: int = 0
    dead: int = 0
    refusals: tuple[Refusal, ...] = ()
    unnamed: int = 0
    error: str | None = None
    ordered_by_time: bool = False
    settlement: int = 0
    settled_us: int = 0  # 0: the process ended before it knew, or its cursor was moved

    @property
    def passed(self) -> int:
        """How many messages of it passed the consumer's tables, actions and filter."""
        return self.delivered + self.absorbed + self.queued + self.dead

    def covers(self, cursor: Cursor) -> bool:
        return self.start <= cursor < self.end

    def tried(self, cursor: Cursor) -> bool:
        """Whether the attempt was to deliver a change that it did not come to."""
        return self.end <= cursor < self.reached


@dataclass(frozen=True)
class RetryClaim:
    """Messages of a retry queue that were tried again, and what became of each."""

    consumer: str
    ended_us: int
    delivered: tuple[Cursor, ...]
    refusals: tuple[Refusal, ...]
    undelivered: tuple[Cursor, ...] = ()  # because of ``error``, which is not about one message
    error: str | None = None


@dataclass(frozen=True)
class Failure:
    """An attempt at everything from a cursor on that ended before it delivered anything."""

    consumer: str
    at_us: int
    start: Cursor
    error: str


def refusals_of(aside: pa.RecordBatch | None) -> tuple[tuple[Refusal, ...], int]:
    """The refused messages among those queued, and how many more there are."""
    if aside is None:
        return (), 0
    tried = aside.filter(pc.or_(aside.column("answer").is_valid(), aside.column("dead")))
    rows = tried.slice(0, MESSAGES_MAX).select(
        ["commit_lsn", "commit_idx", "deliveries", "error_kind", "answer", "dead"]
    ).to_pylist()  # fmt: skip
    named = tuple(
        Refusal(
            Cursor(row["commit_lsn"], row["commit_idx"]),
            row["deliveries"],
            row["error_kind"] or "",
            row["answer"] or "not sent",
            row["dead"],
        )
        for row in rows
    )
    return named, tried.num_rows - len(named)


def shown(error: WalbrookError) -> str:
    """An error as a record has it."""
    return one_line(public_text(error))


def delivery_line(delivery: DeliveryRecord, settlement: int) -> Line:
    line: Line = {
        "kind": "delivery",
        "settlement": settlement,
        "consumer": delivery.consumer,
        "start": delivery.start,
        "end": delivery.end,
        "times": [
            delivery.timing.began_us,
            delivery.timing.ended_us,
            delivery.timing.decoded_from_us,
            delivery.timing.decoded_us,
            delivery.timing.committed_us,
            delivery.timing.logged_us,
        ],
        "ranges": delivery.ranges,
        "rows": delivery.rows,
        "delivered": delivery.delivered,
    }
    # Most deliveries have none of these.
    for name in ("absorbed", "queued", "dead", "unnamed", "error", "ordered_by_time"):
        if value := getattr(delivery, name):
            line[name] = value
    if delivery.reached != delivery.end:
        line["reached"] = delivery.reached
    if delivery.refusals:
        line["refusals"] = _refusal_lines(delivery.refusals)
    return line


def settled_line(settlement: int, at_us: int, moved: Sequence[str]) -> Line:
    line: Line = {"kind": "settled", "settlement": settlement, "at": at_us}
    return line | {"moved": list(moved)} if moved else line


def retry_line(claim: RetryClaim) -> Line:
    line: Line = {
        "kind": "retry",
        "consumer": claim.consumer,
        "at": claim.ended_us,
        "delivered": list(claim.delivered),
        "refusals": _refusal_lines(claim.refusals),
    }
    if claim.error is not None:
        line |= {"undelivered": list(claim.undelivered), "error": claim.error}
    return line


def failure_line(failure: Failure) -> Line:
    return {
        "kind": "failure",
        "consumer": failure.consumer,
        "at": failure.at_us,
        "start": failure.start,
        "error": failure.error,
    }


def cursors_of(line: Line) -> tuple[Cursor, Cursor] | None:
    """The lowest and the highest cursor that a line speaks of; None: it speaks of none."""
    found: list[object] = [line[name] for name in ("start", "end", "reached") if name in line]
    if line["kind"] == "retry":
        found += [*_list(line.get("delivered")), *_list(line.get("undelivered"))]
    found += [_list(refusal)[0] for refusal in _list(line.get("refusals"))]
    cursors = [_cursor(each) for each in found]
    return (min(cursors), max(cursors)) if cursors else None


def read_delivery(line: Line) -> DeliveryRecord:
    start, end = _cursor(line["start"]), _cursor(line["end"])
    return DeliveryRecord(
        str(line["consumer"]),
        start,
        end,
        _cursor(line.get("reached", end)),
        DeliveryTiming(*map(_number, _list(line["times"]))),
        _number(line["ranges"]),
        _number(line["rows"]),
        _number(line["delivered"]),
        _number(line.get("absorbed", 0)),
        _number(line.get("queued", 0)),
        _number(line.get("dead", 0)),
        refusals=_refusals(line),
        unnamed=_number(line.get("unnamed", 0)),
        error=str(line["error"]) if "error" in line else None,
        ordered_by_time=bool(line.get("ordered_by_time")),
        settlement=_number(line["settlement"]),
    )


def read_retry(line: Line) -> RetryClaim:
    delivered, undelivered = (
        tuple(map(_cursor, _list(line.get(name)))) for name in ("delivered", "undelivered")
    )
    return RetryClaim(
        str(line["consumer"]),
        _number(line["at"]),
        delivered,
        _refusals(line),
        undelivered,
        str(line["error"]) if "error" in line else None,
    )


def read_failure(line: Line) -> Failure:
    return Failure(
        str(line["consumer"]), _number(line["at"]), _cursor(line["start"]), str(line["error"])
    )


def _refusal_lines(refusals: Sequence[Refusal]) -> list[object]:
    return [[one.cursor, one.deliveries, one.kind, one.answer, one.dead] for one in refusals]


def _refusals(line: Line) -> tuple[Refusal, ...]:
    return tuple(
        Refusal(_cursor(cursor), _number(deliveries), str(kind), str(answer), bool(dead))
        for cursor, deliveries, kind, answer, dead in map(_list, _list(line.get("refusals")))
    )


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def _cursor(value: object) -> Cursor:
    lsn, idx = _list(value)
    return Cursor(_number(lsn), _number(idx))


def _number(value: object) -> int:
    return int(str(value))

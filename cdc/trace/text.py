"""A trace for people, as lines of text, and for programs, as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import orjson

from cdc.trace.change import TracedChange
from cdc.trace.story import ChangeTrace, ConsumerTrace, TraceStep, moment

_NO_TIME = " " * 27


def lines_of(trace: ChangeTrace, *, payload: bool = False) -> Iterator[str]:
    """One line per step; values of the row only with ``payload``."""
    yield f"{trace.source} {trace.cursor}  {_what(trace)}"
    for step in trace.steps:
        yield f"  {_step(step)}"
    if payload and trace.change is not None:
        for name, value in trace.change.payload.items():
            if value is not None:
                yield f"  {name}: {value}"
    for consumer in trace.consumers:
        yield ""
        yield f"{consumer.consumer}: {_conclusion(consumer)}"
        for step in consumer.steps:
            yield f"  {_step(step)}"
        for note in consumer.notes:
            yield f"  note: {note}"
    if trace.notes:
        yield ""
    for note in trace.notes:
        yield f"note: {note}"


def as_json(trace: ChangeTrace, *, payload: bool = False) -> dict[str, object]:
    """The same for programs; values of the row only with ``payload``."""
    return {
        "source": trace.source,
        "cursor": str(trace.cursor),
        "idempotency_key": f"{trace.cursor.lsn}:{trace.cursor.idx}",
        "change": None if trace.change is None else _change(trace.change, payload=payload),
        "missing": None if trace.missing is None else str(trace.missing),
        "steps": [_step_json(step) for step in trace.steps],
        "consumers": [
            {
                "consumer": each.consumer,
                "conclusion": each.conclusion.value,
                "why": each.why,
                "steps": [_step_json(step) for step in each.steps],
                "notes": list(each.notes),
            }
            for each in trace.consumers
        ],
        "notes": list(trace.notes),
    }


def _change(change: TracedChange, *, payload: bool) -> dict[str, object]:
    shown: dict[str, object] = {
        "committed_at": _iso(moment(change.committed_us)),
        "logged_at": _iso(moment(change.logged_us)) if change.logged_us else None,
        "batch": change.batch,
        "xid": change.xid,
        "table": change.table,
        "action": change.action,
        "error": change.error,
    }
    if payload:
        shown["payload"] = {
            name: orjson.Fragment(value) if isinstance(value, str) else value
            for name, value in change.payload.items()
        }
    return shown


def _what(trace: ChangeTrace) -> str:
    if trace.change is None:
        return str(trace.missing)
    change = trace.change
    failed = " (it cannot be decoded)" if change.error else ""
    return f"{change.action}{f' of {change.table}' if change.table else ''}{failed}"


def _conclusion(consumer: ConsumerTrace) -> str:
    return f"{consumer.conclusion.value}{f' ({consumer.why})' if consumer.why else ''}"


def _step(step: TraceStep) -> str:
    took = ""
    if step.at is not None and step.until is not None:
        took = f" (took {(step.until - step.at).total_seconds() * 1000:.1f} ms)"
    return f"{_NO_TIME if step.at is None else _iso(step.at)}  {step.what}{took}"


def _step_json(step: TraceStep) -> dict[str, object]:
    return {
        "at": None if step.at is None else _iso(step.at),
        "until": None if step.until is None else _iso(step.until),
        "what": step.what,
    }


def _iso(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")

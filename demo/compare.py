"""What was written against what arrived: pure, on values.

A change is known by its transaction and its place there, so that a loss, a repetition and a wrong
value are kept apart. Invariant: a sink agrees only if every change arrived exactly
once, with the same content, in order per key, and a replay of what arrived, including rows that
existed before, ends in the state of the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from demo.change import Change, Key, State, key_text


@dataclass(frozen=True)
class Comparison:
    """What is wrong at one sink, each finding a sentence; nothing is, if all are empty."""

    sink: str
    written: int
    arrived: int
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)
    out_of_order: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    state: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[str]:
        return [
            *self.missing,
            *self.unexpected,
            *self.duplicates,
            *self.out_of_order,
            *self.different,
            *self.state,
        ]

    @property
    def agrees(self) -> bool:
        return not self.findings


def compare(
    sink: str, written: Sequence[Change], arrived: Sequence[Change], source: State
) -> Comparison:
    """``written`` in the order it was, ``arrived`` in the order a reader of the sink meets it."""
    changes = sum(change.action != "read" for change in arrived)
    found = Comparison(sink, len(written), changes)
    numbers = {(change.xid, change.idx): n for n, change in enumerate(written)}
    seen: set[int] = set()
    latest: dict[tuple[str, Key], int] = {}
    for change in arrived:
        if change.action == "read":  # a row that was there before: what is left of it is compared
            continue
        n = numbers.get((change.xid, change.idx))
        if n is None:
            found.unexpected.append(f"unexpected: {change}")
        elif n in seen:
            found.duplicates.append(f"duplicate: {change}")
        else:
            seen.add(n)
            found.different.extend(_differences(written[n], change))
            row = (written[n].table, written[n].key)
            if latest.setdefault(row, n) > n:
                found.out_of_order.append(f"out of order: {change} after {written[latest[row]]}")
            latest[row] = max(n, latest[row])
    found.missing.extend(f"missing: {change}" for n, change in enumerate(written) if n not in seen)
    found.state.extend(_state_differences(replay(arrived), source))
    return found


def replay(changes: Sequence[Change]) -> State:
    """The rows that are left when these changes are applied one after another."""
    rows: State = {}
    for change in changes:
        rows.pop((change.table, change.old_key), None)
        if change.action != "delete":
            rows[change.table, change.key] = change.digest or ""
    return rows


def _differences(written: Change, arrived: Change) -> list[str]:
    differing = [
        name
        for name in ("table", "action", "key", "old_key", "record_pks")
        if getattr(written, name) != getattr(arrived, name)
    ]
    if written.digest is not None and written.digest != arrived.digest:
        differing.append("record")
    if written.before is not None and written.before != arrived.before:
        differing.append("changes")
    return [f"different {', '.join(differing)}: {written}"] if differing else []


def _state_differences(replayed: State, source: State) -> list[str]:
    wrong = []
    for row in replayed.keys() | source.keys():
        name = f"{row[0]} {key_text(row[1])}"
        if row not in source:
            wrong.append(f"replay leaves a row that the source has not: {name}")
        elif row not in replayed:
            wrong.append(f"replay lacks a row of the source: {name}")
        elif replayed[row] != source[row]:
            wrong.append(f"replay ends in other values: {name}")
    return sorted(wrong)

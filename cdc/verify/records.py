"""Rows that a destination holds, one by one, for those few that seemed to differ. Pure.

Of messages the last one of a key counts. A message that lacks values takes them from the message
before it; a value that no message of the row had is not compared.

Invariant: of a key the last complete message and those behind it are in memory, no earlier ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa

from cdc.verify.held import Key, key_of

_Place = tuple[int, int]


@dataclass(frozen=True)
class HeldRow:
    """``record`` if values of it came from earlier messages; ``lacking`` are columns not known."""

    content: bytes
    record: dict[str, Any] | None = None
    lacking: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Message:
    place: _Place
    content: bytes | None  # None: the row is gone
    unchanged: str | None

    @property
    def is_complete(self) -> bool:
        return self.unchanged is None


def held_by_key(batches: Iterable[pa.RecordBatch]) -> dict[Key, HeldRow]:
    """What ``HELD_SCHEMA`` batches leave of each row, once all of them are applied in order."""
    kept: dict[str, list[_Message]] = {}
    emptied = (-1, -1)  # the place of the last message that emptied the table
    for batch in batches:
        for key, content, lsn, idx, unchanged in zip(
            *(column.to_pylist() for column in batch.columns), strict=True
        ):
            if key is None:
                emptied = max(emptied, (lsn, idx))
            else:
                _keep(kept.setdefault(key, []), _Message((lsn, idx), content, unchanged))
    rows: dict[Key, HeldRow] = {}
    for key, messages in kept.items():
        row = _applied(message for message in messages if message.place > emptied)
        if row is not None:
            rows[key_of(key)] = row
    return rows


def _keep(messages: list[_Message], new: _Message) -> None:
    """Add a message of a key; a complete one stands first, and none before it is kept."""
    if messages and messages[0].is_complete and new.place < messages[0].place:
        return
    if new.is_complete:
        messages[:] = [new, *(each for each in messages if each.place > new.place)]
    else:
        messages.append(new)


def _applied(messages: Iterable[_Message]) -> HeldRow | None:
    """What the messages of one key leave of its row."""
    row: HeldRow | None = None
    for message in sorted(messages, key=lambda message: message.place):
        if message.content is None:
            row = None
        elif message.unchanged is None:
            row = HeldRow(message.content)
        else:
            row = _completed(message.content, message.unchanged, row)
    return row


def same_cells(content: bytes, held: HeldRow) -> bool:
    return content == held.content


def same_record(content: bytes, held: HeldRow) -> bool:
    """Whether a record has the values of the source's, in every column that the source has now.

    A column that was added since stands in no earlier message: there it counts as null.
    """
    if content == held.content:
        return True
    row = _exact(content)
    there = _exact(held.content) if held.record is None else held.record
    names = [name for name in row if name not in held.lacking]
    return all(there.get(name) == row[name] for name in names)


def _completed(content: bytes, unchanged: str, before: HeldRow | None) -> HeldRow:
    record = _exact(content)
    lacking = set()
    earlier: dict[str, Any] = {}
    if before is not None:
        earlier = _exact(before.content) if before.record is None else before.record
    for name in orjson.loads(unchanged):
        if name in earlier and before is not None and name not in before.lacking:
            record[name] = earlier[name]
        else:
            lacking.add(name)
    return HeldRow(content, record, frozenset(lacking))


def _exact(content: bytes) -> dict[str, Any]:
    """A record whose numbers keep every digit."""
    found: dict[str, Any] = json.loads(content, parse_float=_number, parse_int=_number)
    return found


def _number(text: str) -> tuple[str, str]:
    return ("number", text)

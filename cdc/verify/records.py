"""Rows that a destination holds, one by one, for those few that seemed to differ. Pure.

Of messages the last one of a key counts. A message that lacks values takes them from the message
before it; a value that no message of the row had is not compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
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


@dataclass
class _Message:
    place: _Place
    key: Key | None
    content: bytes | None
    unchanged: str | None = field(default=None)


def held_by_key(batches: Iterable[pa.RecordBatch]) -> dict[Key, HeldRow]:
    """What ``HELD_SCHEMA`` batches leave of each row, once all of them are applied in order."""
    messages = [
        _Message((lsn, idx), None if key is None else key_of(key), content, unchanged)
        for batch in batches
        for key, content, lsn, idx, unchanged in zip(
            *(column.to_pylist() for column in batch.columns), strict=True
        )
    ]
    messages.sort(key=lambda message: message.place)
    rows: dict[Key, HeldRow] = {}
    for message in messages:
        if message.key is None:
            rows.clear()
        elif message.content is None:
            rows.pop(message.key, None)
        elif message.unchanged is None:
            rows[message.key] = HeldRow(message.content)
        else:
            before = rows.get(message.key)
            rows[message.key] = _completed(message.content, message.unchanged, before)
    return rows


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

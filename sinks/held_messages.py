"""Messages that a destination holds, in the default shape, as what they say of a table's rows.

Of an update that changed the key, the row under the old key is gone. The message has the old values
in ``changes``, in JSON, while keys are texts: both agree for numbers, texts and identifiers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import orjson
import pyarrow as pa

from cdc.backfill.table import PublishedTable
from cdc.cursor import Cursor
from cdc.errors import OperatorError
from cdc.verify.held import HELD_SCHEMA, Key, key_text

_ROWS = ("insert", "update", "read", "delete")


class HeldMessages:
    """Gathers messages of one table; with ``keys`` only those of some rows."""

    def __init__(self, table: PublishedTable, keys: Collection[Key] | None) -> None:
        self._table = table
        self._keys = None if keys is None else frozenset(keys)
        self._rows: list[tuple[str | None, bytes | None, int, int, str | None]] = []

    def add(
        self,
        place: Cursor,
        action: str,
        record: bytes | None,
        changes: bytes | None,
        metadata: Mapping[str, Any],
    ) -> None:
        """A message as it stands at the destination; those of other tables are passed over."""
        name = self._table.name
        if (metadata["table_schema"], metadata["table_name"]) != (name.schema, name.table):
            return
        if action == "truncate":
            self._rows.append((None, None, *place, None))
        elif action in _ROWS:
            key = tuple(metadata["record_pks"])
            old = _old_key(self._table, key, changes) if action == "update" else key
            if old != key:
                self._note(place, old, None, None)
            unchanged = metadata.get("unchanged")
            gone = action == "delete"
            listed = None if unchanged is None else orjson.dumps(unchanged).decode()
            self._note(place, key, None if gone else record, listed)

    def take(self) -> pa.RecordBatch:
        """What was gathered since the last call, as ``HELD_SCHEMA``."""
        rows, self._rows = self._rows, []
        if not rows:
            return pa.RecordBatch.from_pylist([], HELD_SCHEMA)
        arrays = [
            pa.array(column, field.type)
            for column, field in zip(zip(*rows, strict=True), HELD_SCHEMA, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=HELD_SCHEMA)

    def _note(self, place: Cursor, key: Key, content: bytes | None, unchanged: str | None) -> None:
        if self._keys is None or key in self._keys:
            self._rows.append((key_text(key), content, *place, unchanged))


def refuse_short_lived(what: str, setting: str) -> OperatorError:
    """For a destination that forgets messages."""
    return OperatorError(
        f"{what} does not keep every message, so the rows that it holds are not known",
        fix=f"compare a sink without {setting}",
        kind="not_readable",
    )


def _old_key(table: PublishedTable, key: Key, changes: bytes | None) -> Key:
    if changes is None or not any(name.encode() in changes for name in table.key):
        return key
    before = json.loads(changes, parse_float=str, parse_int=str)
    return tuple(_text(before, name, now) for name, now in zip(table.key, key, strict=True))


def _text(before: dict[str, Any] | None, name: str, now: str) -> str:
    if before is None or name not in before:
        return now
    value = before[name]
    if isinstance(value, bool):
        return "t" if value else "f"
    return value if isinstance(value, str) else json.dumps(value)

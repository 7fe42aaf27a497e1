"""Frames for tests: messages written by ``tests.pgoutput``, one transaction after another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import xxhash

from cdc.decoding import decode_changes
from cdc.decoding.raw import RAW_SCHEMA
from tests import pgoutput

OID = 16400
COMMIT_LSN = 0x16_0000_0100
COMMIT_TS = 1_767_225_600_000_001  # 2026-01-01T00:00:00.000001Z


@dataclass
class Frame:
    """Collects messages with their schemas; each ``add`` is one row of one transaction."""

    rows: list[tuple[int, int, bytes]] = field(default_factory=list)  # relation, schema, payload
    schemas: dict[int, bytes] = field(default_factory=dict)

    def add(self, payload: bytes, relation: bytes | None = None, *, oid: int = OID) -> Frame:
        """One more row; ``relation``: the raw Relation message of its table, if it has one."""
        schema_id = 0 if relation is None else xxhash.xxh3_64_intdigest(relation)
        if relation is not None:
            self.schemas[schema_id] = relation
        self.rows.append((0 if relation is None else oid, schema_id, payload))
        return self

    def batch(self) -> pa.RecordBatch:
        """The rows as a log frame: cursors count from ``COMMIT_LSN:0``."""
        count = len(self.rows)
        columns = [
            [COMMIT_LSN] * count,
            list(range(count)),
            [COMMIT_TS] * count,
            [777] * count,
            [payload[0] if payload else 0 for _, _, payload in self.rows],
            [relation for relation, _, _ in self.rows],
            [schema_id for _, schema_id, _ in self.rows],
            [payload for _, _, payload in self.rows],
        ]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, RAW_SCHEMA, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=RAW_SCHEMA)

    def decode(self) -> list[dict[str, object]]:
        """The changes as dicts, after a full check of the Arrow result."""
        changes = decode_changes(self.batch(), self.schemas)
        changes.validate(full=True)
        rows: list[dict[str, object]] = changes.to_pylist()
        return rows

    def errors(self) -> list[str | None]:
        """Of each row why it cannot be decoded; those that cannot have no record."""
        rows = self.decode()
        assert all((row["record"] is None) == (row["error"] is not None) for row in rows)
        return [None if row["error"] is None else str(row["error"]) for row in rows]


def table(*columns: pgoutput.ColumnSpec, identity: str = "d", oid: int = OID) -> bytes:
    """The Relation message of ``public.things``."""
    return pgoutput.relation(oid, "public", "things", columns, identity=identity)


def record_of(type_oid: int, text: str | bytes | None) -> str:
    """The JSON that one value of a type becomes."""
    frame = Frame().add(pgoutput.insert(OID, [text]), table(("v", type_oid)))
    record = frame.decode()[0]["record"]
    assert isinstance(record, str)
    return record.removeprefix('{"v":').removesuffix("}")


def loads(text: object) -> object:
    """Parsed JSON of a column's value."""
    assert isinstance(text, str)
    return json.loads(text)


def inserts(relation: bytes, rows: Sequence[pgoutput.Values]) -> list[dict[str, object]]:
    """The changes of some inserts."""
    frame = Frame()
    for row in rows:
        frame.add(pgoutput.insert(OID, row), relation)
    return frame.decode()

"""A fixed set of changes with something of everything, for what must not change by accident."""

from __future__ import annotations

from typing import Any

import orjson
import pyarrow as pa

from cdc.change import CHANGE_SCHEMA

_LSN = (0x16 << 32) + 0x1000
_COMMITTED_US = 1_767_225_600_000_001  # 2026-01-01T00:00:00.000001Z


def _change(
    action: str,
    record: object,
    *,
    pks: tuple[str, ...] = (),
    table: tuple[str, str] = ("public", "orders"),
    **others: object,
) -> dict[str, Any]:
    texts = {name: orjson.dumps(value).decode() for name, value in others.items()}
    return {
        "table_schema": table[0],
        "table_name": table[1],
        "action": action,
        # Numerics keep their scale and json its spacing: such records are given as text.
        "record": record if isinstance(record, str) else orjson.dumps(record).decode(),
        "record_pks": orjson.dumps(pks).decode(),
        **texts,
    }


_NO_TABLE = ("", "")
_ODD = ('Bü"ro', 'it\'s a\\"tést"\t日本')
_BIG = '{"id":9007199254740993,"total":22.2200,"doc":{"a": [1, null]},"note":null}'

_CHANGES = [
    _change("insert", _BIG, pks=("9007199254740993",)),
    # Replica identity default: the source says nothing of the old row.
    _change("update", {"id": 7, "note": "new"}, pks=("7",), changes={}),
    # Replica identity full.
    _change(
        "update",
        {"id": 7, "note": "newer"},
        pks=("7",),
        changes={"note": "new"},
        before={"id": 7, "note": "new"},
    ),
    # The key changed: of the old row the source sends the key.
    _change(
        "update",
        {"id": 8, "note": "newer"},
        pks=("8",),
        changes={"id": 7},
        before={"id": 7, "note": None},
    ),
    _change("update", {"id": 8, "title": "uno"}, pks=("8",), changes={}, unchanged=["body", 'b"2']),
    _change("delete", {"id": 8, "note": None}, pks=("8",)),
    _change("delete", {"id": 9, "note": "all of it"}, pks=("9",)),
    _change("truncate", {}),
    _change(
        "insert",
        {'na"me': 'q"uo\\te', "ключ": "žlutý 👾\u2028", "line": "a\nb"},
        pks=('a"b', "日本"),
        table=_ODD,
    ),
    _change("insert", {"id": 10}, pks=("10",), annotations={"user": 'Zoë "Z"', "n": 1}),
    _change(
        "message",
        {"prefix": 'au"dit', "content": "héllo", "transactional": True},
        table=_NO_TABLE,
        annotations={"user": "z"},
    ),
    _change(
        "message",
        {"prefix": "raw", "content_base64": "/wA=", "transactional": False},
        table=_NO_TABLE,
    ),
    _change("schema_change", {"columns": [{"name": "id", "type": "bigint"}]}),
    _change(
        "gap",
        {"from": "0/1A2B3C0:0", "to": "0/1B00010:7", "reason": "evicted"},
        table=_NO_TABLE,
    ),
]


def changes_of_every_kind() -> pa.RecordBatch:
    """CHANGE_SCHEMA and ``before``; three changes a transaction, a second between two."""
    rows = [
        {
            "commit_lsn": _LSN + 256 * (at // 3),
            "commit_idx": at % 3,
            "commit_timestamp": _COMMITTED_US + 1_000_000 * (at // 3),
            "xid": 0 if change["action"] == "gap" else 700 + at // 3,
            **change,
        }
        for at, change in enumerate(_CHANGES)
    ]
    schema = CHANGE_SCHEMA.append(pa.field("before", pa.string()))
    return pa.RecordBatch.from_pylist(rows, schema)

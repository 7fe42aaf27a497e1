"""A few rows of usual values, one by one: whole columns cost the same for one row as for a hundred.

Invariant: the result is that of ``decode_changes`` over whole columns, to the byte. So
whatever is not usual (a rare type or kind, an old row, a value that was not sent, a byte too many)
is not decoded here at all: there is one place that knows how, and what to say of what is wrong.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache
from typing import Final

import orjson
import pyarrow as pa

from cdc.decoding.format import DEFAULT_FORMAT, KEY, ROW_TEXT, TABLE_VERSION, Wanted
from cdc.decoding.plan import TablePlan, plan_for
from cdc.decoding.raw import RAW_SCHEMA
from cdc.decoding.row_texts import line_of
from cdc.decoding.types.boolean import BOOLEAN
from cdc.decoding.types.decimal import FLOAT4, FLOAT8, numeric
from cdc.decoding.types.integer import INT2, INT4, INT8, OID
from cdc.decoding.types.json import JSON
from cdc.decoding.types.temporal import DATE, TIMESTAMP, TIMESTAMPTZ
from cdc.decoding.types.text import TEXT

ROWS_MAX: Final = 48
"""From about so many rows on whole columns cost less."""

_STRING = pa.string()
_BYTES_MAX = 64 << 10
_PLANS_MAX = 4096

_INSERT, _UPDATE, _DELETE, _READ = b"IUDR"
_ACTIONS = {_INSERT: "insert", _UPDATE: "update", _DELETE: "delete", _READ: "read"}
_TAGS = {_INSERT: b"N", _UPDATE: b"N", _DELETE: b"KO", _READ: b"N"}
_TEXT, _NULL = b"tn"
_HEAD = struct.Struct(">BIBH")  # kind, oid, tag, columns
_LENGTH = struct.Struct(">I")

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)").fullmatch
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?").fullmatch
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}").fullmatch
_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?"
).fullmatch
_BOOLEANS = {"t": "true", "f": "false"}


class _UnusualValueError(ValueError):
    """Something that only the way of whole columns knows; never leaves this module."""


Write = Callable[[str], str]
"""The JSON of one value."""


def _string(text: str) -> str:
    return orjson.dumps(text).decode()


def _integer(text: str) -> str:
    return _only(_INTEGER(text) is not None, text)


def _number(text: str) -> str:
    return _only(_NUMBER(text) is not None, text)


def _json(text: str) -> str:
    return _only(bool(text), text)


def _boolean(text: str) -> str:
    return _only(text in _BOOLEANS, _BOOLEANS.get(text, ""))


def _date(text: str) -> str:
    _only(_DATE(text) is not None, text)
    date.fromisoformat(text)
    return f'"{text}"'


def _timestamp(text: str) -> str:
    _only(_TIME(text) is not None, text)
    datetime.fromisoformat(text)
    return f'"{text[:10]}T{text[11:]}"'


def _timestamptz(text: str) -> str:
    _only(text.endswith("+00"), text)
    return _timestamp(text[:-3])[:-1] + 'Z"'


def _only(usual: bool, text: str) -> str:
    if not usual:
        raise _UnusualValueError
    return text


_WRITES: Final[Mapping[object, Write]] = {
    **{form.json: _integer for form in (INT2, INT4, INT8, OID)},
    **{form.json: _number for form in (numeric(-1), FLOAT4, FLOAT8)},
    BOOLEAN.json: _boolean,
    DATE.json: _date,
    JSON.json: _json,
    TEXT.json: _string,
    TIMESTAMP.json: _timestamp,
    TIMESTAMPTZ.json: _timestamptz,
}
"""By what writes a column of the type, in the default form."""


@dataclass(frozen=True)
class _Plan:
    """How the rows of a table version are written."""

    table: TablePlan
    columns: tuple[tuple[str, Write], ...]  # what stands before each value, and what writes it


@lru_cache(maxsize=_PLANS_MAX)
def _plan_of(message: bytes) -> _Plan | None:
    """None if the table has a column of a rare type, or no columns, or texts that are not UTF-8."""
    table = plan_for(message)
    writes = [_WRITES.get(form.json) for form in table.types]
    if not writes or table.relation.codec:
        return None
    columns = [
        (f"{',' if at else '{'}{name}:", write)
        for at, (name, write) in enumerate(zip(table.json_names, writes, strict=True))
        if write is not None
    ]
    return _Plan(table, tuple(columns)) if len(columns) == len(writes) else None


def decode_few(
    raw: pa.RecordBatch,
    schemas: Mapping[int, bytes],
    annotations: pa.StringArray | None,
    wanted: Wanted,
) -> pa.RecordBatch | None:
    """``decode_changes`` of a few usual rows; None if they are not."""
    if wanted.formats != (DEFAULT_FORMAT,) or wanted.described:
        return None
    if not raw.schema.equals(RAW_SCHEMA, check_metadata=False):
        return None
    if raw.column("payload").nbytes > _BYTES_MAX:
        return None
    kinds, relations, schema_ids, payloads = (
        raw.column(name).to_pylist() for name in ("kind", "relation", "schema_id", "payload")
    )
    rows = _ResultColumns(wanted)
    try:
        for kind, oid, schema_id, payload in zip(
            kinds, relations, schema_ids, payloads, strict=True
        ):
            plan = _plan_of(schemas[schema_id])
            if plan is None or plan.table.relation.oid != oid:
                return None
            rows.add(plan, kind, payload)
    except (ValueError, LookupError, struct.error):
        return None
    return rows.batch(raw, annotations)


class _ResultColumns:
    """The columns of the result while they are written."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._table_schema: list[str] = []
        self._table_name: list[str] = []
        self._action: list[str] = []
        self._record: list[str] = []
        self._changes: list[str | None] = []
        self._record_pks: list[str] = []
        self._event_texts: dict[str, list[str | None]] = {name: [] for name in wanted.times}
        self._key: list[str | None] = []
        self._row_text: list[str] = []
        self._table_version: list[str] = []

    def add(self, plan: _Plan, kind: int, payload: bytes) -> None:
        relation = plan.table.relation
        said, oid, tag, count = _HEAD.unpack_from(payload)
        if said != kind or oid != relation.oid or tag not in _TAGS[kind]:
            raise _UnusualValueError
        if count != len(plan.columns):
            raise _UnusualValueError
        texts = _texts(payload, count)
        written: list[str] = []
        for (before, write), text in zip(plan.columns, texts, strict=True):
            written += (before, "null" if text is None else write(text))
        if self._wanted.keyed:
            names = plan.table.json_names
            members = ",".join(f"{names[at]}:{written[2 * at + 1]}" for at in relation.key)
            self._key.append(f"{{{members}}}" if relation.key else None)
        written.append("}")
        keys = (texts[at] for at in relation.key)
        self._table_schema.append(relation.namespace)
        self._table_name.append(relation.name)
        self._action.append(_ACTIONS[kind])
        self._record.append("".join(written))
        self._changes.append("{}" if kind == _UPDATE else None)
        self._record_pks.append(
            "[" + ",".join("null" if key is None else _string(key) for key in keys) + "]"
        )
        names = plan.table.names
        for name, found in self._event_texts.items():
            found.append(texts[names.index(name)] if name in names else "")

        if self._wanted.texts:
            self._row_text.append(line_of(texts))
            self._table_version.append(plan.table.version)

    def batch(self, raw: pa.RecordBatch, annotations: pa.StringArray | None) -> pa.RecordBatch:
        nothing = pa.nulls(raw.num_rows, _STRING)
        texts: dict[str, Sequence[str | None]] = {
            "record": self._record,
            "record_pks": self._record_pks,
        }
        if self._wanted.keyed:
            texts[KEY] = self._key
        if self._wanted.texts:
            texts |= {ROW_TEXT: self._row_text, TABLE_VERSION: self._table_version}
        for name, found in self._event_texts.items():
            texts[self._wanted.time_name(name)] = found
        columns = {
            "commit_lsn": raw.column("commit_lsn"),
            "commit_idx": raw.column("commit_idx"),
            "commit_timestamp": raw.column("commit_ts").view(pa.timestamp("us", tz="UTC")),
            "xid": raw.column("xid"),
            "table_schema": _repeating(tuple(self._table_schema)),
            "table_name": _repeating(tuple(self._table_name)),
            "action": _repeating(tuple(self._action)),
            "changes": _repeating(tuple(self._changes)),
            "annotations": nothing if annotations is None else annotations,
            **{name: pa.array(found, _STRING) for name, found in texts.items()},
        }
        schema = self._wanted.schema
        return pa.RecordBatch.from_arrays(
            [columns.get(name, nothing) for name in schema.names], schema=schema
        )


@lru_cache(maxsize=_PLANS_MAX)
def _repeating(texts: tuple[str | None, ...]) -> pa.StringArray:
    """A column of few values, which comes again in most ranges."""
    return pa.array(texts, _STRING)


def _texts(payload: bytes, count: int) -> list[str | None]:
    """The values of the only tuple of a message; None for a null."""
    at, end, length = _HEAD.size, len(payload), _LENGTH.unpack_from
    texts: list[str | None] = []
    for _ in range(count):
        kind = payload[at]
        if kind == _TEXT:
            start = at + 5
            at = start + length(payload, at + 1)[0]
            if at > end:
                raise _UnusualValueError
            texts.append(payload[start:at].decode())
        elif kind == _NULL:
            at += 1
            texts.append(None)
        else:
            raise _UnusualValueError
    if at != end:
        raise _UnusualValueError
    return texts

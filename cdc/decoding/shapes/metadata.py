"""The metadata of a message, which the ``sequin`` shape has within and others beside it.

Names and forms follow that product, so its consumers work unchanged. Additions are ``unchanged``,
there only when the source did not send a TOAST value, and what ``placed`` gives to consumers in
event-time order.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import lru_cache

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import origin
from cdc.decoding.joins import constant, joined
from cdc.decoding.shapes.base import Context
from cdc.decoding.shapes.text import for_each_value, member
from cdc.decoding.types.text import escape

METADATA_BYTES = 450
"""About what it takes; names and keys are short."""

FEW = 48
"""Up to about so many rows a loop costs less than whole columns."""

_FEW_COLUMNS = (
    "commit_lsn", "commit_idx", "xid", "table_schema", "table_name", "action", "record_pks",
    "annotations", "unchanged",
)  # fmt: skip
_EPOCH = datetime(1970, 1, 1)
_NAMES_MAX = 4096


def metadata(changes: pa.RecordBatch, context: Context) -> pa.StringArray:
    """A JSON object for each change."""
    if changes.num_rows <= FEW and "origin_lsn" not in changes.schema.names:
        texts = few_metadata(changes, context)
        if texts is not None:
            return pa.array(texts, pa.string())
    lsn, idx = _origin_texts(changes)
    return joined(
        '{"table_schema":"',
        escape(changes.column("table_schema")),
        '","table_name":"',
        escape(changes.column("table_name")),
        '","commit_timestamp":',
        _commit_timestamp(changes.column("commit_timestamp"), context),
        ',"commit_lsn":',
        lsn,
        ',"commit_idx":',
        idx,
        ',"xid":',
        changes.column("xid").cast(pa.string()),
        ',"idempotency_key":"',
        *_idempotency_key(changes, context, lsn, idx),
        '","record_pks":',
        changes.column("record_pks"),
        ',"transaction_annotations":',
        pc.fill_null(changes.column("annotations"), "null"),
        *member("unchanged", changes.column("unchanged")),
        *placed(changes),
        _of_all(context),
        null="",
    )


def few_metadata(changes: pa.RecordBatch, context: Context) -> list[str] | None:
    """The same of a few changes, one by one; None if it takes whole columns to write them.

    A call of Arrow costs as much for one row as for a hundred.
    """
    if context.format.timestamps != "iso8601":
        return None
    lsns, idxs, xids, schemas, tables, actions, pks, annotations, unchanged = (
        changes.column(name).to_pylist() for name in _FEW_COLUMNS
    )
    try:
        times = [
            _iso8601_text(time)
            for time in changes.column("commit_timestamp").view(pa.int64()).to_pylist()
        ]
    except OverflowError:
        return None
    database, end = "".join(_of_database(context)), _of_all(context)
    return [
        f'{{"table_schema":{_json_text(schemas[at])},"table_name":{_json_text(tables[at])}'
        f',"commit_timestamp":"{times[at]}","commit_lsn":{lsn},"commit_idx":{idx}'
        f',"xid":{xid},"idempotency_key":"{database}{lsn}:{idx}'
        f"{':gap' if actions[at] == 'gap' else ''}"
        f'","record_pks":{pks[at]},"transaction_annotations":{annotations[at] or "null"}'
        f"{_member_text('unchanged', unchanged[at])}{end}"
        for at, (lsn, idx, xid) in enumerate(zip(lsns, idxs, xids, strict=True))
    ]


def idempotency_keys(changes: pa.RecordBatch, context: Context) -> pa.StringArray:
    """What is the same each time a change is sent, as ``metadata`` has it."""
    return joined(*_idempotency_key(changes, context, *_origin_texts(changes)))


def _origin_texts(changes: pa.RecordBatch) -> tuple[pa.StringArray, pa.StringArray]:
    lsn, idx = origin(changes)
    return lsn.cast(pa.string()), idx.cast(pa.string())


def _idempotency_key(
    changes: pa.RecordBatch, context: Context, lsn: pa.StringArray, idx: pa.StringArray
) -> list[pa.StringArray | str]:
    return [
        *_of_database(context),
        lsn,
        ":",
        idx,
        *_of_gaps(changes.column("action")),
    ]


def placed(changes: pa.RecordBatch) -> list[pa.StringArray | str]:
    """Members of what goes out in event-time order: its time, whether it is late, its place."""
    if "origin_lsn" not in changes.schema.names:
        return []
    lsn, idx = (changes.column(name).cast(pa.string()) for name in ("commit_lsn", "commit_idx"))
    return [
        *member("event_time", changes.column("event_time")),
        *member("late", changes.column("late")),
        ',"sequence":"',
        lsn,
        "-",
        idx,
        '"',
    ]


def _of_database(context: Context) -> list[str]:
    """Cursors of two databases may be equal: their keys must differ."""
    return [f"{context.database_name}:"] if context.of_many else []


def _of_gaps(actions: pa.StringArray) -> list[pa.StringArray]:
    """A gap may stand where a change was, which can come after all: their keys must differ."""
    gaps = pc.equal(actions, constant("gap"))
    return [pc.if_else(gaps, constant(":gap"), constant(""))] if gaps.true_count else []


def _of_all(context: Context) -> str:
    """The end of the object, the same for every message of a consumer."""
    return _end_of(context.consumer, context.database_name, context.database, context.hostname)


@lru_cache(maxsize=_NAMES_MAX)
def _end_of(consumer: str, name: str, database: str, hostname: str) -> str:
    said = {
        "database_name": name,
        "consumer": {"name": consumer},
        "database": {"name": name, "database": database, "hostname": hostname},
    }
    return "," + orjson.dumps(said).decode()[1:]


def _commit_timestamp(times: pa.TimestampArray, context: Context) -> pa.StringArray:
    if context.format.timestamps == "unix_microsecond":
        return for_each_value(times, lambda each: each.view(pa.int64()).cast(pa.string()))
    return for_each_value(times, iso8601)


def iso8601(times: pa.TimestampArray) -> pa.StringArray:
    """As JSON strings, in UTC; null where there is none."""
    local = times.cast(pa.timestamp("us")).cast(pa.string())
    return joined('"', pc.replace_substring(local, " ", "T"), 'Z"')


@lru_cache(maxsize=_NAMES_MAX)
def _json_text(name: str) -> str:
    return orjson.dumps(name).decode()


def _iso8601_text(time_us: int) -> str:
    time = _EPOCH + timedelta(microseconds=time_us)
    return f"{time.isoformat('T', 'microseconds')}Z"


def _member_text(key: str, value: str | None) -> str:
    return "" if value is None else f',"{key}":{value}'

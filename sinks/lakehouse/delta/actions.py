"""Files in the words of Delta's log: what was written becomes add actions, and is read back. Pure.

Bounds are given for the leading columns whose values JSON holds exactly: integers, dates and short
texts. They say which files a query, or a merge, need not open.
"""

from __future__ import annotations

from datetime import date, timedelta
from typing import Final
from urllib.parse import unquote

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from sinks.lakehouse.table import DataFile

_COLUMNS_MAX: Final = 32
_TEXT_CHARS_MAX: Final = 32  # as other writers of Delta have it
_EPOCH: Final = date(1970, 1, 1)
_DAYS: Final = ((date.min - _EPOCH).days, (date.max - _EPOCH).days)

LISTED: Final = ("path", "num_records", "size_bytes")


def stats_of(rows: pa.Table) -> str:
    """Row count, bounds and null counts of a new file, as JSON."""
    lowest: dict[str, object] = {}
    highest: dict[str, object] = {}
    nulls: dict[str, int] = {}
    for name in rows.column_names[:_COLUMNS_MAX]:
        column = rows.column(name)
        if pa.types.is_nested(column.type):
            continue
        nulls[name] = column.null_count
        if column.null_count == len(column) or not _is_bounded(column.type):
            continue
        is_date = pa.types.is_date(column.type)
        found = pc.min_max(column.cast(pa.int32()) if is_date else column)
        low, high = found["min"].as_py(), found["max"].as_py()
        if is_date and not _DAYS[0] <= low <= high <= _DAYS[1]:
            continue  # such as infinity, which JSON has no date for
        if is_date:
            low, high = _EPOCH + timedelta(low), _EPOCH + timedelta(high)
        if _is_exact(low) and _is_exact(high):
            lowest[name], highest[name] = low, high
    found = {
        "numRecords": rows.num_rows,
        "minValues": lowest,
        "maxValues": highest,
        "nullCount": nulls,
    }
    return orjson.dumps(found).decode()


def _is_bounded(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date(kind))


def _is_exact(value: object) -> bool:
    return not isinstance(value, str) or len(value) <= _TEXT_CHARS_MAX


def listed_files(actions: pa.Table, partitioned_by: list[str]) -> list[DataFile]:
    """The files of a table from its add actions, flattened."""
    names = actions.column_names
    columns = {name: actions.column(name).to_pylist() for name in names if _is_wanted(name)}
    bounded = [
        name[4:] for name in columns if name.startswith("min.") and f"max{name[3:]}" in names
    ]
    return [
        DataFile(
            path=unquote(columns["path"][at]),
            rows=int(columns["num_records"][at] or 0),
            size=int(columns["size_bytes"][at]),
            partition={name: _text(columns[f"partition.{name}"][at]) for name in partitioned_by},
            bounds={
                name: (columns[f"min.{name}"][at], columns[f"max.{name}"][at]) for name in bounded
            },
        )
        for at in range(actions.num_rows)
    ]


def _is_wanted(name: str) -> bool:
    return name in LISTED or name.startswith(("min.", "max.", "partition."))


def _text(value: object) -> str | None:
    return None if value is None else str(value)

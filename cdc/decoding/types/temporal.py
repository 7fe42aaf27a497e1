"""date, timestamp and timestamptz, from what Postgres writes with ``DateStyle = ISO``.

Postgres knows dates before Christ, years beyond 9999 and infinity. None of them becomes null: in
JSON they keep their words, in Arrow infinity is the largest number and -infinity the smallest, as
in Postgres itself. The usual ones go by Arrow's own parser; a column with others by the calendar's
arithmetic (``calendar``), on whole columns too.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.columns import gather, nulls_of, offsets_of, only_where
from cdc.decoding.format import ValueFormat
from cdc.decoding.types.calendar import (
    DATE_TEXT,
    INFINITE,
    TIMESTAMP_TEXT,
    TIMESTAMPTZ_TEXT,
    CalendarFields,
)
from cdc.decoding.types.form import JsonColumn, TypeForm, quoted

_TIMESTAMP_CHARS_MIN = len("2026-01-01 00:00:00")
_SPACE_AT = len("2026-01-01")
_COLON_AT = len("2026-01-01 00:00")
_YEAR_ONE_DAY = -719_162  # 0001-01-01; Arrow knows a year 0 before it, Postgres does not
_DAY_US = 86_400_000_000


def _date() -> TypeForm:
    def typed(texts: pa.BinaryArray) -> pa.Array:
        days = _usual(texts, pa.date32())
        if days is not None:
            return days
        parts = CalendarFields(texts, DATE_TEXT, "date")
        return parts.numbers(parts.days(), np.int32).cast(pa.date32())

    def json(texts: pa.BinaryArray, _form: ValueFormat) -> JsonColumn:
        if _usual(texts, pa.date32()) is None:
            CalendarFields(texts, DATE_TEXT, "date").days()
        return quoted(texts.view(pa.string()))

    return TypeForm(pa.date32(), "date", json, typed)


def _timestamp(*, zoned: bool) -> TypeForm:
    arrow = pa.timestamp("us", tz="UTC" if zoned else None)
    zone = "+00" if zoned else ""
    pattern = TIMESTAMPTZ_TEXT if zoned else TIMESTAMP_TEXT

    def usual(texts: pa.BinaryArray) -> pa.Array | None:
        return (
            _usual(texts, arrow) if pc.all(pc.ends_with(texts, zone), min_count=0).as_py() else None
        )

    def typed(texts: pa.BinaryArray) -> pa.Array:
        moments = usual(texts)
        if moments is not None:
            return moments
        parts = CalendarFields(texts, pattern, "timestamp")
        return parts.numbers(parts.microseconds(), np.int64).cast(arrow)

    def json(texts: pa.BinaryArray, form: ValueFormat) -> JsonColumn:
        moments = usual(texts)
        if moments is not None:
            if form.timestamps == "unix_microsecond":
                return JsonColumn(moments.view(pa.int64()).cast(pa.string()))
            if form.timestamps == "iso8601":
                return JsonColumn(_with_t(texts, cut=len(zone)), '"', 'Z"' if zoned else '"')
            return quoted(texts.view(pa.string()))
        parts = CalendarFields(texts, pattern, "timestamp")
        if form.timestamps == "unix_microsecond":
            infinite = pc.is_in(texts, value_set=INFINITE)
            words = quoted(texts.view(pa.string())).whole()
            return JsonColumn(pc.if_else(infinite, words, parts.digits()))
        parts.check()
        words = texts.view(pa.string())
        return quoted(words if form.timestamps == "postgres" else _iso8601(words))

    return TypeForm(arrow, "timestamp" if zoned else "timestamp_ntz", json, typed)


def _iso8601(words: pa.StringArray) -> pa.StringArray:
    """What ISO 8601 has no form for stays as it is: infinity, and the era."""
    words = pc.replace_substring_regex(words, r"^([0-9]+-[0-9]+-[0-9]+) ", r"\1T")
    return pc.replace_substring_regex(words, r"\+00( BC)?$", r"Z\1")


def _usual(texts: pa.BinaryArray, arrow: pa.DataType) -> pa.Array | None:
    """What Arrow's parser makes of the column; None if it cannot read all of it.

    It takes other forms than Postgres writes, such as a time without seconds: those are left to the
    exact path.
    """
    bounds = offsets_of(texts).astype(np.int64)
    starts, stops = (side[~nulls_of(texts)] for side in (bounds[:-1], bounds[1:]))
    is_date = arrow == pa.date32()
    if not is_date and len(starts):
        data = np.frombuffer(texts.buffers()[2], np.uint8)
        if (stops - starts < _TIMESTAMP_CHARS_MIN).any():
            return None
        if (data[starts + _SPACE_AT] != ord(" ")).any():
            return None
        if (data[starts + _COLON_AT] != ord(":")).any():
            return None
    try:
        moments = texts.view(pa.string()).cast(arrow)
    except pa.ArrowInvalid:
        return None
    first = pc.min(moments.view(pa.int32() if is_date else pa.int64())).as_py()
    if first is not None and first < _YEAR_ONE_DAY * (1 if is_date else _DAY_US):
        return None
    return moments


def _with_t(texts: pa.BinaryArray, *, cut: int) -> pa.StringArray:
    """Usual timestamps with a T between date and time, without their last ``cut`` bytes."""
    if not len(texts):
        return texts.view(pa.string())
    present = ~nulls_of(texts)
    bounds = offsets_of(texts).astype(np.int64)
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8).copy()
    data[bounds[:-1][present] + _SPACE_AT] = ord("T")
    stops = bounds[1:] - np.where(present, cut, 0)
    values = gather(pa.py_buffer(data), bounds[:-1], stops).view(pa.string())
    return only_where(values, present) if texts.null_count else values


DATE = _date()
TIMESTAMP = _timestamp(zoned=False)
TIMESTAMPTZ = _timestamp(zoned=True)

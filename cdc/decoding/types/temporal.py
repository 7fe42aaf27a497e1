"""date, timestamp and timestamptz, from what Postgres writes with ``DateStyle = ISO``.

Postgres knows dates before Christ, years beyond 9999 and infinity. None of them becomes null: in
JSON they keep their words, in Arrow infinity is the largest number and -infinity the smallest, as
in Postgres itself. The usual ones go by Arrow's own parser; a column with others by a regular
expression and the calendar's arithmetic, on whole columns too.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.decoding.columns import Mask, gather, nulls_of, offsets_of, only_where, refuse_values
from cdc.decoding.format import ValueFormat
from cdc.decoding.types.form import JsonColumn, TypeForm, quoted

_DATE = r"(?P<year>[0-9]{4,7})-(?P<month>[0-9]{2})-(?P<day>[0-9]{2})"
_TIME = (
    r" (?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})(?:\.(?P<fraction>[0-9]{1,6}))?"
)
_ZONE = (
    r"(?P<sign>[+-])(?P<zone_hour>[0-9]{2})"
    r"(?::(?P<zone_minute>[0-9]{2}))?(?::(?P<zone_second>[0-9]{2}))?"
)
_ERA = r"(?P<bc> BC)?"
_INFINITE = pa.array([b"infinity", b"-infinity"], pa.binary())
_MONTH_DAYS = np.array([0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])
_DAY_US = 86_400_000_000
_TIMESTAMP_CHARS_MIN = len("2026-01-01 00:00:00")
_SPACE_AT = len("2026-01-01")

Numbers = NDArray[np.int64]


def _date() -> TypeForm:
    pattern = f"^{_DATE}{_ERA}$"

    def typed(texts: pa.BinaryArray) -> pa.Array:
        days = _usual(texts, pa.date32())
        if days is not None:
            return days
        parts = _Parts(texts, pattern, "date")
        return parts.numbers(parts.days(), np.int32).cast(pa.date32())

    def json(texts: pa.BinaryArray, _form: ValueFormat) -> JsonColumn:
        if _usual(texts, pa.date32()) is None:
            _Parts(texts, pattern, "date").days()
        return quoted(texts.view(pa.string()))

    return TypeForm(pa.date32(), "date", json, typed)


def _timestamp(*, zoned: bool) -> TypeForm:
    arrow = pa.timestamp("us", tz="UTC" if zoned else None)
    zone = "+00" if zoned else ""
    pattern = f"^{_DATE}{_TIME}{_ZONE if zoned else ''}{_ERA}$"

    def typed(texts: pa.BinaryArray) -> pa.Array:
        moments = _usual(texts, arrow)
        if moments is not None:
            return moments
        parts = _Parts(texts, pattern, "timestamp")
        return parts.numbers(parts.microseconds(), np.int64).cast(arrow)

    def json(texts: pa.BinaryArray, form: ValueFormat) -> JsonColumn:
        if form.timestamps == "unix_microsecond":
            return _unix(texts, typed(texts))
        usual = _usual(texts, arrow) is not None and _end_with(texts, zone)
        if not usual:
            _Parts(texts, pattern, "timestamp").days()
        if form.timestamps == "postgres":
            return quoted(texts.view(pa.string()))
        if usual:
            return JsonColumn(_with_t(texts, cut=len(zone)), '"', 'Z"' if zoned else '"')
        words = texts.view(pa.string())
        words = pc.replace_substring_regex(words, r"^([0-9]+-[0-9]+-[0-9]+) ", r"\1T")
        if zoned:
            words = pc.replace_substring_regex(words, r"\+00( BC)?$", r"Z\1")
        return quoted(words)

    return TypeForm(arrow, "timestamp" if zoned else "timestamp_ntz", json, typed)


def _usual(texts: pa.BinaryArray, arrow: pa.DataType) -> pa.Array | None:
    """What Arrow's parser makes of the column; None if it cannot read all of it.

    It takes shorter forms than Postgres writes: a time without seconds is left to the exact path.
    """
    bounds = offsets_of(texts).astype(np.int64)
    starts, stops = (side[~nulls_of(texts)] for side in (bounds[:-1], bounds[1:]))
    if arrow != pa.date32() and len(starts):
        data = np.frombuffer(texts.buffers()[2], np.uint8)
        if (stops - starts < _TIMESTAMP_CHARS_MIN).any():
            return None
        if (data[starts + _SPACE_AT] != ord(" ")).any() or (data[starts + 16] != ord(":")).any():
            return None
    try:
        return texts.view(pa.string()).cast(arrow)
    except pa.ArrowInvalid:
        return None


def _end_with(texts: pa.BinaryArray, tail: str) -> bool:
    return bool(pc.all(pc.ends_with(texts, tail), min_count=0).as_py())


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


def _unix(texts: pa.BinaryArray, moments: pa.TimestampArray) -> JsonColumn:
    numbers = moments.view(pa.int64()).cast(pa.string())
    infinite = pc.is_in(texts, value_set=_INFINITE)
    if not pc.any(infinite, min_count=0).as_py():
        return JsonColumn(numbers)
    words = quoted(texts.view(pa.string())).whole()
    return JsonColumn(pc.if_else(infinite, words, numbers))


class _Parts:
    """The numbers of a date or timestamp column, for the calendar's arithmetic."""

    def __init__(self, texts: pa.BinaryArray, pattern: str, what: str) -> None:
        self._what = what
        self._infinite = pc.fill_null(pc.is_in(texts, value_set=_INFINITE), False).to_numpy(
            zero_copy_only=False
        )
        self._rising = pc.fill_null(pc.equal(texts, b"infinity"), False).to_numpy(
            zero_copy_only=False
        )
        self._null = nulls_of(texts)
        found = pc.extract_regex(texts, pattern)
        self._fields = {field.name: found.field(field.name) for field in found.type}
        self._finite: Mask = found.is_valid().to_numpy(zero_copy_only=False)
        refuse_values(~(self._finite | self._infinite | self._null), f"this value is no {what}")

    def days(self) -> Numbers:
        """Since 1970-01-01, by the proleptic Gregorian calendar."""
        year, month, day = self._number("year"), self._number("month"), self._number("day")
        year = np.where(self._is("bc", b" BC"), 1 - year, year)
        leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
        length = _MONTH_DAYS[np.clip(month, 0, 12)] - ((month == 2) & ~leap)
        wrong = (month < 1) | (month > 12) | (day < 1) | (day > length)
        refuse_values(wrong & self._finite, f"this value is no {self._what}")
        # Years begin in March, so that the leap day is their last; 400 of them are an era.
        year = year - (month <= 2)
        era, of_era = year // 400, year % 400
        of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
        days: Numbers = era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year
        return days - 719_468

    def microseconds(self) -> Numbers:
        """Since 1970-01-01 00:00 UTC, or of the local calendar without a zone."""
        hour, minute, second = (self._number(name) for name in ("hour", "minute", "second"))
        wrong = (hour > 24) | (minute > 59) | (second > 60)
        refuse_values(wrong & self._finite, f"this value is no {self._what}")
        seconds = hour * 3600 + minute * 60 + second
        if "sign" in self._fields:
            zone = self._number("zone_hour") * 3600 + self._number("zone_minute") * 60
            zone += self._number("zone_second")
            seconds -= np.where(self._is("sign", b"-"), -zone, zone)
        days = self.days()
        # Postgres' last years lie beyond what 64 bits count from 1970.
        beyond = np.abs(days * 86_400.0 + seconds) >= 2**63 / 1e6 - 1
        refuse_values(beyond & self._finite, "this timestamp is beyond what 64 bits can count")
        return np.where(beyond, 0, days * _DAY_US + seconds * 1_000_000) + self._fraction()

    def numbers(self, finite: Numbers, width: type[np.signedinteger]) -> pa.Array:
        """With infinities at the ends of what ``width`` holds, and nulls."""
        bounds = np.iinfo(width)
        values = np.where(self._rising, bounds.max, bounds.min)
        values = np.where(self._infinite, values, finite)
        if ((values < bounds.min) | (values > bounds.max)).any():
            refuse_values(values > bounds.max, f"this {self._what} is beyond what Arrow can count")
        return pa.array(values.astype(width), mask=self._null)

    def _number(self, name: str) -> Numbers:
        texts = self._fields[name]
        plain = pc.if_else(pc.equal(pc.binary_length(texts), 0), b"0", texts)
        numbers: Numbers = pc.fill_null(plain.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        return numbers

    def _is(self, name: str, text: bytes) -> Mask:
        found: Mask = pc.fill_null(pc.equal(self._fields[name], text), False).to_numpy(
            zero_copy_only=False
        )
        return found

    def _fraction(self) -> Numbers:
        digits = pc.fill_null(self._fields["fraction"], b"").cast(pa.string())
        padded = pc.utf8_rpad(digits, 6, "0")
        fraction: Numbers = padded.cast(pa.int64()).to_numpy(zero_copy_only=False)
        return fraction


DATE = _date()
TIMESTAMP = _timestamp(zoned=False)
TIMESTAMPTZ = _timestamp(zoned=True)

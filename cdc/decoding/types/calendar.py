"""The calendar's arithmetic for dates and timestamps of any age, on whole columns.

Invariant: a text that Postgres cannot have written of a date or a timestamp is refused,
and every other one becomes exactly its number.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.decoding.columns import Mask, nulls_of, refuse_values

_DATE = r"(?P<year>[0-9]{4,7})-(?P<month>[0-9]{2})-(?P<day>[0-9]{2})"
_TIME = (
    r" (?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})(?:\.(?P<fraction>[0-9]{1,6}))?"
)
_ZONE = (
    r"(?P<sign>[+-])(?P<zone_hour>[0-9]{2})"
    r"(?::(?P<zone_minute>[0-9]{2}))?(?::(?P<zone_second>[0-9]{2}))?"
)
_ERA = r"(?P<bc> BC)?"

DATE_TEXT = f"^{_DATE}{_ERA}$"
TIMESTAMP_TEXT = f"^{_DATE}{_TIME}{_ERA}$"
TIMESTAMPTZ_TEXT = f"^{_DATE}{_TIME}{_ZONE}{_ERA}$"
_INFINITY, _BC, _WEST, _ZERO, _EMPTY = (
    pa.scalar(word, pa.binary()) for word in (b"infinity", b" BC", b"-", b"0", b"")
)
_NONE = pa.scalar(0, pa.int32())
INFINITE = pa.array([b"infinity", b"-infinity"], pa.binary())

_MONTH_DAYS = np.array([0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])
_DAY_US = 86_400_000_000
_ZONE_HOUR_MAX = 15

Numbers = NDArray[np.int64]


class CalendarFields:
    """The numbers of a date or timestamp column, for the calendar's arithmetic."""

    def __init__(self, texts: pa.BinaryArray, pattern: str, what: str) -> None:
        self._what = what
        self._infinite = pc.fill_null(pc.is_in(texts, value_set=INFINITE), False).to_numpy(
            zero_copy_only=False
        )
        self._rising = pc.fill_null(pc.equal(texts, _INFINITY), False).to_numpy(
            zero_copy_only=False
        )
        self._null = nulls_of(texts)
        found = pc.extract_regex(texts, pattern)
        self._fields = {field.name: found.field(field.name) for field in found.type}
        self._finite: Mask = found.is_valid().to_numpy(zero_copy_only=False)
        refuse_values(~(self._finite | self._infinite | self._null), f"this value is no {what}")

    def check(self) -> None:
        """Refuse what no calendar or clock shows."""
        self.days()
        self._seconds()

    def days(self) -> Numbers:
        """Since 1970-01-01, by the proleptic Gregorian calendar."""
        year, month, day = self._number("year"), self._number("month"), self._number("day")
        wrong = year < 1
        year = np.where(self._is("bc", _BC), 1 - year, year)
        leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
        length = _MONTH_DAYS[np.clip(month, 0, 12)] - ((month == 2) & ~leap)
        wrong |= (month < 1) | (month > 12) | (day < 1) | (day > length)
        refuse_values(wrong & self._finite, f"this value is no {self._what}")
        # Years begin in March, so that the leap day is their last; 400 of them are an era.
        year = year - (month <= 2)
        era, of_era = year // 400, year % 400
        of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
        days: Numbers = era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year
        return days - 719_468

    def microseconds(self) -> Numbers:
        """Since 1970-01-01 00:00 UTC, or of the local calendar without a zone."""
        days, seconds = self.days(), self._seconds()
        beyond = _beyond(days, seconds) & self._finite
        refuse_values(beyond, "this timestamp is beyond what 64 bits can count")
        return days * _DAY_US + seconds * 1_000_000 + self._fraction()

    def digits(self) -> pa.StringArray:
        """The microseconds in decimal digits, which have no bound."""
        days, seconds, fraction = self.days(), self._seconds(), self._fraction()
        beyond = _beyond(days, seconds) & self._finite
        digits = pa.array(days * _DAY_US + seconds * 1_000_000 + fraction, mask=self._null)
        digits = digits.cast(pa.string())
        if not beyond.any():
            return digits
        exact = [
            str(int(days[at]) * _DAY_US + int(seconds[at]) * 1_000_000 + int(fraction[at]))
            for at in np.flatnonzero(beyond)
        ]
        return pc.replace_with_mask(digits, pa.array(beyond), pa.array(exact, pa.string()))

    def _seconds(self) -> Numbers:
        """Of the day, less those of the zone."""
        hour, minute, second = (self._number(name) for name in ("hour", "minute", "second"))
        wrong = (hour > 23) | (minute > 59) | (second > 59)
        seconds = hour * 3600 + minute * 60 + second
        if "sign" in self._fields:
            names = ("zone_hour", "zone_minute", "zone_second")
            hour, minute, second = (self._number(name) for name in names)
            wrong |= (hour > _ZONE_HOUR_MAX) | (minute > 59) | (second > 59)
            zone = hour * 3600 + minute * 60 + second
            seconds -= np.where(self._is("sign", _WEST), -zone, zone)
        refuse_values(wrong & self._finite, f"this value is no {self._what}")
        return seconds

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
        plain = pc.if_else(pc.equal(pc.binary_length(texts), _NONE), _ZERO, texts)
        numbers: Numbers = pc.fill_null(plain.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        return numbers

    def _is(self, name: str, text: pa.BinaryScalar) -> Mask:
        found: Mask = pc.fill_null(pc.equal(self._fields[name], text), False).to_numpy(
            zero_copy_only=False
        )
        return found

    def _fraction(self) -> Numbers:
        digits = pc.fill_null(self._fields["fraction"], _EMPTY).cast(pa.string())
        padded = pc.utf8_rpad(digits, 6, "0")
        fraction: Numbers = padded.cast(pa.int64()).to_numpy(zero_copy_only=False)
        return fraction


def _beyond(days: Numbers, seconds: Numbers) -> Mask:
    """Postgres' last years lie beyond what 64 bits count from 1970; infinity is the last number."""
    beyond: Mask = np.abs(days * 86_400.0 + seconds) >= 2**63 / 1e6 - 1
    return beyond

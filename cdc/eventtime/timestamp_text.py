"""Dates and timestamps as text: ISO 8601, and what Postgres writes for its own types.

Invariant: a value is read exactly or not at all. Without a zone it is UTC, digits
beyond the microsecond are cut off, and infinity, a year before 1 or after 9999 and a day that its
month does not have are bad.

The usual forms (``2026-01-31 10:20:30.123456+00``) are read by whole columns: values are padded to
one width, so that the digits at one place of all values are one array. Rarer ones, such as a time
without seconds, go one by one.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.eventtime.parsed_times import Parsed, present_in
from cdc.eventtime.times import NO_TIME, TIME_MAX, TIME_MIN, Times

_SECOND_US = 1_000_000
_MINUTE_US = 60 * _SECOND_US
_DAY_US = 86_400 * _SECOND_US

_DATE_CHARS, _TIME_CHARS, _CHARS_MAX = 10, 19, len("2026-01-01T00:00:00.123456789+00:00")
_FRACTION_MAX = 9
_DATE_DIGITS = [0, 1, 2, 3, 5, 6, 8, 9]
_CLOCK_DIGITS = [11, 12, 14, 15, 17, 18]
_NO_DIGIT = 1_000
"""Beyond the bound of every part of a zone."""

# The day number of the first of every month from 0001-01 to 10000-01, the last for its length only.
_MONTHS = np.arange("0001-01", "10000-02", dtype="datetime64[M]").astype("datetime64[D]")
_FIRST_DAY = _MONTHS.astype(np.int64)
_MONTH_DAYS = np.diff(_FIRST_DAY)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FORM = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)"
    r"(?:[Tt ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d+))?)?"
    r"(?:[Zz]|([+-])(\d\d)(?::?(\d\d)(?::?(\d\d))?)?)?)?",
    re.ASCII,
)


def parse_moments(column: pa.StringArray) -> Parsed:
    """Dates and timestamps, with a zone or without; a date is its first moment."""
    present = present_in(column)
    times, read = _usual(column, present)
    for at in np.flatnonzero(present & ~read):
        time = _exact(column[at].as_py())
        if time is not None:
            times[at], read[at] = time, True
    return Parsed(times, present & ~read)


def parse_days(column: pa.StringArray) -> Parsed:
    """The first moment of the UTC day that each value lies in."""
    parsed = parse_moments(column)
    days = np.where(parsed.times == NO_TIME, NO_TIME, parsed.times // _DAY_US * _DAY_US)
    return Parsed(days, parsed.bad)


def _usual(column: pa.StringArray, present: NDArray[np.bool_]) -> tuple[Times, NDArray[np.bool_]]:
    """The times of those in a usual form, and which they are."""
    chars = np.asarray(pc.fill_null(pc.binary_length(column), 0)).astype(np.int64)
    usual = present & (chars >= _DATE_CHARS) & (chars <= _CHARS_MAX)
    if not usual.any():
        return np.full(len(column), NO_TIME, np.int64), np.zeros(len(column), np.bool_)
    if not usual.all():
        column, chars = pc.if_else(pa.array(usual), column, ""), np.where(usual, chars, 0)
    text = np.frombuffer(pc.ascii_rpad(column, _CHARS_MAX).buffers()[2], np.uint8)
    text = text[: len(column) * _CHARS_MAX]
    signs = np.ascontiguousarray(text.reshape(-1, _CHARS_MAX).T)
    digits = signs - ord("0")
    body, offset_us, usual_zone = _zones(text, chars)
    days, usual_date = _days(signs, digits)
    clock_us, usual_clock = _clock_us(signs, digits, body)
    is_date = chars == _DATE_CHARS
    usual &= usual_date & (is_date | (usual_clock & usual_zone))
    times = days * _DAY_US + np.where(is_date, 0, clock_us - offset_us)
    usual &= (times >= TIME_MIN) & (times <= TIME_MAX)
    return np.where(usual, times, NO_TIME), usual


def _days(
    signs: NDArray[np.uint8], digits: NDArray[np.uint8]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    usual = (digits[_DATE_DIGITS] <= 9).all(axis=0)
    usual &= (signs[4] == ord("-")) & (signs[7] == ord("-"))
    year = _two(digits, 0) * 100 + _two(digits, 2)
    month, day = _two(digits, 5), _two(digits, 8)
    usual &= (year >= 1) & (month >= 1) & (month <= 12) & (day >= 1)
    at = np.where(usual, year * 12 + month - 13, 0)
    usual &= day <= _MONTH_DAYS[at]
    return _FIRST_DAY[at] + day - 1, usual


def _clock_us(
    signs: NDArray[np.uint8], digits: NDArray[np.uint8], body: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Microseconds of the day, where the text up to ``body`` has hours, minutes and seconds."""
    usual = (digits[_CLOCK_DIGITS] <= 9).all(axis=0)
    usual &= (signs[10] == ord(" ")) | (signs[10] == ord("T"))
    usual &= (signs[13] == ord(":")) & (signs[16] == ord(":"))
    hour, minute, second = _two(digits, 11), _two(digits, 14), _two(digits, 17)
    usual &= (hour <= 23) & (minute <= 59) & (second <= 59)
    clock_us = (hour * 3600 + minute * 60 + second) * _SECOND_US
    with_fraction = body > _TIME_CHARS
    usual &= np.where(with_fraction, body >= _TIME_CHARS + 2, body == _TIME_CHARS)
    if with_fraction.any():
        usual &= ~with_fraction | (signs[_TIME_CHARS] == ord("."))
        for place in range(_FRACTION_MAX):
            there = body > _TIME_CHARS + 1 + place
            if not there.any():
                break
            digit = digits[_TIME_CHARS + 1 + place]
            usual &= ~there | (digit <= 9)
            if place < 6:
                clock_us += np.where(there, digit, 0) * np.int64(10 ** (5 - place))
    return clock_us, usual


def _zones(
    text: NDArray[np.uint8], chars: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Where each value's zone begins, its offset in microseconds, and whether it is a usual one."""
    starts = np.arange(len(chars)) * _CHARS_MAX

    def sign(from_end: int) -> NDArray[np.bool_]:
        found = text[starts + np.maximum(chars - from_end, 0)]
        signed: NDArray[np.bool_] = (found == ord("+")) | (found == ord("-"))
        return signed & (chars >= _TIME_CHARS + from_end)

    body = chars - (text[starts + np.maximum(chars - 1, 0)] == ord("Z"))
    offset_us: NDArray[np.int64] = np.zeros(len(chars), np.int64)
    usual: NDArray[np.bool_] = np.ones(len(chars), np.bool_)
    for zone_chars, minutes_at in ((3, None), (6, 4), (5, 3)):  # +hh, +hh:mm, +hhmm
        at = np.flatnonzero(sign(zone_chars) & (body == chars))
        if not len(at):
            continue
        body[at] -= zone_chars
        zone = starts[at] + body[at]
        minutes = _two_at(text, zone + 1) * 60
        good = minutes < 24 * 60
        if minutes_at is not None:
            past_hour = _two_at(text, zone + minutes_at)
            good &= past_hour <= 59
            minutes += past_hour
        if zone_chars == 6:
            good &= text[zone + 3] == ord(":")
        offset_us[at] = np.where(text[zone] == ord("-"), -minutes, minutes) * _MINUTE_US
        usual[at] &= good
    return body, offset_us, usual


def _two(digits: NDArray[np.uint8], at: int) -> NDArray[np.int64]:
    two: NDArray[np.int64] = digits[at].astype(np.int64) * 10 + digits[at + 1]
    return two


def _two_at(text: NDArray[np.uint8], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Two digits of each value; beyond every bound where they are none."""
    tens, ones = text[at] - ord("0"), text[at + 1] - ord("0")
    two: NDArray[np.int64] = tens.astype(np.int64) * 10 + ones
    return np.where((tens <= 9) & (ones <= 9), two, _NO_DIGIT)


def _exact(text: str) -> int | None:
    form = _FORM.fullmatch(text)
    if form is None:
        return None
    year, month, day, hour, minute, second, fraction, sign, *zone = form.groups()
    try:
        moment = datetime(
            int(year), int(month), int(day), int(hour or 0), int(minute or 0), int(second or 0),
            int((fraction or "")[:6].ljust(6, "0")), UTC,
        )  # fmt: skip
    except ValueError:
        return None
    hours, minutes, seconds = (int(part or 0) for part in zone)
    if hours > 23 or minutes > 59 or seconds > 59:
        return None
    offset_us = ((hours * 60 + minutes) * 60 + seconds) * _SECOND_US
    time = (moment - _EPOCH) // timedelta(microseconds=1)
    time += offset_us if sign == "-" else -offset_us
    return time if TIME_MIN <= time <= TIME_MAX else None

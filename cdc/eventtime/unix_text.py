"""Numbers since 1970 as text: seconds, milliseconds or microseconds, whole or with a fraction.

Invariants: the result is the exact decimal number, floored to the microsecond; no value
passes through a float. A column of whole numbers is one cast. In other columns a number is its
digits and a power of ten, both integers, and so are the columns of them (``1.7e+15``, as Postgres
writes a float8, too). Only a number of too many digits for int64 goes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Context, Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.eventtime.parsed_times import Parsed, present_in
from cdc.eventtime.times import NO_TIME, TIME_MAX, TIME_MIN, Times

_DIGITS_MAX = 18  # as many nines fit into int64
_TEN = 10 ** np.arange(_DIGITS_MAX + 1, dtype=np.int64)
_NUMBER = (
    r"^(?P<sign>[+-]?)(?P<whole>[0-9]+)(?:\.(?P<part>[0-9]+))?"
    r"(?:[eE](?P<power>[+-]?[0-9]{1,6}))?$"
)


def unix_parser(unit_us: int) -> Callable[[pa.StringArray], Parsed]:
    """A parser for numbers that count ``unit_us`` microseconds each, a power of ten."""
    places = len(str(unit_us)) - 1

    def parse(column: pa.StringArray) -> Parsed:
        times = _whole_numbers(column, unit_us)
        if times is None:
            times = _decimals(column, places)
        return Parsed(times, present_in(column) & (times == NO_TIME))

    return parse


def _whole_numbers(column: pa.StringArray, unit_us: int) -> Times | None:
    """A column of nothing but whole numbers; None if it is none."""
    text = _text_of(column)
    if ((text - ord("0") > 9) & (text != ord("-"))).any():
        return None  # Arrow also reads 0x10
    try:
        numbers = np.asarray(pc.fill_null(column.cast(pa.int64()), NO_TIME))
    except pa.ArrowInvalid:
        return None
    good = (numbers >= -(-TIME_MIN // unit_us)) & (numbers <= TIME_MAX // unit_us)
    return np.where(good, np.where(good, numbers, 0) * unit_us, NO_TIME)


def _text_of(column: pa.StringArray) -> NDArray[np.uint8]:
    """The bytes of all values, one after the other."""
    _, offsets, data = column.buffers()
    if data is None or not len(column):
        return np.empty(0, np.uint8)
    bounds = np.frombuffer(offsets, np.int32)
    text = np.frombuffer(data, np.uint8)
    return text[bounds[column.offset] : bounds[column.offset + len(column)]]


def _decimals(column: pa.StringArray, places: int) -> Times:
    """Numbers of any form, in the unit that ``places`` more digits give."""
    form = pc.extract_regex(column, _NUMBER)
    read = np.asarray(form.is_valid())
    sign, whole, part, power = (
        pc.fill_null(pc.struct_field(form, name), "") for name in ("sign", "whole", "part", "power")
    )
    below = np.asarray(pc.equal(sign, "-"))
    plain = pc.equal(power, "")
    # Without an exponent, digits beyond the microsecond only say on which side of it the number is.
    kept = pc.if_else(plain, pc.utf8_slice_codeunits(part, 0, places), part)
    beyond = pc.utf8_slice_codeunits(pc.if_else(plain, part, ""), places)
    digits = pc.binary_join_element_wise(whole, kept, "")
    short = read & (np.asarray(pc.binary_length(digits)) <= _DIGITS_MAX)
    numbers = np.asarray(pc.if_else(pa.array(short), digits, "0").cast(pa.int64()))
    shift = np.asarray(
        pc.if_else(plain, "0", pc.replace_substring(power, "+", "")).cast(pa.int64())
    )
    shift = shift + places - np.asarray(pc.binary_length(kept))
    more = _TEN[np.clip(shift, 0, _DIGITS_MAX)]
    fits = numbers <= TIME_MAX // more
    numbers = np.where(fits, numbers, 0) * more
    cut = np.asarray(pc.match_substring_regex(beyond, "[1-9]"))
    numbers = np.where(below, -numbers, numbers) // _TEN[np.clip(-shift, 0, _DIGITS_MAX)]
    times = np.where(fits, numbers - (below & cut), NO_TIME)
    for at in np.flatnonzero(read & ~short):
        times[at] = _exact(column[at].as_py(), places)
    good = read & (times >= TIME_MIN) & (times <= TIME_MAX)
    return np.where(good, times, NO_TIME)


def _exact(text: str, places: int) -> int:
    number = Decimal(text)
    if number and number.adjusted() + places > _DIGITS_MAX:
        return NO_TIME
    exact = Context(prec=len(text) + _DIGITS_MAX)
    return int(number.scaleb(places, exact).to_integral_value("ROUND_FLOOR", exact))

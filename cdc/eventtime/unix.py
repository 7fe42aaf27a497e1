"""Numbers since 1970 as text: seconds, milliseconds or microseconds, whole or with a fraction.

What must always hold: the result is the exact decimal number, floored to the microsecond; no value
passes through a float. A column of whole numbers is one cast. Otherwise a number is its digits and
a power of ten, both integers, and so are the columns of them. Only a number with an exponent or a
whole part of too many digits for int64 goes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Context

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.eventtime.parsed import Parsed, present_in
from cdc.eventtime.times import NO_TIME, TIME_MAX, TIME_MIN, Times

_DIGITS_MAX = 18  # as many nines fit into int64
_NUMBER = (
    r"^(?P<sign>[+-]?)(?P<whole>[0-9]+)(?:\.(?P<part>[0-9]+))?(?:[eE](?P<power>[+-]?[0-9]+))?$"
)
_EXACT = Context(prec=400, Emax=10**6, Emin=-(10**6))


def unix_parser(unit_us: int) -> Callable[[pa.StringArray], Parsed]:
    """A parser for numbers that count ``unit_us`` microseconds each, a power of ten."""
    places = len(str(unit_us)) - 1

    def parse(column: pa.StringArray) -> Parsed:
        present = present_in(column)
        times = _whole_numbers(column, unit_us)
        if times is None:
            times = _decimals(column, places)
        return Parsed(times, present & (times == NO_TIME))

    return parse


def _whole_numbers(column: pa.StringArray, unit_us: int) -> Times | None:
    """A column of nothing but whole numbers; None if it is none, which the cast finds out."""
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
    _, offsets, data = column.buffers()
    if data is None or not len(column):
        return np.empty(0, np.uint8)
    bounds = np.frombuffer(offsets, np.int32)
    text = np.frombuffer(data, np.uint8)
    return text[bounds[column.offset] : bounds[column.offset + len(column)]]


def _decimals(column: pa.StringArray, places: int) -> Times:
    """Numbers with a fraction or an exponent among them, ``places`` digits of the fraction kept."""
    form = pc.extract_regex(column, _NUMBER)
    read = np.asarray(form.is_valid())
    sign, whole, part, power = (
        pc.fill_null(pc.struct_field(form, name), "") for name in ("sign", "whole", "part", "power")
    )
    kept = pc.utf8_slice_codeunits(part, 0, places) if places else pc.if_else(True, "", part)
    chars = np.asarray(pc.binary_length(whole))
    plain = read & (chars <= _DIGITS_MAX - places) & np.asarray(pc.equal(power, ""))
    digits = pc.binary_join_element_wise(whole, pc.ascii_rpad(kept, places, padding="0"), "")
    digits = pc.if_else(pa.array(plain), digits, "0")
    times = np.asarray(digits.cast(pa.int64())).copy()
    below = np.asarray(pc.equal(sign, "-"))
    cut = np.asarray(pc.match_substring_regex(pc.utf8_slice_codeunits(part, places), "[1-9]"))
    times = np.where(below, -times - cut, times)  # floor: what was cut off makes it smaller
    for at in np.flatnonzero(read & ~plain):
        times[at] = _exact(column[at].as_py(), places)
    good = read & (times >= TIME_MIN) & (times <= TIME_MAX)
    return np.where(good, times, NO_TIME)


def _exact(text: str, places: int) -> int:
    number = _EXACT.create_decimal(text)
    if not number.is_finite() or number.adjusted() + places > _DIGITS_MAX:
        return NO_TIME
    return int(number.scaleb(places, _EXACT).to_integral_value("ROUND_FLOOR", _EXACT))

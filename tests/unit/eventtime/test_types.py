"""Every kind of value that a column of event times may hold, and the registry that reads them."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import ROUND_FLOOR, Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import ConfigError
from cdc.eventtime import NO_TIME, types
from cdc.eventtime.times import TIME_MAX, TIME_MIN
from cdc.eventtime.types import Parsed

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOON = 1_772_366_400_000_000  # 2026-03-01 12:00:00 UTC
MIDNIGHT = NOON - 43_200_000_000


def us(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


def parse(name: str, *values: str | None) -> list[int | str | None]:
    """Each value's time, None for null and "bad" for one that could not be read."""
    parsed = types.resolve(name).parse(pa.array(values, pa.string()))
    assert parsed.times.dtype == np.int64
    assert (parsed.times[parsed.bad] == NO_TIME).all()
    return [
        "bad" if bad else None if time == NO_TIME else int(time)
        for time, bad in zip(parsed.times, parsed.bad, strict=True)
    ]


MOMENTS = {
    "2026-03-01 12:00:00": NOON,
    "2026-03-01T12:00:00": NOON,
    "2026-03-01 12:00:00+00": NOON,
    "2026-03-01T12:00:00Z": NOON,
    "2026-03-01T12:00:00+00:00": NOON,
    "2026-03-01T14:30:00+02:30": NOON,
    "2026-03-01T09:30:00-0230": NOON,
    "2026-03-01 04:00:00-08": NOON,
    "2026-03-01 12:00:00.5+00": NOON + 500_000,
    "2026-03-01 12:00:00.000001": NOON + 1,
    "2026-03-01T12:00:00.123Z": NOON + 123_000,
    "2026-03-01T12:00:00.123456789Z": NOON + 123_456,
    "2026-03-01T12:00:00.1234569999999999999999-00:00": NOON + 123_456,
    "2026-03-01": MIDNIGHT,
    # Rarer forms, read one by one.
    "2026-03-01t12:00:00z": NOON,
    "2026-03-01T12:00Z": NOON,
    "2026-03-01T12:00": NOON,
    "2026-03-01T12:00:00,25": NOON + 250_000,
    "2026-03-01 12:19:32+00:19:32": NOON,
    # The ends of the calendar.
    "0001-01-01 00:00:00": TIME_MIN,
    "9999-12-31 23:59:59.999999+00": TIME_MAX,
    "1969-12-31 23:59:59.999999": -1,
    "2024-02-29 00:00:00": us(datetime(2024, 2, 29, tzinfo=UTC)),
    "2000-02-29": us(datetime(2000, 2, 29, tzinfo=UTC)),
}
NO_MOMENTS = [
    "", " ", "infinity", "-infinity", "0044-03-15 BC", "0044-03-15 12:00:00 BC", "0000-01-01",
    "10000-01-01 00:00:00", "294276-12-31", "2023-02-29", "2100-02-29 00:00:00", "2026-00-01",
    "2026-13-01", "2026-01-00", "2026-01-32", "2026-04-31 00:00:00", "2026-01-01 24:00:00",
    "2026-01-01 00:60:00", "2026-01-01 00:00:60", "2026-01-01 00:00:00.", "2026-01-01 00:00:00.x",
    "2026-01-01 00:00:00+24", "2026-01-01 00:00:00+01:60", "2026-01-01 00:00:00+1",
    "2026-01-01 00:00:00 +00", "2026-01-01T00:00:00+00Z", "2026-01-01T00:00:00+00+00",
    "2026-01-01T00:00:00.12+05-10", "2026-01-01Z", "2026-1-1", "2026/01/01", "20260101T000000Z",
    "2026-01-01 00", "2026-01-01x00:00:00", " 2026-01-01", "2026-01-01\n", "1700000000", "null",
    "٢٠٢٦-01-01", "ééééé", "0001-01-01 00:00:00+01", "9999-12-31 23:59:59.999999-00:01", "x" * 90,
]  # fmt: skip


@pytest.mark.parametrize("name", ["iso8601", "timestamp", "timestamptz"])
def test_moments_are_read_to_the_microsecond_and_without_a_zone_are_utc(name: str) -> None:
    assert parse(name, *MOMENTS) == [*MOMENTS.values()]
    for text, time in MOMENTS.items():
        assert parse(name, text) == [time], text


@pytest.mark.parametrize("name", ["iso8601", "timestamp", "timestamptz", "date"])
def test_a_text_that_is_no_moment_is_bad_and_its_neighbours_are_read(name: str) -> None:
    found = parse(name, "2026-03-01", *NO_MOMENTS, None, "2026-03-01 00:00:00+00")
    assert found == [MIDNIGHT, *["bad"] * len(NO_MOMENTS), None, MIDNIGHT]


def test_a_date_is_the_first_moment_of_its_day() -> None:
    values = (
        "2026-03-01",
        "2026-03-01 12:00:00.5",
        "2026-03-02 01:00:00+02",
        "1969-12-31 23:00:00",
    )
    assert parse("date", *values) == [MIDNIGHT, MIDNIGHT, MIDNIGHT, -86_400_000_000]


offsets = st.none() | st.integers(-23 * 60 - 59, 23 * 60 + 59)
moments = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30))
forms = st.sampled_from(["iso", "postgres", "milliseconds"])


@given(st.lists(st.none() | st.tuples(moments, offsets, forms), max_size=20))
def test_moments_are_read_as_datetime_reads_them(
    values: list[tuple[datetime, int | None, str] | None],
) -> None:
    texts: list[str | None] = []
    expected: list[int | None] = []
    for value in values:
        if value is None:
            texts.append(None)
            expected.append(None)
            continue
        moment, offset, form = value
        zone = None if offset is None else timezone(timedelta(minutes=offset))
        moment = moment.replace(tzinfo=zone)
        if form == "milliseconds":
            text = moment.isoformat(timespec="milliseconds")
            moment = moment.replace(microsecond=moment.microsecond // 1000 * 1000)
        else:
            text = moment.isoformat(" " if form == "postgres" else "T")
        texts.append(text)
        expected.append(us(moment if zone else moment.replace(tzinfo=UTC)))
    assert parse("timestamptz", *texts) == expected


@given(st.lists(st.dates()))
def test_dates_are_read_as_datetime_reads_them(days: list[date]) -> None:
    expected = [(day.toordinal() - 719_163) * 86_400_000_000 for day in days]
    assert parse("date", *(day.isoformat() for day in days)) == expected


@given(st.lists(st.none() | st.text(alphabet="0123456789-+:.,TZ eE", max_size=40)))
def test_no_text_makes_a_parser_raise(values: list[str | None]) -> None:
    for name in types.list():
        types.resolve(name).parse(pa.array(values, pa.string()))


@pytest.mark.parametrize(
    ("name", "value", "time"),
    [
        ("unix_s", "1700000000", 1_700_000_000_000_000),
        ("unix_ms", "1700000000123", 1_700_000_000_123_000),
        ("unix_us", "1700000000123456", 1_700_000_000_123_456),
        ("unixtimestamp_s", "1700000000", 1_700_000_000_000_000),
        ("unixtimestamp_ms", "1700000000123", 1_700_000_000_123_000),
        ("unix_s", "0", 0),
        ("unix_s", "-1", -1_000_000),
        ("unix_s", "+1", 1_000_000),
        ("unix_s", "1700000000.5", 1_700_000_000_500_000),
        ("unix_s", "1700000000.1234569", 1_700_000_000_123_456),
        ("unix_s", "-0.0000001", -1),
        ("unix_s", "-1.0000000", -1_000_000),
        ("unix_s", "1.7e9", 1_700_000_000_000_000),
        ("unix_s", "1.700000000123456789e+09", 1_700_000_000_123_456),
        ("unix_ms", "1.7e+12", 1_700_000_000_000_000),
        ("unix_us", "1.700000000123456e+15", 1_700_000_000_123_456),
        ("unix_us", "1E15", 1_000_000_000_000_000),
        ("unix_us", "5e-324", 0),
        ("unix_us", "-5e-324", -1),
        ("unix_us", "123.9", 123),
        ("unix_us", "-123.1", -124),
        ("unix_us", "0" * 30 + "7", 7),
        ("unix_s", "7." + "0" * 300 + "1", 7_000_000),
        ("unix_us", "0." + "9" * 500 + "e1", 9),
        ("unix_us", str(TIME_MAX), TIME_MAX),
        ("unix_us", str(TIME_MIN), TIME_MIN),
        ("unix_s", "253402300799.999999", TIME_MAX),
    ],
)
def test_numbers_are_read_exactly_and_floored(name: str, value: str, time: int) -> None:
    assert parse(name, value) == [time]
    assert parse(name, None, value, "x") == [None, time, "bad"]


NO_NUMBERS = [
    "", " ", "x", "-", "+", ".", "1.", ".5", "1 ", " 1", "0x10", "1_000", "1,5", "NaN", "Infinity",
    "-Infinity", "infinity", "1e", "e5", "--1", "1-2", "1.5.5", "١", "9" * 19, "9" * 400,
    "-" + "9" * 19, "1e30", "9e99999", "1e9999999", "2026-01-01", "9223372036854775807",
    "-9223372036854775808", "184467440737095517e2",
]  # fmt: skip


@pytest.mark.parametrize("name", ["unix_s", "unix_ms", "unix_us"])
def test_a_text_that_is_no_number_or_beyond_the_calendar_is_bad(name: str) -> None:
    assert parse(name, *NO_NUMBERS, None, "0") == [*["bad"] * len(NO_NUMBERS), None, 0]
    for value in NO_NUMBERS:
        assert parse(name, value) == ["bad"], value


@given(
    st.sampled_from([("unix_s", 6), ("unix_ms", 3), ("unix_us", 0)]),
    st.lists(st.decimals(-(10**14), 10**14, places=9) | st.integers(-(10**19), 10**19)),
)
def test_numbers_are_read_as_decimal_reads_them(
    unit: tuple[str, int], values: list[Decimal | int]
) -> None:
    name, places = unit
    expected: list[int | str] = []
    for value in values:
        exact = int((Decimal(value) * 10**places).to_integral_value(ROUND_FLOOR))
        expected.append(exact if TIME_MIN <= exact <= TIME_MAX else "bad")
    assert parse(name, *(format(Decimal(value), "f") for value in values)) == expected


@given(st.lists(st.floats(-1e17, 1e17)))
def test_floats_are_read_as_the_decimal_that_postgres_writes(values: list[float]) -> None:
    texts = [f"{value!r}".replace("e+", "e") for value in values]
    exact = [int(Decimal(text).to_integral_value(ROUND_FLOOR)) for text in texts]
    expected = [number if number >= TIME_MIN else "bad" for number in exact]
    assert parse("unix_us", *texts) == expected


def test_a_part_of_a_column_is_read_like_the_whole() -> None:
    column = pa.array(["x", None, "2026-03-01", "2026-03-01 12:00:00"]).slice(1)
    assert types.resolve("date").parse(column).times.tolist() == [NO_TIME, MIDNIGHT, MIDNIGHT]
    numbers = pa.array(["x", None, "5", "6"]).slice(1)
    assert types.resolve("unix_us").parse(numbers).times.tolist() == [NO_TIME, 5, 6]


def test_an_unknown_type_is_refused_with_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match="no event time type 'unix_sec'") as refused:
        types.resolve("unix_sec")
    assert "did you mean unix_s?" in refused.value.fix
    assert all(name in refused.value.fix for name in types.list())
    assert types.names() == types.list() == sorted(types.names())


def test_a_name_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "_types", dict(types._types))
    types.register("hours", hours, column_types=["int4"])
    assert parse("hours", "2", None, "x") == [7_200_000_000, None, "bad"]
    assert types.resolve("hours").reads("int4")
    assert not types.resolve("hours").reads("text")
    for taken in ("hours", "unix_s", "", "python:x"):
        with pytest.raises(ConfigError, match="the name is taken"):
            types.register(taken, hours)


def test_types_say_which_columns_they_read() -> None:
    assert types.resolve("unix_ms").reads("int8")
    assert not types.resolve("unix_ms").reads("timestamptz")
    assert types.resolve("timestamptz").reads("timestamptz")
    assert not types.resolve("date").reads("int4")
    assert types.resolve(f"python:{__name__}:hours").reads("anything")


def hours(column: pa.StringArray) -> np.typing.NDArray[np.int64]:
    """A parser that gives bare times."""
    given = [int(value) if value and value.isdigit() else None for value in column.to_pylist()]
    return np.array([NO_TIME if hour is None else hour * 3_600_000_000 for hour in given], np.int64)


def touchy(column: pa.StringArray) -> Parsed:
    """A parser that raises for what it cannot read, null included."""
    return Parsed(
        np.array([int(value) for value in column.to_pylist()]), np.zeros(len(column), bool)
    )


def careless(column: pa.StringArray) -> list[int]:
    return [1]


def test_a_function_of_ones_own_is_imported() -> None:
    assert parse(f"python:{__name__}:hours", "1", "x", None) == [3_600_000_000, "bad", None]


def test_a_function_that_raises_or_answers_nonsense_only_marks_what_it_could_not_read() -> None:
    assert parse(f"python:{__name__}:touchy", "5", "x", None, "6") == [5, "bad", None, 6]
    assert parse(f"python:{__name__}:touchy", str(TIME_MAX + 1)) == ["bad"]
    assert parse(f"python:{__name__}:careless", "5", None, "x") == [1, None, 1]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("python:nothing", "names no function"),
        ("python::f", "names no function"),
        ("python:no.such.module:f", "cannot be imported: ModuleNotFoundError"),
        (f"python:{__name__}:nothing", "has no function nothing"),
        (f"python:{__name__}:NOON", "has no function NOON"),
    ],
)
def test_a_function_that_is_not_there_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        types.resolve(name)
    assert refused.value.fix

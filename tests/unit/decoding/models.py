"""Models of Postgres' types: values with the text that Postgres writes of them, their JSON and
their Arrow value.

``array_out``, ``record_out`` and ``hstore_out`` are written here a second time, the plain way.
Moments are numbers in Arrow, floats their ``repr`` (so that -0.0 and NaN can be compared).
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from cdc.decoding.types import TypeForm, type_form
from cdc.decoding.types.array import array_of
from cdc.decoding.types.composite import composite_of
from cdc.decoding.types.hstore import HSTORE
from cdc.decoding.types.vector import VECTOR
from tests.exact_json import Json, Number, Object, parse


@dataclass(frozen=True)
class Sample:
    """A value: what Postgres writes, and what it must become."""

    text: str
    json: Json
    typed: Any


@dataclass(frozen=True)
class Model:
    """A type and its values."""

    form: TypeForm
    samples: st.SearchStrategy[Sample]
    delimiter: str = ","


def _samples(strategy: st.SearchStrategy[Any], of: Any) -> st.SearchStrategy[Sample]:
    return strategy.map(of)


TEXTS = st.one_of(
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8),
    st.text(st.sampled_from('ab,;{}()"\\ \n\tNULl=>ü😀'), max_size=6),
    st.sampled_from(["", "NULL", "null", "{}", "()", "plain", " "]),
)


def text_model() -> Model:
    return Model(type_form(25), _samples(TEXTS, lambda text: Sample(text, text, text)))


def integers(oid: int, low: int, high: int) -> Model:
    numbers = st.one_of(st.integers(low, high), st.sampled_from([low, high, 0]))
    return Model(
        type_form(oid), _samples(numbers, lambda n: Sample(str(n), Number(str(n)), int(n)))
    )


def _named(text: str) -> Json:
    return text if text in ("NaN", "Infinity", "-Infinity") else Number(text)


def _float_text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return repr(value).removesuffix(".0")


def floats(oid: int, width: Literal[32, 64]) -> Model:
    def sample(value: float) -> Sample:
        text = str(np.float32(value)) if width == 32 else repr(value)
        text = _float_text(value) if not math.isfinite(value) else text.removesuffix(".0")
        return Sample(text, _named(text), repr(value))

    return Model(type_form(oid), _samples(st.floats(width=width), sample))


def numerics() -> Model:
    numbers = st.one_of(
        st.decimals(allow_nan=False, allow_infinity=False).map(lambda d: f"{d:f}"),
        st.integers(-(10**400), 10**400).map(str),
        st.sampled_from(["NaN", "Infinity", "-Infinity", "0.00", "0." + "0" * 900 + "1"]),
    ).filter(lambda text: not text.startswith("-0") or Decimal(text) != 0)
    return Model(type_form(1700), _samples(numbers, lambda t: Sample(t, _named(t), t)))


def decimals(precision: int, scale: int) -> Model:
    form = type_form(1700, (precision << 16 | (scale & 0x7FF)) + 4)

    def sample(unscaled: int) -> Sample:
        # From its digits: arithmetic would round them to the context's precision.
        digits = tuple(map(int, str(abs(unscaled))))
        text = f"{Decimal((int(unscaled < 0), digits, -scale)):f}"
        text = text if unscaled else f"{0:.{max(scale, 0)}f}"
        return Sample(text, Number(text), Decimal(text))

    bound = 10**precision - 1
    return Model(form, _samples(st.integers(-bound, bound), sample))


def bytea() -> Model:
    def sample(data: bytes) -> Sample:
        return Sample(f"\\x{data.hex()}", f"\\x{data.hex()}", data)

    return Model(type_form(17), _samples(st.binary(max_size=40), sample))


def booleans() -> Model:
    return Model(
        type_form(16), _samples(st.booleans(), lambda yes: Sample("t" if yes else "f", yes, yes))
    )


def documents() -> Model:
    values = st.recursive(
        st.none() | st.booleans() | st.integers().map(str) | TEXTS,
        lambda inside: st.lists(inside, max_size=3) | st.dictionaries(TEXTS, inside, max_size=3),
        max_leaves=4,
    )

    def sample(value: Any) -> Sample:
        text = json.dumps(value, ensure_ascii=False)
        return Sample(text, parse(text), text)

    return Model(type_form(3802), _samples(values, sample))


def _days_of(year: int, month: int, day: int) -> int:
    """By Python's calendar, moved by whole cycles of 400 years, which are all alike."""
    cycles = (year - 1600) // 400
    return dt.date(year - cycles * 400, month, day).toordinal() - 719_163 + cycles * 146_097


@st.composite
def _dates(draw: st.DrawFn, low: int, high: int) -> tuple[str, str, int]:
    """A date as text without its era, the era, and its number; any year, by astronomers' count."""
    year = draw(st.one_of(st.integers(1900, 2100), st.integers(low, high)))
    month = draw(st.integers(1, 12))
    long = 31 if month in (1, 3, 5, 7, 8, 10, 12) else 30
    if month == 2:
        long = 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    day = draw(st.one_of(st.integers(1, long), st.just(long)))
    shown = year if year > 0 else 1 - year
    return f"{shown:04}-{month:02}-{day:02}", "" if year > 0 else " BC", _days_of(year, month, day)


def dates() -> Model:
    infinite = st.sampled_from(
        [
            Sample("infinity", "infinity", 2**31 - 1),
            Sample("-infinity", "-infinity", -(2**31)),
        ]
    )
    finite = _dates(-4712, 5_874_897).map(lambda d: Sample(d[0] + d[1], d[0] + d[1], d[2]))
    return Model(type_form(1082), st.one_of(finite, finite, infinite))


def timestamps(*, zoned: bool) -> Model:
    zone, zulu = ("+00", "Z") if zoned else ("", "")
    infinite = st.sampled_from(
        [
            Sample("infinity", "infinity", 2**63 - 1),
            Sample("-infinity", "-infinity", -(2**63)),
        ]
    )

    def sample(made: tuple[tuple[str, str, int], int]) -> Sample:
        (date, era, days), moment = made
        seconds, fraction = divmod(moment, 1_000_000)
        time = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        if fraction:
            time += f".{fraction:06}".rstrip("0")
        return Sample(
            f"{date} {time}{zone}{era}",
            f"{date}T{time}{zulu}{era}",
            days * 86_400_000_000 + moment,
        )

    moments = st.one_of(st.integers(0, 86_399_999_999), st.sampled_from([0, 500_000, 1]))
    finite = st.tuples(_dates(-4712, 294_246), moments).map(sample)
    return Model(type_form(1184 if zoned else 1114), st.one_of(finite, finite, infinite))


def hstores() -> Model:
    def inside(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    def sample(pairs: dict[str, str | None]) -> Sample:
        text = ", ".join(
            f"{inside(key)}=>{'NULL' if value is None else inside(value)}"
            for key, value in pairs.items()
        )
        return Sample(text, Object(tuple(pairs.items())), sorted(pairs.items()))

    values = st.dictionaries(TEXTS, st.none() | TEXTS, max_size=4)
    return Model(HSTORE, _samples(values, sample))


def vectors() -> Model:
    def sample(numbers: list[float]) -> Sample:
        texts = [str(np.float32(number)).removesuffix(".0") for number in numbers]
        return Sample(
            f"[{','.join(texts)}]", [Number(t) for t in texts], [repr(n) for n in numbers]
        )

    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return Model(VECTOR, _samples(st.lists(finite, min_size=1, max_size=5), sample))


def unknown() -> Model:
    return Model(type_form(999_999), text_model().samples)


def _texts(samples: Sequence[Sample | None]) -> list[str | None]:
    return [None if sample is None else sample.text for sample in samples]


def array_out(elements: Sequence[str | None], delimiter: str) -> str:
    """One dimension of it, as Postgres writes it."""

    def one(text: str | None) -> str:
        if text is None:
            return "NULL"
        special = set(text) & set('{}"\\ \t\n\v\f\r' + delimiter)
        if text and not special and text.upper() != "NULL":
            return text
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return "{" + delimiter.join(map(one, elements)) + "}"


def record_out(fields: Sequence[str | None]) -> str:
    """A composite as Postgres writes it."""

    def one(text: str | None) -> str:
        if text is None:
            return ""
        if text and not set(text) & set('(),"\\ \t\n\v\f\r'):
            return text
        return '"' + text.replace("\\", "\\\\").replace('"', '""') + '"'

    return "(" + ",".join(map(one, fields)) + ")"


def arrays(element: Model, *, dimensions: int = 1, nulls: bool = True) -> Model:
    """Of ``dimensions``, some with bounds of their own."""

    @st.composite
    def samples(draw: st.DrawFn) -> Sample:
        lengths = [draw(st.integers(1, 3)) for _ in range(dimensions)]
        if draw(st.integers(0, 5)) == 0:
            return Sample("{}", [], [])
        one = st.none() | element.samples if nulls else element.samples

        def level(depth: int) -> Sample:
            if depth == dimensions:
                found = [draw(one) for _ in range(lengths[-1])]
                text = array_out(_texts(found), element.delimiter)
                return Sample(text, [f and f.json for f in found], [f and f.typed for f in found])
            parts = [level(depth + 1) for _ in range(lengths[depth - 1])]
            return Sample(
                "{" + element.delimiter.join(part.text for part in parts) + "}",
                [part.json for part in parts],
                [part.typed for part in parts],
            )

        made = level(1)
        if draw(st.integers(0, 5)) == 0:
            lows = [draw(st.integers(-3, 5)) for _ in lengths]
            bounds = "".join(f"[{low}:{low + n - 1}]" for low, n in zip(lows, lengths, strict=True))
            return Sample(f"{bounds}={made.text}", made.json, made.typed)
        return made

    return Model(array_of(element.form, element.delimiter, dimensions), samples())


def composites(**fields: Model) -> Model:
    names = [name.replace("_", ' "') for name in fields]

    def sample(found: tuple[Sample | None, ...]) -> Sample:
        return Sample(
            record_out(_texts(found)),
            Object(tuple((n, f and f.json) for n, f in zip(names, found, strict=True))),
            {n: f and f.typed for n, f in zip(names, found, strict=True)},
        )

    form = composite_of([(n, m.form) for n, m in zip(names, fields.values(), strict=True)])
    values = st.tuples(*(st.none() | model.samples for model in fields.values()))
    return Model(form, _samples(values, sample))


_INT4 = integers(23, -(2**31), 2**31 - 1)
_PAIR = composites(a=_INT4, b_c=text_model())

MODELS: dict[str, Model] = {
    "bool": booleans(),
    "int2": integers(21, -(2**15), 2**15 - 1),
    "int4": _INT4,
    "int8": integers(20, -(2**63), 2**63 - 1),
    "oid": integers(26, 0, 2**32 - 1),
    "float4": floats(700, 32),
    "float8": floats(701, 64),
    "numeric": numerics(),
    "numeric(10,2)": decimals(10, 2),
    "numeric(38,38)": decimals(38, 38),
    "numeric(38,0)": decimals(38, 0),
    "numeric(3,-2)": decimals(3, -2),
    "numeric(2,5)": decimals(2, 5),
    "text": text_model(),
    "bytea": bytea(),
    "jsonb": documents(),
    "date": dates(),
    "timestamp": timestamps(zoned=False),
    "timestamptz": timestamps(zoned=True),
    "hstore": hstores(),
    "vector": vectors(),
    "unknown": unknown(),
    "int4[]": arrays(_INT4),
    "int4[][]": arrays(_INT4, dimensions=2),
    "text[]": arrays(text_model()),
    "text[][][]": arrays(text_model(), dimensions=3),
    "box[]": arrays(Model(type_form(603), text_model().samples, ";")),
    "timestamptz[]": arrays(timestamps(zoned=True)),
    "bytea[]": arrays(bytea()),
    "hstore[]": arrays(hstores()),
    "vector[]": arrays(vectors()),
    "numeric(10,2)[]": arrays(decimals(10, 2)),
    "pair": _PAIR,
    "single": composites(only=text_model()),
    "numbers": composites(a=_INT4, b=integers(20, -9, 9)),
    "pair[]": arrays(_PAIR),
    "deep": composites(
        pair=_PAIR, pairs=arrays(_PAIR), at=timestamps(zoned=True), tags=hstores(), n=decimals(9, 3)
    ),
}

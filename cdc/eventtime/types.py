"""The registry of event time types: by which name a column's text is read as a time.

Invariants: a parser takes a whole column, as Postgres wrote it with ``DateStyle = ISO``
and ``TimeZone = UTC``, and never raises for a bad value. A bad value has no time and stands in the
mask; null has no time and is not bad. So one unreadable row stops no consumer.
"""

from __future__ import annotations

import builtins
import difflib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cdc.errors import ConfigError
from cdc.eventtime.parsed_times import Parsed
from cdc.eventtime.times import NO_TIME, TIME_MAX, TIME_MIN, Times
from cdc.eventtime.timestamp_text import parse_days, parse_moments
from cdc.eventtime.unix_text import unix_parser

__all__ = ["NO_TIME", "EventTimeType", "Parsed", "Parser", "list", "names", "register", "resolve"]

Parser = Callable[[pa.StringArray], Parsed | Times]
"""Whole column in, times out; a parser that gives bare times says ``NO_TIME`` for a bad value."""

_PYTHON = "python:"
_NUMBERS = ("int2", "int4", "int8", "numeric", "float4", "float8", "text", "varchar")
_MOMENTS = ("timestamp", "timestamptz", "date", "text", "varchar")


@dataclass(frozen=True)
class EventTimeType:
    """A named way to read a column; ``column_types`` are Postgres' type names, None is any."""

    name: str
    column_types: frozenset[str] | None
    parser: Parser = field(repr=False)

    def reads(self, column_type: str) -> bool:
        """Whether it can read a column of this Postgres type (``pg_type.typname``)."""
        return self.column_types is None or column_type in self.column_types

    def parse(self, column: pa.StringArray) -> Parsed:
        """The times of a column; whatever a parser makes of it, bad values are only marked."""
        try:
            return _checked(column, self.parser(column))
        except Exception:
            # A parser from outside may raise for one value: the others are read all the same.
            return _one_by_one(column, self.parser)


def _checked(column: pa.StringArray, answer: Parsed | Times) -> Parsed:
    """A parser's answer with what is no time, or beyond the calendar, marked as bad."""
    times = np.asarray(answer.times if isinstance(answer, Parsed) else answer)
    if times.dtype != np.int64 or times.shape != (len(column),):
        raise TypeError(f"gave {times.dtype}{times.shape} for {len(column)} values, not int64")
    present = np.asarray(column.is_valid())
    timed = present & (times >= TIME_MIN) & (times <= TIME_MAX)
    bad = present & ~timed
    if isinstance(answer, Parsed):
        timed &= ~answer.bad
        bad |= answer.bad & present
        # Of a value that is there but says nothing (an empty text) a parser may make a null.
        bad &= answer.bad | (times != NO_TIME)
    return Parsed(np.where(timed, times, NO_TIME), bad)


def _one_by_one(column: pa.StringArray, parser: Parser) -> Parsed:
    times: Times = np.full(len(column), NO_TIME, np.int64)
    bad: NDArray[np.bool_] = np.zeros(len(column), np.bool_)
    for at in range(len(column)):
        one = column.slice(at, 1)
        try:
            parsed = _checked(one, parser(one))
        except Exception:
            bad[at] = one.null_count == 0
        else:
            times[at], bad[at] = parsed.times[0], parsed.bad[0]
    return Parsed(times, bad)


_types: dict[str, EventTimeType] = {}


def register(name: str, parser: Parser, *, column_types: Collection[str] | None = None) -> None:
    """Make a parser known by ``name``; without ``column_types`` it reads columns of any type."""
    if name in _types or name.startswith(_PYTHON) or not name:
        raise ConfigError(
            f"the event time type '{name}' cannot be registered: the name is taken",
            fix=f"choose a name that is none of {', '.join(names())} and does not begin with "
            f"'{_PYTHON}'",
        )
    types = None if column_types is None else frozenset(column_types)
    _types[name] = EventTimeType(name, types, parser)


def resolve(name: str) -> EventTimeType:
    """The type of that name; ``python:package.module:function`` is imported."""
    if name.startswith(_PYTHON):
        return EventTimeType(name, None, _imported(name))
    found = _types.get(name)
    if found is None:
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"there is no event time type '{name}'",
            fix=f"{hint}Use one of {', '.join(names())}, or python:package.module:function",
        )
    return found


def names() -> builtins.list[str]:
    """Every name that ``resolve`` knows, in alphabetical order."""
    return sorted(_types)


list = names


def _imported(name: str) -> Parser:
    module_name, colon, function_name = name.removeprefix(_PYTHON).partition(":")
    if not colon or not module_name or not function_name:
        raise ConfigError(
            f"the event time type '{name}' names no function",
            fix="write it as python:package.module:function",
        )
    try:
        module = import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"the event time type '{name}' cannot be imported: {type(error).__name__}: {error}",
            fix=f"install the module {module_name} where Walbrook runs, or correct its name",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"the event time type '{name}': {module_name} has no function {function_name}",
            fix="name a function that takes a pyarrow.StringArray and gives a Parsed",
        )
    parser: Parser = function
    return parser


for _name, _unit_us in (("unix_s", 1_000_000), ("unix_ms", 1_000), ("unix_us", 1)):
    register(_name, unix_parser(_unit_us), column_types=_NUMBERS)
for _alias in ("s", "ms"):
    register(f"unixtimestamp_{_alias}", _types[f"unix_{_alias}"].parser, column_types=_NUMBERS)
for _name in ("iso8601", "timestamp", "timestamptz"):
    register(_name, parse_moments, column_types=_MOMENTS)
register("date", parse_days, column_types=_MOMENTS)

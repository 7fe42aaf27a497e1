"""JSON read without losing anything: the digits of numbers, the order of keys, repeated keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

Json = Any
"""None, bool, str, Number, a list, or an Object."""


@dataclass(frozen=True)
class Number:
    """A number as it was written."""

    text: str


@dataclass(frozen=True)
class Object:
    """The members of an object as they came."""

    members: tuple[tuple[str, Json], ...]

    def __getitem__(self, name: str) -> Json:
        return dict(self.members)[name]


def parse(text: str) -> Json:
    return json.loads(
        text,
        parse_int=Number,
        parse_float=Number,
        parse_constant=_refuse,
        object_pairs_hook=lambda pairs: Object(tuple(pairs)),
    )


def _refuse(constant: str) -> Json:
    raise ValueError(f"{constant} is no JSON")


def as_values(value: Json) -> Json:
    """What it means: numbers by their value, objects as dicts."""
    if isinstance(value, Number):
        return Decimal(value.text)
    if isinstance(value, Object):
        return {name: as_values(member) for name, member in value.members}
    if isinstance(value, list):
        return [as_values(member) for member in value]
    return value

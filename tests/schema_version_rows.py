"""Tables in several versions, and the messages of their changes."""

from __future__ import annotations

from tests import pgoutput

ID = ("id", 23, True)

PART = pgoutput.relation(2, "public", "part", [ID])

V1 = pgoutput.relation(1, "public", "item", [ID])

V2 = pgoutput.relation(1, "public", "item", [ID, ("a", 25)])

ASKS: dict[str, object] = {"actions": ["insert", "schema_change"]}


def part(number: int = 0) -> bytes:
    return pgoutput.insert(2, [str(number)])


def old(number: int) -> bytes:
    return pgoutput.insert(1, [str(number)])


def new(number: int) -> bytes:
    return pgoutput.insert(1, [str(number), "x"])

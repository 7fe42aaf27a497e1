"""What a request says, member by member: read, bounded, refused by name if it makes no sense."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

from cdc.service.http.api.refusals import RefusedError

BATCH_MAX = 10_000
WAIT_S_MAX = 300.0
HOLD_S_MAX = 43_200.0
_TEXT_MAX = 2_000
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*(ms|s|m|h)")

Members = Mapping[str, object]


def refuse_unknown(given: Members, known: Collection[str]) -> None:
    """A member that is not read was meant to do something."""
    for name in given:
        if name not in known:
            raise RefusedError(
                400, f"there is no {name[:60]}", fix=f"use {', '.join(known)}", field=name[:60]
            )


def whole_number(given: Members, name: str, *, default: int, most: int) -> int:
    """A number from 1 on; text that is one counts too, because queries have nothing else."""
    value = given.get(name, default)
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,9}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise RefusedError(
            400,
            f"{name} should be a whole number between 1 and {most}",
            fix=f"send it as {name}: 10",
            field=name,
        )
    return value


def seconds(
    given: Members, name: str, *, least: float, most: float, unit: str = "s"
) -> float | None:
    """A time in seconds: a number of ``unit``, or text such as 500ms, 30s or 5m; None if absent."""
    value = given.get(name)
    if value is None:
        return None
    found = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        found = value * _UNITS[unit]
    elif isinstance(value, str):
        match = _TIME.fullmatch(value.strip())
        if match:
            found = float(match[1]) * _UNITS[match[2]]
        elif re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", value.strip()):
            found = float(value) * _UNITS[unit]
    if not least <= found <= most:
        word = {"s": "seconds", "ms": "milliseconds"}[unit]
        raise RefusedError(
            400,
            f"{name} should be between {least:g} and {most:g} seconds",
            fix=f"send a number of {word}, or text such as 500ms, 30s or 5m",
            field=name,
        )
    return found


def text(given: Members, name: str) -> str | None:
    """A text without the one character that Postgres has none of; None if absent."""
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > _TEXT_MAX or "\0" in value:
        raise RefusedError(
            400, f"{name} should be a text of at most {_TEXT_MAX} characters", field=name
        )
    return value


def ack_ids(given: Members) -> list[str]:
    """The ack_ids; a worker that was handed nothing may send none."""
    value = given.get("ack_ids")
    if (
        not isinstance(value, list)
        or len(value) > BATCH_MAX
        or not all(isinstance(each, str) and "\0" not in each for each in value)
    ):
        raise RefusedError(
            400,
            f"ack_ids should be a list of at most {BATCH_MAX} of those that messages came with",
            fix='send {"ack_ids": ["..."]}',
            field="ack_ids",
        )
    return value

"""Which consumers can be verified: those whose destination is to hold every row as it is."""

from __future__ import annotations

from cdc.config import PostgresDestination, Sink
from cdc.config.expression import NONE
from cdc.errors import OperatorError

_NEEDED = ("insert", "update", "delete")


def require_comparable(consumer: Sink) -> None:
    """OperatorError for a consumer whose settings decide which rows arrive, or as what."""
    for name in ("filter", "transform", "routing"):
        if getattr(consumer, name) != NONE:
            raise not_comparable(consumer.name, f"its {name} decides what its destination holds")
    lacking = [action for action in _NEEDED if action not in consumer.actions]
    if lacking:
        raise not_comparable(consumer.name, f"it does not take the action {lacking[0]}")
    holds_tables = isinstance(consumer.destination, PostgresDestination)
    if not holds_tables and consumer.shape != "sequin":
        raise not_comparable(consumer.name, f"its messages have the shape {consumer.shape}")
    if consumer.oversize == "claim_check":
        raise not_comparable(consumer.name, "the content of its large messages is elsewhere")


def not_comparable(consumer: str, why: str) -> OperatorError:
    return OperatorError(
        f"{consumer} cannot be compared with its source: {why}",
        fix="verify a sink without that setting; this one can only be backfilled",
        kind="not_comparable",
    )

"""What can be verified: tables of which a consumer's destination is to hold every row as it is."""

from __future__ import annotations

from collections.abc import Iterable

from cdc.backfill.table import PublishedTable
from cdc.config import SinkConfig
from cdc.config.expression import NONE
from cdc.config.read_back import unreadable_reason
from cdc.config.table import TableName
from cdc.errors import OperatorError

_NEEDED = ("insert", "update", "delete")


def require_comparable(
    consumer: SinkConfig, table: TableName, published: Iterable[TableName]
) -> None:
    """OperatorError if settings of the consumer decide which rows arrive, where, or as what."""
    why = unreadable_reason(consumer, table, published)
    lacking = [action for action in _NEEDED if action not in consumer.actions]
    if consumer.filter != NONE:
        why = "its filter decides which changes of a row arrive"
    elif lacking:
        why = f"it does not take the action {lacking[0]}"
    if why is not None:
        raise OperatorError(
            f"{consumer.name} cannot be compared with its source: {why}",
            fix="verify a sink without that; this one can only be backfilled",
            kind="not_comparable",
        )


def require_key(table: PublishedTable) -> None:
    """OperatorError for a table whose rows have no key of their own."""
    if not table.has_key:
        raise OperatorError(
            f"{table.name} has no key, so its rows cannot be told apart",
            fix="give it a primary key",
            kind="no_key",
        )

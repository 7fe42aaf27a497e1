"""Telling a consumer's sink of a gap: one message, in its place between what came and what comes.

It has the action ``gap``, whatever actions the consumer asks for, and says from where to where
nothing will come, and why.
"""

from __future__ import annotations

from dataclasses import replace

import orjson
import pyarrow as pa
import structlog

from cdc.change import synthetic_rows
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.error_text import public_text
from cdc.errors import TransientError, WalbrookError
from cdc.queue.retry import kind_of
from cdc.state.active_consumers import read_active_consumers
from cdc.state.blocked_groups import GROUP, WHOLE_TABLE
from cdc.state.gaps import Gap, gap_reported, skip_evicted, unreported_gaps
from cdc.state.queued_messages import enqueue
from spark_pipeline.delivery.deliver import Share, send
from spark_pipeline.delivery.sender import refused

_logger = structlog.get_logger("walbrook.worker")


def pass_gaps(
    state: Connection, evicted: Cursor, *, source: str, term: int, shares: dict[str, Share]
) -> dict[str, WalbrookError]:
    """Let everyone pass what the log dropped on purpose below ``evicted``, and tell their sinks.

    ``shares`` has what a delivery to each consumer needs; the gaps of others are sent by the stage
    that serves them. Returns the consumers whose sink did not take its message, and why.
    """
    failed: dict[str, WalbrookError] = {}
    skip_evicted(state, source=source, term=term, evicted=evicted)
    # Read before the gaps: a consumer that is moved since then may have no gap any more.
    served = read_active_consumers(state, source).served
    for gap in unreported_gaps(state, source):
        share = shares.get(gap.consumer)
        if share is None or gap.consumer in failed or gap.consumer not in served:
            continue
        share = replace(share, settled_cursor=served[gap.consumer])
        _logger.warning(
            "worker.gap",
            consumer=gap.consumer,
            start=str(gap.start),
            end=str(gap.end),
            why=gap.reason,
        )
        error = _tell(share, gap)
        if error is None:
            gap_reported(state, gap, term)
        elif isinstance(error, WalbrookError) and _is_refusal(share, error):
            # The destination is there and does not want this message: it waits like any other.
            with state.transaction():
                enqueue(state, source, gap.consumer, refused(share.consumer, _alone(gap), error))
                gap_reported(state, gap, term)
        else:
            failed[gap.consumer] = TransientError(
                f"it cannot be told of its gap from {gap.start} to {gap.end}: {public_text(error)}"
            )
    return failed


def _is_refusal(share: Share, error: WalbrookError) -> bool:
    return share.consumer.destination.defers and kind_of(error) is not None


def _alone(gap: Gap) -> pa.RecordBatch:
    """The gap as a message that belongs to no group."""
    row = gap_change(gap).append_column(GROUP, pa.nulls(1, pa.int64()))
    return row.append_column(WHOLE_TABLE, pa.array([False]))


def _tell(share: Share, gap: Gap) -> Exception | None:
    try:
        return send(share, gap_change(gap)).error
    except Exception as error:  # whatever breaks here is this consumer's alone
        return error


def gap_change(gap: Gap) -> pa.RecordBatch:
    """The gap as one row of CHANGE_SCHEMA."""
    record: dict[str, object] = {"from": str(gap.start), "to": str(gap.end), "reason": gap.reason}
    if gap.bridged is not None:
        record["bridged"] = gap.bridged
    text = orjson.dumps(record).decode()
    return synthetic_rows("gap", [text], gap.noted_at, cursor=gap.cursor)

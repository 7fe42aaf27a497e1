"""A sink that is handed one message at a time, when many at once broke it.

What a destination refuses is its answer. This is for unforeseen exceptions: the message on
which one is raised counts as refused, and the others go on.
"""

from __future__ import annotations

import pyarrow as pa
import structlog

from cdc.change import MessageBatch
from cdc.cursor import Cursor
from cdc.errors import PoisonError
from cdc.queue.ledger.base import together
from sinks.base import Delivery, Sink
from spark_pipeline.delivery.deliver import Share, sender_for
from spark_pipeline.delivery.isolate import as_walbrook_error, is_suspect
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.delivery.sender import Sender

_logger = structlog.get_logger("walbrook.delivery")


def deliver_messages(share: Share, rows: pa.RecordBatch, end: Cursor, purpose: str = "") -> Outcome:
    """Deliver these messages in order, whatever the consumer asks for; all lie below ``end``."""
    try:
        return _taken(sender_for(share, purpose), rows, end)
    except Exception as error:
        if not is_suspect(error):
            raise
        _logger.warning(
            "delivery.broke", consumer=share.consumer.name, error=as_walbrook_error(error)
        )
        return _taken(sender_for(share, purpose, OneByOne), rows, end)


def _taken(sender: Sender, rows: pa.RecordBatch, end: Cursor) -> Outcome:
    return sender.finish(end) if sender.take(rows) else sender.outcome


class OneByOne:
    """Around another sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def deliver(self, batch: MessageBatch) -> Delivery:
        done = Delivery(0)
        for at in range(len(batch)):
            result = self._one(batch.slice(at, 1))
            done = Delivery(
                done.settled + result.settled,
                done.absorbed + result.absorbed,
                result.error,
                together((done.ledger, result.ledger)),
            )
            if not result.settled or result.error is not None:
                break
        return done

    def close(self) -> None:
        self._sink.close()

    def _one(self, message: MessageBatch) -> Delivery:
        try:
            return self._sink.deliver(message)
        except Exception as error:
            if not is_suspect(error):
                raise
            broken = as_walbrook_error(error)
            what = f"delivery of the change at {message.cursor(0)} broke: {broken.what}"
            refused = PoisonError(what, fix="it is tried again", detail=broken.detail)
            return Delivery(0, error=refused)

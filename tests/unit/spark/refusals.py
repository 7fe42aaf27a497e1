"""Outcomes of refused messages."""

from __future__ import annotations

from spark_pipeline.delivery.outcome import Outcome
from tests.unit.spark.sending import Destination, Message, consumer, deliver, sender_for


def refused(*keys: int, max_deliveries: int = 20) -> Outcome:
    """What a destination refused of messages with these keys, between two that it took."""
    messages = [Message(100, 0, "taken")]
    messages += [Message(key, at, "poison") for at, key in enumerate(keys, 1)]
    fates = {message.cursor: message.fate for message in messages}
    settings = consumer(max_deliveries=max_deliveries)
    return deliver(sender_for(Destination(fates), settings=settings), messages, [])

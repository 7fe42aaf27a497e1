"""A sender over a destination that refuses some messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise

import pyarrow as pa
from hypothesis import strategies as st

from cdc.change import CHANGE_SCHEMA, MessageBatch
from cdc.config import SinkConfig
from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.shapes import Context, shape_for
from cdc.errors import PoisonError, TransientError
from cdc.queue.retry import ANSWERED
from cdc.state.blocked_groups import NOTHING, BlockedGroups
from sinks.base import Delivery
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.delivery.sender import Sender

CONTEXT = Context("hook", "shop", "h", "d", 0)

AT = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Message:
    """One change: its key, its number among all, and how its destination takes it."""

    key: int
    number: int
    fate: str  # taken, poison or answered
    action: str = "insert"

    @property
    def cursor(self) -> Cursor:
        return Cursor(8 * (1 + self.number // 3), self.number % 3)


@dataclass
class Destination:
    """Takes messages in order up to the first that it refuses, as a sink does."""

    fates: dict[Cursor, str]
    down_after: int | None = None  # messages after which it is not there any more
    taken: list[Cursor] = field(default_factory=list)

    def deliver(self, batch: MessageBatch) -> Delivery:
        for at in range(len(batch)):
            cursor = batch.cursor(at)
            if self.down_after is not None and len(self.taken) >= self.down_after:
                return Delivery(at, error=TransientError("gone"))
            if self.fates[cursor] == "poison":
                return Delivery(at, error=PoisonError("no"))
            if self.fates[cursor] == "answered":
                return Delivery(at, error=TransientError("broke", kind=ANSWERED))
            self.taken.append(cursor)
        return Delivery(len(batch))

    def close(self) -> None:
        pass


def rows(messages: list[Message]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {
                "commit_lsn": message.cursor.lsn,
                "commit_idx": message.cursor.idx,
                "commit_timestamp": AT,
                "xid": 1,
                "table_schema": "public",
                "table_name": "t" if message.key >= 0 else "u",
                "action": message.action,
                "record": '{"id": 1}',
                "record_pks": f'["{message.key}"]',
            }
            for message in messages
        ],
        schema=CHANGE_SCHEMA,
    )


def consumer(**given: object) -> SinkConfig:
    destination = {"type": "webhook", "url": "http://127.0.0.1:1/"}
    settings = {"name": "hook", "database": "shop", "destination": destination, **given}
    return SinkConfig.model_validate(settings)


def sender_for(
    destination: Destination, waiting: BlockedGroups = NOTHING, settings: SinkConfig | None = None
) -> Sender:
    shape = shape_for("sequin", CONTEXT)
    return Sender(
        settings or consumer(),
        destination,
        lambda changes: MessageBatch(shape.rows(changes), shape),
        ORIGIN,
        waiting,
    )


def deliver(sender: Sender, messages: list[Message], cuts: list[int]) -> Outcome:
    bounds = sorted({0, *(cut for cut in cuts if cut < len(messages)), len(messages)})
    for start, stop in pairwise(bounds):
        if not sender.take(rows(messages[start:stop])):
            return sender.outcome
    return sender.finish(Cursor(1 << 40, 0))


def queued(outcome: Outcome) -> list[Cursor]:
    if outcome.queued is None:
        return []
    columns = (outcome.queued.column(name).to_pylist() for name in ("commit_lsn", "commit_idx"))
    return sorted(map(Cursor, *columns))


fates = st.sampled_from(["taken"] * 6 + ["poison", "answered"])

actions = st.sampled_from(["insert"] * 12 + ["truncate"])

histories = st.lists(st.tuples(st.integers(-2, 3), fates, actions), max_size=40).map(
    lambda history: [Message(key, at, *rest) for at, (key, *rest) in enumerate(history)]
)

cuts = st.lists(st.integers(0, 40), max_size=5)

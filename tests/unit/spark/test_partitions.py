"""Concurrent deliveries against an obvious model: order by group, barriers, failures, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cdc.change import MessageBatch
from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.shapes import shape_for
from cdc.errors import PoisonError, TransientError, WalbrookError
from sinks.base import Delivery
from spark_pipeline.delivery.deliver import Origin, Share
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.delivery.partitions import deliver_in_parts
from spark_pipeline.delivery.sender import REFUSALS_MAX, ConsecutiveRefusals, Sender
from tests.unit.spark.sending import CONTEXT, Message, consumer, cuts, histories, queued, rows

END = Cursor(1 << 40, 0)


@dataclass
class Destination:
    """Takes a message of each part in turn, up to the first of that part that it refuses."""

    fates: dict[Cursor, str]
    down_after: int | None = None
    taken: list[Cursor] = field(default_factory=list)
    at_once: int = 0

    def deliver(self, batch: MessageBatch) -> Delivery:
        return self.deliver_parts([batch])[0]

    def deliver_parts(self, parts: Sequence[MessageBatch]) -> list[Delivery]:
        self.at_once = max(self.at_once, len(parts))
        settled = [0] * len(parts)
        errors: list[WalbrookError | None] = [None] * len(parts)
        for at in range(max(len(part) for part in parts)):
            for number, part in enumerate(parts):
                if errors[number] is not None or at >= len(part):
                    continue
                cursor = part.cursor(at)
                if self.down_after is not None and len(self.taken) >= self.down_after:
                    errors = [error or TransientError("gone") for error in errors]
                elif self.fates[cursor] != "taken":
                    errors[number] = PoisonError("no")
                else:
                    self.taken.append(cursor)
                    settled[number] += 1
        return [
            Delivery(count, error=error if count < len(part) else None)
            for count, part, error in zip(settled, parts, errors, strict=True)
        ]

    def close(self) -> None:
        pass


def deliver(
    destination: Destination, messages: list[Message], cuts: list[int], parts: int
) -> Outcome:
    settings = consumer(partition_count=parts, batch_size=1)
    share = Share(settings, Origin("shop", "h", "d"), "run", ORIGIN, END, [])
    shape = shape_for("sequin", CONTEXT)

    def open_sender(share: Share, *, refusals: ConsecutiveRefusals) -> Sender:
        return Sender(
            settings,
            destination,
            lambda changes: MessageBatch(shape.rows(changes), shape),
            share.start,
            share.waiting,
            refusals=refusals,
        )

    bounds = sorted({0, *(cut for cut in cuts if cut < len(messages)), len(messages)})
    batches = [rows(messages[start:stop]) for start, stop in pairwise(bounds)]
    return deliver_in_parts(share, batches, open_sender)


@given(histories, cuts, st.integers(2, 4), st.one_of(st.none(), st.integers(0, 30)))
def test_every_message_below_the_cursor_is_delivered_or_queued_and_groups_keep_their_order(
    messages: list[Message], cuts: list[int], parts: int, down_after: int | None
) -> None:
    destination = Destination({m.cursor: m.fate for m in messages}, down_after)
    outcome = deliver(destination, messages, cuts, parts)
    queued_before = queued(outcome)
    below = [m.cursor for m in messages if m.cursor < outcome.cursor]
    taken = [cursor for cursor in destination.taken if cursor < outcome.cursor]
    assert sorted(taken + queued_before) == below
    assert len(set(destination.taken)) == len(destination.taken)
    if outcome.is_whole:
        assert outcome.cursor == END

    place = {cursor: at for at, cursor in enumerate(destination.taken)}
    waits = set(queued_before)
    for at, message in enumerate(messages):
        if message.cursor not in place:
            continue
        for earlier in messages[:at]:
            same_table = (earlier.key >= 0) == (message.key >= 0)
            whole = same_table and "truncate" in (earlier.action, message.action)
            if earlier.key != message.key and not whole:
                continue
            # What is ordered before it went out before it, and does not wait behind it.
            assert earlier.cursor not in waits
            if earlier.cursor in place:
                assert place[earlier.cursor] < place[message.cursor]


def test_groups_are_delivered_at_once() -> None:
    messages = [Message(key, key, "taken") for key in range(8)]
    destination = Destination({m.cursor: m.fate for m in messages})
    outcome = deliver(destination, messages, [], 4)
    assert (outcome.error, outcome.delivered) == (None, 8)
    assert destination.at_once == 4


def test_refusals_in_one_part_are_not_the_destinations_fault_while_another_is_accepted() -> None:
    # One group has much; all the others, as many as would be too many in a row, are refused.
    many = 3 * REFUSALS_MAX
    messages = [Message(0 if at % 2 else at + 1, at, "taken") for at in range(2 * many)]
    fates = {m.cursor: m.fate if m.key == 0 else "poison" for m in messages}
    destination = Destination(fates)
    outcome = deliver(destination, messages, [], 2)
    assert outcome.error is None
    assert outcome.cursor == END
    assert len(queued(outcome)) == many
    assert set(destination.taken) == {m.cursor for m in messages if m.key == 0}


def test_a_destination_that_refuses_everything_is_at_fault_and_nothing_of_it_is_queued() -> None:
    messages = [Message(at, at, "poison") for at in range(4 * REFUSALS_MAX)]
    destination = Destination({m.cursor: m.fate for m in messages})
    outcome = deliver(destination, messages, [], 2)
    assert outcome.failed
    assert outcome.error is not None
    assert "messages in a row and took none" in outcome.error.what
    assert all(cursor < outcome.cursor for cursor in queued(outcome))


def test_a_destination_that_is_gone_ends_every_part_and_what_all_have_settled_is_settled() -> None:
    count = 4_000
    messages = [Message(at, at, "taken") for at in range(count)]
    destination = Destination({m.cursor: m.fate for m in messages}, down_after=100)
    outcome = deliver(destination, messages, [], 2)
    assert outcome.failed
    assert outcome.cursor <= messages[101].cursor
    assert outcome.delivered == 100

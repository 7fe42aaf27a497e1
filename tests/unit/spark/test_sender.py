"""The sender against an obvious model: random messages, refusals, groups, cuts and crashes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cdc.change import CHANGE_SCHEMA, MessageBatch
from cdc.config.destination import FileDestination
from cdc.cursor import ORIGIN, Cursor
from cdc.state.blocked_groups import NOTHING
from sinks.base import Delivery
from spark_pipeline.delivery.sender import REFUSALS_MAX
from tests.unit.spark.sending import (
    Destination,
    Message,
    consumer,
    cuts,
    deliver,
    histories,
    queued,
    rows,
    sender_for,
)

ONE_ORDER = FileDestination(path=Path("x"))


@given(histories, cuts, st.one_of(st.none(), st.integers(0, 30)))
def test_every_message_below_the_cursor_is_delivered_or_queued_and_order_is_kept(
    messages: list[Message], cuts: list[int], down_after: int | None
) -> None:
    destination = Destination({m.cursor: m.fate for m in messages}, down_after)
    outcome = deliver(sender_for(destination), messages, cuts)
    queued_before = queued(outcome)
    taken = [cursor for cursor in destination.taken if cursor < outcome.cursor]
    below = [m.cursor for m in messages if m.cursor < outcome.cursor]
    assert sorted(taken + queued_before) == below
    assert outcome.delivered == len(destination.taken)
    if outcome.is_whole:
        assert outcome.cursor == Cursor(1 << 40, 0)

    # Nothing that went out stands behind something of its group, or of its table, that waits.
    waits = set(queued_before)
    for at, message in enumerate(messages):
        if message.cursor not in destination.taken or message.cursor >= outcome.cursor:
            continue
        for earlier in messages[:at]:
            same_table = (earlier.key >= 0) == (message.key >= 0)
            whole = "truncate" in (earlier.action, message.action)
            if earlier.cursor in waits:
                assert earlier.key != message.key
                assert not (same_table and whole)


@given(histories, cuts)
def test_a_destination_is_at_fault_only_after_that_many_refusals_in_a_row(
    messages: list[Message], cuts: list[int]
) -> None:
    destination = Destination({m.cursor: m.fate for m in messages})
    outcome = deliver(sender_for(destination), messages, cuts)
    if outcome.error is not None:
        assert f"refused {REFUSALS_MAX + 1} messages in a row" in outcome.error.what
        # Everything from the first of them on comes again: nothing of it is queued.
        assert all(cursor < outcome.cursor for cursor in queued(outcome))
        assert destination.taken == [c for c in destination.taken if c < outcome.cursor]


def test_a_message_that_waits_from_before_holds_its_group_back() -> None:
    first = [Message(1, 0, "poison"), Message(2, 1, "taken")]
    destination = Destination({m.cursor: m.fate for m in first})
    outcome = deliver(sender_for(destination), first, [])
    assert outcome.queued is not None
    waiting = NOTHING.with_these(outcome.queued)
    more = [Message(1, 2, "taken"), Message(2, 3, "taken")]
    destination = Destination({m.cursor: m.fate for m in more})
    outcome = deliver(sender_for(destination, waiting), more, [])
    assert destination.taken == [more[1].cursor]
    assert queued(outcome) == [more[0].cursor]


def test_a_refusal_where_one_order_is_needed_is_dead_and_settled_before_the_rest() -> None:
    messages = [Message(1, 0, "taken"), Message(2, 1, "poison"), Message(3, 2, "taken")]
    destination = Destination({m.cursor: m.fate for m in messages})
    sender = sender_for(destination, settings=consumer(destination=ONE_ORDER))
    outcome = deliver(sender, messages, [])
    assert destination.taken == [messages[0].cursor]
    assert [poison.cursor for poison in outcome.dead] == [messages[1].cursor]
    assert outcome.cursor == Cursor(messages[1].cursor.lsn, messages[1].cursor.idx + 1)
    assert outcome.more, "what follows comes next"
    assert not outcome.failed
    assert outcome.queued is None


def test_on_such_a_destination_nothing_is_sent_past_a_message_that_is_too_large() -> None:
    messages = [Message(1, 0, "taken"), Message(2, 1, "taken")]
    destination = Destination({m.cursor: m.fate for m in messages})
    large = rows(messages).set_column(
        CHANGE_SCHEMA.get_field_index("record"),
        CHANGE_SCHEMA.field("record"),
        pa.array(['{"id": "' + "x" * 2000 + '"}', '{"id": 1}']),
    )
    sender = sender_for(
        destination, settings=consumer(destination=ONE_ORDER, max_message_bytes=1000)
    )
    assert not sender.take(large)
    outcome = sender.outcome
    assert destination.taken == []
    assert [poison.cursor for poison in outcome.dead] == [messages[0].cursor]
    assert outcome.cursor == Cursor(messages[0].cursor.lsn, messages[0].cursor.idx + 1)
    assert "bytes, more than the 1000" in outcome.dead[0].error


def test_the_top_is_that_of_the_messages_whose_destination_keeps_a_position() -> None:
    class Streams(Destination):
        """Messages of one stream in the first batch, of routed streams in the second."""

        def deliver(self, batch: MessageBatch) -> Delivery:
            done = super().deliver(batch)
            return replace(done, top=ORIGIN) if batch.cursor(0) == own[0].cursor else done

    own, routed = ([Message(0, n, "taken") for n in few] for few in ((0, 1), (2, 3)))
    messages = own + routed
    sender = sender_for(Streams({m.cursor: m.fate for m in messages}))
    outcome = deliver(sender, messages, [len(own)])
    assert (outcome.top_before, outcome.top) == (ORIGIN, own[-1].cursor)

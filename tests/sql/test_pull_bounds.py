"""Caps and ages: the oldest go, and never in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson
import pytest

from cdc.change import MessageBatch
from cdc.cursor import Cursor
from cdc.decoding.shapes import ShapeName
from cdc.queue.groups import BY_KEY
from sinks.pull import PullSink, Queue
from tests.conformance.messages import batch, cursor_of
from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.pull_queue import SOURCE, Message, Puller, make_pull_consumer
from tests.waiting import until

pytestmark = pytest.mark.migrated


@pytest.fixture(scope="module")
def state(postgres_server: PostgresServer) -> Iterator[Database]:
    with fresh_database(postgres_server.dsn) as made:
        yield made


class Bounded:
    """A consumer whose messages come through its sink."""

    def __init__(self, state: Database, name: str, **settings: Any) -> None:
        make_pull_consumer(state, name, **settings)
        self.shape: ShapeName = settings.get("shape", "sequin")
        self.sink = PullSink(Queue(state.dsn, SOURCE, BY_KEY), consumer=name)
        self.puller = Puller(state, name)
        self.name = name

    def store(self, start: int, end: int) -> None:
        delivery = self.sink.deliver(batch(start, end, self.shape))
        assert (delivery.error, delivery.settled) == (None, end - start)

    def receive(self, batch_size: int = 1000) -> list[Message]:
        return self.puller.receive(batch_size)

    def gaps(self) -> list[tuple[Any, ...]]:
        return self.puller.rows(
            "SELECT from_lsn || ':' || from_idx, to_lsn || ':' || to_idx, reason, "
            "reported_at IS NOT NULL "
            f"FROM walbrook.gaps WHERE consumer = '{self.name}' ORDER BY from_lsn, from_idx"
        )

    def events(self) -> list[tuple[Any, ...]]:
        return self.puller.rows(
            f"SELECT kind, severity FROM walbrook.health WHERE consumer = '{self.name}'"
        )


@pytest.fixture
def bounded(state: Database, request: pytest.FixtureRequest) -> Iterator[Callable[..., Bounded]]:
    opened: list[Bounded] = []

    def make(**settings: Any) -> Bounded:
        opened.append(
            Bounded(state, request.node.originalname[5:60] + settings.get("shape", ""), **settings)
        )
        return opened[-1]

    yield make
    for each in opened:
        each.sink.close()
        each.puller.close()


def records(messages: Sequence[Message]) -> list[int]:
    """The ids of the rows, and -1 for a gap."""
    return [-1 if each.action == "gap" else each.message["record"]["id"] for each in messages]


def past(number: int) -> Cursor:
    cursor = cursor_of(number)
    return Cursor(cursor.lsn, cursor.idx + 1)


def test_beyond_max_messages_the_oldest_go_and_a_gap_stands_in_their_place(
    bounded: Callable[..., Bounded],
) -> None:
    queue = bounded(max_messages=10)
    queue.store(0, 10)
    assert queue.gaps() == []
    queue.store(10, 15)
    found = queue.receive()
    assert records(found) == [-1, *range(6, 15)]
    gap = found[0].message
    first, end = str(cursor_of(0)), str(past(5))
    assert gap["action"] == "gap"
    assert gap["record"] == {"from": first, "to": end, "reason": "cap"}
    place = cursor_of(5)
    metadata = gap["metadata"]
    assert Cursor(metadata["commit_lsn"], metadata["commit_idx"]) == place
    assert metadata["idempotency_key"] == f"{place.lsn}:{place.idx}:gap"
    assert metadata["commit_timestamp"] > "2026"
    assert queue.gaps() == [(first, end, "cap", True)]
    assert queue.events() == [("records_dropped", "warning")]


def test_a_gap_that_is_dropped_itself_becomes_part_of_the_next(
    bounded: Callable[..., Bounded],
) -> None:
    queue = bounded(max_messages=10)
    for start in range(0, 40, 5):
        queue.store(start, start + 5)
    assert records(queue.receive()) == [-1, *range(32, 40)]
    assert queue.gaps() == [(str(cursor_of(0)), str(past(31)), "cap", True)]


def test_held_messages_stay_and_waiting_or_returned_ones_go_first(
    bounded: Callable[..., Bounded],
) -> None:
    queue = bounded(max_messages=10)
    queue.store(0, 9)
    held = queue.receive(6)
    queue.puller.nack(held[1:3], delay="1 h")
    queue.store(9, 14)
    assert queue.puller.ack([held[0], *held[3:]]) == (4, [])
    found = queue.receive()
    assert records(found) == [-1, -1, *range(11, 14)]
    gaps = [(start, end) for start, end, _, _ in queue.gaps()]
    assert gaps == [
        (str(cursor_of(1)), str(past(2))),
        (str(cursor_of(6)), str(past(10))),
    ]


def test_beyond_max_bytes_as_much_goes(bounded: Callable[..., Bounded]) -> None:
    queue = bounded(max_bytes=10_000)
    queue.store(0, 100)
    ((size, count),) = queue.puller.rows(
        "SELECT sum(r.bytes), count(*) FROM walbrook.pull_messages r "
        f"JOIN walbrook.consumers c ON c.id = r.consumer AND c.name = '{queue.name}'"
    )
    assert 5_000 < size <= 10_000
    found = queue.receive()
    assert len(found) == count
    assert records(found)[1:] == list(range(100 - count + 1, 100))


@pytest.mark.parametrize("shape", ["debezium", "record"])
def test_a_gap_has_the_consumers_shape(bounded: Callable[..., Bounded], shape: str) -> None:
    queue = bounded(max_messages=2, shape=shape)
    queue.store(0, 4)
    gap = queue.receive(1)[0].message
    said = {"from": str(cursor_of(0)), "to": str(past(2)), "reason": "cap"}
    if shape == "record":
        assert gap == said
    else:
        assert (gap["op"], gap["gap"]) == ("gap", said)
        assert gap["source"]["lsn"] == cursor_of(2).lsn
        assert gap["ts_ms"] * 1000 <= gap["ts_us"] < gap["ts_ms"] * 1000 + 1000
        assert gap["ts_ms"] > 1_700_000_000_000


def test_messages_older_than_the_ttl_go_when_a_worker_claims_or_stores(
    bounded: Callable[..., Bounded],
) -> None:
    queue = bounded(ttl_s=3600)
    queue.store(0, 6)
    held = queue.receive(1)
    queue.puller.rows(
        "UPDATE walbrook.pull_messages SET stored_at = clock_timestamp() - interval "
        "'2 h' RETURNING 1"
    )
    queue.store(6, 8)
    assert queue.puller.ack(held) == (1, [])
    assert records(queue.receive()) == [-1, 6, 7]
    assert queue.gaps() == [(str(cursor_of(1)), str(past(5)), "ttl", True)]
    assert queue.events() == [("records_dropped", "warning")]
    queue.puller.rows(
        "UPDATE walbrook.health_events SET seen_at = clock_timestamp() - interval '2 min' "
        "RETURNING 1"
    )
    queue.store(8, 9)
    assert queue.events() == []
    queue.puller.rows(
        "UPDATE walbrook.pull_messages SET stored_at = clock_timestamp() - interval "
        "'2 h' RETURNING 1"
    )
    assert records(queue.receive()) == [-1]


def test_a_queue_within_its_bounds_says_nothing(bounded: Callable[..., Bounded]) -> None:
    queue = bounded(max_messages=100, max_bytes="1MiB", ttl_s=3600)
    for start in range(0, 300, 50):
        queue.store(start, start + 50)
        held = queue.receive()
        assert records(held) == list(range(start, start + 50))
        queue.puller.ack(held)
    assert queue.gaps() == []
    assert queue.events() == []


def test_a_message_too_large_is_poison_and_those_before_it_are_stored(state: Database) -> None:
    make_pull_consumer(state, "sized")
    made: MessageBatch = batch(0, 5)
    rows = made.rows.to_pylist()
    rows[3]["record"] = orjson.dumps({"id": 3, "blob": "x" * 20_000}).decode()
    large = MessageBatch(type(made.rows).from_pylist(rows, schema=made.rows.schema), made.shape)
    sink = PullSink(Queue(state.dsn, SOURCE, BY_KEY, message_bytes_max=10_000), consumer="sized")
    delivery = sink.deliver(large)
    assert delivery.settled == 3
    assert delivery.error is not None
    assert delivery.error.kind == "too_large"
    assert "10000" in delivery.error.what
    assert sink.deliver(large.slice(4)).error is None
    sink.close()
    puller = Puller(state, "sized")
    assert records(until("the messages", puller.receive)) == [0, 1, 2, 4]
    puller.close()


def test_a_message_that_is_no_json_is_poison_and_those_before_it_are_stored(
    state: Database,
) -> None:
    make_pull_consumer(state, "broken")
    made = batch(0, 5)
    rows = made.rows.to_pylist()
    rows[2]["record"] = "{no json"
    broken = MessageBatch(type(made.rows).from_pylist(rows, schema=made.rows.schema), made.shape)
    sink = PullSink(Queue(state.dsn, SOURCE, BY_KEY), consumer="broken")
    sink.deliver(broken.slice(0, 1))
    delivery = sink.deliver(broken)
    sink.close()
    assert (delivery.settled, delivery.absorbed) == (2, 1)
    assert str(broken.cursor(2)) in str(delivery.error)

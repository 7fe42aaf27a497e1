"""A webhook behind each ledger: what it has is not sent, what it has not is, whatever happens."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdc.config.secrets import SecretText
from cdc.cursor import Cursor
from cdc.errors import PoisonError, TransientError
from cdc.queue.ledger.base import Integers, Ledger, LedgerUse, among
from cdc.queue.ledger.open import LedgerAddress, open_ledger
from cdc.queue.ledger.redis import RedisLedger
from demo.embedded_redis import EmbeddedRedis
from sinks.ledgered import NOTED_MESSAGES, LedgeredSink, LedgerPlace
from sinks.webhook import WebhookSink
from tests.conformance.crash import Killed
from tests.conformance.messages import CONSUMER, batch, cursor_of
from tests.examples import examples
from tests.fix_http import Endpoint, Scripted
from tests.fix_ledger import KnownLedger
from tests.fix_postgres import Database
from tests.waiting import until


@pytest.fixture
def hook(endpoint: Endpoint) -> Iterator[WebhookSink]:
    sink = WebhookSink(endpoint.url, consumer=CONSUMER, batch_size=10, timeout_s=10, max_retries=0)
    yield sink
    sink.close()


@pytest.fixture
def ledger(known_ledger: KnownLedger) -> Iterator[Ledger]:
    opened = open_ledger(known_ledger.address)
    yield opened
    opened.close()


def ledgered(hook: WebhookSink, ledger: Ledger, known: KnownLedger) -> LedgeredSink:
    return LedgeredSink(hook, ledger, LedgerPlace(known.address, known.name))


def sent(endpoint: Endpoint) -> list[list[int]]:
    """The numbers of the messages in each request that was accepted."""
    numbers = {cursor_of(n): n for n in range(1000)}
    found = []
    for request in endpoint.accepted:
        metadata = [cast("dict[str, int]", each["metadata"]) for each in request.messages]
        found.append([numbers[Cursor(m["commit_lsn"], m["commit_idx"])] for m in metadata])
    return found


def columns(*numbers: int) -> tuple[Integers, Integers]:
    both = np.array([cursor_of(n) for n in numbers], dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def test_of_a_batch_that_was_partly_delivered_only_the_rest_is_sent(
    endpoint: Endpoint, hook: WebhookSink, ledger: Ledger, known_ledger: KnownLedger
) -> None:
    sink = ledgered(hook, ledger, known_ledger)
    ledger.note(known_ledger.name, *columns(0, 1, 2, 5, 8, 24))
    delivery = sink.deliver(batch(0, 25))
    assert (delivery.settled, delivery.absorbed, delivery.error) == (25, 6, None)
    assert delivery.ledger == LedgerUse()
    assert sent(endpoint) == [
        [3, 4, 6, 7, 9, 10, 11, 12, 13, 14],
        [15, 16, 17, 18, 19, 20, 21, 22, 23],
    ]


def test_of_a_batch_that_was_delivered_nothing_is_sent(
    endpoint: Endpoint, hook: WebhookSink, ledger: Ledger, known_ledger: KnownLedger
) -> None:
    sink = ledgered(hook, ledger, known_ledger)
    assert sink.deliver(batch(0, 25)).absorbed == 0
    endpoint.stop()  # it need not even be there
    delivery = sink.deliver(batch(3, 25))
    endpoint.start()
    assert (delivery.settled, delivery.absorbed, delivery.error) == (22, 22, None)
    assert len(sent(endpoint)) == 3


def test_a_message_behind_a_refused_one_waits_though_the_ledger_has_it(
    endpoint: Endpoint, hook: WebhookSink, ledger: Ledger, known_ledger: KnownLedger
) -> None:
    sink = ledgered(hook, ledger, known_ledger)
    ledger.note(known_ledger.name, *columns(1, 3, 9))
    endpoint.refuses = lambda messages: any(m["record"]["id"] == 4 for m in messages)  # type: ignore[index]
    delivery = sink.deliver(batch(0, 10))
    assert isinstance(delivery.error, PoisonError)
    assert (delivery.settled, delivery.absorbed) == (4, 2), "the first that is not safe is number 4"
    endpoint.refuses = None
    delivery = sink.deliver(batch(4, 10))
    assert (delivery.settled, delivery.absorbed, delivery.error) == (6, 1, None)
    assert sorted(itertools.chain(*sent(endpoint))) == [0, 2, 4, 5, 6, 7, 8]


class Dies:
    """A ledger whose process dies as it writes a note: before that, or after."""

    def __init__(self, ledger: Ledger, at: int, *, after: bool) -> None:
        self.with_state = ledger.with_state
        self.seen, self.trim, self.drop = ledger.seen, ledger.trim, ledger.drop
        self._ledger, self._left, self._after = ledger, at, after

    def note(self, name: str, lsn: Integers, idx: Integers, *, queued: bool = False) -> None:
        self._left -= 1
        if self._left > 0 or (self._left == 0 and self._after):
            self._ledger.note(name, lsn, idx, queued=queued)
        if self._left <= 0:
            raise Killed

    def close(self) -> None:
        """It dies without."""


@pytest.mark.parametrize("after", [False, True], ids=["before the note", "after the note"])
@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 4])
def test_a_crash_repeats_what_was_under_way_or_not_noted_yet_and_no_more(
    parts: int,
    at: int,
    after: bool,
    endpoint: Endpoint,
    hook: WebhookSink,
    ledger: Ledger,
    known_ledger: KnownLedger,
) -> None:
    bounds = [0, 150, 300, 450, 600][: parts + 1]
    first = [batch(*each) for each in itertools.pairwise(bounds)]
    with pytest.raises(Killed):
        ledgered(hook, Dies(ledger, at, after=after), known_ledger).deliver_parts(first)
    before = list(itertools.chain(*sent(endpoint)))
    noted = set(noted_numbers(ledger, known_ledger))
    assert noted <= set(before)
    assert len(before) - len(noted) < parts * (NOTED_MESSAGES + hook.messages_per_request)
    assert len(noted) >= (at if after else at - 1) * hook.messages_per_request
    again = open_ledger(known_ledger.address)
    # Cut differently, because more has come meanwhile.
    delivery = ledgered(hook, again, known_ledger).deliver(batch(0, 700))
    again.close()
    assert (delivery.settled, delivery.absorbed, delivery.error) == (700, len(noted), None)
    second = list(itertools.chain(*sent(endpoint)))[len(before) :]
    assert second == [n for n in range(700) if n not in noted], "each once, in order"


def noted_numbers(ledger: Ledger, known: KnownLedger) -> list[int]:
    """The messages that a ledger has."""
    found = ledger.seen(known.name, Cursor(0, 0), Cursor(1 << 60, 0))
    return [n for n in range(1000) if among(*columns(n), found)[0]]


def test_small_requests_share_notes_and_no_more_wait_for_one_than_is_promised(
    endpoint: Endpoint, ledger: Ledger, known_ledger: KnownLedger
) -> None:
    hook = WebhookSink(endpoint.url, consumer=CONSUMER, batch_size=1, timeout_s=10)
    waiting: list[int] = []

    class Counts(Dies):
        def note(self, name: str, lsn: Integers, idx: Integers, *, queued: bool = False) -> None:
            waiting.append(len(lsn))
            super().note(name, lsn, idx, queued=queued)
            missing = len(sent(endpoint)) - sum(waiting)
            assert missing < 2 * (NOTED_MESSAGES + 1)

    counts = Counts(ledger, 1_000, after=True)
    parts = [batch(0, 300), batch(300, 600)]
    deliveries = ledgered(hook, counts, known_ledger).deliver_parts(parts)
    hook.close()
    assert [each.settled for each in deliveries] == [300, 300]
    assert sum(waiting) == len(noted_numbers(ledger, known_ledger)) == 600
    assert max(waiting) < 2 * (NOTED_MESSAGES + 1)
    assert len(waiting) <= 600 / 4


def test_a_request_is_noted_while_the_next_one_is_not_answered(
    endpoint: Endpoint, hook: WebhookSink, ledger: Ledger, known_ledger: KnownLedger
) -> None:
    answer = threading.Event()
    endpoint.script.extend([Scripted(), Scripted(after=answer)])
    small = WebhookSink(endpoint.url, consumer=CONSUMER, batch_size=5, timeout_s=30)
    sink = ledgered(small, ledger, known_ledger)
    delivering = threading.Thread(target=sink.deliver, args=(batch(0, 10),))
    delivering.start()
    another = open_ledger(known_ledger.address)
    try:
        until("a note", lambda: noted_numbers(another, known_ledger) == [0, 1, 2, 3, 4])
    finally:
        answer.set()
        delivering.join()
        another.close()
        small.close()
    assert noted_numbers(ledger, known_ledger) == list(range(10))


@settings(
    max_examples=examples(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    noted=st.sets(st.integers(0, 59)),
    start=st.integers(0, 20),
    length=st.integers(1, 40),
    queued=st.booleans(),
    answers=st.lists(st.sampled_from([200, 200, 422, 503]), max_size=5),
)
def test_noted_messages_are_never_sent_and_others_never_left_out(
    noted: set[int],
    start: int,
    length: int,
    queued: bool,
    answers: list[int],
    endpoint: Endpoint,
    hook: WebhookSink,
    ledger: Ledger,
    known_ledger: KnownLedger,
) -> None:
    _forget(ledger, known_ledger.name)
    if noted:
        ledger.note(known_ledger.name, *columns(*sorted(noted)), queued=queued)
    place = LedgerPlace(known_ledger.address, known_ledger.name, queued=queued)
    sink = LedgeredSink(hook, ledger, place)
    endpoint.requests.clear()
    endpoint.script.clear()
    endpoint.script.extend(Scripted(status) for status in answers)
    asked = range(start, start + length)
    wanted = [n for n in asked if n not in noted]

    delivery = sink.deliver(batch(start, start + length))
    first = list(itertools.chain(*sent(endpoint)))
    assert first == wanted[: len(first)]
    safe = list(asked)[: delivery.settled]
    assert [n for n in safe if n not in noted] == first
    assert delivery.absorbed == len([n for n in safe if n in noted])
    assert (delivery.settled == length) == (delivery.error is None)

    endpoint.script.clear()
    again = sink.deliver(batch(start, start + length))
    assert (again.settled, again.error) == (length, None)
    assert list(itertools.chain(*sent(endpoint))) == wanted, "each once, in order"


def _forget(ledger: Ledger, name: str) -> None:
    """What earlier examples left; none of them takes a second, in which Redis trims but once."""
    if isinstance(ledger, RedisLedger):
        ledger._trimmed.clear()
    ledger.trim(name, Cursor(1 << 60, 0))
    ledger.drop(name, *columns(*range(60)))


def test_without_the_state_database_nothing_is_sent(endpoint: Endpoint, hook: WebhookSink) -> None:
    nowhere = LedgerAddress("postgres", SecretText("postgres://u:p@127.0.0.1:1/d"))
    ledger = open_ledger(nowhere)
    delivery = LedgeredSink(hook, ledger, LedgerPlace(nowhere, "n")).deliver(batch(0, 25))
    assert isinstance(delivery.error, TransientError)
    assert delivery.settled == 0
    assert endpoint.requests == []


def test_requests_that_could_not_be_noted_count_and_none_follows(
    endpoint: Endpoint, hook: WebhookSink, postgres_ledger: KnownLedger, ledger_database: Database
) -> None:
    ledger = open_ledger(postgres_ledger.address)
    sink = ledgered(hook, ledger, postgres_ledger)
    assert sink.deliver(batch(0, 10)).error is None
    # It can still be read, so the delivery begins.
    ledger_database.execute(
        "ALTER TABLE walbrook.ledger ADD CONSTRAINT small CHECK (length(cursors) < 100) NOT VALID"
    )
    delivery = sink.deliver(batch(10, 60))
    ledger_database.execute("ALTER TABLE walbrook.ledger DROP CONSTRAINT small")
    assert isinstance(delivery.error, TransientError)
    assert 10 <= delivery.settled < NOTED_MESSAGES + 10
    assert len(endpoint.accepted) == 1 + delivery.settled // 10
    ledger.close()


def test_without_redis_everything_is_sent_and_it_is_said_what_was_not_noted(
    endpoint: Endpoint, hook: WebhookSink, own_redis: EmbeddedRedis
) -> None:
    ledger = RedisLedger(own_redis.url, timeout_s=10, pause_s=0)
    place = LedgerPlace(LedgerAddress("redis", SecretText(own_redis.url)), "n", cursor_of(0))
    sink = LedgeredSink(hook, ledger, place)
    assert sink.deliver(batch(0, 25)).ledger == LedgerUse()
    own_redis.stop()
    delivery = sink.deliver(batch(20, 45))
    assert (delivery.settled, delivery.absorbed, delivery.error) == (25, 0, None)
    assert delivery.ledger is not None
    assert delivery.ledger.unnoted == 25
    assert "Redis" in str(delivery.ledger.lost)
    own_redis.start()
    assert sink.deliver(batch(45, 55)).ledger == LedgerUse()
    delivery = sink.deliver(batch(40, 60))
    assert (delivery.settled, delivery.absorbed) == (20, 10)
    assert sent(endpoint)[-1] == [40, 41, 42, 43, 44, 55, 56, 57, 58, 59]
    ledger.close()


def test_redis_keeps_nothing_that_is_settled(
    endpoint: Endpoint, hook: WebhookSink, redis_ledger: KnownLedger
) -> None:
    ledger = open_ledger(redis_ledger.address)
    ledger.note(redis_ledger.name, *columns(*range(30)))
    place = LedgerPlace(redis_ledger.address, redis_ledger.name, settled=cursor_of(30))
    LedgeredSink(hook, ledger, place).deliver(batch(30, 35))
    held = ledger.seen(redis_ledger.name, Cursor(0, 0), Cursor(1 << 60, 0))
    assert len(held) == 5 * 16
    ledger.close()

"""Two who speak of one message at once: what each says is done or refused, nothing is left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.fix_postgres import Database
from tests.pull_queue import Message, Puller, make_pull_consumer, numbers
from tests.waiting import until

pytestmark = pytest.mark.migrated

_ORPHANS = """
SELECT count(*) FROM walbrook.pull_in_flight f
 WHERE NOT EXISTS (SELECT FROM walbrook.pull_messages r
                    WHERE r.consumer = f.consumer AND r.commit_lsn = f.commit_lsn
                      AND r.commit_idx = f.commit_idx)
"""
_BLOCKED = """
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0
"""
Say = Callable[[list[Message]], tuple[int, list[str]]]


@pytest.fixture
def pullers(database: Database) -> Iterator[list[Puller]]:
    make_pull_consumer(database, "jobs", max_deliveries=3)
    made = [Puller(database) for _ in range(3)]
    yield made
    for each in made:
        each.close()


def is_blocked(watcher: Puller) -> bool:
    return watcher.rows(_BLOCKED) == [(1,)]


def while_extended(pullers: list[Puller], say: Say, held: list[Message]) -> tuple[int, list[str]]:
    """What ``say`` answers that had to wait for an extension of the same messages."""
    mine, _, watcher = pullers
    with ThreadPoolExecutor(1) as pool:
        with mine.connection.transaction():
            mine.extend(held, "60 s")
            answer: Future[tuple[int, list[str]]] = pool.submit(say, held)
            until("the other to wait", lambda: is_blocked(watcher))
        return answer.result(10)


def test_an_acknowledgement_that_waited_for_an_extension_leaves_nothing(
    pullers: list[Puller],
) -> None:
    mine, other, _ = pullers
    mine.put(1, [7, 7])
    assert while_extended(pullers, other.ack, mine.receive(1)) == (1, [])
    assert mine.rows("SELECT count(*) FROM walbrook.pull_in_flight") == [(0,)]
    assert numbers(mine.receive()) == [2]


def test_a_message_given_back_while_it_is_extended_is_given_back(pullers: list[Puller]) -> None:
    mine, other, _ = pullers
    mine.put(1, [7])
    held = mine.receive(1)
    give_back: Say = lambda messages: other.nack(messages, delay="0 s")  # noqa: E731
    assert while_extended(pullers, give_back, held) == (1, [])
    assert numbers(mine.receive()) == [1]


def test_two_extensions_at_once_both_count(pullers: list[Puller]) -> None:
    mine, other, _ = pullers
    mine.put(1, [7])
    held = mine.receive(1, visibility="30 s")
    extend: Say = lambda messages: other.extend(messages, "60 s")  # noqa: E731
    assert while_extended(pullers, extend, held) == (1, [])
    assert mine.rows(
        "SELECT lease_until > clock_timestamp() + interval '140 s' FROM walbrook.pull_in_flight"
    ) == [(True,)]


def test_an_acknowledgement_of_what_a_claim_holds_back_leaves_nothing(
    pullers: list[Puller],
) -> None:
    mine, other, watcher = pullers
    mine.put(1, [7, 7])
    held = mine.receive(2)
    mine.rows(
        "UPDATE walbrook.pull_in_flight SET lease_until = clock_timestamp() - interval '1 s' "
        "WHERE commit_lsn = '0/2' RETURNING 1"
    )
    mine.rows("UPDATE walbrook.pull_claims SET swept_at = '-infinity' RETURNING 1")
    with ThreadPoolExecutor(1) as pool:
        with mine.connection.transaction():
            assert mine.receive() == []
            answer = pool.submit(other.ack, held[1:])
            until("the other to wait", lambda: is_blocked(watcher))
        assert answer.result(10) == (1, [])
    assert mine.rows(_ORPHANS) == [(0,)]
    assert mine.ack(held[:1]) == (1, [])
    assert mine.rows("SELECT count(*) FROM walbrook.pull_in_flight") == [(0,)]


def test_a_heartbeat_beside_acknowledgements_leaves_no_row_behind(pullers: list[Puller]) -> None:
    mine, beating, _ = pullers
    mine.put(1, [None] * 1000)
    held: list[list[Message]] = []
    stop = threading.Event()

    def beat() -> None:
        while not stop.is_set():
            for messages in held[-1:]:
                beating.extend(messages, "30 s")

    with ThreadPoolExecutor(1) as pool:
        beats = pool.submit(beat)
        acked = 0
        while messages := mine.receive(5):
            held.append(messages)
            done, refused = mine.ack(messages)
            assert refused == []
            acked += done
        stop.set()
        beats.result(10)
    assert acked == 1000
    assert mine.rows(_ORPHANS) == [(0,)]

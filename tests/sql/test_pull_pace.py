"""Claims keep their pace and their bounds beside hot groups, aged messages and each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tests.fix_postgres import Database
from tests.pull_queue import Puller, make_pull_consumer, numbers
from tests.waiting import until

pytestmark = pytest.mark.migrated


class Jobs:
    """Makes the consumer as a test wants it, and its claimers."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._opened: list[Puller] = []

    def __call__(self, **settings: Any) -> Puller:
        if settings or not self._opened:
            make_pull_consumer(self._database, "jobs", **settings)
        self._opened.append(Puller(self._database))
        return self._opened[-1]

    def close(self) -> None:
        for each in self._opened:
            each.close()


@pytest.fixture
def jobs(database: Database) -> Iterator[Jobs]:
    made = Jobs(database)
    yield made
    made.close()


def expire(puller: Puller) -> None:
    puller.rows(
        "UPDATE walbrook.pull_in_flight SET lease_until = clock_timestamp() - interval '1 s' "
        "WHERE lease_until IS NOT NULL RETURNING 1"
    )
    puller.rows("UPDATE walbrook.pull_claims SET swept_at = '-infinity' RETURNING 1")


def test_claims_that_wait_get_past_a_blocked_group_however_long_it_is(jobs: Jobs) -> None:
    mine = jobs(max_in_flight=20_000)
    mine.put(1, [7] * 12_000 + [8])
    mine.receive(1)
    begun = time.monotonic()
    for _ in range(5):
        found = numbers(mine.receive(100, wait="20 s"))
        if found:
            break
    assert found == [12_001]
    assert time.monotonic() - begun < 20, "who passed over many is told at once to ask again"


def test_a_claim_beside_many_aged_messages_is_quick(jobs: Jobs) -> None:
    mine = jobs(ttl_s=3600)
    mine.put(1, [7] * 10_000)
    mine.receive(1)
    for _ in range(2):
        mine.receive(10)
    mine.rows(
        "UPDATE walbrook.pull_messages SET stored_at = now() - interval '2 hours' RETURNING 1"
    )
    mine.put(20_000, [8])
    mine.connection.execute("SET statement_timeout = '3s'")
    assert 20_000 in numbers(mine.receive(10))


def test_a_claim_behind_a_long_acknowledgement_is_quick(jobs: Jobs) -> None:
    mine = jobs(max_in_flight=20_000)
    other = jobs()
    mine.put(1, [7] * 12_000 + [8])
    held = mine.receive(10_000)
    other.connection.execute("SET statement_timeout = '5s'")
    with mine.connection.transaction():
        mine.ack(held)
        assert numbers(other.receive(100)) == [12_001]
    assert numbers(other.receive(10, wait="5 s")) == list(range(10_001, 10_011))


def test_no_more_are_handed_out_than_asked_for_when_many_die_before(jobs: Jobs) -> None:
    mine = jobs(max_deliveries=1)
    mine.put(1, list(range(8)))
    mine.receive(8)
    expire(mine)
    mine.rows("UPDATE walbrook.pull_settings SET max_deliveries = 2 RETURNING 1")
    assert len(mine.receive(8)) == 8
    mine.put(9, [100])
    mine.receive(1)
    expire(mine)
    mine.put(10, [101, 102, 103])
    assert numbers(mine.receive(2)) == [9, 10]


def test_a_pause_ends_a_wait(jobs: Jobs) -> None:
    mine, other = jobs(), jobs()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.receive, 10, wait="20 s")
        until(
            "the wait",
            lambda: mine.rows("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'"),
        )
        mine.rows("SELECT walbrook.pause('jobs')")
        mine.put(1, [1])
        with pytest.raises(psycopg.Error) as refused:
            waiting.result(10)
    assert refused.value.sqlstate == "WB003"
    assert mine.rows("SELECT count(*) FROM walbrook.pull_in_flight") == [(0,)]


def test_an_extension_of_what_was_held_back_is_refused(jobs: Jobs) -> None:
    mine = jobs()
    mine.put(1, [7, 7])
    held = mine.receive(2)
    expire(mine)
    mine.extend(held[:1], "60 s")
    assert mine.receive() == []
    assert mine.extend(held[1:], "60 s") == (0, [held[1].ack_id])
    assert mine.ack(held[1:]) == (1, [])


def test_many_claimers_at_once_are_handed_no_more_bytes_than_one_answer_has(jobs: Jobs) -> None:
    mine = jobs()
    mine.put(1, [1, 2, 3, 4])
    mine.rows(
        "UPDATE walbrook.pull_messages SET bytes = 40000000, "
        "message = json_build_object('x', repeat('x', 40000000)) RETURNING 1"
    )
    claim = (
        "SELECT claimer FROM walbrook.receive_shared('jobs', '{1,1,1,1}', "
        "ARRAY[NULL, NULL, NULL, NULL]::interval[], ARRAY[NULL, NULL, NULL, NULL]::text[])"
    )
    assert [len(mine.rows(claim)) for _ in range(3)] == [2, 2, 0]


def test_leases_are_all_looked_at_only_now_and_then_though_nothing_is_due(jobs: Jobs) -> None:
    mine = jobs()
    mine.put(1, [7])
    mine.receive(1)
    mine.rows("UPDATE walbrook.pull_claims SET swept_at = '-infinity' RETURNING 1")
    assert (
        mine.rows("SELECT c FROM walbrook.pull_settings p, walbrook.claim(consumer, 1, NULL, '') c")
        == []
    )
    assert mine.rows(
        "SELECT swept_at > clock_timestamp() - interval '1 minute' FROM walbrook.pull_claims"
    ) == [(True,)]


def test_claims_that_look_no_further_are_reported_until_they_do(jobs: Jobs) -> None:
    mine = jobs(max_in_flight=10)
    mine.put(1, [7] * 6_000 + [8])
    held = mine.receive(1)
    reported = "SELECT kind, severity FROM walbrook.health WHERE consumer = 'jobs'"
    while mine.rows("SELECT count(*) < 5000 FROM walbrook.pull_in_flight") == [(True,)]:
        assert mine.receive(10) == []
    mine.rows("UPDATE walbrook.pull_claims SET swept_at = '-infinity' RETURNING 1")
    assert mine.receive(10) == []
    assert mine.rows(reported) == [("claims_held_up", "warning")]
    mine.ack(held)
    mine.rows("DELETE FROM walbrook.pull_in_flight RETURNING 1")
    mine.rows("UPDATE walbrook.pull_claims SET swept_at = '-infinity' RETURNING 1")
    mine.receive(10)
    assert mine.rows(reported) == []

"""What ``walbrook.receive``, ``ack``, ``nack`` and ``extend`` promise, on a real state database."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.pull_queue import Message, Puller, make_pull_consumer, numbers
from tests.waiting import until

pytestmark = pytest.mark.migrated


@pytest.fixture(scope="module")
def state(postgres_server: PostgresServer) -> Iterator[Database]:
    with fresh_database(postgres_server.dsn) as made:
        yield made


Pull = Callable[..., Puller]


@pytest.fixture
def pull(state: Database, request: pytest.FixtureRequest) -> Iterator[Pull]:
    """Makes a consumer of this test's own, or one more claimer of it."""
    opened: list[Puller] = []
    name = request.node.name.removeprefix("test_")[:60]

    def make(consumer: str = name, **settings: object) -> Puller:
        if settings or not any(each.consumer == consumer for each in opened):
            make_pull_consumer(state, consumer, **settings)
        opened.append(Puller(state, consumer))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def expire(puller: Puller) -> None:
    """End all leases, as if their time had passed."""
    puller.rows(
        "UPDATE walbrook.pull_in_flight f SET lease_until = clock_timestamp() - interval '1 s' "
        f"FROM walbrook.consumers c WHERE c.id = f.consumer AND c.name = '{puller.consumer}' "
        "AND f.lease_until IS NOT NULL RETURNING 1"
    )
    puller.rows("UPDATE walbrook.pull_claims SET swept_at = '-infinity' RETURNING 1")


def test_received_messages_are_held_and_acknowledged_ones_are_gone(pull: Pull) -> None:
    mine, other = pull(), pull()
    mine.put(1, [1, 2, 3, 4])
    first = mine.receive(2)
    assert numbers(first) == [1, 2]
    assert [message.message for message in first] == [{"n": 1}, {"n": 2}]
    assert numbers(other.receive(10)) == [3, 4]
    assert other.receive(10) == []
    assert mine.ack(first) == (2, [])
    assert mine.ack(first) == (0, [])
    assert [
        n
        for (n,) in mine.rows(f"""SELECT (r.commit_lsn - '0/0')::int FROM walbrook.pull_messages r
        JOIN walbrook.consumers c ON c.id = r.consumer AND c.name = '{mine.consumer}'
        ORDER BY 1""")
    ] == [3, 4]


def test_a_lease_that_ended_is_the_next_claims_first_with_its_count_raised(pull: Pull) -> None:
    mine, other = pull(), pull()
    mine.put(1, range(6))
    held = mine.receive(3)
    expire(mine)
    again = other.receive(3)
    assert numbers(again) == [1, 2, 3]
    assert numbers(other.receive(4)) == [4, 5, 6]
    assert {message.deliveries for message in again} == {2}
    done, refused = mine.ack(held)
    assert (done, set(refused)) == (0, {message.ack_id for message in held})
    assert other.ack(again) == (3, [])


def test_an_acknowledgement_that_is_late_counts_until_another_worker_took_it(
    pull: Pull,
) -> None:
    mine = pull()
    mine.put(1, [1])
    held = mine.receive()
    expire(mine)
    assert mine.ack(held) == (1, [])
    assert mine.receive() == []


def test_a_lease_of_another_consumer_is_refused(pull: Pull) -> None:
    mine, other = pull("one"), pull("two")
    mine.put(1, [1])
    other.put(1, [1])
    held = mine.receive()
    for say in (other.ack, other.nack, lambda messages: other.extend(messages, "5 s")):
        assert say(held) == (0, [held[0].ack_id])
    assert mine.ack(held) == (1, [])


def test_a_nack_with_a_delay_comes_back_after_it_and_blocks_only_its_group(pull: Pull) -> None:
    mine = pull()
    mine.put(1, [1, 2, 1, 2])
    held = mine.receive(2)
    assert mine.nack(held[:1], delay="300 ms", error="not now") == (1, [])
    assert mine.ack(held[1:]) == (1, [])
    assert numbers(mine.receive()) == [4]
    back = until("the delay", mine.receive)
    assert numbers(back) == [1, 3]
    assert [message.deliveries for message in back] == [2, 1]
    assert mine.ack(held[:1]) == (0, [held[0].ack_id])


def test_without_a_delay_the_pause_doubles_to_its_bound(pull: Pull) -> None:
    mine = pull(retry={"first_ms": 1000, "max_ms": 3000})
    mine.put(1, [1])
    pauses = []
    for _ in range(3):
        held = mine.receive()
        mine.nack(held)
        ((pause,),) = mine.rows(
            "SELECT extract(epoch FROM f.due_at - clock_timestamp())::float8 "
            "FROM walbrook.pull_in_flight f JOIN walbrook.consumers c ON c.id = f.consumer "
            f"WHERE c.name = '{mine.consumer}'"
        )
        pauses.append(pause)
        mine.rows(
            "UPDATE walbrook.pull_in_flight SET due_at = clock_timestamp() "
            "WHERE due_at IS NOT NULL RETURNING 1"
        )
    for pause, expected in zip(pauses, (1, 2, 3), strict=True):
        assert expected * 0.8 < pause < expected * 1.15


def test_after_max_deliveries_a_message_is_a_dead_letter_and_its_group_goes_on(pull: Pull) -> None:
    mine = pull(max_deliveries=2)
    mine.put(1, [1, 1, 2])
    mine.nack(mine.receive(1), delay="0", error="first")
    mine.nack(mine.receive(1), delay="0", error="the row makes no sense")
    letters = mine.rows(
        "SELECT kind, error, deliveries, event->>'commit_lsn', (event->>'message')::json->>'n' "
        f"FROM walbrook.dead_letters WHERE consumer = '{mine.consumer}'"
    )
    ((kind, error, deliveries, lsn, n),) = letters
    assert (kind, deliveries, lsn, n) == ("delivery", 2, "0/1", "1")
    assert "the row makes no sense" in error
    assert numbers(mine.receive()) == [2, 3]


def test_leases_that_end_too_often_make_a_dead_letter_that_names_their_holder(pull: Pull) -> None:
    mine = pull(max_deliveries=1)
    mine.put(1, [1, 1])
    mine.receive(1, holder="worker-7")
    expire(mine)
    assert numbers(mine.receive()) == [2]
    ((error,),) = mine.rows(
        f"SELECT error FROM walbrook.dead_letters WHERE consumer = '{mine.consumer}'"
    )
    assert "worker-7" in error


def test_a_dead_letter_that_is_put_back_comes_first_and_counts_from_zero(pull: Pull) -> None:
    mine = pull(max_deliveries=1)
    mine.put(1, [1, 2])
    mine.nack(mine.receive(1), error="no")
    ((put_back,),) = mine.rows(
        "SELECT walbrook.requeue_record(event) FROM walbrook.dead_letters "
        f"WHERE consumer = '{mine.consumer}'"
    )
    assert put_back
    found = mine.receive()
    assert [(message.n, message.deliveries) for message in found] == [(1, 1), (2, 1)]
    assert found[0].message == {"n": 1}


def test_many_of_a_group_go_out_at_once_but_never_to_two_holders(pull: Pull) -> None:
    mine, other = pull(), pull()
    mine.put(1, [7] * 10 + [8])
    held = mine.receive(4)
    assert numbers(held) == [1, 2, 3, 4]
    assert numbers(other.receive(4)) == [11]
    mine.ack(held[:3])
    assert other.receive(4) == []
    mine.ack(held[3:])
    assert numbers(other.receive(4)) == [5, 6, 7, 8]
    assert mine.receive(4) == []


def test_groups_of_two_tables_and_messages_without_a_group_do_not_wait_for_each_other(
    pull: Pull,
) -> None:
    mine, other = pull(), pull()
    mine.put(1, [1, None, None])
    mine.put(4, [2, None], table="others")
    assert numbers(mine.receive(2)) == [1, 2]
    assert numbers(other.receive(10)) == [3, 4, 5]


def test_a_truncate_waits_for_all_of_its_table_and_all_of_its_table_for_it(pull: Pull) -> None:
    mine, other = pull(), pull()
    mine.put(1, [1, 2, 99, 3, 1], whole=[3])
    mine.put(6, [50], table="others")
    first = mine.receive(1)
    assert numbers(other.receive(10)) == [2, 6]  # not the truncate, nor what follows it
    mine.ack(first)
    assert other.receive(10) == []
    ((held,),) = other.rows(
        "SELECT array_agg(f.commit_lsn || '' ORDER BY f.commit_lsn) FROM walbrook.pull_in_flight f "
        f"JOIN walbrook.consumers c ON c.id = f.consumer AND c.name = '{mine.consumer}' "
        "WHERE f.lease_until IS NULL"
    )
    assert held == ["0/3", "0/4", "0/5"]
    expire(other)
    again = mine.receive(1)
    assert numbers(again) == [2]
    mine.ack(again)
    assert numbers(mine.receive(10)) == [3, 4, 5, 6]


def test_no_more_are_handed_out_than_max_in_flight(pull: Pull) -> None:
    mine = pull(max_in_flight=5)
    mine.put(1, range(12))
    held = mine.receive(4)
    assert len(held) == 4
    assert numbers(mine.receive(4)) == [5]
    assert mine.receive(4) == []
    mine.ack(held[:2])
    assert numbers(mine.receive(4)) == [6, 7]


def test_an_extended_lease_lasts_longer(pull: Pull) -> None:
    mine = pull()
    mine.put(1, [1])
    held = mine.receive(visibility="1 s")
    assert mine.extend(held, "1 h") == (1, [])
    ((left,),) = mine.rows(
        "SELECT lease_until - clock_timestamp() > '59 min' FROM walbrook.leases "
        f"WHERE consumer = '{mine.consumer}'"
    )
    assert left
    mine.ack(held)
    assert mine.extend(held, "1 h") == (0, [held[0].ack_id])


def test_an_acknowledgement_under_way_is_neither_waited_for_nor_robbed(
    pull: Pull, state: Database
) -> None:
    mine, other = pull(), pull()
    mine.put(1, [1, 1, 2])
    held = mine.receive(1)
    expire(mine)
    with psycopg.connect(state.dsn) as slow:
        slow.execute("SELECT walbrook.ack(%s, %s)", (mine.consumer, [held[0].ack_id]))
        other.connection.execute("SET lock_timeout = '2 s'")
        assert numbers(other.receive()) == [3]
        slow.rollback()
    back = until("what was not acknowledged", other.receive)
    other.ack(back)
    assert numbers(back)[0] == 1
    assert numbers(back) == [1, 2] or numbers(until("the second", other.receive)) == [2]


def test_the_second_of_a_group_follows_an_acknowledgement_that_was_under_way(
    pull: Pull, state: Database
) -> None:
    mine, other = pull(), pull()
    mine.put(1, [1, 1])
    held = mine.receive(1)
    with psycopg.connect(state.dsn) as slow:
        slow.execute("SELECT walbrook.ack(%s, %s)", (mine.consumer, [held[0].ack_id]))
        assert other.receive() == []
        slow.commit()
    assert numbers(until("the second", other.receive)) == [2]


def test_wait_returns_as_soon_as_something_is_stored_and_locks_nothing(pull: Pull) -> None:
    mine, other = pull(), pull()
    found: list[list[Message]] = []
    waiting = threading.Thread(target=lambda: found.append(mine.receive(wait="30 s")))
    waiting.start()
    started = time.monotonic()
    until(
        "the wait",
        lambda: other.rows(
            "SELECT 1 FROM pg_stat_activity "
            "WHERE wait_event = 'PgSleep' AND datname = current_database()"
        ),
    )
    assert other.receive() == []
    other.put(1, [1])
    waiting.join(20)
    assert numbers(found[0]) == [1]
    assert time.monotonic() - started < 20


def test_wait_ends_with_nothing_when_its_time_is_up(pull: Pull) -> None:
    assert pull().receive(wait="100 ms") == []


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ("receive('{c}', 0)", "batch_size"),
        ("receive('{c}', -1)", "batch_size"),
        ("receive('{c}', 10001)", "batch_size"),
        ("receive('{c}', NULL)", "batch_size"),
        ("receive('{c}', 1, visibility => '0.5 s')", "visibility"),
        ("receive('{c}', 1, visibility => '13 h')", "visibility"),
        ("receive('{c}', 1, wait => '-1 s')", "wait"),
        ("receive('{c}', 1, wait => '61 s')", "wait"),
        ("ack('{c}', NULL)", "ack_ids"),
        ("ack('{c}', '{{NULL}}')", "ack_ids"),
        ("ack('{c}', '{{1-2-3}}')", "ack_ids"),
        ("ack('{c}', '{{99999999999-1-0/1-0}}')", "ack_ids"),
        ("nack('{c}', '{{1-1-0/1-0}}', '-1 s')", "delay"),
        ("extend('{c}', '{{1-1-0/1-0}}', NULL)", "by"),
        ("extend('{c}', '{{1-1-0/1-0}}', '0')", "by"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused_by_its_name(
    state: Database, call: str, field: str
) -> None:
    make_pull_consumer(state, "refusing")
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        state.execute(f"SELECT * FROM walbrook.{call.format(c='refusing')}")
    assert caught.value.diag.column_name == field
    assert field in str(caught.value.diag.message_primary)


def test_a_worker_without_messages_to_fetch_learns_why(pull: Pull, state: Database) -> None:
    mine = pull()
    mine.put(1, [1])

    def refusal(consumer: str, before: str = "SELECT 1") -> tuple[str, str]:
        with psycopg.connect(state.dsn) as connection:
            connection.execute(before.encode())
            with pytest.raises(psycopg.Error) as caught:
                connection.execute("SELECT walbrook.receive(%s)", (consumer,))
        return str(caught.value.sqlstate), str(caught.value.diag.message_primary)

    assert refusal("nobody") == ("WB001", "there is no consumer 'nobody'")
    state.execute(
        "INSERT INTO walbrook.consumers (source, name, cursor_lsn, destination) "
        "VALUES ('shop', 'pushed', '0/1', 'webhook')"
    )
    code, what = refusal("pushed")
    assert (code, "webhook" in what) == ("WB002", True)
    paused = f"UPDATE walbrook.consumers SET paused_at = now() WHERE name = '{mine.consumer}'"
    assert refusal(mine.consumer, paused)[0] == "WB003"
    code, what = refusal(mine.consumer, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    assert "repeatable read" in what


def test_one_answer_is_bounded_in_bytes(pull: Pull) -> None:
    mine = pull()
    mine.put(1, range(4))
    mine.rows(
        "UPDATE walbrook.pull_messages r SET bytes = 30000000 FROM walbrook.consumers c "
        f"WHERE c.id = r.consumer AND c.name = '{mine.consumer}' RETURNING 1"
    )
    assert numbers(mine.receive(5)) == [1, 2, 3]
    assert numbers(mine.receive(5)) == [4]
    expire(mine)
    assert numbers(mine.receive(5)) == [1, 2, 3]
    assert numbers(mine.receive(5)) == [4]


def test_the_leases_say_who_holds_what_until_when(pull: Pull) -> None:
    mine = pull()
    mine.put(1, [1, 2])
    mine.receive(1, holder="worker-1")
    mine.receive(1, holder="worker-2")
    rows = mine.rows(
        "SELECT source, cursor, holder, deliveries, expired FROM walbrook.leases "
        f"WHERE consumer = '{mine.consumer}' ORDER BY cursor"
    )
    assert rows == [
        ("shop", "0/1:0", "worker-1", 1, False),
        ("shop", "0/2:0", "worker-2", 1, False),
    ]


def test_a_queue_that_is_moved_back_takes_the_same_messages_again(pull: Pull) -> None:
    mine = pull()
    mine.put(1, range(6))
    held = mine.receive(4)
    ((number,),) = mine.rows(f"SELECT id FROM walbrook.consumers WHERE name = '{mine.consumer}'")
    assert mine.rows(f"SELECT walbrook.forget_records({number}, '0/3', 0)") == [(4,)]
    assert mine.rows(
        "SELECT (commit_lsn, commit_idx) < ('0/3', 0) "
        f"FROM walbrook.pull_positions WHERE consumer = {number}"
    ) == [(True,)]
    mine.put(3, range(10, 14))
    assert numbers(mine.receive()) == [3, 4, 5, 6]
    assert mine.ack(held[2:]) == (0, [message.ack_id for message in held[2:]])
    assert mine.ack(held[:2]) == (2, [])


def test_with_a_consumer_goes_its_queue(state: Database) -> None:
    make_pull_consumer(state, "leaving")
    ((number,),) = state.execute("SELECT id FROM walbrook.consumers WHERE name = 'leaving'")
    state.execute("DELETE FROM walbrook.consumers WHERE name = 'leaving'")
    for table in ("events", "pull_messages", "pull_in_flight"):
        assert state.execute(f"SELECT to_regclass('walbrook.{table}_{number}')") == [(None,)]
    assert state.execute(f"SELECT FROM walbrook.pull_settings WHERE consumer = {number}") == []

"""Operators and pull consumers: the queue is theirs, and the acts are the same."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from cdc.state.migrate import available
from tests.fix_postgres import Database
from tests.integration.test_operators import Operator

pytestmark = pytest.mark.skipif(
    6 not in {migration.number for migration in available()},
    reason="migration 0006 brings pull consumers",
)

_PULL = """
UPDATE walbrook.consumers SET destination = 'pull' WHERE name = 'hook';
INSERT INTO walbrook.pulls (consumer, visibility_s, max_in_flight, max_deliveries, retry_first_ms,
       retry_max_ms, max_waiting, gap_message)
SELECT id, 30, 1000, 1, 0, 0, 10,
       '{"from": "walbrook:from", "to": "walbrook:to", "reason": "walbrook:reason"}'
  FROM walbrook.consumers WHERE name = 'hook';
INSERT INTO walbrook.stored (consumer, commit_lsn, commit_idx)
SELECT id, '0/4F0', 0 FROM walbrook.consumers WHERE name = 'hook';
INSERT INTO walbrook.records (consumer, commit_lsn, commit_idx, group_id, bytes, commit_timestamp,
       table_schema, table_name, action, message)
SELECT c.id, r.lsn::pg_lsn, 0, r.number, 9, now(), 'public', 'item', 'insert',
       format('{"id": "%s", "price": 1.50}', r.lsn)::json
  FROM walbrook.consumers c,
       (VALUES ('0/200', 1), ('0/300', 1), ('0/400', 2)) AS r (lsn, number)
 WHERE c.name = 'hook';
"""


class Puller(Operator):
    """An operator whose consumer ``hook`` is one that pulls."""

    def receive(self) -> list[tuple[Any, ...]]:
        """The cursors and messages that are handed out, with what acknowledges them."""
        return self.rows(
            "SELECT commit_lsn::text, message::text, ack_id FROM walbrook.receive('hook', 10)"
        )


@pytest.fixture
def puller(database: Database) -> Iterator[Puller]:
    with database.connect() as connection:
        made = Puller(database, connection)
        connection.execute(_PULL)
        yield made


def test_a_rewind_cuts_the_queue(puller: Puller) -> None:
    assert [at for at, _, _ in puller.receive()] == ["0/200", "0/300", "0/400"]
    state = puller.act("rewind('hook', '0/300:0')")
    assert (state["cursor"], state["affected"], state["waiting"]) == ("0/300:0", 2, 1)
    assert puller.rows("SELECT commit_lsn::text FROM walbrook.in_flight") == [("0/200",)]
    assert puller.rows("SELECT (commit_lsn, commit_idx) < ('0/300', 0) FROM walbrook.stored") == [
        (True,)
    ]


def test_all_is_given_up(puller: Puller) -> None:
    puller.receive()
    state = puller.act("discard_all('hook')")
    assert (state["cursor"], state["affected"], state["waiting"]) == ("0/900:3", 3, 0)
    assert puller.gaps() == [("hook", "0/200:0", "0/900:3")]


def test_one_message_is_given_up_and_in_its_place_it_is_said_so(puller: Puller) -> None:
    puller.connection.execute("UPDATE walbrook.pulls SET max_in_flight = 1")
    assert [at for at, _, _ in puller.receive()] == ["0/200"]
    puller.connection.execute("UPDATE walbrook.pulls SET max_in_flight = 1000")
    state = puller.act("discard('hook', '0/200:0')")
    assert (state["affected"], state["waiting"]) == (1, 3)
    received = puller.receive()
    assert [at for at, _, _ in received] == ["0/200", "0/300", "0/400"], "its group goes on"
    assert received[0][1] == '{"from": "0/200:0", "to": "0/200:1", "reason": "discarded"}'
    assert puller.rows("SELECT reason, told_at IS NOT NULL FROM walbrook.gaps") == [
        ("discarded", True)
    ]
    assert "no message of hook waits at 0/200:0" in puller.refused("discard('hook', '0/200:0')")[0]


def test_a_dead_letter_is_handed_out_again(puller: Puller) -> None:
    given = [ack_id for _, _, ack_id in puller.receive()]
    puller.connection.execute("SELECT * FROM walbrook.nack('hook', %s)", (given,))
    puller.receive()
    dead = puller.rows("SELECT id FROM walbrook.dead_letters ORDER BY commit_lsn")
    assert len(dead) == 3, "each was handed out as often as it may be"
    state = puller.act(f"redeliver({dead[0][0]})")
    assert (state["affected"], state["dead_letters"]) == (1, 2)
    ((at, text, ack_id),) = puller.receive()
    assert (at, text) == ("0/200", '{"id": "0/200", "price": 1.50}')
    puller.connection.execute("SELECT * FROM walbrook.ack('hook', %s)", ([ack_id],))
    assert puller.act("redeliver('hook')")["affected"] == 2
    assert [at for at, _, _ in puller.receive()] == ["0/300", "0/400"]


def test_a_dead_letter_of_an_earlier_consumer_of_that_name_is_refused(puller: Puller) -> None:
    number = puller.letter("0/200", 0, "delivery", '{"consumer": 99, "message": {}}')
    what, _ = puller.refused(f"redeliver({number})")
    assert what == f"dead letter {number} is of an earlier consumer hook than there is now"


_ACTS = ("pause('hook')", "resume('hook')", "redeliver('hook')", "resume('hook')",
         "redeliver('hook')")  # fmt: skip
_AGAIN = """
INSERT INTO walbrook.records (consumer, commit_lsn, commit_idx, group_id, bytes, commit_timestamp,
       table_schema, table_name, action, message)
SELECT c.id, '0/1000'::pg_lsn + n, 0, n % 7, 9, now(), 'public', 'item', 'insert', '{}'
  FROM walbrook.consumers c, generate_series(1, 300) n WHERE c.name = 'hook'
    ON CONFLICT DO NOTHING
"""


def test_operators_and_claims_never_wait_for_each_other_in_a_circle(puller: Puller) -> None:
    failures: list[Exception] = []
    ends_at = time.monotonic() + 5

    def operate(seed: int) -> None:
        chosen = random.Random(seed)
        with puller.database.connect() as connection:
            while time.monotonic() < ends_at:
                with connection.transaction():  # as whoever stores does it
                    connection.execute("SELECT FROM walbrook.stored FOR UPDATE")
                    connection.execute(_AGAIN)
                for _ in range(5):
                    connection.execute(f"SELECT walbrook.{chosen.choice(_ACTS)}".encode())

    def fetch(_seed: int) -> None:
        """Nothing is acknowledged: what comes back is claimed once more, and so is dead."""
        with puller.database.connect() as connection:
            while time.monotonic() < ends_at:
                try:
                    connection.execute(
                        "SELECT FROM walbrook.receive('hook', 5, visibility => '1 second')"
                    )
                except psycopg.Error as error:
                    if error.sqlstate != "WB003":  # it is paused
                        raise

    def run(what: Callable[[int], None], seed: int) -> None:
        try:
            what(seed)
        except Exception as error:
            failures.append(error)

    operators = [threading.Thread(target=run, args=(operate, seed)) for seed in range(3)]
    fetchers = [threading.Thread(target=run, args=(fetch, seed)) for seed in range(3)]
    for thread in operators + fetchers:
        thread.start()
    for thread in operators + fetchers:
        thread.join()
    assert failures == []
    assert puller.rows("SELECT dead > 0 FROM walbrook.consumers WHERE name = 'hook'") == [(True,)]

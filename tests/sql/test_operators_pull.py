"""Operators and pull consumers: the queue is theirs, and the acts are the same."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from cdc.cursor import Cursor
from cdc.state.positions import MovedError, Settlement, consumer_cursors, settle
from tests.fix_postgres import Database
from tests.operators import Operator

pytestmark = pytest.mark.migrated

_PULL = """
UPDATE walbrook.consumers SET destination = 'pull' WHERE name = 'hook';
INSERT INTO walbrook.pull_settings (consumer, visibility_s, max_in_flight, max_deliveries,
       retry_first_ms,
       retry_max_ms, max_waiting, gap_message)
SELECT id, 30, 1000, 1, 0, 0, 10,
       '{"from": "walbrook:from", "to": "walbrook:to", "reason": "walbrook:reason"}'
  FROM walbrook.consumers WHERE name = 'hook';
INSERT INTO walbrook.pull_positions (consumer, commit_lsn, commit_idx)
SELECT id, '0/4F0', 0 FROM walbrook.consumers WHERE name = 'hook';
INSERT INTO walbrook.pull_messages (consumer, commit_lsn, commit_idx, group_id, bytes,
       commit_timestamp,
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
    assert puller.rows("SELECT commit_lsn::text FROM walbrook.pull_in_flight") == [("0/200",)]
    assert puller.rows(
        "SELECT (commit_lsn, commit_idx) < ('0/300', 0) FROM walbrook.pull_positions"
    ) == [(True,)]


def test_all_is_given_up(puller: Puller) -> None:
    puller.receive()
    state = puller.act("discard_all('hook')")
    assert (state["cursor"], state["affected"], state["waiting"]) == ("0/900:3", 3, 0)
    assert puller.gaps() == [("hook", "0/200:0", "0/900:3")]


def test_a_message_is_given_up_and_in_its_place_a_message_says_so(puller: Puller) -> None:
    puller.connection.execute("UPDATE walbrook.pull_settings SET max_in_flight = 1")
    assert [at for at, _, _ in puller.receive()] == ["0/200"]
    puller.connection.execute("UPDATE walbrook.pull_settings SET max_in_flight = 1000")
    state = puller.act("discard('hook', '0/200:0')")
    assert (state["affected"], state["waiting"]) == (1, 3)
    received = puller.receive()
    assert [at for at, _, _ in received] == ["0/200", "0/300", "0/400"], "its group goes on"
    assert received[0][1] == '{"from": "0/200:0", "to": "0/200:1", "reason": "discarded"}'
    assert puller.rows("SELECT reason, reported_at IS NOT NULL FROM walbrook.gaps") == [
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


def test_of_all_dead_letters_those_of_an_earlier_consumer_stay(puller: Puller) -> None:
    given = [ack_id for _, _, ack_id in puller.receive()]
    puller.connection.execute("SELECT * FROM walbrook.nack('hook', %s)", (given[:1],))
    earlier = puller.letter("0/250", 0, "delivery", '{"consumer": 99, "message": "{}"}')
    said: list[str] = []
    puller.connection.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))
    assert puller.act("redeliver('hook')")["affected"] == 1
    assert puller.rows("SELECT id FROM walbrook.dead_letters") == [(earlier,)]
    assert said == ["1 dead letters are of an earlier consumer hook than there is now and stay"]
    assert puller.rows("SELECT count(*) FROM walbrook.pull_messages") == [(3,)]


def test_a_dead_letter_is_handed_out_again_after_all_was_given_up(puller: Puller) -> None:
    given = [ack_id for _, _, ack_id in puller.receive()]
    puller.connection.execute("SELECT * FROM walbrook.nack('hook', %s)", (given[:1],))
    puller.act("discard_all('hook')")
    assert puller.act("redeliver('hook')")["affected"] == 1
    assert [at for at, _, _ in puller.receive()] == ["0/200"]
    assert puller.receive() == []


def test_a_dead_letter_that_comes_again_by_itself_is_not_put_back_as_well(puller: Puller) -> None:
    given = [ack_id for _, _, ack_id in puller.receive()]
    puller.connection.execute("SELECT * FROM walbrook.nack('hook', %s)", (given[1:2],))
    puller.act("rewind('hook', '0/300:0')")
    assert puller.act("redeliver('hook')")["affected"] == 0
    assert puller.rows("SELECT commit_lsn::text FROM walbrook.pull_messages") == [("0/200",)]
    puller.connection.execute(
        "INSERT INTO walbrook.pull_messages SELECT consumer, '0/300', commit_idx, "
        "group_id, whole_table, "
        "bytes, commit_timestamp, stored_at, table_schema, table_name, action, message "
        "FROM walbrook.pull_messages; UPDATE walbrook.pull_positions SET commit_lsn = "
        "'0/300', commit_idx = 0"
    )
    puller.connection.execute("SELECT * FROM walbrook.ack('hook', %s)", (given[:1],))
    assert [at for at, _, _ in puller.receive()] == ["0/300"]


def test_a_dead_letter_ahead_of_the_claims_is_handed_out_once(puller: Puller) -> None:
    given = [ack_id for _, _, ack_id in puller.receive()]
    puller.connection.execute("SELECT * FROM walbrook.nack('hook', %s)", (given,))
    puller.act("rewind('hook', '0/200:0')")
    puller.connection.execute(
        "UPDATE walbrook.pull_positions SET commit_lsn = '0/4F0', commit_idx = 0"
    )
    assert puller.act("redeliver('hook')")["affected"] == 3
    assert [at for at, _, _ in puller.receive()] == ["0/200", "0/300", "0/400"]
    assert puller.receive() == []


def test_a_message_that_no_text_can_hold_is_handed_out_again_as_it_was(puller: Puller) -> None:
    text = '{"a": "x\\u0000y", "n": 12345678901234567890.10}'
    puller.connection.execute("UPDATE walbrook.pull_messages SET message = %s", (text,))
    given = [ack_id for _, _, ack_id in puller.receive()]
    puller.connection.execute("SELECT * FROM walbrook.nack('hook', %s)", (given[:1],))
    assert puller.act("redeliver('hook')")["affected"] == 1
    assert [message for _, message, _ in puller.receive()] == [text]


_STORED = """
INSERT INTO walbrook.pull_messages (consumer, commit_lsn, commit_idx, group_id, bytes,
       commit_timestamp,
       table_schema, table_name, action, message)
SELECT c.id, '0/950', 0, 1, 9, now(), 'public', 'item', 'insert', '{}'
  FROM walbrook.consumers c WHERE c.name = 'hook';
UPDATE walbrook.pull_positions SET commit_lsn = '0/950', commit_idx = 0;
"""


def settle_hook(puller: Puller, since: Cursor, cursor: Cursor) -> None:
    settle(
        puller.connection,
        source="shop",
        term=puller.term,
        read_to=cursor,
        consumers={"hook": Settlement(since, cursor)},
    )


def stands_at(puller: Puller) -> Cursor:
    return consumer_cursors(puller.connection, "shop")["hook"]


def test_a_rewind_to_where_it_stands_takes_nothing_from_a_batch_that_is_not_settled(
    puller: Puller,
) -> None:
    since = stands_at(puller)
    puller.connection.execute(_STORED)
    state = puller.act(f"rewind('hook', '{since}')")
    assert (state["cursor"], state["affected"]) == (str(since), 0)
    settle_hook(puller, since, Cursor(0x960, 0))
    assert [at for at, _, _ in puller.receive()] == ["0/200", "0/300", "0/400", "0/950"]


def test_a_batch_that_is_given_up_before_it_is_settled_is_noted_and_not_settled(
    puller: Puller,
) -> None:
    settle_hook(puller, stands_at(puller), Cursor(0x900, 3))
    since = stands_at(puller)
    puller.connection.execute(_STORED)
    puller.act("discard_all('hook')")
    assert puller.gaps() == [("hook", "0/200:0", "0/950:2")]
    with pytest.raises(MovedError):
        settle_hook(puller, since, Cursor(0x960, 0))
    assert stands_at(puller) == Cursor(0x950, 2)


def test_a_worker_that_buries_and_does_not_commit_holds_up_no_settlement(puller: Puller) -> None:
    given = [ack_id for _, _, ack_id in puller.receive()]
    with puller.database.connect() as worker, worker.transaction():
        worker.execute("SELECT * FROM walbrook.nack('hook', %s)", (given[:1],))
        puller.connection.execute("SET statement_timeout = '5s'")
        settle_hook(puller, stands_at(puller), Cursor(0x960, 0))
    assert puller.rows(
        "SELECT walbrook.dead_ever(c) FROM walbrook.consumers c WHERE name = 'hook'"
    ) == [(1,)]


_ACTS = ("pause('hook')", "resume('hook')", "redeliver('hook')", "resume('hook')",
         "redeliver('hook')")  # fmt: skip
_AGAIN = """
INSERT INTO walbrook.pull_messages (consumer, commit_lsn, commit_idx, group_id, bytes,
       commit_timestamp,
       table_schema, table_name, action, message)
SELECT c.id, '0/1000'::pg_lsn + n, 0, n % 7, 9, now(), 'public', 'item', 'insert', '{}'
  FROM walbrook.consumers c, generate_series(1, 300) n WHERE c.name = 'hook'
    ON CONFLICT DO NOTHING;
UPDATE walbrook.pull_positions SET commit_lsn = '0/1200'
"""


def test_operators_and_claims_never_wait_for_each_other_in_a_circle(puller: Puller) -> None:
    failures: list[Exception] = []
    ends_at = time.monotonic() + 5

    def operate(seed: int) -> None:
        chosen = random.Random(seed)
        with puller.database.connect() as connection:
            while time.monotonic() < ends_at:
                with connection.transaction():  # as whoever stores does it
                    connection.execute("SELECT FROM walbrook.pull_positions FOR UPDATE")
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
    assert puller.rows("SELECT sum(messages) > 0 FROM walbrook.pull_dead_counts") == [(True,)]

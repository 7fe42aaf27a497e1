"""What every ledger promises, asked of each on its real server."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
import redis

from cdc.config.secrets import SecretText
from cdc.cursor import Cursor
from cdc.errors import TransientError
from cdc.queue.ledger.base import Integers, Ledger, among
from cdc.queue.ledger.open import LedgerAddress, open_ledger
from cdc.queue.ledger.redis import RedisLedger
from cdc.state.active_consumers import read_active_consumers
from cdc.state.ledgers import sweep_ledgers
from demo.embedded_redis import EmbeddedRedis
from tests.fix_ledger import SOURCE, KnownLedger
from tests.fix_postgres import Database

FIRST, LAST = Cursor(0, 0), Cursor(2**63 - 1, 2**63 - 1)


@pytest.fixture
def ledger(known_ledger: KnownLedger) -> Iterator[Ledger]:
    opened = open_ledger(known_ledger.address)
    yield opened
    opened.close()


def columns(*cursors: tuple[int, int]) -> tuple[Integers, Integers]:
    both = np.array(cursors, dtype=np.int64)
    return both[:, 0], both[:, 1]


def has(ledger: Ledger, name: str, *cursors: tuple[int, int], queued: bool = False) -> list[bool]:
    """Of each, in a look that is wide enough for all."""
    lsn, idx = columns(*cursors)
    first, last = Cursor(*min(cursors)), Cursor(*max(cursors))
    return [bool(one) for one in among(lsn, idx, ledger.seen(name, first, last, queued=queued))]


def test_a_noted_cursor_is_found_to_the_last_bit(ledger: Ledger, known_ledger: KnownLedger) -> None:
    large, top = 2**53, 2**63 - 1
    noted = [(large, 0), (large, large), (large + 1, 1), (top, top)]
    ledger.note(known_ledger.name, *columns(*noted))
    beside = [(large - 1, 0), (large, 1), (large, large + 1), (large + 1, 0), (top, top - 1)]
    assert has(ledger, known_ledger.name, *noted, *beside) == [True] * 4 + [False] * 5


def test_a_note_is_found_by_a_ledger_that_is_opened_later(
    ledger: Ledger, known_ledger: KnownLedger
) -> None:
    ledger.note(known_ledger.name, *columns((16, 0), (16, 1)))
    another = open_ledger(known_ledger.address)
    assert has(another, known_ledger.name, (16, 1), (24, 0)) == [True, False]
    another.close()


def test_each_name_has_its_own(ledger: Ledger, known_ledger: KnownLedger) -> None:
    ledger.note(known_ledger.name, *columns((16, 0)))
    assert has(ledger, known_ledger.other, (16, 0)) == [False]
    ledger.trim(known_ledger.other, LAST)
    assert has(ledger, known_ledger.name, (16, 0)) == [True]


def test_trimming_takes_the_requests_below_and_nothing_else(
    ledger: Ledger, known_ledger: KnownLedger
) -> None:
    name = known_ledger.name
    for request in ([(8, 0), (8, 1)], [(8, 2), (16, 0)], [(16, 1), (16, 2)]):
        ledger.note(name, *columns(*request))
    ledger.note(name, *columns((8, 0)), queued=True)
    ledger.trim(name, Cursor(16, 1))
    assert has(ledger, name, (8, 0), (8, 1), (8, 2), (16, 0)) == [False] * 4
    assert has(ledger, name, (16, 1), (16, 2)) == [True, True]
    assert has(ledger, name, (8, 0), queued=True) == [True]


def test_notes_of_the_queue_are_apart_and_go_when_their_messages_have_left_it(
    ledger: Ledger, known_ledger: KnownLedger
) -> None:
    name = known_ledger.name
    ledger.note(name, *columns((8, 0), (8, 1)), queued=True)
    ledger.note(name, *columns((8, 3), (8, 7)), queued=True)
    assert has(ledger, name, (8, 0), (8, 7)) == [False, False]
    assert has(ledger, name, (8, 0), (8, 7), (8, 4), queued=True) == [True, True, False]
    ledger.drop(name, *columns((8, 0), (8, 1)))
    assert (
        has(ledger, name, (8, 0), (8, 1), (8, 3), (8, 7), queued=True) == [False] * 2 + [True] * 2
    )


def test_two_requests_that_end_with_one_message_are_both_kept(
    ledger: Ledger, known_ledger: KnownLedger
) -> None:
    ledger.note(known_ledger.name, *columns((16, 1), (16, 2)))
    ledger.note(known_ledger.name, *columns((8, 0), (16, 2)))
    assert has(ledger, known_ledger.name, (8, 0), (16, 1), (16, 2)) == [True] * 3


def test_an_address_prints_no_secret() -> None:
    url = SecretText("redis://user:s3cret@127.0.0.1:6379/0")
    assert "s3cret" not in repr(LedgerAddress("redis", url))


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        ("postgres", "postgres://u:s3cret@127.0.0.1:1/d"),
        ("redis", "redis://u:s3cret@127.0.0.1:1/0"),
    ],
)
def test_a_ledger_that_cannot_be_reached_says_so_and_may_be_asked_again(
    kind: str, url: str
) -> None:
    ledger = open_ledger(LedgerAddress(kind, SecretText(url)))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(TransientError, match="cannot be used") as told:
            ledger.seen(str(uuid.uuid4()), FIRST, LAST)
        assert "s3cret" not in str(told.value)
        assert told.value.fix
    ledger.close()


def test_a_connection_that_postgres_has_ended_is_opened_again(
    postgres_ledger: KnownLedger, ledger_database: Database
) -> None:
    ledger = open_ledger(postgres_ledger.address)
    ledger.note(postgres_ledger.name, *columns((16, 0)))
    ledger_database.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE application_name = 'walbrook:ledger' AND datname = current_database()"
    )
    ledger.note(postgres_ledger.name, *columns((16, 1)))
    assert has(ledger, postgres_ledger.name, (16, 0), (16, 1)) == [True, True]
    ledger.close()


def test_a_request_is_one_row_and_the_index_finds_it(
    postgres_ledger: KnownLedger, ledger_database: Database
) -> None:
    ledger = open_ledger(postgres_ledger.address)
    for lsn in range(8, 8 * 1001, 8):
        ledger.note(postgres_ledger.name, *columns(*((lsn, idx) for idx in range(100))))
    ledger.close()
    assert ledger_database.execute(
        "SELECT count(*), sum(length(cursors)) FROM walbrook.ledger"
    ) == [(1000, 1000 * 100 * 16)]
    ledger_database.execute("ANALYZE walbrook.ledger")
    for statement in ("SELECT cursors", "DELETE"):
        sign = ">=" if statement != "DELETE" else "<"
        plan = ledger_database.execute(
            f"EXPLAIN {statement} FROM walbrook.ledger WHERE ledger = '{postgres_ledger.name}'"
            f" AND queued = false AND (high_lsn, high_idx) {sign} ('0/10'::pg_lsn + 7984 * "
            f"{int(sign == '>=')}, 0)"
        )
        assert "Index Scan using ledger_pkey" in str(plan)
        assert "Filter" not in str(plan)


def test_a_cursor_that_is_moved_back_begins_an_empty_ledger_that_no_other_process_writes_to(
    postgres_ledger: KnownLedger, ledger_database: Database
) -> None:
    ledger, name = open_ledger(postgres_ledger.address), postgres_ledger.name
    ledger.note(name, *columns((16, 0)))
    ledger_database.execute(
        "UPDATE walbrook.consumers SET cursor_lsn = '0/20' WHERE name = 'orders'"
    )
    assert has(ledger, name, (16, 0)) == [True], "going on is no reason to forget"
    ledger_database.execute(
        "UPDATE walbrook.consumers SET cursor_lsn = '0/18' WHERE name = 'orders'"
    )
    ledger.note(name, *columns((16, 1)))  # by one who has not heard of it yet
    with ledger_database.connect() as state:
        now = read_active_consumers(state, SOURCE).ledgers
    assert now["orders"] != name
    assert now["others"] == postgres_ledger.other
    assert has(ledger, name, (16, 0), (16, 1)) == [False, False]
    assert has(ledger, now["orders"], (16, 0), (16, 1)) == [False, False]
    ledger.close()


def test_with_a_consumer_goes_its_ledger(
    postgres_ledger: KnownLedger, ledger_database: Database
) -> None:
    ledger = open_ledger(postgres_ledger.address)
    ledger.note(postgres_ledger.name, *columns((16, 0)))
    ledger.note(postgres_ledger.other, *columns((16, 0)))
    ledger.close()
    ledger_database.execute("DELETE FROM walbrook.consumers WHERE name = 'orders'")
    assert ledger_database.execute("SELECT ledger::text FROM walbrook.ledger") == [
        (postgres_ledger.other,)
    ]
    ledger_database.execute(f"UPDATE walbrook.ledger SET ledger = '{uuid.uuid4()}'")
    with ledger_database.connect() as state:
        sweep_ledgers(state)
    assert ledger_database.execute("SELECT count(*) FROM walbrook.ledger") == [(0,)]


def test_a_start_of_the_service_sweeps_up_what_no_message_of_a_queue_needs(
    postgres_ledger: KnownLedger, ledger_database: Database
) -> None:
    ledger, name = open_ledger(postgres_ledger.address), postgres_ledger.name
    ledger.note(name, *columns((8, 0)))
    ledger.note(name, *columns((16, 0), (16, 1)), queued=True)
    ledger.note(name, *columns((24, 0), (24, 1)), queued=True)
    ledger_database.execute(
        "INSERT INTO walbrook.events (consumer, commit_lsn, commit_idx, commit_timestamp, xid,"
        " table_schema, table_name, action, record_pks)"
        " SELECT id, '0/18', 1, now(), 1, 'public', 'item', 'insert', '[]'"
        f" FROM walbrook.consumers WHERE ledger = '{name}'"
    )
    with ledger_database.connect() as state:
        sweep_ledgers(state)
    assert has(ledger, name, (8, 0)) == [True]
    assert has(ledger, name, (16, 0), (16, 1), (24, 0), (24, 1), queued=True) == [
        *(False, False),
        *(False, True),
    ]
    ledger.close()


def test_redis_holds_the_very_bytes_without_a_score_and_not_for_ever(
    redis_ledger: KnownLedger, redis_client: redis.Redis
) -> None:
    ledger = open_ledger(redis_ledger.address)
    ledger.note(redis_ledger.name, *columns((2**53 + 1, 3), (2**53, 4)))
    ledger.close()
    (key,) = redis_client.keys("walbrook:ledger:*")
    held = b"".join(n.to_bytes(8, "big") for n in (2**53 + 1, 3, 2**53, 4))
    assert redis_client.zrange(key, 0, -1, withscores=True) == [(held, 0.0)]
    assert 0 < int(str(redis_client.ttl(key))) <= 30 * 86_400


def test_a_redis_that_hangs_is_waited_for_twice_and_then_left_alone_for_a_while(
    own_redis: EmbeddedRedis,
) -> None:
    timeout_s, pause_s = 0.2, 60.0
    ledger, name = RedisLedger(own_redis.url, timeout_s=timeout_s, pause_s=pause_s), "name"
    ledger.note(name, *columns((16, 0)))
    assert own_redis.pid is not None
    os.kill(own_redis.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(TransientError):
            ledger.note(name, *columns((16, 1)))
        assert time.monotonic() - started < 4 * timeout_s
        started = time.monotonic()
        for _ in range(100):
            with pytest.raises(TransientError):
                ledger.note(name, *columns((16, 1)))
        assert time.monotonic() - started < timeout_s
    finally:
        os.kill(own_redis.pid, signal.SIGCONT)
    ledger.close()
    again = RedisLedger(own_redis.url, timeout_s=10)
    assert has(again, name, (16, 0)) == [True]
    again.close()

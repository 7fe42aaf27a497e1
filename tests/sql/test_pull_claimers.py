"""Eight claimers at once, and one that is killed: nobody holds what another one holds."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fix_postgres import Database
from tests.pull_queue import Message, Puller, make_pull_consumer, numbers
from tests.waiting import until

pytestmark = pytest.mark.migrated

ROOT = Path(__file__).parents[2]
_CLAIMERS, _MESSAGES, _GROUPS, _LARGEST = 8, 1_500, 40, 12


@dataclass(frozen=True)
class Event:
    """Something that was surely so by ``at``: who holds a message, or that nobody does any more."""

    at: float
    n: int
    kind: str  # received, acked, nacked or expired
    lease: str


class History:
    """What all claimers saw, and whether that could have been."""

    def __init__(self, groups: list[int | None]) -> None:
        self._groups = groups
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self.acked = 0

    def note(self, at: float, messages: list[Message], kind: str) -> None:
        with self._lock:
            for message in messages:
                lease = message.ack_id.split("-")[1]
                self._events.append(Event(at, message.n, kind, lease))
            self.acked += len(messages) if kind == "acked" else 0

    def check(self) -> None:
        held: dict[int, str] = {}  # by message, the lease
        done: dict[int, int] = defaultdict(int)  # by group, the last that was acknowledged
        for event in sorted(self._events, key=lambda each: each.at):
            group = self._groups[event.n - 1]
            if event.kind == "received":
                assert event.n not in held, f"{event.n} was handed out while somebody held it"
                held[event.n] = event.lease
                if group is not None:
                    self._check_group(group, event, held)
                    assert event.n > done[group], f"group {group}: {event.n} after {done[group]}"
            else:
                del held[event.n]
                if event.kind == "acked" and group is not None:
                    assert event.n > done[group], f"group {group}: {event.n} after {done[group]}"
                    done[group] = event.n

    def _check_group(self, group: int, event: Event, held: dict[int, str]) -> None:
        others = [n for n, lease in held.items() if lease != event.lease]
        mine = [n for n in others if self._groups[n - 1] == group]
        assert not mine, f"{event.n} of group {group} went out while {mine} were with another"


def test_eight_claimers_never_hold_one_message_twice_and_keep_the_order_of_groups(
    database: Database,
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    make_pull_consumer(database, "jobs", max_deliveries=1000, max_in_flight=300)
    choose = random.Random(seed)
    groups = [choose.choice([None, *range(_GROUPS)]) for _ in range(_MESSAGES)]
    history = History(groups)
    failures: list[BaseException] = []

    def claim(number: int) -> None:
        puller, mine = Puller(database), random.Random(seed + number)
        try:
            while history.acked < _MESSAGES and not failures:
                _claim_once(puller, mine, history)
        except BaseException as error:
            failures.append(error)
        finally:
            puller.close()

    threads = [threading.Thread(target=claim, args=(n,)) for n in range(_CLAIMERS)]
    storing = Puller(database)
    for thread in threads:
        thread.start()
    for first in range(0, _MESSAGES, 100):
        storing.put(first + 1, groups[first : first + 100])
    for thread in threads:
        thread.join(120)
    if failures:
        raise failures[0]
    assert history.acked == _MESSAGES
    history.check()
    assert storing.rows("SELECT FROM walbrook.pull_in_flight") == []
    assert storing.rows("SELECT FROM walbrook.pull_messages") == []
    storing.close()


def _claim_once(puller: Puller, choose: random.Random, history: History) -> None:
    """Receive, then acknowledge, give back from some message on, or leave all to its deadline."""
    dies = choose.random() < 0.02
    asked = time.monotonic()
    got = puller.receive(
        choose.randint(1, _LARGEST), visibility="1 s" if dies else "1 min", wait="50 ms"
    )
    history.note(time.monotonic(), got, "received")
    if dies:
        history.note(asked + 1, got, "expired")
        return
    # What follows a message that is given back is given back with it: they may be of one group.
    cut = choose.randint(0, len(got)) if choose.random() < 0.3 else len(got)
    for messages, kind in ((got[:cut], "acked"), (got[cut:], "nacked")):
        if messages:
            history.note(time.monotonic(), messages, kind)
            if kind == "acked":
                answer = puller.ack(messages)
            else:
                answer = puller.nack(messages, delay=f"{choose.randint(0, 30)} ms")
            assert answer == (len(messages), [])


_HOLDER = """
import sys, time, psycopg
with psycopg.connect(sys.argv[1], autocommit=True) as connection:
    connection.execute("SELECT FROM walbrook.receive('jobs', 3, '1 s', holder => 'doomed')")
    print("holding", flush=True)
    time.sleep(600)
"""


def test_a_killed_holders_leases_come_back_after_their_deadline_first_in_line(
    database: Database,
) -> None:
    make_pull_consumer(database, "jobs")
    puller = Puller(database)
    puller.put(1, range(4))
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, database.dsn], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"holding\n"
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        assert numbers(puller.receive(9)) == [4]
        assert puller.receive(9) == []
        until("the deadline", lambda: puller.rows("SELECT FROM walbrook.leases WHERE expired"))
        puller.put(5, [5, 6])
        back = puller.receive(3)
        assert numbers(back) == [1, 2, 3]
        assert [message.deliveries for message in back] == [2, 2, 2]
        assert numbers(puller.receive(9)) == [5, 6]
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
        puller.close()

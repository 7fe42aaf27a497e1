"""A lane on a log, without Spark: who joins in mid-way, who is late, who was moved meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.connection import Connection
from cdc.errors import TransientError
from cdc.state.positions import consumer_cursors
from spark_pipeline.members import Departure
from spark_pipeline.plan import DriverPlan
from tests import pgoutput
from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.lane_on_log import SOURCE, LogLane, arrived
from tests.unit.replication.test_seal import transaction
from tests.waiting import until

pytestmark = pytest.mark.migrated

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
WIDER = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25), ("more", 25)])
ASKS = {"actions": ["insert", "schema_change"]}


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    with database.connect() as connection:
        yield connection


def write(lane: LogLane, number: int, *, table: bytes = ITEM, more: int = 0) -> None:
    """One row in a transaction and a batch of its own."""
    values = [str(number), "n", *["m"] * more]
    lane.write(table, *transaction(0x100 * number, pgoutput.insert(1, values)))


def ids(directory: Path) -> list[int | str]:
    return [m["record"].get("id", m["action"]) for m in arrived(directory)]


def test_one_that_joins_behind_the_lane_first_gets_what_the_lane_had(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, first=ASKS, later=ASKS)
    write(lane, 1)
    lane.passage.members.let_go("later", "inactive")
    for number in (2, 3):
        write(lane, number)
        lane.take()
    write(lane, 4, table=WIDER, more=1)
    lane.take()
    assert ids(tmp_path / "later") == []
    lane.passage.members.invite("later")
    write(lane, 5, table=WIDER, more=1)
    lane.take()
    whole = [1, 2, 3, "schema_change", 4, 5]
    assert ids(tmp_path / "first") == whole
    assert ids(tmp_path / "later") == whole
    cursors = consumer_cursors(state, SOURCE)
    assert cursors["later"] == cursors["first"]
    assert state.execute("SELECT DISTINCT delivered FROM walbrook.consumers").fetchall() == [(6,)]
    lane.close()


def test_one_that_is_too_far_behind_to_join_is_sent_away(state: Connection, tmp_path: Path) -> None:
    lane = LogLane(state, tmp_path, first={}, later={})
    lane.passage.members.let_go("later", "inactive")
    changes = [pgoutput.insert(1, [str(number), "n"]) for number in range(1001)]
    lane.write(ITEM, *transaction(0x100, *changes))
    lane.take()
    lane.passage.members.invite("later")
    write(lane, 2)
    lane.take()
    assert lane.departures[-1] == Departure("later", "behind")
    assert ids(tmp_path / "later") == []
    lane.close()


def test_one_that_stands_ahead_of_the_lane_joins_without_a_repeat(
    state: Connection, endpoint: Endpoint, tmp_path: Path
) -> None:
    hook = {"destination": {"type": "webhook", "url": endpoint.url}}
    lane = LogLane(state, tmp_path, first={}, later=hook)
    for number in (1, 2, 3):
        write(lane, number)
    lane.take(2)
    lane.passage.members.let_go("later", "inactive")
    state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/301' WHERE name = 'later'")
    lane.passage.members.invite("later")
    lane.take()
    write(lane, 4)
    lane.take()
    sent = [m["record"]["id"] for r in endpoint.accepted for m in r.messages]  # type: ignore[index]
    assert sent == [1, 2, 4]
    lane.close()


def test_one_whose_cursor_was_moved_leaves_and_the_others_are_settled(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, first={}, moved={})
    write(lane, 1)
    lane.take()
    write(lane, 2)
    state.execute(
        "UPDATE walbrook.consumers SET cursor_lsn = '0/8', cursor_idx = 0 WHERE name = 'moved'"
    )
    before = consumer_cursors(state, SOURCE)
    lane.take()
    assert lane.departures == [Departure("moved", "moved")]
    after = consumer_cursors(state, SOURCE)
    assert after["moved"] == before["moved"]
    assert after["first"] > before["first"]
    lane.close()


def test_one_that_takes_too_long_is_settled_by_itself_and_holds_nobody(
    state: Connection, database: Database, endpoint: Endpoint, tmp_path: Path
) -> None:
    hook = {"destination": {"type": "webhook", "url": endpoint.url, "timeout_ms": 60000}}
    lane = LogLane(state, tmp_path, hook=hook, files={})
    lane.state_dsn, lane.patience_s = database.dsn, 0.05
    lane.start()
    before = plans_in_memory()
    write(lane, 1)
    lane.take()
    go_on = threading.Event()
    endpoint.script.append(Scripted(after=go_on))
    for number in (2, 3):
        write(lane, number)
        lane.take()
    assert ids(tmp_path / "files") == [1, 2, 3]
    assert lane.departures == [Departure("hook", "detached")]
    cursors = consumer_cursors(state, SOURCE)
    assert cursors["hook"] < cursors["files"]
    go_on.set()
    until("the slow one to end", lambda: len(lane.departures) == 2)
    assert lane.departures[-1] == Departure("hook", "slow")
    assert state.execute(
        "SELECT delivered FROM walbrook.consumers WHERE name = 'hook'"
    ).fetchall() == [(2,)]
    until("what it held to be gone", lambda: plans_in_memory() <= before)
    lane.close()


def plans_in_memory() -> int:
    gc.collect()
    return sum(isinstance(each, DriverPlan) for each in gc.get_objects())


def test_a_micro_batch_of_an_earlier_start_of_the_lane_settles_nothing(
    state: Connection, tmp_path: Path
) -> None:
    lane = LogLane(state, tmp_path, files={})
    write(lane, 1)
    earlier, its_exchange = lane.passage, lane.exchange
    lane.start_lane_again()
    write(lane, 2)
    lane.take()
    settled = consumer_cursors(state, SOURCE)
    lane.passage, lane.exchange = earlier, its_exchange
    its_exchange.directory.mkdir()
    with pytest.raises(TransientError, match="is not the next to be settled"):
        lane.take()
    assert consumer_cursors(state, SOURCE) == settled
    lane.close()


def test_a_lane_is_seen_in_sql(state: Connection, tmp_path: Path) -> None:
    lane = LogLane(state, tmp_path, files={}, other={})
    for number in (1, 2):
        write(lane, number)
        lane.take()
    rows = state.execute(
        "SELECT name, consumers, epoch, batch, attempts, rows, took_ms > 0,"
        "       (cursor_lsn, cursor_idx) = (SELECT max(cursor_lsn), max(cursor_idx)"
        "                                     FROM walbrook.consumers)"
        "  FROM walbrook.lanes"
    ).fetchall()
    assert rows == [("shared", ["files", "other"], 1, 2, 0, 1, True, True)]
    lane.start_lane_again()
    assert state.execute("SELECT epoch, batch, attempts FROM walbrook.lanes").fetchall() == [
        (2, 0, 1)
    ]
    lane.close()

"""Lanes in the running service: who fails, hangs or is moved is alone with it, and comes back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import yaml

from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.lane_on_log import arrived
from tests.service import Service, running
from tests.waiting import until

_SERVED = "SELECT lane = '{lane}' FROM walbrook.consumers WHERE name = '{consumer}'"
_REASON = "SELECT lane_reason LIKE '{reason}%' FROM walbrook.consumers WHERE name = '{consumer}'"
_EPOCH = "SELECT epoch FROM walbrook.lanes WHERE name = 'shared'"


class Shop:
    """A source with a webhook and files behind it, and what has arrived there."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self.service, self.database, self.endpoint = service, service.database, endpoint
        self._next = 1

    def write(self, rows: int) -> int:
        """Insert rows; the answer is the id of the last."""
        first, self._next = self._next, self._next + rows
        self.database.execute(
            f"INSERT INTO item SELECT i, 'n' FROM generate_series({first}, {self._next - 1}) i"
        )
        return self._next - 1

    def in_files(self) -> list[int]:
        return [m["record"]["id"] for m in arrived(self.service.directory / "files")]

    def at_hook(self) -> list[int]:
        records = [m["record"] for r in self.endpoint.accepted for m in r.messages]
        return [record["id"] for record in records]  # type: ignore[index]

    def until_in_files(self, last: int) -> None:
        until(f"{last} in the files", lambda: self.in_files() == list(range(1, last + 1)), 60)

    def until_served(self, consumer: str, lane: str) -> None:
        self.service.until(
            f"{consumer} in lane {lane}", _SERVED.format(lane=lane, consumer=consumer)
        )

    def until_left(self, consumer: str, reason: str) -> None:
        self.service.until(
            f"{consumer} out of the shared lane",
            _REASON.format(reason=reason, consumer=consumer),
        )

    def health(self) -> list[tuple[str, str]]:
        return self.database.execute("SELECT consumer, kind FROM walbrook.health")

    def epoch(self) -> int:
        ((epoch,),) = self.database.execute(_EPOCH)
        return int(epoch)


def _sinks(endpoint: Endpoint) -> list[dict[str, object]]:
    hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0, "timeout_ms": 60000}
    return [
        {"name": "hook", "destination": hook},
        {"name": "files", "destination": {"type": "file", "path": "files"}},
    ]


@pytest.mark.timeout(400)
def test_whoever_fails_hangs_or_is_moved_catches_up_alone_and_comes_back(
    database: Database, endpoint: Endpoint, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    with running(database, tmp_path / "service", _sinks(endpoint)) as service:
        shop = Shop(service, endpoint)
        shop.until_in_files(shop.write(10))
        shop.until_served("hook", "shared")
        service.until_settled()
        epoch = shop.epoch()

        endpoint.refuses, endpoint.refusal = (lambda _messages: True), 503
        shop.until_in_files(shop.write(500))
        shop.until_left("hook", "its sink failed: %503")
        assert shop.health() == [("hook", "lane_failing")]
        shop.until_in_files(shop.write(500))
        assert shop.at_hook() == list(range(1, 11))
        endpoint.refuses = None
        shop.until_served("hook", "shared")
        until("health to be good again", lambda: shop.health() == [])
        last = shop.write(10)
        service.until_settled()
        assert shop.at_hook() == list(range(1, last + 1)), "lost, repeated or out of order"

        go_on = threading.Event()
        endpoint.script.append(Scripted(after=go_on))
        shop.until_in_files(shop.write(300))
        shop.until_left("hook", "it is slower")
        shop.until_in_files(shop.write(300))
        go_on.set()
        service.until_settled()
        last = shop.write(1)
        service.until_settled()
        assert shop.at_hook() == list(range(1, last + 1)), "lost, repeated or out of order"

        database.execute(
            "UPDATE walbrook.consumers SET cursor_lsn = s.earliest_lsn, cursor_idx = s.earliest_idx"
            "  FROM walbrook.sources s WHERE consumers.name = 'hook'"
        )
        service.until_settled()
        assert shop.at_hook() == [*range(1, last + 1), *range(1, last + 1)]

        database.execute("UPDATE walbrook.consumers SET active = false WHERE name = 'hook'")
        shop.until_left("hook", "it is not active")
        shop.until_in_files(shop.write(10))
        assert len(shop.at_hook()) == 2 * last
        database.execute("UPDATE walbrook.consumers SET active = true WHERE name = 'hook'")
        service.until_settled()
        assert shop.at_hook()[2 * last :] == list(range(last + 1, last + 11))

        ((lsn, idx),) = database.execute(
            "SELECT cursor_lsn::text, cursor_idx FROM walbrook.consumers WHERE name = 'hook'"
        )
        moves = (
            "UPDATE walbrook.consumers SET (cursor_lsn, cursor_idx) = ('{}', {})"
            " WHERE name = 'hook'"
        )
        database.execute(moves.format("FF/0", 0))
        until("health to say so", lambda: shop.health() == [("hook", "lane_ahead")])
        database.execute(moves.format(lsn, idx))
        shop.until_in_files(shop.write(1))
        service.until_settled()
        assert shop.at_hook()[-1] == last + 11
        until("health to be good again", lambda: shop.health() == [])

        assert shop.epoch() == epoch, "the others' lane was started again"
        assert service.stop() == 0, service.log_tail()


@pytest.mark.timeout(400)
def test_a_new_sink_can_begin_with_all_that_the_log_has_and_holds_nobody_back(
    database: Database, endpoint: Endpoint, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    directory = tmp_path / "service"
    with running(database, directory, _sinks(endpoint)[1:]) as service:
        shop = Shop(service, endpoint)
        last = shop.write(30_000)
        service.until_settled()
        assert service.stop() == 0, service.log_tail()
    settings = yaml.safe_load(service.config.read_text())
    settings["sinks"] += [_sinks(endpoint)[0] | {"start_at": "earliest"}]
    settings["spark"] |= {"micro_batch_rows": 1000}
    service.config.write_text(yaml.safe_dump(settings))
    service.start()
    try:
        service.until("the lane of its own", "SELECT 'hook' = ANY (consumers) FROM walbrook.lanes "
                      "WHERE name = 'catch_up_1'")  # fmt: skip
        last = shop.write(100)
        shop.until_served("hook", "shared")
        last = shop.write(100)
        service.until_settled()
        assert shop.at_hook() == list(range(1, last + 1)), "lost, repeated or out of order"
        shop.until_in_files(last)
        assert database.execute("SELECT name FROM walbrook.lanes") == [("shared",)]
    finally:
        service.kill()


@pytest.mark.timeout(400)
def test_a_micro_batch_that_hangs_is_told_of_then_given_up_and_nothing_is_lost(
    database: Database, endpoint: Endpoint, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    service = Service(database, tmp_path / "service", _sinks(endpoint)[:1])
    settings = yaml.safe_load(service.config.read_text())
    settings["spark"] |= {"deadline_s": 1}
    service.config.write_text(yaml.safe_dump(settings))
    service.start()
    try:
        service.until_serving()
        shop = Shop(service, endpoint)
        shop.write(1)
        service.until_settled()
        never = threading.Event()
        endpoint.script.append(Scripted(after=never))
        shop.write(1)
        service.until(
            "the event",
            "SELECT what LIKE '%at deliver for%waiting for hook' FROM walbrook.health"
            " WHERE kind = 'lane_slow_shared'",
        )
        service.until("the lane to start again", "SELECT epoch > 1 FROM walbrook.lanes")
        shop.until_left("hook", "it is slower")
        never.set()
        shop.write(1)
        service.until_settled()
        assert shop.at_hook() == [1, 2, 3]
        service.until("the event to be over", "SELECT count(*) = 0 FROM walbrook.health")
    finally:
        never.set()
        service.kill()

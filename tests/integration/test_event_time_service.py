"""One consumer over two databases with different clocks and rates, through idleness and kills."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import orjson
import psutil
import pytest
import redis

from tests.fix_http import Endpoint
from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.lane_on_log import arrived
from tests.merged_service import EVENTS, MergedService
from tests.waiting import until

Messages = list[dict[str, Any]]

TIMED: dict[str, object] = {
    "databases": ["shop", "depot"],
    "ordering": "event_time",
    "event_time": {
        "column": "at",
        "late_tolerance": "1s",
        "idle_timeout": "3s",
        "safety_margin": "100ms",
        "emit_watermarks": True,
    },
}


WINDOWED: dict[str, object] = TIMED | {
    "window": {
        "size": "2s",
        "slide": "1s",
        "group_by": {"origin": "record.origin"},
        "aggregates": {"n": "count(*)", "ids": "sum(record.id)"},
    }
}


@pytest.fixture
def second(postgres_server: PostgresServer) -> Iterator[Database]:
    with fresh_database(postgres_server.dsn) as made:
        yield made


class Writer:
    """Inserts with times of a clock that is ``behind_s`` late, and out of order by up to 0.4 s."""

    def __init__(self, database: Database, origin: str, pause_s: float, behind_s: float) -> None:
        self._database, self._origin = database, origin
        self._pause_s, self._behind_s = pause_s, behind_s
        self.written = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        rng = random.Random(self._origin)
        with self._database.connect() as connection:
            while not self._stop.wait(self._pause_s):
                self.written += 1
                connection.execute(
                    "INSERT INTO event VALUES (%s, clock_timestamp() - make_interval(secs => %s),"
                    " %s)",
                    (self.written, self._behind_s + rng.random() * 0.4, self._origin),
                )

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def running(
    first: Database, second: Database, directory: Path, sinks: list[dict[str, object]]
) -> Iterator[MergedService]:
    for database in (first, second):
        database.execute(EVENTS)
    service = MergedService(first, second, directory, sinks)
    service.start()
    try:
        service.until_serving()
        yield service
    finally:
        service.kill()


def changes(messages: Messages) -> Messages:
    return [m for m in messages if m["action"] == "insert"]


def check(messages: Messages, writers: list[Writer]) -> None:
    """All there, each once, in the order of their times, and each watermark in its place."""
    rows = [(m["record"]["origin"], m["record"]["id"]) for m in changes(messages)]
    assert len(rows) == len(set(rows)), "some came twice"
    wanted = {(w._origin, n) for w in writers for n in range(1, w.written + 1)}
    assert set(rows) == wanted
    reached = datetime.min
    for message in messages:
        if message["action"] == "watermark":
            told = datetime.fromisoformat(message["record"]["watermark"]).replace(tzinfo=None)
            assert told >= reached, "a watermark went back"
            reached = told
        else:
            at = datetime.fromisoformat(message["metadata"]["event_time"]).replace(tzinfo=None)
            late = message["metadata"].get("late", False)
            assert late or at > reached, "on time, at or below a watermark that was told"
    on_time = [m for m in changes(messages) if not m["metadata"].get("late")]
    times = [m["metadata"]["event_time"] for m in on_time]
    assert times == sorted(times)
    sequence = [tuple(map(int, m["metadata"]["sequence"].split("-"))) for m in messages]
    assert sequence == sorted(set(sequence)), "numbers that do not rise"


def check_windows(messages: Messages, rows: Messages) -> None:
    """Each window and origin once, in the order of their ends, over exactly its rows."""
    results = [m["record"] for m in messages if m["action"] == "window"]
    assert len(results) > 10
    ends = [result["window_end"] for result in results]
    assert ends == sorted(ends)
    seen = {(result["window_end"], result["origin"]): result for result in results}
    assert len(seen) == len(results), "a window came twice"
    last = datetime.fromisoformat(ends[-1])
    wanted: dict[tuple[datetime, str], list[int]] = {}
    for row in rows:
        at = datetime.fromisoformat(row["metadata"]["event_time"])
        first = at.replace(microsecond=0) + timedelta(seconds=1)
        for end in (first, first + timedelta(seconds=1)):
            wanted.setdefault((end, row["record"]["origin"]), []).append(row["record"]["id"])
    closed = {key: ids for key, ids in wanted.items() if key[0] <= last}
    assert {
        (datetime.fromisoformat(end), origin): (result["n"], result["ids"])
        for (end, origin), result in seen.items()
    } == {key: (len(ids), sum(ids)) for key, ids in closed.items()}


@pytest.mark.timeout(240)
def test_two_databases_are_merged_and_one_that_falls_silent_holds_nobody(
    database: Database, second: Database, tmp_path: Path
) -> None:
    sinks: list[dict[str, object]] = [
        {"name": "merged", "destination": {"type": "file", "path": "out"}, **TIMED},
        {
            "name": "plain",
            "database": "depot",
            "destination": {"type": "file", "path": "plain"},
        },
    ]
    out = tmp_path / "service" / "out"
    with running(database, second, tmp_path / "service", sinks) as service:
        shop = Writer(database, "shop", 0.005, 0.0)
        depot = Writer(second, "depot", 0.05, 2.0)
        with shop:
            with depot:
                until("both", lambda: len(changes(arrived(out))) > 200, 120)
                origins = {m["record"]["origin"] for m in changes(arrived(out))}
                assert origins == {"shop", "depot"}
            # The depot is silent now; the shop goes on, and must not wait for it for ever.
            before = shop.written
            until(
                "what came after the silence",
                lambda: changes(arrived(out))[-1]["record"]["id"] > before,
                60,
            )
            service.until(
                "SQL to show who is idle",
                "SELECT idle_since IS NOT NULL FROM walbrook.watermarks"
                " WHERE consumer = 'merged' AND source = 'depot'",
                5,
            )
        ((held, low),) = database.execute(
            "SELECT sum(buffered), bool_and(watermark <= last_event) FROM walbrook.watermarks"
        )
        assert held >= 0
        assert low
        service.until_read()
        assert service.stop() == 0, service.log_tail()
    messages = arrived(out)
    check(messages, [shop, depot])
    assert not any(m["metadata"].get("late") for m in changes(messages)), "nothing was too late"
    assert len(arrived(tmp_path / "service" / "plain")) == depot.written


@pytest.mark.timeout(400)
def test_killed_in_between_nothing_is_lost_or_comes_twice(
    database: Database,
    second: Database,
    redis_client: redis.Redis,
    redis_url: str,
    endpoint: Endpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = f"timed-{database.name}"
    sinks: list[dict[str, object]] = [
        {"name": "files", "destination": {"type": "file", "path": "out"}, **TIMED},
        {
            "name": "entries",
            "destination": {"type": "redis_stream", "url": redis_url, "stream_key": stream},
            **TIMED,
        },
        {"name": "hook", "destination": {"type": "webhook", "url": endpoint.url}, **TIMED},
        {"name": "counts", "destination": {"type": "file", "path": "counts"}, **WINDOWED},
    ]
    out = tmp_path / "service" / "out"
    # The driver dies with a release on its way, again and again.
    monkeypatch.setenv("WALBROOK_FAILPOINT", "released:9")
    with running(database, second, tmp_path / "service", sinks) as service:
        shop = Writer(database, "shop", 0.01, 0.0)
        depot = Writer(second, "depot", 0.03, 1.0)
        with shop, depot:
            until("a death of the driver", lambda: _deaths(service) >= 1, 120)
            until("some", lambda: len(arrived(out)) > 50, 60)
            # The driver outlives the service for a while, and must not flush what it holds back.
            orphans = service.orphan()
            monkeypatch.delenv("WALBROOK_FAILPOINT")
            service.start()
            target = len(arrived(out)) + 300
            until("more", lambda: len(arrived(out)) > target, 90)
        service.until_read()
        assert service.stop() == 0, service.log_tail()
        assert not psutil.wait_procs(orphans, 60)[1]
    check(arrived(out), [shop, depot])
    assert not any(m["metadata"].get("late") for m in changes(arrived(out))), "kills made some late"
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", redis_client.xrange(stream))
    check(
        [
            {
                "record": orjson.loads(fields[b"record"]),
                "action": fields[b"action"].decode(),
                "metadata": orjson.loads(fields[b"metadata"]),
            }
            for _, fields in entries
        ],
        [shop, depot],
    )
    # The request that was under way when the driver died may come twice: each has its number.
    hooked = {m["metadata"]["sequence"]: m for m in cast("Messages", endpoint.written)}
    check(list(hooked.values()), [shop, depot])
    check_windows(arrived(tmp_path / "service" / "counts"), changes(arrived(out)))


def _deaths(service: MergedService) -> int:
    return service.log.read_text(errors="replace").count("service.died")

"""One consumer over two databases with different clocks and rates, through idleness and kills."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, cast

import orjson
import psutil
import pytest
import redis

from cdc.failpoints import VARIABLE
from tests.fix_http import Endpoint
from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.log_pipeline import arrived
from tests.merged_service import EVENTS, MergedService
from tests.waiting import until
from tests.walbrook_service import started

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

BY_CLOCK: dict[str, object] = {
    "databases": ["shop", "depot"],
    "ordering": "processing_time",
    "event_time": {"emit_watermarks": True},
}
WINDOWED_BY_CLOCK: dict[str, object] = {
    "databases": ["shop", "depot"],
    "ordering": "processing_time",
    "window": {
        "size": "1s",
        "group_by": {"origin": "record.origin"},
        "aggregates": {"n": "count(*)", "ids": "sum(record.id)"},
    },
}


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


def check_windows_by_clock(messages: Messages, writers: list[Writer]) -> None:
    """Each window and origin once, by their ends; together they hold the first rows, each once."""
    results = [m["record"] for m in messages]
    keys = [(result["window_end"], result["origin"]) for result in results]
    assert keys == sorted(set(keys))
    assert len(keys) > 10
    for writer in writers:
        of_writer = [result for result in results if result["origin"] == writer._origin]
        counted = sum(result["n"] for result in of_writer)
        assert 0 < counted <= writer.written
        assert sum(result["ids"] for result in of_writer) == counted * (counted + 1) // 2


@dataclass(frozen=True)
class Merged:
    """What the sinks had when the service was stopped, and who wrote it."""

    shop: Writer
    depot: Writer
    files: Messages
    plain: Messages
    entries: Messages
    hooked: Messages
    counts: Messages
    came: Messages
    came_counts: Messages


@pytest.fixture(scope="module")
def merged(
    postgres_server: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Merged:
    """The driver dies, the supervisor is killed, and then one source is silent."""
    directory = tmp_path_factory.mktemp("merged") / "service"
    with ExitStack() as open_now:
        first = open_now.enter_context(fresh_database(postgres_server.dsn))
        second = open_now.enter_context(fresh_database(postgres_server.dsn))
        client = open_now.enter_context(redis.Redis.from_url(redis_url))
        endpoint = open_now.enter_context(Endpoint.running())
        for database in (first, second):
            database.execute(EVENTS)
        stream = f"timed-{first.name}"
        sinks = _sinks(stream, redis_url, endpoint)
        service = MergedService(first, second, directory, sinks)
        # The driver dies with a release on its way, again and again.
        patch = open_now.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(VARIABLE, "released:9")
        open_now.enter_context(started(service))
        patch.delenv(VARIABLE)
        shop, depot = Writer(first, "shop", 0.01, 0.0), Writer(second, "depot", 0.03, 1.0)
        with shop:
            with depot:
                _die(service)
            _wait_out_a_silence(service, shop)
        service.until_read()
        service.until_settled(only=["plain"], source=second)
        assert service.stop() == 0, service.log_tail()
        return Merged(
            shop,
            depot,
            files=arrived(directory / "out"),
            plain=arrived(directory / "plain"),
            entries=_entries(client, stream),
            # The request that was under way when the driver died may come twice: by its number.
            hooked=list({m["metadata"]["sequence"]: m for m in _written(endpoint)}.values()),
            counts=arrived(directory / "counts"),
            came=arrived(directory / "came"),
            came_counts=arrived(directory / "came_counts"),
        )


def _sinks(stream: str, redis_url: str, endpoint: Endpoint) -> list[dict[str, object]]:
    entries = {"type": "redis_stream", "url": redis_url, "stream_key": stream}
    return [
        {"name": "files", "destination": {"type": "file", "path": "out"}, **TIMED},
        {"name": "plain", "database": "depot", "destination": {"type": "file", "path": "plain"}},
        {"name": "entries", "destination": entries, **TIMED},
        {"name": "hook", "destination": {"type": "webhook", "url": endpoint.url}, **TIMED},
        {"name": "counts", "destination": {"type": "file", "path": "counts"}, **WINDOWED},
        {"name": "came", "destination": {"type": "file", "path": "came"}, **BY_CLOCK},
        {
            "name": "came_counts",
            "destination": {"type": "file", "path": "came_counts"},
            **WINDOWED_BY_CLOCK,
        },
    ]


def _die(service: MergedService) -> None:
    """First the driver, then the supervisor, and the service is started again."""
    out = service.directory / "out"
    until("a death of the driver", lambda: _deaths(service) >= 1, 120)
    until("some", lambda: len(arrived(out)) > 50, 60)
    # The driver outlives the service for a while, and must not flush what it holds back.
    orphans = service.orphan()
    service.start()
    target = len(arrived(out)) + 300
    until("more", lambda: len(arrived(out)) > target, 90)
    origins = {m["record"]["origin"] for m in changes(arrived(out))}
    assert origins == {"shop", "depot"}
    assert not psutil.wait_procs(orphans, 60)[1]


def _wait_out_a_silence(service: MergedService, shop: Writer) -> None:
    """The depot is silent now; the shop goes on, and must not wait for it for ever."""
    out, before = service.directory / "out", shop.written
    until(
        "what came after the silence",
        lambda: changes(arrived(out))[-1]["record"]["id"] > before,
        60,
    )
    service.until(
        "SQL to show who is idle",
        "SELECT idle_since IS NOT NULL FROM walbrook.watermarks"
        " WHERE consumer = 'files' AND source = 'depot'",
        60,
    )
    ((held, low),) = service.state.execute(
        "SELECT sum(buffered), bool_and(watermark <= last_event) FROM walbrook.watermarks"
        " WHERE consumer NOT LIKE 'came%'"
    )
    assert held >= 0
    assert low


def test_two_databases_are_merged_and_one_that_falls_silent_holds_back_no_other(
    merged: Merged,
) -> None:
    check(merged.files, [merged.shop, merged.depot])
    late = [m for m in changes(merged.files) if m["metadata"].get("late")]
    assert not late, "kills or the silence made some late"
    assert len(merged.plain) == merged.depot.written


def test_killed_in_between_nothing_is_lost_or_comes_twice(merged: Merged) -> None:
    for messages in (merged.entries, merged.hooked):
        check(messages, [merged.shop, merged.depot])
    check_windows(merged.counts, changes(merged.files))


def test_by_the_clock_kills_change_no_order_and_no_window(merged: Merged) -> None:
    writers = [merged.shop, merged.depot]
    check(merged.came, writers)
    for writer in writers:
        rows = [m["record"] for m in changes(merged.came)]
        ids = [row["id"] for row in rows if row["origin"] == writer._origin]
        assert ids == sorted(ids), "not in the order of commits"
    assert not any(m["metadata"].get("late") for m in merged.came)
    check_windows_by_clock(merged.came_counts, writers)


def _entries(client: redis.Redis, stream: str) -> Messages:
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(stream))
    return [
        {
            "record": orjson.loads(fields[b"record"]),
            "action": fields[b"action"].decode(),
            "metadata": orjson.loads(fields[b"metadata"]),
        }
        for _, fields in entries
    ]


def _written(endpoint: Endpoint) -> Messages:
    return cast("Messages", endpoint.written)


def _deaths(service: MergedService) -> int:
    return service.log.read_text(errors="replace").count("service.died")

"""One service that runs through all of these, and is started again once.

Each test has its own table and sinks. What is done to one sink shows at once, everywhere, and for
that sink alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import psutil
import pytest
import redis

from tests.api_server import served
from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import PostgresServer, fresh_database
from tests.shop import Shop, shop_sinks, shop_table
from tests.waiting import until
from tests.walbrook_service import Service, running

SHOPS = ("moved", "rewound", "paused", "new", "seen")
_MESSAGE = """
INSERT INTO walbrook.events
       (consumer, commit_lsn, commit_idx, commit_timestamp, xid, table_schema, table_name, action,
        record, record_pks, due_at)
SELECT id, '{lsn}', {idx}, now(), 7, 'public', 'item', 'insert', '{{}}', '[]',
       now() + interval '1 hour'
  FROM walbrook.consumers WHERE name = '{consumer}'
"""
_BEHIND = "SELECT count(*) FROM walbrook.consumers WHERE state = 'catching_up'"


@dataclass(frozen=True)
class Running:
    """The service, its shops by name, and the stream beside the last one's sinks."""

    service: Service
    shops: dict[str, Shop]
    redis: redis.Redis
    stream: str

    def shop(self, name: str) -> Shop:
        """Once all is well, whatever another test did to its sinks."""
        self.service.until("health to be good", "SELECT count(*) = 0 FROM walbrook.health")
        return self.shops[name]


@pytest.fixture(scope="module")
def now(
    postgres_server: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with ExitStack() as open_now:
        database = open_now.enter_context(fresh_database(postgres_server.dsn))
        client = open_now.enter_context(redis.Redis.from_url(redis_url))
        endpoints = {name: open_now.enter_context(Endpoint.running()) for name in SHOPS}
        for name in SHOPS:
            database.execute(shop_table(name))
        stream = f"seen-{database.name}"
        sinks = [sink for name in SHOPS for sink in shop_sinks(endpoints[name], name)]
        entries: dict[str, object] = {
            "name": "seen_stream",
            "source": {"include_tables": ["public.seen_item"]},
            "destination": {"type": "redis_stream", "url": redis_url, "stream_key": stream},
        }
        service = open_now.enter_context(
            running(
                database,
                tmp_path_factory.mktemp("running") / "service",
                [*(sink for sink in sinks if sink["name"] != "new_hook"), entries],
                {"log": {"durability": "fsync"}},
            )
        )
        shops = {name: Shop(service, endpoint, name) for name, endpoint in endpoints.items()}
        yield Running(service, shops, client, stream)


def test_a_sink_that_fails_hangs_or_is_moved_catches_up_alone_and_comes_back(now: Running) -> None:
    shop = now.shop("moved")
    endpoint = shop.endpoint
    shop.until_in_files(shop.write(10))
    shop.until_live()
    shop.until_settled()
    run = shop.run()

    endpoint.refuses, endpoint.refusal = (lambda _messages: True), 503
    shop.until_in_files(shop.write(500))
    shop.until_held("its sink failed: %503")
    assert shop.health() == ["worker_failing"]
    shop.until_in_files(shop.write(500))
    assert shop.at_hook() == list(range(1, 11))
    endpoint.refuses = None
    shop.until_live()
    shop.until_healthy()
    last = shop.write(10)
    shop.until_settled()
    assert shop.at_hook() == list(range(1, last + 1)), "lost, repeated or out of order"

    go_on = threading.Event()
    endpoint.script.append(Scripted(after=go_on))
    known = len(shop.at_hook())
    shop.until_in_files(shop.write(300))
    shop.until_in_files(shop.write(300))
    assert len(shop.at_hook()) <= known + 100, "more than the one request that hangs was sent"
    go_on.set()
    shop.until_settled()
    last = shop.write(1)
    shop.until_settled()
    assert shop.at_hook() == list(range(1, last + 1)), "lost, repeated or out of order"

    _is_moved(shop, last)
    assert shop.run() == run, "another process serves the source now"


def _is_moved(shop: Shop, last: int) -> None:
    """Back to the beginning of the log, out of service and back, beyond the log and back."""
    database = shop.database
    name = f"name = '{shop.hook}'"
    database.execute(
        "UPDATE walbrook.consumers SET cursor_lsn = s.earliest_lsn, cursor_idx = s.earliest_idx"
        f"  FROM walbrook.sources s WHERE consumers.{name}"
    )
    shop.until_settled()
    assert shop.at_hook() == [*range(1, last + 1), *range(1, last + 1)]

    database.execute(f"UPDATE walbrook.consumers SET active = false WHERE {name}")
    shop.until_held("it is not active")
    shop.until_in_files(shop.write(10))
    assert len(shop.at_hook()) == 2 * last
    database.execute(f"UPDATE walbrook.consumers SET active = true WHERE {name}")
    shop.until_settled()
    assert shop.at_hook()[2 * last :] == list(range(last + 1, last + 11))

    ((lsn, idx),) = database.execute(
        f"SELECT cursor_lsn::text, cursor_idx FROM walbrook.consumers WHERE {name}"
    )
    moves = f"UPDATE walbrook.consumers SET (cursor_lsn, cursor_idx) = ('{{}}', {{}}) WHERE {name}"
    database.execute(moves.format("FF/0", 0))
    until("health to say so", lambda: shop.health() == ["worker_ahead"])
    database.execute(moves.format(lsn, idx))
    shop.until_in_files(shop.write(1))
    shop.until_settled()
    assert shop.at_hook()[-1] == last + 11
    shop.until_healthy()


def _rewind_everywhere(shop: Shop, client: httpx.Client) -> int:
    """While live, paused, and failing; the answer is the last id that was written."""
    last = shop.write(50)
    shop.until_settled()
    again = len(shop.at_hook())
    answer = client.post(f"/{shop.hook}/rewind", json={"to_cursor": shop.cursor_of(15)})
    assert answer.status_code == 200, answer.text
    shop.until_settled()
    assert shop.at_hook(again) == list(range(15, last + 1)), "not from exactly there"

    shop.act(f"pause('{shop.hook}')")
    shop.until_paused()
    again = len(shop.at_hook())
    shop.act(f"rewind('{shop.hook}', to_earliest => true)")
    last = shop.write(1)
    shop.until_in_files(last)
    assert len(shop.at_hook()) == again, "a paused sink got something"
    assert f"{shop.hook} stands at" in shop.walbrook("resume", shop.hook)
    shop.until_settled()
    assert shop.at_hook(again) == list(range(1, last + 1))

    shop.endpoint.refuses, shop.endpoint.refusal = (lambda _messages: True), 503
    again = len(shop.at_hook())
    last = shop.write(20)
    shop.until_held("its sink failed")
    shop.walbrook("rewind", shop.hook, "--to-cursor", shop.cursor_of(30))
    shop.endpoint.refuses = None
    shop.until_settled()
    assert shop.at_hook(again) == list(range(30, last + 1))
    return last


def test_metrics_count_what_each_sink_gets_and_where_time_goes(now: Running) -> None:
    shop = now.shop("moved")
    shop.write(20)
    shop.until_settled()
    address = f"http://127.0.0.1:{now.service.http_port()}/metrics"
    wanted = (
        'walbrook_delivered_messages_total{consumer="moved_hook",source="shop"} ',
        'walbrook_delivery_seconds_count{consumer="moved_hook",source="shop"} ',
        'walbrook_end_to_end_seconds_count{consumer="moved_hook",source="shop"} ',
        'walbrook_ingest_seconds_count{source="shop"} ',
        'walbrook_settle_seconds_count{source="shop"} ',
        'walbrook_log_sync_seconds_count{source="shop"} ',
        'walbrook_phase_seconds_total{consumer="moved_hook",phase="delivery",source="shop",',
        'walbrook_process_cpu_seconds_total{process="reader shop"} ',
        'walbrook_slot_retained_bytes{source="shop"} ',
    )

    def shown() -> bool:
        lines = httpx.get(address).text.splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith(wanted)]
        return len(values) == len(wanted) and all(value > 0 for value in values)

    until("what the processes have measured", shown)


def test_rewound_changes_come_again_and_discarded_ones_leave_a_gap_message(
    now: Running,
) -> None:
    shop = now.shop("rewound")
    endpoint = shop.endpoint
    with served(shop.database.dsn) as client:
        last = _rewind_everywhere(shop, client)

        shop.until_live()
        known = len(shop.messages())
        shop.database.execute(_MESSAGE.format(lsn="0/8", idx=3, consumer=shop.hook))
        answer = client.post(f"/{shop.hook}/discard", json={"cursor": "0/8:3"})
        assert answer.status_code == 200, answer.text
    until("the gap message", lambda: len(shop.messages()) > known)
    assert shop.messages()[known]["action"] == "gap"
    assert shop.messages()[known]["record"] == {
        "from": "0/8:3", "to": "0/8:4", "reason": "discarded",
    }  # fmt: skip

    endpoint.refuses, endpoint.refusal = (lambda _messages: True), 503
    shop.until_in_files(shop.write(20))
    shop.until_held("its sink failed")
    known, lost_from = len(shop.messages()), last
    shop.service.until_read()  # all that is given up is known to be in the log
    assert f"{shop.hook} stands at" in shop.walbrook("discard-all", shop.hook, "--yes")
    endpoint.refuses = None
    until("the gap message", lambda: len(shop.messages()) > known)
    last = shop.write(5)
    shop.until_settled()
    gap, *others = shop.messages()[known:]
    assert (gap["action"], gap["record"]["reason"]) == ("gap", "discarded")
    after = [message["record"]["id"] for message in others]
    assert after[-5:] == list(range(last - 4, last + 1))
    assert not set(after) & set(range(lost_from + 1, last - 4)), "it was given up"
    ((unreported,),) = shop.database.execute(
        "SELECT count(*) FROM walbrook.gaps WHERE reported_at IS NULL"
    )
    assert unreported == 0


def test_a_pause_takes_effect_at_once_and_nothing_is_lost_by_it(now: Running) -> None:
    shop = now.shop("paused")
    shop.until_in_files(shop.write(10))
    shop.until_live()
    took: list[float] = []
    for _ in range(5):
        began = time.monotonic()
        shop.act(f"pause('{shop.hook}')")
        shop.until_paused()
        took.append(time.monotonic() - began)
        shop.act(f"resume('{shop.hook}')")
        shop.until_in_files(shop.write(1))
        shop.until_live()
    print(f"paused after {', '.join(f'{each:.2f}' for each in took)} s")
    assert min(took) < 1.0
    last = shop.write(10)
    shop.until_settled()
    assert shop.at_hook() == list(range(1, last + 1)), "lost, repeated or out of order"


@dataclass(frozen=True)
class Before:
    """What there was when the service was stopped."""

    at_paused_hook: int
    in_new_files: int


@pytest.fixture(scope="module")
def restarted(now: Running) -> Before:
    """The service is started again: with a sink that is paused, and with one that is new."""
    service, paused, new = now.service, now.shops["paused"], now.shops["new"]
    in_files = new.write(30_000)
    paused.write(10)
    service.until_settled()
    at_hook = len(paused.at_hook())
    assert f"{paused.hook} stands at" in paused.walbrook("pause", paused.hook)
    paused.until_paused()
    paused.until_in_files(paused.write(500))
    paused.until_slot_moved()
    assert f"{paused.hook} is paused since" in paused.walbrook("status")
    assert paused.health() == ["worker_paused"]
    assert service.stop() == 0, service.log_tail()

    added = shop_sinks(new.endpoint, "new")[0] | {"start_at": "earliest"}
    # From here on nobody leaves the shared pipeline for being slow: a stop drains that pipeline.
    spark = {"micro_batch_rows": 1000, "patience_ms": 60_000}
    service.configure({"spark": spark}, sinks=[*service.sinks(), added])
    service.start()
    service.until(
        "the new one to catch up by itself",
        f"SELECT state = 'catching_up' AND state_reason LIKE 'it is behind%'"
        f" FROM walbrook.consumers WHERE name = '{new.hook}'",
    )
    return Before(at_hook, in_files)


def test_a_new_sink_can_begin_with_all_that_the_log_has_and_holds_back_no_other(
    now: Running, restarted: Before
) -> None:
    shop = now.shops["new"]
    assert shop.write(100) == restarted.in_new_files + 100
    shop.until_live()
    last = shop.write(100)
    shop.until_settled()
    assert shop.at_hook() == list(range(1, last + 1)), "lost, repeated or out of order"
    shop.until_in_files(last)
    until("nobody to be behind", lambda: shop.database.execute(_BEHIND) == [(0,)])


def test_a_paused_sink_gets_nothing_holds_nothing_back_and_catches_up_when_it_is_resumed(
    now: Running, restarted: Before
) -> None:
    shop = now.shops["paused"]
    last = shop.write(500)
    shop.until_in_files(last)
    shop.until_paused()
    shop.until_slot_moved()
    assert len(shop.at_hook()) == restarted.at_paused_hook, "a paused sink got something"

    with served(shop.database.dsn) as client:
        assert client.post(f"/{shop.hook}/resume").json()["paused_at"] is None
    shop.until_settled()
    assert shop.at_hook() == list(range(1, last + 1)), "lost, repeated or out of order"
    shop.until_healthy()


def test_a_failing_sink_is_seen_everywhere_and_recovers_and_a_stop_drains(now: Running) -> None:
    """The last one: it stops the service."""
    shop = now.shop("seen")
    service, database, endpoint = now.service, shop.database, shop.endpoint
    port = service.http_port()
    database.execute("INSERT INTO seen_item VALUES (1, 'before')")
    service.until_settled()
    until("health to be good", lambda: _health(port) == (200, "ok"))

    endpoint.refuses, endpoint.refusal = (lambda _messages: True), 503
    database.execute("INSERT INTO seen_item VALUES (2, 'refused')")
    service.until(
        "the error in SQL",
        "SELECT last_error LIKE '%503%' FROM walbrook.consumers WHERE name = 'seen_hook'",
    )
    until("health to say so", lambda: _health(port) == (503, "degraded"))
    assert 'walbrook_consumer_failing{consumer="seen_hook",source="shop"} 1.0' in _metrics(port)
    assert "503" in service.run("status").stdout

    endpoint.refuses = None
    service.until_settled()
    assert _health(port) == (200, "ok")
    metrics = _metrics(port)
    assert 'walbrook_consumer_delivered_total{consumer="seen_hook",source="shop"} 2.0' in metrics
    assert 'walbrook_source_streaming{source="shop"} 1.0' in metrics
    bodies = [message["record"] for message in shop.messages()]
    assert bodies == [{"id": 1, "name": "before"}, {"id": 2, "name": "refused"}]
    assert now.redis.xlen(now.stream) == 2

    # What the reader has taken is delivered before the service ends.
    database.execute("INSERT INTO seen_item SELECT i, 'last' FROM generate_series(10, 5009) i")
    service.until_read()
    children = service.tree()
    assert service.stop() == 0, service.log_tail()
    assert now.redis.xlen(now.stream) == 5002
    until("every process to be gone", lambda: not [c for c in children if _alive(c)])
    assert database.execute("SELECT state FROM walbrook.sources") == [("stopped",)]


def _health(port: int) -> tuple[int, str]:
    answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=10)
    return answer.status_code, answer.json()["status"]


def _metrics(port: int) -> str:
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

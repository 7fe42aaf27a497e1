"""More to deliver than can be delivered: who gets how much, who waits, and that all arrives."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cdc.connection import Connection
from spark_pipeline.capacity.slots import Slots
from spark_pipeline.feed import feed
from spark_pipeline.feed.progress import StageProgress
from spark_pipeline.slices.exchange import PlannedRange, widened_by
from spark_pipeline.stage import throttle
from spark_pipeline.stage.throttle import Throttle
from spark_pipeline.stage.worker import Worker
from tests import pgoutput
from tests.checker import SCHEMA, Arrival, Writers, compare
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.log_pipeline import LogPipeline
from tests.waiting import until
from tests.walbrook_service import Service
from tests.wire_messages import transaction

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
PRIORITIES = {"high": 10, "middle": 5, "low": 1}


@pytest.fixture
def endpoints() -> Iterator[dict[str, Endpoint]]:
    """A slow destination for each of the sinks."""
    servers = {name: Endpoint() for name in PRIORITIES}
    for server in servers.values():
        server.start()
    yield servers
    for server in servers.values():
        server.stop()


def hooks(endpoints: dict[str, Endpoint], **more: object) -> dict[str, dict[str, object]]:
    return {
        name: {
            "priority": PRIORITIES[name],
            "partition_count": 1,  # slow: one request after another
            "destination": {"type": "webhook", "url": endpoint.url, **more},
        }
        for name, endpoint in endpoints.items()
    }


def write(pipeline: LogPipeline, number: int) -> None:
    pipeline.write(ITEM, *transaction(0x100 * number, pgoutput.insert(1, [str(number), "n"])))


def test_workers_that_contend_for_one_slot_get_shares_by_priority_and_none_starves(
    state: Connection,
    endpoints: dict[str, Endpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed, "_JOINED_ROWS_MAX", 1)  # each delivery is of one range
    pipeline = LogPipeline(state, tmp_path, **hooks(endpoints))
    pipeline.settings = replace(pipeline.settings, slots=Slots(1))
    pipeline.start_pipeline_again()
    batches, enough = 100, 100
    for number in range(1, batches + 1):
        write(pipeline, number)
    for name, worker in pipeline.workers.items():
        assert pipeline.feed.join(name, pipeline.feed.history, worker.batch)
    for at in range(batches):
        pipeline.body.take_range(PlannedRange(at, at + 1, 1))
    over = threading.Event()

    def served() -> dict[str, int]:
        return {name: len(endpoint.accepted) for name, endpoint in endpoints.items()}

    def serve(worker: Worker) -> None:
        while not over.is_set() and worker.serve_next(0.0):
            if sum(served().values()) >= enough:
                over.set()

    for endpoint in endpoints.values():
        endpoint.takes_s = 0.03  # longer than what lies between two deliveries of a worker
    threads = [threading.Thread(target=serve, args=(each,)) for each in pipeline.workers.values()]
    settler = threading.Thread(target=pipeline.settler.run)
    for thread in (settler, *threads):
        thread.start()
    for thread in threads:
        thread.join(60)
    pipeline.settler.close()
    settler.join(10)
    got = served()
    assert got["high"] >= 0.4 * enough, got
    assert got["middle"] >= 2.5 * got["low"], got
    assert got["low"] >= 0.04 * enough, got
    pipeline.close()


def test_pressure_is_acted_upon_and_seen_in_sql_and_an_idle_source_is_not_written_of(
    state: Connection,
    endpoints: dict[str, Endpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = LogPipeline(state, tmp_path, **hooks(endpoints))
    now = time.monotonic()
    progress = StageProgress()
    settings = replace(pipeline.settings, micro_batch_rows=10)
    acts = Throttle(settings, pipeline.feed, pipeline.workers)
    monkeypatch.setattr(throttle, "_now_s", lambda: now)
    pipeline.take()

    def seconds(count: int) -> None:
        """Let time pass; a worker that has to look at its row does so."""
        nonlocal now
        for _ in range(count):
            now += 1.0
            acts.tick(progress, pipeline.exchange, lambda: state)
            for worker in pipeline.workers.values():
                if worker._nudged.is_set():
                    pipeline.begin(worker)

    def row(columns: str) -> tuple[object, ...]:
        ((*found,),) = state.execute(f"SELECT {columns} FROM walbrook.pressure".encode()).fetchall()
        return tuple(found)

    seconds(1)
    assert row("level, backlog_rows, busy_ratio, widened_by, deferred, slots") == (
        0, 0, 0.0, 1.0, [], 16,
    )  # fmt: skip
    written = row("xmin::text")
    seconds(30)
    assert row("xmin::text") == written, "an idle source was written of"

    for number in range(1, 41):
        write(pipeline, number)
    progress.begin("decode", 1)
    seconds(9)
    assert row("level, backlog_rows, widened_by") == (1, 40, 4.0)
    assert widened_by(str(pipeline.exchange.directory)) == 4.0
    seconds(6)
    assert row("level, deferred") == (2, ["low"])
    assert set(pipeline.feed.readers) == {"high", "middle"}
    assert pipeline.workers["low"].current.status().reason == "deferred: pressure"
    (told,) = acts.conditions()
    assert told.kind == "worker_pressure"
    assert "low waits: its priority is 1" in told.what
    seconds(5)
    assert row("level, deferred") == (2, ["low", "middle"])
    seconds(60)
    assert pipeline.served == set(PRIORITIES), "deferred for more than a minute"

    progress.end()
    pipeline.take()
    seconds(20)
    assert row("level, widened_by, deferred, backlog_rows") == (0, 1.0, [], 0)
    assert acts.conditions() == []
    assert widened_by(str(pipeline.exchange.directory)) == 1.0
    seconds(10)
    written = row("xmin::text")
    seconds(30)
    assert row("xmin::text") == written, "an idle source was written of"
    pipeline.close()


def arrivals(endpoint: Endpoint) -> list[Arrival]:
    found = []
    for message in (m for request in endpoint.accepted for m in request.messages):
        record = message["record"]
        assert isinstance(record, dict)
        if message["action"] != "delete":
            found.append(Arrival(*(record[name] for name in ("key", "n", "payload", "digest"))))
    return found


@pytest.mark.sinks
def test_with_more_work_than_slots_the_lowest_waits_for_a_while_and_nothing_is_lost(
    database: Database, endpoints: dict[str, Endpoint], tmp_path: Path
) -> None:
    database.execute(SCHEMA)
    sinks: list[dict[str, object]] = [
        {"name": name, "source": {"include_tables": ["public.counter"]}, **given}
        for name, given in hooks(endpoints, timeout_ms=60_000).items()
    ]
    service = Service(database, tmp_path / "service", sinks)
    settings = yaml.safe_load(service.config.read_text())
    settings["spark"] |= {"delivery_slots": 1, "micro_batch_rows": 300}
    service.config.write_text(yaml.safe_dump(settings))
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    service.start()
    try:
        service.until_serving()
        live = "SELECT bool_and(state = 'live') FROM walbrook.consumers"
        service.until("all to be in the feed", live)
        for endpoint in endpoints.values():
            endpoint.takes_s = 0.12
        with Writers(database, seed=seed) as writers:
            service.until(
                "enough to do", "SELECT count(*) > 5000 FROM ledger.counter", timeout_s=60
            )
        service.until(
            "the lowest to be deferred",
            "SELECT level = 2 AND 'low' = ANY (deferred) AND widened_by = 4 AND slots = 1"
            "  FROM walbrook.pressure",
        )
        service.until(
            "health to say so",
            "SELECT what LIKE '%low waits: its priority is 1%' FROM walbrook.health"
            " WHERE kind = 'worker_pressure' AND severity = 'warning'",
        )
        status = "SELECT state, state_reason FROM walbrook.consumers WHERE name = 'low'"
        assert database.execute(status) == [("waiting", "deferred: pressure")]
        assert "Pressure on shop: level 2" in service.run("status").stdout
        had = {name: len(arrivals(endpoint)) for name, endpoint in endpoints.items()}
        assert min(had.values()) > 0, "somebody starved"
        has_all = (
            "SELECT (c.cursor_lsn, c.cursor_idx) >= (s.log_lsn, s.log_idx)"
            "  FROM walbrook.consumers c JOIN walbrook.sources s ON s.name = c.source"
            " WHERE c.name = 'high'"
        )
        until(
            "the highest to go on, unless a quick machine has given it everything",
            lambda: (
                len(arrivals(endpoints["high"])) > had["high"] + 300
                or database.execute(has_all) == [(True,)]
            ),
        )
        assert len(arrivals(endpoints["low"])) == had["low"]
        for endpoint in endpoints.values():
            endpoint.takes_s = 0.01
        service.until("all to be together again", live)
        service.until_settled()
        service.until("nobody to wait", "SELECT level < 2 FROM walbrook.pressure")
        service.until("health to be good again", "SELECT count(*) = 0 FROM walbrook.health")
        ledger = writers.ledger()
        for name, endpoint in endpoints.items():
            findings = compare(ledger, arrivals(endpoint))
            assert not findings, (name, findings)
            assert findings.duplicates == 0, name
    finally:
        service.kill()

"""The service on a real standalone cluster: tasks run twice, a machine is lost under load."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pyarrow.parquet as pq
import pytest
import redis
import yaml

from tests.checker import SCHEMA, Arrival, Writers, compare
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.kill.counters import entries_of, lines_of
from tests.standalone import ROOT, StandaloneCluster, free_port
from tests.waiting import until
from tests.walbrook_service import Service

BULK = 25_000
# As eager as it can be: whatever takes longer than half of the others is run a second time.
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StandaloneCluster]:
    running = StandaloneCluster(tmp_path / "cluster")
    yield running
    running.stop()


@pytest.mark.chaos
def test_a_lost_worker_and_tasks_that_run_twice_lose_nothing_and_reorder_nothing(
    cluster: StandaloneCluster,
    database: Database,
    endpoint: Endpoint,
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    database.execute(SCHEMA)
    database.execute("CREATE TABLE bulk (id int PRIMARY KEY, name text)")
    stream, bulk = f"counters-{database.name}", f"bulk-{database.name}"
    counters, in_bulk = ({"include_tables": [f"public.{name}"]} for name in ("counter", "bulk"))
    to_hook = {"type": "webhook", "url": endpoint.url}
    to_redis = {"type": "redis_stream", "url": redis_url}
    sinks: list[dict[str, object]] = [
        {"name": "r", "source": counters, "destination": {**to_redis, "stream_key": stream}},
        {"name": "b", "source": in_bulk, "destination": {**to_redis, "stream_key": bulk}},
        {"name": "w", "source": counters, "destination": to_hook},
        {"name": "f", "source": counters, "destination": {"type": "file", "path": "out"}},
        {
            "name": "p",
            "source": in_bulk,
            "destination": {
                "type": "parquet",
                "columns": "json",
                "max_delay_ms": 0,
                "path": "table",
            },
        },
        {
            "name": "e",
            "source": in_bulk,
            "filter": "record.id % 2 = 0",
            "destination": {**to_redis, "stream_key": f"{bulk}-even"},
        },
        {
            "name": "t",
            "source": in_bulk,
            "ordering": "event_time",
            "event_time": {"column": "commit_timestamp"},
            "destination": {**to_redis, "stream_key": f"{bulk}-timed"},
        },
    ]
    service = Service(database, tmp_path / "service", sinks)
    _on(cluster, service)
    service.start()
    try:
        service.until_serving()
        _until_settled_by_executors(service, cluster, first=1)
        with Writers(database, seed=seed, threads=1) as writers:
            # Large micro-batches are under way when the machine goes.
            _insert(database, first=100_001)
            until("some of it", lambda: redis_client.xlen(bulk) > BULK, 120)
            cluster.kill_worker(0)
            _insert(database, first=200_001)
            service.until_settled()
        service.until_settled()
        assert len(cluster.executors()) == 1
        assert service.stop() == 0, service.log_tail()
    finally:
        service.kill()

    for sink, arrivals in {
        "redis": entries_of(redis_client, stream),
        "file": lines_of(tmp_path / "service" / "out"),
        "webhook": _from_requests(endpoint),
    }.items():
        findings = compare(writers.ledger(), arrivals)
        assert not findings, (sink, seed, findings)
        assert sink == "webhook" or findings.duplicates == 0, (sink, seed, findings.duplicates)
        assert findings.written > 100
    assert redis_client.xlen(bulk) == 3 * BULK
    assert redis_client.xlen(f"{bulk}-even") == 3 * BULK // 2
    assert redis_client.xlen(f"{bulk}-timed") == 3 * BULK
    in_table = pq.read_table(tmp_path / "service" / "table", columns=["record_pks"])
    assert in_table.num_rows == len(set(in_table.column(0).to_pylist())) == 3 * BULK
    counted = "SELECT delivered + absorbed FROM walbrook.consumers WHERE name = 'b'"
    assert database.execute(counted) == [(3 * BULK,)], "settled twice, or not at all"


def _on(cluster: StandaloneCluster, service: Service) -> None:
    """Let the service run on the cluster, in micro-batches that need it."""
    config = yaml.safe_load(service.config.read_text())
    config["log"]["flight"] = {"port": free_port()}
    config["spark"] |= {
        "master": cluster.url,
        "patience_ms": 60_000,
        "executor_memory": "512m",
        "conf": {"spark.executorEnv.PYTHONPATH": str(ROOT), **SPECULATION},
    }
    service.config.write_text(yaml.safe_dump(config, sort_keys=False))


def _insert(database: Database, first: int) -> None:
    database.execute(
        f"INSERT INTO bulk SELECT i, 'n' FROM generate_series({first}, {first + BULK - 1}) i"
    )


def _until_settled_by_executors(service: Service, cluster: StandaloneCluster, first: int) -> None:
    """The cluster must have done some of the work, over the network, before any of it is lost."""
    until("both executors", lambda: len(cluster.executors()) == 2, 120)
    _insert(service.database, first)
    service.until_settled()
    pythons = [child.name() for one in cluster.executors() for child in one.children(True)]
    assert any("python" in name for name in pythons), "no executor has run any Python"
    config = yaml.safe_load(service.config.read_text())
    assert _called(config["log"]["flight"]["port"]), "nobody has read the log from its server"


def _called(port: int) -> bool:
    """Whether somebody is or was connected to a port of ours in the last minute."""
    calls = [one for one in psutil.net_connections("tcp") if one.status != psutil.CONN_LISTEN]
    return any(port in (one.laddr.port, one.raddr.port) for one in calls if one.raddr)


def _from_requests(endpoint: Endpoint) -> list[Arrival]:
    messages = [message for request in endpoint.accepted for message in request.messages]
    return [
        Arrival.of(cast("dict[str, object]", message["record"]))
        for message in messages
        if message["action"] != "delete"
    ]

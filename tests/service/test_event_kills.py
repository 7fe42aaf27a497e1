"""Kills of every process of the service while changes are held back in event-time order."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.fix_postgres import Database
from tests.log_pipeline import arrived
from tests.waiting import until
from tests.walbrook_service import Service, running

TIMED: dict[str, object] = {
    "name": "timed",
    "destination": {"type": "file", "path": "out"},
    "ordering": "event_time",
    "event_time": {
        "column": "at",
        "late_tolerance": "2s",
        "idle_timeout": "10m",
        "late_policy": "drop",
    },
}
VICTIMS = {
    "the JVM": "org.apache.spark.deploy.SparkSubmit",
    "the driver": "-m spark_pipeline",
    "a Python worker": "daemon pyspark",
    "the reader": "-m cdc.replication",
}
"""What each process is known by; the supervisor, which is none of them, dies last."""


def write(database: Database, stop: threading.Event, written: list[int]) -> None:
    """Rows whose times are out of order by up to a second: none is late."""
    rng = random.Random(1)
    with database.connect() as connection:
        while not stop.wait(0.005):
            connection.execute(
                "INSERT INTO event VALUES (%s, clock_timestamp() - make_interval(secs => %s))",
                (len(written), rng.random()),
            )
            written.append(len(written))


def kill(service: Service, mark: str) -> bool:
    """Kill the first process with this mark; returns whether there was one."""
    for process in service.tree():
        with suppress(psutil.NoSuchProcess):
            if mark in " ".join(process.cmdline()):
                process.kill()
                return True
    return False


@pytest.mark.chaos
def test_rows_on_time_are_delivered_once_and_in_order_whatever_process_dies(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE event (id bigint PRIMARY KEY, at timestamptz NOT NULL)")
    out = tmp_path / "service" / "out"
    stop, written = threading.Event(), list[int]()
    writer = threading.Thread(target=write, args=(database, stop, written))
    plain: dict[str, object] = {"name": "plain", "destination": {"type": "file", "path": "plain"}}
    with running(database, tmp_path / "service", [TIMED, plain]) as service:
        writer.start()
        try:
            until_more(out, 200)
            for who, mark in VICTIMS.items():
                until(who, partial(kill, service, mark), 60)
                until_more(out, 500)
            orphans = service.orphan()
            service.start()
            until_more(out, 500)
        finally:
            stop.set()
            writer.join()
        service.until_settled(besides="timed")
        assert service.stop() == 0, service.log_tail()
        assert not psutil.wait_procs(orphans, 60)[1]
    messages = arrived(out)
    ids = [message["record"]["id"] for message in messages]
    missing = sorted(set(written) - set(ids))
    assert not missing, f"{len(missing)} of {len(written)} rows that were on time are lost"
    assert len(ids) == len(written), "a row came twice"
    times = [message["metadata"]["event_time"] for message in messages]
    assert times == sorted(times)


def until_more(out: Path, count: int) -> None:
    """Until so many messages more than now have arrived."""
    target = len(arrived(out)) + count
    until(f"{target} messages", lambda: len(arrived(out)) >= target, 120)

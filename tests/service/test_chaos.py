"""Processes of the service are killed while workers are in every state; every promise is kept.

``WALBROOK_TEST_SEED`` repeats the choices of an earlier run, ``WALBROOK_TEST_KILLS`` says how many
processes are killed.
"""

from __future__ import annotations

import os
import random
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import redis

from tests.fix_postgres import Database
from tests.kill.states import States
from tests.log_pipeline import arrived
from tests.waiting import until
from tests.walbrook_service import Service, running

KILLS = int(os.environ.get("WALBROOK_TEST_KILLS", "8"))
VICTIMS = {
    "reader": "-m cdc.replication",
    "driver": "-m spark_pipeline",
    "JVM": "org.apache.spark.deploy.SparkSubmit",
    "Python worker": "daemon pyspark",
    "supervisor": "-m cdc.service.cli.entry run",
}
"""What each process is known by."""


def seed_of_run() -> int:
    seed = int(os.environ.get("WALBROOK_TEST_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"seed {seed}")
    return seed


def kill(service: Service, victim: str) -> None:
    """Kill one process; a supervisor is started again once those that outlived it have ended."""
    if victim == "supervisor":
        orphans = service.orphan()
        service.start()
        assert not psutil.wait_procs(orphans, 60)[1]
        return
    until(f"the {victim} to be killed", lambda: _killed(service, VICTIMS[victim]), 60)


def _killed(service: Service, mark: str) -> bool:
    for process in service.tree():
        with suppress(psutil.NoSuchProcess):
            if mark in " ".join(process.cmdline()):
                process.kill()
                return True
    return False


def run(states: States, database: Database, directory: Path, victims: list[str]) -> None:
    """Kill the victims one after another, each with workers in every state; then drain and stop."""
    with ExitStack() as opened:
        opened.enter_context(states.destinations())
        service = opened.enter_context(running(database, directory, states.sinks()))
        opened.enter_context(states.claimers())
        with states.writers:
            for victim in victims:
                print(f"{states.until_all_states(service)}; killed: {victim}")
                kill(service, victim)
        states.heal()
        states.until_drained(service)
        assert service.stop() == 0, service.log_tail()
        states.check()


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_workers_in_every_state_lose_repeat_and_reorder_nothing_through_kills(
    database: Database, redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    seed = seed_of_run()
    rng = random.Random(seed)
    victims: list[str] = []
    while len(victims) < KILLS:
        victims += rng.sample(list(VICTIMS), len(VICTIMS))
    states = States(database, redis_client, redis_url, tmp_path, seed)
    run(states, database, tmp_path / "service", victims[:KILLS])


@pytest.mark.chaos
def test_a_jvm_that_hangs_is_ended_and_a_new_driver_serves(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    files: dict[str, object] = {"name": "all", "destination": {"type": "file", "path": "all"}}
    settings = {"spark": {"deadline_s": 2}}
    with running(database, tmp_path / "service", [files], settings) as service:
        database.execute("INSERT INTO item VALUES (1)")
        service.until_settled()
        service.until("Spark", "SELECT bool_and(state = 'live') FROM walbrook.consumers")
        (jvm,) = [each for each in service.tree() if VICTIMS["JVM"] in " ".join(each.cmdline())]
        jvm.suspend()
        told = "SELECT count(*) = 1 FROM walbrook.health WHERE kind = 'feed_silent'"
        service.until("the health event", told)
        assert not psutil.wait_procs([jvm], 120)[1], "it hangs"
        database.execute("INSERT INTO item VALUES (2)")
        service.until_settled()
        service.until("health", "SELECT count(*) = 0 FROM walbrook.health")
        assert service.stop() == 0, service.log_tail()
    arrivals = [message["record"]["id"] for message in arrived(tmp_path / "service" / "all")]
    assert arrivals == [1, 2]

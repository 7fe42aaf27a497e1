"""After kills, refusals, dead letters and redeliveries a trace still says what happened."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import redis

from cdc.state import operators
from cdc.trace.conclusion import Conclusion
from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.kill.faults import Faults
from tests.kill.traces import check_traces
from tests.proxy import Proxy
from tests.walbrook_service import running

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

VICTIMS = ["whole service", "spark_pipeline", "cdc.replication", "spark_pipeline"] * 2


def refusing_some(messages: list[dict[str, Any]]) -> Scripted:
    """One message in forty is refused, however often it is sent."""
    keys = [str(message["metadata"]["idempotency_key"]) for message in messages]
    return Scripted(422 if any(crc32(key.encode()) % 40 == 0 for key in keys) else 200)


def test_the_trace_finds_each_of_a_thousand_changes_and_tells_the_truth_about_it(
    database: Database, redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    address, _, number = redis_url.removeprefix("redis://").partition("/")
    host, _, port = address.partition(":")
    with (
        Proxy(f"host={host} port={port}") as wire,
        Endpoint.running() as bad,
        Endpoint.running() as well,
    ):
        faults = Faults(database, redis_client, wire, bad, well, seed=seed, redis_number=number)
        sinks = faults.sinks()
        sinks[0]["max_deliveries"] = 3  # some messages become dead letters
        with running(database, tmp_path / "service", sinks) as service:
            faults.warm_up()
            with faults.writers:
                for victim in VICTIMS:
                    faults.until_more(150)
                    whole = victim == "whole service"
                    print(f"killed {victim}: {service.kill(None if whole else victim)}")
                    if whole:
                        service.start()
            bad.faults = refusing_some
            service.until_settled(timeout_s=300)
            service.until("empty queues", "SELECT count(*) = 0 FROM walbrook.events", 300)
            with database.connect() as state:
                letters = [int(str(row["id"])) for row in operators.dead_letters(state, "bad")]
                print(f"{len(letters)} dead letters")
                assert len(letters) >= 10
                bad.faults = None
                operators.discard(state, "bad", letters[0])
                for letter in letters[len(letters) // 2 :]:
                    operators.redeliver(state, "bad", letter)
            service.until("empty queues", "SELECT count(*) = 0 FROM walbrook.events", 300)
            assert service.stop() == 0, service.log_tail()
        with database.connect() as state:
            ends = {"bad": bad, "well": well}
            conclusions = check_traces(service.config, state, ends, count=1000, seed=seed)
    print(dict(conclusions))
    assert conclusions[Conclusion.DELIVERED] >= 1900
    assert conclusions[Conclusion.DEAD] >= 1

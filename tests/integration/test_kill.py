"""The service is killed at random moments under load, again and again; nothing is lost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import cast

import orjson
import pytest
import redis

from tests.checker import SCHEMA, Arrival, Writers, compare
from tests.fix_postgres import Database
from tests.service import running
from tests.waiting import until

KILLS = ["whole service", "spark_pipeline"]  # readers are killed by test_reader_crash
MANY_KILLS = ["whole service", "cdc.replication", "spark_pipeline", "whole service"] * 3


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [KILLS, pytest.param(MANY_KILLS, marks=pytest.mark.chaos)])
def test_every_committed_change_arrives_in_order_and_once_through_kills(
    database: Database,
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
    kills: list[str],
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    print(f"seed {seed}")
    database.execute(SCHEMA)
    stream = f"kill-{database.name}"
    sinks: list[dict[str, object]] = [
        {
            "name": "r",
            "destination": {"type": "redis_stream", "url": redis_url, "stream_key": stream},
        },
        {"name": "f", "destination": {"type": "file", "path": "out"}},
    ]
    with running(database, tmp_path / "service", sinks) as service:
        with Writers(database, seed=seed) as writers:
            for victim in kills:
                # A random moment of the work, not of the wait for it.
                target = _length(redis_client, stream) + rng.randrange(1, 400)
                _until_length(redis_client, stream, target)
                killed = service.kill(None if victim == "whole service" else victim)
                print(f"killed {victim}: {killed}")
                assert killed
                if victim == "whole service":
                    service.start()
        service.until_settled()
        assert service.stop() == 0, service.log_tail()

    for sink, arrivals in {
        "redis": _from_redis(redis_client, stream),
        "file": _from_files(tmp_path / "service" / "out"),
    }.items():
        findings = compare(writers.ledger(), arrivals)
        assert not findings, (sink, seed, findings)
        assert findings.duplicates == 0, (sink, seed, findings.duplicates)
        assert findings.written > 100


def _length(client: redis.Redis, stream: str) -> int:
    return int(str(client.xlen(stream)))


def _until_length(client: redis.Redis, stream: str, length: int) -> None:
    until(f"{length} entries", lambda: _length(client, stream) >= length, 120)


def _arrival(record: dict[str, object]) -> Arrival:
    return Arrival(
        int(str(record["key"])),
        int(str(record["n"])),
        str(record["payload"]),
        str(record["digest"]),
    )


def _from_redis(client: redis.Redis, stream: str) -> list[Arrival]:
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(stream))
    return [
        _arrival(orjson.loads(fields[b"record"]))
        for _, fields in entries
        if fields[b"action"] != b"delete"
    ]


def _from_files(directory: Path) -> list[Arrival]:
    files = sorted(directory.glob("*.jsonl"))
    messages = [orjson.loads(line) for file in files for line in file.read_bytes().splitlines()]
    return [_arrival(m["record"]) for m in messages if m["action"] != "delete"]

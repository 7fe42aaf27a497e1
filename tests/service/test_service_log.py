"""What the service writes to its log, whatever Spark, its JVM and its Python workers say."""

from __future__ import annotations

import re
from pathlib import Path

import orjson
import pytest
import redis
import yaml

from tests.fix_postgres import Database
from tests.waiting import until
from tests.walbrook_service import Service

LINE_MAX = 2_000
FORM = re.compile(r"[\d-]+T[\d:.]+Z \[(debug|info|warning|error) *\] [a-z_]+\.[a-z_]+( .*)?")
MANY = 60_000


@pytest.mark.sinks
@pytest.mark.parametrize("log_format", ["json", pytest.param("console", marks=pytest.mark.chaos)])
def test_a_whole_run_with_lost_workers_and_a_stop_in_mid_batch_is_lines_of_one_form(
    database: Database, redis_client: redis.Redis, redis_url: str, tmp_path: Path, log_format: str
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    stream = f"log-{database.name}"
    to_redis = {"type": "redis_stream", "url": redis_url, "stream_key": stream}
    service = Service(database, tmp_path, [{"name": "r", "destination": to_redis}])
    config = yaml.safe_load(service.config.read_text())
    config["service"] |= {"log_format": log_format, "drain_timeout_s": 0}
    service.config.write_text(yaml.safe_dump(config))
    service.start()
    try:
        service.until_serving()
        _insert(database, 1)
        service.until_settled()
        _insert(database, 1 + MANY)
        until("a Python worker to kill", lambda: service.kill("daemon pyspark"))
        service.until_settled()
        if log_format == "json":
            assert service.kill("java")
        _insert(database, 1 + 2 * MANY)
        until("half of it", lambda: int(str(redis_client.xlen(stream))) > 2 * MANY, 120)
        assert service.stop() == 0, service.log_tail()
    finally:
        service.kill()

    lines = service.log.read_text().splitlines()
    assert len(lines) > 10
    for line in lines:
        assert len(line) < LINE_MAX, line
        assert "Traceback" not in line
        if log_format == "console":
            assert FORM.fullmatch(line), line
        else:
            event = orjson.loads(line)
            assert {"event", "level", "timestamp"} <= set(event), line
            assert "\n" not in "".join(map(str, event.values())), line
    said = "\n".join(lines)
    assert "spark." in said, "a killed worker must not go unsaid"
    assert "NativeCodeLoader" not in said


def _insert(database: Database, first: int) -> None:
    database.execute(
        f"INSERT INTO item SELECT i, 'n' FROM generate_series({first}, {first + MANY - 1}) i"
    )

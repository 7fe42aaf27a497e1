"""``walbrook config check --connect`` tries everything, changes nothing and says what is wrong."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import redis
import yaml
from psycopg.conninfo import conninfo_to_dict
from typer.testing import CliRunner

from cdc.service.cli import app
from cdc.state.migrate import migrate
from sinks.file import FileSink
from tests.conformance.messages import batch
from tests.fix_http import Endpoint
from tests.fix_postgres import Database

STATE = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
PUBLICATIONS = "SELECT count(*) FROM pg_publication"
SCHEMA = "SELECT to_regnamespace('walbrook') IS NOT NULL"


def check(
    tmp_path: Path, database: Database, sinks: dict[str, dict[str, Any]], *more: str
) -> tuple[int, dict[str, str]]:
    """The exit code, and what was said of each place."""
    place = conninfo_to_dict(database.dsn)
    source = {
        "name": "shop",
        "hostname": place["host"],
        "port": int(str(place["port"])),
        "database": place["dbname"],
        "username": place["user"],
        "password": place.get("password", ""),
        "slot": {"name": "walbrook", "create_if_not_exists": True},
        "publication": {"name": "walbrook", "create_if_not_exists": True},
    }
    config = tmp_path / "walbrook.yaml"
    listed = [{"name": name, "destination": given} for name, given in sinks.items()]
    config.write_text(yaml.safe_dump({"databases": [source], "sinks": listed}))
    result = CliRunner().invoke(app, ["config", "check", "--connect", "-c", str(config), *more])
    assert "Traceback" not in result.output, result.output
    said: dict[str, str] = {}
    name = ""
    for line in result.output.splitlines()[1:]:
        if line.startswith(("database ", "state database", "sink")):
            name, line = line.split(": ", 1)
        said[name] = said.get(name, "") + line
    return result.exit_code, said


def test_all_that_answers_is_ready_and_nothing_was_changed(
    tmp_path: Path,
    database: Database,
    endpoint: Endpoint,
    redis_url: str,
    redis_client: redis.Redis,
) -> None:
    code, said = check(
        tmp_path,
        database,
        {
            "lines": {"type": "file", "path": str(tmp_path / "new" / "lines")},
            "lake": {"type": "parquet", "path": str(tmp_path / "lake")},
            "stream": {"type": "redis_stream", "url": redis_url},
            "hook": {"type": "webhook", "url": endpoint.url},
            "queue": {"type": "pull"},
        },
    )
    assert code == 0, said
    assert said["database shop"] == "ready"
    assert "made by the first start" in said["state database"]
    assert "may be created in" in said["sink lines (file)"]
    assert "is not there yet" in said["sink stream (redis_stream)"]
    assert "nothing was sent" in said["sink hook (webhook)"]
    assert "made by the first start" in said["sink queue (pull)"]
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "lake").exists()
    assert redis_client.dbsize() == 0
    assert endpoint.requests == []
    assert database.execute(STATE) == [(0,)]
    assert database.execute(PUBLICATIONS) == [(0,)]
    assert database.execute(SCHEMA) == [(False,)]


def test_what_is_wrong_is_said_of_each_place_with_the_fix(
    tmp_path: Path, database: Database, redis_url: str, redis_client: redis.Redis
) -> None:
    with socket.socket() as closed, database.connect() as state:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        port = closed.getsockname()[1]
        migrate(state)
        redis_client.set("walbrook.taken", "a text")
        (tmp_path / "a file").write_text("")
        other = FileSink(tmp_path / "others", consumer="somebody", rotate_bytes=1000)
        assert other.deliver(batch(0, 3)).settled == 3
        secret = "a-secret-that-nobody-may-read"
        code, said = check(
            tmp_path,
            database,
            {
                "taken": {"type": "redis_stream", "url": redis_url},
                "denied": {
                    "type": "redis_stream",
                    "url": redis_url.replace("redis://", f"redis://nobody:{secret}@"),
                },
                "gone": {"type": "redis_stream", "host": "127.0.0.1", "port": port},
                "hook": {"type": "webhook", "url": f"http://127.0.0.1:{port}/changes?key={secret}"},
                "lines": {"type": "file", "path": str(tmp_path / "a file" / "lines")},
                "others": {"type": "file", "path": str(tmp_path / "others")},
                "queue": {"type": "pull"},
            },
        )
    assert code == 1
    assert said["state database"] == "connected; the schema walbrook is there"
    assert "may write to walbrook.records" in said["sink queue (pull)"]
    for place, fix in {
        "sink taken (redis_stream)": "choose another stream_key",
        "sink denied (redis_stream)": "correct the username and password",
        "sink gone (redis_stream)": "check that the server is up",
        "sink hook (webhook)": "check that the endpoint is up",
        "sink lines (file)": "give the service a directory",
        "sink others (file)": "give every consumer a directory of its own",
    }.items():
        assert said[place].startswith("WRONG: "), said[place]
        assert fix in said[place], said[place]
    assert secret not in str(said)


def test_destinations_that_hang_are_tried_at_once_and_given_up(
    tmp_path: Path, database: Database
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # connections are accepted by the kernel, and nobody answers
        port = silent.getsockname()[1]
        hanging = {
            "type": "redis_stream", "host": "127.0.0.1", "port": port, "timeout_ms": 600_000,
        }  # fmt: skip
        began = time.monotonic()
        code, said = check(
            tmp_path, database, {f"sink-{n}": hanging | {"stream_key": f"s{n}"} for n in range(20)},
            "--deadline-s", "2",
        )  # fmt: skip
        took_s = time.monotonic() - began
    assert code == 1
    assert said["database shop"] == "ready"
    for n in range(20):
        assert "no answer within 2 s" in said[f"sink sink-{n} (redis_stream)"]
    assert took_s < 25, "twenty deadlines one after another would be forty seconds"


def test_databases_that_do_not_answer_are_named(tmp_path: Path, database: Database) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        away = Database(database.name, f"host=127.0.0.1 port={port} dbname=x user=x password=x")
        code, said = check(tmp_path, away, {"lines": {"type": "file", "path": str(tmp_path / "l")}})
    assert code == 1
    for place in ("database shop", "state database"):
        assert said[place].startswith("WRONG: ")
        assert "check that it runs" in said[place]
    assert not said["sink lines (file)"].startswith("WRONG: ")

"""``walbrook config check --connect`` tries everything, changes nothing and says what is wrong."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
import yaml
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from typer.testing import CliRunner

from cdc.service.cli.entry import app
from cdc.state.migrate import migrate
from cdc.state.positions import register_source
from sinks.file import FileSink
from tests.conformance.messages import batch
from tests.fix_http import Endpoint
from tests.fix_postgres import Database, PostgresServer

STATE = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
PUBLICATIONS = "SELECT count(*) FROM pg_publication"
SCHEMA = "SELECT to_regnamespace('walbrook') IS NOT NULL"


def check(
    tmp_path: Path,
    database: Database,
    sinks: dict[str, dict[str, Any]],
    *more: str,
    source_keys: dict[str, Any] | None = None,
    sink_keys: dict[str, Any] | None = None,
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
        **(source_keys or {}),
    }
    config = tmp_path / "walbrook.yaml"
    listed = [
        {"name": name, "destination": given, **(sink_keys or {})} for name, given in sinks.items()
    ]
    config.write_text(yaml.safe_dump({"databases": [source], "sinks": listed}))
    given = ["config", "check", "--connect", "-c", str(config), "--deadline-s", "60", *more]
    result = CliRunner().invoke(app, given)
    assert "Traceback" not in result.output, result.output
    said: dict[str, str] = {}
    name = ""
    for line in result.output.splitlines()[1:]:
        if line.startswith(("database ", "state database", "log directory", "HTTP port", "sink")):
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
            "lake": {
                "type": "parquet",
                "columns": "json",
                "max_delay_ms": 0,
                "path": str(tmp_path / "lake"),
            },
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


def test_problems_are_reported_of_each_place_with_the_fix(
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
    assert "may write to walbrook.pull_messages" in said["sink queue (pull)"]
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
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.service.checks.connections._GRACE_S", 60.0)  # for a busy machine
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
            "--deadline-s", "5",
        )  # fmt: skip
        took_s = time.monotonic() - began
    assert code == 1
    assert said["database shop"] == "ready"
    for n in range(20):
        assert "no answer within 5 s" in said[f"sink sink-{n} (redis_stream)"]
    assert took_s < 80, "twenty deadlines one after another would be a hundred seconds"


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


@pytest.fixture
def reader(database: Database, postgres_server: PostgresServer) -> Iterator[Database]:
    """The database as a role sees it that may replicate, connect, and own a schema."""
    role = f"reader_{secrets.token_hex(6)}"
    with psycopg.connect(postgres_server.dsn, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'plain'".encode())
        database.execute(f"GRANT CREATE ON DATABASE {database.name} TO {role}")
        yield replace(database, dsn=make_conninfo(database.dsn, user=role, password="plain"))
        database.execute(f"DROP OWNED BY {role}")
        admin.execute(f"DROP ROLE {role}".encode())


def lines_in(tmp_path: Path) -> dict[str, dict[str, Any]]:
    return {"lines": {"type": "file", "path": str(tmp_path / "lines")}}


def test_a_role_that_may_not_create_the_publication_is_reported_as_the_start_would(
    tmp_path: Path, database: Database, reader: Database
) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    code, said = check(tmp_path, reader, lines_in(tmp_path))
    assert code == 1
    assert "lets only a superuser create one FOR TABLES IN SCHEMA" in said["database shop"]

    listed = {
        "publication": {
            "name": "walbrook",
            "create_if_not_exists": True,
            "tables": ["public.orders"],
        }
    }
    code, said = check(tmp_path, reader, lines_in(tmp_path), source_keys=listed)
    assert code == 1
    assert "must be owner of table orders" in said["database shop"]

    code, said = check(tmp_path, database, lines_in(tmp_path), source_keys=listed)
    assert (code, said["database shop"]) == (0, "ready")
    assert database.execute(PUBLICATIONS) == [(0,)]


def test_the_sql_of_a_publication_is_not_run_and_that_is_said(
    tmp_path: Path, database: Database
) -> None:
    own = {
        "name": "walbrook",
        "create_if_not_exists": True,
        "init_sql": "CREATE TABLE made (); COMMIT",
    }
    code, said = check(tmp_path, database, lines_in(tmp_path), source_keys={"publication": own})
    assert code == 0
    assert "init_sql was not tried" in said["database shop"]
    assert database.execute("SELECT to_regclass('made') IS NULL") == [(True,)]


def served_through(database: Database, slot: str) -> None:
    """The state as a service leaves it that read the source through ``slot``."""
    with database.connect() as state:
        migrate(state)
        register_source(
            state, name="shop", slot=slot, publication="walbrook", system_identifier="1",
            slot_lsn=100, consumers=["lines"],
        )  # fmt: skip


def test_a_source_whose_slot_has_gone_is_not_ready(tmp_path: Path, database: Database) -> None:
    served_through(database, "walbrook")
    code, said = check(tmp_path, database, lines_in(tmp_path))
    assert code == 1
    assert "replication slot walbrook of source shop no longer exists" in said["database shop"]
    assert "walbrook repair shop" in said["database shop"]


def test_a_slot_that_was_renamed_in_the_configuration_is_named(
    tmp_path: Path, database: Database
) -> None:
    slot = f"before_{secrets.token_hex(6)}"
    served_through(database, slot)
    database.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    code, said = check(tmp_path, database, lines_in(tmp_path))
    database.execute(f"SELECT pg_drop_replication_slot('{slot}')")
    assert code == 1
    assert f"read through another slot so far, {slot}" in said["database shop"]
    assert f"write slot: {{name: {slot}}}" in said["database shop"]


def test_tables_of_a_backfill_that_the_role_may_not_read_are_said_with_the_grant(
    tmp_path: Path, database: Database, reader: Database
) -> None:
    database.execute(
        "CREATE SCHEMA depot; CREATE TABLE depot.item (id int PRIMARY KEY);"
        "CREATE TABLE orders (id int PRIMARY KEY); CREATE TABLE other (id int PRIMARY KEY);"
        "CREATE PUBLICATION walbrook FOR ALL TABLES"
    )
    backfilled = {"initial_backfill": ["public.orders", "depot.item"]}
    code, said = check(tmp_path, reader, lines_in(tmp_path), sink_keys=backfilled)
    assert code == 0, said
    told = said["database shop"]
    assert "may not read what initial_backfill asks for: depot.item, public.orders" in told
    grants = told.partition("public.orders: ")[2]
    assert grants.startswith("GRANT USAGE")
    database.execute(grants)
    code, said = check(tmp_path, reader, lines_in(tmp_path), sink_keys=backfilled)
    assert (code, said["database shop"]) == (0, "ready")


def test_a_problem_in_the_file_hides_no_other_and_no_place(
    tmp_path: Path, database: Database
) -> None:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY); CREATE PUBLICATION walbrook FOR TABLE orders"
    )
    place = conninfo_to_dict(database.dsn)
    database_keys = {
        "name": "shop", "hostname": place["host"], "port": int(str(place["port"])),
        "database": place["dbname"], "username": place["user"],
        "password": place.get("password", ""), "slot": {"name": "walbrook"},
        "publication": {"name": "walbrook"},
    }  # fmt: skip
    grouped = {"tables": [{"name": "public.orders", "group_column_names": ["idd"]}]}
    timed = {"ordering": "event_time", "event_time": {"column": "at"}}
    sinks = [
        {
            "name": "one",
            "destination": {"type": "webhook", "url": "http://127.0.0.1:1/"},
            **grouped,
        },
        {
            "name": "two",
            "destination": {"type": "webhook", "url": "http://127.0.0.1:1/"},
            **grouped,
        },
        {"name": "three", "destination": {"type": "file", "path": "lines"}, **timed},
    ]
    config = tmp_path / "walbrook.yaml"
    config.write_text(yaml.safe_dump({"databases": [database_keys], "sinks": sinks}))
    result = CliRunner().invoke(app, ["config", "check", "--connect", "-c", str(config)])
    assert result.exit_code == 1
    problems = str(result.exception)
    for said in ("sinks[0].tables[0]", "sinks[1].tables[0]", "shows no column at"):
        assert said in problems
    assert "correct" not in result.output
    assert "database shop: WRONG: database shop is not ready" in result.output
    assert "sink one (webhook): WRONG" in result.output

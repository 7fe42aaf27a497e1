"""``walbrook doctor`` and ``walbrook init`` look at real databases."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest
import yaml
from typer.testing import CliRunner

from cdc.errors import OperatorError
from cdc.service.cli.entry import app
from tests.fix_postgres import Database
from tests.walbrook_service import _url


def doctor(config: Path, code: int) -> list[dict[str, str]]:
    result = CliRunner().invoke(app, ["doctor", "--json", "-c", str(config)])
    assert result.exit_code == code, result.output
    found: list[dict[str, str]] = json.loads(result.output)["data"]
    return found


@pytest.fixture
def config(database: Database, tmp_path: Path) -> Path:
    path = tmp_path / "walbrook.yaml"
    source = {
        "name": "shop",
        "url": _url(database.dsn),
        "slot": {"name": f"s_{database.name}"[:60]},
        "publication": {"name": "pub"},
    }
    path.write_text(yaml.safe_dump({"databases": [source], "sinks": []}))
    return path


def test_what_is_missing_is_a_problem_with_the_statement_that_helps(
    database: Database, config: Path
) -> None:
    found = doctor(config, 1)
    assert [each["what"] for each in found if each["severity"] == "problem"] == [
        f"The slot s_{database.name} does not exist",
        "The publication pub does not exist",
    ]
    for each in found:
        if each["severity"] == "problem":
            database.execute(each["fix"])
    try:
        assert not [each for each in doctor(config, 0) if each["severity"] == "problem"]
    finally:
        database.execute(f"SELECT pg_drop_replication_slot('s_{database.name}') IS NULL")


def test_large_values_under_the_default_identity_are_a_warning(
    database: Database, config: Path
) -> None:
    database.execute("CREATE TABLE note (id int PRIMARY KEY, body text, size int)")
    database.execute("ALTER TABLE note ALTER body SET STORAGE EXTERNAL")
    database.execute("INSERT INTO note VALUES (1, repeat('x', 20000), 1)")
    database.execute("CREATE PUBLICATION pub FOR TABLE note")
    (large,) = [each for each in doctor(config, 1) if "large values" in each["what"]]
    assert "(body)" in large["what"]
    database.execute(large["fix"].partition(" --")[0])
    assert not [each for each in doctor(config, 1) if "large values" in each["what"]]


def test_an_open_transaction_and_an_unbounded_slot_are_warnings(
    database: Database, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.service.checks.doctor._OPEN_S", 0)
    database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    with database.connect() as holder, holder.transaction():
        holder.execute("INSERT INTO item VALUES (1)")
        found = doctor(config, 1)
        pid = holder.info.backend_pid
    (held,) = [each for each in found if f"(pid {pid})" in each["what"]]
    assert held["fix"] == f"SELECT pg_terminate_backend({pid});"
    assert any("max_slot_wal_keep_size is -1" in each["what"] for each in found)


def test_a_source_that_does_not_answer_is_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "walbrook.yaml"
    path.write_text(
        "databases: [{name: a, hostname: 127.0.0.1, port: 1, database: d, slot: {name: s},"
        " publication: {name: p}}]\n"
    )
    (found,) = doctor(path, 1)
    assert "database a cannot be reached" in found["what"]


def test_init_writes_a_configuration_and_sql_that_work(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY); CREATE TABLE loose (id int)")
    role = f"walbrook_{database.name}"[:60]
    target = tmp_path / "new.yaml"
    given = ["init", "--url", _url(database.dsn), "--role", role, "-t", "orders", "-o", str(target)]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    written = yaml.safe_load(target.read_text())
    assert written["sinks"][0]["source"] == {"include_tables": ["public.orders"]}
    assert "password" not in written["databases"][0]
    script = target.with_suffix(".sql").read_text()
    assert "CREATE ROLE" in script
    try:
        with psycopg.connect(database.dsn, autocommit=True) as owner:
            owner.execute(script.encode())
        database.execute(f"ALTER ROLE \"{role}\" PASSWORD 'of-the-test'")
        monkeypatch.setenv("PGPASSWORD", "of-the-test")
        checked = CliRunner().invoke(app, ["config", "check", "--connect", "-c", str(target)])
        assert checked.exit_code == 0, checked.output
        assert f"database {database.name}: ready" in checked.output
    finally:
        database.execute(f'DROP PUBLICATION walbrook_pub; DROP OWNED BY "{role}"')
        database.execute(f'DROP ROLE "{role}"')
    again = CliRunner().invoke(app, given)
    assert isinstance(again.exception, OperatorError)
    assert "not overwritten" in again.exception.what


def test_init_names_tables_that_need_a_replica_identity(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE loose (id int)")
    given = ["init", "--url", _url(database.dsn), "-o", str(tmp_path / "w.yaml"), "--sink", "pull"]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert "updates and deletes of public.loose will be refused" in result.output
    assert "TABLES IN SCHEMA" in (tmp_path / "w.sql").read_text()
    for wrong, says in ((["-t", "nothing"], "no table"), (["--sink", "sqs"], "no type")):
        other = ["init", "--url", _url(database.dsn), *wrong, "-o", str(tmp_path / "x.yaml")]
        refused = CliRunner().invoke(app, other).exception
        assert isinstance(refused, OperatorError)
        assert says in refused.what
        assert not (tmp_path / "x.yaml").exists()

"""Expressions that do not fit their tables are told before anything is delivered."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.fix_postgres import Database
from tests.service import Service

TABLES = """
CREATE TABLE orders (id int PRIMARY KEY, amount numeric(10, 2));
CREATE TABLE users (id int PRIMARY KEY, name text);
CREATE PUBLICATION pub FOR TABLE orders, users
"""


def sink(name: str, **given: object) -> dict[str, object]:
    return {"name": name, "destination": {"type": "file", "path": f"out/{name}"}, **given}


def test_config_check_tells_every_problem_at_once(database: Database, tmp_path: Path) -> None:
    database.execute(TABLES)
    only_orders = {"include_tables": ["public.orders"]}
    service = Service(
        database,
        tmp_path,
        [
            sink("fits", filter="record.amount > 100", source=only_orders),
            sink("some", filter="record.amount > 100"),
            sink("random", transform="rand()"),
            sink("absent", filter="python:no_such_module:f"),
            sink("off", filter="nonsense(", status="disabled"),
        ],
    )
    wrong = service.run("config", "check")
    assert wrong.returncode == 1
    assert "the filter of consumer some cannot be used on table public.users: " in wrong.stderr
    assert "No such struct field `amount`" in wrong.stderr
    assert "the transform of consumer random cannot be used: the function rand" in wrong.stderr
    assert "the filter of consumer absent cannot be used: no_such_module" in wrong.stderr
    assert wrong.stderr.count("cannot be used:") == 3  # and the heading
    assert "fits" not in wrong.stderr
    assert "not checked" not in wrong.stdout
    assert "Traceback" not in wrong.stderr


def test_config_check_says_what_it_could_not_check(database: Database, tmp_path: Path) -> None:
    database.execute(TABLES)
    service = Service(database, tmp_path, [sink("some", filter="record.amount > 100")])
    settings = yaml.safe_load(service.config.read_text())
    settings["databases"][0]["url"] = "postgres://u:p@127.0.0.1:1/d"
    service.config.write_text(yaml.safe_dump(settings))
    away = service.run("config", "check")
    assert away.returncode == 0
    assert "not checked: the expressions on database shop were checked for their form alone" in (
        away.stdout
    )
    assert "correct: 1 database, 1 sink" in away.stdout


@pytest.mark.timeout(240)
def test_the_service_does_not_start_with_an_expression_that_can_never_be_used(
    database: Database, tmp_path: Path
) -> None:
    database.execute(TABLES)
    service = Service(database, tmp_path, [sink("some", filter="rand() > 0.5")])
    ended = service.run("run")
    assert ended.returncode == 1
    assert "the filter of consumer some cannot be used: the function rand" in ended.stderr

"""Expressions and windows that do not fit their tables are reported before anything is delivered.

Each check starts Spark: one run of the command finds all that can be found.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from pyspark.sql import SparkSession

from cdc.config import load
from spark_pipeline.session.expressions_check import check_config
from tests.fix_postgres import Database
from tests.walbrook_service import Service

TABLES = """
CREATE TABLE orders (id int PRIMARY KEY, amount numeric(10, 2));
CREATE TABLE users (id int PRIMARY KEY, name text);
CREATE TABLE sales (id int PRIMARY KEY, region text, amount numeric(10, 2), at timestamptz);
CREATE TABLE people (id int PRIMARY KEY, amount text, at timestamptz);
CREATE PUBLICATION pub FOR TABLE orders, users, sales, people
"""


def sink(name: str, *tables: str, **given: object) -> dict[str, object]:
    return {
        "name": name,
        "source": {"include_tables": [f"public.{table}" for table in tables]},
        "destination": {"type": "file", "path": f"out/{name}"},
        **given,
    }


def windowed(
    name: str, aggregates: Mapping[str, str], *tables: str, **given: object
) -> dict[str, object]:
    window = {"size": "1m", "group_by": {"id": "record.id"}, "aggregates": dict(aggregates)}
    times = {"ordering": "event_time", "event_time": {"column": "at"}}
    return sink(name, *tables, **times, window=window, **given)


def test_config_check_reports_every_problem_at_once(database: Database, tmp_path: Path) -> None:
    database.execute(TABLES)
    service = Service(
        database,
        tmp_path,
        [
            sink("fits", "orders", filter="record.amount > 100"),
            sink("some", "orders", "users", filter="record.amount > 100"),
            sink("random", "orders", transform="rand()"),
            sink("absent", "orders", filter="python:no_such_module:f"),
            sink("off", "orders", filter="nonsense(", status="disabled"),
            windowed("fits_too", {"n": "count(*)", "total": "sum(record.amount)"}, "sales"),
            windowed("both", {"total": "sum(record.amount)"}, "sales", "people"),
            windowed("misspelt", {"total": "sum(record.amout)"}, "sales"),
            windowed("ordered", {"one": "first(record.id)"}, "sales", "people"),
            windowed("off_too", {"total": "nonsense("}, "sales", status="disabled"),
        ],
    )
    wrong = service.run("config", "check")
    assert wrong.returncode == 1
    said = wrong.stderr
    assert "the filter of consumer some cannot be used on table public.users: " in said
    assert "No such struct field `amount`" in said
    assert "the transform of consumer random cannot be used: the function rand" in said
    assert "the filter of consumer absent cannot be used: no_such_module" in said
    assert (
        "aggregates.total of the window of consumer both cannot be used on its tables: the column "
        "amount is decimal(10,2) in table public.sales of database shop but string in table "
        "public.people of database shop"
    ) in said
    assert "consumer misspelt cannot be used on its tables: [FIELD_NOT_FOUND]" in said
    assert "(did you mean amount?)" in said
    assert "consumer ordered cannot be used: the function first is refused" in said
    assert said.count("cannot be used:") == 4  # and the heading
    for right in ("fits", "off"):
        assert f"consumer {right}" not in said
    (unchecked,) = (line for line in wrong.stdout.splitlines() if line.startswith("not checked"))
    assert unchecked.endswith("--connect tries them")
    assert "Traceback" not in said


def test_config_check_says_what_it_could_not_check(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    # A function needs no Spark: only the source is away.
    function = "python:tests.data.expression_functions:expensive"
    service = Service(database, tmp_path, [sink("some", "orders", filter=function)])
    settings = yaml.safe_load(service.config.read_text())
    settings["databases"][0]["url"] = "postgres://u:p@127.0.0.1:1/d"
    service.config.write_text(yaml.safe_dump(settings))
    away = service.run("config", "check")
    assert away.returncode == 0
    said = "the expressions on database shop were checked for their form alone"
    assert f"not checked: {said}" in away.stdout
    assert "correct: 1 database, 1 sink" in away.stdout

    service.configure({}, [sink("some", "orders", filter="record.amount > 100")])
    found = check_config(spark, load(service.config))
    assert not found.problems
    (unchecked,) = found.unchecked
    assert unchecked.startswith(said)


@pytest.mark.sinks
def test_the_service_does_not_start_with_an_expression_that_can_never_be_used(
    database: Database, tmp_path: Path
) -> None:
    database.execute(TABLES)
    service = Service(database, tmp_path, [sink("some", "orders", filter="rand() > 0.5")])
    ended = service.run("run")
    assert ended.returncode == 1
    assert "the filter of consumer some cannot be used: the function rand" in ended.stderr

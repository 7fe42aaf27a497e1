"""An event time that cannot be read is said before anything starts, all of it at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cdc.config import Config, loads
from cdc.errors import ConfigError
from cdc.service.checks.event_time import check_event_time
from cdc.service.process.prepare import prepare
from tests.fix_postgres import Database, on_both_versions
from tests.walbrook_service import _url

TABLES = """
CREATE DOMAIN moment AS timestamptz; CREATE DOMAIN instant AS moment NOT NULL;
CREATE SCHEMA crm;
CREATE TABLE orders (id int PRIMARY KEY, created_at timestamptz, placed bigint);
CREATE TABLE visits (id int PRIMARY KEY, created_at instant);
CREATE TABLE crm.people (id int PRIMARY KEY, born date, tags text[]);
CREATE TABLE parts (id int PRIMARY KEY, seen timestamp) PARTITION BY RANGE (id);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10);
CREATE TABLE elsewhere (id int PRIMARY KEY)
"""
PUBLICATION = "CREATE PUBLICATION p FOR TABLE orders, visits, crm.people, parts"

TEXT = """
databases:
  - name: shop
    url: "{url}"
    slot: {{name: s, create_if_not_exists: true}}
    publication: {{name: p, create_if_not_exists: true, tables: [orders]}}
sinks:
  - {{name: first, destination: {{type: file, path: first}}}}
  - name: timed
    {source}
    ordering: event_time
    event_time: {{{event_time}}}
    destination: {{type: file, path: timed}}
"""
ALL = """column: created_at, tables: [
      {name: crm.people, column: born, type: date}, {name: parts, column: seen}]"""


def text(url: str, event_time: str, source: str = "") -> str:
    return TEXT.format(url=url, event_time=event_time, source=source)


def config(database: Database, event_time: str, source: str = "") -> Config:
    return loads(text(_url(database.dsn), event_time, source), Path(), {})


def problems(config: Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_event_time(config)
    first, *rest = str(caught.value).split("\n  ")
    assert first == "event times cannot be read:"
    return rest


@on_both_versions
def test_columns_that_can_be_read_are_no_problem(database: Database) -> None:
    database.execute(TABLES)
    database.execute(PUBLICATION)
    # A domain is what it is made of; a partition under its own name is part of its table.
    assert check_event_time(config(database, ALL)) == []
    database.execute("ALTER PUBLICATION p SET (publish_via_partition_root = true)")
    assert check_event_time(config(database, ALL)) == []
    own = ALL.replace("{name: parts,", "{name: later, column: any}, {name: parts,")
    (told,) = check_event_time(config(database, own))
    assert told.endswith("event_time.tables[1].name: nobody publishes public.later yet")
    (told,) = check_event_time(config(database, own.replace("later", "part")))
    assert told.endswith("nobody publishes public.part yet; did you mean public.parts?")


def test_a_column_of_the_name_of_the_commits_time_must_be_known_from_it(database: Database) -> None:
    database.execute(TABLES)
    database.execute("ALTER TABLE orders ADD commit_timestamp timestamptz")
    database.execute(PUBLICATION)
    for column in ("commit_timestamp", "metadata.commit_timestamp"):
        out = "source: {exclude_tables: [orders]}"
        assert check_event_time(config(database, f"column: {column}", out)) == []
    (problem,) = problems(config(database, "column: commit_timestamp"))
    assert problem == (
        "sinks[1].event_time.column: public.orders of database shop has a column commit_timestamp "
        "of its own. To fix it: write record.commit_timestamp for that column, or "
        "metadata.commit_timestamp for the time of the commit"
    )
    for column in ("record.commit_timestamp", "metadata.commit_timestamp"):
        own = f"column: commit_timestamp, tables: [{{name: orders, column: {column}}}]"
        assert check_event_time(config(database, own)) == []
    told = problems(config(database, "column: record.commit_timestamp"))
    assert len(told) == 3
    assert all("shows no column commit_timestamp" in each for each in told)


def test_by_the_clock_tables_need_no_column(database: Database) -> None:
    database.execute(TABLES)
    database.execute(PUBLICATION)
    written = text(_url(database.dsn), "emit_watermarks: true")
    by_clock = written.replace("ordering: event_time", "ordering: processing_time")
    assert check_event_time(loads(by_clock, Path(), {})) == []


def test_every_problem_is_reported_with_its_place_its_table_and_its_fix(database: Database) -> None:
    database.execute(TABLES)
    database.execute(PUBLICATION)
    wrong = """column: creatd_at, type: timestampz, tables: [
      {name: crm.people, column: tags, type: unix_ms}, {name: parts, type: unix_s, column: seen},
      {name: orders, column: placed, type: timestamptz},
      {name: none, type: 'python:none.at:all'}]"""
    at = "sinks[1].event_time"
    expected = [
        f"{at}.type: there is no event time type 'timestampz'. To fix it: did you mean timestamp",
        f"{at}.tables[3].type: the event time type 'python:none.at:all' cannot be imported",
        f"{at}.tables[2].type: timestamptz cannot read placed of public.orders of database shop, "
        "which is int8. To fix it: give a column that is one of date",
        f"{at}.column: public.visits of database shop shows no column creatd_at in publication p. "
        "To fix it: did you mean created_at?",
        f"{at}.tables[0].type: unix_ms cannot read tags of crm.people of database shop, which is "
        "_text",
        f"{at}.tables[1].type: unix_s cannot read seen of public.parts_1 of database shop, which "
        "is timestamp",
    ]
    found = problems(config(database, wrong))
    for problem, words in zip(found, expected, strict=True):
        assert problem.startswith(words)


def test_a_column_that_only_one_table_lacks_is_named_for_that_table(database: Database) -> None:
    database.execute(TABLES)
    database.execute("CREATE PUBLICATION p FOR TABLE orders (id, placed), crm.people")
    by_placed = "column: placed, type: unix_ms"
    (problem,) = problems(config(database, by_placed))
    assert "sinks[1].event_time.column: crm.people of database shop shows no column pl" in problem
    assert "it has id, born, tags; name one for crm.people under event_time.tables" in problem
    # What the publication hides is not there.
    (problem,) = problems(
        config(database, "column: created_at", "source: {include_tables: [orders]}")
    )
    assert "public.orders of database shop shows no column created_at" in problem
    # What the sink does not take does not matter.
    taken = "source: {exclude_schemas: [crm]}"
    assert check_event_time(config(database, by_placed, taken)) == []


def test_a_table_for_which_no_column_is_given_is_named(database: Database) -> None:
    database.execute(TABLES)
    database.execute("CREATE PUBLICATION p FOR TABLE orders, visits")
    (problem,) = problems(config(database, "tables: [{name: orders, column: created_at}]"))
    assert problem.startswith("sinks[1].event_time.column: is not given, and nothing else says")
    assert "name public.visits under event_time.tables" in problem


def test_very_many_problems_are_counted(database: Database) -> None:
    database.execute(";".join(f"CREATE TABLE t{i} (id int PRIMARY KEY)" for i in range(25)))
    database.execute("CREATE PUBLICATION p FOR TABLES IN SCHEMA public")
    found = problems(config(database, "column: at"))
    assert len(found) == 21
    assert found[-1] == "and 5 more"


def merged(database: Database, event_time: str, source: str) -> str:
    second = f"""
  - {{name: crm, url: "{_url(database.dsn)}", slot: {{name: t}}, publication: {{name: q}}}}
sinks:"""
    written = text(_url(database.dsn), event_time, f"databases: [shop, crm]\n    source: {source}")
    written = written.replace("name: first,", "name: first, database: crm,")
    return written.replace("\nsinks:", second)


def test_a_sink_of_two_databases_is_checked_against_both(database: Database) -> None:
    database.execute(TABLES)
    database.execute("CREATE PUBLICATION p FOR TABLE orders; CREATE PUBLICATION q FOR TABLE parts")
    (problem,) = problems(loads(merged(database, "column: created_at", "{}"), Path(), {}))
    assert "public.parts_1 of database crm shows no column created_at" in problem


def test_a_name_that_one_of_two_databases_shows_is_enough(database: Database) -> None:
    database.execute(TABLES)
    database.execute("CREATE PUBLICATION p FOR TABLE orders; CREATE PUBLICATION q FOR TABLE visits")
    by_column = "column: created_at"
    for right in ("{include_tables: [orders, visits]}", "{include_schemas: [public, crm]}"):
        assert check_event_time(loads(merged(database, by_column, right), Path(), {})) == []
    wrong = "{include_tables: [orders, vists], include_schemas: [public, warehouse]}"
    found = problems(loads(merged(database, by_column, wrong), Path(), {}))
    place = "sinks[1].source.include"
    assert found == [
        f"{place}_tables[1]: none of the databases shop, crm publishes public.vists. To fix it: "
        "did you mean public.visits?",
        f"{place}_schemas[1]: none of the databases shop, crm publishes warehouse. To fix it: "
        "publish it in one, or take it out",
    ]
    database.execute("DROP PUBLICATION q")
    (unchecked,) = check_event_time(loads(merged(database, by_column, wrong), Path(), {}))
    assert "database crm: the publication q is not there yet" in unchecked


def test_a_sink_of_two_databases_has_a_cursor_in_each(database: Database) -> None:
    database.execute(TABLES)
    database.execute("CREATE PUBLICATION p FOR TABLE orders; CREATE PUBLICATION q FOR TABLE visits")
    written = merged(database, "column: created_at", "{include_tables: [orders, visits]}")
    prepare(loads(written.replace("name: t}", "name: t, create_if_not_exists: true}"), Path(), {}))
    found = database.execute("SELECT source FROM walbrook.cursors WHERE consumer = 'timed'")
    assert sorted(found) == [("crm",), ("shop",)]


def test_tables_that_cannot_be_read_are_named_but_types_are_always_known(
    database: Database,
) -> None:
    (unchecked,) = check_event_time(config(database, "column: at"))
    assert unchecked == (
        "the event time of tables of database shop: the publication p is not there yet"
    )
    away = text("postgres://u:p@127.0.0.1:1/d", "column: at, type: {type}")
    (unchecked,) = check_event_time(loads(away.replace("{type}", "date"), Path(), {}))
    assert "database shop cannot be reached" in unchecked
    (problem,) = problems(loads(away.replace("{type}", "dat"), Path(), {}))
    assert "did you mean date" in problem


def test_a_disabled_sink_is_not_looked_at(database: Database) -> None:
    assert check_event_time(config(database, "column: at, type: none", "status: disabled")) == []


def walbrook(path: Path, *command: str) -> tuple[int, str]:
    """A command's status and all it said; a process of its own, because it sets up the logs."""
    done = subprocess.run(
        [sys.executable, "-m", "cdc.service.cli.entry", *command, "-c", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_command_says_what_is_wrong_once_the_publication_is_there(
    database: Database, tmp_path: Path
) -> None:
    path = tmp_path / "walbrook.yaml"
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, created_at timestamptz)")
    path.write_text(text(_url(database.dsn), "column: creatd_at"))
    status, said = walbrook(path, "config", "check")
    assert status == 0
    assert "not checked: the event time of tables of database shop: the publication p" in said
    database.execute("CREATE PUBLICATION p FOR TABLE orders")
    status, said = walbrook(path, "config", "check")
    assert (status, "did you mean created_at" in said) == (1, True), said


def test_a_type_that_is_unknown_keeps_the_service_from_starting(
    database: Database, tmp_path: Path
) -> None:
    path = tmp_path / "walbrook.yaml"
    path.write_text(text(_url(database.dsn), "column: at, type: timestampz"))
    status, said = walbrook(path, "run")
    assert (status, "there is no event time type 'timestampz'" in said) == (1, True), said

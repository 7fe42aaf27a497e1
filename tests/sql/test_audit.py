"""Every act leaves a row that says who did it, by whichever way it came."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from typer.testing import CliRunner

from cdc.service.cli.entry import app
from tests.api_server import config as config
from tests.api_server import served
from tests.fix_postgres import Database
from tests.operators import Operator

pytestmark = pytest.mark.migrated

_ROWS = """
SELECT channel, actor, database_role, action, arguments, result FROM walbrook.audit ORDER BY id
"""
_GONE = """
INSERT INTO walbrook.sources (name, slot, publication, system_identifier, restart_lsn)
VALUES ('depot', 's', 'p', '1', '0/64');
INSERT INTO walbrook.consumers (source, name, cursor_lsn, destination, active)
VALUES ('depot', 'old', '0/500', 'webhook', false);
INSERT INTO walbrook.gaps (source, consumer, from_lsn, from_idx, to_lsn, to_idx, reason)
VALUES ('depot', 'old', '0/1', 0, '0/2', 0, 'skipped');
"""
_LOST = """
UPDATE walbrook.sources SET state = 'stopped', head_lsn = '0/900' WHERE name = 'shop';
INSERT INTO walbrook.health_events (source, kind, severity, what)
VALUES ('shop', 'slot_lost', 'error', 'x');
"""


@pytest.fixture
def operator(database: Database) -> Iterator[Operator]:
    with database.connect() as connection:
        yield Operator(database, connection)


@pytest.fixture
def client(operator: Operator) -> Iterator[httpx.Client]:
    with served(operator.database.dsn) as client:
        yield client


def rows(operator: Operator) -> list[tuple[Any, ...]]:
    return operator.rows(_ROWS)


def test_an_act_over_sql_is_of_its_database_role(operator: Operator) -> None:
    operator.rows("SELECT * FROM walbrook.rewind('hook', to_cursor => '768:2')")
    ((role,),) = operator.rows("SELECT session_user::text")
    assert rows(operator) == [
        (
            "sql",
            role,
            role,
            "rewind",
            {"source": "shop", "consumer": "hook", "to_cursor": "768:2"},
            "done: 0 affected, the cursor is 0/300:2",
        )
    ]


def test_an_act_on_the_command_line_is_of_its_user(
    operator: Operator, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    result = CliRunner().invoke(app, ["pause", "hook", "-c", str(config)])
    assert result.exit_code == 0, result.output
    ((channel, actor, _role, action, _arguments, _result),) = rows(operator)
    assert (channel, actor, action) == ("command line", "ada", "pause")


def test_an_act_over_http_is_of_its_token_or_program(
    operator: Operator, client: httpx.Client
) -> None:
    assert client.post("/hook/pause").status_code == 200
    ((channel, actor, _role, action, _arguments, _result),) = rows(operator)
    assert (channel, actor, action) == ("http", "program on 127.0.0.1", "pause")


def test_what_was_refused_has_no_row(operator: Operator, client: httpx.Client) -> None:
    assert client.post("/hook/rewind", json={"to_cursor": "0/900:9"}).status_code == 409
    with pytest.raises(psycopg.Error):
        operator.rows("SELECT * FROM walbrook.skip_to('hook', '0/500:0')")
    assert rows(operator) == []


def test_conditions_and_values_of_rows_are_not_in_the_audit(operator: Operator) -> None:
    operator.rows(
        "SELECT * FROM walbrook.start_backfill('hook', 'public.item', "
        "where_sql => 'mail = ''canary-4711''', sort_column => 'mail', "
        "start_position => 'canary-4711')"
    )
    ((*_, arguments, _result),) = rows(operator)
    assert "canary" not in str(arguments)
    assert (arguments["has_where"], arguments["has_start_position"]) == (True, True)
    assert (arguments["table"], arguments["sort_column"]) == ("public.item", "mail")


def test_only_the_latest_acts_are_kept(operator: Operator) -> None:
    operator.rows("SELECT * FROM walbrook.pause('hook')")
    operator.connection.execute(
        "CREATE OR REPLACE FUNCTION walbrook.audit_rows_max() RETURNS bigint "
        "LANGUAGE sql IMMUTABLE AS $$ SELECT 2::bigint $$"
    )
    for _ in range(3):
        operator.rows("SELECT * FROM walbrook.pause('hook')")
    assert operator.rows("SELECT array_agg(id ORDER BY id) FROM walbrook.audit") == [([3, 4],)]


def test_an_operator_needs_no_right_on_the_table_to_leave_a_row(operator: Operator) -> None:
    name = f"on_call_{operator.database.name}"[:60]
    operator.connection.execute(f'CREATE ROLE "{name}"'.encode())
    try:
        operator.rows(f"SELECT walbrook.grant_operator('{name}')")
        operator.connection.execute(f'SET ROLE "{name}"'.encode())
        operator.rows("SELECT * FROM walbrook.pause('hook')")
        assert [row[3] for row in rows(operator)] == ["grant_monitor", "grant_operator", "pause"]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            operator.rows("DELETE FROM walbrook.audit RETURNING id")
    finally:
        operator.connection.execute("RESET ROLE")
        operator.connection.execute(f'DROP OWNED BY "{name}"; DROP ROLE "{name}"'.encode())


def _forgotten(operator: Operator) -> tuple[Any, ...]:
    return operator.rows(
        "SELECT (SELECT count(*) FROM walbrook.consumers WHERE name = 'old'),"
        " (SELECT count(*) FROM walbrook.gaps WHERE consumer = 'old'),"
        " (SELECT count(*) FROM walbrook.sources WHERE name = 'depot')"
    )[0]


@pytest.mark.parametrize("way", ["sql", "command line", "http"])
def test_a_removed_sink_and_its_database_are_forgotten_in_each_way(
    operator: Operator, client: httpx.Client, config: Path, way: str
) -> None:
    operator.connection.execute(_GONE)
    root = str(client.base_url).partition("/api/")[0]

    def forget(name: str, *, source: bool) -> None:
        if way == "sql":
            function = "forget_source" if source else "forget"
            assert operator.rows(f"SELECT walbrook.{function}('{name}')") in ([(1,)], [(0,)])
        elif way == "http":
            kind = "sources" if source else "consumers"
            answer = client.post(f"{root}/api/{kind}/{name}/forget")
            assert answer.status_code == 200, answer.text
        else:
            given = ["forget", name, "--yes", "-c", str(config)]
            result = CliRunner().invoke(app, [*given, *(["--database"] if source else [])])
            assert result.exit_code == 0, result.exception

    forget("depot/old" if way != "http" else "depot%2Fold", source=False)
    assert _forgotten(operator) == (0, 0, 1)
    forget("depot", source=True)
    assert _forgotten(operator) == (0, 0, 0)
    assert [(row[0], row[3]) for row in rows(operator)] == [(way, "forget"), (way, "forget_source")]


def test_what_is_served_is_not_forgotten(operator: Operator) -> None:
    with pytest.raises(psycopg.Error, match="consumer hook is active"):
        operator.rows("SELECT walbrook.forget('hook')")
    with pytest.raises(psycopg.Error, match="there is no consumer nobody"):
        operator.rows("SELECT walbrook.forget('nobody')")
    with operator.database.connect() as service:
        service.execute("SELECT pg_advisory_lock(hashtextextended('walbrook.source.shop', 0))")
        with pytest.raises(psycopg.Error, match="source shop is served"):
            operator.rows("SELECT walbrook.forget_source('shop')")


@pytest.mark.parametrize("way", ["sql", "command line", "http"])
def test_a_gap_is_accepted_in_each_way(
    operator: Operator, client: httpx.Client, config: Path, way: str
) -> None:
    operator.connection.execute(_LOST)
    root = str(client.base_url).partition("/api/")[0]
    if way == "sql":
        operator.rows("SELECT * FROM walbrook.accept_gap('shop', '0/880')")
    elif way == "http":
        answer = client.post(f"{root}/api/sources/shop/accept_gap", json={"lsn": "0/880"})
        assert answer.status_code == 200, answer.text
        assert {gap["to"] for gap in answer.json()["data"]} == {"0/880:0"}
    else:
        given = ["accept-gap", "shop", "0/880", "--yes", "-c", str(config)]
        result = CliRunner().invoke(app, given)
        assert "hook will never get 0/500:0 to 0/880:0" in result.output, result.exception
    assert operator.rows("SELECT restart_lsn::text FROM walbrook.sources") == [("0/880",)]
    assert [(row[0], row[3]) for row in rows(operator)] == [(way, "accept_gap")]

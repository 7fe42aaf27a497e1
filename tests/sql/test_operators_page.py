"""What docs/operations.md says of acting can be done as it stands there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cdc.service.cli.entry import app
from tests.api_server import config as config
from tests.api_server import served
from tests.fix_postgres import Database
from tests.operators import Operator

pytestmark = pytest.mark.migrated

_PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
_SECTION = _PAGE[_PAGE.index("\n## Acting:") : _PAGE.index("\n## Every operation")]
_SQL, _COMMANDS, _CALLS = re.findall(r"```(?:sql|sh)\n(.*?)```", _SECTION, re.DOTALL)

_EVENT_TIME = _PAGE[_PAGE.index("\n## Event time") : _PAGE.index("\n## When")]
_LOOKS, _ACTS, _SHELL = re.findall(r"```(?:sql|sh)\n(.*?)```", _EVENT_TIME, re.DOTALL)

_SHOP = """
UPDATE walbrook.consumers SET name = 'search', cursor_lsn = '16/B374D900' WHERE name = 'hook';
UPDATE walbrook.consumers SET name = 'lines', cursor_lsn = '16/B374D900' WHERE name = 'files';
UPDATE walbrook.sources SET log_lsn = '16/B374DA00';
UPDATE walbrook.log_segments SET commit_to = '2026-11-18Z' WHERE first_batch = 1;
"""
_RESET = "UPDATE walbrook.consumers SET cursor_lsn = '16/B374D900', cursor_idx = 0"


@pytest.fixture
def operator(database: Database) -> Iterator[Operator]:
    """With all that the page speaks of."""
    with database.connect() as connection:
        made = Operator(database, connection)
        connection.execute(_SHOP)
        connection.execute("ALTER TABLE walbrook.dead_letters ALTER id RESTART WITH 17")
        for lsn in ("16/B374D840", "16/B374D844"):
            made.waits(lsn, consumer="search")
        numbers = [made.dies(lsn, consumer="search") for lsn in ("16/B374D840", "16/B374D844")]
        assert numbers == [17, 18]
        yield made


def _ready(operator: Operator, step: str) -> None:
    """Each line stands for itself: what it needs is there."""
    operator.connection.execute(_RESET)
    if "16/B374D848:3" in step and "discard" in step:
        operator.waits("16/B374D848", idx=3, consumer="search")


def _aside(operator: Operator, step: str) -> None:
    """``redeliver`` of all would take the letter that the next line names."""
    if "redeliver" in step and "17" not in step:
        operator.connection.execute("DELETE FROM walbrook.events")
        again = "ALTER TABLE walbrook.dead_letters ALTER id RESTART WITH 18"
        operator.connection.execute(again.encode())
        operator.letter("16/B374D844", 0, "decode", consumer="search")


def test_every_statement_of_the_page_runs(operator: Operator) -> None:
    for line in _SQL.splitlines():
        statement = line.partition(";")[0]
        _ready(operator, statement)
        ((_, consumer, *_),) = operator.rows(statement)
        assert consumer == ("lines" if "'lines'" in statement else "search"), statement
        _aside(operator, statement)
    ((functions,),) = operator.rows(
        "SELECT array_agg(DISTINCT proname::text) FROM pg_proc JOIN pg_type t ON t.oid = prorettype"
        " WHERE t.typname = 'consumer_state' AND proname <> 'acted'"
    )
    named = {*re.findall(r"walbrook\.(\w+)\(", _SQL + _ACTS)}
    assert named - {"finish_source", "advance_watermark"} == {*functions}, "the page has them all"


def test_every_command_of_the_page_runs(operator: Operator, config: Path) -> None:
    for line in _COMMANDS.splitlines():
        _ready(operator, line)
        arguments = [*shlex.split(line)[1:], "-c", str(config)]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert line.split()[2] in result.output, line
        _aside(operator, line)


def test_every_call_of_the_page_is_answered(operator: Operator) -> None:
    with served(operator.database.dsn) as client:
        for line in _CALLS.splitlines():
            _ready(operator, line)
            _, *words = shlex.split(line)
            (path,) = [word for word in words if word.startswith("$WALBROOK/api/consumers")]
            body = words[words.index("-d") + 1] if "-d" in words else ""
            method = "POST" if "POST" in words else "GET"
            path = path.removeprefix("$WALBROOK/api/consumers")
            answer = client.request(method, path, content=body)
            assert answer.status_code == 200, (line, answer.text)
            _aside(operator, line)


_MERGED = """
INSERT INTO walbrook.sources (name, slot, publication, system_identifier, restart_lsn, log_lsn)
VALUES ('warehouse', 's', 'p', '1', '0/64', '0/64');
INSERT INTO walbrook.consumers (source, name, cursor_lsn, destination)
SELECT s, 'orders-by-time', CASE s WHEN 'shop' THEN '0/500' ELSE '0/64' END::pg_lsn, 'webhook'
  FROM unnest(ARRAY['shop', 'warehouse']) s;
SELECT walbrook.make_queue(id) FROM walbrook.consumers WHERE name = 'orders-by-time';
INSERT INTO walbrook.event_time (consumer, base_lsn) VALUES ('orders-by-time', '0/3');
INSERT INTO walbrook.event_sources (consumer, ledger, cursor_lsn, cursor_idx, read_lsn, read_idx)
SELECT id, ledger, cursor_lsn, cursor_idx, cursor_lsn, 0
  FROM walbrook.consumers WHERE name = 'orders-by-time';
INSERT INTO walbrook.event_partitions (consumer, table_name, watermark)
SELECT id, 'public.orders', CASE source WHEN 'shop' THEN 7 END FROM walbrook.consumers
 WHERE name = 'orders-by-time';
INSERT INTO walbrook.health_events (source, consumer, kind, severity, what)
VALUES ('shop', 'orders-by-time', 'worker_full', 'error', 'it waits');
"""


def test_the_commands_of_the_page_for_event_time_work(operator: Operator, config: Path) -> None:
    operator.connection.execute(_MERGED)
    operator.letter("0/200", 0, "late", consumer="orders-by-time")
    looks = re.split(r";[^\n]*\n", _LOOKS)[:-1]
    found = [operator.rows(statement) for statement in looks]
    assert [len(rows) for rows in found] == [2, 1, 1, 1, 1]
    assert found[1][0][1] == "warehouse", "it has no watermark yet: it holds the other back"
    for line in _ACTS.splitlines():
        assert operator.rows(line.partition(";")[0]), line
    assert operator.rows("SELECT FROM walbrook.event_sources WHERE finished_at IS NOT NULL") == []
    with served(operator.database.dsn) as client:
        for line in _SHELL.splitlines():
            program, *words = shlex.split(line)
            if program == "curl":
                body = words.pop() if "-d" in words else ""
                (path,) = [word for word in words if word.startswith("$WALBROOK")]
                path = path.removeprefix("$WALBROOK/api/consumers")
                assert client.post(path, content=body).status_code == 200, line
            else:
                arguments = [*words, "-c", str(config)]
                result = CliRunner().invoke(app, arguments, catch_exceptions=False)
                assert "orders-by-time" in result.output, line

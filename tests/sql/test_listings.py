"""``walbrook sources``, ``sinks``, ``lag``, ``queue``, ``status``, and the same over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cdc.service.cli.entry import app
from tests.api_server import config as config
from tests.api_server import served
from tests.fix_postgres import Database
from tests.operators import Operator

pytestmark = pytest.mark.migrated


@pytest.fixture
def operator(database: Database) -> Iterator[Operator]:
    with database.connect() as connection:
        made = Operator(database, connection)
        made.waits("0/400", consumer="hook")
        yield made


def walbrook(config: Path, *arguments: str) -> str:
    given = [*arguments, "-c", str(config)]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("command", "path", "expected"),
    [
        ("sources", "sources", {"source": "shop", "slot": "slot"}),
        ("sinks", "consumers", {"consumer": "hook", "cursor": "0/500:0", "active": True}),
        ("lag", "lag", {"consumer": "hook", "cursor": "0/500:0"}),
        ("queue", "queue", {"consumer": "hook", "cursor": "0/400:0", "table_name": "item"}),
    ],
)
def test_a_listing_is_the_same_in_a_pipe_and_over_http(
    operator: Operator, config: Path, command: str, path: str, expected: dict[str, Any]
) -> None:
    def has(found: list[dict[str, Any]]) -> bool:
        return any(expected.items() <= row.items() for row in found)

    assert has(json.loads(walbrook(config, command, "--json"))["data"])
    with served(operator.database.dsn) as client:
        root = str(client.base_url).partition("/api/")[0]
        answer = client.get(f"{root}/api/{path}")
        assert answer.status_code == 200, answer.text
        assert has(answer.json()["data"])
        if command != "sources":
            of_one = client.get(f"{root}/api/{path}", params={"consumer": "hook", "limit": 1})
            assert len(of_one.json()["data"]) == 1
            unknown = client.get(f"{root}/api/{path}", params={"consumer": "nobody"})
            assert unknown.status_code == 404
        assert client.get(f"{root}/api/{path}", params={"limit": "0"}).status_code == 400
        assert client.get(f"{root}/api/{path}", params={"limits": "1"}).status_code == 400
    shown = walbrook(config, command)
    assert all(str(value) in shown for value in expected.values() if isinstance(value, str))


def test_the_queue_shows_no_text_that_may_quote_a_row(operator: Operator, config: Path) -> None:
    assert "refused" not in walbrook(config, "queue", "--json")


def test_status_is_one_document_of_json(operator: Operator, config: Path) -> None:
    shown = json.loads(walbrook(config, "status", "--json"))
    assert shown.keys() == {"sources", "sinks", "lag", "health"}
    assert {row["consumer"] for row in shown["sinks"]} >= {"hook", "files"}


def test_an_act_prints_the_new_state_as_json(operator: Operator, config: Path) -> None:
    assert json.loads(walbrook(config, "pause", "hook", "--json"))["paused_at"] is not None
    listed = json.loads(walbrook(config, "audit", "pause", "--json"))["data"]
    assert [row["action"] for row in listed] == ["pause"]
    assert "command line" in walbrook(config, "audit")


def test_a_cursor_is_taken_in_both_spellings_and_converted(
    operator: Operator, config: Path
) -> None:
    assert "hook stands at 0/300:2" in walbrook(config, "rewind", "hook", "--to-cursor", "768:2")
    assert operator.rows(
        "SELECT walbrook.cursor_text('97500059720:3'), walbrook.cursor_key('16/B374D848:3'),"
        " walbrook.cursor_text('16/B374D848:3'), walbrook.cursor_key('18446744073:0')"
    ) == [("16/B374D848:3", "97500059720:3", "16/B374D848:3", "18446744073:0")]


def test_status_is_watched_until_it_is_interrupted(
    operator: Operator, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def interrupt(_seconds: float) -> None:
        looks.append(1)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("cdc.service.cli.status.time.sleep", interrupt)
    shown = walbrook(config, "status", "--watch")
    assert "shop/hook" in shown
    assert "changes/s" in shown


def test_the_client_of_another_host_is_not_served(operator: Operator) -> None:
    with served(operator.database.dsn) as client:
        root = str(client.base_url).partition("/api/")[0]
        answer = httpx.get(f"{root}/api/audit", headers={"host": "elsewhere.example"})
        assert answer.status_code == 403

"""Slots and versions that no server at hand can be brought to show."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from cdc.replication.preflight.problem import Problem, SourceNotReadyError, ended, raise_problems
from cdc.replication.preflight.schemas import add_tables
from cdc.replication.preflight.server import version_problems
from cdc.replication.preflight.slot import slot_problems, slot_warnings
from cdc.replication.preflight.tables import Table, TableName

USABLE = {
    "slot_type": "logical",
    "plugin": "pgoutput",
    "database": "shop",
    "temporary": False,
    "wal_status": "reserved",
}


def test_a_usable_slot_has_no_problems() -> None:
    assert slot_problems("s", USABLE, "shop") == []
    assert slot_warnings("s", USABLE) == []


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"plugin": "wal2json"}, "The slot s uses the plugin wal2json; pgoutput is needed"),
        ({"wal_status": "lost"}, "The slot s is lost (its WAL was removed)"),
        ({"invalidation_reason": "idle_timeout"}, "The slot s is lost (idle_timeout)"),
        ({"conflicting": True}, "The slot s is lost (conflict with recovery)"),
    ],
)
def test_an_unusable_slot_is_named_with_its_reason(row: dict[str, Any], sentence: str) -> None:
    (problem,) = slot_problems("s", {**USABLE, **row}, "shop")
    assert problem.what.startswith(sentence)
    assert "SELECT pg_drop_replication_slot('s');" in problem.fix


def test_a_slot_about_to_lose_its_wal_is_a_warning() -> None:
    row = {**USABLE, "wal_status": "unreserved"}
    assert slot_problems("s", row, "shop") == []
    (warning,) = slot_warnings("s", row)
    assert "max_slot_wal_keep_size" in warning.fix


def test_a_server_before_14_is_too_old() -> None:
    (problem,) = version_problems(130014)
    assert problem.what == "The server runs Postgres 13; Walbrook needs 14 or later"
    assert version_problems(140000) == []


def test_a_fix_of_several_lines_stays_together_and_can_be_pasted() -> None:
    with pytest.raises(SourceNotReadyError) as caught:
        raise_problems(
            "shop", [Problem("One", "SELECT 1;\nSELECT 2; -- done"), Problem("Two", "x")]
        )
    assert str(caught.value).splitlines() == [
        "database shop is not ready:",
        "  1. One",
        "     fix: SELECT 1;",
        "          SELECT 2; -- done",
        "  2. Two",
        "     fix: x",
    ]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SELECT 1", "SELECT 1;"),
        ("SELECT 1;\n", "SELECT 1;"),
        ("SELECT 1 -- one", "SELECT 1 -- one\n;"),
        ("-- one\nSELECT 1", "-- one\nSELECT 1;"),
    ],
)
def test_a_comment_does_not_swallow_the_semicolon(text: str, expected: str) -> None:
    assert ended(text) == expected


def test_before_15_the_tables_of_a_schema_are_added_one_by_one() -> None:
    root, leaf = TableName("s", "a b"), TableName("s", "leaf")
    tables = {
        name: Table(name, logged=name.name != "unlogged", root=root if name == leaf else None)
        for name in (root, leaf, TableName("s", "unlogged"), TableName("t", "c"))
    }
    assert add_tables("p", "s", tables) == 'ALTER PUBLICATION "p" ADD TABLE "s"."a b";'
    assert "create a table in it" in add_tables("p", "none", tables)

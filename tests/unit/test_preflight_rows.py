"""Slots and versions that no server at hand can be brought to show."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from cdc.replication.preflight.problem import (
    SourceNotReadyError,
    SourceProblem,
    ended,
    raise_problems,
)
from cdc.replication.preflight.schemas import add_tables
from cdc.replication.preflight.server import version_problems
from cdc.replication.preflight.slot import settings_problems, slot_problems, slot_warnings
from cdc.replication.preflight.standby import StandbySnapshots, standby_problems
from cdc.replication.preflight.tables import CatalogName, Table
from cdc.replication.source.slot_row import SlotRow, slot_row

USABLE: dict[str, Any] = {
    "slot_type": "logical",
    "plugin": "pgoutput",
    "database": "shop",
    "temporary": False,
    "wal_status": "reserved",
}


@dataclass(frozen=True)
class Wanted:
    name: str = "s"
    create_if_not_exists: bool = True
    failover: bool = False
    two_phase: bool = False


def row(limit_mib: int = -1, **changes: Any) -> SlotRow:
    return slot_row("s", {**USABLE, **changes}, limit_mib)


def test_a_usable_slot_has_no_problems() -> None:
    assert slot_problems(row(), "shop", in_recovery=False) == []
    assert slot_warnings(row(), Wanted(), 180000) == []


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"plugin": "wal2json"}, "The slot s uses the plugin wal2json; pgoutput is needed"),
        ({"wal_status": "lost"}, "The slot s is lost (its WAL was removed)"),
        ({"invalidation_reason": "idle_timeout"}, "The slot s is lost (idle_timeout)"),
        ({"conflicting": True}, "The slot s is lost (conflict with recovery)"),
    ],
)
def test_an_unusable_slot_is_named_with_its_reason(columns: dict[str, Any], sentence: str) -> None:
    (problem,) = slot_problems(row(**columns), "shop", in_recovery=False)
    assert problem.what.startswith(sentence)
    assert "SELECT pg_drop_replication_slot('s');" in problem.fix


@pytest.mark.parametrize(
    ("limit_mib", "columns", "at_risk"),
    [
        (-1, {"wal_status": "unreserved"}, True),
        (-1, {"safe_wal_size": None}, False),
        (10_000, {"safe_wal_size": 1001 << 20}, False),
        (10_000, {"safe_wal_size": 999 << 20}, True),
        (1000, {"safe_wal_size": 257 << 20}, False),
        (1000, {"safe_wal_size": 255 << 20}, True),
        (100, {"safe_wal_size": 51 << 20}, False),
        (100, {"safe_wal_size": 49 << 20}, True),
        (100, {"safe_wal_size": None, "wal_status": "lost"}, False),
    ],
)
def test_a_slot_about_to_lose_its_wal_is_a_warning(
    limit_mib: int, columns: dict[str, Any], at_risk: bool
) -> None:
    warnings = slot_warnings(row(limit_mib, **columns), Wanted(), 180000)
    assert bool(warnings) == at_risk
    assert all("max_slot_wal_keep_size" in warning.fix for warning in warnings)


def test_a_slot_that_is_not_as_configured_is_a_warning_with_the_command() -> None:
    (failover,) = slot_warnings(row(failover=False), Wanted(failover=True), 180000)
    assert failover.fix.endswith('ALTER_REPLICATION_SLOT "s" ( FAILOVER true );')
    (two_phase,) = slot_warnings(row(two_phase=True), Wanted(), 160000)
    assert "created with true, which counts" in two_phase.what


def test_slot_options_that_this_server_lacks_are_refused() -> None:
    both = Wanted(failover=True, two_phase=True)
    assert settings_problems(both, 170000, in_recovery=False) == []
    failover, two_phase = settings_problems(both, 140000, in_recovery=False)
    assert failover.what == "slot.failover needs Postgres 17 or later; the server runs 14"
    assert two_phase.what == "slot.two_phase needs Postgres 15 or later; the server runs 14"
    (standby,) = settings_problems(Wanted(failover=True), 180000, in_recovery=True)
    assert "the source is a standby" in standby.what


def test_a_copy_that_a_standby_keeps_in_step_cannot_be_read_there() -> None:
    (problem,) = slot_problems(row(synced=True), "shop", in_recovery=True)
    assert "only once the standby is promoted" in problem.what
    assert slot_problems(row(synced=True), "shop", in_recovery=False) == []


def test_standbys_can_be_read_from_16_on() -> None:
    (problem,) = standby_problems(150004)
    assert "standbys can be read from 16 on" in problem.what
    assert standby_problems(160000) == []


def test_without_a_primary_to_ask_the_wait_is_explained() -> None:
    error = StandbySnapshots(None).timed_out("s", 60.0)
    assert "waits for its primary" in error.what
    assert "primary_url" in error.fix


def test_a_server_before_14_is_too_old() -> None:
    (problem,) = version_problems(130014)
    assert problem.what == "The server runs Postgres 13; Walbrook needs 14 or later"
    assert version_problems(140000) == []


def test_a_fix_of_several_lines_stays_together_and_can_be_pasted() -> None:
    with pytest.raises(SourceNotReadyError) as caught:
        raise_problems(
            "shop",
            [SourceProblem("One", "SELECT 1;\nSELECT 2; -- done"), SourceProblem("Two", "x")],
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
    root, leaf = CatalogName("s", "a b"), CatalogName("s", "leaf")
    tables = {
        name: Table(name, logged=name.name != "unlogged", root=root if name == leaf else None)
        for name in (root, leaf, CatalogName("s", "unlogged"), CatalogName("t", "c"))
    }
    assert add_tables("p", "s", tables) == 'ALTER PUBLICATION "p" ADD TABLE "s"."a b";'
    assert "create a table in it" in add_tables("p", "none", tables)

"""Slots and versions that no server at hand can be brought to show."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.replication.preflight.server import version_problems
from cdc.replication.preflight.slot import slot_problems, slot_warnings

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

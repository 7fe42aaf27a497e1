"""Which destinations can be asked for the rows of a table."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.config import SinkConfig
from cdc.config.read_back import unreadable_reason
from cdc.config.table import TableName

PUBLISHED = [TableName("a", "item"), TableName("b", "item"), TableName("a_b", "c")]


def sink(source: dict[str, Any] | None = None, **destination: object) -> SinkConfig:
    settings = {"type": "postgres", "url": "postgresql://h/d", **destination}
    given = {"name": "mirror", "database": "shop", "destination": settings}
    return SinkConfig.model_validate({**given, **({"source": source} if source else {})})


@pytest.mark.parametrize(
    "settings", [{"target_schema": "m"}, {"table": "m.{table}"}, {"table": "{table}_{table}",
                                                                  "target_schema": "m"}]
)  # fmt: skip
def test_tables_of_one_name_share_a_target(settings: dict[str, Any]) -> None:
    why = unreadable_reason(sink(**settings), PUBLISHED[0], PUBLISHED)
    assert why == "table b.item has the same target"
    assert unreadable_reason(sink(**settings), PUBLISHED[2], PUBLISHED) is None


def test_names_that_only_meet_in_the_target_share_it() -> None:
    there = [TableName("a", "b_c"), TableName("a_b", "c")]
    why = unreadable_reason(sink(table="m.{schema}_{table}"), there[0], there)
    assert why == "table a_b.c has the same target"


@pytest.mark.parametrize("settings", [{}, {"table": "{table}"}, {"table": "{schema}.x_{table}"}])
def test_a_target_in_the_schema_of_its_table_is_not_shared(settings: dict[str, Any]) -> None:
    assert unreadable_reason(sink(**settings), PUBLISHED[0], PUBLISHED) is None


def test_a_table_that_the_sink_does_not_take_shares_nothing() -> None:
    taken = sink({"include_schemas": ["a"]}, target_schema="m")
    assert unreadable_reason(taken, PUBLISHED[0], PUBLISHED) is None


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_tables_of_a_lake_can_be_asked_if_no_other_table_shares_them(kind: str, mode: str) -> None:
    def lake(table: str) -> SinkConfig:
        to = {"type": kind, "path": "/srv/lake", "mode": mode, "table": table}
        return SinkConfig.model_validate({"name": "lake", "database": "shop", "destination": to})

    assert unreadable_reason(lake("{schema}.{table}"), PUBLISHED[0], PUBLISHED) is None
    why = unreadable_reason(lake("all.{table}"), PUBLISHED[0], PUBLISHED)
    assert why == "table b.item has the same target"

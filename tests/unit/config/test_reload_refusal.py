"""Which sinks have tables that can be reloaded, and what the others say."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.config import SinkConfig
from cdc.config.read_back import sharing
from cdc.config.table import TableName

TO: dict[str, Any] = {"type": "postgres", "url": "postgres://u@h/d"}
LAKE: dict[str, Any] = {"type": "delta", "path": "/lake"}


def sink(destination: dict[str, Any], **more: Any) -> SinkConfig:
    return SinkConfig.model_validate(
        {"name": "s", "database": "d", "destination": destination, **more}
    )


@pytest.mark.parametrize(
    "destination", [TO, TO | {"mode": "append"}, LAKE, LAKE | {"type": "iceberg", "mode": "upsert"}]
)
def test_tables_of_one_table_of_the_source_can_be_reloaded(destination: dict[str, Any]) -> None:
    assert sink(destination).reload_refusal is None


@pytest.mark.parametrize(
    ("destination", "more", "why"),
    [
        (TO | {"mode": "events"}, {}, "all tables share one"),
        (TO | {"table": "all_{schema}"}, {}, "has no {table}"),
        (TO, {"routing": "'a'"}, "routing"),
        ({"type": "file", "path": "/out"}, {"ordering": "processing_time"}, "processing time"),
        ({"type": "file", "path": "/out"}, {}, "no tables"),
    ],
)
def test_other_sinks_say_why_not(
    destination: dict[str, Any], more: dict[str, Any], why: str
) -> None:
    found = sink(destination, **more).reload_refusal
    assert found is not None
    assert why in found


def test_a_target_that_another_table_shares_is_found() -> None:
    one, other = TableName("a", "t"), TableName("b", "t")
    assert sharing(sink(TO | {"target_schema": "x"}), one, [one, other]) == other
    assert sharing(sink(TO), one, [one, other]) is None
    assert sharing(sink(LAKE | {"table": "lake.{table}"}), one, [one, other]) == other

"""What a consumer takes of tables that were renamed since it was configured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from cdc.config import FileDestination, SinkConfig, TableName
from cdc.config.renamed import followed, named_tables
from cdc.cursor import Cursor
from spark_pipeline.delivery.matching import Match
from spark_pipeline.slices.exchange import SliceMarker
from spark_pipeline.workers import followed_tables
from spark_pipeline.workers.followed_tables import FollowedTables

A, B, Z = TableName("public", "a"), TableName("public", "b"), TableName("public", "z")


def sink(source: dict[str, object], **more: object) -> SinkConfig:
    return SinkConfig.model_validate(
        {
            "name": "files",
            "database": "shop",
            "source": source,
            "destination": FileDestination(path=Path("/files")),
            **more,
        }
    )


def test_a_table_that_is_taken_is_taken_under_its_new_name_too() -> None:
    match = Match.of(followed(sink({"include_tables": [A, B]}), {A: [Z]}))
    assert [match.takes("public", name) for name in ("a", "b", "z", "y")] == [
        True, True, True, False,
    ]  # fmt: skip


def test_a_table_that_is_left_out_is_left_out_under_its_new_name_too() -> None:
    match = Match.of(followed(sink({"exclude_tables": [A]}), {A: [Z]}))
    assert [match.takes("public", name) for name in ("a", "b", "z")] == [False, True, False]


def test_groups_of_a_table_are_those_of_its_new_name_too() -> None:
    group = {"name": A, "group_column_names": ["owner"]}
    found = followed(sink({"include_tables": [A]}, tables=[group]), {A: [Z]})
    assert {each.name: each.group_column_names for each in found.tables} == {
        A: ("owner",),
        Z: ("owner",),
    }


def test_a_look_that_failed_is_made_again_before_a_change_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Away:
        """Connections to a state database that does not answer the first time."""

        asked = 0

        @contextmanager
        def connection(self) -> Iterator[None]:
            self.asked += 1
            if self.asked == 1:
                raise psycopg.OperationalError("away")
            yield

    monkeypatch.setattr(followed_tables, "renamed_tables", lambda *_given: {A: [Z]})
    away = Away()
    tables = FollowedTables(sink({"include_tables": [A]}), "shop", cast("Any", away))
    marker = SliceMarker(
        0, 1, 0, 0, 1, 1, Cursor(8, 1), 1, "", 0, 0, tables=(("public", "z"),)
    )  # fmt: skip
    with pytest.raises(psycopg.OperationalError):
        tables.look([marker])
    assert tables.look([marker])
    assert tables.match.takes("public", "z")
    assert not tables.look([marker])
    assert away.asked == 2, "a table that is known is not looked up again"


def test_a_sink_without_renamed_tables_is_the_same() -> None:
    given = sink({"include_tables": [A]})
    assert followed(given, {}) is given
    assert named_tables(given) == [A]

"""The change that is traced is found by its cursor or its key, or it is said why it is not."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from cdc.config import SinkConfig
from cdc.cursor import Cursor
from cdc.errors import OperatorError
from cdc.log.view import LogView
from cdc.trace.change import (
    Missing,
    NotFound,
    RowKey,
    TracedChange,
    find_by_key,
    find_change,
    read_any_cursor,
)
from cdc.trace.matching import left_out_by
from tests import pgoutput
from tests.wire_messages import transaction
from tests.written_log import write

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
PAIR = pgoutput.relation(2, "shop", "pair", [("a", 25, True), ("b", 25, True)])


@pytest.fixture
def log(tmp_path: Path) -> LogView:
    inserts = [pgoutput.insert(1, [str(n), f"n{n}"]) for n in range(5)]
    write(
        tmp_path,
        [ITEM, *transaction(0x100, *inserts)],
        [PAIR, *transaction(0x200, pgoutput.insert(2, ["x/y", "42"]))],
        transaction(0x300, pgoutput.insert(1, ["42", "other"])),
        transaction(0x400, pgoutput.update(1, ["42", "again"])),
    )
    return LogView(tmp_path)


def test_a_change_is_found_by_its_cursor_with_its_times(log: LogView) -> None:
    before_us = time.time_ns() // 1000 - 60_000_000
    with closing(log):
        found = find_change(log, Cursor(0x100, 3))
    assert isinstance(found, TracedChange)
    assert (found.table, found.action, found.cursor) == ("public.item", "insert", Cursor(0x100, 3))
    assert found.payload["record"] == '{"id":3,"name":"n3"}'
    assert found.logged_us > before_us


@pytest.mark.parametrize(
    ("cursor", "why"),
    [
        (Cursor(0x100, 9), Missing.NEVER),
        (Cursor(0x180, 0), Missing.NEVER),
        (Cursor(0x900, 0), Missing.NOT_YET),
        (Cursor(0x101, 0), Missing.READ),
    ],
)
def test_a_change_that_is_not_there_is_said_to_be_so_and_why(
    log: LogView, cursor: Cursor, why: Missing
) -> None:
    with closing(log):
        found = find_change(log, cursor)
    assert isinstance(found, NotFound)
    assert found.why is why


def test_the_changes_of_a_row_come_the_latest_first(log: LogView) -> None:
    key = RowKey.parse("public.item/42")
    with closing(log):
        found = list(find_by_key(log, key, 10))
        assert [(each.cursor.lsn, each.action) for each in found] == [
            (0x400, "update"),
            (0x300, "insert"),
        ]
        assert [each.cursor.lsn for each in find_by_key(log, key, 1)] == [0x400]
        since = Cursor(0x400, 0)
        assert [each.cursor.lsn for each in find_by_key(log, key, 10, since)] == [0x400]


def test_a_key_of_several_columns_with_a_slash_in_it_is_found(log: LogView) -> None:
    with closing(log):
        (found,) = find_by_key(log, RowKey.parse("shop.pair/x%2Fy/42"), 10)
    assert found.cursor.lsn == 0x200


@pytest.mark.parametrize("text", ["public.item", "public.item/", "/42", "a.b.c/1"])
def test_what_names_no_row_is_refused_with_how_to_write_it(text: str) -> None:
    with pytest.raises(OperatorError, match="write it as"):
        RowKey.parse(text)


@pytest.mark.parametrize("text", ["16/B374D848:3", "97500059720:3"])
def test_a_cursor_is_read_in_both_spellings(text: str) -> None:
    assert read_any_cursor(text) == Cursor(0x16B374D848, 3)


@pytest.mark.parametrize("text", ["", "16/B374D848", "x:3", "12:x", "1/x:2"])
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(OperatorError, match="write it as"):
        read_any_cursor(text)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, None),
        ({"status": "disabled"}, "status: it is disabled"),
        ({"actions": ["delete"]}, "actions: insert is not among delete"),
        (
            {"source": {"include_schemas": ["shop"]}},
            "source.include_schemas: public is not in it",
        ),
        ({"source": {"exclude_schemas": ["public"]}}, "source.exclude_schemas: public is in it"),
        (
            {"source": {"include_tables": ["public.other"]}},
            "source.include_tables: public.item is not in it",
        ),
        (
            {"source": {"exclude_tables": ["public.item"]}},
            "source.exclude_tables: public.item is in it",
        ),
    ],
)
def test_the_rule_that_leaves_a_change_out_is_named(
    log: LogView, given: dict[str, object], rule: str | None
) -> None:
    with closing(log):
        change = find_change(log, Cursor(0x100, 0))
    assert isinstance(change, TracedChange)
    sink = SinkConfig.model_validate(
        {
            "name": "s",
            "database": "shop",
            "destination": {"type": "webhook", "url": "http://127.0.0.1/"},
            **given,
        }
    )
    assert left_out_by(sink, change) == rule

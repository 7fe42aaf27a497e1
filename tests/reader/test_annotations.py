"""Transaction annotations as clients write them, through the reader into the log and beyond."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest
from structlog.testing import capture_logs

from cdc.decoding import decode_changes
from cdc.decoding.annotations import annotations_of
from cdc.decoding.shapes import Context, shape_for
from cdc.replication.spill.spilled_transaction import BatchLimits
from tests.fix_postgres import Database, on_both_versions
from tests.slot_source import SlotSource, make_slot_source
from tests.unit.replication.annotated import CLEAR, SET

pytestmark = [pytest.mark.migrated, on_both_versions]

Client = psycopg.Connection[tuple[object, ...]]


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> SlotSource:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    return make_slot_source(database, tmp_path / "log")


def insert(client: Client, *ids: int) -> None:
    for number in ids:
        client.execute("INSERT INTO item VALUES (%s, 'x')", [number])


def emit(client: Client, prefix: str, content: str | bytes, *, transactional: bool = True) -> None:
    client.execute("SELECT pg_logical_emit_message(%s, %s, %s)", [transactional, prefix, content])


def by_number(shop: SlotSource) -> dict[int, str]:
    """By the number in its transaction, what a change carries; for logs of one transaction."""
    return {cursor.idx: text for cursor, text in shop.annotations().items()}


def test_the_changes_behind_an_annotation_carry_it_to_the_message(shop: SlotSource) -> None:
    with shop.reading(), shop.database.connect() as client:
        with client.transaction():
            insert(client, 1)
            emit(client, SET, '{"user": "ann"}')
            insert(client, 2, 3)
            emit(client, CLEAR, "")
            insert(client, 4)
        insert(client, 5)
        found = shop.until_logged(7)
    assert [(c.idx, kind) for c, kind in found] == [
        (0, "I"), (1, "M"), (2, "I"), (3, "I"), (4, "M"), (5, "I"), (0, "I"),
    ]  # fmt: skip
    lsn = found[0][0].lsn
    assert shop.annotations() == {found[2][0]: '{"user": "ann"}', found[3][0]: '{"user": "ann"}'}
    said = []
    for frame in shop.view.frames(0, shop.view.next_batch()):
        column = annotations_of(frame.annotations, frame.raw.num_rows)
        changes = decode_changes(frame.raw, frame.schemas, annotations=column)
        shape = shape_for("sequin", Context("c", "d", "h", "d", now_ns=0))
        for metadata in map(json.loads, shape.rows(changes).column("metadata").to_pylist()):
            said.append((metadata["commit_lsn"] == lsn, metadata["transaction_annotations"]))
    ann = {"user": "ann"}
    assert said == [*((True, text) for text in (None, None, ann, ann, None, None)), (False, None)]


def test_the_prefixes_of_sequin_mean_the_same(shop: SlotSource) -> None:
    with shop.reading(), shop.database.connect() as client:
        with client.transaction():
            emit(client, "sequin:transaction_annotations.set", "[1]")
            insert(client, 1)
            emit(client, "sequin:transaction_annotations.clear", "")
            insert(client, 2)
        shop.until_logged(4)
    assert by_number(shop) == {2: "[1]"}


@pytest.mark.parametrize(
    "content", ["{secret", b'"secret \xff"', '"' + "secret" * 11_000 + '"'],
    ids=["not_json", "not_utf8", "too_long"],
)  # fmt: skip
def test_a_message_that_is_no_annotation_is_one_warning_without_its_content_and_the_stream_goes_on(
    shop: SlotSource, content: str | bytes
) -> None:
    with capture_logs() as logged, shop.reading(), shop.database.connect() as client:
        with client.transaction():
            emit(client, SET, "1")
            insert(client, 1)
            emit(client, SET, content)
            insert(client, 2)
            emit(client, SET, "3")
            insert(client, 3)
        found = shop.until_logged(6)
        insert(client, 4)
        shop.until_logged(7)
    assert by_number(shop) == {2: "1", 6: "3"}
    (warning,) = (line for line in logged if line["event"] == "reader.annotation_refused")
    assert warning["log_level"] == "warning"
    assert warning["cursor"] == str(found[2][0])
    assert "secret" not in str(logged)


def test_an_emit_outside_of_the_transaction_annotates_nothing(shop: SlotSource) -> None:
    with shop.reading(), shop.database.connect() as client:
        with client.transaction():
            insert(client, 1)
            emit(client, SET, "1", transactional=False)
            insert(client, 2)
        found = shop.until_logged(3)
    assert sorted(kind for _, kind in found) == ["I", "I", "M"]
    assert shop.annotations() == {}


def test_an_annotation_of_a_rolled_back_savepoint_does_not_count(shop: SlotSource) -> None:
    with shop.reading(), shop.database.connect() as client:
        with client.transaction():
            emit(client, SET, "1")
            with client.transaction(force_rollback=True):
                emit(client, SET, "2")
                insert(client, 1)
            insert(client, 2)
            with client.transaction():
                emit(client, SET, "3")
                insert(client, 3)
            insert(client, 4)
        shop.until_logged(5)
    assert by_number(shop) == {2: "1", 4: "3", 5: "3"}


def test_a_restart_inside_an_annotated_transaction_keeps_the_annotation(shop: SlotSource) -> None:
    with shop.reading(batch=BatchLimits(rows=100)), shop.database.connect() as client:
        with client.transaction():
            insert(client, 0)
            emit(client, SET, '{"user": "ann"}')
            client.execute("INSERT INTO item SELECT i, 'x' FROM generate_series(1, 5000) i")
        shop.until_logged(100)
    partly = len(shop.messages())
    with shop.reading():
        shop.until_logged(5002)
    assert by_number(shop) == dict.fromkeys(range(2, 5002), '{"user": "ann"}'), (
        f"stopped after {partly}"
    )

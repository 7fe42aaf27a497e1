"""Tables that change: each schema change is delivered once, in its place, whoever dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cdc.cursor import Cursor, idle_place
from cdc.errors import TransientError
from cdc.state.positions import consumer_cursors, settle
from cdc.state.schema_versions import record_versions
from tests import pgoutput
from tests.fix_postgres import Database
from tests.log_pipeline import LogPipeline, arrived, cursors_of
from tests.schema_version_rows import ASKS, ID, PART, V1, V2, new, old, part
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

V3 = pgoutput.relation(1, "public", "item", [ID, ("b", 25)])
V4 = pgoutput.relation(1, "public", "thing", [ID, ("b", 25)])
VERSIONS = """
SELECT version, since_lsn::text, since_idx, announced_lsn::text, announced_idx
  FROM walbrook.schema_versions WHERE relation = 1 ORDER BY version
"""


# Versions begin at a transaction's first row, behind rows of another table, and of their own.
STREAM = [
    *(V1, PART, *transaction(0x100, part(), old(1))),
    *transaction(0x200, V2, new(2), part()),
    *transaction(0x300, part(), part(), V3, new(3), new(4)),
    *transaction(0x400, new(5), V4, new(6), part()),
    *transaction(0x500, part(), new(7)),
]
ROWS = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture
def pipeline_of(database: Database, tmp_path: Path) -> Iterator[Callable[..., LogPipeline]]:
    """Pipelines on one state database, one after another, each with nothing known."""
    made: list[LogPipeline] = []
    with database.connect() as state:

        def make(**sinks: dict[str, object]) -> LogPipeline:
            if made:
                made[-1].close()
                state.execute("DELETE FROM walbrook.sources")
            made.append(LogPipeline(state, tmp_path / str(len(made)), **sinks))
            return made[-1]

        yield make
    for pipeline in made[-1:]:
        pipeline.close()


def in_batches(pipeline: LogPipeline, messages: list[bytes], *cuts: int) -> None:
    for start, end in pairwise([0, *cuts, len(messages)]):
        pipeline.write_if_any(*messages[start:end])


def run(pipeline: LogPipeline, size: int) -> None:
    while pipeline.next_batch < pipeline.log.next_batch:
        pipeline.take(size)


def check(messages: list[dict[str, Any]]) -> None:
    """Every row and every change once, in order, each change between the right rows."""
    cursors = cursors_of(messages)
    assert all(one < other for one, other in pairwise(cursors)), cursors
    items = [m for m in messages if m["metadata"]["table_name"] != "part"]
    rows = [m for m in items if m["action"] == "insert"]
    assert [row["record"]["id"] for row in rows] == ROWS
    changes = [(m["record"]["version"], at) for at, m in enumerate(items) if m not in rows]
    assert [version for version, _ in changes] == [2, 3, 4]
    followed_by = {version: items[at + 1]["record"]["id"] for version, at in changes}
    assert followed_by == {2: 2, 3: 3, 4: 6}, "each stands directly before its first row"


def test_each_schema_change_stands_directly_before_the_first_row_of_its_version(
    pipeline_of: Callable[..., LogPipeline],
) -> None:
    pipeline = pipeline_of(all=ASKS, rows={"actions": ["insert"]}, parts={
        **ASKS, "source": {"include_tables": ["public.part"]},
    })  # fmt: skip
    in_batches(pipeline, STREAM)
    pipeline.idle(0x600)
    pipeline.take()
    messages = arrived(pipeline.directory / "all")
    check(messages)
    changes = [m for m in messages if m["action"] == "schema_change"]
    assert cursors_of(changes) == [Cursor(0x1FF, 1), Cursor(0x300, 2), Cursor(0x400, 1)]
    added, renamed, moved = (m["record"] for m in changes)
    assert added["added"] == [{"name": "a", "type": "text"}]
    assert renamed["renamed"] == [{"from": "a", "to": "b"}]
    assert moved["renamed_table"]["to"] == {"schema": "public", "name": "thing"}
    assert [m["metadata"]["table_name"] for m in changes] == ["item", "item", "thing"]
    assert [m["changes"] for m in changes] == [None] * 3
    assert [m["metadata"]["record_pks"] for m in changes] == [[]] * 3
    for other in ("rows", "parts"):
        actions = {m["action"] for m in arrived(pipeline.directory / other)}
        assert actions == {"insert"}


def test_every_version_is_a_row(pipeline_of: Callable[..., LogPipeline]) -> None:
    pipeline = pipeline_of(all={})
    in_batches(pipeline, STREAM)
    pipeline.take()
    assert pipeline.rows(VERSIONS) == [
        (1, "0/100", 2, None, None),
        (2, "0/200", 0, "0/1FF", 1),
        (3, "0/300", 3, "0/300", 2),
        (4, "0/400", 2, "0/400", 1),
    ]
    ((name, columns, key, identity, change, schema),) = pipeline.rows(
        "SELECT table_name, columns, key, replica_identity, change, schema "
        "FROM walbrook.schema_versions WHERE relation = 1 AND version = 3"
    )
    assert (name, key, identity, schema) == ("item", ["id"], "default", V3)
    assert columns == [
        {"name": "id", "type": "integer", "key": True},
        {"name": "b", "type": "text", "key": False},
    ]
    assert change["version"] == 3
    assert pipeline.rows("SELECT count(*) FROM walbrook.schema_versions WHERE relation = 2") == [
        (1,)
    ]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.chaos), 100])
def test_the_log_may_be_cut_anywhere(pipeline_of: Callable[..., LogPipeline], size: int) -> None:
    for cut in range(1, len(STREAM)):
        pipeline = pipeline_of(all=ASKS)
        in_batches(pipeline, STREAM, cut)
        pipeline.idle(0x600)
        run(pipeline, size)
        check(arrived(pipeline.directory / "all"))


@pytest.mark.parametrize(
    "dies_at", [1, *(pytest.param(step, marks=pytest.mark.chaos) for step in (2, 3)), 4]
)
def test_a_process_that_dies_before_settling_delivers_nothing_twice(
    pipeline_of: Callable[..., LogPipeline], monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    for cut in range(1, len(STREAM) - 4, 2):
        pipeline = pipeline_of(all=ASKS, other=ASKS)
        in_batches(pipeline, STREAM, cut, cut + 4)
        pipeline.idle(0x600)
        calls = iter(range(1, 100))

        def dying(*arguments: Any, calls: Iterator[int] = calls, **named: Any) -> None:
            if next(calls) == dies_at:
                raise TransientError("died after delivery")
            settle(*arguments, **named)

        monkeypatch.setattr("spark_pipeline.workers.settler.settle", dying)
        # Whatever micro-batches the dead one took, the next one takes others.
        sizes = (1, 2) if cut % 4 == 1 else (2, 1)
        with suppress(TransientError):
            run(pipeline, sizes[0])
        pipeline.start()
        run(pipeline, sizes[1])
        for name in ("all", "other"):
            check(arrived(pipeline.directory / name))


def test_a_consumer_that_is_behind_gets_them_when_it_is_there(
    pipeline_of: Callable[..., LogPipeline],
) -> None:
    pipeline = pipeline_of(stuck=ASKS, free=ASKS)
    blocked = pipeline.directory / "stuck"
    blocked.write_text("a file where the sink wants a folder")
    in_batches(pipeline, STREAM, 10, 16)
    pipeline.idle(0x600)
    for _ in range(2):
        with pytest.raises(TransientError, match="consumer stuck"):
            pipeline.take()
        pipeline.start()
    check(arrived(pipeline.directory / "free"))
    blocked.unlink()
    run(pipeline, 1)
    check(arrived(blocked))
    assert len(pipeline.rows(VERSIONS)) == 4


def test_a_consumer_moved_back_gets_again_what_its_sink_absorbs(
    pipeline_of: Callable[..., LogPipeline],
) -> None:
    pipeline = pipeline_of(all=ASKS)
    in_batches(pipeline, STREAM, 9)
    pipeline.idle(0x600)
    run(pipeline, 1)
    before = arrived(pipeline.directory / "all")
    for lsn, idx in [
        ("0/1FF", 2),
        ("0/200", 0),
        ("0/300", 2),
        ("0/300", 3),
        ("0/400", 1),
        ("0/8", 0),
    ]:
        pipeline.state.execute(
            "UPDATE walbrook.consumers SET cursor_lsn = %s, cursor_idx = %s", (lsn, idx)
        )
        pipeline.start()
        run(pipeline, 1)
    assert arrived(pipeline.directory / "all") == before
    told = [m for m in before if m["action"] == "schema_change"]
    assert len(told) == 3
    assert len(pipeline.rows(VERSIONS)) == 4


def test_an_idle_position_hides_no_schema_change_before_a_transaction(
    pipeline_of: Callable[..., LogPipeline],
) -> None:
    pipeline = pipeline_of(all=ASKS)
    cut = STREAM.index(V2) - 1
    pipeline.write(*STREAM[:cut])
    pipeline.idle(0x200)
    run(pipeline, 1)
    assert consumer_cursors(pipeline.state, "shop") == {"all": idle_place(0x200)}
    pipeline.write(*STREAM[cut:])
    pipeline.idle(0x600)
    run(pipeline, 1)
    check(arrived(pipeline.directory / "all"))


def test_a_log_that_was_lost_and_read_again_in_other_batches_is_the_same(
    pipeline_of: Callable[..., LogPipeline],
) -> None:
    pipeline = pipeline_of(stuck=ASKS, ahead=ASKS)
    blocked = pipeline.directory / "stuck"
    blocked.write_text("a file where the sink wants a folder")
    cut = STREAM.index(V3)  # within a transaction, before the rows of the new version
    pipeline.write(*STREAM[:cut])
    with pytest.raises(TransientError, match="consumer stuck"):
        pipeline.take()
    assert consumer_cursors(pipeline.state, "shop")["ahead"] == Cursor(0x300, 2)
    blocked.unlink()
    pipeline.begin_log_anew()
    pipeline.write(*STREAM)
    pipeline.idle(0x600)
    pipeline.start()
    pipeline.take()
    for name in ("stuck", "ahead"):
        check(arrived(pipeline.directory / name))
    assert pipeline.rows(VERSIONS)[2] == (3, "0/300", 3, "0/300", 2)


def test_schema_changes_of_one_transaction_have_places_of_their_own(
    pipeline_of: Callable[..., LogPipeline],
) -> None:
    pipeline = pipeline_of(all=ASKS)
    wide = pgoutput.relation(2, "public", "part", [ID, ("w", 25)])
    pipeline.write(V1, PART, *transaction(0x100, part(), old(1)))
    pipeline.write(
        *transaction(0x200, V2, new(2), wide, pgoutput.insert(2, ["1", "w"]), V3, new(3))
    )
    pipeline.idle(0x300)
    pipeline.take()
    changes = [m for m in arrived(pipeline.directory / "all") if m["action"] == "schema_change"]
    assert cursors_of(changes) == [Cursor(0x1FF, 1), Cursor(0x200, 1), Cursor(0x200, 3)]
    tables = [(m["metadata"]["table_name"], m["record"]["version"]) for m in changes]
    assert tables == [("item", 2), ("part", 2), ("item", 3)]


def test_a_description_that_says_the_same_is_no_change(
    pipeline_of: Callable[..., LogPipeline],
) -> None:
    pipeline = pipeline_of(all=ASKS)
    same = pgoutput.relation(1, "public", "item", [ID]) + b"K" + bytes([0, 1, 0, 0])
    pipeline.write(V1, *transaction(0x100, old(1)))
    pipeline.write(*transaction(0x200, same, old(2)), *transaction(0x300, V1, old(3)))
    pipeline.idle(0x400)
    pipeline.take()
    assert [m["action"] for m in arrived(pipeline.directory / "all")] == ["insert"] * 3
    assert len(pipeline.rows(VERSIONS)) == 1


def test_a_start_that_was_replaced_records_none(pipeline_of: Callable[..., LogPipeline]) -> None:
    pipeline = pipeline_of(all=ASKS)
    pipeline.state.execute("UPDATE walbrook.sources SET term = term + 1")
    with pytest.raises(Exception, match="taken over"):
        pipeline.write(V1, *transaction(0x100, old(1)))
    assert pipeline.rows(VERSIONS) == []


def test_a_version_that_was_recorded_before_a_crash_is_written_from_its_record(
    pipeline_of: Callable[..., LogPipeline],
) -> None:
    pipeline = pipeline_of(all=ASKS)
    cut = STREAM.index(V3)
    pipeline.write(*STREAM[:cut])
    versions = pipeline.rows(VERSIONS)
    record_versions(
        pipeline.state,
        "shop",
        pipeline.settings.term,
        pipeline.seal_and_lose(*STREAM[cut:]).versions,
    )
    assert len(pipeline.rows(VERSIONS)) == len(versions) + 2
    pipeline.connect_again()
    pipeline.write(*STREAM)
    pipeline.idle(0x600)
    run(pipeline, 1)
    check(arrived(pipeline.directory / "all"))
    assert len(pipeline.rows(VERSIONS)) == len(versions) + 2

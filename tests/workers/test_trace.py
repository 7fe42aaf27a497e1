"""The trace of one change, for every consumer: what is said of it is what happened to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import psycopg
import pytest

from cdc.config import Config
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.state import operators
from cdc.state.traces import known_steps
from cdc.trace.change import Missing, NotFound, RowKey
from cdc.trace.conclusion import Conclusion, Filtering
from cdc.trace.story import ChangeTrace, ConsumerTrace
from cdc.trace.text import as_json, lines_of
from cdc.trace.tracer import Tracer
from tests import pgoutput
from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.log_pipeline import LogPipeline
from tests.waiting import until
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
SECRET = "canary-7f3a"


class TracedLane:
    """A pipeline with a webhook and a file, and what a tracer says of it."""

    def __init__(self, pipeline: LogPipeline, directory: Path) -> None:
        self.pipeline = pipeline
        (directory / "shop").symlink_to(directory / "log")
        config = Config.model_validate(
            {
                "databases": [
                    {"name": "shop", "database": "shop", "slot": {"name": "s"},
                     "publication": {"name": "p"}}
                ],
                "log": {"directory": directory},
            }
        )  # fmt: skip
        self.config = config.model_copy(update={"sinks": pipeline.sinks})

    def trace(self, lsn: int, idx: int = 0, **filters: Filtering) -> ChangeTrace:
        return Tracer(self.config).trace(self.pipeline.state, "shop", Cursor(lsn, idx), filters)

    def of(self, consumer: str, lsn: int, idx: int = 0) -> ConsumerTrace:
        (found,) = [c for c in self.trace(lsn, idx).consumers if c.consumer == consumer]
        return found

    def conclusions(self, lsn: int, idx: int = 0) -> dict[str, Conclusion]:
        return {each.consumer: each.conclusion for each in self.trace(lsn, idx).consumers}


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    with database.connect() as connection:
        yield connection


@pytest.fixture
def traced_of(
    state: Connection, endpoint: Endpoint, tmp_path: Path
) -> Iterator[Callable[..., TracedLane]]:
    pipelines: list[LogPipeline] = []

    def make(**given: Any) -> TracedLane:
        hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0}
        quick = {"first_ms": 1, "max_ms": 10}
        sinks = {
            "hook": {"destination": hook, "retry": quick, **given},
            "lines": {"actions": ["insert"], "source": {"exclude_tables": ["public.other"]}},
        }
        pipelines.append(LogPipeline(state, tmp_path, **sinks))
        return TracedLane(pipelines[-1], tmp_path)

    yield make
    for pipeline in pipelines:
        pipeline.close()


def insert(number: int, *rows: tuple[int, str]) -> list[bytes]:
    changes = (pgoutput.insert(1, [str(id), name]) for id, name in rows)
    return [ITEM, *transaction(0x100 * number, *changes)]


def refuse(endpoint: Endpoint, *refused: str) -> None:
    endpoint.refuses = lambda messages: any(m["record"]["name"] in refused for m in messages)  # type: ignore[index]


def answers(endpoint: Endpoint) -> str:
    """The place that an error names: not the whole URL, which may hold a secret."""
    return urlsplit(endpoint.url).netloc


def texts(found: ConsumerTrace) -> str:
    return "\n".join(step.what for step in found.steps)


def test_a_delivered_change_is_followed_from_its_commit_until_it_is_settled(
    traced_of: Callable[..., TracedLane],
) -> None:
    traced = traced_of()
    traced.pipeline.write(*insert(1, (1, "a"), (2, "b")))
    traced.pipeline.take()
    found = traced.trace(0x100, 1)
    committed, logged, *_ = found.steps
    assert committed.what.startswith("committed by transaction")
    assert logged.what == "read and logged in batch 0"
    assert {each.consumer: each.conclusion for each in found.consumers} == {
        "hook": Conclusion.DELIVERED,
        "lines": Conclusion.DELIVERED,
    }
    hook = traced.of("hook", 0x100, 1)
    assert [step.what.split(" in ")[0] for step in hook.steps] == [
        "decoded",
        "sent",
        "settled",
        "settled: its cursor is beyond it (0/101:0)",
    ]
    times = [step.at for step in [logged, *hook.steps] if step.at is not None]
    assert times == sorted(times)
    assert "2 delivered" in texts(hook)


def test_a_change_that_nobody_has_read_yet_is_not_delivered_yet(
    traced_of: Callable[..., TracedLane],
) -> None:
    traced = traced_of()
    traced.pipeline.write(*insert(1, (1, "a")))
    assert traced.conclusions(0x100) == {"hook": Conclusion.NOT_YET, "lines": Conclusion.NOT_YET}
    assert "it stands at" in traced.of("hook", 0x100).why


def test_the_rule_that_leaves_a_change_out_is_named(traced_of: Callable[..., TracedLane]) -> None:
    traced = traced_of(source={"include_tables": ["public.other"]})
    update = pgoutput.update(1, ["1", "b"])
    traced.pipeline.write(ITEM, *transaction(0x100, update))
    traced.pipeline.take()
    assert traced.of("hook", 0x100).why == "source.include_tables: public.item is not in it"
    assert traced.of("lines", 0x100).why == "actions: update is not among insert"
    assert set(traced.conclusions(0x100).values()) == {Conclusion.LEFT_OUT}


def test_a_change_of_a_renamed_table_that_a_sink_follows_is_not_taken_for_left_out(
    traced_of: Callable[..., TracedLane],
) -> None:
    traced = traced_of(source={"include_tables": ["public.item"]})
    traced.pipeline.write(*insert(1, (1, "a")))
    goods = pgoutput.relation(1, "public", "goods", [("id", 23, True), ("name", 25)])
    traced.pipeline.write(goods, *transaction(0x200, pgoutput.insert(1, ["2", "b"])))
    traced.pipeline.take()
    assert traced.conclusions(0x200)["hook"] is Conclusion.DELIVERED


def test_each_refusal_of_a_message_is_shown_with_its_answer_until_it_is_delivered(
    traced_of: Callable[..., TracedLane], endpoint: Endpoint
) -> None:
    traced = traced_of()
    refuse(endpoint, "a1")
    traced.pipeline.write(*insert(1, (1, "a1"), (2, "b"), (1, "a2")))
    traced.pipeline.take()
    assert traced.conclusions(0x100, 0)["hook"] is Conclusion.WAITS
    assert traced.conclusions(0x100, 1)["hook"] is Conclusion.DELIVERED
    assert traced.conclusions(0x100, 2)["hook"] is Conclusion.WAITS
    behind = traced.of("hook", 0x100, 2)
    assert "it waits behind an earlier message of its group" in texts(behind)
    until("a second refusal", lambda: [*traced.pipeline.deliver_due()])
    refused = traced.of("hook", 0x100, 0)
    for time in ("1st", "2nd"):
        assert f"refused, the {time} time: {answers(endpoint)} answered 422" in texts(refused)
    endpoint.refuses = None
    until("an empty queue", lambda: traced.pipeline.deliver_due() and not _waits(traced), 30)
    for idx in (0, 2):
        found = traced.of("hook", 0x100, idx)
        assert found.conclusion is Conclusion.DELIVERED
        assert "tried again from the retry queue: delivered" in texts(found)
    assert "refused, the 2nd time" in texts(traced.of("hook", 0x100, 0))


def _waits(traced: TracedLane) -> bool:
    return bool(traced.pipeline.rows("SELECT FROM walbrook.events"))


def test_a_dead_letter_is_followed_through_its_redelivery_and_its_discard(
    traced_of: Callable[..., TracedLane], endpoint: Endpoint
) -> None:
    traced = traced_of(max_deliveries=2)
    refuse(endpoint, "a", "b")
    traced.pipeline.write(*insert(1, (1, "a"), (2, "b")))
    traced.pipeline.take()
    until("dead letters", lambda: traced.pipeline.deliver_due() and _dead(traced) == 2, 30)
    for idx in (0, 1):
        found = traced.of("hook", 0x100, idx)
        assert found.conclusion is Conclusion.DEAD
        assert "a dead letter: delivery" in texts(found)
        assert texts(found).count("refused, the 2nd time") >= 1
    endpoint.refuses = None
    ((first,), (second,)) = traced.pipeline.rows(
        "SELECT id FROM walbrook.dead_letters ORDER BY commit_idx"
    )
    operators.redeliver(traced.pipeline.state, "hook", int(str(first)))
    operators.discard(traced.pipeline.state, "hook", int(str(second)))
    assert traced.conclusions(0x100, 0)["hook"] is Conclusion.WAITS
    until("the redelivery", lambda: traced.pipeline.deliver_due() and not _waits(traced), 30)
    assert traced.conclusions(0x100, 0)["hook"] is Conclusion.DELIVERED
    assert traced.conclusions(0x100, 1)["hook"] is Conclusion.DISCARDED


def _dead(traced: TracedLane) -> int:
    ((count,),) = traced.pipeline.rows("SELECT count(*) FROM walbrook.dead_letters")
    return int(str(count))


def test_attempts_that_fail_as_a_whole_are_shown_with_what_the_destination_answered(
    traced_of: Callable[..., TracedLane], endpoint: Endpoint
) -> None:
    traced = traced_of()
    endpoint.script.extend([Scripted(503), Scripted(503)])
    traced.pipeline.write(*insert(1, (1, "a")))
    for _ in range(2):
        with pytest.raises(Exception, match="503"):
            traced.pipeline.take()
        traced.pipeline.begin_again()
    failed = traced.of("hook", 0x100)
    assert failed.conclusion is Conclusion.NOT_YET
    assert texts(failed).count("an attempt ended before it") == 2
    assert f"{answers(endpoint)} answered 503" in texts(failed)
    traced.pipeline.take()
    arrived = traced.of("hook", 0x100)
    assert arrived.conclusion is Conclusion.DELIVERED
    assert texts(arrived).count("answered 503") == 2


def test_a_delivery_that_a_kill_left_unsettled_is_told_from_the_one_that_counts(
    traced_of: Callable[..., TracedLane], endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = traced_of()
    traced.pipeline.write(*insert(1, (1, "a")))

    def killed(*_: object, **__: object) -> None:
        raise psycopg.OperationalError("the process is killed")

    monkeypatch.setattr("spark_pipeline.workers.settler.settle", killed)
    traced.pipeline.take()
    assert len(endpoint.accepted) == 1
    found = traced.of("hook", 0x100)
    assert found.conclusion is Conclusion.COMES_AGAIN
    assert "its settlement was not confirmed to the process" in texts(found)
    monkeypatch.undo()
    traced.pipeline.start()
    traced.pipeline.take()
    again = traced.of("hook", 0x100)
    assert again.conclusion is Conclusion.DELIVERED
    assert texts(again).count("sent in a stretch of 1 change") == 2
    assert texts(again).count("settled\n") == 1


def test_what_was_given_up_or_came_before_a_consumer_began_is_said_to_be_so(
    traced_of: Callable[..., TracedLane],
) -> None:
    traced = traced_of()
    traced.pipeline.write(*insert(1, (1, "a")))
    traced.pipeline.take()
    traced.pipeline.write(*insert(2, (2, "b")))
    state = traced.pipeline.state
    state.execute("UPDATE walbrook.sources SET log_lsn = '0/201', log_idx = 0")
    operators.discard_all(state, "hook")
    given_up = traced.of("hook", 0x200)
    assert given_up.conclusion is Conclusion.GIVEN_UP
    assert "given up: discarded" in texts(given_up)
    state.execute(
        "INSERT INTO walbrook.consumers (source, name, cursor_lsn, begun_lsn, begun_idx) "
        "VALUES ('shop', 'late', '0/300', '0/300', 0)"
    )
    late = traced.of("late", 0x200)
    assert late.conclusion is Conclusion.BEGAN_LATER
    assert late.notes == ["the configuration does not name it any more"]


def test_a_rewound_consumer_gets_a_change_again_and_the_trace_says_so(
    traced_of: Callable[..., TracedLane],
) -> None:
    traced = traced_of()
    traced.pipeline.write(*insert(1, (1, "a")))
    traced.pipeline.take()
    operators.rewind(traced.pipeline.state, "hook", to_earliest=True)
    assert traced.of("hook", 0x100).conclusion is Conclusion.COMES_AGAIN
    traced.pipeline.start_pipeline_again()
    traced.pipeline.take()
    again = traced.of("hook", 0x100)
    assert again.conclusion is Conclusion.DELIVERED
    assert texts(again).count("1 delivered") == 2


def test_a_filter_is_not_guessed_at(traced_of: Callable[..., TracedLane]) -> None:
    traced = traced_of()
    traced.pipeline.write(*insert(1, (1, "a")))
    traced.pipeline.take()
    sinks = [
        sink.model_copy(update={"filter": "record.id > 1"} if sink.name == "hook" else {})
        for sink in traced.config.sinks
    ]
    traced.config = traced.config.model_copy(update={"sinks": sinks})
    found = traced.of("hook", 0x100)
    assert found.conclusion is Conclusion.DELIVERED_OR_LEFT_OUT
    assert found.why == "filter: not evaluated (needs --evaluate)"
    (evaluated,) = [
        each
        for each in traced.trace(0x100, hook=Filtering.KEEPS_BACK).consumers
        if each.consumer == "hook"
    ]
    assert (evaluated.conclusion, evaluated.why) == (
        Conclusion.FILTERED,
        "its filter keeps it back",
    )


def test_a_row_is_found_by_its_key_and_its_values_are_shown_only_if_they_are_asked_for(
    traced_of: Callable[..., TracedLane], endpoint: Endpoint
) -> None:
    traced = traced_of()
    endpoint.script.append(Scripted(422, body=SECRET.encode()))
    traced.pipeline.write(*insert(1, (41, "other"), (42, SECRET)))
    traced.pipeline.take()
    tracer = Tracer(traced.config)
    (change,) = tracer.changes_of("shop", RowKey.parse("item/42"), 5)
    assert change.cursor == Cursor(0x100, 1)
    found = traced.trace(0x100, 1)
    plain = "\n".join(lines_of(found)) + orjson.dumps(as_json(found)).decode()
    known = known_steps(traced.pipeline.state, "shop", str(change.cursor))
    assert SECRET not in plain + str(known)
    assert SECRET in "\n".join(lines_of(found, payload=True))
    assert SECRET in orjson.dumps(as_json(found, payload=True)).decode()
    records = (traced.pipeline.directory / "log" / "deliveries").iterdir()
    assert all(SECRET.encode() not in file.read_bytes() for file in records)


def test_what_the_log_does_not_have_is_judged_by_what_is_left(
    traced_of: Callable[..., TracedLane],
) -> None:
    traced = traced_of()
    traced.pipeline.write(*insert(1, (1, "a")))
    traced.pipeline.take()
    traced.pipeline.log.restart_at(Cursor(0x150, 0))
    found = traced.trace(0x100)
    assert isinstance(found.missing, NotFound)
    assert found.missing.why is Missing.LET_GO
    assert set(traced.conclusions(0x100).values()) == {Conclusion.DELIVERED_OR_LEFT_OUT}
    assert "0/100:0  the log has let it go" in "\n".join(lines_of(found))


def test_a_cursor_that_no_change_has_is_not_said_to_be_delivered(
    traced_of: Callable[..., TracedLane],
) -> None:
    traced = traced_of()
    traced.pipeline.write(*insert(1, (1, "a")))
    traced.pipeline.take()
    found = traced.trace(0x100, 7)
    assert found.consumers == []
    assert found.missing is not None
    assert found.missing.why is Missing.NEVER


def test_sql_alone_says_who_has_a_change_and_who_has_not(
    traced_of: Callable[..., TracedLane], endpoint: Endpoint
) -> None:
    traced = traced_of()
    refuse(endpoint, "a")
    traced.pipeline.write(*insert(1, (1, "a")))
    traced.pipeline.take()
    found = traced.pipeline.rows(
        "SELECT consumer, step, what FROM walbrook.trace('shop', '0/100:0')"
    )
    assert found == [
        ("hook", "waits", "it waits to be tried again; refusals: 1"),
        ("hook", "cursor", "settled: its cursor is beyond it"),
        ("lines", "cursor", "settled: its cursor is beyond it"),
    ]
    with pytest.raises(psycopg.errors.NoDataFound, match="there is no source other"):
        traced.pipeline.rows("SELECT walbrook.trace('other', '0/100:0')")


def test_a_message_keeps_the_times_and_answers_of_its_last_ten_attempts(
    traced_of: Callable[..., TracedLane], endpoint: Endpoint
) -> None:
    traced = traced_of(max_deliveries=50)
    refuse(endpoint, "a")
    traced.pipeline.write(*insert(1, (1, "a")))
    traced.pipeline.take()

    def tried() -> bool:
        traced.pipeline.deliver_due()
        return traced.pipeline.rows("SELECT deliveries >= 13 FROM walbrook.events")[0][0] is True

    until("thirteen deliveries", tried, 60)
    ((attempts,),) = traced.pipeline.rows("SELECT attempts FROM walbrook.events")
    assert [each["deliveries"] for each in attempts] == list(range(4, 14))
    assert {each["answer"] for each in attempts} == {f"{answers(endpoint)} answered 422"}

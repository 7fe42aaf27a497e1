"""A refusal and a dead letter leave a log line: bounded in number, without a value of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from cdc.cursor import Cursor
from spark_pipeline.delivery.deliver import Origin
from spark_pipeline.delivery.outcome import Outcome, Poison
from spark_pipeline.delivery.refusal_log import RefusalLog
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.workers.retries import RetryQueue
from tests.unit.spark.refusals import refused
from tests.unit.spark.sending import consumer


def lines(log: RefusalLog, *outcomes: Outcome) -> list[dict[str, Any]]:
    with capture_logs() as logs:
        for outcome in outcomes:
            log.note(outcome)
    return [dict(line) for line in logs]


def test_a_refusal_names_its_table_and_cursor_and_how_many_there_were() -> None:
    (line,) = lines(RefusalLog(), refused(1, 2, 1))
    assert line == {
        "event": "queue.refused",
        "log_level": "warning",
        "consumer": "hook",
        "messages": 2,  # the third waits behind the first
        "cursor": "0/8:1",
        "table": "public.t",
        "kind": "poison",
        "deliveries": 1,
    }


def test_a_delivery_that_becomes_a_dead_letter_has_a_line() -> None:
    (line,) = lines(RefusalLog(), refused(1, 2, max_deliveries=1))
    assert (line["event"], line["messages"], line["table"]) == ("queue.dead_letter", 2, "public.t")
    dead = Outcome("hook", Cursor(8, 2), dead=(Poison(Cursor(8, 1), "the value was 42"),))
    (line,) = lines(RefusalLog(), dead)
    assert (line["event"], line["cursor"]) == ("queue.dead_letter", "0/8:1")
    assert "42" not in str(line)


def test_a_consumer_has_one_line_in_ten_seconds_which_counts_those_left_out() -> None:
    now = [100.0]
    log = RefusalLog(lambda: now[0])
    assert [line["messages"] for line in lines(log, *[refused(1, 2)] * 50)] == [2]
    now[0] += 11
    assert [line["messages"] for line in lines(log, refused(1))] == [99]
    assert lines(log, Outcome("hook", Cursor(8, 0))) == []


def test_settled_refusals_are_logged(tmp_path: Path) -> None:
    origin = Origin("shop", "h", "d")
    settings = StageSettings("shop", 1, origin, [], "", tmp_path, tmp_path, 1000, 1 << 20)
    retries = RetryQueue(consumer(), settings, "run", RefusalLog())
    with capture_logs() as logs:
        retries.settled(refused(1))
    assert [line["event"] for line in logs] == ["queue.refused"]

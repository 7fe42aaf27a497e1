"""The workers of a stage whose consumers are configured otherwise while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdc.config import FileDestination, SinkConfig
from spark_pipeline.eventtime.workers import EventTimeWorkers
from spark_pipeline.stage.stage_workers import StageWorkers
from tests import pgoutput
from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.log_pipeline import SOURCE, LogPipeline, arrived
from tests.waiting import until
from tests.wire_messages import transaction

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True)])

pytestmark = pytest.mark.migrated


@contextmanager
def staged(pipeline: LogPipeline) -> Iterator[StageWorkers]:
    """The workers of a pipeline, with a body and a settler in threads."""
    over = threading.Event()

    def start(name: str, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def follow_log() -> None:
        while not over.is_set():
            pipeline.body.take(None, 0)

    settler, body = start("settler", pipeline.settler.run), start("body", follow_log)
    workers = StageWorkers(SOURCE, EventTimeWorkers(), start)
    workers.make(pipeline.context, {}, {})
    workers.start({})
    try:
        yield workers
    finally:
        workers.end(pipeline.context)
        over.set()
        pipeline.context.ended.set()
        pipeline.feed.wake()
        pipeline.settler.close()
        for thread in (settler, body):
            thread.join(30)


def write(pipeline: LogPipeline, *ids: int) -> None:
    for id_ in ids:
        pipeline.write(ITEM, *transaction(0x100 * (id_ + 1), pgoutput.insert(1, [str(id_)])))


def rows(pipeline: LogPipeline, sink: str) -> list[int]:
    return [message["record"]["id"] for message in arrived(pipeline.directory / sink)]


def file_sink(pipeline: LogPipeline, name: str, **more: object) -> SinkConfig:
    path = pipeline.directory / name
    given = {"name": name, "database": SOURCE, "destination": FileDestination(path=path), **more}
    return SinkConfig.model_validate(given)


def register(pipeline: LogPipeline, *names: str) -> None:
    """As the supervisor does before the driver hears of other consumers."""
    for name in names:
        pipeline.state.execute(
            "INSERT INTO walbrook.consumers (source, name, cursor_lsn, cursor_idx) "
            "SELECT name, %s, restart_lsn, restart_idx FROM walbrook.sources "
            "ON CONFLICT DO NOTHING",
            (name,),
        )


def test_a_changed_sink_goes_on_behind_the_delivery_that_was_under_way(
    database: Database, endpoint: Endpoint, tmp_path: Path
) -> None:
    to = {"type": "webhook", "url": endpoint.url, "max_retries": 0, "timeout_ms": 60000}
    go_on = threading.Event()
    with database.connect() as state:
        pipeline = LogPipeline(state, tmp_path, hook={"destination": to}, files={})
        with staged(pipeline) as workers:
            before, other = workers.current["hook"], workers.current["files"]
            endpoint.script.append(Scripted(after=go_on))
            write(pipeline, 1)
            until("the request", lambda: len(endpoint.requests) == 1)
            changed = pipeline.sinks[0].model_copy(update={"batch_size": 7})
            settings = replace(pipeline.settings, consumers=[changed, pipeline.sinks[1]])
            assert workers.follow(settings) == []
            write(pipeline, 2)
            until("the other sink to go on", lambda: rows(pipeline, "files") == [1, 2])
            assert not workers.are_settled
            assert len(endpoint.requests) == 1, "two workers deliver to one sink"
            go_on.set()
            until("the second change", lambda: len(endpoint.accepted) == 2)
            until("the end of the first worker", lambda: workers.are_settled)
            assert workers.current["files"] is other
            assert workers.current["hook"] is not before
        got: list[Any] = [m for each in endpoint.accepted for m in each.messages]
        assert [m["record"]["id"] for m in got] == [1, 2], "lost, repeated or out of order"
        pipeline.close()


def test_a_sink_is_added_and_removed_while_another_goes_on(
    database: Database, tmp_path: Path
) -> None:
    with database.connect() as state:
        pipeline = LogPipeline(state, tmp_path, files={})
        with staged(pipeline) as workers:
            worker = workers.current["files"]
            write(pipeline, 1)
            until("the first", lambda: rows(pipeline, "files") == [1])
            register(pipeline, "more")
            both = [pipeline.sinks[0], file_sink(pipeline, "more")]
            assert workers.follow(replace(pipeline.settings, consumers=both)) == []
            write(pipeline, 2)
            until(
                "it at both",
                lambda: rows(pipeline, "more")[-1:] == rows(pipeline, "files")[-1:] == [2],
            )
            state.execute("UPDATE walbrook.consumers SET active = false WHERE name = 'more'")
            assert workers.follow(pipeline.settings) == ["more"]
            until("its end", lambda: workers.are_settled)
            write(pipeline, 3)
            until("the third", lambda: rows(pipeline, "files") == [1, 2, 3])
            assert rows(pipeline, "more")[-1] == 2
            assert workers.current == {"files": worker}
        pipeline.close()

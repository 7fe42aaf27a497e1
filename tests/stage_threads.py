"""The threads of a ``LogPipeline``, without Spark: body, workers, settler, status."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cdc.connection import connect
from spark_pipeline.stage.status import StatusWriter
from tests.log_pipeline import SOURCE, LogPipeline

_TICK_S = 0.02


@contextmanager
def running(pipeline: LogPipeline) -> Iterator[None]:
    """Run all parts until the end of the block, then settle what was delivered."""
    over = threading.Event()
    workers = [threading.Thread(target=worker.run) for worker in pipeline.workers.values()]
    settler = threading.Thread(target=pipeline.settler.run)
    others = [
        threading.Thread(target=run, args=(pipeline, over)) for run in (_run_body, _show_statuses)
    ]
    for thread in (settler, *others, *workers):
        thread.start()
    try:
        yield
    finally:
        over.set()
        pipeline.context.ended.set()
        for worker in pipeline.workers.values():
            worker.nudge()
        _join([*workers, *others])
        pipeline.settler.close()
        _join([settler])


def _run_body(pipeline: LogPipeline, over: threading.Event) -> None:
    while not over.is_set() and pipeline.body.failure is None:
        pipeline.body.take(None, 0)


def _show_statuses(pipeline: LogPipeline, over: threading.Event) -> None:
    writer = StatusWriter(SOURCE, pipeline.settings.term)
    with connect(pipeline.dsn, name="status") as state:
        while not over.wait(_TICK_S):
            statuses = {name: each.current.status() for name, each in pipeline.workers.items()}
            writer.show(state, statuses, (), {})


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()

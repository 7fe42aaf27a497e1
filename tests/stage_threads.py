"""The stage of a ``LogLane`` with its threads and without Spark: body, workers, settler, status."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cdc.connection import connect
from spark_pipeline.stage.status import StatusWriter
from tests.lane_on_log import SOURCE, LogLane

_TICK_S = 0.02


@contextmanager
def running(lane: LogLane) -> Iterator[None]:
    """Run all parts until the end of the block, then settle what was delivered."""
    over = threading.Event()
    workers = [threading.Thread(target=worker.run) for worker in lane.workers.values()]
    settler = threading.Thread(target=lane.settler.run)
    others = [
        threading.Thread(target=run, args=(lane, over)) for run in (_run_body, _show_statuses)
    ]
    for thread in (settler, *others, *workers):
        thread.start()
    try:
        yield
    finally:
        over.set()
        lane.context.ended.set()
        for worker in lane.workers.values():
            worker.nudge()
        _join([*workers, *others])
        lane.settler.close()
        _join([settler])


def _run_body(lane: LogLane, over: threading.Event) -> None:
    while not over.is_set() and lane.body.failure is None:
        lane.body.take(None, 0)


def _show_statuses(lane: LogLane, over: threading.Event) -> None:
    writer = StatusWriter(SOURCE, lane.settings.term)
    with connect(lane.dsn, name="status") as state:
        while not over.wait(_TICK_S):
            statuses = {name: each.current.status() for name, each in lane.workers.items()}
            writer.show(state, statuses, (), {})


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()

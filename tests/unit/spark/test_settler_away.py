"""The settler while the state database is away: what was reported is kept, and is bounded."""

from __future__ import annotations

import threading
from contextlib import closing
from datetime import UTC, datetime

import pytest

from cdc.connection_pool import ConnectionPool
from cdc.cursor import ORIGIN, Cursor
from cdc.state.feeds import FeedFigures
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.workers import settler as settler_module
from spark_pipeline.workers.settler import Report, Settler
from tests.waiting import until

_NOWHERE = "host=127.0.0.1 port=1 connect_timeout=1"


def _report(number: int) -> Report:
    return Report(Cursor(number, 0), Outcome("hook", Cursor(number + 1, 0), delivered=1), rows=1)


def test_a_worker_waits_once_its_oldest_report_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settler_module, "_UNSETTLED_S", 0.2)
    monkeypatch.setattr(settler_module, "_AWAY_S", 0.01)
    with closing(ConnectionPool(_NOWHERE, name="worker")) as pool:
        settler = Settler("shop", 1, 1, _NOWHERE, pool, lambda: FeedFigures(ORIGIN))
        reported: list[int] = []
        ended = threading.Event()

        def report() -> None:
            for number in range(10_000_000):
                if ended.is_set():
                    return
                settler.report("hook", _report(number))
                reported.append(number)

        threads = [threading.Thread(target=each) for each in (settler.run, report)]
        for thread in threads:
            thread.start()

        def waits() -> bool:
            before = len(reported)
            return settler.is_away and not ended.wait(0.5) and len(reported) == before

        try:
            until("the worker to wait", waits)
            assert settler.has_unsettled
        finally:
            ended.set()
            settler.close()
            for thread in threads:
                thread.join()


def test_the_commit_of_a_range_counts_though_a_part_without_one_was_reported_behind_it() -> None:
    committed_at = datetime(2026, 1, 2, tzinfo=UTC)
    whole = Report(Cursor(8, 0), Outcome("a", Cursor(17, 0)), 5, committed_at)
    step = Report(Cursor(17, 0), Outcome("a", Cursor(17, 100)), 100)  # rows that exist already
    assert step.after(whole).settlement().last_commit == committed_at

"""What a pipeline's tasks and its source's side must not do: share sinks wrongly, wait for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from cdc.config import FileDestination, SinkConfig
from cdc.cursor import Cursor
from cdc.errors import GapError, TransientError
from cdc.generation import Generation
from cdc.log.writer import LogWriter
from spark_pipeline.delivery import deliver
from spark_pipeline.delivery.deliver import Origin, Share
from spark_pipeline.source.stream import LogStreamReader
from tests.unit.log.batches import append


def share(source: str, run: str, directory: Path) -> Share:
    sink = SinkConfig(
        name="same", database=source, destination=FileDestination(path=directory / source)
    )
    cursor = Cursor(1, 0)
    return Share(sink, Origin(source, "", ""), run, cursor, cursor, [])


def test_sinks_of_two_sources_live_side_by_side_and_those_of_an_earlier_run_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver, "_open_sinks", {})
    shop, crm = (deliver.sink_of(share(name, "run 1", tmp_path)) for name in ("shop", "crm"))
    assert shop is not crm
    assert deliver.sink_of(share("shop", "run 1", tmp_path)) is shop
    assert deliver.sink_of(share("shop", "run 2", tmp_path)) is not shop
    assert {run for run, *_ in deliver._open_sinks.values()} == {"run 2"}


def test_a_sink_that_takes_long_to_close_holds_up_no_other_consumer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver, "_open_sinks", {})
    closing, go_on = threading.Event(), threading.Event()

    def close() -> None:
        closing.set()
        go_on.wait(60)

    shop, crm = (share(name, "process:1", tmp_path) for name in ("shop", "crm"))
    first = deliver.sink_of(shop)
    monkeypatch.setattr(first, "close", close)
    with ThreadPoolExecutor(2) as pool:
        rewound = pool.submit(deliver.sink_of, replace(shop, generation=Generation(2)))
        try:
            assert closing.wait(10)
            assert pool.submit(deliver.sink_of, crm).result(10)
            assert not rewound.done(), "two sinks of one destination are open"
        finally:
            go_on.set()
        assert rewound.result(10) is not first


def test_a_stage_that_has_ended_opens_no_sink_and_its_successor_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver, "_open_sinks", {})
    monkeypatch.setattr(deliver, "_ended", {})
    first = deliver.sink_of(share("shop", "process:1", tmp_path))
    other = deliver.sink_of(share("crm", "process:2", tmp_path))
    deliver.end_run("shop", "process:1")
    with pytest.raises(TransientError, match="has ended"):
        deliver.sink_of(share("shop", "process:1", tmp_path))
    assert deliver.sink_of(share("shop", "process:3", tmp_path)) is not first
    assert deliver.sink_of(share("crm", "process:2", tmp_path)) is other, "another source"
    assert deliver.sink_of(share("shop", "next process:1", tmp_path))


def test_a_worker_of_spark_that_has_seen_a_later_stage_delivers_for_no_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver, "_open_sinks", {})
    deliver.sink_of(share("shop", "process:2", tmp_path))
    with pytest.raises(TransientError, match="has ended"):
        deliver.sink_of(share("shop", "process:1", tmp_path))


def test_a_log_that_ends_before_the_streams_position_is_an_error_not_a_wait(
    tmp_path: Path,
) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    log.close()
    reader = LogStreamReader.in_process(tmp_path, tmp_path)
    history = log.manifest.history
    start = {"batch": 0, "history": history}
    assert reader.latestOffset(start, ReadMaxRows(10)) == {"batch": 1, "history": history}
    with pytest.raises(GapError, match="ends at batch 1, before batch 5"):
        reader.latestOffset({"batch": 5, "history": history}, ReadMaxRows(10))


def test_an_offset_of_another_history_of_the_log_is_refused(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    append(log, 10)
    start = {"batch": 1, "history": log.manifest.history}
    log.restart_at(Cursor(20, 0))
    append(log, 20)
    log.close()
    with pytest.raises(GapError, match="start again from a cursor"):
        LogStreamReader.in_process(tmp_path, tmp_path).latestOffset(start, ReadMaxRows(10))

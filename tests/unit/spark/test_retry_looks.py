"""Looks at a retry queue from two threads: a look that is out of date changes nothing."""

from __future__ import annotations

from pathlib import Path

from cdc.queue.claims import Due
from spark_pipeline.delivery.deliver import Origin
from spark_pipeline.delivery.refusal_log import RefusalLog
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.workers.retries import RetryQueue
from tests.unit.spark.refusals import refused
from tests.unit.spark.sending import consumer


def _queue(directory: Path) -> RetryQueue:
    settings = StageSettings(
        source="shop",
        term=1,
        origin=Origin("shop", "", ""),
        consumers=[consumer()],
        state_dsn="",
        log_directory=directory,
        checkpoint_directory=directory,
        micro_batch_rows=1,
        micro_batch_bytes=1,
    )
    return RetryQueue(consumer(), settings, "run", RefusalLog())


def test_a_look_from_before_messages_were_queued_does_not_hide_them(tmp_path: Path) -> None:
    queue = _queue(tmp_path)
    before = queue.version
    queue.settled(refused(1))
    queue.note(Due("hook", 1, 0.0), queue.version)
    assert queue.due_in_s() == 0.0
    queue.note(None, before)
    assert queue.due_in_s() == 0.0, "later changes of the group would be sent before it"
    queue.note(None, queue.version)
    assert queue.due_in_s() is None

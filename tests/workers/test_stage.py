"""The stage of a source: a delivery that hangs, and one that waits for its slot."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from cdc.state.workers import WorkerState, WorkerStatus
from spark_pipeline.capacity.slots import Slots
from spark_pipeline.stage.status import StatusWriter
from tests import pgoutput
from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.log_pipeline import SOURCE, LogPipeline, arrived
from tests.shop import Shop, shop_sinks, shop_table
from tests.waiting import until
from tests.walbrook_service import running
from tests.wire_messages import transaction

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])

_SLOW = """
SELECT what LIKE 'a delivery to shop_hook has been under way for more than%'
  FROM walbrook.health WHERE kind = 'worker_slow' AND consumer = 'shop_hook'
"""


def test_a_delivery_that_hangs_is_a_health_event_and_holds_back_no_other(
    database: Database, endpoint: Endpoint, tmp_path: Path
) -> None:
    database.execute(shop_table())
    settings = {"spark": {"deadline_s": 1}}
    go_on = threading.Event()
    with (
        ExitStack() as at_the_end,
        running(database, tmp_path / "service", shop_sinks(endpoint), settings) as service,
    ):
        at_the_end.callback(go_on.set)
        shop = Shop(service, endpoint)
        shop.write(1)
        service.until_settled()
        run = shop.run()
        endpoint.script.append(Scripted(after=go_on))
        shop.until_in_files(shop.write(1))
        service.until("the event", _SLOW)
        shop.until_in_files(shop.write(1))
        shop.until_slot_moved()
        go_on.set()
        service.until_settled()
        assert shop.at_hook() == [1, 2, 3], "lost, repeated or out of order"
        service.until("the event to be over", "SELECT count(*) = 0 FROM walbrook.health")
        assert shop.run() == run, "another process serves the source now"


@pytest.mark.timeout(400)
def test_a_failing_sink_that_is_resumed_is_tried_at_once(
    database: Database, endpoint: Endpoint, tmp_path: Path
) -> None:
    database.execute(shop_table())
    later = "SELECT retry_at > clock_timestamp() + interval '8 seconds' FROM walbrook.consumers"
    with running(database, tmp_path / "service", shop_sinks(endpoint)) as service:
        shop = Shop(service, endpoint)
        endpoint.faults = lambda _messages: Scripted(status=404)
        shop.until_in_files(shop.write(1))
        service.until("a long pause", f"{later} WHERE name = 'shop_hook'")
        endpoint.faults = None
        shop.act("resume('shop_hook')")
        until("the change", lambda: shop.at_hook() == [1], 5)


@pytest.mark.migrated
def test_sql_says_when_a_worker_tries_next_after_each_try(
    database: Database, tmp_path: Path
) -> None:
    with database.connect() as state:
        pipeline = LogPipeline(state, tmp_path, hook={})
        statuses = StatusWriter(SOURCE, pipeline.settings.term)
        due = "SELECT extract(epoch FROM retry_at - clock_timestamp())::float8"
        for retry_s in (10.0, 10.0, 30.0):
            failing = WorkerStatus(WorkerState.WAITING, "its sink failed: 503", retry_s, True)
            statuses.show(state, {"hook": failing}, [], {})
            ((left_s,),) = pipeline.rows(f"{due} FROM walbrook.consumers")
            assert retry_s - 5 < left_s <= retry_s
        pipeline.close()


@pytest.mark.migrated
def test_waiting_for_a_delivery_slot_is_no_slow_delivery(
    database: Database, tmp_path: Path
) -> None:
    slots = Slots(1)
    with database.connect() as state:
        pipeline = LogPipeline(state, tmp_path, files={})
        pipeline.settings = replace(pipeline.settings, slots=slots)
        pipeline.start_pipeline_again()
        pipeline.write(ITEM, *transaction(0x100, pgoutput.insert(1, ["1", "n"])))
        current = pipeline.workers["files"].current
        thread = threading.Thread(target=pipeline.take)
        with slots.hold(SOURCE, "other", 5, threading.Event()):
            thread.start()
            until("the worker to wait for the slot", lambda: slots.in_use(SOURCE) == (1, 1))
            assert current.step is None
        thread.join()
        assert len(arrived(tmp_path / "files")) == 1
        pipeline.close()

"""Lanes in the running service: a micro-batch that hangs."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fix_http import Endpoint, Scripted
from tests.fix_postgres import Database
from tests.service import running
from tests.shop import Shop, shop_sinks, shop_table


@pytest.mark.timeout(400)
def test_a_micro_batch_that_hangs_is_told_of_then_given_up_and_nothing_is_lost(
    database: Database, endpoint: Endpoint, tmp_path: Path
) -> None:
    database.execute(shop_table())
    settings = {"spark": {"deadline_s": 1}}
    never = threading.Event()
    with (
        ExitStack() as at_the_end,
        running(database, tmp_path / "service", shop_sinks(endpoint)[:1], settings) as service,
    ):
        at_the_end.callback(never.set)
        shop = Shop(service, endpoint)
        shop.write(1)
        service.until_settled()
        endpoint.script.append(Scripted(after=never))
        shop.write(1)
        service.until(
            "the event",
            "SELECT what LIKE '%at deliver for%waiting for shop_hook' FROM walbrook.health"
            " WHERE kind = 'lane_slow_shared'",
        )
        service.until("the lane to start again", "SELECT epoch > 1 FROM walbrook.lanes")
        shop.until_left("it is slower")
        never.set()
        shop.write(1)
        service.until_settled()
        assert shop.at_hook() == [1, 2, 3]
        service.until("the event to be over", "SELECT count(*) = 0 FROM walbrook.health")

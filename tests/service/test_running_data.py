"""One service over two databases, with all kinds of sinks: each holds what it ought to hold.

Each part has its own tables and sinks. The state is kept in a database without an encoding. The
driver is killed once, the service is started again once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
import redis
from psycopg.conninfo import make_conninfo

from tests.data.exact import Exact
from tests.data.expressions import Orders
from tests.data.pulled import Pulled
from tests.data.shapes import Shapes
from tests.data.unreadable import Unreadable
from tests.fix_http import Endpoint
from tests.fix_postgres import PostgresServer, fresh_database
from tests.merged_service import MergedService
from tests.walbrook_service import Service, started

# However long something takes, all rows are taken at once and nobody leaves for being slow.
_PATIENT = {"micro_batch_target_ms": 0, "patience_ms": 60_000}


@dataclass(frozen=True)
class Parts:
    service: Service
    shapes: Shapes
    exact: Exact
    unreadable: Unreadable
    orders: Orders
    pulled: Pulled


@pytest.fixture(scope="module")
def parts(
    postgres_server: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Parts]:
    dsn = postgres_server.dsn
    with ExitStack() as open_now:
        shop = open_now.enter_context(fresh_database(dsn))
        # The tests read what is in it as UTF-8.
        raw = open_now.enter_context(fresh_database(dsn, "SQL_ASCII"))
        depot = replace(raw, dsn=make_conninfo(raw.dsn, client_encoding="UTF8"))
        client = open_now.enter_context(redis.Redis.from_url(redis_url))
        hook, web = (open_now.enter_context(Endpoint.running()) for _ in range(2))
        shapes = Shapes(shop, client, redis_url)
        exact = Exact(shop, client, redis_url, hook)
        unreadable = Unreadable(depot)
        orders = Orders(shop, client, redis_url, web)
        pulled = Pulled(shop)
        each = (shapes, exact, unreadable, orders, pulled)
        sinks = [{"database": "shop", **sink} for part in each for sink in part.sinks]
        directory = tmp_path_factory.mktemp("data") / "service"
        service = MergedService(
            shop, depot, directory, sinks, settings={"spark": _PATIENT}, state=depot
        )
        open_now.enter_context(started(service))
        yield Parts(service, shapes, exact, unreadable, orders, pulled)


def test_each_sink_gets_its_own_shape_and_forms(parts: Parts) -> None:
    parts.shapes.check(parts.service)


def test_the_sinks_hold_exactly_what_the_source_and_its_ledger_say(parts: Parts) -> None:
    parts.exact.check(parts.service)


def test_text_that_is_not_utf8_is_a_dead_letter_and_everything_else_arrives(parts: Parts) -> None:
    parts.unreadable.check(parts.service)


@pytest.fixture(scope="module")
def expressed(parts: Parts) -> Orders:
    parts.orders.check_before(parts.service)
    return parts.orders


@pytest.fixture(scope="module")
def pulled(parts: Parts) -> Pulled:
    parts.pulled.check_before(parts.service)
    return parts.pulled


@pytest.fixture(scope="module")
def restarted(parts: Parts, expressed: Orders, pulled: Pulled) -> Service:
    """The service is started again, with an expression that was changed."""
    assert parts.service.stop() == 0, parts.service.log_tail()
    expressed.mend()
    parts.service.start()
    parts.service.until_serving()
    return parts.service


@pytest.mark.usefixtures("restarted")
def test_each_sink_has_what_its_expressions_say_of_all_that_comes(expressed: Orders) -> None:
    expressed.check_after()


def test_messages_are_pulled_from_the_running_service_and_from_the_next(
    pulled: Pulled, restarted: Service
) -> None:
    pulled.check_after(restarted)
    assert restarted.stop() == 0, restarted.log_tail()

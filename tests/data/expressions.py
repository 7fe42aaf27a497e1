"""Expressions in the running service: what they say, what they fail on, tables that change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import redis

from cdc.log.view import LogView
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.log_pipeline import arrived
from tests.waiting import until
from tests.walbrook_service import Service

_MANY = 60_000  # more than the driver judges by itself
_REGIONS = ("rest", "eu", "us")  # by id; the first is null, which is the sink's own stream
_FUNCTIONS = "python:tests.data.expression_functions"
_TABLE = """
CREATE TABLE orders (
    id bigint PRIMARY KEY, region text, amount numeric(12,2), doc jsonb, created_at timestamptz,
    parts int)
"""
_VALUES = """
INSERT INTO orders (id, region, amount, doc, created_at{columns})
SELECT i, (ARRAY['eu', 'us'])[i % 3], i % 100, jsonb_build_object('kind', 'k' || i % 5),
       '2025-12-31 23:59:00+00'::timestamptz + i * interval '1 s'{values}
  FROM generate_series({first}, {last}) i
"""
_PARTS = {"columns": ", parts", "values": ", (ARRAY[1, 2, 4])[1 + i % 3]"}
_NO_PARTS = {"columns": "", "values": ""}
_TRANSFORM = """
struct(record.id, cast(record.amount / {parts} AS decimal(12,2)) AS each,
       get_json_object(record.doc, '$.kind') AS kind, record.created_at AS at)
"""
_PARTS_OF_ANY_VERSION = "coalesce(cast(get_json_object(to_json(record), '$.parts') AS int), 1)"
_ERROR = "SELECT last_error LIKE '%{text}%' FROM walbrook.consumers WHERE name = 'orders'"
_OF_ORDERS = "WHERE consumer = 'orders'"
_PAUSED = """
SELECT count(*) = 3 FROM walbrook.consumers
 WHERE name IN ('orders', 'web', 'order_files') AND state = 'paused'
"""
_OTHERS = """
SELECT run, (SELECT bool_and(breaker = 'closed') FROM walbrook.consumers
              WHERE source = 'shop' AND name IN ('order_files', 'web'))
  FROM walbrook.feeds WHERE source = 'shop'
"""


class Orders:
    """A table of orders, three sinks, and what each of them ought to have."""

    service: Service

    def __init__(
        self, database: Database, streams: redis.Redis, redis_url: str, endpoint: Endpoint
    ) -> None:
        database.execute(_TABLE)
        self.database, self.streams, self.endpoint = database, streams, endpoint
        self.sinks = _sinks(redis_url, endpoint)
        self.written: dict[int, int] = {}  # order id to its parts
        self.dead: set[int] = set()
        self._read: dict[str, list[dict[str, Any]]] = {f"orders.{r}": [] for r in _REGIONS}
        self._tops = dict.fromkeys(self._read, "0-0")

    def insert(self, rows: int, *, parts: bool = True) -> str:
        """The statement for so many more orders."""
        first = len(self.written) + 1
        ids = range(first, first + rows)
        self.written |= {i: (1, 2, 4)[i % 3] if parts else 1 for i in ids}
        columns = _PARTS if parts else _NO_PARTS
        return _VALUES.format(first=first, last=first + rows - 1, **columns)

    def write(self, rows: int, **given: bool) -> None:
        self.database.execute(self.insert(rows, **given))

    def write_broken(self) -> int:
        """An order in no parts."""
        number = len(self.written) + 1
        self.written[number] = 0
        self.dead.add(number)
        self.database.execute(
            f"INSERT INTO orders VALUES ({number}, 'eu', 50, '{{}}', '2026-02-01', 0)"
        )
        return number

    def in_streams(self) -> dict[str, list[dict[str, Any]]]:
        """By stream; an entry never changes, so only what is new is fetched."""
        for key, known in self._read.items():
            entries: Any = self.streams.xrange(key, min=f"({self._tops[key]}")
            known += [orjson.loads(fields[b"message"]) for _, fields in entries]
            self._tops[key] = entries[-1][0].decode() if entries else self._tops[key]
        return {key: list(known) for key, known in self._read.items()}

    def expected_in_streams(self, last: int | None = None) -> dict[str, list[dict[str, Any]]]:
        """By route, what the expressions make of the orders up to ``last``, in order."""
        found: dict[str, list[dict[str, Any]]] = {f"orders.{region}": [] for region in _REGIONS}
        for i in range(60, (last or len(self.written)) + 1):
            if i % 100 >= 10 and i not in self.dead:
                minute, second = divmod(i - 60, 60)
                hour, minute = divmod(minute, 60)
                at = f"2026-01-{1 + hour // 24:02}T{hour % 24:02}:{minute:02}:{second:02}.000000Z"
                message = {"id": i, "each": i % 100 / self.written[i], "kind": f"k{i % 5}"}
                found[f"orders.{_REGIONS[i % 3]}"].append(message | {"at": at})
        return found

    def at_web(self) -> list[tuple[int, bool]]:
        said: list[dict[str, Any]] = [m for r in self.endpoint.accepted for m in r.messages]
        return [(message["order"], message["by_task"]) for message in said]

    def check(self) -> None:
        """Every sink has what it ought to have, once."""
        assert self.in_streams() == self.expected_in_streams()
        self.check_others()

    def check_others(self) -> None:
        assert self.in_files() == list(self.written)
        # A webhook keeps the order of each row, not that of all.
        assert sorted(order for order, _ in self.at_web()) == self._expensive()

    def until_others_have_all(self) -> None:
        self.service.until_settled(only=["web", "order_files"])
        self.check_others()

    def in_files(self) -> list[int]:
        return [m["record"]["id"] for m in arrived(self.service.directory / "order_files")]

    def of_consumer(self, column: str) -> Any:
        query = f"SELECT {column} FROM walbrook.consumers WHERE name = 'orders'"
        return self.service.state.execute(query)[0][0]

    def others(self) -> tuple[int, bool]:
        """The process that serves the source, and whether the other consumers are well."""
        ((run, are_well),) = self.service.state.execute(_OTHERS)
        return run, are_well

    @contextmanager
    def in_one_range(self) -> Iterator[None]:
        """What is written within is delivered at once: its consumers are paused until then."""
        rows = self._rows_in_log()
        written = len(self.written)
        names = [str(sink["name"]) for sink in self.sinks]
        for name in names:
            self.service.state.execute(f"SELECT walbrook.pause('{name}')")
        self.service.until("the pause", _PAUSED)
        yield
        new = len(self.written) - written
        until("all in the log", lambda: self._rows_in_log() >= rows + new)
        for name in names:
            self.service.state.execute(f"SELECT walbrook.resume('{name}')")

    def _rows_in_log(self) -> int:
        view = LogView(self.service.directory / "log" / "shop")
        return int(view.entries(view.first_batch(), view.next_batch())["rows"].sum())

    def _expensive(self) -> list[int]:
        return [i for i in self.written if i not in self.dead and i % 100 >= 90]

    def until_settled(self) -> None:
        self.service.until_settled(only=[str(sink["name"]) for sink in self.sinks])

    def check_before(self, service: Service) -> None:
        self.service = service
        self.write(200)
        self.until_settled()
        self.check()
        assert not any(by_task for _, by_task in self.at_web())

        broken = self.write_broken()
        self.write(100)
        self.until_settled()
        self.check()
        letters = "SELECT consumer, kind, table_name, error FROM walbrook.dead_letters"
        ((consumer, kind, table, error),) = service.state.execute(f"{letters} {_OF_ORDERS}")
        assert (consumer, kind, table) == ("orders", "expression", "orders")
        assert "the transform of orders failed: [DIVIDE_BY_ZERO]" in error

        with self.in_one_range():
            self.write(1)
            self.write(_MANY)
        self.until_settled()
        self.check()
        by_tasks = {by_task for order, by_task in self.at_web() if order > broken + 101}
        assert by_tasks == {True}, service.log_tail()

        _a_column_is_dropped(self)
        _the_driver_starts_again(self)

    def mend(self) -> None:
        """Change the expression to one that fits all versions, for the next start."""
        sinks = self.service.sinks()
        (orders,) = [sink for sink in sinks if sink["name"] == "orders"]
        orders["transform"] = _TRANSFORM.format(parts=_PARTS_OF_ANY_VERSION)
        self.service.configure({}, sinks)

    def check_after(self) -> None:
        """The new expression is asked of every change that is left."""
        self.write(100)
        self.until_settled()
        self.check()
        letters = f"SELECT count(*) FROM walbrook.dead_letters {_OF_ORDERS}"
        assert self.service.state.execute(letters) == [(1,)]
        errors = "SELECT count(*) FROM walbrook.consumers WHERE last_error IS NOT NULL"
        assert self.service.state.execute(errors) == [(0,)]


def _sinks(redis_url: str, endpoint: Endpoint) -> list[dict[str, object]]:
    sinks: list[dict[str, object]] = [
        {
            "name": "orders",
            "filter": "record.amount >= 10 AND record.created_at >= TIMESTAMP '2026-01-01'",
            "transform": _TRANSFORM.format(parts="record.parts"),
            "routing": "concat('orders.', record.region)",
            "destination": {"type": "redis_stream", "url": redis_url, "stream_key": "orders.rest"},
        },
        {
            "name": "web",
            "filter": f"{_FUNCTIONS}:expensive",
            "transform": f"{_FUNCTIONS}:described",
            "batch_size": 1000,
            "destination": {"type": "webhook", "url": endpoint.url},
        },
        {"name": "order_files", "destination": {"type": "file", "path": "order_files"}},
    ]
    only = {"include_tables": ["public.orders"]}
    return [sink | {"source": only} for sink in sinks]


def _a_column_is_dropped(shop: Orders) -> None:
    """The consumer stops before the first change without it; the others go on."""
    run, _ = shop.others()
    before, after = shop.insert(50), shop.insert(50, parts=False)
    last_good = len(shop.written) - 50
    shop.database.execute(f"{before}; ALTER TABLE orders DROP COLUMN parts; {after}")
    shop.service.until("the error", _ERROR.format(text="table public.orders"))
    error = shop.of_consumer("last_error")
    assert "the transform of consumer orders cannot be used on table public.orders: " in error
    assert "No such struct field `parts`" in error
    assert "To fix it: correct it in the configuration" in error
    shop.write(100, parts=False)
    shop.until_others_have_all()
    unfit = "cannot be used on table public.orders"
    until("the reason", lambda: unfit in (shop.of_consumer("state_reason") or ""))
    assert shop.in_streams() == shop.expected_in_streams(last_good), "before the change all comes"
    assert shop.others() == (run, True), "the others were disturbed"


def _the_driver_starts_again(shop: Orders) -> None:
    """A consumer that is held back is no reason for the service to end."""
    held = shop.in_streams()
    assert shop.service.kill("java")
    shop.write(100, parts=False)
    shop.until_others_have_all()
    shop.database.execute("ALTER TABLE orders ADD COLUMN parts int")
    shop.write(100)
    shop.until_others_have_all()
    shop.service.until("the error", _ERROR.format(text="table public.orders"))
    assert shop.in_streams() == held

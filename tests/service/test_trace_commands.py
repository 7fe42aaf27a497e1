"""``walbrook trace`` and ``walbrook tail``, the same over HTTP, and live traces."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import uvicorn
import yaml
from starlette.applications import Starlette
from typer.testing import CliRunner

from cdc.config import Http, load
from cdc.cursor import Cursor
from cdc.errors import OperatorError
from cdc.service.cli.entry import app
from cdc.service.http.api.tokens import Access
from cdc.service.http.api.traces import trace_routes
from cdc.service.trace_filters import evaluate_filters
from cdc.state.operators import refusals
from cdc.state.traces import SAMPLES_MAX, end_live_trace, fetch_samples, start_live_trace
from cdc.trace.conclusion import Filtering
from tests import pgoutput
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.log_pipeline import LogPipeline
from tests.waiting import until
from tests.walbrook_service import ROOT, _url
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

ORDER = pgoutput.relation(1, "public", "orders", [("id", 23, True), ("amount", 23)])
FUNCTIONS = "python:tests.unit.expressions.operators_functions"
SECRET = 74_123_987


class Shop:
    """A pipeline whose sinks are in a configuration file as well."""

    def __init__(self, database: Database, endpoint: Endpoint, directory: Path) -> None:
        hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0}
        python = {"filter": f"{FUNCTIONS}:large", "transform": f"{FUNCTIONS}:summary"}
        given: dict[str, dict[str, Any]] = {
            "all": {"destination": hook, "actions": ["insert", "update"]},
            "some": {"destination": hook, **python},
        }
        self.connection = database.connect()
        self.pipeline = LogPipeline(self.connection, directory, **given)
        (directory / "shop").symlink_to(directory / "log")
        self.config = directory / "walbrook.yaml"
        self.database = database
        sinks = [{"name": name, **sink} for name, sink in given.items()]
        self.config.write_text(
            yaml.safe_dump(
                {
                    "databases": [
                        {
                            "name": "shop",
                            "url": _url(database.dsn),
                            "slot": {"name": "s"},
                            "publication": {"name": "p"},
                        }
                    ],
                    "sinks": sinks,
                    "log": {"directory": str(directory)},
                }
            )
        )

    def write(self, lsn: int, *rows: tuple[int, int]) -> None:
        """Committed, logged and delivered."""
        changes = (pgoutput.insert(1, [str(id), str(amount)]) for id, amount in rows)
        self.pipeline.write(ORDER, *transaction(lsn, *changes))
        self.pipeline.take()

    def run(self, *arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*arguments, "-c", str(self.config)])
        if isinstance(done.exception, OperatorError):
            return 1, str(done.exception)
        return done.exit_code, done.output

    def tail(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "cdc.service.cli.entry", "tail", *arguments]
        return subprocess.Popen(
            [*command, "-c", str(self.config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )

    def close(self) -> None:
        self.pipeline.close()
        self.connection.close()


@pytest.fixture
def shop(database: Database, endpoint: Endpoint, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(database, endpoint, tmp_path)
    yield shop
    shop.close()


@contextmanager
def served(shop: Shop) -> Iterator[httpx.Client]:
    """A real server with the routes of traces, and a client of it."""
    routes = trace_routes(lambda: load(shop.config), shop.database.dsn, Access(Http()))
    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=routes), port=0, log_level="warning", lifespan="off")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until("the server", lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api") as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def test_a_change_is_traced_by_key_by_cursor_and_by_idempotency_key(shop: Shop) -> None:
    shop.write(0x100, (1, 5), (42, 500))
    for asked in (
        ("--key", "public.orders/42"),
        ("--cursor", "0/100:1"),
        ("--idempotency-key", "256:1"),
    ):
        status, text = shop.run("trace", *asked)
        assert status == 0, text
        assert text.startswith("shop 0/100:1  insert of public.orders\n")
        assert "all: delivered\n" in text
        assert "some: delivered or left out (filter: not evaluated (needs --evaluate))" in text
        assert "500" not in text.replace("0/100", "")


def test_the_trace_as_json_has_what_the_text_has_and_values_only_with_payload(shop: Shop) -> None:
    shop.write(0x100, (42, SECRET))
    status, text = shop.run("trace", "--cursor", "0/100:0", "--json")
    assert status == 0
    found = orjson.loads(text)
    assert (found["cursor"], found["idempotency_key"]) == ("0/100:0", "256:0")
    assert (found["change"]["table"], found["change"]["action"]) == ("public.orders", "insert")
    assert {each["consumer"]: each["conclusion"] for each in found["consumers"]} == {
        "all": "delivered",
        "some": "delivered or left out",
    }
    assert str(SECRET) not in text
    _, shown = shop.run("trace", "--cursor", "0/100:0", "--json", "--payload")
    assert orjson.loads(shown)["change"]["payload"]["record"] == {"id": 42, "amount": SECRET}


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ((), "it is not clear what to trace"),
        (("--cursor", "0/100:0", "--key", "orders/1"), "it is not clear what to trace"),
        (("--cursor", "12"), "'12' is neither a cursor nor an idempotency key"),
        (("--key", "orders/7"), "the log of shop has no change of orders/7"),
        (("--cursor", "0/100:0", "--source", "other"), "there is no database 'other'"),
    ],
)
def test_a_trace_that_cannot_be_made_is_refused_with_what_to_do(
    shop: Shop, asked: tuple[str, ...], what: str
) -> None:
    shop.write(0x100, (1, 5))
    status, text = shop.run("trace", *asked)
    assert status == 1
    assert what in text


def test_a_filter_in_python_is_evaluated_where_it_is_asked_for(shop: Shop) -> None:
    shop.write(0x100, (1, 5), (2, 500))
    assert evaluate_filters(shop.config, "shop", Cursor(0x100, 0)) == {"some": Filtering.KEEPS_BACK}
    status, text = shop.run("trace", "--cursor", "0/100:1", "--evaluate")
    assert status == 0
    assert "some: delivered\n" in text


def test_a_filter_in_sql_is_evaluated_by_spark_where_it_is_asked_for(shop: Shop) -> None:
    shop.write(0x100, (1, 5), (2, 500))
    config = yaml.safe_load(shop.config.read_text())
    config["sinks"][1] |= {"filter": "record.amount > 100", "transform": "none"}
    shop.config.write_text(yaml.safe_dump(config))
    said = [evaluate_filters(shop.config, "shop", Cursor(0x100, idx))["some"] for idx in (0, 1)]
    assert said == [Filtering.KEEPS_BACK, Filtering.PASSES]


def test_http_gives_the_same_trace_and_refuses_what_makes_no_sense(shop: Shop) -> None:
    shop.write(0x100, (42, SECRET))
    with served(shop) as client:
        for asked in ("cursor=0/100:0", "key=orders/42&limit=5", "idempotency_key=256:0"):
            answer = client.get(f"/trace?{asked}")
            assert answer.status_code == 200, answer.text
            (found,) = answer.json()["data"]
            assert found["consumers"][0]["conclusion"] == "delivered"
            assert str(SECRET) not in answer.text
        assert str(SECRET) in client.get("/trace?cursor=0/100:0&payload=true").text
        for asked, status in (
            ("", 400),
            ("cursor=x", 400),
            ("key=orders", 400),
            ("crusor=0/100:0", 400),
        ):
            assert client.get(f"/trace?{asked}").status_code == status


def test_a_live_trace_shows_what_functions_saw_and_made_of_each_change(shop: Shop) -> None:
    trace = start_live_trace(shop.connection, "some", 60, 10)
    shop.pipeline.context.live.look(shop.connection, "shop")
    shop.write(0x100, (1, 5), (2, 500))
    samples = [orjson.loads(each) for each in fetch_samples(shop.connection, trace)]
    kept_back, passed = samples
    assert (kept_back["cursor"], kept_back["passed"]) == ("0/100:0", False)
    assert kept_back["input"]["record"] == {"id": 1, "amount": 5}
    assert kept_back["output"] is None
    assert (passed["passed"], passed["output"]) == (True, {"order": 2})
    assert fetch_samples(shop.connection, trace) == []
    end_live_trace(shop.connection, trace)
    shop.pipeline.context.live.look(shop.connection, "shop")
    shop.write(0x200, (3, 700))
    assert shop.pipeline.rows("SELECT count(*) FROM walbrook.live_samples") == [(0,)]


def test_a_live_trace_takes_no_more_than_it_was_asked_for(shop: Shop) -> None:
    trace = start_live_trace(shop.connection, "all", 60, 2)
    shop.pipeline.context.live.look(shop.connection, "shop")
    for lsn in range(0x100, 0x600, 0x100):
        shop.write(lsn, (lsn, 1), (lsn + 1, 2), (lsn + 2, 3))
    assert 2 <= len(fetch_samples(shop.connection, trace)) <= 4


def test_samples_that_nobody_fetches_are_bounded_and_go_with_their_trace(shop: Shop) -> None:
    trace = start_live_trace(shop.connection, "all", 60, 100)
    shop.pipeline.context.live.look(shop.connection, "shop")
    many = ", ".join(["('{}')"] * (SAMPLES_MAX - 1))
    shop.connection.execute(
        f"INSERT INTO walbrook.live_samples (trace, sample) "
        f"SELECT '{trace}', v.s FROM (VALUES {many}) v (s)".encode()
    )
    shop.write(0x100, *((n, n) for n in range(5)))
    assert len(fetch_samples(shop.connection, trace)) == SAMPLES_MAX
    shop.connection.execute(
        "UPDATE walbrook.live_traces SET ends_at = clock_timestamp() - interval '1 minute'"
    )
    shop.pipeline.context.live.look(shop.connection, "shop")
    for table in ("live_traces", "live_samples"):
        assert shop.pipeline.rows(f"SELECT count(*) FROM walbrook.{table}") == [(0,)]


def test_a_live_trace_that_cannot_be_made_is_refused(shop: Shop) -> None:
    for given in (("nobody", 5, 5), ("all", 0, 5), ("all", 5, 1000)):
        with pytest.raises(OperatorError), refusals():
            start_live_trace(shop.connection, *given)
    for _ in range(4):
        start_live_trace(shop.connection, "all", 5, 5)
    with pytest.raises(OperatorError, match="watched by four live traces"), refusals():
        start_live_trace(shop.connection, "all", 5, 5)


def test_http_starts_fetches_and_ends_a_live_trace(shop: Shop) -> None:
    with served(shop) as client:
        begun = client.post("/consumers/some/live_trace", json={"seconds": 60, "per_second": 5})
        trace = begun.json()["id"]
        shop.pipeline.context.live.look(shop.connection, "shop")
        shop.write(0x100, (2, 500))
        (sample,) = client.get(f"/live_traces/{trace}").json()["data"]
        assert sample["output"] == {"order": 2}
        assert client.delete(f"/live_traces/{trace}").status_code == 200
        assert client.post("/consumers/nobody/live_trace").status_code == 404
    assert shop.pipeline.rows("SELECT count(*) FROM walbrook.live_traces") == [(0,)]


def test_tail_shows_what_a_sink_would_get_in_its_shape(shop: Shop) -> None:
    shop.write(0x100, (1, 5), (2, 500))
    shop.pipeline.write(*transaction(0x200, pgoutput.delete(1, key=["1", None])))
    with shop.tail("all", "--from", "0/100:0", "--no-follow") as done:
        out, err = done.communicate(timeout=60)
    lines = [orjson.loads(line) for line in out.splitlines()]
    assert [(line["cursor"], line["action"]) for line in lines] == [
        ("0/100:0", "insert"),
        ("0/100:1", "insert"),
    ]
    message = lines[1]["message"]
    assert message["record"] == {"id": 2, "amount": 500}
    assert message["metadata"]["consumer"] == {"name": "all"}
    assert (done.returncode, err) == (0, b"")
    with shop.tail("some", "--from", "0/100:0", "--no-follow", "--key", "orders/2") as one:
        out, err = one.communicate(timeout=60)
    assert [orjson.loads(line)["cursor"] for line in out.splitlines()] == ["0/100:1"]
    assert b"not evaluated, as it may need Spark: filter, transform" in err


def test_tail_follows_the_log_until_it_has_shown_enough(shop: Shop) -> None:
    shop.write(0x100, (1, 5))
    lsn = 0x100

    def more() -> bool:
        nonlocal lsn
        lsn += 0x100
        shop.write(lsn, (lsn, 1))
        return tail.poll() is not None

    only = ("--table", "public.orders", "--action", "insert")
    with shop.tail("all", "--limit", "2", *only) as tail:
        until("the end of the tail", more, 60)
        out, _ = tail.communicate(timeout=60)
    lines = [orjson.loads(line) for line in out.splitlines()]
    assert len(lines) == 2
    assert all(line["cursor"] > "0/100:0" for line in lines)

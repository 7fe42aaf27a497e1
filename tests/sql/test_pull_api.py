"""The pull API over real HTTP: what it gives, what it refuses, and how it waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import orjson
import pytest

from cdc.config import ApiToken, Http, SecretText
from cdc.service.http.server import HttpServer
from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.pull_queue import Puller, make_pull_consumer
from tests.waiting import until

pytestmark = pytest.mark.migrated

TOKEN, OTHER = "0123456789abcdef-all", "0123456789abcdef-some"


class NoProcesses:
    def processes(self) -> dict[str, bool]:
        return {}

    def starting(self) -> list[str]:
        return []

    def silent_s(self) -> float:
        return 0.0


@pytest.fixture(scope="module")
def state(postgres_server: PostgresServer) -> Iterator[Database]:
    with fresh_database(postgres_server.dsn) as made:
        make_pull_consumer(made, "first")
        yield made


@pytest.fixture(scope="module")
def client(state: Database) -> Iterator[httpx.Client]:
    with (
        HttpServer(Http(port=0), state.dsn, NoProcesses()) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as ours,
    ):
        yield ours


@pytest.fixture
def jobs(state: Database, request: pytest.FixtureRequest) -> Iterator[Puller]:
    name = request.node.originalname[5:60]
    make_pull_consumer(state, name, max_waiting=3)
    puller = Puller(state, name)
    yield puller
    puller.close()


def post(client: httpx.Client, puller: Puller, act: str, **body: object) -> httpx.Response:
    return client.post(f"/api/consumers/{puller.consumer}/{act}", json=body)


def said(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    return [each["message"]["n"] for each in answer.json()["messages"]]


def test_messages_are_received_acknowledged_given_back_and_extended(
    client: httpx.Client, jobs: Puller
) -> None:
    jobs.put(1, [1, 2, 3])
    messages = post(client, jobs, "receive", batch_size=10, holder="w").json()["messages"]
    assert [each["message"] for each in messages] == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert messages[0]["cursor"] == "0/1:0"
    assert (messages[0]["deliveries"], messages[0]["action"]) == (1, "insert")
    ids = [each["ack_id"] for each in messages]
    assert post(client, jobs, "ack", ack_ids=ids[:1]).json() == {"acked": 1}
    assert post(client, jobs, "ack", ack_ids=ids[:1]).json() == {"acked": 0}
    assert post(client, jobs, "ack", ack_ids=[]).json() == {"acked": 0}
    assert post(client, jobs, "extend", ack_ids=ids[1:2], by_s=60).json() == {"extended": 1}
    answer = post(client, jobs, "nack", ack_ids=ids[2:], delay_s=0, error="no")
    assert answer.json() == {"nacked": 1}
    assert said(post(client, jobs, "receive", batch_size=10)) == [3]
    stale = post(client, jobs, "ack", ack_ids=ids[1:])
    assert stale.status_code == 409
    assert (stale.json()["acked"], stale.json()["refused"][0]["ack_id"]) == (1, ids[2])
    assert "stale" in stale.json()["error"]["what"]


def test_numbers_keep_every_digit(client: httpx.Client, jobs: Puller) -> None:
    jobs.put(1, [1])
    exact = '{"n": 123456789012345678901234567890.10, "big": 9223372036854775807, "n": 1e400}'
    jobs.rows(f"UPDATE walbrook.pull_messages SET message = '{exact}' RETURNING 1")
    assert exact in post(client, jobs, "receive").text


def test_sequins_paths_answer_as_sequin_does(client: httpx.Client, jobs: Puller) -> None:
    jobs.put(1, [1, 2, 3])
    path = f"/api/sequin_streams/{jobs.consumer}"
    first = client.get(f"{path}/receive", params={"batch_size": 1, "wait_for": "100"}).json()
    assert [each["data"] for each in first["data"]] == [{"n": 1}]
    rest = client.post(f"{path}/receive", json={"max_batch_size": 5, "wait_for": "1s"}).json()
    assert [each["data"] for each in rest["data"]] == [{"n": 2}, {"n": 3}]
    ids = [each["ack_id"] for each in [*first["data"], *rest["data"]]]
    for _ in range(2):
        assert client.post(f"{path}/ack", json={"ack_ids": ids[:2]}).json() == {"success": True}
    assert client.post(f"{path}/nack", json={"ack_ids": ids[2:]}).json() == {"success": True}
    late = client.post(f"{path}/ack", json={"ack_ids": ids[2:]})
    assert late.status_code == 200
    assert late.json()["success"] is True
    assert [each["ack_id"] for each in late.json()["refused"]] == ids[2:]


@pytest.mark.parametrize(
    ("act", "body", "field"),
    [
        ("receive", {"batch_size": 0}, "batch_size"),
        ("receive", {"batch_size": -1}, "batch_size"),
        ("receive", {"batch_size": 10001}, "batch_size"),
        ("receive", {"batch_size": "many"}, "batch_size"),
        ("receive", {"batch_size": True}, "batch_size"),
        ("receive", {"wait_s": -1}, "wait_s"),
        ("receive", {"wait_s": "abc"}, "wait_s"),
        ("receive", {"wait_s": 1e6}, "wait_s"),
        ("receive", {"visibility_s": 0}, "visibility_s"),
        ("receive", {"holder": 7}, "holder"),
        ("receive", {"holder": "a\0b"}, "holder"),
        ("receive", {"batchsize": 7}, "batchsize"),
        ("ack", {}, "ack_ids"),
        ("ack", {"ack_ids": ["x"]}, "ack_ids"),
        ("ack", {"ack_ids": "1-1-0/1-0"}, "ack_ids"),
        ("nack", {"ack_ids": ["1-1-0/1-0"], "delay_s": -1}, "delay_s"),
        ("extend", {"ack_ids": ["1-1-0/1-0"]}, "by_s"),
        ("extend", {"ack_ids": ["1-1-0/1-0"], "by_s": 0.5}, "by_s"),
    ],
)
def test_a_bad_request_is_refused_with_the_field_named(
    client: httpx.Client, act: str, body: dict[str, object], field: str
) -> None:
    answer = client.post(f"/api/consumers/first/{act}", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["field"] == field
    assert field in answer.json()["error"]["what"]


@pytest.mark.parametrize("wait", ["-1", "abc", "1000000", "6m"])
def test_a_bad_wait_is_refused_on_sequins_path_too(client: httpx.Client, wait: str) -> None:
    answer = client.get("/api/sequin_streams/first/receive", params={"wait_for": wait})
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "wait_for")


@pytest.mark.parametrize("body", [b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(client: httpx.Client, body: bytes) -> None:
    assert client.post("/api/consumers/first/receive", content=body).status_code == 400


def test_unknown_consumers_are_not_found_and_pushed_ones_refused(
    client: httpx.Client, state: Database
) -> None:
    state.execute(
        "INSERT INTO walbrook.consumers (source, name, cursor_lsn, destination) "
        "VALUES ('shop', 'pushed', '0/1', 'webhook') ON CONFLICT DO NOTHING"
    )
    for act in ("receive", "ack", "nack", "extend"):
        body: dict[str, object] = {} if act == "receive" else {"ack_ids": ["1-1-0/1-0"]}
        body |= {"by_s": 5} if act == "extend" else {}
        assert client.post(f"/api/consumers/nobody/{act}", json=body).status_code == 404
        assert client.post(f"/api/consumers/pushed/{act}", json=body).status_code == 409
        assert client.post(f"/api/consumers/a%00b/{act}", json=body).status_code == 404
    assert client.get("/api/consumers/first/receive").status_code == 405


def test_deadlines_are_reported_in_utc_whatever_the_database_is_set_to(
    client: httpx.Client, jobs: Puller
) -> None:
    jobs.put(1, [1])
    (message,) = post(client, jobs, "receive", visibility_s=60).json()["messages"]
    assert message["lease_until"].endswith("Z")
    left_s = (datetime.fromisoformat(message["lease_until"]) - datetime.now(UTC)).total_seconds()
    assert 30 < left_s < 90


def test_a_name_that_two_sources_have_is_refused(client: httpx.Client, jobs: Puller) -> None:
    jobs.rows(
        "INSERT INTO walbrook.sources (name, slot, publication, system_identifier, restart_lsn) "
        "VALUES ('other', 'other', 'pub', '1', '0/1') RETURNING 1"
    )
    jobs.rows(
        "INSERT INTO walbrook.consumers (source, name, cursor_lsn, destination) "
        f"VALUES ('other', '{jobs.consumer}', '0/1', 'pull') RETURNING 1"
    )
    answer = post(client, jobs, "receive")
    assert (answer.status_code, "ambiguous" in answer.text) == (409, True)


def test_a_wait_ends_as_soon_as_something_is_stored(client: httpx.Client, jobs: Puller) -> None:
    answers: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: answers.append(post(client, jobs, "receive", wait_s=30))
    )
    started = time.monotonic()
    waiting.start()
    until("the waiting request", lambda: _waiting(client, jobs))
    jobs.put(1, [1])
    jobs.rows(
        f"SELECT pg_notify('walbrook_pull', id::text) FROM walbrook.consumers "
        f"WHERE name = '{jobs.consumer}'"
    )
    waiting.join(20)
    assert said(answers[0]) == [1]
    assert time.monotonic() - started < 15


def _waiting(client: httpx.Client, jobs: Puller) -> bool:
    rows = jobs.rows(
        "SELECT 1 FROM pg_stat_activity WHERE application_name = 'walbrook:api:listen'"
    )
    return bool(rows)


def test_a_wait_ends_when_a_lease_ends_or_a_delay_is_over(
    client: httpx.Client, jobs: Puller
) -> None:
    jobs.put(1, [1, 2])
    held = post(client, jobs, "receive", batch_size=2, visibility_s=1).json()["messages"]
    post(client, jobs, "nack", ack_ids=[held[1]["ack_id"]], delay_s=0.2)
    assert said(post(client, jobs, "receive", wait_s=20)) == [2]
    assert said(post(client, jobs, "receive", wait_s=20)) == [1]
    assert said(post(client, jobs, "receive", wait_s=0.05)) == []


def test_waiting_requests_share_what_comes_and_more_than_max_waiting_are_refused(
    client: httpx.Client, jobs: Puller
) -> None:
    answers: dict[int, httpx.Response] = {}

    def wait(batch_size: int) -> None:
        # The probe below may have the third place for a moment.
        while batch_size not in answers or answers[batch_size].status_code == 429:
            answers[batch_size] = post(client, jobs, "receive", batch_size=batch_size, wait_s=30)

    threads = [threading.Thread(target=wait, args=(size,)) for size in (1000, 2, 999)]
    for thread in threads:
        thread.start()

    def full() -> bool:
        return post(client, jobs, "receive", wait_s=0.01).status_code == 429

    until("three who wait", full)
    jobs.put(1, range(11))
    jobs.rows(
        f"SELECT pg_notify('walbrook_pull', id::text) FROM walbrook.consumers "
        f"WHERE name = '{jobs.consumer}'"
    )
    for thread in threads:
        thread.join(30)
    got = {size: said(answer) for size, answer in answers.items()}
    assert len(got[2]) == 2
    assert sorted(len(each) for each in (got[1000], got[999])) == [4, 5]
    assert sorted(n for each in got.values() for n in each) == list(range(1, 12))


def test_a_request_that_hangs_up_is_handed_nothing(client: httpx.Client, jobs: Puller) -> None:
    body = orjson.dumps({"batch_size": 10, "wait_s": 60})
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as caller:
        caller.sendall(
            f"POST /api/consumers/{jobs.consumer}/receive HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        until("the waiting request", lambda: _waiting(client, jobs))
    jobs.put(1, [1])
    messages = until(
        "the message", lambda: post(client, jobs, "receive", wait_s=1).json()["messages"]
    )
    assert [(each["message"]["n"], each["deliveries"]) for each in messages] == [(1, 1)]


def test_a_token_is_needed_where_tokens_are_configured(state: Database) -> None:
    tokens = (
        ApiToken(name="all", token=SecretText(TOKEN)),
        ApiToken(name="some", token=SecretText(OTHER), consumers=("elsewhere",)),
    )
    with (
        HttpServer(Http(port=0, tokens=tokens), state.dsn, NoProcesses()) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as client,
    ):

        def status(**headers: str) -> int:
            return client.post("/api/consumers/first/receive", headers=headers).status_code

        assert status() == 401
        assert status(Authorization="Bearer wrong") == 401
        assert status(Authorization=f"Bearer {OTHER}") == 403
        assert status(Authorization=f"Bearer {TOKEN}") == 200
        assert client.get("/metrics").status_code == 200


Ask = Callable[[], None]


def test_a_stop_answers_those_who_wait(state: Database) -> None:
    answers: list[httpx.Response] = []
    with HttpServer(Http(port=0), state.dsn, NoProcesses()) as server:
        url = f"http://127.0.0.1:{server.port}/api/consumers/first/receive"
        ask: Ask = lambda: answers.append(httpx.post(url, json={"wait_s": 60}, timeout=90))  # noqa: E731
        waiting = threading.Thread(target=ask)
        waiting.start()
        puller = Puller(state, "first")
        until(
            "the waiting request",
            lambda: puller.rows(
                "SELECT 1 FROM pg_stat_activity "
                "WHERE query LIKE '%next_due%' AND pid <> pg_backend_pid()"
            ),
        )
        puller.close()
    waiting.join(10)
    assert said(answers[0]) == []

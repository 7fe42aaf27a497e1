"""What the webhook sink promises beyond the common suite."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.change import MessageBatch
from cdc.cursor import ORIGIN
from cdc.errors import OperatorError, PoisonError, TransientError, WalbrookError
from cdc.queue.retry import TOO_LARGE
from sinks.base import Delivery
from sinks.webhook import WebhookSink
from tests.certificates import Authority
from tests.conformance.harness import WebhookHarness
from tests.conformance.messages import (
    CONSUMER,
    Sample,
    batch,
    batch_of,
    cursor_of,
    expected,
    held,
    numbered,
)
from tests.fix_http import Endpoint, Scripted
from tests.waiting import until


class Waits(list[float]):
    """The waits that a sink asked for, none of them waited for."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


def _sink(endpoint: Endpoint, **settings: object) -> WebhookSink:
    plain: dict[str, object] = {"consumer": CONSUMER, "batch_size": 10, "timeout_s": 10.0}
    plain |= {"max_retries": 3, "wait": Waits()}
    return WebhookSink(endpoint.url, **{**plain, **settings})  # type: ignore[arg-type]


def test_a_request_carries_its_messages_its_key_and_the_configured_headers(
    endpoint: Endpoint,
) -> None:
    sink = _sink(endpoint, headers={"Authorization": "Bearer t"}, method="PUT")
    assert sink.deliver(batch(0, 25)).settled == 25
    sink.close()
    assert [len(request.messages) for request in endpoint.requests] == [10, 10, 5]
    first = endpoint.requests[0]
    assert (first.method, first.path) == ("PUT", "/changes")
    assert first.headers["content-type"] == "application/json"
    assert first.headers["authorization"] == "Bearer t"
    assert first.headers["idempotency-key"].startswith(f"orders:{cursor_of(0)}-{cursor_of(9)}:")


def test_without_batching_a_request_is_one_bare_message(endpoint: Endpoint) -> None:
    sink = _sink(endpoint, batch=False)
    assert sink.deliver(batch(0, 4)).settled == 4
    sink.close()
    assert [set(request.messages[0]) for request in endpoint.requests] == [
        {"record", "changes", "action", "metadata"}
    ] * 4
    assert WebhookHarness(endpoint).held() == expected(numbered(0, 4))


def test_a_replay_carries_the_same_idempotency_keys(endpoint: Endpoint) -> None:
    for _ in range(2):
        sink = _sink(endpoint)
        sink.deliver(batch(0, 30))
        sink.close()
    keys = [request.headers["idempotency-key"] for request in endpoint.requests]
    assert len(set(keys)) == 3
    assert keys[:3] == keys[3:]


def test_one_connection_serves_many_requests(endpoint: Endpoint) -> None:
    sink = _sink(endpoint)
    sink.deliver(batch(0, 200))
    sink.close()
    assert len(endpoint.requests) == 20
    assert endpoint.connections == 1


@pytest.mark.parametrize(
    "trouble",
    [*(Scripted(status) for status in (408, 425, 429, 500, 502, 503)), Scripted(hang_up=True)],
    ids=lambda trouble: "hang up" if trouble.hang_up else str(trouble.status),
)
def test_a_request_that_may_pass_is_tried_again_with_the_same_key(
    trouble: Scripted, endpoint: Endpoint
) -> None:
    endpoint.script.extend([trouble, trouble])
    waits = Waits()
    sink = _sink(endpoint, wait=waits)
    assert sink.deliver(batch(0, 10)).error is None
    sink.close()
    assert len({request.headers["idempotency-key"] for request in endpoint.requests}) == 1
    assert len(endpoint.requests) == 3
    assert len(waits) == 2
    assert 0.05 <= waits[0] <= 0.1 <= waits[1] <= 0.2


def test_retries_are_bounded_and_settle_only_the_requests_before(endpoint: Endpoint) -> None:
    endpoint.script.extend([Scripted(), *[Scripted(503, body=b"overloaded")] * 4])
    sink = _sink(endpoint)
    delivery = sink.deliver(batch(0, 40))
    sink.close()
    assert delivery.settled == 10
    assert isinstance(delivery.error, TransientError)
    assert "503: overloaded" in delivery.error.full_what
    assert len(endpoint.requests) == 5


@pytest.mark.parametrize(("asked", "waited"), [("7", 7.0), ("86400", 30.0), ("nonsense", None)])
def test_retry_after_is_honoured_up_to_a_cap(
    asked: str, waited: float | None, endpoint: Endpoint
) -> None:
    endpoint.script.append(Scripted(429, {"Retry-After": asked}))
    waits = Waits()
    sink = _sink(endpoint, wait=waits)
    assert sink.deliver(batch(0, 5)).settled == 5
    sink.close()
    assert waits == [waited] if waited else 0 < waits[0] <= 0.1


def test_an_endpoint_that_does_not_answer_is_given_up_in_time(endpoint: Endpoint) -> None:
    answer = threading.Event()
    endpoint.script.append(Scripted(after=answer))
    sink = _sink(endpoint, timeout_s=0.1, max_retries=0)
    delivery = sink.deliver(batch(0, 5))
    answer.set()
    sink.close()
    assert delivery.settled == 0
    assert isinstance(delivery.error, TransientError)


_UNREADABLE = {
    "no gzip": Scripted(202, {"Content-Encoding": "gzip"}, b"this is no gzip"),
    "cut off": Scripted(200, {"Transfer-Encoding": "chunked", "Connection": "close"}, b"9\r\nab"),
    "never ends": Scripted(200, {"Transfer-Encoding": "chunked"}, b"9\r\nab"),
    "no chunk": Scripted(200, {"Transfer-Encoding": "chunked"}, b"what?\r\n"),
}


@pytest.mark.parametrize("answer", _UNREADABLE.values(), ids=_UNREADABLE)
def test_a_success_whose_body_cannot_be_read_is_a_success(
    answer: Scripted, endpoint: Endpoint
) -> None:
    endpoint.script.append(answer)
    sink = _sink(endpoint, timeout_s=1.0)
    delivery = sink.deliver(batch(0, 20))
    sink.close()
    assert (delivery.error, delivery.settled) == (None, 20)
    assert WebhookHarness(endpoint).held() == expected(numbered(0, 20))


def test_a_refusal_whose_body_cannot_be_read_is_the_refusal_that_its_status_says(
    endpoint: Endpoint,
) -> None:
    endpoint.script.append(Scripted(422, {"Content-Encoding": "gzip"}, b"this is no gzip"))
    sink = _sink(endpoint)
    delivery = sink.deliver(batch(0, 1))
    sink.close()
    assert isinstance(delivery.error, PoisonError)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, PoisonError), (413, PoisonError), (422, PoisonError)]
    + [(status, OperatorError) for status in (301, 302, 307, 401, 403, 404, 405)],
)
def test_a_request_that_will_not_pass_is_not_tried_again(
    status: int, kind: type[WalbrookError], endpoint: Endpoint
) -> None:
    endpoint.script.append(Scripted(status, {"Location": "/elsewhere"}))
    sink = _sink(endpoint)
    delivery = sink.deliver(batch(0, 1))
    sink.close()
    assert delivery.settled == 0
    assert type(delivery.error) is kind
    assert str(status) in delivery.error.what
    assert [request.path for request in endpoint.requests] == ["/changes"]


def test_the_first_unsettled_message_of_a_refused_batch_is_the_poison(endpoint: Endpoint) -> None:
    poison = expected(numbered(0, 40))[16]

    sink = _sink(endpoint)
    endpoint.refuses = lambda messages: poison in map(held, messages)
    delivery = sink.deliver(batch(0, 40))
    assert delivery.settled == 16
    assert isinstance(delivery.error, PoisonError)
    assert sink.deliver(batch(17, 40)).settled == 23
    sink.close()
    assert WebhookHarness(endpoint).held() == [
        one for one in expected(numbered(0, 40)) if one != poison
    ]


def test_secrets_that_an_endpoint_repeats_are_not_in_the_error(endpoint: Endpoint) -> None:
    body = b"bad token s3cret-token for Bearer s3cret-token " + b"x" * 1000
    endpoint.script.append(Scripted(400, body=body))
    sink = _sink(endpoint, headers={"Authorization": "Bearer s3cret-token"})
    delivery = sink.deliver(batch(0, 1))
    sink.close()
    assert delivery.error is not None
    assert "s3cret" not in delivery.error.full_text
    assert "bad token *** for ***" in delivery.error.detail
    assert len(delivery.error.what) < 300


def test_requests_stay_small_for_a_while_after_the_endpoint_refused_a_large_one(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.faults = lambda messages: Scripted(413 if len(messages) > 3 else 200)
    sink = _sink(endpoint, batch_size=16)
    assert sink.deliver(batch(0, 64)).settled == 64
    assert [request.status for request in endpoint.requests].count(413) <= 4
    learned = len(endpoint.requests)
    assert sink.deliver(batch(64, 128)).settled == 64
    assert {request.status for request in endpoint.requests[learned:]} == {200}
    assert max(len(request.messages) for request in endpoint.requests[learned:]) >= 2
    assert WebhookHarness(endpoint).held() == expected(numbered(0, 128))

    # The endpoint may take more by then.
    now = time.monotonic()
    monkeypatch.setattr("sinks.webhook.time.monotonic", lambda: now + 3_600)
    endpoint.faults = None
    sink.deliver(batch(128, 144))
    sink.close()
    assert len(endpoint.requests[-1].messages) == 16


def test_a_single_message_that_is_too_large_says_nothing_of_the_others(endpoint: Endpoint) -> None:
    sink = _sink(endpoint)
    endpoint.script.append(Scripted(413))
    assert sink.deliver(batch(0, 1)).settled == 0
    assert sink.deliver(batch(1, 11)).settled == 10
    sink.close()
    assert [len(request.messages) for request in endpoint.requests] == [1, 10]


def test_requests_of_one_message_each_are_written_for_the_whole_batch_at_once(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    whole = MessageBatch.messages

    def counted(some: MessageBatch) -> pa.StringArray:
        written.append(len(some))
        return whole(some)

    monkeypatch.setattr(MessageBatch, "messages", counted)
    sink = _sink(endpoint, batch=False)
    assert sink.deliver(batch(0, 50)).settled == 50
    sink.close()
    assert written == [50]
    assert len(endpoint.requests) == 50


def test_a_certificate_that_is_not_trusted_stops_the_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    chain, key = authority.sign("IP:127.0.0.1")
    with Endpoint.running() as endpoint:
        endpoint.speak_tls(chain, key)
        url = endpoint.url.replace("http:", "https:")
        distrustful = WebhookSink(url, consumer=CONSUMER, batch_size=10)
        delivery = distrustful.deliver(batch(0, 10))
        assert delivery.settled == 0
        assert isinstance(delivery.error, OperatorError)
        assert "is not trusted" in delivery.error.what
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        trustful = WebhookSink(url, consumer=CONSUMER, batch_size=10)
        blind = WebhookSink(url, consumer=CONSUMER, batch_size=10, verify=False)
        parts = trustful.deliver_parts([batch(0, 10), batch(10, 20)])
        assert [each.settled for each in parts] == [10, 10]
        assert blind.deliver(batch(20, 30)).settled == 10
        for sink in (distrustful, trustful, blind):
            sink.close()
        found = WebhookHarness(endpoint).held()
        assert sorted(found, key=lambda one: one.cursor or ORIGIN) == expected(numbered(0, 30))
        assert endpoint.connections == 3, "two of them side by side"


def test_a_proxy_that_the_environment_names_is_used(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", endpoint.url.removesuffix("/changes"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    sink = WebhookSink("http://hook.example/changes", consumer=CONSUMER, batch_size=10)
    parts = sink.deliver_parts([batch(0, 10), batch(10, 20)])
    assert [each.settled for each in parts] == [10, 10]
    sink.close()
    assert {request.path for request in endpoint.requests} == {"http://hook.example/changes"}


def test_a_connection_that_the_server_has_ended_meanwhile_costs_no_retry(
    endpoint: Endpoint,
) -> None:
    sink = _sink(endpoint, max_retries=0)
    assert sink.deliver(batch(0, 10)).settled == 10
    endpoint.hang_up()
    assert sink.deliver(batch(10, 20)).settled == 10
    sink.close()
    assert endpoint.connections == 2


def test_a_sink_that_was_closed_in_a_delivery_sends_no_other_request(endpoint: Endpoint) -> None:
    sink = _sink(endpoint)
    go_on = threading.Event()
    endpoint.script.append(Scripted(after=go_on))
    found: list[Delivery] = []
    thread = threading.Thread(target=lambda: found.append(sink.deliver(batch(0, 25))))
    thread.start()
    until("the first request", lambda: len(endpoint.requests) == 1)
    sink.close()
    go_on.set()
    thread.join(30)
    (delivery,) = found
    assert delivery.settled == 10, "what was accepted counts"
    assert isinstance(delivery.error, TransientError)
    assert len(endpoint.requests) == 1


def test_parts_are_sent_side_by_side_and_a_pause_of_one_holds_no_other(endpoint: Endpoint) -> None:
    first, second = expected(numbered(0, 30)), expected(numbered(30, 60), start=30)
    refused: list[Scripted] = [Scripted(503)]

    def busy_once(messages: list[dict[str, object]]) -> Scripted:
        mine = held(messages[0]) in first
        return refused.pop() if mine and refused else Scripted()

    async def until_the_other_is_through(_seconds: float) -> None:
        while len(endpoint.accepted) < 3:
            await asyncio.sleep(0.01)

    endpoint.faults = busy_once
    sink = _sink(endpoint, wait=until_the_other_is_through)
    deliveries = sink.deliver_parts([batch(0, 30), batch(30, 60)])
    sink.close()
    assert deliveries == [Delivery(30), Delivery(30)]
    arrived = WebhookHarness(endpoint).held()
    assert arrived[:30] == second
    assert arrived[30:] == first
    assert endpoint.connections == 2


def test_a_message_that_is_refused_ends_its_part_alone(endpoint: Endpoint) -> None:
    poison = expected(numbered(0, 1))[0]
    endpoint.refuses = lambda messages: poison in map(held, messages)
    sink = _sink(endpoint)
    refused, whole = sink.deliver_parts([batch(0, 40), batch(40, 80)])
    sink.close()
    assert (refused.settled, type(refused.error)) == (0, PoisonError)
    assert whole == Delivery(40)


def test_an_endpoint_that_fails_as_a_whole_ends_every_part(endpoint: Endpoint) -> None:
    parts = [batch(start, start + 100) for start in range(0, 400, 100)]
    endpoint.faults = lambda _: Scripted(503 if len(endpoint.accepted) >= 6 else 200)
    sink = _sink(endpoint, max_retries=0)
    deliveries = sink.deliver_parts(parts)
    sink.close()
    assert sum(each.settled for each in deliveries) == 60
    assert all(isinstance(each.error, TransientError) for each in deliveries)
    assert len(endpoint.requests) <= 6 + len(parts), "one that is refused for each part"


def test_an_answer_counts_that_comes_before_all_of_the_request_is_written() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port, over = listener.getsockname()[1], threading.Event()

    def refuse_unread() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
            over.wait(60)

    server = threading.Thread(target=refuse_unread)
    server.start()
    sink = WebhookSink(f"http://127.0.0.1:{port}/", consumer=CONSUMER, batch_size=1, timeout_s=10)
    large = batch_of([Sample({"id": "x" * 7_000_000})])
    delivery = sink.deliver(large)
    over.set()
    server.join()
    sink.close()
    listener.close()
    assert isinstance(delivery.error, PoisonError)
    assert delivery.error.kind == TOO_LARGE

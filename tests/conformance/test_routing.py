"""Where routed messages go, and that every place they go to keeps the sink's promise."""

from __future__ import annotations

import pytest
import redis

from cdc.errors import OperatorError
from sinks import redis_tops
from sinks.webhook import WebhookSink
from tests.conformance.harness import RoutedRedisHarness, RoutedWebhookHarness, routed
from tests.conformance.messages import CONSUMER, batch, cursor_of, expected, numbered
from tests.fix_http import Endpoint


@pytest.fixture
def harness(redis_url: str, redis_client: redis.Redis) -> RoutedRedisHarness:
    return RoutedRedisHarness(redis_url, redis_client)


def _ids(harness: RoutedRedisHarness, key: str) -> list[str]:
    return [entry_id.decode() for entry_id, _ in harness.entries_of(key)]


def _of(*residues: int, end: int) -> list[str]:
    return [f"{cursor_of(n).lsn}-{cursor_of(n).idx}" for n in range(end) if n // 3 % 4 in residues]


def test_each_entry_goes_to_its_own_stream_in_order(harness: RoutedRedisHarness) -> None:
    sink = harness.open()
    assert sink.deliver(harness.batch(0, 500)).settled == 500
    sink.close()
    assert _ids(harness, harness.key) == _of(0, end=500)
    assert _ids(harness, "orders") == _of(1, 3, end=500)
    assert _ids(harness, "users") == _of(2, end=500)


def test_a_stream_of_another_writer_among_the_routes_is_refused(
    harness: RoutedRedisHarness,
) -> None:
    harness.client.xadd("users", {"hello": "world"}, id="18446744073709551615-0")
    sink = harness.open()
    delivery = sink.deliver(harness.batch(0, 50))
    assert (delivery.settled, type(delivery.error)) == (0, OperatorError)
    assert "the stream users holds entries that are not of the consumer" in str(delivery.error)
    assert harness.client.xlen("orders") == 0
    harness.client.delete("users")
    assert sink.deliver(harness.batch(0, 50)).settled == 50
    sink.close()


def test_another_writer_that_comes_to_a_routed_stream_is_noticed(
    harness: RoutedRedisHarness,
) -> None:
    sink = harness.open()
    sink.deliver(harness.batch(0, 50))
    harness.client.xadd("orders", {"hello": "world"})
    delivery = sink.deliver(harness.batch(50, 100))
    sink.close()
    assert (delivery.settled, type(delivery.error)) == (0, OperatorError)


def test_more_streams_than_are_remembered_absorb_a_replay_all_the_same(
    harness: RoutedRedisHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_tops, "STREAMS_MAX", 2)
    sink = harness.open()
    sink.deliver(harness.batch(0, 300))
    assert len(sink._tops._ours) == 2  # type: ignore[attr-defined]
    replay = sink.deliver(harness.batch(100, 400))
    sink.close()
    assert (replay.settled, replay.absorbed, replay.error) == (300, 200, None)
    assert harness.held() == expected(numbered(0, 400))


def test_a_stream_that_was_behind_takes_what_it_lacks(harness: RoutedRedisHarness) -> None:
    """As after a crash between two streams, on a server whose transactions are not kept."""
    sink = harness.open()
    sink.deliver(harness.batch(0, 100))
    harness.client.delete("orders")
    replay = sink.deliver(harness.batch(0, 100))
    sink.close()
    assert replay.absorbed == 100 - len(_of(1, 3, end=100))
    assert harness.held() == expected(numbered(0, 100))


def test_neighbours_of_one_path_go_together_and_the_order_of_all_stays(
    endpoint: Endpoint,
) -> None:
    harness = RoutedWebhookHarness(endpoint)
    sink = harness.open()
    assert sink.deliver(harness.batch(0, 30)).settled == 30
    sink.close()
    assert [(one.path, len(one.messages)) for one in endpoint.accepted] == [
        ("/changes", 3),
        ("/changes/orders", 3),
        ("/changes/users", 3),
        ("/changes/orders", 3),
    ] * 2 + [("/changes", 3), ("/changes/orders", 3)]
    assert harness.held() == expected(numbered(0, 30))


def test_a_path_that_refuses_a_message_settles_what_came_before(endpoint: Endpoint) -> None:
    harness = RoutedWebhookHarness(endpoint)
    endpoint.refuses = lambda messages: any(
        one["record"] == numbered(7, 8)[0].record for one in messages
    )
    sink = harness.open()
    delivery = sink.deliver(harness.batch(0, 30))
    sink.close()
    assert delivery.settled == 7
    assert harness.held() == expected(numbered(0, 7))


def test_a_path_is_put_below_the_url_and_its_query_stays(endpoint: Endpoint) -> None:
    sink = WebhookSink(f"{endpoint.url}/?key=a%20b", consumer=CONSUMER, batch_size=10)
    assert sink.deliver(routed(batch(3, 6), "/a%2520b/")).settled == 3
    sink.close()
    assert endpoint.accepted[0].path == "/changes/a%2520b/orders?key=a%20b"

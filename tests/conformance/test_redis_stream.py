"""What the Redis sink promises beyond the common suite."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from cdc.cursor import ORIGIN
from cdc.errors import OperatorError, PoisonError, TransientError
from cdc.service.embedded_redis import EmbeddedRedis
from sinks import redis_stream
from sinks.redis_errors import from_reply
from sinks.redis_stream import RedisStreamSink
from tests.conformance.harness import RedisHarness
from tests.conformance.messages import (
    CONSUMER,
    Sample,
    batch,
    batch_of,
    cursor_of,
    expected,
    numbered,
)
from tests.waiting import until


@pytest.fixture
def harness(redis_url: str, redis_client: redis.Redis) -> RedisHarness:
    return RedisHarness(redis_url, redis_client)


def _sink(url: str, **settings: object) -> RedisStreamSink:
    plain = {"consumer": CONSUMER, "stream_key": f"walbrook.{CONSUMER}", "batch_size": 100}
    return RedisStreamSink(**{**plain, "timeout_s": 5.0, "url": url, **settings})  # type: ignore[arg-type]


def _calls(harness: RedisHarness, command: str) -> int:
    """How often a command was called at the server."""
    stats: dict[str, Any] = harness.client.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


def test_entry_ids_are_the_cursors(harness: RedisHarness) -> None:
    harness.open().deliver(batch(0, 20))
    ids = [entry_id.decode() for entry_id, _ in harness.entries()]
    assert ids == [f"{cursor_of(n).lsn}-{cursor_of(n).idx}" for n in range(20)]


def test_memory_that_runs_out_in_the_middle_of_a_batch_loses_nothing(
    own_redis: EmbeddedRedis,
) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        harness = RedisHarness(own_redis.url, client)
        sink = harness.open()
        used = int(client.info("memory")["used_memory"])
        client.config_set("maxmemory", used + 1_500_000)
        delivery = sink.deliver(batch(0, 10_000))
        assert isinstance(delivery.error, TransientError)
        assert "OOM" in delivery.error.what
        assert 0 < delivery.settled < 10_000
        assert harness.held() == expected(numbered(0, delivery.settled))

        client.config_set("maxmemory", 0)
        rest = sink.deliver(batch(delivery.settled, 10_000))
        sink.close()
        assert (rest.error, rest.absorbed) == (None, 0)
        assert harness.held() == expected(numbered(0, 10_000))


def test_memory_that_comes_and_goes_while_delivering_loses_nothing(
    own_redis: EmbeddedRedis,
) -> None:
    done = threading.Event()

    def squeeze() -> None:
        with redis.Redis.from_url(own_redis.url) as other:
            while not done.is_set():
                other.config_set("maxmemory", 1)
                other.config_set("maxmemory", 0)

    with redis.Redis.from_url(own_redis.url) as client:
        harness = RedisHarness(own_redis.url, client)
        sink = harness.open()
        squeezer = threading.Thread(target=squeeze)
        squeezer.start()
        whole = batch(0, 5_000)
        settled = refused = 0
        try:
            while settled < 5_000:
                delivery = sink.deliver(whole.slice(settled))
                assert delivery.absorbed == 0
                settled += delivery.settled
                refused += delivery.error is not None
        finally:
            done.set()
            squeezer.join()
        sink.close()
        assert refused
        assert harness.held() == expected(numbered(0, 5_000))


def test_a_server_that_goes_away_and_comes_back_is_found_again(own_redis: EmbeddedRedis) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        harness = RedisHarness(own_redis.url, client)
        sink = harness.open()
        assert sink.deliver(batch(0, 50)).settled == 50
        own_redis.stop(immediate=True)
        for _ in range(2):
            delivery = sink.deliver(batch(50, 80))
            assert delivery.settled == 0
            assert isinstance(delivery.error, TransientError)
        own_redis.start()
        assert sink.deliver(batch(50, 80)).settled == 30
        sink.close()
        assert harness.held() == expected(numbered(50, 80), start=50)  # it keeps nothing on disk


def test_a_server_that_does_not_answer_is_given_up_in_time(harness: RedisHarness) -> None:
    sink = _sink(harness.url, timeout_s=0.2)
    assert sink.deliver(batch(0, 10)).settled == 10
    harness.client.client_pause(60_000, all=False)
    try:
        delivery = sink.deliver(batch(10, 20))
    finally:
        harness.client.client_unpause()
    assert delivery.settled == 0
    assert isinstance(delivery.error, TransientError)
    assert sink.deliver(batch(10, 30)).settled == 20
    sink.close()
    assert harness.held() == expected(numbered(0, 30))


def test_a_trimmed_stream_still_absorbs_a_replay(harness: RedisHarness) -> None:
    sink = harness.open()
    sink.deliver(batch(0, 50))
    harness.client.xtrim(harness.key, maxlen=0, approximate=False)
    delivery = sink.deliver(batch(0, 60))
    sink.close()
    assert (delivery.settled, delivery.absorbed) == (60, 50)
    assert harness.held() == expected(numbered(50, 60), start=50)


def test_a_key_that_holds_something_else_stops_the_sink(harness: RedisHarness) -> None:
    harness.client.set(harness.key, "mine")
    delivery = harness.open().deliver(batch(0, 10))
    assert delivery.settled == 0
    assert isinstance(delivery.error, OperatorError)
    assert "stream_key" in delivery.error.fix
    assert harness.client.get(harness.key) == b"mine"


def test_a_key_that_becomes_something_else_stops_the_open_sink(harness: RedisHarness) -> None:
    sink = harness.open()
    sink.deliver(batch(0, 10))
    harness.client.delete(harness.key)
    harness.client.set(harness.key, "mine")
    delivery = sink.deliver(batch(10, 300))
    sink.close()
    assert delivery.settled == 0
    assert isinstance(delivery.error, OperatorError)


@pytest.mark.parametrize("entry_id", ["*", "18446744073709551615-0"])
def test_a_stream_of_another_writer_is_refused_and_not_taken_for_a_replay(
    entry_id: str, harness: RedisHarness
) -> None:
    harness.client.xadd(harness.key, {"hello": "world"}, id=entry_id)
    delivery = harness.open().deliver(batch(0, 10))
    assert delivery.settled == 0
    assert isinstance(delivery.error, OperatorError)


def test_another_writer_that_comes_while_the_sink_is_open_is_not_taken_for_a_replay(
    harness: RedisHarness,
) -> None:
    driver, worker = harness.open(), harness.open()
    assert driver.deliver(batch(0, 10)).settled == 10
    assert worker.deliver(batch(10, 20)).settled == 10
    stranger = harness.client.xadd(harness.key, {"hello": "world"})
    for sink in (driver, worker, driver):
        delivery = sink.deliver(batch(20, 30))
        assert (delivery.settled, delivery.absorbed) == (0, 0)
        assert isinstance(delivery.error, OperatorError)
    harness.client.delete(harness.key)  # an XDEL leaves the stream's top where it is
    assert driver.deliver(batch(20, 30)).absorbed == 0
    driver.close()
    worker.close()
    assert stranger not in dict(harness.entries())
    assert harness.held() == expected(numbered(20, 30), start=20)


@pytest.mark.parametrize("behind", [9, 25])
def test_an_entry_that_another_writer_slips_in_between_deliveries_stops_the_sink(
    behind: int, harness: RedisHarness
) -> None:
    sink = harness.open()
    assert sink.deliver(batch(0, 10)).settled == 10
    stranger = f"{cursor_of(behind).lsn}-{cursor_of(behind).idx + 1}"
    harness.client.xadd(harness.key, {"hello": "world"}, id=stranger)
    for _ in range(2):
        delivery = sink.deliver(batch(10, 30))
        assert (delivery.settled, delivery.absorbed) == (0, 0)
        assert isinstance(delivery.error, OperatorError)
    sink.close()
    assert len(harness.entries()) == 11, "nothing was added behind it"


def test_a_stream_that_its_readers_touch_is_added_to_all_the_same(harness: RedisHarness) -> None:
    sink = harness.open()
    touched: list[Callable[[], object]] = [
        lambda: harness.client.xtrim(harness.key, maxlen=3, approximate=False),
        lambda: harness.client.xdel(harness.key, harness.entries()[-1][0]),
        lambda: harness.client.delete(harness.key),
    ]
    start = 0
    for touch in touched:
        assert sink.deliver(batch(start, start + 10)).settled == 10
        touch()
        start += 10
    delivery = sink.deliver(batch(start, start + 10))
    sink.close()
    assert (delivery.settled, delivery.absorbed, delivery.top) == (10, 0, ORIGIN)
    assert harness.held() == expected(numbered(start, start + 10), start=start)


def test_a_stream_is_looked_at_ahead_of_the_next_delivery(harness: RedisHarness) -> None:
    sink, watched = harness.open(), _calls(harness, "watch")
    sink.deliver(batch(0, 10))
    until("the look for the next delivery", lambda: _calls(harness, "watch") == watched + 1)
    looked = _calls(harness, "xrevrange")
    sink.deliver(batch(10, 20))
    until("the look for the one after", lambda: _calls(harness, "watch") == watched + 2)
    sink.close()
    assert _calls(harness, "xrevrange") == looked + 1, "none before the second delivery"


def test_a_user_who_may_watch_but_not_ask_can_deliver(own_redis: EmbeddedRedis) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        rights = ["+multi", "+exec", "+xadd", "+xrevrange", "+watch"]
        client.execute_command("ACL", "SETUSER", "writer", "on", ">word", "~walbrook.*", *rights)
    place = own_redis.url.removeprefix("redis://")
    sink = _sink(f"redis://writer:word@{place}")
    for start in (0, 10, 20):
        assert sink.deliver(batch(start, start + 10)).settled == 10
    sink.close()


def test_the_stream_of_another_consumer_is_refused(harness: RedisHarness) -> None:
    harness.open().deliver(batch(0, 10))
    delivery = _sink(harness.url, consumer="another").deliver(batch(0, 20))
    assert delivery.settled == 0
    assert isinstance(delivery.error, OperatorError)
    assert harness.held() == expected(numbered(0, 10))


def test_wrong_credentials_stop_the_sink_and_are_not_repeated(own_redis: EmbeddedRedis) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("requirepass", "the-right-one")
    place = own_redis.url.removeprefix("redis://")
    for url in (own_redis.url, f"redis://:tell-nobody@{place}"):
        delivery = _sink(url).deliver(batch(0, 10))
        assert delivery.settled == 0
        assert isinstance(delivery.error, OperatorError)
        assert "tell-nobody" not in str(delivery.error)
    assert _sink(f"redis://:the-right-one@{place}").deliver(batch(0, 10)).settled == 10


def test_a_user_without_the_right_to_add_stops_the_sink(own_redis: EmbeddedRedis) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        client.execute_command(
            "ACL", "SETUSER", "reader", "on", ">word", "~*", "+@read", "+multi", "+exec"
        )
        place = own_redis.url.removeprefix("redis://")
        delivery = _sink(f"redis://reader:word@{place}").deliver(batch(0, 10))
        assert delivery.settled == 0
        assert isinstance(delivery.error, OperatorError)
        assert "XADD" in delivery.error.fix


def test_a_user_with_the_rights_that_the_error_names_can_deliver(own_redis: EmbeddedRedis) -> None:
    error = from_reply("NOPERM this user has no permissions")
    named = re.findall(r"\b[A-Z]{3,}\b", error.fix)
    assert named
    with redis.Redis.from_url(own_redis.url) as client:
        rights = [f"+{command.lower()}" for command in named]
        client.execute_command("ACL", "SETUSER", "writer", "on", ">word", "~walbrook.*", *rights)
    place = own_redis.url.removeprefix("redis://")
    sink = _sink(f"redis://writer:word@{place}")
    assert sink.deliver(batch(0, 10)).settled == 10
    sink.close()


def test_a_message_too_large_for_redis_is_poison_and_the_ones_before_it_are_settled(
    harness: RedisHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_stream, "_REQUEST_BYTES", 1_000)
    monkeypatch.setattr(redis_stream, "_MESSAGE_BYTES_MAX", 10_000)
    samples = numbered(0, 20)
    samples[7] = Sample({"blob": "x" * 20_000})
    sink = harness.open()
    delivery = sink.deliver(batch_of(samples))
    assert delivery.settled == 7
    assert isinstance(delivery.error, PoisonError)
    assert str(cursor_of(7)) in delivery.error.what
    assert sink.deliver(batch(8, 20)).settled == 12
    sink.close()
    assert [one.cursor for one in harness.held()] == [cursor_of(n) for n in range(20) if n != 7]

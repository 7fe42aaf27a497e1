"""What the Redis sink promises beyond the common suite."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from cdc.cursor import ORIGIN
from cdc.errors import OperatorError, PoisonError, TransientError
from cdc.generation import Generation
from demo.embedded_redis import EmbeddedRedis
from sinks import redis_stream
from sinks.redis_errors import from_reply
from sinks.redis_stream import RedisStreamSink
from tests.conformance.harness import RedisHarness, routed
from tests.conformance.messages import (
    CONSUMER,
    NOON_US,
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


def _plain(harness: RedisHarness) -> Any:
    """The client, for commands that it has no method for."""
    return harness.client


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
    sink, looked = harness.open(), _calls(harness, "watch")
    sink.deliver(batch(0, 10))
    until("the look for the next delivery", lambda: _calls(harness, "watch") == looked + 2)
    sink.deliver(batch(10, 20))
    until("the look for the one after", lambda: _calls(harness, "watch") == looked + 3)
    sink.close()
    assert _calls(harness, "watch") == looked + 3, "none before the second delivery"


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


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "new connection"])
@pytest.mark.parametrize("moved_by", ["an entry that was deleted", "XSETID"])
def test_ids_that_another_writer_moved_are_refused_with_the_ways_out(
    harness: RedisHarness, moved_by: str, is_open: bool
) -> None:
    sink = harness.open()
    assert sink.deliver(batch(0, 10)).settled == 10
    if not is_open:
        sink.close()
    ahead = f"{cursor_of(15).lsn}-{cursor_of(15).idx}"
    if moved_by == "XSETID":
        _plain(harness).execute_command("XSETID", harness.key, ahead)
    else:
        harness.client.xadd(harness.key, {"hello": "world"}, id=ahead)
        harness.client.xdel(harness.key, ahead)
    for _ in range(2):
        delivery = sink.deliver(batch(10, 20))
        assert (delivery.settled, delivery.absorbed) == (0, 0)
        assert isinstance(delivery.error, OperatorError)
        assert delivery.error.kind == "ids_moved"
        assert "new_generation" in delivery.error.fix
        assert "truncate" in delivery.error.fix
    sink.close()
    assert harness.open().deliver(batch(10, 20)).settled == 0, "also after a restart"
    for generation, stream in (
        (Generation(2), f"{harness.key}.generation-2"),
        (Generation(1, 1), harness.key),
    ):
        way_out = _sink(harness.url, generation=generation)
        assert way_out.deliver(batch(10, 20)).settled == 10
        way_out.close()
        assert len(harness.entries_of(stream)) == 10


def test_ids_that_were_moved_below_what_comes_next_do_no_harm(harness: RedisHarness) -> None:
    sink = harness.open()
    sink.deliver(batch(0, 10))
    _plain(harness).execute_command(
        "XSETID", harness.key, f"{cursor_of(9).lsn}-{cursor_of(9).idx + 1}"
    )
    assert sink.deliver(batch(20, 30)).settled == 10
    sink.close()


def test_a_tail_that_readers_deleted_is_known_after_a_crash(harness: RedisHarness) -> None:
    """What was delivered and not settled comes again, and the stream does not show it any more."""
    crashed = harness.open()
    assert crashed.deliver(batch(0, 500)).settled == 500
    crashed.close()
    harness.client.xtrim(harness.key, maxlen=0, approximate=False)
    sink = harness.open()
    for start in (0, 200):  # the last id is beyond the first batch that comes again
        delivery = sink.deliver(batch(start, start + 200))
        assert (delivery.settled, delivery.absorbed, delivery.error) == (200, 200, None)
    assert sink.deliver(batch(400, 600)).absorbed == 100
    sink.close()
    assert harness.held() == expected(numbered(500, 600), start=500)


@pytest.mark.parametrize("exactly", [True, False])
def test_a_stream_is_kept_to_its_length_and_absorbs_a_replay(
    harness: RedisHarness, exactly: bool
) -> None:
    sink = _sink(harness.url, max_length=200, trim_exactly=exactly)
    first = sink.deliver(batch(0, 2_000))
    assert (first.settled, first.absorbed) == (2_000, 0)
    length = len(harness.entries())
    assert length == 200 if exactly else 200 <= length < 400
    again = sink.deliver(batch(1_000, 2_100))
    sink.close()
    assert (again.settled, again.absorbed, again.top) == (1_100, 1_000, cursor_of(1_999))
    assert harness.held()[-100:] == expected(numbered(2_000, 2_100), start=2_000)


def test_entries_are_removed_by_the_age_of_their_commits_also_after_a_restart(
    harness: RedisHarness,
) -> None:
    # A transaction a minute: those before the fiftieth are too old.
    age_s = time.time() - (NOON_US / 1e6 + 60 * 50 - 30)
    first = _sink(harness.url, max_age_s=age_s, trim_exactly=True)
    assert first.deliver(batch(0, 1_000)).settled == 1_000
    first.close()
    second = _sink(harness.url, max_age_s=age_s, trim_exactly=True)  # it has seen none of them
    delivery = second.deliver(batch(990, 1_010))
    assert (delivery.settled, delivery.absorbed, delivery.top) == (20, 10, cursor_of(999))
    assert harness.held() == expected(numbered(350, 1_010), start=350)
    calls = _calls(harness, "xtrim")
    assert second.deliver(batch(1_010, 1_020)).settled == 10
    second.close()
    assert _calls(harness, "xtrim") == calls, "not again so soon"


def test_routed_streams_are_trimmed_by_age_each(harness: RedisHarness) -> None:
    age_s = time.time() - (NOON_US / 1e6 + 60 * 50 - 30)
    sink = _sink(harness.url, max_age_s=age_s, trim_exactly=True)
    for start, end in ((0, 1_000), (1_000, 1_100)):
        assert sink.deliver(routed(batch(start, end))).error is None
        sink.close()
        sink = _sink(harness.url, max_age_s=age_s, trim_exactly=True)
    sink.close()
    for key in (harness.key, "orders", "users"):
        assert harness.entries_of(key)[0][0] >= b"%d" % cursor_of(350).lsn


def test_a_user_who_may_not_trim_is_refused_with_the_reason(own_redis: EmbeddedRedis) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        rights = ["+multi", "+exec", "+xadd", "+xrevrange"]
        client.execute_command("ACL", "SETUSER", "writer", "on", ">word", "~*", *rights)
    place = own_redis.url.removeprefix("redis://")
    delivery = _sink(f"redis://writer:word@{place}", max_age_s=60.0).deliver(batch(0, 10))
    assert isinstance(delivery.error, OperatorError)
    assert "NOPERM" in delivery.error.what

"""What every sink with a position of its own does for a rewound consumer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis

from cdc.errors import OperatorError
from cdc.generation import FIRST, Generation
from sinks.base import Sink
from sinks.file import FileSink
from sinks.parquet import ParquetSink
from sinks.redis_stream import RedisStreamSink
from tests.conformance.crash import Killed, death_at
from tests.conformance.harness import FileHarness, ParquetHarness, RedisHarness, routed
from tests.conformance.messages import CONSUMER, Held, batch, expected, numbered

KEY = f"walbrook.{CONSUMER}"
EMPTIED = Generation(1, 1)


class Place:
    """A destination whose sinks are opened for a generation."""

    def __init__(
        self, opened: Callable[[Generation], Sink], held: Callable[[Generation], list[Held]]
    ) -> None:
        self.opened, self._held = opened, held

    def deliver(self, generation: Generation, start: int, end: int) -> tuple[int, int]:
        sink = self.opened(generation)
        delivery = sink.deliver(batch(start, end))
        sink.close()
        assert delivery.error is None, delivery.error
        return delivery.settled, delivery.absorbed

    def numbers(self, generation: Generation = FIRST) -> list[int]:
        found = self._held(generation)
        assert found == expected(numbered(0, 10_000))[_first(found) : _first(found) + len(found)]
        return list(range(_first(found), _first(found) + len(found)))


def _first(found: list[Held]) -> int:
    return int(found[0].record["id"]) if found else 0  # type: ignore[index]


def _file(directory: Path) -> Place:
    path = directory / "out" / "changes"

    def held(generation: Generation) -> list[Held]:
        harness = FileHarness(directory)
        harness.directory = directory / "shown"
        harness.directory.mkdir(exist_ok=True)
        link = harness.directory / "changes"
        link.unlink(missing_ok=True)
        link.symlink_to(path.with_name(generation.named(path.name)))
        return harness.held()

    return Place(
        lambda generation: FileSink(
            path, consumer=CONSUMER, rotate_bytes=20_000, generation=generation
        ),
        held,
    )


def _parquet(directory: Path) -> Place:
    path = directory / "lake" / "changes"

    def held(generation: Generation) -> list[Held]:
        harness = ParquetHarness(directory)
        harness.directory = directory / "shown"
        harness.directory.mkdir(exist_ok=True)
        link = harness.directory / "changes"
        link.unlink(missing_ok=True)
        link.symlink_to(path.with_name(generation.named(path.name)))
        return harness.held()

    return Place(
        lambda generation: ParquetSink(path, consumer=CONSUMER, generation=generation), held
    )


def _redis(url: str, client: redis.Redis) -> Place:
    def held(generation: Generation) -> list[Held]:
        harness = RedisHarness(url, client)
        harness.key = generation.named(KEY)
        return harness.held()

    return Place(lambda generation: _stream(url, generation), held)


def _stream(url: str, generation: Generation, **settings: Any) -> RedisStreamSink:
    return RedisStreamSink(
        consumer=CONSUMER, stream_key=KEY, batch_size=100, timeout_s=10, url=url,
        generation=generation, **settings,
    )  # fmt: skip


@pytest.fixture(params=["file", "parquet", "redis_stream"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "file":
        return _file(tmp_path)
    if request.param == "parquet":
        return _parquet(tmp_path)
    return _redis(request.getfixturevalue("redis_url"), request.getfixturevalue("redis_client"))


def test_a_new_generation_gets_everything_and_the_old_one_stays(place: Place) -> None:
    place.deliver(FIRST, 0, 300)
    second = Generation(2)
    assert place.deliver(second, 50, 250) == (200, 0)
    assert place.deliver(second, 200, 400) == (200, 50), "a replay is absorbed there too"
    assert place.numbers(FIRST) == list(range(300))
    assert place.numbers(second) == list(range(50, 400))


def test_a_truncated_place_holds_what_was_delivered_since(place: Place) -> None:
    place.deliver(FIRST, 0, 300)
    assert place.deliver(EMPTIED, 50, 250) == (200, 0)
    assert place.deliver(EMPTIED, 200, 400) == (200, 50)
    assert place.numbers() == list(range(50, 400))
    twice = Generation(1, 2)
    assert place.deliver(twice, 0, 20) == (20, 0)
    assert place.numbers() == list(range(20))


def test_a_place_that_is_truncated_before_anything_was_delivered_is_begun(place: Place) -> None:
    assert place.deliver(Generation(3, 2), 0, 20) == (20, 0)
    assert place.numbers(Generation(3)) == list(range(20))


def test_a_sink_that_is_out_of_date_delivers_nothing_to_a_truncated_place(place: Place) -> None:
    stale = place.opened(FIRST)
    assert stale.deliver(batch(0, 300)).settled == 300
    place.deliver(EMPTIED, 50, 100)
    for late in (stale, place.opened(FIRST)):
        delivery = late.deliver(batch(300, 400))
        assert (delivery.settled, delivery.absorbed) == (0, 0)
        assert isinstance(delivery.error, OperatorError)
        assert delivery.error.kind == "truncated_since"
        late.close()
    assert place.deliver(EMPTIED, 100, 120) == (20, 0), "nothing was taken for a repeat"
    assert place.numbers() == list(range(50, 120))


def test_a_sink_that_goes_out_of_date_in_the_middle_of_a_delivery_adds_nothing_more(
    redis_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends ten requests; the stream is truncated behind the second one."""
    place, stale = _redis(redis_url, redis_client), _stream(redis_url, FIRST)
    sent = 0
    outcome = RedisStreamSink._outcome

    def second_is_last(self: RedisStreamSink, messages: int) -> Any:
        nonlocal sent
        answered = outcome(self, messages)
        if self is stale:
            sent += 1
            if sent == 2:
                place.deliver(EMPTIED, 0, 50)
        return answered

    monkeypatch.setattr(RedisStreamSink, "_outcome", second_is_last)
    delivery = stale.deliver(batch(0, 1_000))
    stale.close()
    assert delivery.settled == 200
    assert delivery.error is not None
    assert delivery.error.kind == "truncated_since"
    assert place.deliver(EMPTIED, 50, 100) == (50, 0)
    assert place.numbers() == list(range(100))


def test_two_sinks_that_truncate_at_once_truncate_once(place: Place) -> None:
    place.deliver(FIRST, 0, 300)
    failed: list[object] = []

    def run() -> None:
        sink = place.opened(EMPTIED)
        for start in range(0, 200, 20):
            delivery = sink.deliver(batch(start, start + 20))
            failed.extend([] if delivery.error is None else [delivery.error])
        sink.close()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert place.numbers() == list(range(200))


@pytest.mark.parametrize("torn", [False, True], ids=["before", "in the middle of"])
@pytest.mark.parametrize("kind", ["file", pytest.param("parquet", marks=pytest.mark.sinks)])
def test_a_death_at_any_step_of_a_truncation_ends_right(
    kind: str, torn: bool, tmp_path: Path
) -> None:
    step, finished = 0, False
    while not finished:
        step += 1
        place = (_file if kind == "file" else _parquet)(tmp_path / f"{step}")
        (tmp_path / f"{step}").mkdir()
        place.deliver(FIRST, 0, 200)
        sink = place.opened(EMPTIED)
        try:
            with death_at(step, torn=torn):
                sink.deliver(batch(40, 60))
            finished = True
        except Killed:
            pass
        settled, _ = place.deliver(EMPTIED, 40, 80)
        assert settled == 40
        assert place.numbers() == list(range(40, 80)), f"step {step}"
    assert step > 8


def test_readers_find_the_current_generation(
    tmp_path: Path, redis_url: str, redis_client: redis.Redis
) -> None:
    second, third = Generation(2), Generation(3)
    for make, pointer in (
        (_file, tmp_path / "out" / "changes" / ".generation"),
        (_parquet, tmp_path / "lake" / "changes" / "_walbrook" / "generation"),
    ):
        place = make(tmp_path)
        place.deliver(FIRST, 0, 10)
        assert not pointer.exists()
        place.deliver(third, 0, 10)
        place.deliver(second, 0, 10)  # a process that is out of date
        found = orjson.loads(pointer.read_bytes())
        assert found["generation"] == 3
        assert Path(found["path"]).is_dir()
        assert found["path"].endswith("changes.generation-3")
    place = _redis(redis_url, redis_client)
    for generation in (FIRST, third, second):
        place.deliver(generation, 0, 10)
    record: Any = redis_client.hgetall(f"{{{KEY}}}:walbrook")
    assert record[b"stream"].decode() == f"{KEY}.generation-3"
    assert redis_client.xlen(record[b"stream"]) == 10


def test_groups_of_readers_begin_again_with_a_truncated_stream(
    redis_url: str, redis_client: redis.Redis
) -> None:
    place = _redis(redis_url, redis_client)
    place.deliver(FIRST, 0, 10)
    redis_client.xgroup_create(KEY, "readers", id="0")
    assert len(redis_client.xreadgroup("readers", "one", {KEY: ">"})[0][1]) == 10  # type: ignore[index]
    place.deliver(EMPTIED, 5, 12)
    assert len(redis_client.xreadgroup("readers", "one", {KEY: ">"})[0][1]) == 7  # type: ignore[index]


def test_routed_streams_of_a_new_generation_are_streams_of_their_own(
    redis_url: str, redis_client: redis.Redis
) -> None:
    for generation in (FIRST, Generation(2)):
        sink = _stream(redis_url, generation)
        assert sink.deliver(routed(batch(0, 30))).settled == 30
        sink.close()
    for key in (KEY, "orders", "users"):
        assert redis_client.xlen(key) == redis_client.xlen(f"{key}.generation-2") > 0


def test_an_account_that_may_not_keep_a_record_learns_what_a_rewind_needs(
    redis_url: str, redis_client: redis.Redis
) -> None:
    rights = ["+multi", "+exec", "+xadd", "+xrevrange"]
    client: Any = redis_client
    client.execute_command("ACL", "SETUSER", "narrow", "on", ">word", "~*", *rights)
    url = redis_url.replace("redis://", "redis://narrow:word@")
    try:
        for generation in (EMPTIED, Generation(2)):
            delivery = _stream(url, generation).deliver(batch(0, 10))
            assert delivery.settled == 0
            assert isinstance(delivery.error, OperatorError)
            assert delivery.error.kind == "needs_rights"
            assert "HSET" in delivery.error.fix
    finally:
        client.execute_command("ACL", "DELUSER", "narrow")


def test_a_busy_reader_that_deletes_does_not_hold_the_sink_up(
    redis_url: str, redis_client: redis.Redis
) -> None:
    done = threading.Event()

    def consume() -> None:
        with redis.Redis.from_url(redis_url) as reader:
            while not done.is_set():
                found: Any = reader.xrange(KEY, count=50)
                if found:
                    reader.xdel(KEY, *(entry[0] for entry in found))

    sink, reader = _stream(redis_url, FIRST), threading.Thread(target=consume)
    reader.start()
    try:
        for start in range(0, 5_000, 500):
            delivery = sink.deliver(batch(start, start + 500))
            assert (delivery.settled, delivery.absorbed, delivery.error) == (500, 0, None)
    finally:
        done.set()
        reader.join()
    sink.close()

"""A destination that keeps a position knows whose it is, and says how far it had come."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from cdc.cursor import ORIGIN
from cdc.errors import OperatorError
from sinks import Sink
from sinks.file import FileSink
from sinks.parquet import ParquetSink
from sinks.redis_stream import RedisStreamSink
from tests.conformance.messages import CONSUMER, batch, cursor_of

KEY = f"walbrook.{CONSUMER}"


def on_disk(kind: str, directory: Path, consumer: str) -> Sink:
    if kind == "file":
        return FileSink(directory, consumer=consumer, rotate_bytes=1000)
    return ParquetSink(directory, consumer=consumer)


@pytest.fixture
def stream(redis_client: redis.Redis, redis_url: str) -> Iterator[RedisStreamSink]:
    sink = RedisStreamSink(
        consumer=CONSUMER, stream_key=KEY, batch_size=100, timeout_s=10, url=redis_url
    )
    yield sink
    sink.close()


@pytest.mark.parametrize("kind", ["file", "parquet"])
def test_a_directory_of_another_consumer_is_refused_and_stays_as_it_is(
    kind: str, tmp_path: Path
) -> None:
    on_disk(kind, tmp_path, "orders").deliver(batch(0, 10))
    stranger = on_disk(kind, tmp_path, "renamed").deliver(batch(5, 20))
    assert stranger.settled == 0
    assert isinstance(stranger.error, OperatorError)
    assert "of the consumer orders, not of renamed" in stranger.error.what
    assert "empty directory" in stranger.error.fix
    back = on_disk(kind, tmp_path, "orders").deliver(batch(5, 20))
    assert (back.settled, back.absorbed, back.error) == (15, 5, None)


@pytest.mark.parametrize("kind", ["file", "parquet"])
def test_a_directory_says_how_far_it_had_come_before_each_delivery(
    kind: str, tmp_path: Path
) -> None:
    sink = on_disk(kind, tmp_path / "out", CONSUMER)
    assert sink.deliver(batch(0, 10)).top == ORIGIN
    assert sink.deliver(batch(10, 20)).top == cursor_of(9)
    os.rename(tmp_path / "out", tmp_path / "away")
    assert sink.deliver(batch(20, 30)).top == ORIGIN
    assert sink.deliver(batch(30, 40)).top == cursor_of(29)


def test_a_stream_says_how_far_it_had_come_and_that_it_was_deleted(
    stream: RedisStreamSink, redis_client: redis.Redis
) -> None:
    assert stream.deliver(batch(0, 10)).top == ORIGIN
    assert stream.deliver(batch(10, 20)).top == cursor_of(9)
    redis_client.flushdb()
    assert stream.deliver(batch(20, 30)).top == ORIGIN
    stream.close()
    assert stream.deliver(batch(30, 40)).top == cursor_of(29)


def test_a_stream_that_its_readers_have_trimmed_has_lost_nothing(
    stream: RedisStreamSink, redis_client: redis.Redis
) -> None:
    stream.deliver(batch(0, 10))
    redis_client.xtrim(KEY, maxlen=0, approximate=False)
    stream.close()
    assert stream.deliver(batch(10, 20)).top == cursor_of(9)


def test_an_account_that_may_only_add_and_read_entries_can_deliver(
    redis_client: redis.Redis, redis_url: str
) -> None:
    commands = ["+xadd", "+xrevrange", "+multi", "+exec", "+select"]
    redis_client.acl_setuser(
        "narrow", enabled=True, passwords=["+p"], keys=["walbrook.*"], commands=commands
    )
    try:
        url = redis_url.replace("redis://", "redis://narrow:p@")
        sink = RedisStreamSink(
            consumer=CONSUMER, stream_key=KEY, batch_size=100, timeout_s=10, url=url
        )
        first, second = sink.deliver(batch(0, 10)), sink.deliver(batch(10, 20))
        sink.close()
        assert (first.settled, first.error, first.top) == (10, None, None)
        assert (second.settled, second.error, second.top) == (10, None, None)
    finally:
        redis_client.acl_deluser("narrow")


def test_a_folder_is_listed_again_only_after_another_process_delivered_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, other = (FileSink(tmp_path, consumer=CONSUMER, rotate_bytes=1000) for _ in range(2))
    sink.deliver(batch(0, 10))
    listed: list[Any] = []
    listdir = os.listdir

    def counted(path: Any) -> list[str]:
        listed.append(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", counted)
    for start in range(10, 60, 10):
        assert sink.deliver(batch(start, start + 10)).settled == 10
    assert listed == []
    other.deliver(batch(60, 70))
    # As if it had died in the middle of the next one.
    left = tmp_path / "changes-FFFFFFFF-00000000-0000000000.jsonl"
    left.write_text("half a line")
    assert sink.deliver(batch(70, 80)).settled == 10
    assert not left.exists()

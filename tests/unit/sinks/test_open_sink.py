"""A configured destination becomes the sink of its type."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from pydantic import TypeAdapter

from cdc.config.destination import Destination
from cdc.errors import ProtocolError
from cdc.queue.groups import BY_KEY
from sinks import open_sink
from sinks.file import FileSink
from sinks.lakehouse.parquet import TypedParquetSink
from sinks.parquet import ParquetSink
from sinks.postgres import PostgresSink
from sinks.pull import PullSink, Queue
from sinks.redis_stream import RedisStreamSink
from sinks.webhook import WebhookSink
from tests.conformance.harness import with_texts
from tests.conformance.messages import CONSUMER, batch
from tests.fix_http import Endpoint


def _destination(**settings: object) -> Destination:
    made: Destination = TypeAdapter(Destination).validate_python(settings)
    return made


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"type": "file", "path": "/tmp/none"}, FileSink),
        (
            {"type": "parquet", "columns": "json", "path": "/tmp/none", "compression": "none"},
            ParquetSink,
        ),
        ({"type": "parquet", "path": "/tmp/none"}, TypedParquetSink),
        ({"type": "postgres", "database": "copy"}, PostgresSink),
        ({"type": "postgres", "url": "postgres://u:p@h/d", "mode": "events"}, PostgresSink),
        ({"type": "redis_stream", "host": "localhost"}, RedisStreamSink),
        ({"type": "redis_stream", "host": "localhost", "tls": True}, RedisStreamSink),
        (
            {"type": "redis_stream", "url": "rediss://h:1/0", "tls": {"verify": False}},
            RedisStreamSink,
        ),
        ({"type": "webhook", "url": "https://example.com/changes"}, WebhookSink),
    ],
)
def test_each_type_opens_its_sink_without_connecting(
    settings: dict[str, object], kind: type[object]
) -> None:
    sink = open_sink(_destination(**settings), consumer=CONSUMER, batch_size=100)
    assert type(sink) is kind
    sink.close()


def test_a_pull_consumer_needs_to_know_where_its_queue_is() -> None:
    queue = Queue("host=localhost", "shop", BY_KEY)
    sink = open_sink(_destination(type="pull"), consumer=CONSUMER, batch_size=100, queue=queue)
    assert type(sink) is PullSink
    assert "localhost" not in repr(queue)
    with pytest.raises(ProtocolError):
        open_sink(_destination(type="pull"), consumer=CONSUMER, batch_size=100)


@pytest.mark.parametrize("compression", ["zstd", "snappy", "gzip", "none"])
@pytest.mark.parametrize(
    ("columns", "files"), [("json", "table=*/date=*/*"), ("typed", "public/*/v1/walbrook_date=*/*")]
)
def test_every_compression_that_can_be_configured_can_be_written(
    columns: str, files: str, compression: str, tmp_path: Path
) -> None:
    destination = _destination(
        type="parquet", columns=columns, path=str(tmp_path), compression=compression
    )
    sink = open_sink(destination, consumer=CONSUMER, batch_size=100)
    assert sink.deliver(with_texts(batch(0, 20))).error is None
    assert list(tmp_path.glob(f"{files}.parquet"))


def test_a_configured_webhook_sends_its_secret_headers(endpoint: Endpoint) -> None:
    destination = _destination(type="webhook", url=endpoint.url, headers={"X-Token": "t0ken"})
    sink = open_sink(destination, consumer=CONSUMER, batch_size=3)
    assert sink.deliver(batch(0, 5)).settled == 5
    sink.close()
    assert [request.headers["x-token"] for request in endpoint.requests] == ["t0ken", "t0ken"]


def test_a_stream_without_a_key_is_named_for_its_consumer(
    redis_url: str, redis_client: redis.Redis
) -> None:
    destination = _destination(type="redis_stream", url=redis_url)
    sink = open_sink(destination, consumer="invoices", batch_size=3)
    assert sink.deliver(batch(0, 5)).settled == 5
    sink.close()
    assert redis_client.xlen("walbrook.invoices") == 5

"""Where Debezium delivers: the sinks of Debezium Server, or the topics of Kafka Connect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cdc.service.imports.imported import Imported, Section

_SINK: Final = "debezium.sink."
_PRODUCER: Final = f"{_SINK}kafka.producer."
_READ: Final = {
    "kafka": {"kafka.producer.bootstrap.servers", "kafka.producer.key.serializer",
              "kafka.producer.value.serializer", "kafka.producer.compression.type"},
    "redis": {"redis.address", "redis.user", "redis.password", "redis.ssl.enabled"},
    "http": {"http.url", "http.timeout.ms"},
}  # fmt: skip


def sink_destination(
    given: Mapping[str, str], source: Mapping[str, str], prefix: str, found: Imported
) -> Section:
    """The destination; where there is nothing like it, a topic of Kafka with a remark."""
    kind = given.get(f"{_SINK}type")
    known = _READ.get(kind or "", set()) | {"type"}
    for key in sorted(given):
        if key.startswith(_SINK) and key.removeprefix(_SINK) not in known and kind in _READ:
            found.remark(key, "has no equivalent", "see the sink's page in docs/sinks")
    if kind == "redis":
        return _redis(given, prefix, found)
    if kind == "http":
        return _http(given)
    servers = given.get(f"{_PRODUCER}bootstrap.servers") or given.get("bootstrap.servers")
    if kind not in (None, "kafka"):
        found.remark(
            f"{_SINK}type", f"there is no destination of type {kind}", "write destination by hand"
        )
    elif servers is None:
        found.remark(
            "bootstrap.servers",
            "the address of Kafka is in the properties of the Connect worker",
            "write destination.bootstrap_servers",
        )
    return _kafka(servers or "localhost:9092", given, source, prefix, found)


def _kafka(
    servers: str,
    given: Mapping[str, str],
    source: Mapping[str, str],
    prefix: str,
    found: Imported,
) -> Section:
    kafka: Section = {
        "type": "kafka",
        "bootstrap_servers": [each.strip() for each in servers.split(",")],
        "topic": f"{prefix}.{{schema}}.{{table}}",
        "tombstones": source.get("tombstones.on.delete", "true") == "true",
    }
    compression = given.get(f"{_PRODUCER}compression.type")
    if compression:
        kafka["compression"] = compression
    converter = source.get("value.converter", "")
    if converter and not converter.endswith("JsonConverter"):
        found.remark(
            "value.converter",
            f"{converter.rpartition('.')[2]} is not there",
            "messages are JSON; schemas: true puts Connect's schema beside them",
        )
    elif source.get("value.converter.schemas.enable") == "true":
        kafka["schemas"] = True
    return kafka


def _redis(given: Mapping[str, str], prefix: str, found: Imported) -> Section:
    host, _, port = given.get(f"{_SINK}redis.address", "localhost:6379").rpartition(":")
    redis: Section = {"type": "redis_stream", "host": host, "port": port, "stream_key": prefix}
    for key, ours in {"redis.user": "username", "redis.password": "password"}.items():
        if f"{_SINK}{key}" in given:
            redis[ours] = given[f"{_SINK}{key}"]
    if given.get(f"{_SINK}redis.ssl.enabled") == "true":
        redis["tls"] = True
    found.remark(
        f"{_SINK}redis",
        "Debezium writes a stream per table, this sink one for all",
        "write routing for a stream per table: docs/expressions.md",
    )
    return redis


def _http(given: Mapping[str, str]) -> Section:
    webhook: Section = {
        "type": "webhook",
        "url": given.get(f"{_SINK}http.url", "http://localhost:8000"),
        "batch": False,
    }
    timeout = given.get(f"{_SINK}http.timeout.ms")
    return {**webhook, "timeout_ms": timeout} if timeout else webhook

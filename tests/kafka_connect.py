"""Kafka Connect's own classes, in a Java process of their own: what a connector makes of a message.

``JsonConverter`` reads keys and values as a worker does before it hands them to a sink connector.
``ExtractNewRecordState`` is the transform that Debezium's users put before a sink, which unwraps
the envelope.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyspark
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from cdc.service.process.java import find_java
from tests.kafka_jars import kafka_jars


@dataclass(frozen=True)
class Read:
    """A value as a connector sees it: its schema's name, and plain Python values."""

    schema: str | None
    value: Any


class KafkaConnect:
    """A converter for keys and one for values; a context manager.

    ``deletes`` says which of a delete and its tombstone the transform leaves as a tombstone.
    """

    def __init__(self, *, schemas: bool, deletes: str = "tombstone") -> None:
        (py4j,) = (Path(pyspark.__file__).parent / "jars").glob("py4j-*.jar")
        port = launch_gateway(
            jarpath=str(py4j),
            classpath=f"{kafka_jars()}/*",
            die_on_exit=True,
            java_path=str(find_java() / "bin" / "java"),
        )
        parameters = GatewayParameters(port=port, auto_convert=True)
        self._gateway = JavaGateway(gateway_parameters=parameters)
        self._jvm: Any = self._gateway.jvm
        self._converters = {}
        for is_key in (True, False):
            converter = self._jvm.org.apache.kafka.connect.json.JsonConverter()
            converter.configure({"schemas.enable": str(schemas).lower()}, is_key)
            self._converters[is_key] = converter
        self._unwrap = self._jvm.io.debezium.transforms.ExtractNewRecordState()
        self._unwrap.configure({"delete.tombstone.handling.mode": deletes})

    def key(self, topic: str, data: bytes | None) -> Read:
        return _read(self._converters[True].toConnectData(topic, data))

    def value(self, topic: str, data: bytes | None) -> Read:
        return _read(self._converters[False].toConnectData(topic, data))

    def unwrapped(self, topic: str, key: bytes | None, value: bytes | None) -> tuple[Any, Any]:
        """Key and value as a sink connector behind Debezium's transform gets them.

        A record that the transform drops has None for both.
        """
        of_key = self._converters[True].toConnectData(topic, key)
        of_value = self._converters[False].toConnectData(topic, value)
        record = self._jvm.org.apache.kafka.connect.sink.SinkRecord(
            topic, 0, of_key.schema(), of_key.value(), of_value.schema(), of_value.value(), 0
        )
        changed = self._unwrap.apply(record)
        if changed is None:
            return None, None
        return plain(changed.key()), plain(changed.value())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._gateway.shutdown()


def _read(found: Any) -> Read:
    schema = found.schema()
    return Read(None if schema is None else schema.name(), plain(found.value()))


def plain(value: Any) -> Any:
    """A value of Connect's as Python has it; structs and maps are dictionaries."""
    kind = type(value).__name__
    if kind == "JavaObject":
        return {field.name(): plain(value.get(field)) for field in value.schema().fields()}
    if kind in ("JavaMap", "JavaList"):
        items = value.items() if kind == "JavaMap" else enumerate(value)
        found = {key: plain(item) for key, item in items}
        return found if kind == "JavaMap" else list(found.values())
    return value

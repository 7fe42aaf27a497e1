"""Deliveries as spans of OpenTelemetry: read, decode, deliver and settle of each settled stretch.

They need the extra ``otel`` and an exporter in the environment (``OTEL_EXPORTER_OTLP_ENDPOINT``,
``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` or ``OTEL_TRACES_EXPORTER``); the SDK reads all other
variables itself. Invariants: spans have counts and cursors, never values of a row; an exporter
that does not answer delays no delivery, because spans leave through a bounded queue of the SDK.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Final

import structlog

from cdc.trace.records import DeliveryRecord
from cdc.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

_logger = structlog.get_logger("walbrook.trace")

_SCOPE: Final = "walbrook"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_EXPORTERS: Final = ("otlp", "console")


class Spans:
    """Makes the spans of one source's deliveries."""

    def __init__(self, source: str, provider: TracerProvider) -> None:
        self._source = source
        self._tracer: Tracer = provider.get_tracer(_SCOPE, VERSION)

    def delivered(self, delivery: DeliveryRecord, settling_us: int, settled_us: int) -> None:
        """One trace: from the commit of the last change until the settlement was written."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        times = delivery.timing
        known = [each for each in (times.committed_us, times.began_us, settling_us) if each]
        begins_us = min(known)
        whole = self._tracer.start_span(
            "walbrook.range", start_time=begins_us * 1000, attributes=self._attributes(delivery)
        )
        if delivery.error is not None:
            whole.set_status(Status(StatusCode.ERROR, delivery.error))
        context = set_span_in_context(whole)
        for name, start_us, end_us in (
            ("walbrook.read", times.committed_us, times.logged_us),
            ("walbrook.decode", times.decoded_from_us, times.decoded_us),
            ("walbrook.deliver", times.began_us, times.ended_us),
            ("walbrook.settle", settling_us, settled_us),
        ):
            if start_us and end_us:
                # The source's clock may be ahead of ours.
                span = self._tracer.start_span(name, context, start_time=start_us * 1000)
                span.end(max(start_us, end_us) * 1000)
        whole.end(settled_us * 1000)

    def _attributes(self, delivery: DeliveryRecord) -> Mapping[str, str | int]:
        return {
            "walbrook.source": self._source,
            "walbrook.consumer": delivery.consumer,
            "walbrook.from": str(delivery.start),
            "walbrook.to": str(delivery.end),
            "walbrook.ranges": delivery.ranges,
            "walbrook.rows": delivery.rows,
            "walbrook.delivered": delivery.delivered,
            "walbrook.absorbed": delivery.absorbed,
            "walbrook.queued": delivery.queued,
            "walbrook.refused": len(delivery.refusals) + delivery.unnamed,
            "walbrook.dead": delivery.dead,
        }


def open_spans(source: str) -> Spans | None:
    """None unless an exporter is configured and the extra is installed."""
    provider = _provider() if is_configured(os.environ) else None
    return None if provider is None else Spans(source, provider)


def is_configured(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for spans."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter:
        return exporter in _EXPORTERS
    return any(environment.get(name, "").strip() for name in _ENDPOINTS)


@cache
def _provider() -> TracerProvider | None:
    """One for the process; it exports what it still has when the process ends."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    except ImportError:
        _logger.warning(
            "trace.no_otel",
            what="OTEL_… asks for spans, and OpenTelemetry is not installed",
            fix="pip install 'walbrook[otel]'",
        )
        return None
    provider = TracerProvider(
        resource=Resource.create(
            {"service.name": os.environ.get("OTEL_SERVICE_NAME") or "walbrook"}
        )
    )
    to_console = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "console"
    exporter = ConsoleSpanExporter() if to_console else OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider

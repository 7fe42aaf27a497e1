"""Deliveries as spans: one trace per settled stretch, with counts and without values of rows."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cdc.cursor import Cursor
from cdc.trace import spans
from cdc.trace.record_log import RecordLog
from cdc.trace.records import DeliveryRecord, DeliveryTiming
from cdc.trace.spans import Spans, is_configured, open_spans
from tests.waiting import until

PARTS = ["walbrook.read", "walbrook.decode", "walbrook.deliver", "walbrook.settle"]


def delivery(**given: object) -> DeliveryRecord:
    start, end = Cursor(0x10, 0), Cursor(0x20, 3)
    timing = DeliveryTiming(50, 60, 30, 40, committed_us=10, logged_us=20)
    whole = DeliveryRecord(
        "hook", start, end, end, timing, ranges=2, rows=5, delivered=3, absorbed=1, queued=1
    )
    return replace(whole, **given)  # type: ignore[arg-type]


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def spans_to(exporter: InMemorySpanExporter) -> Spans:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans("shop", provider)


def test_a_settled_stretch_is_one_trace_from_commit_to_settlement(
    exporter: InMemorySpanExporter,
) -> None:
    spans_to(exporter).delivered(delivery(), settling_us=70, settled_us=80)
    *parts, whole = exporter.get_finished_spans()
    assert [part.name for part in parts] == PARTS
    assert [(part.start_time, part.end_time) for part in parts] == [
        (10_000, 20_000),
        (30_000, 40_000),
        (50_000, 60_000),
        (70_000, 80_000),
    ]
    assert (whole.name, whole.start_time, whole.end_time) == ("walbrook.range", 10_000, 80_000)
    assert whole.context is not None
    assert {part.parent.span_id for part in parts if part.parent} == {whole.context.span_id}
    assert dict(whole.attributes or {}) == {
        "walbrook.source": "shop",
        "walbrook.consumer": "hook",
        "walbrook.from": "0/10:0",
        "walbrook.to": "0/20:3",
        "walbrook.ranges": 2,
        "walbrook.rows": 5,
        "walbrook.delivered": 3,
        "walbrook.absorbed": 1,
        "walbrook.queued": 1,
        "walbrook.refused": 0,
        "walbrook.dead": 0,
    }


def test_a_part_of_which_nobody_noted_the_time_has_no_span(exporter: InMemorySpanExporter) -> None:
    spans_to(exporter).delivered(
        delivery(timing=DeliveryTiming(50, 60)), settling_us=70, settled_us=80
    )
    *parts, whole = exporter.get_finished_spans()
    assert [part.name for part in parts] == PARTS[2:]
    assert whole.start_time == 50_000


def test_a_delivery_that_failed_is_a_span_with_its_error(exporter: InMemorySpanExporter) -> None:
    spans_to(exporter).delivered(delivery(error="it answered 503"), settling_us=70, settled_us=80)
    whole = exporter.get_finished_spans()[-1]
    assert (whole.status.is_ok, whole.status.description) == (False, "it answered 503")


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "cdc"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
    ],
)
def test_spans_are_off_unless_the_environment_asks_for_them(
    environment: dict[str, str], wanted: bool
) -> None:
    assert is_configured(environment) is wanted


class Receiver:
    """An OTLP receiver on loopback: keeps the requests that it is sent."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append(ExportTraceServiceRequest.FromString(body))
                assert self.path == "/v1/traces"
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)

    def __enter__(self) -> Receiver:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def test_what_a_stage_records_reaches_an_otlp_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Receiver() as receiver:
        port = receiver.server.server_address[1]
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "cdc-test")
        spans._provider.cache_clear()
        try:
            records = RecordLog("shop", tmp_path)
            one = delivery()
            records.settled(records.begin([one]), [one])
            until("the spans", lambda: receiver.requests, 30)
        finally:
            provider = spans._provider()
            assert provider is not None
            provider.shutdown()
            spans._provider.cache_clear()
    (resource,) = receiver.requests[0].resource_spans
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert names["service.name"] == "cdc-test"
    found = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(found) == sorted([*PARTS, "walbrook.range"])


def test_without_the_extra_the_service_goes_on_without_spans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    spans._provider.cache_clear()
    try:
        assert open_spans("shop") is None
    finally:
        spans._provider.cache_clear()

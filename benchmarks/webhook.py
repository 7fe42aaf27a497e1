"""How many messages a second webhooks are sent, and how close that is to the endpoint's ceiling.

One service with a sink, a table and a path of the endpoint for each case: an endpoint that answers
at once or after 50 ms, and requests as by default, of one message, or of a hundred. The cases are
measured one after the other: rows are written while the reader is suspended, and the clock runs
from there to the last message that the endpoint counts. The ceiling of a case is what a bare loop
over sockets brings to the endpoint before it: requests as large, over as many connections, each
sent when the last was answered, with nothing else to do; or what a bare loop drains from a slot, if
that is less.
"""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from psycopg import sql

from benchmarks.fast_endpoint import FastEndpoint, path
from benchmarks.processes import Figures, ProcessMeter, cpu_s
from benchmarks.service import OWN_ROLES, RunningService
from benchmarks.sizes import Sizes, progress
from benchmarks.slot_drain import drain
from benchmarks.source import PUBLICATION, BenchmarkSource, open_source
from cdc.config import load as load_config
from cdc.errors import ProtocolError

_NAME, _BARE_LOOP = "webhook", "bare_loop"
_PAUSES_MS = (0, 50)
_BATCHES = {"default": None, "batch_1": 1, "batch_100": 100}
_CEILING_S = 2.0
_ROWS_MIN, _ROWS_MAX = 50, 200_000
_WARM_UP_ROWS = 200
_LARGE_WARM_UP_ROWS = 50_000  # for Spark's workers, which small micro-batches leave cold
_WARM_UP_ROWS_PER_S = 10_000
_TIMEOUT_S = 300.0
_TIME_OUT_S = 10.0
_FED_S = 0.2
_MORE = sql.SQL(
    "INSERT INTO {table} SELECT o.* FROM coalesce((SELECT max(id) FROM {table}), 0) m, "
    "new_orders(m + 1, m + %s) o"
)
_MESSAGE = (
    b'{"record":{"id":1000001,"quantity":1,"amount":0.01,"status":"packed","note":"left with the '
    b'neighbour at number 67","created_at":"2026-01-12T13:46:41.123456Z","paid":false,"details":'
    b'{"sku":"A-530","count":2}},"changes":null,"action":"insert","metadata":{"database_name":'
    b'"webhook","table_schema":"public","table_name":"hook_0_default","commit_timestamp":'
    b'"2026-01-01T00:00:00.123456Z","commit_lsn":26843545600,"commit_idx":1000,"idempotency_key":'
    b'"MjY4NDM1NDU2MDA6MTAwMA==","transaction_annotations":null,"consumer":{"id":"x","name":"x",'
    b'"annotations":null}}}'
)


@dataclass(frozen=True)
class WebhookCase:
    """One sink, and where its messages go."""

    batch: str
    pause_ms: int
    requests_at_once: int = 1
    messages_per_request: int = 1

    @property
    def name(self) -> str:
        return f"{self.batch}_{self.pause_ms}_ms"

    @property
    def table(self) -> str:
        return f"hook_{self.name}"


@dataclass(frozen=True)
class WebhookMeasured:
    """One case: messages a second of ours and of the bare loop."""

    case: WebhookCase
    rows: int
    rows_per_s: float
    bare_per_s: float
    ceiling_per_s: float
    at_once: int
    processes: Figures

    @property
    def ratio(self) -> float:
        return self.rows_per_s / self.ceiling_per_s

    def figures(self) -> dict[str, object]:
        used_s = cpu_s(self.processes, OWN_ROLES)
        return {
            "messages": self.rows,
            "messages_per_s": round(self.rows_per_s, 1),
            "bare_loop_per_s": round(self.bare_per_s, 1),
            "ceiling_per_s": round(self.ceiling_per_s, 1),
            "ratio": round(self.ratio, 3),
            "messages_per_request": self.case.messages_per_request,
            "requests_at_once": self.at_once,
            "cpu_us_per_message": round(used_s * 1e6 / self.rows, 1),
            "driver_cpu_us_per_message": round(
                cpu_s(self.processes, ["driver"]) * 1e6 / self.rows, 1
            ),
            "processes": self.processes,
        }


def run(sizes: Sizes) -> dict[str, object]:
    """Every case has messages for about ``sizes.seconds`` at the endpoint's ceiling."""
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-webhook-") as name,
        open_source(Path(name) / "postgres") as source,
        FastEndpoint() as endpoint,
    ):
        limit = _limit(source, sizes)
        with _service(Path(name), source, endpoint) as (service, cases):
            rows = min(_LARGE_WARM_UP_ROWS, _WARM_UP_ROWS_PER_S * sizes.seconds)
            _make_warm(source, service, endpoint, cases[0], rows)
            measured = [_measure(source, service, endpoint, case, limit, sizes) for case in cases]
            warnings = service.warnings()
    return {
        "webhook_ratio": round(min(each.ratio for each in measured), 3),
        "slot_rows_per_s": round(limit),
        **{f"messages_per_s_{each.case.name}": round(each.rows_per_s, 1) for each in measured},
        "cases": {each.case.name: each.figures() for each in measured},
        "warnings": warnings,
    }


@contextmanager
def _service(
    directory: Path, source: BenchmarkSource, endpoint: FastEndpoint
) -> Iterator[tuple[RunningService, list[WebhookCase]]]:
    """A service with a sink for each case, that has delivered something to each."""
    plain = [WebhookCase(batch, pause_ms) for pause_ms in _PAUSES_MS for batch in _BATCHES]
    sinks: dict[str, dict[str, object]] = {}
    settings: dict[str, dict[str, object]] = {}
    for case in plain:
        source.run(f"CREATE TABLE {case.table} (LIKE orders INCLUDING ALL)")
        source.run(f"ALTER PUBLICATION {PUBLICATION} ADD TABLE {case.table}")
        sinks[case.name] = {"type": "webhook", "url": endpoint.url(case.name, case.pause_ms)}
        settings[case.name] = {
            "source": {"include_tables": [f"public.{case.table}"]},
            "batch_size": _BATCHES[case.batch],
        }
    with RunningService(
        directory / "service", source, name=_NAME, sinks=sinks, sink_settings=settings
    ) as service:
        known = {sink.name: sink for sink in load_config(service.config).sinks}
        cases = [
            WebhookCase(
                case.batch,
                case.pause_ms,
                known[case.name].effective_partition_count,
                known[case.name].effective_batch_size,
            )
            for case in plain
        ]
        service.until("the slot", lambda: source.has_slot(service.slot), _TIMEOUT_S)
        for case in cases:
            _write(source, case, _WARM_UP_ROWS)
        for case in cases:
            _wait(service, endpoint, case, _WARM_UP_ROWS)
        service.until("the feed", lambda: _is_fed(source, service, cases[0]), _TIMEOUT_S)
        _wait(service, endpoint, cases[0], source.count(cases[0].table))
        yield service, cases


def _is_fed(source: BenchmarkSource, service: RunningService, case: WebhookCase) -> bool:
    """Whether Spark is up, so that the feed has brought a change; if not, there is one more."""
    if source.is_fed(service.name):
        return True
    _write(source, case, 1)
    time.sleep(_FED_S)
    return False


def _make_warm(
    source: BenchmarkSource,
    service: RunningService,
    endpoint: FastEndpoint,
    case: WebhookCase,
    rows: int,
) -> None:
    """Catch up on much, so that Spark's workers have started."""
    before = endpoint.count(case.name, case.pause_ms).messages
    with _suspended(service):
        _write(source, case, rows)
    _wait(service, endpoint, case, before + rows)


@contextmanager
def _suspended(service: RunningService) -> Iterator[None]:
    """The reader goes on at the end."""
    reader = service.reader()
    reader.suspend()
    try:
        yield
    finally:
        reader.resume()


def _measure(
    source: BenchmarkSource,
    service: RunningService,
    endpoint: FastEndpoint,
    case: WebhookCase,
    limit: float,
    sizes: Sizes,
) -> WebhookMeasured:
    """The ceiling, then the service, with as many rows as the ceiling takes ``sizes.seconds``."""
    bare = _bare_loop(endpoint, case, min(_CEILING_S, sizes.seconds))
    ceiling = min(bare, limit)
    rows = max(_ROWS_MIN, min(_ROWS_MAX, round(ceiling * sizes.seconds)))
    before = endpoint.count(case.name, case.pause_ms).messages
    with _suspended(service):
        _write(source, case, rows)
    started_s = time.time()
    with ProcessMeter(lambda: [*service.own_roles(), _endpoint_role(endpoint)]) as meter:
        _wait(service, endpoint, case, before + rows)
    count = endpoint.count(case.name, case.pause_ms)
    if count.messages != before + rows:
        raise ProtocolError(f"{case.name}: {count.messages - before} messages came of {rows}")
    # The endpoint counts a request before its pause, and it is delivered behind it.
    took_s = count.last_s + case.pause_ms / 1000 - started_s
    measured = WebhookMeasured(
        case, rows, rows / took_s, bare, ceiling, count.at_once, meter.figures()
    )
    progress(
        f"webhook, {case.name}: {measured.rows_per_s:,.0f} messages/s, ceiling {ceiling:,.0f}, "
        f"ratio {measured.ratio:.2f}"
    )
    return measured


def _endpoint_role(endpoint: FastEndpoint) -> tuple[str, psutil.Process]:
    return "endpoint", psutil.Process(endpoint.pid)


def _write(source: BenchmarkSource, case: WebhookCase, rows: int) -> None:
    table = sql.Identifier(case.table)
    source.connection.execute(_MORE.format(table=table), (rows,))


def _wait(
    service: RunningService, endpoint: FastEndpoint, case: WebhookCase, messages: int
) -> None:
    service.until(
        f"{messages} messages at {case.name}",
        lambda: endpoint.count(case.name, case.pause_ms).messages >= messages,
        _TIMEOUT_S,
    )


def _limit(source: BenchmarkSource, sizes: Sizes) -> float:
    """Rows per second that a bare loop drains from a slot: the upper bound of any sink."""
    source.create_slot(_BARE_LOOP)
    load = source.load(_LARGE_WARM_UP_ROWS, sizes.transaction_rows)
    limit = drain(source.postgres, _BARE_LOOP, load)
    source.drop_slot(_BARE_LOOP)
    progress(f"webhook: a bare psycopg loop {limit:,.0f} rows/s")
    return limit


def _bare_loop(endpoint: FastEndpoint, case: WebhookCase, seconds: float) -> float:
    """Messages a second that a bare loop over as many connections brings to the endpoint."""
    body = b'{"data":[' + b",".join([_MESSAGE] * case.messages_per_request) + b"]}"
    head = (
        f"POST {path('bare_' + case.name, case.pause_ms)} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    request = head.encode() + body
    counts = [0] * case.requests_at_once
    started_at = time.perf_counter()

    def post(number: int) -> None:
        with socket.create_connection(("127.0.0.1", endpoint.port), _TIME_OUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while time.perf_counter() - started_at < seconds:
                connection.sendall(request)
                if not connection.recv(4096):
                    return
                counts[number] += 1

    threads = [threading.Thread(target=post, args=(number,)) for number in range(len(counts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - started_at
    return sum(counts) * case.messages_per_request / took_s

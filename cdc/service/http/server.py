"""``/health`` and ``/metrics``: what SQL says, over HTTP, for probes and Prometheus.

Nothing is kept here: every request asks the state database, within a bound. The server runs in a
thread of the supervisor and ends with it.
"""

from __future__ import annotations

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psycopg
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from psycopg.rows import dict_row
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cdc.config import Config, Http
from cdc.connection import connect
from cdc.errors import OperatorError
from cdc.service.http.api.repairs import BeginRepair
from cdc.service.http.api.serve import Api
from cdc.service.http.backfill_metrics import backfill_metrics, read_backfills
from cdc.service.http.event_time_metrics import EventTimes, event_time_metrics, read_event_times
from cdc.service.http.live_metrics import live_metrics
from cdc.service.http.probes import Processes, Readiness, probe_routes
from cdc.service.http.process_metrics import process_metrics
from cdc.service.http.queue_metrics import queue_metrics, read_queues
from cdc.service.http.server_thread import ServerThread
from cdc.service.http.standby import STANDBY_METRIC, STANDBY_TEXT, standby_application
from cdc.state.pressure import DEFERRED
from cdc.state.reader_state import HeartbeatState

_logger = structlog.get_logger("walbrook.http")

_SOURCES = """
SELECT s.name AS source, s.state, s.state_since::text, s.last_error,
       (SELECT f.last_error FROM walbrook.feeds f WHERE f.source = s.name) AS feed_error, v.cursor,
       v.lag_bytes, v.lag_seconds, s.log_bytes, s.slot_wal_status, s.slot_safe_bytes,
       s.heartbeat_state,
       extract(epoch FROM clock_timestamp() - s.heartbeat_at)::float8 AS heartbeat_age_s,
       extract(epoch FROM clock_timestamp() - s.seen_at)::float8 AS seen_age_s,
       walbrook.reader_lag(s.current_at)::float8 AS reader_lag_s,
       p.level AS pressure_level, p.slots_busy AS delivery_slots_busy
  FROM walbrook.sources s JOIN walbrook.cursors v ON v.source = s.name AND v.consumer IS NULL
  LEFT JOIN walbrook.pressure p ON p.source = s.name
 WHERE %(sources)s::text[] IS NULL OR s.name = ANY (%(sources)s)
 ORDER BY 1
"""
# In event-time order a cursor stands at the oldest change that is held back, which is no fault:
# what counts is whether it reads on. And it is paused in all of its databases, or in none.
_CONSUMERS = """
SELECT c.source, c.name AS consumer, v.cursor, v.lag_bytes, v.lag_seconds, c.delivered,
       c.absorbed, walbrook.dead_ever(c) AS dead, c.last_error, v.moved_at::text,
       c.state, c.state_reason, c.breaker,
       CASE WHEN r.consumer IS NULL THEN c.paused_at
            ELSE (SELECT min(k.paused_at) FROM walbrook.consumers k
                   WHERE k.name = c.name AND k.active) END::text AS paused_at,
       CASE WHEN c.destination <> 'pull' THEN
            (SELECT count(*) FROM walbrook.events e WHERE e.consumer = c.id) END AS waiting,
       CASE WHEN c.destination = 'pull' THEN
            (SELECT count(*) FROM walbrook.pull_in_flight f
              WHERE f.consumer = c.id AND f.lease_id IS NOT NULL) END AS leased,
       (SELECT count(*) FROM walbrook.gaps g
         WHERE g.source = c.source AND g.consumer = c.name) AS gaps,
       CASE WHEN r.consumer IS NULL
            THEN (c.cursor_lsn, c.cursor_idx) < (s.log_lsn, s.log_idx) AND v.moved_at < w.since
                 AND c.state_reason IS DISTINCT FROM %(deferred)s
            ELSE (r.read_lsn, r.read_idx) < (s.log_lsn, s.log_idx)
                 AND t.moved_at < w.since END AS stuck
  FROM walbrook.consumers c
  JOIN walbrook.sources s ON s.name = c.source
  JOIN walbrook.cursors v ON v.source = c.source AND v.consumer = c.name
  LEFT JOIN walbrook.event_sources r ON r.consumer = c.id
  LEFT JOIN walbrook.event_time t ON t.consumer = c.name
 CROSS JOIN (SELECT clock_timestamp() - make_interval(secs => %(stuck_s)s) AS since) w
 WHERE %(sources)s::text[] IS NULL OR c.source = ANY (%(sources)s)
 ORDER BY 1, 2
"""

_EVENTS = """
SELECT source, consumer, kind, severity, what, fix, since::text, link FROM walbrook.health
 WHERE %(sources)s::text[] IS NULL OR source = ANY (%(sources)s)
"""
_STATES = """
SELECT source, consumer, health, since::text, kind, cause, remedy, link, open_events
  FROM walbrook.health_states
 WHERE %(sources)s::text[] IS NULL OR source = ANY (%(sources)s)
"""

Rows = list[dict[str, object]]

_STUCK_S = 30
_SILENT_S = 30  # a reader writes its row about every ten seconds
_BEHIND_S = 60
_HEALTH = ("ok", "warning", "error")


class Measured(Protocol):
    """Who knows where the processes leave what they have measured."""

    @property
    def metrics_directory(self) -> Path: ...

    def pids(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class HealthSnapshot:
    """What the state database says at one moment."""

    sources: Rows
    consumers: Rows
    events: Rows  # open ones, the newest first
    states: Rows  # one per source and per consumer
    event_times: EventTimes
    backfills: Rows
    queues: Rows

    def of_severity(self, severity: str) -> list[str]:
        """The open events of a severity, a sentence each; one of several sources is listed once."""
        listed = (
            f"{row['consumer'] or row['source']}: {row['what']}"
            for row in self.events
            if row["severity"] == severity
        )
        return list(dict.fromkeys(listed))


class HealthReader:
    """Reads sources and consumers from the state database, processes from the supervisor."""

    def __init__(
        self,
        state_dsn: str,
        supervisor: Processes,
        sources: Sequence[str] | None = None,
        *,
        started_at: float = -math.inf,
        measured: Measured | None = None,
    ) -> None:
        """``sources`` are those of this service: others may share its state database.

        ``started_at`` (monotonic): before that nothing could move. ``measured``: what processes
        say of themselves; without it only what SQL says is there.
        """
        self._measured = measured
        self._started_at = started_at
        self._dsn = state_dsn
        self._supervisor = supervisor
        self._sources = sources  # a list that its owner may change

    def complaints(self, sight: HealthSnapshot) -> list[str]:
        """What is not as it should be, a sentence each; none means well."""
        found = [
            f"{name} does not run" for name, up in self._supervisor.processes().items() if not up
        ]
        for row in sight.sources:
            found += _reader_complaints(row)
            if row["feed_error"] is not None:
                found.append(f"deliveries from {row['source']} stand still: {row['feed_error']}")
        for row in sight.consumers:
            if row["paused_at"] is not None:
                continue  # on purpose; an event of severity warning says so
            if row["last_error"] is not None:
                found.append(f"deliveries to {row['consumer']} fail")
            elif row["stuck"] and time.monotonic() - self._started_at >= _STUCK_S:
                found.append(f"{row['consumer']} is behind and has not moved for {_STUCK_S} s")
        # A consumer of several databases has a row for each.
        return list(dict.fromkeys([*found, *sight.of_severity("error")]))

    def starting(self) -> list[str]:
        """Who is not up yet, a sentence each; none once the service works."""
        return [f"{name} is starting" for name in self._supervisor.starting()]

    def read(self) -> HealthSnapshot:
        with connect(self._dsn, name="http", statement_s=3) as connection:
            rows = connection.cursor(row_factory=dict_row)
            sources = None if self._sources is None else list(self._sources)
            given = {"stuck_s": _STUCK_S, "deferred": DEFERRED, "sources": sources}
            return HealthSnapshot(
                sources=rows.execute(_SOURCES, given).fetchall(),
                consumers=rows.execute(_CONSUMERS, given).fetchall(),
                events=rows.execute(_EVENTS, given).fetchall(),
                states=rows.execute(_STATES, given).fetchall(),
                event_times=read_event_times(rows),
                backfills=read_backfills(rows),
                queues=read_queues(rows, sources),
            )

    def collect(self) -> Iterator[Metric]:
        """The metrics, as Prometheus' client asks for them."""
        sight = self.read()
        yield from self._process_metrics()
        yield from _source_metrics(sight.sources)
        yield from _consumer_metrics(sight.consumers)
        yield from event_time_metrics(sight.event_times)
        yield from backfill_metrics(sight.backfills)
        yield _event_metric(sight.events)
        yield _state_metric(sight.states)
        yield from queue_metrics(sight.queues)
        if self._measured is not None:
            yield from live_metrics(self._measured.metrics_directory)
            yield from process_metrics(self._measured.pids())

    def _process_metrics(self) -> Iterator[Metric]:
        running = GaugeMetricFamily(
            "walbrook_process_running", "1 while the process runs.", labels=["process"]
        )
        for name, alive in self._supervisor.processes().items():
            running.add_metric([name], float(alive))
        yield running
        yield GaugeMetricFamily(STANDBY_METRIC, STANDBY_TEXT, value=0)


def _reader_complaints(row: dict[str, object]) -> Iterator[str]:
    """Why a source is not being read, or not up to now."""
    reader = f"the reader of {row['source']}"
    if row["state"] != "streaming":
        why = f": {row['last_error']}" if row["last_error"] else ""
        yield f"{reader} is {row['state']}{why}"
    elif _is_silent(row):
        yield f"{reader} has reported nothing for {row['seen_age_s']:.0f} s: it may hang"
    elif isinstance(row["reader_lag_s"], float) and row["reader_lag_s"] > _BEHIND_S:
        yield (
            f"{reader} is {row['reader_lag_s']:.0f} s behind the server: a heartbeat of then has "
            "not come back through the slot"
        )


def _is_silent(row: dict[str, object]) -> bool:
    return isinstance(row["seen_age_s"], float) and row["seen_age_s"] > _SILENT_S


def _source_metrics(sources: Rows) -> Iterator[Metric]:
    yield _flag(
        "source_streaming",
        "1 while the reader streams.",
        sources,
        lambda row: row["state"] == "streaming" and not _is_silent(row),
    )
    yield _flag(
        "source_feed_failing",
        "1 while the feed of decoded changes cannot move.",
        sources,
        lambda row: row["feed_error"] is not None,
    )
    yield _gauge("source_lag_bytes", "WAL behind the restart cursor.", sources, "lag_bytes")
    yield _gauge("source_lag_seconds", "Age of what is settled.", sources, "lag_seconds")
    yield _gauge(
        "source_reader_lag_seconds",
        "How far the reader is behind the server; absent while that is not known.",
        sources,
        "reader_lag_s",
    )
    yield _gauge("source_log_bytes", "Size of the change log.", sources, "log_bytes")
    yield _gauge(
        "source_slot_safe_bytes",
        "WAL that may be written before the slot is in danger; absent without a limit.",
        sources,
        "slot_safe_bytes",
    )
    yield _gauge(
        "source_heartbeat_age_seconds",
        "Time since a heartbeat came back.",
        sources,
        "heartbeat_age_s",
    )
    yield _heartbeat_metric(sources)
    yield _gauge(
        "pressure_level",
        "0: none; 1: micro-batches are widened; 2: consumers are deferred.",
        sources,
        "pressure_level",
    )
    yield _gauge(
        "delivery_slots_busy",
        "Delivery slots that its consumers hold.",
        sources,
        "delivery_slots_busy",
    )


def _consumer_metrics(consumers: Rows) -> Iterator[Metric]:
    yield _gauge("consumer_lag_bytes", "WAL behind the cursor.", consumers, "lag_bytes")
    yield _gauge("consumer_lag_seconds", "Age of the state it has.", consumers, "lag_seconds")
    yield _counter("consumer_delivered", "Messages delivered.", consumers, "delivered")
    yield _counter("consumer_dead_letters", "Changes it went on without, ever.", consumers, "dead")
    yield _counter("consumer_gaps", "Times changes were given up.", consumers, "gaps")
    yield _counter("consumer_absorbed", "Repeats that the sink had.", consumers, "absorbed")
    yield _gauge("consumer_waiting", "Messages in its queue; push only.", consumers, "waiting")
    yield _gauge("consumer_leased", "Messages handed out; pull only.", consumers, "leased")
    yield _flag(
        "consumer_apart",
        "1 while it is not at the head of the log.",
        consumers,
        lambda row: row["state"] != "live",
    )
    yield _flag(
        "consumer_paused",
        "1 while an operator holds it back.",
        consumers,
        lambda row: row["paused_at"] is not None,
    )
    yield _flag(
        "consumer_failing",
        "1 while the last delivery failed.",
        consumers,
        lambda row: row["last_error"] is not None,
    )


def _event_metric(events: Rows) -> Metric:
    counts = Counter((str(e["source"]), str(e["kind"]), str(e["severity"])) for e in events)
    family = GaugeMetricFamily(
        "walbrook_health_events", "Open health events.", labels=["source", "kind", "severity"]
    )
    for labels, count in sorted(counts.items()):
        family.add_metric(labels, float(count))
    return family


def _state_metric(states: Rows) -> Metric:
    family = GaugeMetricFamily(
        "walbrook_health_state",
        "0: well; 1: a warning is open; 2: an error is. A source as a whole has no consumer.",
        labels=["source", "consumer"],
    )
    for row in states:
        value = _HEALTH.index(str(row["health"]))
        family.add_metric([str(row["source"]), str(row["consumer"] or "")], value)
    return family


def _heartbeat_metric(sources: Rows) -> Metric:
    family = GaugeMetricFamily(
        "walbrook_source_heartbeat_state",
        "1 for the state that the heartbeats of a source are in, 0 for the others.",
        labels=["source", "state"],
    )
    for row in sources:
        if row["heartbeat_state"] is not None:
            for state in HeartbeatState:
                value = float(row["heartbeat_state"] == state)
                family.add_metric([str(row["source"]), str(state)], value)
    return family


def application(
    observatory: HealthReader, api: Api | None = None, probes: Sequence[Route] = ()
) -> Starlette:
    """The routes; blocking work runs in Starlette's own threads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(observatory)

    def health(_request: Request) -> Response:
        try:
            sight = observatory.read()
        except psycopg.Error as error:
            return JSONResponse({"status": "down", "error": str(error).strip()}, 503)
        complaints = observatory.complaints(sight)
        starting = observatory.starting()
        status = "degraded" if complaints else "starting" if starting else "ok"
        body = {
            "status": status,
            "complaints": [*complaints, *starting],
            "warnings": sight.of_severity("warning"),
            "states": sight.states,
            "events": sight.events,
            "sources": sight.sources,
            "consumers": sight.consumers,
        }
        return JSONResponse(body, 200 if status == "ok" else 503)

    def metrics(_request: Request) -> Response:
        try:
            return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
        except psycopg.Error as error:
            return Response(f"# {str(error).strip()}\n", 503, media_type="text/plain")

    ours = [Route("/health", health), Route("/metrics", metrics), *probes]
    if api is None:
        return Starlette(routes=ours)
    return Starlette(routes=[*ours, *api.routes()], lifespan=api.lifespan)


def listen(settings: Http) -> socket.socket:
    """The socket of the server; a start asks for it before it changes anything in a database."""
    try:
        return socket.create_server((settings.host, settings.port))
    except OSError as error:
        raise OperatorError(
            f"service.http cannot listen on {settings.host}:{settings.port}: {error.strerror}",
            fix="choose another service.http.port, 0 for a free one, or set "
            "service.http.enabled to false",
        ) from error


class HttpServer(ServerThread):
    """The server in its thread; ``port`` is the one it listens on."""

    def __init__(
        self,
        settings: Http,
        state_dsn: str,
        supervisor: Processes,
        sources: Sequence[str] | None = None,
        *,
        listener: socket.socket | None = None,
        started_at: float = -math.inf,
        begin_repair: BeginRepair | None = None,
        measured: Measured | None = None,
        config: Callable[[], Config] | None = None,
    ) -> None:
        """``config`` says whose changes can be traced; without it none can be."""
        self._api = Api(settings, state_dsn, begin_repair, config)
        reader = HealthReader(
            state_dsn, supervisor, sources, started_at=started_at, measured=measured
        )
        probes = probe_routes(Readiness(state_dsn, supervisor, sources), supervisor)
        super().__init__(application(reader, self._api, probes), listener or listen(settings))

    def __enter__(self) -> HttpServer:
        super().__enter__()
        _logger.info("http.listening", port=self.port)
        return self

    def __exit__(self, *about: object) -> None:
        self._api.stop_waiting()
        super().__exit__(*about)


class StandbyServer(ServerThread):
    """Answers on the port of the service until the service takes it over."""

    def __init__(self, listener: socket.socket) -> None:
        """``listener`` stays open: what connects meanwhile is answered by the next server."""
        super().__init__(standby_application(), listener.dup())

    def __enter__(self) -> StandbyServer:
        super().__enter__()
        _logger.info("http.listening", port=self.port)
        return self


def _labels(row: dict[str, object]) -> list[str]:
    return [str(row[key]) for key in ("source", "consumer") if key in row]


def _flag(name: str, text: str, rows: Rows, on: Callable[[dict[str, object]], bool]) -> Metric:
    family = GaugeMetricFamily(f"walbrook_{name}", text, labels=_label_names(name))
    for row in rows:
        family.add_metric(_labels(row), float(on(row)))
    return family


def _label_names(name: str) -> list[str]:
    return ["source", "consumer"] if name.startswith("consumer") else ["source"]


def _gauge(name: str, help_text: str, rows: Rows, column: str) -> Metric:
    family = GaugeMetricFamily(f"walbrook_{name}", help_text, labels=_label_names(name))
    for row in rows:
        if row[column] is not None:
            family.add_metric(_labels(row), float(str(row[column])))
    return family


def _counter(name: str, help_text: str, rows: Rows, column: str) -> Metric:
    family = CounterMetricFamily(f"walbrook_{name}", help_text, labels=["source", "consumer"])
    for row in rows:
        family.add_metric(_labels(row), float(str(row[column])))
    return family

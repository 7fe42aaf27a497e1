"""What the other consumers notice when one of five sinks is down, and how that one comes back.

The service with two webhooks, a Redis stream, a Parquet folder and files, while rows are written at
a steady rate in small transactions. After a healthy time one webhook goes down: for half of the
outage its connections are refused, for the other half it takes requests and never answers. Then it
is up again. Latency is from the commit to the arrival, of every change at every sink, by when the
change was committed. Where the pipeline is saturated when all is well, the ratio says nothing: then
``backlog_grew`` is true.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import redis

from benchmarks.arrivals import (
    Destination,
    FileFollower,
    ParquetFolder,
    SeenChanges,
    StreamFollower,
)
from benchmarks.endpoint import Endpoint
from benchmarks.pgbench import Writing, writing
from benchmarks.processes import Figures, ProcessMeter
from benchmarks.service import RunningService
from benchmarks.sizes import Sizes, progress
from benchmarks.slot_watch import SlotWatch
from benchmarks.source import PUBLICATION, BenchmarkSource, open_source
from cdc.errors import ProtocolError
from demo.embedded_redis import EmbeddedRedis

DOWN = "hook_down"
"""The sink that goes down."""

_NAME, _STREAM = "outage", "stock"
_WARM_UP_S = 15
_START_TIMEOUT_S, _BACK_TIMEOUT_S, _ALL_TIMEOUT_S = 180.0, 900.0, 300.0
_WEBHOOK_BATCH = 1_000
_RUN_S = 24 * 3600  # the writer is stopped long before

_TABLE = "CREATE TABLE stock (id bigint PRIMARY KEY, version bigint NOT NULL, note text NOT NULL)"
# Each of the four connections has 25,000 keys of its own, so that none waits for another.
_SCRIPT = r"""
\set first random(0, 2499) * 10
INSERT INTO stock AS s
SELECT (:first + i) * 4 + :client_id, 1, 'counted in the long aisle, shelf ' || :first
  FROM generate_series(0, 9) i
    ON CONFLICT (id) DO UPDATE SET version = s.version + 1, note = excluded.note
"""
_TRANSACTION_ROWS = 10
_STATE = "SELECT state FROM walbrook.consumers WHERE source = %s AND name = %s"
_WRITTEN = "SELECT id, version FROM stock"
_FIRST = "INSERT INTO stock VALUES (-1, 1, 'the first')"
_STRAINED = """
SELECT (SELECT count(*) FROM walbrook.consumers WHERE state IS DISTINCT FROM 'live')
     + (SELECT count(*) FROM walbrook.pressure WHERE level > 0 OR latency_s > 2)
"""
_WRITERS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgbench'"
_TOTAL = "SELECT coalesce(sum(version), 0)::bigint FROM stock"


@dataclass(frozen=True)
class Phase:
    """A stretch of time, and what was used and held back in it."""

    since_s: float  # since 1970
    until_s: float
    processes: Figures
    slot: dict[str, float]

    @property
    def middle_s(self) -> float:
        return (self.since_s + self.until_s) / 2


class OutageRun:
    """The service, its five sinks and the writer, all at work."""

    def __init__(
        self,
        source: BenchmarkSource,
        service: RunningService,
        destinations: Mapping[str, Destination],
        others: Mapping[str, int],
    ) -> None:
        self.source, self.service = source, service
        self.destinations = destinations
        self._others = others

    def wait_delivering(self) -> None:
        """Until a first change has gone all the way."""
        progress("outage: starting the service")
        self.source.run(_FIRST)
        self.service.until(
            "a first change at every sink",
            lambda: all(each.count() for each in self.destinations.values()),
            _START_TIMEOUT_S,
        )

    def wait_warm(self) -> None:
        """For a while, until Spark's workers are warm and what waited for them is delivered."""
        progress("outage: warming up")
        self.pass_time(_WARM_UP_S)
        self.service.until(
            "a warm service; it may be that it cannot deliver as much as is written",
            lambda: not self._number(_STRAINED),
            _START_TIMEOUT_S,
        )

    @contextmanager
    def phase(self, name: str, into: dict[str, Phase]) -> Iterator[None]:
        """Measure what happens within."""
        progress(f"outage: {name}")
        since_s = time.time()
        with (
            ProcessMeter(self._roles) as meter,
            SlotWatch(self.source, self.service.slot) as slot,
        ):
            yield
            until_s = time.time()
        into[name] = Phase(since_s, until_s, meter.figures(), slot.figures())

    def pass_time(self, seconds: float) -> None:
        """With an eye on the service."""
        end = time.perf_counter() + seconds
        self.service.until("time to pass", lambda: time.perf_counter() >= end, seconds + 60)

    def wait_back(self) -> None:
        """Until the sink that was down has what the others have, and goes with them."""
        self.service.until(f"{DOWN} live", self._is_back, _BACK_TIMEOUT_S)

    def wait_all(self, writer: Writing) -> int:
        """Stop writing; until every sink has all of it. Returns how many changes that is."""
        writer.stop()
        self.service.until("the last commits", lambda: not self._number(_WRITERS), _START_TIMEOUT_S)
        written = self._number(_TOTAL)
        self.service.until(
            f"{written} changes at every sink",
            lambda: all(each.count() >= written for each in self.destinations.values()),
            _ALL_TIMEOUT_S,
        )
        return written

    def written(self) -> dict[int, int]:
        """The last version of each key."""
        rows = self.source.connection.execute(_WRITTEN).fetchall()
        return {int(str(key)): int(str(version)) for key, version in rows}

    def _is_back(self) -> bool:
        row = self.source.connection.execute(_STATE, (_NAME, DOWN)).fetchone()
        return row is not None and row[0] == "live"

    def _number(self, query: str) -> int:
        row = self.source.connection.execute(query.encode()).fetchone()
        assert row is not None
        return int(str(row[0]))

    def _roles(self) -> Iterator[tuple[str, psutil.Process]]:
        yield from self.service.roles()
        yield "benchmark", psutil.Process()
        for role, pid in self._others.items():
            yield role, psutil.Process(pid)


def run(sizes: Sizes) -> dict[str, object]:
    """Healthy for ``sizes.seconds``, one sink down for ``sizes.outage``, then back again."""
    phases: dict[str, Phase] = {}
    with tempfile.TemporaryDirectory(prefix="walbrook-outage-") as name, ExitStack() as last:
        down = last.enter_context(Endpoint())
        at_work = last.enter_context(_running(Path(name), down))
        at_work.wait_delivering()
        script = Path(name) / "stock.sql"
        script.write_text(_SCRIPT)
        per_s = max(1, sizes.rate // _TRANSACTION_ROWS)
        writer = last.enter_context(writing(at_work.source, script, per_s, f"--time={_RUN_S}"))
        at_work.wait_warm()
        with at_work.phase("healthy", phases):
            at_work.pass_time(sizes.seconds)
        with at_work.phase("outage", phases):
            down.become("refusing")
            at_work.pass_time(sizes.outage / 2)
            down.become("hanging")
            at_work.pass_time(sizes.outage / 2)
        with at_work.phase("return", phases):
            down.become("up")
            at_work.wait_back()
        with at_work.phase("after", phases):
            at_work.pass_time(sizes.seconds / 2)
        written = at_work.wait_all(writer)
        progress(f"outage: {written:,} changes are everywhere; looking at each")
        seen = {sink: each.seen() for sink, each in at_work.destinations.items()}
        versions = at_work.written()
        warnings, worker_failures = at_work.service.warnings(), at_work.service.worker_failures()
    flaws = {sink: each.flaws(versions) for sink, each in seen.items()}
    for sink, found in flaws.items():
        if found["lost"] or found["out_of_order"]:
            raise ProtocolError(
                f"{sink} has not had every change in order: {found}",
                fix="report this: a pipeline must neither lose changes nor their order",
            )
    sinks = {sink: _sink_figures(each, phases) for sink, each in seen.items()}
    return {
        "rate_asked": sizes.rate,
        "changes": written,
        "worst_ratio": max(each["ratio"] for sink, each in sinks.items() if sink != DOWN),
        "confirmed_stood_still_s_max": phases["outage"].slot["stood_still_s_max"],
        "catch_up_s": round(phases["return"].until_s - phases["return"].since_s, 1),
        "backlog_grew": _backlog_grew(seen, phases["healthy"]),
        "sinks": sinks,
        "flaws": flaws,
        "worker_failures": worker_failures,
        "warnings": warnings,
        "phases": {name: _phase_figures(each, seen) for name, each in phases.items()},
    }


@contextmanager
def _running(directory: Path, down: Endpoint) -> Iterator[OutageRun]:
    """A source, five destinations, and the service that serves them."""
    with ExitStack() as last:
        source = last.enter_context(open_source(directory / "postgres"))
        source.run(_TABLE)
        source.run(f"ALTER PUBLICATION {PUBLICATION} ADD TABLE stock")
        hook = last.enter_context(Endpoint())
        server = last.enter_context(EmbeddedRedis(directory / "redis"))
        client = last.enter_context(redis.Redis.from_url(server.url, protocol=2))
        assert server.pid is not None
        sinks: dict[str, dict[str, object]] = {
            DOWN: {"type": "webhook", "url": down.url},
            "hook": {"type": "webhook", "url": hook.url},
            "stream": {"type": "redis_stream", "url": server.url, "stream_key": _STREAM},
            "lake": {
                "type": "parquet",
                "columns": "json",
                "max_delay_ms": 0,
                "path": str(directory / "lake"),
            },
            "files": {"type": "file", "path": str(directory / "files")},
        }
        service = last.enter_context(
            RunningService(
                directory / "service",
                source,
                name=_NAME,
                sinks=sinks,
                sink_settings={key: {"batch_size": _WEBHOOK_BATCH} for key in (DOWN, "hook")},
                durability="fsync",
            )
        )
        service.until("the slot", lambda: source.has_slot(service.slot), _START_TIMEOUT_S)
        destinations: dict[str, Destination] = {
            DOWN: down,
            "hook": hook,
            "stream": last.enter_context(StreamFollower(client, _STREAM)),
            "lake": ParquetFolder(directory / "lake"),
            "files": last.enter_context(FileFollower(directory / "files")),
        }
        others = {"redis": server.pid, "endpoint_down": down.pid, "endpoint": hook.pid}
        yield OutageRun(source, service, destinations, others)


def _sink_figures(seen: SeenChanges, phases: Mapping[str, Phase]) -> dict[str, float]:
    """Latencies in each phase, and how much of the healthy one the other is."""
    figures: dict[str, float] = {}
    for name, phase in phases.items():
        latencies_ms = seen.latencies_ms(phase.since_s, phase.until_s)
        figures[f"p50_ms_{name}"] = _percentile(latencies_ms, 50)
        figures[f"p99_ms_{name}"] = _percentile(latencies_ms, 99)
        figures[f"max_ms_{name}"] = _percentile(latencies_ms, 100)
    figures["ratio"] = round(figures["p99_ms_outage"] / figures["p99_ms_healthy"], 2)
    return figures


def _phase_figures(phase: Phase, seen: Mapping[str, SeenChanges]) -> dict[str, object]:
    seconds = phase.until_s - phase.since_s
    changes = len(seen[DOWN].latencies_ms(phase.since_s, phase.until_s))
    return {
        "seconds": round(seconds, 1),
        "changes_per_s": round(changes / seconds),
        "slot": phase.slot,
        "cores": {
            role: round(figures["cpu_s"] / seconds, 3) for role, figures in phase.processes.items()
        },
        "processes": phase.processes,
    }


def _backlog_grew(seen: Mapping[str, SeenChanges], healthy: Phase) -> bool:
    """Whether latency rose all through the healthy time: more was written than can be delivered."""
    halves = (
        [each.latencies_ms(since_s, until_s) for each in seen.values()]
        for since_s, until_s in (
            (healthy.since_s, healthy.middle_s),
            (healthy.middle_s, healthy.until_s),
        )
    )
    first_ms, second_ms = (float(np.median(np.concatenate(half))) for half in halves)
    return second_ms > 2 * first_ms and second_ms > 1000


def _percentile(values: npt.NDArray[np.float64], percent: int) -> float:
    return round(float(np.percentile(values, percent)), 1) if len(values) else 0.0

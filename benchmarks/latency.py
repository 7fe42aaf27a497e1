"""How long a change takes from its commit to a client of the Redis stream, at steady rates.

Transactions at a fixed average rate (``pgbench``, several connections); a client reads the stream
and notes the time of each arrival. The commit's own time comes with the change, from the same
machine's clock. Latency is their difference, so the write of the WAL at commit is part of it.

One service delivers in commit order and is measured at three rates, another in the order of event
time at the first of them.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import orjson
import redis

from benchmarks.catch_up import (
    BenchmarkTarget,
    in_event_time,
    redis_target,
    roles,
    service_of,
    wait_delivering,
)
from benchmarks.pgbench import CONNECTIONS, writing
from benchmarks.processes import Figures, ProcessMeter, cpu_s
from benchmarks.service import OWN_ROLES
from benchmarks.sizes import Sizes, progress
from benchmarks.source import ONE_ROW, TEN_ROWS, BenchmarkSource, open_source
from cdc.errors import TransientError

_WARM_UP_S = 5
_GRACE_S = 60.0  # for the last change to arrive, and for a writer that cannot hold its rate
_BLOCK_MS = 500
_READ_MAX = 1_000

Arrivals = list[tuple[float, list[bytes]]]
"""When an answer came, and the metadata of each entry in it."""


@dataclass(frozen=True)
class LatencyLoad:
    """What is written: changes per second, and how many of them a transaction has."""

    rate: int
    seconds: int
    transaction_rows: int = 1

    @property
    def statement(self) -> str:
        return {1: ONE_ROW, 10: TEN_ROWS}[self.transaction_rows]


@dataclass(frozen=True)
class LatencyMeasured:
    """The latencies of one load, and what the processes used meanwhile."""

    load: LatencyLoad
    commits_s: npt.NDArray[np.float64]  # in order
    latencies_ms: npt.NDArray[np.float64]
    processes: Figures
    warnings: int

    def figures(self) -> dict[str, object]:
        span_s = float(self.commits_s[-1] - self.commits_s[0])
        return {
            "changes": len(self.commits_s),
            "rate": round((len(self.commits_s) - 1) / span_s, 1),
            "rate_asked": self.load.rate,
            "p50_ms": percentile(self.latencies_ms, 50),
            "p95_ms": percentile(self.latencies_ms, 95),
            "p99_ms": percentile(self.latencies_ms, 99),
            "max_ms": round(float(self.latencies_ms.max()), 1),
            "cpu_us_per_change": round(
                cpu_s(self.processes, OWN_ROLES) * 1e6 / len(self.commits_s)
            ),
        }


def run(sizes: Sizes) -> dict[str, object]:
    """Measure ``sizes.seconds`` at ``sizes.rate`` changes a second, then at the other rates."""
    asked = LatencyLoad(sizes.rate, sizes.seconds)
    slow = LatencyLoad(10, sizes.seconds)
    fast = LatencyLoad(10_000, sizes.seconds, transaction_rows=10)
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-latency-") as name,
        open_source(Path(name) / "postgres") as source,
        redis_target(Path(name)) as target,
    ):
        at_rate, at_10, at_10000 = _run(Path(name), source, target, [asked, slow, fast])
        by_time = in_event_time(replace(_other(target), name="event_time"))
        (in_order,) = _run(Path(name), source, by_time, [asked])
    return {
        **at_rate.figures(),
        **_named("rate_10_", at_10),
        **_named("rate_10000_", at_10000),
        **_named("event_time_", in_order),
        "warnings": at_10000.warnings + in_order.warnings,
        "processes": at_rate.processes,
    }


def _other(target: BenchmarkTarget) -> BenchmarkTarget:
    """The same server, another stream."""
    (sink,) = target.sinks.values()
    key = "orders_by_time"
    url = str(sink["url"])

    def length() -> int:
        with redis.Redis.from_url(url) as client:
            return int(str(client.xlen(key)))

    return replace(
        target,
        sinks={"by_time": {**sink, "stream_key": key}},
        arrived=length,
        held=lambda: [length()],
    )


def _run(
    directory: Path, source: BenchmarkSource, target: BenchmarkTarget, loads: list[LatencyLoad]
) -> list[LatencyMeasured]:
    """A service of its own, warm, at one load after the other."""
    (sink,) = target.sinks.values()
    stream = str(sink["stream_key"])
    measured: list[LatencyMeasured] = []
    with (
        service_of(directory, source, target) as service,
        redis.Redis.from_url(str(sink["url"]), protocol=2) as client,
    ):
        wait_delivering(source, service, target)
        script = directory / f"{target.name}.sql"
        warm_up = replace(loads[0], seconds=min(_WARM_UP_S, loads[0].seconds))
        arrivals_under(source, client, stream, script, warm_up)
        for load in loads:
            progress(f"latency, {target.name}: {load.rate} changes/s for {load.seconds} s")
            with ProcessMeter(lambda: roles(service, target)) as meter:
                arrivals = arrivals_under(source, client, stream, script, load)
            commits_s, latencies_ms = _latencies(arrivals)
            measured.append(
                LatencyMeasured(load, commits_s, latencies_ms, meter.figures(), service.warnings())
            )
    return measured


def arrivals_under(
    source: BenchmarkSource, client: redis.Redis, stream: str, script: Path, load: LatencyLoad
) -> Arrivals:
    """Write at the rate, and read until the last of these changes has arrived."""
    script.write_text(load.statement)
    last = cast("list[tuple[bytes, object]]", client.xrevrange(stream, count=1))
    transactions_per_s = max(1, load.rate // load.transaction_rows)
    each = max(1, transactions_per_s * load.seconds // CONNECTIONS)
    missing = each * CONNECTIONS * load.transaction_rows
    source.written += missing
    arrivals: Arrivals = []
    position = last[0][0]
    deadline = time.monotonic() + load.seconds + _GRACE_S
    with writing(source, script, transactions_per_s, f"--transactions={each}") as writer:
        while missing:
            answer = cast(Any, client.xread({stream: position}, count=_READ_MAX, block=_BLOCK_MS))
            arrived_at = time.time()
            for _, entries in answer:
                arrivals.append((arrived_at, [fields[b"metadata"] for _, fields in entries]))
                missing -= len(entries)
                position = entries[-1][0]
            if time.monotonic() > deadline:
                raise TransientError(f"{missing} changes had not arrived {_GRACE_S:g} s late")
        writer.wait(_GRACE_S)
    return arrivals


def _latencies(
    arrivals: Arrivals,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Commit times in order, in seconds, and the latency of each change in milliseconds."""
    commits, arrived = [], []
    for at, entries in arrivals:
        for metadata in entries:
            text = orjson.loads(metadata)["commit_timestamp"]
            commits.append(datetime.fromisoformat(text).timestamp())
            arrived.append(at)
    committed = np.array(commits)
    return np.sort(committed), (np.array(arrived) - committed) * 1000


def _named(prefix: str, measured: LatencyMeasured) -> dict[str, object]:
    return {f"{prefix}{name}": figure for name, figure in measured.figures().items()}


def percentile(values: npt.NDArray[np.float64], percent: int) -> float:
    return round(float(np.percentile(values, percent)), 1)

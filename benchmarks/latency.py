"""How long a change takes from its commit to a client of the Redis stream, at a steady rate.

Single-row transactions at a fixed average rate (``pgbench``, several connections); a client reads
the stream and notes the time of each arrival. The commit's own time comes with the change, from the
same machine's clock. Latency is their difference, so the write of the WAL at commit is part of it.
"""

from __future__ import annotations

import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import orjson
import redis

from benchmarks.catch_up import redis_target, roles, service_of, wait_delivering
from benchmarks.pgbench import CONNECTIONS, writing
from benchmarks.processes import ProcessMeter
from benchmarks.sizes import Sizes, progress
from benchmarks.source import ONE_ROW, Source, open_source
from cdc.errors import TransientError

_WARM_UP_S = 5
_GRACE_S = 60.0  # for the last change to arrive, and for a writer that cannot hold its rate
_BLOCK_MS = 500
_READ_MAX = 1_000

Arrivals = list[tuple[float, list[bytes]]]
"""When an answer came, and the metadata of each entry in it."""


def run(sizes: Sizes) -> dict[str, object]:
    """Warm up, then measure ``sizes.seconds`` at ``sizes.rate`` changes a second."""
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-latency-") as name,
        open_source(Path(name) / "postgres") as source,
        redis_target(Path(name)) as target,
        service_of(Path(name), source, target) as service,
        redis.Redis.from_url(str(target.sinks["redis"]["url"]), protocol=2) as client,
    ):
        stream = str(target.sinks["redis"]["stream_key"])
        script = Path(name) / "one_row.sql"
        script.write_text(ONE_ROW)
        wait_delivering(source, service, target)
        _measure(source, client, stream, script, sizes.rate, _WARM_UP_S)
        progress(f"latency: {sizes.rate} changes/s for {sizes.seconds} s")
        with ProcessMeter(lambda: roles(service, target)) as meter:
            arrivals = _measure(source, client, stream, script, sizes.rate, sizes.seconds)
        warnings = service.warnings()
    commits, latencies_ms = _latencies(arrivals)
    span_s = float(commits[-1] - commits[0])
    return {
        "changes": len(commits),
        "rate": round((len(commits) - 1) / span_s, 1),
        "rate_asked": sizes.rate,
        "p50_ms": _percentile(latencies_ms, 50),
        "p95_ms": _percentile(latencies_ms, 95),
        "p99_ms": _percentile(latencies_ms, 99),
        "max_ms": round(float(latencies_ms.max()), 1),
        "warnings": warnings,
        "processes": meter.figures(),
    }


def _measure(
    source: Source, client: redis.Redis, stream: str, script: Path, rate: int, seconds: int
) -> Arrivals:
    """Write at the rate, and read until the last of these changes has arrived."""
    last = cast("list[tuple[bytes, object]]", client.xrevrange(stream, count=1))
    each = max(1, rate * seconds // CONNECTIONS)
    missing = each * CONNECTIONS
    arrivals: Arrivals = []
    position = last[0][0]
    deadline = time.monotonic() + seconds + _GRACE_S
    with writing(source, script, rate, f"--transactions={each}") as writer:
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


def _percentile(values: npt.NDArray[np.float64], percent: int) -> float:
    return round(float(np.percentile(values, percent)), 1)

"""What applying a configuration costs the sinks that it does not concern, at a steady rate.

One sink, a Redis stream, is measured while changes are written. In every second stretch a second
sink is added, changed and removed by ``walbrook.apply_config``; in the stretches between them
nothing is applied. Latency is from the commit to the arrival at a client.
"""

from __future__ import annotations

import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson
import redis

from benchmarks.catch_up import redis_target, service_of, wait_delivering
from benchmarks.latency import Arrivals, LatencyLoad, arrivals_under, percentile
from benchmarks.service import RunningService
from benchmarks.sizes import Sizes, progress
from benchmarks.source import BenchmarkSource, open_source
from cdc.connection import Connection, connect
from cdc.errors import TransientError

_WARM_UP_S: Final = 5
_STRETCHES: Final = 8  # every second one with changes of the configuration
_APPLY: Final = "SELECT walbrook.apply_config()"
_ANSWER: Final = "SELECT state, result FROM walbrook.config_answer(%s, wait => '20 s')"


@dataclass
class _Applied:
    """Stretches of time, in seconds since 1970, and how long each apply took."""

    quiet: list[tuple[float, float]] = field(default_factory=list)
    changing: list[tuple[float, float]] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)


def run(sizes: Sizes) -> dict[str, object]:
    """``sizes.seconds`` are those of all stretches together."""
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-live-config-") as name,
        open_source(Path(name) / "postgres") as source,
        redis_target(Path(name)) as target,
        service_of(Path(name), source, target) as service,
    ):
        wait_delivering(source, service, target)
        (sink,) = target.sinks.values()
        stream, script = str(sink["stream_key"]), Path(name) / "live.sql"
        load = LatencyLoad(sizes.rate, sizes.seconds)
        with redis.Redis.from_url(str(sink["url"]), protocol=2) as client:
            warm_up = LatencyLoad(sizes.rate, min(_WARM_UP_S, sizes.seconds))
            script.write_text(load.statement)
            arrivals_under(source, client, stream, script, warm_up)
            applied = _Applied()
            changes = threading.Thread(
                target=_change, args=(source, service, Path(name), sizes.seconds, applied)
            )
            progress(f"live_config: {load.rate} changes/s for {load.seconds} s")
            changes.start()
            arrivals = arrivals_under(source, client, stream, script, load)
            changes.join()
        return {"rate": sizes.rate, "warnings": service.warnings(), **_figures(arrivals, applied)}


def _change(
    source: BenchmarkSource,
    service: RunningService,
    directory: Path,
    seconds: int,
    applied: _Applied,
) -> None:
    """A quiet stretch and one with changes, in turns."""
    alone = service.config.read_bytes()
    forms = [_with_sink(alone, directory, batch) for batch in (100, 200)] + [alone]
    stretch_s = seconds / _STRETCHES
    with connect(source.postgres.dsn, name="benchmark") as state:
        for number in range(_STRETCHES):
            began = time.time()
            if number % 2:
                for form in forms:
                    next_at = time.monotonic() + stretch_s / len(forms)
                    service.config.write_bytes(form)
                    applied.took_s.append(_apply(state))
                    time.sleep(max(0.0, next_at - time.monotonic()))
            else:
                time.sleep(stretch_s)
            stretches = applied.changing if number % 2 else applied.quiet
            stretches.append((began, time.time()))


def _apply(state: Connection) -> float:
    began = time.monotonic()
    ((request,),) = state.execute(_APPLY).fetchall()
    ((outcome, result),) = state.execute(_ANSWER, (request,)).fetchall()
    if outcome != "done":
        raise TransientError(f"the configuration was not applied: {outcome}: {result}")
    return time.monotonic() - began


def _with_sink(config: bytes, directory: Path, batch_size: int) -> bytes:
    """The configuration with one more sink."""
    settings = orjson.loads(config)
    destination = {"type": "file", "path": str(directory / "second")}
    settings["sinks"].append(
        {"name": "second", "batch_size": batch_size, "destination": destination}
    )
    return orjson.dumps(settings)


def _figures(arrivals: Arrivals, applied: _Applied) -> dict[str, object]:
    committed, arrived = [], []
    for at, entries in arrivals:
        for metadata in entries:
            text = orjson.loads(metadata)["commit_timestamp"]
            committed.append(datetime.fromisoformat(text).timestamp())
            arrived.append(at)
    times, latencies = np.array(committed), (np.array(arrived) - np.array(committed)) * 1000
    quiet = latencies[_within(times, applied.quiet)]
    changing = latencies[_within(times, applied.changing)]
    by_stretch = [_by_stretch(times, latencies, each) for each in (applied.quiet, applied.changing)]
    quiet_p99_ms, changing_p99_ms = (float(np.median(each)) for each in by_stretch)
    return {
        "applies": len(applied.took_s),
        "apply_s": round(float(np.median(applied.took_s)), 2),
        "quiet_changes": len(quiet),
        "quiet_p50_ms": percentile(quiet, 50),
        "quiet_p99_ms": percentile(quiet, 99),
        "changing_changes": len(changing),
        "changing_p50_ms": percentile(changing, 50),
        "changing_p99_ms": percentile(changing, 99),
        "p99_ratio": round(changing_p99_ms / quiet_p99_ms, 2),
        "quiet_p99_ms_by_stretch": by_stretch[0],
        "changing_p99_ms_by_stretch": by_stretch[1],
    }


def _within(
    times: npt.NDArray[np.float64], stretches: list[tuple[float, float]]
) -> npt.NDArray[np.bool_]:
    found = np.zeros(len(times), bool)
    for since, until in stretches:
        found |= (times >= since) & (times < until)
    return found


def _by_stretch(
    times: npt.NDArray[np.float64],
    latencies: npt.NDArray[np.float64],
    stretches: list[tuple[float, float]],
) -> list[float]:
    found = (latencies[_within(times, [each])] for each in stretches)
    return [percentile(each, 99) for each in found if len(each)]

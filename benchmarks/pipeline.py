"""How fast the whole way catches up, into a Redis stream and into Parquet.

The service runs and is warm: it has caught up on smaller loads. Its reader is suspended while the
rows are written and resumed at the start of the measurement, so that, as for ``pg_recvlogical``,
all of the rows are still to be read: a server decodes what a waiting reader will want even before
the commit. The end is when the sink holds the last row. The yardstick reads the same rows from a
slot of its own, after the service has stopped.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import redis

from benchmarks.processes import Figures, ProcessMeter
from benchmarks.recvlogical import receive
from benchmarks.service import RunningService
from benchmarks.sizes import Sizes, progress
from benchmarks.source import Load, Source, open_source
from cdc.errors import ProtocolError
from cdc.service.embedded_redis import EmbeddedRedis

_WARM_UP_ROWS, _WARM_UPS = 100_000, 2
_START_TIMEOUT_S = 180.0
_TIMEOUT_S = 900.0
_REFERENCE = "reference"
_STREAM = "orders"


@dataclass(frozen=True)
class Target:
    """Where changes go, how many can be seen there, and which processes serve it."""

    name: str
    destination: Mapping[str, object]
    arrived: Callable[[], int]
    held: Callable[[], int]
    processes: Mapping[str, int]


@dataclass(frozen=True)
class CatchUp:
    """One measurement."""

    rows_per_s: float
    recvlogical_rows_per_s: float
    load_s: float
    warnings: int
    processes: Figures


def run(sizes: Sizes) -> dict[str, object]:
    """Both targets, one after the other, on one source."""
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-pipeline-") as directory,
        open_source(Path(directory) / "postgres") as source,
    ):
        with redis_target(Path(directory)) as target:
            stream = _catch_up(Path(directory), source, target, sizes)
        parquet = _catch_up(Path(directory), source, _parquet_target(directory, source), sizes)
    # The better of two runs of the yardstick: a busy moment must not flatter us.
    reference = max(stream.recvlogical_rows_per_s, parquet.recvlogical_rows_per_s)
    return {
        "rows": sizes.rows,
        "transaction_rows": sizes.transaction_rows,
        "rows_per_s_redis": round(stream.rows_per_s),
        "rows_per_s_parquet": round(parquet.rows_per_s),
        "recvlogical_rows_per_s": round(reference),
        "pipeline_ratio_redis": round(stream.rows_per_s / reference, 3),
        "pipeline_ratio_parquet": round(parquet.rows_per_s / reference, 3),
        "load_s": {"redis": round(stream.load_s, 1), "parquet": round(parquet.load_s, 1)},
        "warnings": {"redis": stream.warnings, "parquet": parquet.warnings},
        "rounds": {
            "recvlogical_rows_per_s": [
                round(stream.recvlogical_rows_per_s),
                round(parquet.recvlogical_rows_per_s),
            ]
        },
        "processes": {"redis": stream.processes, "parquet": parquet.processes},
    }


@contextmanager
def redis_target(directory: Path) -> Iterator[Target]:
    """A stream on a server of its own."""
    with EmbeddedRedis(directory / "redis") as server, redis.Redis.from_url(server.url) as client:
        assert server.pid is not None

        def length() -> int:
            return int(str(client.xlen(_STREAM)))

        destination = {"type": "redis_stream", "url": server.url, "stream_key": _STREAM}
        yield Target("redis", destination, length, length, {"redis": server.pid})


def _parquet_target(directory: str, source: Source) -> Target:
    folder = Path(directory) / "lake"

    def held() -> int:
        files = folder.glob("table=*/**/*.parquet")
        return sum(int(pq.read_metadata(file).num_rows) for file in files)

    destination = {"type": "parquet", "path": str(folder)}
    return Target("parquet", destination, lambda: source.delivered("parquet"), held, {})


def _catch_up(directory: Path, source: Source, target: Target, sizes: Sizes) -> CatchUp:
    before = source.written
    service = RunningService(
        directory / f"service_{target.name}",
        source,
        name=target.name,
        destination=target.destination,
    )
    with service:
        wait_delivering(source, service, target)
        _warm_up(source, service, target, sizes)
        source.create_slot(_REFERENCE)
        load, load_s = _load_while_suspended(source, service, sizes)
        started_at = time.perf_counter()
        expected = source.written - before
        with ProcessMeter(lambda: roles(service, target)) as meter:
            ended_at = service.until(
                f"{expected - 1} rows in {target.name}",
                lambda: target.arrived() >= expected - 1,
                _TIMEOUT_S,
            )
        rate = load.rows / (ended_at - started_at)
        progress(f"pipeline: {target.name} {rate:,.0f} rows/s")
    if (held := target.held()) != expected:
        raise ProtocolError(
            f"{target.name} holds {held} rows where {expected} were written",
            fix="report this: the figures of a pipeline that loses or repeats rows mean nothing",
        )
    reference = receive(source.postgres, _REFERENCE, load)
    progress(f"pipeline: pg_recvlogical {reference:,.0f} rows/s")
    source.drop_slot(_REFERENCE)
    source.drop_slot(service.slot)
    return CatchUp(rate, reference, load_s, service.warnings(), meter.figures())


def wait_delivering(source: Source, service: RunningService, target: Target) -> None:
    """Until a first change has gone all the way."""
    progress(f"{target.name}: starting the service")
    service.until("the slot", lambda: source.has_slot(service.slot), _START_TIMEOUT_S)
    before = target.arrived()
    source.load(1, 1)
    service.until(
        f"a first row in {target.name}", lambda: target.arrived() > before + 1, _START_TIMEOUT_S
    )


def _warm_up(source: Source, service: RunningService, target: Target, sizes: Sizes) -> None:
    """Catch up on less, more than once: small micro-batches leave Spark's workers cold."""
    less = replace(sizes, rows=_WARM_UP_ROWS)
    behind = source.written - target.arrived()  # what was there before this service
    for _ in range(_WARM_UPS):
        _load_while_suspended(source, service, less)
        service.until(
            f"the warm-up in {target.name}",
            lambda: target.arrived() >= source.written - behind,
            _START_TIMEOUT_S,
        )


def roles(service: RunningService, target: Target) -> Iterator[tuple[str, psutil.Process]]:
    """Every process that has a part in it."""
    yield from service.roles()
    for role, pid in target.processes.items():
        yield role, psutil.Process(pid)


def _load_while_suspended(
    source: Source, service: RunningService, sizes: Sizes
) -> tuple[Load, float]:
    """Write the rows; the reader goes on when this returns."""
    reader = service.reader()
    reader.suspend()
    started_at = time.perf_counter()
    try:
        progress(f"{service.name}: writing {sizes.rows:,} rows")
        load = source.load(sizes.rows, sizes.transaction_rows)
        return load, time.perf_counter() - started_at
    finally:
        reader.resume()

"""The service catching up on rows that were written while its reader was suspended.

It runs and is warm: it has caught up on smaller loads. Its reader is suspended while the rows are
written and resumed at the start of the measurement, so that all of them are still to be read: a
server decodes what a waiting reader will want even before the commit. The end is when the last row
is where it should be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import redis
from confluent_kafka import Consumer, TopicPartition

from benchmarks.processes import Figures, ProcessMeter
from benchmarks.service import RunningService
from benchmarks.sizes import Sizes, progress
from benchmarks.source import BenchmarkSource, WrittenRows
from cdc.errors import ProtocolError
from demo.embedded_postgres import EmbeddedPostgres
from demo.embedded_redis import EmbeddedRedis
from sinks.kafka.topics import NewTopics, create_topics
from tests.kafka_broker import KafkaBroker

_WARM_UP_ROWS, _WARM_UPS = 100_000, 2
_START_TIMEOUT_S = 180.0
_FED_S = 0.2
_TIMEOUT_S = 900.0
_STREAM = "orders"
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class BenchmarkTarget:
    """Where changes go, how many can be seen there, and which processes serve it."""

    name: str
    sinks: Mapping[str, Mapping[str, object]]
    arrived: Callable[[], int]  # what every sink has
    held: Callable[[], Sequence[int]]  # the same of each, counted where the rows lie
    processes: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # of some sinks
    is_fed: bool = True  # whether its sinks take changes from the feed


@dataclass(frozen=True)
class CaughtUp:
    """One measurement."""

    load: WrittenRows
    load_s: float
    seconds: float
    expected: int  # rows that each sink must hold now
    processes: Figures

    @property
    def rows_per_s(self) -> float:
        return self.load.rows / self.seconds


@contextmanager
def redis_target(directory: Path) -> Iterator[BenchmarkTarget]:
    """A stream on a server of its own."""
    with EmbeddedRedis(directory / "redis") as server, redis.Redis.from_url(server.url) as client:
        assert server.pid is not None

        def length() -> int:
            return int(str(client.xlen(_STREAM)))

        sink = {"type": "redis_stream", "url": server.url, "stream_key": _STREAM}
        yield BenchmarkTarget(
            "redis", {"redis": sink}, length, lambda: [length()], {"redis": server.pid}
        )


@contextmanager
def kafka_target(directory: Path) -> Iterator[BenchmarkTarget]:
    """A topic with one partition on a broker of its own."""
    with KafkaBroker(directory / "kafka") as broker:
        reader = Consumer({"bootstrap.servers": broker.servers, "group.id": "benchmark"})

        def length() -> int:
            _, end = reader.get_watermark_offsets(TopicPartition(_STREAM, 0), timeout=10)
            return int(end)

        sink = {
            "type": "kafka",
            "bootstrap_servers": [broker.servers],
            "topic": _STREAM,
            "create_topics": {"partitions": 1},
        }
        create_topics({"bootstrap.servers": broker.servers}, [_STREAM], NewTopics(1, 1), 30)
        yield BenchmarkTarget(
            "kafka", {"kafka": sink}, length, lambda: [length()], {"kafka": broker.pid}
        )
        reader.close()


def file_target(
    directory: Path, source: BenchmarkSource, name: str, sinks: int = 1
) -> BenchmarkTarget:
    """As many folders of lines, each with a sink of its own."""
    folders = {f"{name}_{number}": directory / name / str(number) for number in range(sinks)}
    destinations = {sink: {"type": "file", "path": str(folder)} for sink, folder in folders.items()}
    return BenchmarkTarget(
        name,
        destinations,
        lambda: source.delivered(name),
        lambda: [_lines(folder) for folder in folders.values()],
    )


def in_event_time(target: BenchmarkTarget) -> BenchmarkTarget:
    """The same in the order of the rows' own times, with no tolerance."""
    order = {"ordering": "event_time", "event_time": {"column": "created_at"}}
    return replace(target, settings=dict.fromkeys(target.sinks, order))


def parquet_target(
    directory: Path, source: BenchmarkSource, name: str, sinks: int = 1
) -> BenchmarkTarget:
    """As many folders, each with a sink of its own."""
    folders = {f"{name}_{number}": directory / name / str(number) for number in range(sinks)}

    def held() -> list[int]:
        return [
            sum(pq.read_metadata(file).num_rows for file in folder.glob("table=*/**/*.parquet"))
            for folder in folders.values()
        ]

    destinations = {
        sink: {"type": "parquet", "columns": "json", "max_delay_ms": 0, "path": str(folder)}
        for sink, folder in folders.items()
    }
    return BenchmarkTarget(name, destinations, lambda: source.delivered(name), held)


@contextmanager
def postgres_target(
    directory: Path, source: BenchmarkSource, name: str
) -> Iterator[BenchmarkTarget]:
    """Tables on a server of its own: else the source would decode what the destination writes."""
    with EmbeddedPostgres(directory / f"destination_{name}") as server:
        sink = {"type": "postgres", "url": server.url}
        yield BenchmarkTarget(name, {name: sink}, lambda: source.delivered(name), list)


def service_of(directory: Path, source: BenchmarkSource, target: BenchmarkTarget) -> RunningService:
    """A service that is called as its target is, not started yet."""
    return RunningService(
        directory / f"service_{target.name}",
        source,
        name=target.name,
        sinks=target.sinks,
        sink_settings=target.settings,
    )


def make_warm(
    source: BenchmarkSource, service: RunningService, target: BenchmarkTarget, sizes: Sizes
) -> None:
    """Catch up on less, more than once: small micro-batches leave Spark's workers cold."""
    wait_delivering(source, service, target)
    less = replace(sizes, rows=min(_WARM_UP_ROWS, sizes.rows))
    for _ in range(_WARM_UPS):
        _load_while_suspended(source, service, less)
        wait_arrived(service, target)


def wait_delivering(
    source: BenchmarkSource, service: RunningService, target: BenchmarkTarget
) -> None:
    """Until a first change has gone all the way, and Spark is up: before, there is no feed."""
    progress(f"{target.name}: starting the service")
    service.until("the slot", lambda: source.has_slot(service.slot), _START_TIMEOUT_S)
    source.load(1, 1)
    wait_arrived(service, target)
    if target.is_fed:
        service.until("the feed", lambda: _is_fed(source, service), _START_TIMEOUT_S)
        wait_arrived(service, target)


def _is_fed(source: BenchmarkSource, service: RunningService) -> bool:
    """Whether the feed has brought a change; if not, there is one more for it."""
    if source.is_fed(service.name):
        return True
    source.load(1, 1)
    time.sleep(_FED_S)
    return False


def wait_arrived(service: RunningService, target: BenchmarkTarget) -> None:
    """Until every sink has all that was written."""
    service.until(
        f"{service.expected} rows in {target.name}",
        lambda: target.arrived() >= service.expected,
        _START_TIMEOUT_S,
    )


def catch_up(
    source: BenchmarkSource, service: RunningService, target: BenchmarkTarget, sizes: Sizes
) -> CaughtUp:
    """Write the rows while the reader is suspended, then measure."""
    load, load_s = _load_while_suspended(source, service, sizes)
    started_at = time.perf_counter()
    expected = service.expected
    with ProcessMeter(lambda: roles(service, target)) as meter:
        ended_at = service.until(
            f"{expected - 1} rows in {target.name}",
            lambda: target.arrived() >= expected - 1,
            _TIMEOUT_S,
        )
    return CaughtUp(load, load_s, ended_at - started_at, expected, meter.figures())


def require_whole(target: BenchmarkTarget, caught_up: CaughtUp) -> None:
    """Once the service has stopped: figures of one that loses or repeats rows mean nothing."""
    for held in target.held():
        if held != caught_up.expected:
            raise ProtocolError(
                f"{target.name} holds {held} rows where {caught_up.expected} were written",
                fix="report this: a pipeline must neither lose nor repeat rows",
            )


def _lines(folder: Path) -> int:
    """How many lines the files of a folder have, counted in pieces."""
    total = 0
    for path in folder.glob("changes-*.jsonl"):
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                total += piece.count(b"\n")
    return total


def roles(service: RunningService, target: BenchmarkTarget) -> Iterator[tuple[str, psutil.Process]]:
    """Every process that has a part in it."""
    yield from service.roles()
    for role, pid in target.processes.items():
        yield role, psutil.Process(pid)


def _load_while_suspended(
    source: BenchmarkSource, service: RunningService, sizes: Sizes
) -> tuple[WrittenRows, float]:
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
